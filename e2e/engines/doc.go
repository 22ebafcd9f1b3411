// Package engines tests Kvlane and the real Envoy in front of real engines: stock vLLM and SGLang on a machine without a
// GPU, with a tiny random model around the Qwen3 tokenizer. `make e2e-vllm` and `make e2e-sglang` install the engines
// (install.sh, pinned by the lock files) and run the tests, which are skipped without them.
//
// serve.py turns into an engine, record.py makes recordings of one, and the command truth compares Kvlane with recordings.
package engines
