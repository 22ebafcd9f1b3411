package shape_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/shape"
)

// TestOddBodies: each body of a model has the ids of another one, is refused, or is not known. What stock vLLM 0.32 makes of
// them was recorded.
func TestOddBodies(t *testing.T) {
	t.Parallel()
	const refused, unknown = "refused", "not known"
	const chat, user, call = `{"messages":[{"role":"user","content":"U"},`, `{"role":"user","content":"U"}`, `{"id":"123456789","type":"function","function":{"name":"f","arguments":`
	const result = `{"role":"tool","tool_call_id":"123456789","content":"r"},` + user + `]}`
	const empty = chat + `{"role":"assistant","content":"","tool_calls":[` + call + `"{}"}}]},{"role":"tool","tool_call_id":"123456789","content":[],`
	called := func(arguments string) string {
		return chat + `{"role":"assistant","content":"","tool_calls":[` + call + arguments + `}}]},` + result
	}
	raw := byteTokenizer(slices.Concat(inklingTokens, []string{"<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|channel|>"})...)
	const v4, mistral, harmony = "deepseek_v4", "mistral", "harmony"
	for _, c := range []struct {
		model      string
		api        body.API
		body, want string
	}{
		{mistral, body.Chat, chat + `{"role":"assistant","tool_calls":[` + call + `"{}"}}]},` + result, chat + `{"role":"assistant","content":null,"tool_calls":[` + call + `"{}"}}]},` + result},
		{v4, body.Messages, `{"max_tokens":9,"messages":[` + user + `,{"role":"system","content":"S"},{"role":"assistant","content":"A"},` + user + `]}`,
			`{"max_tokens":9,"system":"S","messages":[` + user + `,{"role":"assistant","content":"A"},` + user + `]}`},
		{v4, body.Responses, `{"input":[` + user + `,{"type":"function_call","call_id":"c","namespace":"n","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"c","output":"o"}]}`,
			`{"input":[` + user + `,{"type":"function_call","call_id":"c","name":"n__f","arguments":"{}"},{"type":"function_call_output","call_id":"c","output":"o"}]}`},
		{v4, body.Completions, `{"prompt":"a","suffix":""}`, unknown}, {v4, body.Completions, `{"prompt":"a","suffix":null}`, `{"prompt":"a"}`},
		{v4, body.Chat, called(`"\ufeff{\"a\":1}"`), called(`"{}"`)}, {v4, body.Chat, called(`"{\"a\":\"\\ud83d\"}"`), unknown},
		{v4, body.Chat, called(`"{\"a\":` + strings.Repeat("[", 520) + strings.Repeat("]", 520) + `}"`), unknown},
		{v4, body.Chat, called(`"{\"a\":` + strings.Repeat("1", 4301) + `}"`), unknown}, {v4, body.Chat, called(`"no JSON"`), called(`"{}"`)},
		{v4, body.Chat, `{"continue_final_message":true,"messages":[` + user + `,{"role":"assistant","content":"A"}]}`, `{"messages":[` + user + `,{"role":"assistant","content":"A"}]}`},
		{v4, body.Chat, `{"continue_final_message":true,"add_generation_prompt":true,"messages":[` + user + `]}`, refused},
		{"inkling", body.Tokenize, chat + `{"role":"assistant","content":"A","reasoning_content":"B"},` + user + `]}`, unknown},
		{"inkling", body.Tokenize, chat + `{"role":"assistant","content":"","tool_calls":[` + call + `"{}"}}]},` + result, unknown},
		{"deepseek_v41", body.Chat, empty + `"name":"n"}]}`, empty + `"name":"n"}]}`}, {"deepseek_v41", body.Chat, empty + `"x":"n"}]}`, refused},
		{harmony, body.Tokenize, `{"continue_final_message":true,"messages":[` + user + `]}`, refused},
	} {
		files := fstest.MapFS{"tokenizer.json": {Data: raw}, "config.json": {Data: []byte(encoderModels[c.model][1])}}
		if c.model == mistral {
			files = fstest.MapFS{"tekken.json": {Data: tekkenOf(t, "v13", bytesVocabulary())}}
		}
		m := loadEncoderModel(t, files)
		ids := func(raw string) ([]uint32, error) {
			req, err := body.Parse(c.api, []byte(raw))
			if err != nil {
				t.Fatal(err)
			}
			got, err := m.RenderPrompt(req, shape.VLLM)
			return got.IDs, err
		}
		got, err := ids(c.body)
		_, refusal := errors.AsType[*shape.Refusal](err)
		switch c.want {
		case refused, unknown:
			if err == nil || refusal != (c.want == refused) {
				t.Errorf("%s, %v %.200s: got %d ids, error %v, want it to be %s", c.model, c.api, c.body, len(got), err, c.want)
			}
		default:
			want, wrong := ids(c.want)
			if err != nil || wrong != nil || len(got) == 0 || !slices.Equal(got, want) {
				t.Errorf("%s, %v %.200s: got %v, error %v, want %v, error %v", c.model, c.api, c.body, got, err, want, wrong)
			}
		}
	}
}
