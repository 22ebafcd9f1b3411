package shape

import (
	"math"
	"slices"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// CacheUse is how an engine uses its prefix cache for a request.
type CacheUse struct {
	// Reads bounds the prompt tokens that the engine takes from its cache. With 0 it computes the whole prompt;
	// EntireCache means no bound.
	Reads int64
	// NotLoaded reports that a decode engine does not load blocks computed elsewhere either.
	NotLoaded bool
	// NotStored reports that the computed blocks are not cached.
	NotStored bool
}

// EntireCache is the CacheUse.Reads of requests without a bound.
const EntireCache = math.MaxInt64

// CacheUse returns how the engine uses its prefix cache for a request. Of a batch, the first prompt counts.
func (e Engine) CacheUse(r *body.Request) CacheUse {
	for _, rule := range e.profile().cacheRules {
		if rule.api != r.API {
			continue
		}
		if use, ok := rule.use(r); ok {
			return use
		}
	}
	return CacheUse{Reads: EntireCache}
}

// cacheRule describes requests for which an engine reads less than it has cached, because it computes no logits, and so
// no logprobs, for cached tokens.
type cacheRule struct {
	api body.API
	// use reports false if the rule does not apply to the request.
	use func(r *body.Request) (CacheUse, bool)
}

// vllmCacheRules are the rules of vLLM 0.32. SamplingParams.__post_init__ (vllm/sampling_params.py) sets
// skip_reading_prefix_cache, unless the request does, if there are prompt_logprobs (0 included) or
// prompt_logprob_token_ids. Then KVCacheManager.get_computed_blocks (v1/core/kv_cache_manager.py) returns no block, and
// Scheduler.schedule (v1/core/sched/scheduler.py) ignores what the KV connector found. allocate_slots ignores it: the
// prompt is cached. PoolingParams sets it too, for the tasks token_embed, token_classify and plugin: /v1/embeddings and
// /classify have other tasks, which read the cache. The requests for responses and messages have no such field.
var vllmCacheRules = []cacheRule{
	// CompletionRequest.to_sampling_params (entrypoints/openai/completion/protocol.py): with echo, logprobs are prompt_logprobs.
	{body.Completions, func(r *body.Request) (CacheUse, bool) {
		return vllmUnread, !beams(r) && (r.Has(body.FieldPromptLogprobs) || isTrue(r, body.FieldEcho) && r.Has(body.FieldLogprobs))
	}},
	// ChatCompletionRequest.to_sampling_params (entrypoints/openai/chat_completion/protocol.py):
	// with echo, top_logprobs are prompt_logprobs, whether or not there are logprobs. Their default
	// is 0, also for null (TopLogprobsParam, entrypoints/generate/base/protocol.py).
	{body.Chat, func(r *body.Request) (CacheUse, bool) {
		return vllmUnread, !beams(r) && (r.Has(body.FieldPromptLogprobs) || isTrue(r, body.FieldEcho))
	}},
	// GenerateRequest (entrypoints/scale_out/token_in_token_out/protocol.py): the sampling_params are the engine's own.
	{body.VLLMGenerate, func(r *body.Request) (CacheUse, bool) {
		if skip := r.Member(body.FieldSamplingParams, "skip_reading_prefix_cache"); given(skip) {
			yes, _ := laxBool(skip)
			return vllmUnread, yes
		}
		return vllmUnread, given(r.Member(body.FieldSamplingParams, "prompt_logprobs")) ||
			given(r.Member(body.FieldSamplingParams, "prompt_logprob_token_ids"))
	}},
	// PoolingParams.verify (vllm/pooling_params.py). A request without a task gets the model's, which usually pools each token.
	{body.Pooling, func(r *body.Request) (CacheUse, bool) {
		task := body.Text(r.Get("task"))
		return vllmUnread, task != "embed" && task != "classify"
	}},
}

// sglangCacheRules are the rules of SGLang 0.5.23. Req._compute_max_prefix_len (managers/schedule_batch.py) bounds the
// cached prefix by logprob_start_len, which Scheduler._handle_generate_request (managers/scheduler.py) ignores if it is
// negative or without return_logprob. The prompt is cached, and transferred between prefill and decode. Chats and
// responses set it to -1 (entrypoints/openai/serving_chat.py, serving_responses.py), hidden states and routed experts
// do not bound the prefix, and input_embeds are refused where there is a prefix cache.
var sglangCacheRules = []cacheRule{
	// OpenAIServingCompletion._convert_to_internal_request (entrypoints/openai/
	// serving_completions.py): 0 with echo and logprobs other than 0.
	{body.Completions, func(r *body.Request) (CacheUse, bool) {
		n, ok := laxInt(r.Raw(body.FieldLogprobs))
		return CacheUse{}, ok && n != 0 && isTrue(r, body.FieldEcho)
	}},
	// GenerateReqInput._normalize_logprob_params (managers/io_struct.py): each is a value or a list with one per prompt.
	{body.Generate, func(r *body.Request) (CacheUse, bool) {
		wanted, _ := laxBool(body.FirstItem(r.Raw(body.FieldReturnLogprob)))
		n, ok := laxInt(body.FirstItem(r.Raw(body.FieldLogprobStartLen)))
		return CacheUse{Reads: n}, wanted && ok && n >= 0
	}},
	// Req.init_next_round_input and Req.skip_radix_cache_insert (managers/schedule_batch.py): a prompt with overridden
	// embeddings is neither matched nor cached. A list has one entry per prompt, which may be null.
	{body.Embeddings, func(r *body.Request) (CacheUse, bool) {
		return CacheUse{NotStored: true}, given(body.FirstItem(r.Raw(body.FieldEmbedOverrides)))
	}},
}

var vllmUnread = CacheUse{NotLoaded: true}

// beams reports whether vLLM searches with beams: its prompts get sampling parameters of their own
// (entrypoints/generate/beam_search/online.py), without prompt_logprobs.
func beams(r *body.Request) bool { return isTrue(r, body.FieldUseBeamSearch) }

// isTrue reports whether a field is true, as engines read booleans.
func isTrue(r *body.Request, f body.Field) bool {
	yes, _ := laxBool(r.Raw(f))
	return yes
}

// salted are the APIs in which every version of an engine reads cache_salt, saltedLately others in which vLLM 0.32
// does.
var (
	salted = map[string][]body.API{
		VLLM.String():   {body.Chat, body.Completions, body.Responses, body.Embeddings, body.Classify, body.Pooling, body.VLLMGenerate},
		SGLang.String(): {body.Chat, body.Completions, body.Responses, body.Generate},
		TRTLLM.String(): {body.Chat},
	}
	saltedLately = []body.API{body.Messages, body.Score, body.Rerank}
)

// ReadsSalt reports whether an engine reads cache_salt in requests of an API, and whether every version of it does.
func ReadsSalt(engine string, api body.API) (reads, always bool) {
	always = slices.Contains(salted[engine], api)
	return always || engine == VLLM.String() && slices.Contains(saltedLately, api), always
}
