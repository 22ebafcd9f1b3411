// Package shape turns the body of a request into the token ids that an engine will compute for it.
//
// A Model is what one served model needs: its tokenizer, its chat template, and how the engine was started. What an engine
// puts into the template differs by engine: a profile (profile.go) is a table of what one engine does differently, and vllm.go,
// sglang.go and trtllm.go hold the functions. Their rules come from recordings of stock engines (vLLM 0.32.0, SGLang 0.5.23)
// and, for TensorRT-LLM, from its sources.
//
// A request is refused only where its prompt cannot be made as the engine makes it: a shape of messages or tools that the
// engine does not take, a template that raises, a prompt that does not fit. Other fields are not checked; the engine does that.
//
//	m, err := shape.Load(os.DirFS(dir), shape.Options{})
//	req, err := body.Parse(body.Chat, raw)
//	res, err := m.Prompt(req, shape.VLLM)
//	var refusal *shape.Refusal
//	if errors.As(err, &refusal) { ... } // the engine would answer refusal.Status
//
// The ids are exact or there are none: Result.Partial is set if only the front of the prompt can be known (an image follows).
// A Checker compares the ids with the engine's own.
package shape
