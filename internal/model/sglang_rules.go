package model

import (
	"bytes"
	"math"
	"strings"
	"sync"

	"github.com/kvlane/kvlane/internal/prompt"
	"github.com/kvlane/kvlane/internal/pydantic"
	"github.com/kvlane/kvlane/internal/tokenizer/jinja"
)

// What SGLang checks beside types: the validators of its protocol modules, _validate_request of its endpoints, and
// SamplingParams (python/sglang/srt/sampling/sampling_params.py).

var sglangFunctions = pydantic.Functions{
	"sequence_validator": notText,
	"_normalize_role":    sglangRole,
	"validate_payload": func(raw []byte, next func([]byte) error) error {
		if given(prompt.Member(raw, "thinking")) == given(prompt.Member(raw, "text")) {
			return refuse("thinking parts require exactly one of 'thinking' or 'text'")
		}
		return next(raw)
	},
	"validate_thinking_parts_role": func(raw []byte, next func([]byte) error) error {
		thinks := false
		prompt.EachItem(prompt.Member(raw, "content"), func(part []byte) {
			kind := prompt.Text(prompt.Member(part, "type"))
			thinks = thinks || kind == "thinking" || kind == "reasoning"
		})
		if thinks && !strings.EqualFold(prompt.Text(prompt.Member(raw, "role")), roleAssistant) {
			return refuse("thinking content parts are only valid in assistant messages")
		}
		return next(raw)
	},
	"_default_detail_is_auto": func(raw []byte, next func([]byte) error) error {
		if prompt.Text(raw) == "default" {
			return nil
		}
		return next(raw)
	},
	"validate_reasoning_effort_type": func(raw []byte, next func([]byte) error) error {
		if raw[0] == 't' || raw[0] == 'f' {
			return refuse("reasoning_effort must not be a boolean")
		}
		return next(raw)
	},
	"validate_max_tokens_positive": positive,
	"_validate_max_tokens":         positive,
	"_validate_model":              notEmpty,
	"_validate_thinking_shape": func(raw []byte, next func([]byte) error) error {
		kind, budget := prompt.Text(prompt.Member(raw, "type")), prompt.Member(raw, "budget_tokens")
		if kind == "enabled" && !given(budget) || kind == "adaptive" && given(budget) {
			return refuse("thinking.budget_tokens does not go with thinking.type %q", kind)
		}
		return next(raw)
	},
}

// sglangRole takes the roles of messages in any case.
func sglangRole(raw []byte, next func([]byte) error) error {
	role, ok := prompt.TextOf(raw)
	if !ok {
		return refuse("'role' must be a string")
	}
	return next([]byte(`"` + strings.ToLower(role) + `"`))
}

// sglangMessage is the type of a chat message in SGLang.
var sglangMessage = sync.OnceValue(func() *pydantic.Schema { return sglangSchemas().Schema("chat").Field("messages").Item() })

// sglangDeclared checks a message's types.
func sglangDeclared(msg *jinja.Dict, raw []byte) error {
	if ordinary(msg) {
		return nil
	}
	if err := sglangMessage().CheckAll(wideIntegers(raw)); err != nil {
		return refuse("messages: %v", err)
	}
	return nil
}

// sglangRules are the checks of one request.
func (m *Model) sglangRules(in input) error {
	if err := sglangNumbers(in); err != nil {
		return err
	}
	get := in.Get
	switch in.API {
	case prompt.Tokenize:
		return sglangTokenizeRules(in)
	case prompt.Chat:
		if err := sglangChatRules(in); err != nil {
			return err
		}
	case prompt.Completions:
		if !sglangHasPrompt(in) {
			return refuse("Prompt cannot be empty")
		}
	case prompt.Generate:
		params := in.Raw(prompt.FieldSamplingParams)
		get = func(name string) []byte { return prompt.Member(params, sglangNames[name]) }
	default:
		return nil
	}
	return m.sglangSampling(in, get)
}

// sglangNumbers refuses numbers of fields that orjson does not read.
func sglangNumbers(in input) error {
	large := ""
	in.EachField(func(name string, value []byte) {
		if c := value[0]; c == '-' || c-'0' < 10 {
			if x, _ := pydantic.Float(value); math.IsInf(x, 0) {
				large = name
			}
		}
	})
	if large != "" {
		return refuse("%s: number is infinity when parsed as double", large)
	}
	return nil
}

