// Package model turns the body of a request into the token ids that an engine will compute for it.
//
// A Model is what one served model needs: its tokenizer, its chat template, and how the engine was started. What an engine
// puts into the template, and what it refuses, differs by engine: see vllm.go, sglang.go and trtllm.go. The rules there come
// from recordings of stock engines (vLLM 0.32.0, SGLang 0.5.23) and, for TensorRT-LLM, from its documentation.
//
//	m, err := model.Load(os.DirFS(dir), model.Options{})
//	req, err := prompt.Parse(prompt.Chat, body)
//	res, err := m.Prompt(req, model.VLLM)
//	var refusal *model.Refusal
//	if errors.As(err, &refusal) { ... } // the engine would answer refusal.Status
//
// The ids are exact or there are none: where only the front of the prompt can be known (an image follows), Result.Partial
// says so. Nothing here is trusted blindly: a Checker compares with the engine itself.
package model
