package model

import (
	"math"
	"math/big"
	"strings"

	"github.com/kvlane/kvlane/internal/prompt"
	"github.com/kvlane/kvlane/internal/pydantic"
)

// What vLLM checks beside types: the validators of its protocol modules, and SamplingParams (vllm/sampling_params.py).

var vllmFunctions = pydantic.Functions{
	"validate_thinking_token_budget": func(raw []byte, next func([]byte) error) error {
		if !given(raw) {
			return nil
		}
		if n, err := pydantic.Int(raw); err != nil || raw[0] == '"' || raw[0] == 't' || raw[0] == 'f' || strings.ContainsAny(asText(raw), ".eE") ||
			n.Cmp(big.NewInt(-1)) < 0 {
			return refuse("`thinking_token_budget` must be a non-negative integer or -1 for unlimited.")
		}
		return next(raw)
	},
	// top_logprobs: null means the same as omitted.
	"<lambda>": func(raw []byte, next func([]byte) error) error {
		if !given(raw) {
			return nil
		}
		return next(raw)
	},
	"_default_input_image_details": func(raw []byte, next func([]byte) error) error { return next(withImageDetails(raw)) },
	"validate_tool_change":         vllmToolChange,
	"validate_tool_change_role":    vllmToolChangeRole,
	"validate_system": func(raw []byte, next func([]byte) error) error {
		if hasToolChange(raw) {
			return refuse("tool changes are only allowed in messages with role \"system\"")
		}
		return next(raw)
	},
	"validate_name_required_for_tool": func(raw []byte, next func([]byte) error) error {
		if prompt.Text(prompt.Member(raw, "type")) == "tool" && !truthy(prompt.Member(raw, "name")) {
			return refuse("tool_choice.name is required when type is 'tool'")
		}
		return next(raw)
	},
	"validate_model":      notEmpty,
	"validate_max_tokens": positive,
	"sequence_validator":  notText,
}

// notEmpty, positive and notText are small validators that both engines have.
func notEmpty(raw []byte, next func([]byte) error) error {
	if !truthy(raw) {
		return refuse("Value is required")
	}
	return next(raw)
}

func positive(raw []byte, next func([]byte) error) error {
	if n, err := pydantic.Int(raw); err == nil && n.Sign() <= 0 {
		return refuse("max_tokens must be positive")
	}
	return next(raw)
}

func notText(raw []byte, next func([]byte) error) error {
	if len(raw) > 0 && raw[0] == '"' {
		return refuse("'str' instances are not allowed as a Sequence value")
	}
	return next(raw)
}

// withImageDetails gives every input_image part a detail, as the API's default.
func withImageDetails(raw []byte) []byte {
	content := prompt.Member(raw, "content")
	if len(content) == 0 || content[0] != '[' {
		return raw
	}
	out, changed := []byte{'['}, false
	prompt.EachItem(content, func(part []byte) {
		if len(out) > 1 {
			out = append(out, ',')
		}
		if prompt.Text(prompt.Member(part, "type")) == "input_image" && prompt.Member(part, "detail") == nil {
			out, changed = append(out, `{"detail":"auto",`...), true
			part = part[1:]
		}
		out = append(out, part...)
	})
	if !changed {
		return raw
	}
	edited, err := prompt.Apply(nil, raw, prompt.Set(append(out, ']'), "content"))
	if err != nil {
		return raw
	}
	return edited
}

func isToolChange(kind string) bool { return kind == "tool_addition" || kind == "tool_removal" }

func vllmToolChange(raw []byte, next func([]byte) error) error {
	kind := prompt.Text(prompt.Member(raw, "type"))
	if tool := prompt.Member(raw, "tool"); isToolChange(kind) {
		if !given(tool) {
			return refuse("tool is required for %s blocks", kind)
		}
		if kind == "tool_removal" && prompt.Text(prompt.Member(tool, "type")) != "tool_reference" {
			return refuse("tool_removal only accepts a tool_reference")
		}
	}
	return next(raw)
}