// sglangTokenizeRules: the tokenizing endpoint makes a chat request of messages, with all fields that it has.
func sglangTokenizeRules(in input) error {
	if in.Has(prompt.FieldPrompt) == in.Has(prompt.FieldMessages) {
		return refuse("Exactly one of 'prompt' or 'messages' must be provided.")
	}
	if in.Form != prompt.FormMessages {
		schema := sglangSchemas().Schema(in.API.String())
		for _, f := range [...]prompt.Field{prompt.FieldTools, prompt.FieldToolChoice} {
			if raw := in.Raw(f); raw != nil {
				if err := schema.Field(f.String()).Check(raw); err != nil {
					return refuse("%s: %v", f, err)
				}
			}
		}
		return nil
	}
	chat := sglangSchemas().Schema(prompt.Chat.String())
	var first error
	in.EachField(func(name string, value []byte) {
		field := chat.Field(name)
		if first != nil || field == nil || name == "messages" || name == "tools" || name == "tool_choice" || !given(value) && sglangTokenizeKnows(name) {
			return
		}
		if err := field.Check(wideIntegers(value)); err != nil {
			first = refuse("%s: %v", name, err)
		}
	})
	if first != nil {
		return first
	}
	return sglangChatRules(in)
}

// sglangTokenizeKnows tells whether the tokenizing endpoint declares a field: it does not hand on such a one that is null.
func sglangTokenizeKnows(name string) bool {
	return sglangSchemas().Schema(prompt.Tokenize.String()).Field(name) != nil
}

// sglangNames are the names of /generate for fields that the OpenAI routes call otherwise.
var sglangNames = map[string]string{"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed", "temperature": "temperature",
	"top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "frequency_penalty": "frequency_penalty", "presence_penalty": "presence_penalty",
	"repetition_penalty": "repetition_penalty", "logit_bias": "logit_bias", "regex": "regex", "ebnf": "ebnf", "stop": "stop", "stop_regex": "stop_regex",
	"json_schema": "json_schema"}

func sglangHasPrompt(in input) bool {
	raw := in.Raw(prompt.FieldPrompt)
	if len(raw) == 0 || raw[0] != '[' {
		return truthy(raw)
	}
	some := false
	prompt.EachItem(raw, func(item []byte) { some = some || truthy(item) })
	return some
}

func sglangChatRules(in input) error {
	if in.Form == prompt.FormMessages && in.Count == 0 {
		return refuse("Messages cannot be empty.")
	}
	for _, name := range [...]string{"return_sampling_mask", "return_flat_raw_output_top_logprobs"} {
		if on, _ := pydantic.Bool(in.Get(name)); on {
			if meta, _ := pydantic.Bool(in.Get("return_meta_info")); !meta {
				return refuse("%s requires return_meta_info=true.", name)
			}
		}
	}
	if stream, _ := pydantic.Bool(in.Raw(prompt.FieldStream)); stream {
		for _, name := range [...]string{"return_prompt_token_ids", "return_token_ids", "return_meta_info"} {
			if on, _ := pydantic.Bool(in.Get(name)); on {
				return refuse("%s is not supported with streaming.", name)
			}
		}
	}
	format := in.Raw(prompt.FieldResponseFormat)
	if prompt.Text(prompt.Member(format, "type")) == "json_schema" && !truthy(prompt.Member(format, "schema")) &&
		!given(prompt.Member(prompt.Member(format, "json_schema"), "schema")) {
		return refuse("schema_ is required for json_schema response format request.")
	}
	return nil
}

var sglangFloats = []floatRule{
	{"temperature", func(x float64) bool { return x >= 0 && !math.IsInf(x, 0) }, "a non-negative finite number"},
	{"top_p", func(x float64) bool { return x > 0 && x <= 1 }, "in (0, 1]"},
	{"min_p", func(x float64) bool { return x >= 0 && x <= 1 }, "in [0, 1]"},
	{"top_k", func(x float64) bool { return x == -1 || x >= 1 }, "-1 (disable) or at least 1"},
	{"frequency_penalty", func(x float64) bool { return x >= -2 && x <= 2 }, "in [-2, 2]"},
	{"presence_penalty", func(x float64) bool { return x >= -2 && x <= 2 }, "in [-2, 2]"},
	{"repetition_penalty", func(x float64) bool { return x > 0 && x <= 2 }, "in (0, 2]"},
	{"min_tokens", func(x float64) bool { return x >= 0 }, "in [0, max_new_tokens]"},
}

