// Package shape computes the token ids that an engine will compute for a request body.
//
// A Model holds the tokenizer, the chat template and the engine flags of one served model. Engines pass different input to the
// template. A profile (profile.go) is the table of one engine's rules, which vllm.go, sglang.go and trtllm.go implement. The
// rules come from recordings of stock engines (vLLM 0.32.0, SGLang 0.5.23) and, for TensorRT-LLM, from its sources.
//
// A request is refused only if the engine could not build its prompt: messages or tools in a form that the engine does
// not accept, a template that raises, a prompt that does not fit. Other fields are left for the engine to check.
//
//	m, err := shape.Load(os.DirFS(dir), shape.Options{})
//	req, err := body.Parse(body.Chat, raw)
//	res, err := m.Prompt(req, shape.VLLM)
//	var refusal *shape.Refusal
//	if errors.As(err, &refusal) { ... } // the engine would answer refusal.Status
//
// Ids are exact or absent. Result.Partial is set if only the front of the prompt is known, for
// example because an image follows. A Checker compares the ids with the engine's own.
package shape
