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
	const refused, guessed, unknown = "refused", "refused by this version", "not known"
	const chat, user, call = `{"messages":[{"role":"user","content":"U"},`, `{"role":"user","content":"U"}`, `{"id":"123456789","type":"function","function":{"name":"f","arguments":`
	const result = `{"role":"tool","tool_call_id":"123456789","content":"r"},` + user + `]}`
	const empty = chat + `{"role":"assistant","content":"","tool_calls":[` + call + `"{}"}}]},{"role":"tool","tool_call_id":"123456789","content":[],`
	const answered = chat + `{"role":"tool","tool_call_id":"c","content":`
	const named = `{"max_tokens":9,"messages":[` + user + `],"tools":[{"name":"f","input_schema":{"type":"object"}}],`
	called := func(arguments string) string {
		return chat + `{"role":"assistant","content":"","tool_calls":[` + call + arguments + `}}]},` + result
	}
	raw := byteTokenizer(slices.Concat(inklingTokens, []string{"<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|channel|>"})...)
	const asked = `{"role":"assistant","content":"A"},` + user
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
		{"deepseek_v41", body.Chat, empty + `"name":"n"}]}`, empty + `"name":"n"}]}`}, {"deepseek_v41", body.Chat, empty + `"x":"n"}]}`, guessed},
		{v4, body.Chat, answered + `[{"type":"text","text":"a"},{"type":"tool_reference","name":"t"}],"name":"n"}]}`, answered + `"a\n\n[Unsupported tool_reference]","name":"n"}]}`},
		{v4, body.Messages, `{"max_tokens":9,"messages":[` + user + `,{"role":"user","content":[{"type":"tool_result","tool_use_id":"c","content":[{"type":"tool_reference","tool_name":"t"}]}]}]}`,
			`{"max_tokens":9,"messages":[` + user + `,{"role":"user","content":[{"type":"tool_result","tool_use_id":"c"},{"type":"tool_result","tool_use_id":"c","content":"[Unsupported tool_reference]"}]}]}`},
		{v4, body.Tokenize, `{"prompt":"a","messages":[{"role":"user","content":1}]}`, unknown},
		{v4, body.Completions, `{"prompt":[99999]}`, guessed}, {v4, body.Completions, `{"prompt":"\ud800"}`, refused},
		{"inkling", body.Chat, `{"chat_template_kwargs":{"messages":[]},"messages":[` + user + `]}`, `{"messages":[` + user + `]}`},
		{v4, body.Chat, `{"chat_template_kwargs":{"messages":[]},"messages":[` + user + `]}`, refused},
		{v4, body.Responses, `{"input":[` + user + `,{"role":"user","id":"x"}]}`, unknown}, {v4, body.Responses, `{"input":[` + user + `,{"role":"user"}]}`, refused},
		{harmony, body.Chat, `{"max_tokens":99999,"messages":[` + user + `]}`, `{"messages":[` + user + `]}`},
		{harmony, body.Responses, `{"input":"a","reasoning":{"\ud800":1}}`, refused}, {harmony, body.Responses, `{"input":"a","reasoning":{"x":"\ud800"}}`, `{"input":"a"}`},
		{harmony, body.Responses, `{"max_output_tokens":99999,"input":"a"}`, refused}, {v4, body.Chat, `{"max_tokens":99999,"messages":[` + user + `]}`, refused},
		{mistral, body.Completions, `{"prompt":"\ud800"}`, unknown}, {mistral, body.Responses, `{"input":"a","instructions":"\ud800"}`, unknown},
		{mistral, body.Messages, named + `"tool_choice":{"type":"tool","name":"g"}}`, named + `"tool_choice":{"type":"auto"}}`}, {v4, body.Messages, named + `"tool_choice":{"type":"tool","name":"g"}}`, refused},
		{"inkling", body.Messages, named + `"tool_choice":{"type":"tool","name":"g"}}`, named + `"tool_choice":{"type":"auto"}}`},
		{harmony, body.Tokenize, `{"continue_final_message":true,"messages":[` + user + `]}`, refused},
		{v4, body.Chat, chat + `{"role":"assistant","content":null,"function_call":{"id":"a"}},` + user + `]}`, refused},
		{v4, body.Chat, chat + `{"role":"assistant","content":null,"function_call":{"name":"f","arguments":""}},` + user + `]}`, chat + `{"role":"assistant","content":null},` + user + `]}`},
		{v4, body.Chat, chat + `{"role":"assistant","content":null,"audio":{}},` + user + `]}`, refused},
		{v4, body.Chat, `{"messages":[{"role":"user","content":"U","task":""},` + user + `,` + asked + `]}`, `{"messages":[{"role":"user","content":"U","task":"action"},` + user + `,` + asked + `]}`},
		{v4, body.Messages, `{"max_tokens":9,"messages":[{"role":"user","content":[{"type":"text","text":"U"},{"type":"image"}]}]}`, `{"max_tokens":9,"messages":[` + user + `]}`},
		{v4, body.Messages, `{"max_tokens":9,"messages":[{"role":"user","content":[{"type":"text","text":"U"},{"type":"image","source":{"x":1}}]}]}`, refused},
		{v4, body.Responses, `{"input":{},"instructions":"I"}`, `{"input":[],"instructions":"I"}`}, {v4, body.Responses, `{"input":{"a":1},"instructions":"I"}`, refused},
		{v4, body.Chat, `{"messages":[{"role":"latest_reminder","content":"R","tool_calls":[{"id":"c"}]},` + user + `]}`, refused},
		{v4, body.Chat, chat + `{"role":"user","content":[{"type":"output_text","text":"a"}],"tool_calls":null}]}`, chat + `{"role":"user","content":"a"}]}`},
		{v4, body.Chat, chat + `{"role":"user","content":[{"type":"output_text","text":"a"}]}]}`, refused},
		{harmony, body.Chat, `{"messages":[{"role":"developer","content":"","tool_calls":null},` + user + `]}`, unknown},
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
			if got.Partial != "" && got.IDs == nil {
				err = errors.New(got.Partial)
			}
			return got.IDs, err
		}
		got, err := ids(c.body)
		refusal, isRefusal := errors.AsType[*shape.Refusal](err)
		switch c.want {
		case refused, guessed, unknown:
			if err == nil || isRefusal != (c.want != unknown) || isRefusal && refusal.Guessed != (c.want == guessed) {
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

// The input of a tool's use is printed in ASCII by both engines (the argument's text is printed as it is for gpt-oss).
func TestUsesOfToolsAreASCII(t *testing.T) {
	t.Parallel()
	m := loadEncoderModel(t, fstest.MapFS{"tokenizer.json": {Data: byteTokenizer("<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|channel|>")},
		"config.json": {Data: []byte(encoderModels["harmony"][1])}})
	req, err := body.Parse(body.Messages, []byte(`{"max_tokens":9,"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"c","name":"f","input":{"a":"é"}}]}]}`))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := m.RenderPrompt(req, shape.VLLM); err != nil || !strings.Contains(got.Text, `{"a": "\u00e9"}`) {
		t.Errorf("got %q, %v, want the input in ASCII", got.Text, err)
	}
}

// A template that iterates over parts gets those of a tool's result if one is a reference (recorded from vLLM 0.32.0).
func TestToolReferences(t *testing.T) {
	t.Parallel()
	m := tinyChat(t, "{}", "{}", "{% for m in messages %}{% if m.content is string %}={{ m.content }}{% else %}{% for p in m.content %}<{{ p.type }} {{ p.name }} {{ p.text }}>{% endfor %}{% endif %}{% endfor %}")
	req, err := body.Parse(body.Chat, []byte(`{"messages":[{"role":"tool","tool_call_id":"c","name":"n","content":[{"type":"text","text":"a"},{"type":"tool_reference","name":"t"}]},
		{"role":"tool","tool_call_id":"c","name":"n","content":[{"type":"text","text":"b"},{"type":"text","text":"c"}]},{"role":"user","name":"n","content":[{"type":"tool_reference","name":"u"}]}]}`))
	if err != nil {
		t.Fatal(err)
	}
	const want = "<text  a><tool_reference t >=b\nc<tool_reference u >"
	if got, err := m.RenderPrompt(req, shape.VLLM); err != nil || got.Text != want {
		t.Errorf("got %q, %v, want %q", got.Text, err, want)
	}
}

// TestCallsOfOtherEngines: what only vLLM was compared with has no ids for TensorRT-LLM.
func TestCallsOfOtherEngines(t *testing.T) {
	t.Parallel()
	m := tinyChat(t, "{}", "{}", "{{ messages }}")
	for _, c := range []struct {
		item string
		ids  map[shape.Engine]bool
	}{
		{`{"type":"function_call","call_id":"c","name":"f","arguments":"{}"}`, map[shape.Engine]bool{shape.VLLM: true, shape.TRTLLM: true}},
		{`{"type":"function_call","call_id":"c","name":"f","arguments":"{}","namespace":"n"}`, map[shape.Engine]bool{shape.VLLM: true, shape.TRTLLM: false}},
		{`{"type":"custom_tool_call","call_id":"c","name":"f","input":"x"}`, map[shape.Engine]bool{shape.VLLM: true, shape.TRTLLM: false}},
		{`{"type":"custom_tool_call_output","call_id":"c","output":"x"}`, map[shape.Engine]bool{shape.VLLM: true, shape.TRTLLM: false}},
	} {
		for engine, want := range c.ids {
			req, err := body.Parse(body.Responses, []byte(`{"input":[{"role":"user","content":"x"},`+c.item+`]}`))
			if err != nil {
				t.Fatal(err)
			}
			if got, err := m.RenderPrompt(req, engine); err != nil || (len(got.IDs) > 0) != want || (got.Partial == "") != want {
				t.Errorf("%v %s: got %d ids, partial %q, %v, want ids: %v", engine, c.item, len(got.IDs), got.Partial, err, want)
			}
		}
	}
}