// sglangMaxStops is how many stop strings, and how many stop patterns, a request may have.
const sglangMaxStops = 32

func (m *Model) sglangSampling(in input, get func(string) []byte) error {
	greedy := false
	if t, ok := pydantic.Float(get("temperature")); ok && t >= 0 && t < 1e-6 {
		greedy = true // top_k is not looked at then
	}
	rules := sglangFloats
	if greedy {
		rules = slicesWithout(rules, "top_k")
	}
	if err := checkFloats(get, rules); err != nil {
		return err
	}
	if seed, err := pydantic.Int(get("seed")); err == nil && !seed.IsInt64() {
		return refuse("sampling_seed must be in [-2**63, 2**63 - 1], got %v.", seed)
	}
	wanted, asked := in.sglangMaxTokens(get)
	if asked && wanted < 0 {
		return refuse("max_new_tokens must be at least 0, got %v.", wanted)
	}
	if least, ok := pydantic.Float(get("min_tokens")); ok && asked && least > wanted {
		return refuse("min_new_tokens must be in [0, max_new_tokens(%v)], got %v.", wanted, least)
	}
	if err := m.sglangBias(get("logit_bias")); err != nil {
		return err
	}
	grammars := 0
	for _, name := range [...]string{"regex", "ebnf", "json_schema"} {
		if truthy(get(name)) {
			grammars++
		}
	}
	if format := prompt.Text(prompt.Member(in.Raw(prompt.FieldResponseFormat), "type")); format != "" && format != "text" {
		grammars++
	}
	if grammars > 1 {
		return refuse("Only one of json_schema, regex, ebnf, or structural_tag can be set.")
	}
	for _, name := range [...]string{"stop", "stop_regex"} {
		n := 0
		prompt.EachItem(get(name), func([]byte) { n++ })
		if n > sglangMaxStops {
			return refuse("at most %d stop strings are allowed, got %d", sglangMaxStops, n)
		}
	}
	return nil
}

func slicesWithout(rules []floatRule, field string) []floatRule {
	kept := make([]floatRule, 0, len(rules))
	for _, r := range rules {
		if r.field != field {
			kept = append(kept, r)
		}
	}
	return kept
}

// sglangMaxTokens is how many tokens the request wants; 0 counts as not given on the chat route.
func (in input) sglangMaxTokens(get func(string) []byte) (float64, bool) {
	fields := []string{"max_tokens"}
	if in.API == prompt.Chat {
		fields = []string{"max_completion_tokens", "max_tokens"}
	}
	for _, name := range fields {
		if n, ok := pydantic.Float(get(name)); ok && (n != 0 || in.API != prompt.Chat) {
			return n, true
		}
	}
	switch in.API {
	case prompt.Completions:
		return 16, true
	case prompt.Generate:
		return 128, true
	default:
		return 0, false
	}
}

func (m *Model) sglangBias(raw []byte) error {
	bad := false
	prompt.EachMember(raw, func(key, _ []byte) { bad = bad || !m.inVocabulary(key) })
	if bad {
		return refuse("logit_bias must have token ids as keys")
	}
	return nil
}

// orjsonReads refuses what Python's json reads and orjson does not: halves of surrogate pairs, NaN and Infinity, a byte order
// mark.
func orjsonReads(body []byte) error {
	if bytes.HasPrefix(body, []byte("\xef\xbb\xbf")) {
		return refuse("unexpected character: a byte order mark")
	}
	if !bytes.Contains(body, []byte(`\u`)) && !bytes.Contains(body, []byte("NaN")) && !bytes.Contains(body, []byte("Infinity")) {
		return nil
	}
	for i := 0; i < len(body); i++ {
		switch body[i] {
		case 'N', 'I':
			return refuse("unexpected character: NaN and Infinity are not JSON")
		case '"':
			end := endOfString(body, i)
			if _, ok := prompt.TextOf(body[i:end]); !ok {
				return refuse("lone leading surrogate in hex escape")
			}
			i = end - 1
		}
	}
	return nil
}
