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
// Some endpoints exist that no engine has: GET /sim/stats tells what every rank saw, with the SHA-256 of each request
// body, and POST /sim/faults changes the faults; POST /sim/restart, /sim/disconnect and /sim/reset act at once. They are
// served beside the API and on the side listener, which stays when the API refuses connections.
//
// What is not played: cache tiers below the device, hybrid models with several block groups, speculative decoding,
// preemption for want of blocks (a request is admitted only when all its blocks fit), stop words, log probabilities.
// TensorRT-LLM's block hashes are opaque numbers, not its own function; its ZMQ stream carries vLLM's event layout. The
// digests of blocks with an adapter or salt differ from vLLM's, whose encoding of them depends on the version. Blocks
// move between prefill and decode engines as HTTP requests between side listeners; the requests that a router sends
// carry the fields of the played protocol.
package enginesim
