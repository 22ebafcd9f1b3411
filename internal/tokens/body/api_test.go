package body

import "testing"

func TestDetect(t *testing.T) {
	for _, c := range []struct {
		method, path string
		api          API
		idle         bool
	}{
		{"POST", "/v1/chat/completions", Chat, false},
		{"POST", "/openai/v1/chat/completions?api-version=1", Chat, false},
		{"POST", "/v1/chat/completions/render", Chat, true},
		{"POST", "/v1/completions", Completions, false},
		{"POST", "/v1/completions/render", Completions, true},
		{"POST", "/v1/responses", Responses, false},
		{"POST", "/v1/embeddings", Embeddings, false},
		{"POST", "/v1/messages", Messages, false},
		{"POST", "/v1/messages/count_tokens", CountTokens, true},
		{"POST", "/generate", Generate, false},
		{"PUT", "/generate", Generate, false},
		{"POST", "/api/generate", Unknown, false},
		{"POST", "/%67enerate", Generate, false},
		{"POST", "/%zz/generate", Generate, false},
		{"PUT", "/v1/completions", Unknown, false},
		{"POST", "/inference/v1/generate", VLLMGenerate, false},
		{"POST", "/tokenize", Tokenize, true},
		{"POST", "/v1/tokenize", Tokenize, true},
		{"GET", "/v1/chat/completions", Unknown, false},
		{"POST", "/v1/files", Unknown, false},
		{"POST", "/v1/audio/transcriptions", Audio, false},
		{"POST", "/v1/audio/speech", Audio, false},
		{"GET", "/v1/realtime?model=m", Realtime, false},
		{"POST", "/v1/realtime", Unknown, false},
		{"GET", "/v1/models", Models, false},
		{"GET", "/v1/models/org/demo", Models, false},
		{"GET", "/v1/models/", Unknown, false},
		{"POST", "/v1/models", Unknown, false},
		{"POST", "/classify", Classify, false},
		{"POST", "/v1/classify", Classify, false},
		{"POST", "/pooling", Pooling, false},
		{"POST", "/v1/score", Score, false},
		{"POST", "/v2/rerank", Rerank, false},
		{"POST", "/v1/batches", Unknown, false},
		{"POST", "", Unknown, false},
	} {
		if api, idle := Detect(c.method, c.path); api != c.api || idle != c.idle {
			t.Errorf("%s %s: %v idle=%v, want %v %v", c.method, c.path, api, idle, c.api, c.idle)
		}
	}
}
