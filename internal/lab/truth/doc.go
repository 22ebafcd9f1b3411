// Package truth holds no code: its tests compare Kvlane with recordings of real engines: the token
// ids of the prompts, and the cached tokens that the index predicts from the engine's KV events.
//
// There are two kinds of recordings, both gzip JSON lines. In chat_ENGINE[_tools]_TOKENIZER_PART.jsonl.gz each line is
// a request with the ids, or the refusal, that the engine answered on up to three of its endpoints. A time line holds
// everything that happened to an engine, in order of arrival: "meta", "http" (an exchange, placed where its answer
// arrived), "event" (the frames that a SUB socket received from a source), "replay" and "note". The ids of time lines
// are compared if they are named vllm_NN_… or sglang_NN_…, which were recorded with Qwen3's tokenizer.
//
// The report has a line for each recording, one for each difference, and ends with one line of totals.
package truth