func hasToolChange(content []byte) (has bool) {
	prompt.EachItem(content, func(block []byte) { has = has || isToolChange(prompt.Text(prompt.Member(block, "type"))) })
	return has
}

func vllmToolChangeRole(raw []byte, next func([]byte) error) error {
	if prompt.Text(prompt.Member(raw, "role")) != roleSystem && hasToolChange(prompt.Member(raw, "content")) {
		return refuse("tool changes are only allowed in messages with role \"system\"")
	}
	return next(raw)
}

// vllmRules are the checks of one request.
func (m *Model) vllmRules(in input) error {
	switch in.API {
	case prompt.Chat, prompt.Completions, prompt.Tokenize, prompt.Embeddings:
		if err := vllmMediaOptions(in); err != nil {
			return err
		}
	default:
	}
	switch in.API {
	case prompt.Chat:
		if err := vllmChatRules(in); err != nil {
			return err
		}
	case prompt.Completions:
		if err := vllmCompletionRules(in); err != nil {
			return err
		}
	case prompt.CountTokens:
		return nil
	case prompt.Tokenize:
		return vllmGenerationPrompt(in)
	case prompt.Responses:
		if err := vllmResponsesTools(in); err != nil {
			return err
		}
		if err := vllmConstraints(in); err != nil {
			return err
		}
	case prompt.Embeddings:
		if err := vllmSalt(in); err != nil {
			return err
		}
		return vllmGenerationPrompt(in)
	case prompt.VLLMGenerate:
		return vllmSalt(in)
	case prompt.Messages:
	default: // no API of vLLM's
		return nil
	}
	if err := vllmSalt(in); err != nil {
		return err
	}
	return m.vllmSampling(in)
}

