package body

// Field is a top-level field of a request body that Kvlane uses. All APIs share one list: a name has the same meaning in each.
type Field uint8

// The fields, named after their JSON keys.
const (
	FieldModel Field = iota
	FieldMessages
	FieldPrompt
	FieldPromptEmbeds
	FieldInput
	FieldText
	FieldInputIDs
	FieldInputEmbeds
	FieldTokenIDs
	FieldSystem
	FieldInstructions
	FieldTools
	FieldToolChoice
	FieldDocuments
	FieldChatTemplate
	FieldChatTemplateKwargs
	FieldAddGenerationPrompt
	FieldContinueFinalMessage
	FieldAddSpecialTokens
	FieldTruncatePromptTokens
	FieldTruncationSide
	FieldReasoningEffort
	FieldReasoning
	FieldFeatures
	FieldContentParts
	FieldMMHashes
	FieldMMContentHashes
	FieldSessionParams
	FieldSessionID
	FieldRoutingKey
	FieldStream
	FieldStreamOptions
	FieldMaxTokens
	FieldMaxCompletionTokens
	FieldMaxOutputTokens
	FieldN
	FieldBestOf
	FieldSamplingParams
	FieldCacheSalt
	FieldExtraKey
	FieldLoraPath
	FieldKVTransferParams
	FieldDisaggregatedParams
	FieldConversation
	FieldPreviousResponseID
	FieldVLLMXArgs
	FieldBootstrapRoom
	FieldRoutedDPRank
	FieldDataParallelRank
	FieldECTransferParams
	FieldRequestID
	FieldBootstrapHost
	FieldBootstrapPort
	FieldDisaggPrefillDPRank
	FieldBootstrapPairKey
	FieldDecodeTPSize
	FieldHTTPWorkerIPC
	FieldEncoderURLs
	FieldNeedWaitForMMInputs
	FieldNumItemsAssigned
	FieldKVHints
	FieldRID
	FieldEcho
	FieldLogprobs
	FieldPromptLogprobs
	FieldUseBeamSearch
	FieldReturnLogprob
	FieldLogprobStartLen
	FieldEmbedOverrides
	FieldMinTokens
	FieldMinCompletionTokens
	FieldStore
	FieldBackground
	FieldParallelToolCalls
	FieldTopLogprobs
	FieldStopTokenIDs
	FieldLabelTokenIDs
	FieldTokenIDsLogprob
	FieldQuery
	FieldItems
	FieldTopLogprobsNum
	FieldTopK
	numFields
)

var fieldNames = [numFields]string{"model", "messages", "prompt", "prompt_embeds", "input", "text", "input_ids", "input_embeds", "token_ids",
	"system", "instructions", "tools", "tool_choice", "documents", "chat_template", "chat_template_kwargs", "add_generation_prompt",
	"continue_final_message", "add_special_tokens", "truncate_prompt_tokens", "truncation_side", "reasoning_effort", "reasoning", "features", "content_parts", "mm_hashes", "mm_content_hashes", "session_params", "session_id", "routing_key", "stream",
	"stream_options", "max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of", "sampling_params", "cache_salt", "extra_key",
	"lora_path", "kv_transfer_params", "disaggregated_params", "conversation", "previous_response_id", "vllm_xargs", "bootstrap_room", "routed_dp_rank",
	"data_parallel_rank", "ec_transfer_params", "request_id", "bootstrap_host", "bootstrap_port", "disagg_prefill_dp_rank", "bootstrap_pair_key",
	"decode_tp_size", "http_worker_ipc", "encoder_urls", "need_wait_for_mm_inputs", "num_items_assigned", "kv_hints", "rid", "echo", "logprobs",
	"prompt_logprobs", "use_beam_search", "return_logprob", "logprob_start_len", "embed_overrides",
	"min_tokens", "min_completion_tokens", "store", "background", "parallel_tool_calls", "top_logprobs",
	"stop_token_ids", "label_token_ids", "token_ids_logprob", "query", "items", "top_logprobs_num", "top_k"}

var fieldByName = func() map[string]Field {
	m := make(map[string]Field, numFields)
	for f, name := range fieldNames {
		m[name] = Field(f)
	}
	return m
}()

// String returns the field's JSON key.
func (f Field) String() string {
	if f < numFields {
		return fieldNames[f]
	}
	return "unknown"
}

// fieldOf returns the field of a key as written, including its quotes.
func fieldOf(key []byte) (Field, bool) {
	var room [roomForKey]byte
	text, _ := textWithin(len(room), room[:0], key)
	f, ok := fieldByName[string(text)]
	return f, ok
}
