package body

import (
	"net/url"
	"strings"
)

// API is the family of a request. The zero value means that Kvlane passes the request through unparsed.
type API uint8

// The request families, named by their usual path.
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
)

var apiNames = [...]string{"unknown", "chat", "completions", "responses", "embeddings", "messages", "count_tokens", "generate",
	"vllm_generate", "tokenize"}

// String is a short stable name for metrics and logs.
func (a API) String() string {
	if int(a) < len(apiNames) {
		return apiNames[a]
	}
	return apiNames[Unknown]
}

// Longer suffixes stand before the ones that end them.
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
	{"/generate", Generate},
	{"/tokenize", Tokenize},
}

// Detect names the API by method and path suffix, so that gateways may prefix the path. A query is ignored. render is
// true for the variants that only build the prompt (/v1/chat/completions/render and its like). Everything else, files
// and audio for instance, is Unknown. SGLang takes PUT for its own API too.
func Detect(method, path string) (api API, render bool) {
	if method != "POST" && method != "PUT" {
		return Unknown, false
	}
	path, _, _ = strings.Cut(path, "?")
	if strings.IndexByte(path, '%') >= 0 { // engines decode it before they match it
		if plain, err := url.PathUnescape(path); err == nil {
			path = plain
		}
	}
	if cut, ok := strings.CutSuffix(path, "/render"); ok {
		path, render = cut, true
	}
	for i := range suffixes {
		if strings.HasSuffix(path, suffixes[i].suffix) {
			if method == "PUT" && suffixes[i].api != Generate {
				return Unknown, false
			}
			return suffixes[i].api, render
		}
	}
	return Unknown, false
}