// vllmGenerationPrompt is check_generation_prompt.
func vllmGenerationPrompt(in input) error {
	if truthy(in.Raw(prompt.FieldContinueFinalMessage)) && truthy(in.Raw(prompt.FieldAddGenerationPrompt)) {
		return refuse("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
	}
	return nil
}

func vllmChatRules(in input) error {
	if err := vllmGenerationPrompt(in); err != nil {
		return err
	}
	if err := vllmConstraints(in); err != nil {
		return err
	}
	if err := vllmStreamed(in); err != nil {
		return err
	}
	logprobs := truthy(in.Get("logprobs"))
	if truthy(in.Get("logprob_token_ids")) && !logprobs {
		return refuse("when using `logprob_token_ids`, `logprobs` must be set to true.")
	}
	if err := vllmCounts(in, "prompt_logprobs", "top_logprobs"); err != nil {
		return err
	}
	if top, ok := pydantic.Float(in.Get("top_logprobs")); ok && (top == -1 || top > 0) && !logprobs {
		return refuse("when using `top_logprobs`, `logprobs` must be set to true.")
	}
	return nil
}

// vllmMediaOptions refuses what changes how media are read: vLLM takes it with --trust-request-mm-kwargs only.
func vllmMediaOptions(in input) error {
	for _, name := range [...]string{"mm_processor_kwargs", "media_io_kwargs"} {
		if truthy(in.Get(name)) {
			return &Refusal{Status: 400, Reason: "Per-request " + name + " are disabled by default", Guessed: true}
		}
	}
	return nil
}

func vllmStreamed(in input) error {
	if truthy(in.Raw(prompt.FieldStreamOptions)) && !truthy(in.Raw(prompt.FieldStream)) {
		return refuse("Stream options can only be defined when `stream=True`.")
	}
	return nil
}

// vllmCounts checks numbers of logprobs: -1 or not negative, and none of a prompt in a stream.
func vllmCounts(in input, fields ...string) error {
	for _, name := range fields {
		raw := in.Get(name)
		if !given(raw) {
			continue
		}
		n, ok := pydantic.Float(raw)
		switch {
		case !ok || raw[0] == '"':
			return refuse("`%s` must be an integer.", name)
		case n < 0 && n != -1:
			return refuse("`%s` must be a positive value or -1.", name)
		case name == "prompt_logprobs" && truthy(in.Raw(prompt.FieldStream)) && (n > 0 || n == -1):
			return refuse("`prompt_logprobs` are not available when `stream=True`.")
		}
	}
	return nil
}

// vllmConstraints are the rules of response_format and structured_outputs that need no grammar.
func vllmConstraints(in input) error {
	var format []byte
	if in.API != prompt.Responses { // which does not know it
		format = in.Raw(prompt.FieldResponseFormat)
	}
	kind := prompt.Text(prompt.Member(format, "type"))
	if kind == "json_schema" && !given(prompt.Member(format, "json_schema")) {
		return refuse("When response_format type is 'json_schema', the 'json_schema' field must be provided.")
	}
	outputs := in.Get("structured_outputs")
	if !given(outputs) {
		if kind == "json_schema" && !given(prompt.Member(prompt.Member(format, "json_schema"), "schema")) {
			return refuse("You must use one kind of structured outputs constraint but none are specified")
		}
		return nil
	}
	count := 0
	for _, key := range [...]string{"json", "regex", "choice", "grammar", "json_object", "structural_tag"} {
		if given(prompt.Member(outputs, key)) {
			count++
		}
	}
	if count != 1 {
		return refuse("You must use exactly one kind of structured outputs constraint")
	}
	for _, key := range [...]string{"json", "grammar", "structural_tag"} {
		if raw := prompt.Member(outputs, key); len(raw) > 0 && raw[0] == '"' && strings.TrimSpace(prompt.Text(raw)) == "" {
			return refuse("structured_outputs.%s cannot be an empty string", key)
		}
	}
	if choice := prompt.Member(outputs, "choice"); given(choice) && !truthy(choice) {
		return refuse("Choice '[]' cannot be an empty list")
	}
	if object, ok := pydantic.Bool(prompt.Member(outputs, "json_object")); ok && !object {
		return refuse("structured_outputs.json_object must be True if set")
	}
	if strings.Contains(prompt.Text(prompt.Member(outputs, "regex")), "\x00") {
		return refuse("structured_outputs.regex must not contain a NUL character")
	}
	return nil
}

// vllmMaxPrompts is VLLM_MAX_COMPLETION_PROMPTS.
const vllmMaxPrompts = 1024

func vllmCompletionRules(in input) error {
	if err := vllmConstraints(in); err != nil {
		return err
	}
	if err := vllmStreamed(in); err != nil {
		return err
	}
	if truthy(in.Get("logprob_token_ids")) {
		n, ok := pydantic.Float(in.Raw(prompt.FieldMaxTokens))
		switch {
		case truthy(in.Get("echo")) && ok && n == 0:
			return refuse("`logprob_token_ids` is not supported when `echo=True` and `max_tokens=0` because no output tokens are generated.")
		case !given(in.Get("logprobs")):
			return refuse("when using `logprob_token_ids`, `logprobs` must be set.")
		}
	}
	if err := vllmCounts(in, "prompt_logprobs", "logprobs"); err != nil {
		return err
	}
	text, isText := prompt.TextOf(in.Raw(prompt.FieldPrompt))
	embeds := in.Raw(prompt.FieldPromptEmbeds)
	noEmbeds := !given(embeds) || embeds[0] == '[' && !truthy(embeds)
	if (!in.Has(prompt.FieldPrompt) || isText && text == "") && noEmbeds {
		return refuse("Either prompt or prompt_embeds must be provided and non-empty.")
	}
	if (in.Form == prompt.FormTexts || in.Form == prompt.FormIDLists) && in.Count > vllmMaxPrompts {
		return refuse("prompt list length %d exceeds the maximum allowed count of %d.", in.Count, vllmMaxPrompts)
	}
	if truthy(embeds) {
		return &Refusal{Status: 400, Reason: "You must set `--enable-prompt-embeds` to input `prompt_embeds`.", Guessed: true}
	}
	if given(in.Get("suffix")) {
		return refuse("suffix is only supported for models with FIM completion rendering")
	}
	return nil
}

var vllmFloats = []floatRule{
	{"presence_penalty", func(x float64) bool { return x >= -2 && x <= 2 }, "in [-2, 2]"},
	{"frequency_penalty", func(x float64) bool { return x >= -2 && x <= 2 }, "in [-2, 2]"},
	{"repetition_penalty", func(x float64) bool { return x > 0 && !math.IsInf(x, 0) }, "greater than zero"},
	{"temperature", func(x float64) bool { return x >= 0 && x <= 2 }, "in [0, 2]"},
	{"top_p", func(x float64) bool { return x > 0 && x <= 1 }, "in (0, 1]"},
	{"top_k", func(x float64) bool { return x >= -1 }, "0 (disable), or at least 1"},
	{"min_p", func(x float64) bool { return x >= 0 && x <= 1 }, "in [0, 1]"},
	{"min_tokens", func(x float64) bool { return x >= 0 }, "greater than or equal to 0"},
	{"n", func(x float64) bool { return x >= 1 && x <= vllmMaxChoices }, "at least 1 and at most 16384"},
}

// Limits of vLLM: VLLM_MAX_N_SEQUENCES, MAX_LOGPROB_TOKEN_IDS, and --max-logprobs by default.
const (
	vllmMaxChoices  = 16384
	vllmMaxLogprobs = 20
	vllmMaxLogIDs   = 128
)

// vllmSampling is SamplingParams with its checks, but for those that need the prompt's length.
func (m *Model) vllmSampling(in input) error {
	schema := vllmSchemas().Schema(in.API.String())
	get := func(name string) []byte { // what is not declared is not read
		if schema.Field(name) == nil {
			return nil
		}
		return in.Get(name)
	}
	if err := checkFloats(get, vllmFloats); err != nil {
		return err
	}
	if t, ok := pydantic.Float(get("temperature")); ok && t == 0 {
		if n, ok := pydantic.Float(get("n")); ok && n > 1 {
			return refuse("n must be 1 when using greedy sampling, got %v.", n)
		}
	}
	for _, name := range [...]string{"stop", "stop_sequences", "bad_words"} {
		if hasEmptyText(get(name)) {
			return refuse("%s cannot contain an empty string.", name)
		}
	}
	for _, name := range [...]string{"vllm_xargs", "kv_transfer_params", "ec_transfer_params"} {
		if hasWideInteger(get(name)) {
			return refuse("extra_args integers must be between -2**63 and 2**64 - 1.")
		}
	}
	if err := vllmRepetition(get("repetition_detection")); err != nil {
		return err
	}
	if err := vllmLogprobs(in.API, get); err != nil {
		return err
	}
	for _, name := range [...]string{"stop_token_ids", "allowed_token_ids", "logprob_token_ids"} {
		raw := get(name)
		if name == "allowed_token_ids" && given(raw) && !truthy(raw) {
			return refuse("allowed_token_ids is not None and empty!")
		}
		bad := false
		prompt.EachItem(raw, func(item []byte) { bad = bad || !m.inVocabulary(item) })
		if bad {
			return refuse("%s contain out-of-vocab token ids.", name)
		}
	}
	return m.vllmBias(get("logit_bias"))
}

func vllmLogprobs(api prompt.API, get func(string) []byte) error {
	sampled, ok := get("top_logprobs"), truthy(get("logprobs"))
	if api == prompt.Completions {
		sampled, ok = get("logprobs"), true
	}
	ids := 0
	prompt.EachItem(get("logprob_token_ids"), func([]byte) { ids++ })
	if ids > vllmMaxLogIDs {
		return refuse("Requested logprob_token_ids of length %d, which is greater than max allowed: %d", ids, vllmMaxLogIDs)
	}
	ofPrompt := get("prompt_logprobs")
	if !given(ofPrompt) && truthy(get("echo")) {
		ofPrompt = sampled
	}
	if !ok || ids > 0 {
		sampled = nil
	}
	for _, raw := range [...][]byte{sampled, ofPrompt} {
		if n, ok := pydantic.Float(raw); ok && (n > vllmMaxLogprobs || n == -1) {
			return refuse("Requested logprobs of %v, which is greater than max allowed: %d", n, vllmMaxLogprobs)
		}
	}
	return nil
}

// vllmBias checks that the keys of logit_bias are token ids.
func (m *Model) vllmBias(raw []byte) error {
	bad := ""
	prompt.EachMember(raw, func(key, _ []byte) {
		if bad == "" && !m.inVocabulary(key) {
			bad = string(key)
		}
	})
	if bad != "" {
		return refuse("logit_bias contains key(s) that are no token ids: %s", bad)
	}
	return nil
}

// inVocabulary tells whether a JSON value is the id of a token.
func (m *Model) inVocabulary(raw []byte) bool {
	n, err := pydantic.Int(raw)
	return err == nil && n.IsInt64() && n.Int64() >= 0 && n.Int64() < int64(max(m.idLimit, m.tok.Config().VocabSize))
}

func vllmRepetition(raw []byte) error {
	number := func(key string) int64 {
		n, err := pydantic.Int(prompt.Member(raw, key))
		if err != nil || !n.IsInt64() {
			return 0
		}
		return n.Int64()
	}
	largest, least := number("max_pattern_size"), number("min_pattern_size")
	switch {
	case largest < 0 || least < 0 || least > largest:
		return refuse("max_pattern_size, min_pattern_size must be >=0, with min_pattern_size <= max_pattern_size.")
	case largest > 0 && number("min_count") < 2:
		return refuse("min_count must be >= 2 to detect repetitive patterns in engine output.")
	}
	return nil
}

// hasEmptyText tells whether a text, or a text of a list, is empty.
func hasEmptyText(raw []byte) bool {
	empty := string(raw) == `""`
	prompt.EachItem(raw, func(item []byte) { empty = empty || string(item) == `""` })
	return empty
}

// vllmLength judges a prompt of n tokens: TokenizeParams, get_max_tokens, and the limits of SamplingParams.
func (m *Model) vllmLength(in input, n int) error {
	context := int64(m.options.MaxModelLen)
	if in.API == prompt.Embeddings || in.API == prompt.VLLMGenerate {
		if context > 0 && int64(n) > context {
			return refuse("This model's maximum context length is %d tokens. However, your prompt contains %d input tokens.", context, n)
		}
		return nil
	}
	wanted, asked := in.vllmMaxTokens()
	if context > 0 {
		if asked && wanted > context {
			return refuse("max_tokens=%d cannot be greater than max_model_len=%d. Please request fewer output tokens.", wanted, context)
		}
		if int64(n) > context {
			return refuse("This model's maximum context length is %d tokens. However, your prompt contains %d input tokens.", context, n)
		}
		if room := context - int64(n); !asked || wanted > room {
			wanted, asked = room, true
		}
	}
	if !asked {
		return nil
	}
	if wanted == 0 && in.API == prompt.Completions && truthy(in.Get("echo")) {
		wanted = 1
	}
	if wanted < 1 {
		return refuse("max_tokens must be at least 1, got %d.", wanted)
	}
	if least, ok := pydantic.Float(in.Get("min_tokens")); ok && least > float64(wanted) {
		return refuse("min_tokens must be less than or equal to max_tokens=%d, got %v.", wanted, least)
	}
	return nil
}

// vllmMaxTokens is how many tokens the request wants, by the field that its API reads first.
func (in input) vllmMaxTokens() (int64, bool) {
	fields := []prompt.Field{prompt.FieldMaxTokens}
	switch in.API {
	case prompt.Chat:
		fields = []prompt.Field{prompt.FieldMaxCompletionTokens, prompt.FieldMaxTokens}
	case prompt.Responses:
		fields = []prompt.Field{prompt.FieldMaxOutputTokens}
	default:
	}
	for _, f := range fields {
		n, err := pydantic.Int(in.Raw(f))
		if err != nil {
			continue
		}
		if !n.IsInt64() {
			return int64(n.Sign()) * math.MaxInt64, true
		}
		return n.Int64(), true
	}
	const byDefault = 16
	return byDefault, in.API == prompt.Completions
}
