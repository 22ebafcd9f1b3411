package shape

import (
	"encoding/json"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// FuzzRequests: any request is handled without a crash, and with the same result twice.
func FuzzRequests(f *testing.F) {
	for _, raw := range []string{
		`{"model":"m","messages":[{"role":"user","content":["a",{"type":"text","text":null},{"type":"image_url","image_url":{"url":"x"}}]}],"stop":["",1],"n":"1_0"}`,
		`{"messages":[{"role":"assistant","content":null,"tool_calls":{"a":1},"reasoning_content":"\ud800"}],"tools":[{"function":{"name":"f","parameters":{"type":["int"],"$id":1}}}],"logit_bias":{"1":1e400}}`,
		`{"model":"m","max_tokens":5,"system":[{"type":"text","text":"x"}],"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"1","content":[{"type":"search_result"}]}]}],"tools":[{"type":"bash_1","name":"bash"}]}`,
		`{"model":"m","input":[{"type":"reasoning","summary":[]},{"type":"message","role":"assistant","content":[{"type":"output_text","text":"x"}]}],"tool_choice":{"type":"function"},"truncation":null}`,
		`{"prompt":[1.0,"2",true,[1]],"echo":true,"max_tokens":0,"structured_outputs":{"json":""},"kv_transfer_params":{"prompt_token_ids":[1]}}`,
		`{"text":"x","sampling_params":{"max_new_tokens":-1}}`,
	} {
		for api := body.Chat; api <= body.Tokenize; api++ {
			f.Add(uint8(api), []byte(raw))
		}
	}
	m := load(f, "qwen3", Options{ToolParser: true, MaxModelLen: 1000})
	f.Fuzz(func(t *testing.T, api uint8, raw []byte) {
		kind := body.API(api % uint8(body.Tokenize+1))
		req, err := body.Parse(kind, raw)
		if err != nil {
			return
		}
		for _, engine := range []Engine{VLLM, SGLang, TRTLLM} {
			_, err := m.Prompt(req, engine)
			_, again := m.Prompt(req, engine)
			_, refused := errors.AsType[*Refusal](err)
			if _, refusedAgain := errors.AsType[*Refusal](again); refused != refusedAgain || (err == nil) != (again == nil) {
				t.Errorf("%v %v: %v, then %v", engine, kind, err, again)
			}
		}
	})
}

// FuzzTemplate: a template that a request supplies ends within its bounds, whatever it is, and gives the same ids again.
func FuzzTemplate(f *testing.F) {
	for _, source := range []string{
		"{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "{{ 'x' * 1000000000 }}", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
		"{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "{{ raise_exception('no') }}", "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
		"{{ tools | tojson(indent=2) }}{{ strftime_now('%Y') }}{{ bos_token }}", "{{ messages[0]['content'] | replace('', 'x' * 99) | upper | list | join(',') }}", "{%", "{{ 2 ** 999999 }}",
	} {
		f.Add(source, `"x"`, false, uint8(VLLM))
		f.Add(source, `[{"type":"text","text":"<|im_end|>"}]`, true, uint8(SGLang))
	}
	m := load(f, "qwen3", Options{TrustTemplates: true, ToolParser: true, Now: func() time.Time { return time.Unix(0, 0) }})
	f.Fuzz(func(t *testing.T, source, content string, kwargs bool, which uint8) {
		quoted, err := json.Marshal(source)
		if err != nil || len(source) > 1<<12 {
			return
		}
		raw := `{"messages":[{"role":"user","content":` + content + `}],"chat_template":` + string(quoted) + `}`
		if kwargs {
			raw = `{"messages":[{"role":"user","content":` + content + `}],"chat_template_kwargs":{"chat_template":` + string(quoted) + `}}`
		}
		req, err := body.Parse(body.Chat, []byte(raw))
		if err != nil {
			return
		}
		engine := []Engine{VLLM, SGLang, TRTLLM}[which%3]
		res, err := m.Prompt(req, engine)
		if raised, ok := errors.AsType[*jinja.Error](err); ok && raised.Class == "InternalError" {
			t.Fatal(err)
		}
		if again, errAgain := m.Prompt(req, engine); (err == nil) != (errAgain == nil) || !slices.Equal(res.IDs, again.IDs) {
			t.Fatalf("%v: got %d ids and %v, then %d and %v", engine, len(res.IDs), err, len(again.IDs), errAgain)
		}
		if !templateShare.TryAcquire(templateMemory) {
			t.Fatal("got less than the whole share of memory back, want all of it")
		}
		templateShare.Release(templateMemory)
	})
}
