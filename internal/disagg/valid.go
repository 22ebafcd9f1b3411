package disagg

import (
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// A prefill leg must not make a request valid that the decode engine refuses: the prefill engine would keep the blocks
// for a transfer that never comes, with NIXL for minutes. So what the leg's edits replace must be valid as it is. What
// only some engines accept, such as the number "5" as text, counts as not valid.

// begins holds, for every field that only a prefill leg edits, the bytes that a valid value may begin with: a digit for
// integers (not 0 for a limit), n for null. A field that is not listed must be absent. Sources: the request classes of vLLM
// 0.33, SGLang 0.5.23 and TensorRT-LLM. The tokenizer has checked more of what belongs to LMCache's prompts.
var begins = map[string]string{
	"max_tokens": "n123456789", "max_completion_tokens": "n123456789", "max_output_tokens": "n123456789",
	"min_tokens": "0123456789", "min_completion_tokens": "0123456789",
	"stream": "tfn", "stream_options": "{n", "store": "tfn", "background": "tfn", "request_id": `"`,
	"messages": "[", "tools": "[n", "tool_choice": `"{n`, "parallel_tool_calls": "tfn", "chat_template": `"n`, "chat_template_kwargs": "{n",
	"add_generation_prompt": "tf", "continue_final_message": "tf", "documents": "[n", "reasoning_effort": `"n`, "logprobs": "tfn",
	"top_logprobs": "n", "echo": "tf", // top_logprobs has a bound that engines set
}

// unclear returns the name of a field that the prefill leg edits and the decode engine may refuse, "" if there is none.
// counted reports that the length of the prompt is known, and that the tokenizer has compared it with the least answer.
func (p *Protocol) unclear(r *body.Request, counted bool) string {
	least, most, edited := int64(1), int64(0), false // the tokens of an answer; 0: the engine's limit, which is not known
	for _, edits := range p.edited(r.API) {
		for i := range edits {
			edited = true
			path := edits[i].Path()
			name, raw, n := path[len(path)-1], r.Get(path[0]), 1
			if len(path) > 1 {
				if len(raw) == 0 || raw[0] != '{' {
					return path[0] // the edit would make an object of it
				}
				raw, n = last(raw, name)
			}
			if len(raw) == 0 {
				continue
			}
			if n > 1 || strings.IndexByte(begins[name], raw[0]) < 0 || name == "stream_options" && raw[0] == '{' && (!r.Stream() || !usageOnly(raw)) {
				return name
			}
			if raw[0] < '0' || raw[0] > '9' {
				continue
			}
			switch v, ok := integer(raw); {
			case !ok:
				return name
			case strings.HasPrefix(name, "min_"):
				least = max(least, v)
			case !edits[i].Deletes() && (most == 0 || v < most): // what is deleted limits nothing in this API
				most = v
			}
		}
	}
	switch {
	case !edited:
		return ""
	case r.Repeats:
		return "repeated fields"
	case least > max(most, 1) || least > 1 && !counted:
		return "min_tokens"
	}
	return p.together(r)
}

// together returns a field that engines refuse together with another one, or with its absence.
func (p *Protocol) together(r *body.Request) string {
	switch {
	case r.API == body.Messages && !r.Has(body.FieldMaxTokens):
		return "max_tokens" // engines require it
	case r.Stream() && r.Has(body.FieldPromptLogprobs):
		return "stream" // vLLM refuses both together
	case r.API == body.Responses && string(r.Raw(body.FieldBackground)) == "true" && (!p.Always || !r.Bool(body.FieldStore, !r.Span(body.FieldStore).Present())):
		return "background" // it needs store, and vLLM stores nothing by default
	}
	return ""
}

// last returns the last member of an object with a key, and the number of such members.
func last(object []byte, name string) (value []byte, n int) {
	body.EachMember(object, func(key, v []byte) {
		if body.IsKey(key, name) {
			value, n = v, n+1
		}
	})
	return value, n
}

// usageOnly reports whether stream_options has only what all engines know, each once.
func usageOnly(options []byte) bool {
	all := 0
	body.EachMember(options, func(_, _ []byte) { all++ })
	for _, name := range [...]string{"include_usage", "continuous_usage_stats"} {
		if value, n := last(options, name); n == 1 && strings.IndexByte("tfn", value[0]) >= 0 {
			all--
		}
	}
	return all == 0
}
