// Package enginesim is an LLM engine without a GPU: it answers the HTTP APIs of vLLM, SGLang or TensorRT-LLM, keeps a
// paged KV cache with least-recently-used eviction for each data-parallel rank, publishes KV events as that engine
// does, and takes the time that a step model gives it.
//
// Block hashes, events, their ZMTP wire and the prefill/decode protocols are implemented
// independently of Kvlane, so that both cannot agree by sharing a mistake. Prompts and
// their ids are Kvlane's own: recordings of real engines check those (the tests of package truth).
//
//	tok, err := enginesim.LoadTokenizer(os.DirFS("internal/tokens/models/qwen3"))
//	eng, err := enginesim.Start(ctx, enginesim.Options{Engine: enginesim.VLLM, Model: "demo", Ranks: 2, Tokenizer: tok})
//	defer eng.Close()
//	http.Get(eng.URL() + "/v1/models")
//
// Some endpoints exist only here: GET /sim/stats returns what every rank received, with the SHA-256 of each request
// body; POST /sim/faults sets the faults; POST /sim/restart, /sim/disconnect and /sim/reset act immediately. They are
// served on the API's port and on the side listener, which stays up when the API refuses connections.
//
// Not simulated: cache tiers below the device, hybrid models with several block groups, speculative decoding,
// preemption for lack of blocks (a request is admitted only when all its blocks fit), stop words, log probabilities.
// Block hashes are chained as in engines, but by a function of the simulator's own: readers of events must treat them as
// opaque. The ZMQ stream of TensorRT-LLM carries vLLM's event layout. Blocks move between prefill and decode engines as HTTP requests
// between side listeners; the requests that a router sends carry the fields of the simulated protocol.
package enginesim
