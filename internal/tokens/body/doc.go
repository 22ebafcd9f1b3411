// Package body reads and edits the bodies of LLM requests without decoding them.
//
// A body is checked and measured in one pass over its bytes. What Kvlane needs (the model, the
// prompt's form, the positions of its parts) is kept as offsets into the caller's buffer; nothing
// is turned into maps, and no byte is copied unless it has to be unescaped:
//
//	api, _ := body.Detect("POST", "/v1/chat/completions")
//	req, err := body.Parse(api, raw) // *SyntaxError names the byte and the JSON path
//	model := req.Model()
//	for _, m := range req.Elements { _ = m.Of(req.Body) }
//
// Edits change only the bytes of their own field: everything else (key order inside tool schemas,
// number spelling, white space) reaches the engine as the client wrote it:
//
//	out, err := body.Apply(nil, raw, body.Set([]byte("true"), "stream"), body.Delete("stream_options"))
//
// The package knows nothing about tokens, templates or HTTP servers.
package body
