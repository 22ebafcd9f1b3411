package shape

import (
	"errors"
	"testing"

	"github.com/kvlane/kvlane/internal/tokens/body"
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
	m := load(f, "qwen3", Options{ToolParser: true, MaxModelLen: 1000, CacheBytes: -1})
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
