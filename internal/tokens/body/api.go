package body

import (
	"net/url"
	"strings"
)

// API identifies the request family. The zero value (Unknown) makes Kvlane pass the request through unparsed.
type API uint8

// The request families, each with its usual path.
const (
	Unknown      API = iota
	Chat             // /v1/chat/completions
	Completions      // /v1/completions
	Responses        // /v1/responses
	Embeddings       // /v1/embeddings
	Messages         // /v1/messages (Anthropic)
	CountTokens      // /v1/messages/count_tokens (Anthropic)
	Generate         // /generate (SGLang)
	VLLMGenerate     // /inference/v1/generate (vLLM)
	Tokenize         // /tokenize, /v1/tokenize
	Models           // GET /v1/models, /v1/models/NAME
	Classify         // /classify
	Pooling          // /pooling
	Score            // /score
	Rerank           // /rerank
	Audio            // /v1/audio/...
	Realtime         // GET /v1/realtime, a WebSocket
)

var apiNames = [...]string{"unknown", "chat", "completions", "responses", "embeddings", "messages", "count_tokens", "generate",
	"vllm_generate", "tokenize", "models", "classify", "pooling", "score", "rerank", "audio", "realtime"}

// String returns a short, stable name for metrics and logs.
func (a API) String() string {
	if int(a) < len(apiNames) {
		return apiNames[a]
	}
	return apiNames[Unknown]
}

// A suffix precedes every shorter suffix that it ends with.
var suffixes = []struct {
	suffix string
	api    API
}{
	{"/v1/chat/completions", Chat},
	{"/v1/completions", Completions},
	{"/v1/responses", Responses},
	{"/v1/embeddings", Embeddings},
	{"/v1/messages/count_tokens", CountTokens},
	{"/v1/messages", Messages},
	{"/inference/v1/generate", VLLMGenerate},
	{"/api/generate", Unknown}, // Ollama's, of SGLang
	{"/generate", Generate},
	{"/tokenize", Tokenize},
	{"/classify", Classify},
	{"/pooling", Pooling},
	{"/score", Score},
	{"/rerank", Rerank},
	{"/v1/audio/transcriptions", Audio},
	{"/v1/audio/translations", Audio},
	{"/v1/audio/speech", Audio},
}

// Read reports whether the API's body is read as a prompt.
func (a API) Read() bool { return a != Unknown && a != Audio && a != Realtime && a != Models }

// Pools reports whether the API's requests compute a prompt and generate nothing.
func (a API) Pools() bool { return a == Embeddings || a == Classify || a == Pooling }

// ListedModel returns NAME of a path that has /v1/models/NAME, "" for others. NAME may contain slashes.
func ListedModel(path string) string {
	path, _, _ = strings.Cut(path, "?")
	_, name, _ := strings.Cut(path, "/v1/models/")
	if plain, err := url.PathUnescape(name); err == nil {
		return plain
	}
	return name
}

// StoredResponse returns ID of a path that has /v1/responses/ID, "" for others.
func StoredResponse(path string) string {
	path, _, _ = strings.Cut(path, "?")
	if plain, err := url.PathUnescape(path); err == nil {
		path = plain
	}
	_, id, _ := strings.Cut(path, "/v1/responses/")
	id, _, _ = strings.Cut(id, "/")
	return id
}

// Detect identifies the API by method and path suffix, so gateways may add a path prefix. It ignores the query. idle
// reports a request that computes no KV blocks: it only builds the prompt (such as /v1/chat/completions/render) or
// counts it. All other paths, such as files and audio, are Unknown. For its own API, SGLang also accepts PUT.
func Detect(method, path string) (api API, idle bool) {
	path, _, _ = strings.Cut(path, "?")
	if method == "GET" && (strings.HasSuffix(path, "/v1/models") || ListedModel(path) != "") {
		return Models, false
	}
	if method == "GET" && strings.HasSuffix(path, "/v1/realtime") {
		return Realtime, false
	}
	if method != "POST" && method != "PUT" {
		return Unknown, false
	}
	if strings.IndexByte(path, '%') >= 0 { // engines decode the path before they match it
		if plain, err := url.PathUnescape(path); err == nil {
			path = plain
		}
	}
	if cut, ok := strings.CutSuffix(path, "/render"); ok {
		path, idle = cut, true
	}
	for i := range suffixes {
		if strings.HasSuffix(path, suffixes[i].suffix) {
			if method == "PUT" && suffixes[i].api != Generate {
				return Unknown, false
			}
			return suffixes[i].api, idle || suffixes[i].api == Tokenize || suffixes[i].api == CountTokens
		}
	}
	return Unknown, false
}
