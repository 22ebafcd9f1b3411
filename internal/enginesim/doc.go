// Package enginesim is an LLM engine without a GPU: it answers the HTTP APIs of vLLM, SGLang or TensorRT-LLM, keeps a
// paged KV cache with least-recently-used eviction for each data-parallel rank, publishes KV events as that engine
// does, and takes the time that a step model gives it.
//
// It is the other side of the router: it imports nothing of Kvlane. It has a tokenizer, a chat renderer, block hashes
// and a ZMTP wire of its own, so that an agreement between the two is an agreement between two readings of the
// engines' formats and not one mistake made once.
//
//	tok, err := enginesim.LoadTokenizer(os.DirFS("internal/models/qwen3"))
//	eng, err := enginesim.Start(ctx, enginesim.Options{Engine: enginesim.VLLM, Model: "demo", Ranks: 2, Tokenizer: tok})
//	defer eng.Close()
//	http.Get(eng.URL() + "/v1/models")
//
// Two HTTP endpoints exist that no engine has: GET /sim/stats tells what every rank saw, with the SHA-256 of each
// request body, and POST /sim/faults changes the faults.
package enginesim
