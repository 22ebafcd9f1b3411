package shape

import (
	"testing"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// TestCacheUse compares requests that bound the use of the cache with similar ones for which the engine reads its cache.
func TestCacheUse(t *testing.T) {
	reads := func(n int64) CacheUse { return CacheUse{Reads: n} }
	entire, unread := reads(EntireCache), CacheUse{NotLoaded: true}
	for _, c := range []struct {
		engine Engine
		api    body.API
		more   string
		want   CacheUse
	}{
		{VLLM, body.Completions, ``, entire},
		{VLLM, body.Completions, `,"prompt_logprobs":null`, entire},
		{VLLM, body.Completions, `,"prompt_logprobs":0`, unread},
		{VLLM, body.Completions, `,"prompt_logprobs":3`, unread},
		{VLLM, body.Completions, `,"prompt_logprobs":-1`, unread},
		{VLLM, body.Completions, `,"prompt_logprobs":3,"prompt_logprobs":null`, entire},
		{VLLM, body.Completions, `,"prompt_\u006cogprobs":3`, unread},
		{VLLM, body.Completions, `,"logprobs":3`, entire},
		{VLLM, body.Completions, `,"echo":true`, entire},
		{VLLM, body.Completions, `,"echo":true,"logprobs":null`, entire},
		{VLLM, body.Completions, `,"echo":false,"logprobs":3`, entire},
		{VLLM, body.Completions, `,"echo":null,"logprobs":3`, entire},
		{VLLM, body.Completions, `,"echo":true,"logprobs":0`, unread},
		{VLLM, body.Completions, `,"echo":"yes","logprobs":3`, unread},
		{VLLM, body.Completions, `,"prompt_logprobs":3,"use_beam_search":true`, entire},
		{VLLM, body.Completions, `,"prompt_logprobs":3,"use_beam_search":false`, unread},
		{VLLM, body.Completions, `,"return_logprob":true,"logprob_start_len":0,"return_hidden_states":true`, entire},
		{VLLM, body.Chat, ``, entire},
		{VLLM, body.Chat, `,"prompt_logprobs":null`, entire},
		{VLLM, body.Chat, `,"prompt_logprobs":0`, unread},
		{VLLM, body.Chat, `,"prompt_logprobs":3`, unread},
		{VLLM, body.Chat, `,"logprobs":true,"top_logprobs":3`, entire},
		{VLLM, body.Chat, `,"echo":false,"logprobs":true,"top_logprobs":3`, entire},
		{VLLM, body.Chat, `,"echo":true,"logprobs":true,"top_logprobs":3`, unread},
		{VLLM, body.Chat, `,"echo":true`, unread},
		{VLLM, body.Chat, `,"echo":true,"top_logprobs":null`, unread},
		{VLLM, body.Chat, `,"echo":true,"use_beam_search":true`, entire},
		{VLLM, body.VLLMGenerate, ``, entire},
		{VLLM, body.VLLMGenerate, `,"prompt_logprobs":3`, entire},
		{VLLM, body.VLLMGenerate, `,"sampling_params":{"logprobs":3,"prompt_logprobs":null}`, entire},
		{VLLM, body.VLLMGenerate, `,"sampling_params":{"prompt_logprobs":0}`, unread},
		{VLLM, body.VLLMGenerate, `,"sampling_params":{"prompt_logprob_token_ids":[[1]]}`, unread},
		{VLLM, body.VLLMGenerate, `,"sampling_params":{"skip_reading_prefix_cache":true}`, unread},
		{VLLM, body.VLLMGenerate, `,"sampling_params":{"skip_reading_prefix_cache":null,"prompt_logprobs":1}`, unread},
		{VLLM, body.VLLMGenerate, `,"sampling_params":{"skip_reading_prefix_cache":false,"prompt_logprobs":1}`, entire},
		{VLLM, body.Responses, `,"prompt_logprobs":3,"echo":true,"top_logprobs":3`, entire},
		{VLLM, body.Messages, `,"prompt_logprobs":3,"echo":true`, entire},
		{VLLM, body.Embeddings, `,"prompt_logprobs":3,"embed_overrides":[[[1]]]`, entire},
		{VLLM, body.Classify, ``, entire},
		{VLLM, body.Pooling, ``, unread},
		{VLLM, body.Pooling, `,"task":"token_embed"`, unread},
		{VLLM, body.Pooling, `,"task":"plugin"`, unread},
		{VLLM, body.Pooling, `,"task":"embed"`, entire},
		{VLLM, body.Pooling, `,"task":"classify"`, entire},
		{SGLang, body.Pooling, ``, entire},
		{SGLang, body.Completions, `,"prompt_logprobs":3`, entire},
		{SGLang, body.Completions, `,"echo":true`, entire},
		{SGLang, body.Completions, `,"logprobs":3`, entire},
		{SGLang, body.Completions, `,"echo":true,"logprobs":0`, entire},
		{SGLang, body.Completions, `,"echo":true,"logprobs":null`, entire},
		{SGLang, body.Completions, `,"echo":true,"logprobs":1`, reads(0)},
		{SGLang, body.Completions, `,"return_hidden_states":true,"return_logprob":true,"logprob_start_len":0`, entire},
		{SGLang, body.Chat, `,"echo":true,"logprobs":true,"top_logprobs":3,"logprob_start_len":0`, entire},
		{SGLang, body.Generate, ``, entire},
		{SGLang, body.Generate, `,"return_logprob":true`, entire},
		{SGLang, body.Generate, `,"return_logprob":true,"logprob_start_len":-1`, entire},
		{SGLang, body.Generate, `,"return_logprob":true,"logprob_start_len":null`, entire},
		{SGLang, body.Generate, `,"logprob_start_len":0`, entire},
		{SGLang, body.Generate, `,"return_logprob":false,"logprob_start_len":0`, entire},
		{SGLang, body.Generate, `,"return_logprob":true,"logprob_start_len":0`, reads(0)},
		{SGLang, body.Generate, `,"return_logprob":true,"logprob_start_len":100`, reads(100)},
		{SGLang, body.Generate, `,"return_logprob":[true,false],"logprob_start_len":[7,0]`, reads(7)},
		{SGLang, body.Generate, `,"return_logprob":[false,true],"logprob_start_len":0`, entire},
		{SGLang, body.Generate, `,"return_logprob":[],"logprob_start_len":[]`, entire},
		{SGLang, body.Generate, `,"return_hidden_states":true,"return_routed_experts":true,"token_ids_logprob":[1]`, entire},
		{SGLang, body.Embeddings, `,"embed_overrides":null`, entire},
		{SGLang, body.Embeddings, `,"embed_overrides":[null,[[1]]]`, entire},
		{SGLang, body.Embeddings, `,"embed_override_token_id":1,"embed_overrides":[[[1]]]`, CacheUse{NotStored: true}},
		{TRTLLM, body.Completions, `,"echo":true,"logprobs":3,"prompt_logprobs":3`, entire},
	} {
		r, err := body.Parse(c.api, []byte(`{"model":"m","temperature":0`+c.more+`}`))
		if err != nil {
			t.Fatal(err)
		}
		if got := c.engine.CacheUse(r); got != c.want {
			t.Errorf("%s %s %s: got %+v, want %+v", c.engine, c.api, c.more, got, c.want)
		}
	}
}
