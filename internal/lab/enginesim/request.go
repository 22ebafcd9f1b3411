package enginesim

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
)

// requestBody has every field that some engine reads from some request.
type requestBody struct {
	Model            string          `json:"model"`
	AddSpecialTokens *bool           `json:"add_special_tokens"`
	Prompt           json.RawMessage `json:"prompt"`
	PromptTokenIDs   json.RawMessage `json:"prompt_token_ids"`
	Text             json.RawMessage `json:"text"`      // SGLang /generate
	InputIDs         json.RawMessage `json:"input_ids"` // SGLang /generate and chat
	SamplingParams   struct {
		MaxNewTokens *int `json:"max_new_tokens"`
		MaxTokens    *int `json:"max_tokens"`
	} `json:"sampling_params"`
	TokenIDs            json.RawMessage `json:"token_ids"` // vLLM's tokens in, tokens out
	MaxOutputTokens     *int            `json:"max_output_tokens"`
	MaxTokens           *int            `json:"max_tokens"`
	MaxCompletionTokens *int            `json:"max_completion_tokens"`
	MinTokens           *int            `json:"min_tokens"`
	N                   *int            `json:"n"`
	Stream              bool            `json:"stream"`
	StreamOptions       *struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
	ReturnTokenIDs     bool            `json:"return_token_ids"`
	CacheSalt          *string         `json:"cache_salt"`
	SessionID          string          `json:"session_id"`
	ExtraKey           string          `json:"extra_key"`
	LoraPath           string          `json:"lora_path"`
	RID                json.RawMessage `json:"rid"`
	RoutedDPRank       *int            `json:"routed_dp_rank"`
	DataParallelRank   *int            `json:"data_parallel_rank"`
	DisaggPrefillRank  *int            `json:"disagg_prefill_dp_rank"`
	VLLMXArgs          map[string]any  `json:"vllm_xargs"`
	KVTransferParams   map[string]any  `json:"kv_transfer_params"`
	DisaggregatedParam map[string]any  `json:"disaggregated_params"`
	Store              *bool           `json:"store"`
	RequestID          string          `json:"request_id"` // of the responses API
	PreviousResponseID string          `json:"previous_response_id"`
	BootstrapHost      json.RawMessage `json:"bootstrap_host"`
	BootstrapPort      json.RawMessage `json:"bootstrap_port"`
	BootstrapRoom      json.RawMessage `json:"bootstrap_room"`
}

// apiError is an answer with a status other than 200.
type apiError struct {
	status  int
	kind    string
	param   string
	message string
}

func (e *apiError) Error() string { return e.message }

func badRequest(message string) *apiError {
	return &apiError{http.StatusBadRequest, "BadRequestError", "", message}
}

func internalError(message string) *apiError {
	return &apiError{http.StatusInternalServerError, "InternalServerError", "", message}
}

// asAPIError keeps the status of the cause and the text of the whole chain.
func asAPIError(err error) *apiError {
	if api, ok := errors.AsType[*apiError](err); ok {
		e := *api
		e.message = err.Error()
		return &e
	}
	return internalError(err.Error())
}

func parseBody(raw []byte) (*requestBody, error) {
	var body requestBody
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	if err := d.Decode(&body); err != nil {
		if typed, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
			return nil, badRequest(fmt.Sprintf("1 validation error:\n  {'type': 'type_error', 'loc': ('body', '%s'), 'msg': 'Input has another type'}", typed.Field))
		}
		return nil, badRequest("1 validation error:\n  {'type': 'json_invalid', 'loc': ('body', 1), 'msg': 'JSON decode error', 'ctx': {'error': '" + err.Error() + "'}}")
	}
	if salt := body.CacheSalt; salt != nil && (*salt == "" || len(*salt) > 128 || strings.ContainsAny(*salt, "@/\\\x00")) {
		return nil, badRequest("cache_salt must be a non-empty string of at most 128 characters without '@', '/', '\\' and NUL")
	}
	return &body, nil
}
