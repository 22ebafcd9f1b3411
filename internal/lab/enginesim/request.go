package enginesim

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strings"
)

// requestBody holds every field that some engine reads from some request.
type requestBody struct {
	Model                string          `json:"model"`
	Messages             json.RawMessage `json:"messages"`
	Tools                json.RawMessage `json:"tools"`
	ToolChoice           json.RawMessage `json:"tool_choice"`
	ChatTemplateKwargs   map[string]any  `json:"chat_template_kwargs"`
	ReasoningEffort      string          `json:"reasoning_effort"`
	AddGenerationPrompt  *bool           `json:"add_generation_prompt"`
	ContinueFinalMessage bool            `json:"continue_final_message"`
	AddSpecialTokens     *bool           `json:"add_special_tokens"`
	Prompt               json.RawMessage `json:"prompt"`
	PromptTokenIDs       json.RawMessage `json:"prompt_token_ids"`
	Text                 json.RawMessage `json:"text"`      // SGLang /generate
	InputIDs             json.RawMessage `json:"input_ids"` // SGLang /generate and chat
	SamplingParams       struct {
		MaxNewTokens *int `json:"max_new_tokens"`
		MaxTokens    *int `json:"max_tokens"`
	} `json:"sampling_params"`
	System              json.RawMessage `json:"system"`       // messages
	Instructions        json.RawMessage `json:"instructions"` // responses
	Input               json.RawMessage `json:"input"`        // responses
	TokenIDs            json.RawMessage `json:"token_ids"`    // vLLM's tokens in, tokens out
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
	ReturnTokenStrs    bool            `json:"return_token_strs"`
	TruncatePrompt     *int            `json:"truncate_prompt_tokens"`
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
	BootstrapHost      json.RawMessage `json:"bootstrap_host"`
	BootstrapPort      json.RawMessage `json:"bootstrap_port"`
	BootstrapRoom      json.RawMessage `json:"bootstrap_room"`
	Tokens             []int32         `json:"tokens"` // detokenize
}

// apiError is an answer that is not 200.
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

// loneSurrogate finds \ud800-\udbff without a low half, or a low half alone, in raw JSON.
var surrogateEscape = regexp.MustCompile(`(\\\\)|\\u[dD]([89abAB])[0-9a-fA-F]{2}(\\u[dD][c-fC-F][0-9a-fA-F]{2})?|\\u[dD][c-fC-F][0-9a-fA-F]{2}`)

func loneSurrogate(raw []byte) bool {
	if !bytes.Contains(raw, []byte(`\u`)) {
		return false
	}
	for _, m := range surrogateEscape.FindAllSubmatch(raw, -1) {
		if m[1] == nil && (m[2] == nil || m[3] == nil) {
			return true
		}
	}
	return false
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
	if loneSurrogate(raw) {
		return nil, badRequest("1 validation error:\n  {'type': 'json_invalid', 'loc': ('body', 1), 'msg': 'JSON decode error', 'ctx': {'error': 'no low surrogate in string'}}")
	}
	if salt := body.CacheSalt; salt != nil && (*salt == "" || len(*salt) > 128 || strings.ContainsAny(*salt, "@/\\\x00")) {
		return nil, badRequest("cache_salt must be a non-empty string of at most 128 characters without '@', '/', '\\' and NUL")
	}
	return &body, nil
}

// prompts reads one of the forms: text, list of texts, ids, list of ids.
func (t *Tokenizer) prompts(raw json.RawMessage, special bool) ([][]int32, error) {
	var text string
	if json.Unmarshal(raw, &text) == nil && len(raw) > 0 && raw[0] == '"' {
		return t.nonEmpty([][]int32{t.Encode(text, special)})
	}
	var texts []string
	if json.Unmarshal(raw, &texts) == nil && len(texts) > 0 {
		var out [][]int32
		for _, s := range texts {
			out = append(out, t.Encode(s, special))
		}
		return t.nonEmpty(out)
	}
	var ids []int32
	if json.Unmarshal(raw, &ids) == nil && len(ids) > 0 {
		return t.nonEmpty([][]int32{ids})
	}
	var lists [][]int32
	if json.Unmarshal(raw, &lists) == nil && len(lists) > 0 {
		return t.nonEmpty(lists)
	}
	if len(raw) == 0 || string(raw) == "null" {
		return nil, badRequest("1 validation error:\n  {'type': 'missing', 'loc': ('body', 'prompt'), 'msg': 'Field required'}")
	}
	return nil, badRequest("prompt: Input should be a string, a list of strings, a list of ids or a list of lists of ids")
}

func (t *Tokenizer) nonEmpty(prompts [][]int32) ([][]int32, error) {
	for _, p := range prompts {
		if len(p) == 0 {
			return nil, badRequest("The decoder prompt cannot be empty")
		}
		for _, id := range p {
			if id < 0 || int(id) >= len(t.tokens) {
				return nil, badRequest(fmt.Sprintf("Token id %d is out of vocabulary", id))
			}
		}
	}
	return prompts, nil
}

// truncated keeps the tail of a prompt that truncate_prompt_tokens allows.
func truncated(body *requestBody, ids []int32) []int32 {
	if n := body.TruncatePrompt; n != nil && *n >= 0 && len(ids) > *n {
		return ids[len(ids)-*n:]
	}
	return ids
}
