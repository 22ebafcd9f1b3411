package enginesim

import (
	"encoding/json"
	"path/filepath"
	"slices"
	"testing"
)

func TestQwenChat(t *testing.T) {
	tok := qwenTokenizer(t)
	body := func(raw string) *requestBody {
		b, err := parseBody([]byte(raw))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for _, row := range []struct{ name, body, want string }{
		{"one turn", `{"messages":[{"role":"user","content":"Hi"}]}`,
			"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"},
		{"no thinking", `{"messages":[{"role":"system","content":"S"},{"role":"user","content":"Hi"}],"chat_template_kwargs":{"enable_thinking":false}}`,
			"<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"},
		{"thought of a past turn is dropped", `{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"<think>\nt\n</think>\n\nb"},{"role":"user","content":"c"}]}`,
			"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"},
		{"tool call and result", `{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":null,"tool_calls":[{"type":"function","function":{"name":"f","arguments":"{\"x\": 1e5, \"ü\":[true,null]}"}}]},{"role":"tool","content":"r"}]}`,
			"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 100000.0, \"ü\": [true, null]}}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nr\n</tool_response><|im_end|>\n<|im_start|>assistant\n"},
		{"unfinished answer", `{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"The"}],"add_generation_prompt":false,"continue_final_message":true}`,
			"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nThe"},
	} {
		t.Run(row.name, func(t *testing.T) {
			c, err := parseChat(VLLM, body(row.body))
			if err != nil {
				t.Fatal(err)
			}
			if got, err := tok.render(c); err != nil || got != row.want {
				t.Errorf("%v\ngot  %q\nwant %q", err, got, row.want)
			}
		})
	}
	for _, bad := range []string{`{"messages":[]}`, `{"messages":5}`, `{"messages":[{"content":"x"}]}`, `{"messages":[{"role":"user","content":null}]}`,
		`{"messages":[{"role":"user","content":"x"}],"tools":[]}`, `{"messages":[{"role":"user","content":["x"]}]}`} {
		if _, err := parseChat(VLLM, body(bad)); err == nil {
			t.Errorf("%s: no error", bad)
		}
	}
}

// What vLLM 0.32 and SGLang 0.5.23 served, for the model's own template.
func TestQwenChatGoldens(t *testing.T) {
	dir := filepath.Join(shared(t), "data", "engine-truth")
	tok := qwenTokenizer(t)
	for file, engine := range map[string]EngineKind{"chat_vllm_qwen3_even.jsonl.gz": VLLM, "chat_vllm_tools_qwen3_even.jsonl.gz": VLLM, "chat_sglang_qwen3_even.jsonl.gz": SGLang} {
		equal := 0
		jsonLines(t, filepath.Join(dir, file), func(line []byte) {
			var row struct {
				Case     int             `json:"case"`
				Label    string          `json:"label"`
				Template *string         `json:"template"`
				Body     json.RawMessage `json:"body"`
				Render   struct {
					Status int     `json:"status"`
					IDs    []int32 `json:"ids"`
				} `json:"render"`
				Complete struct {
					Status int     `json:"status"`
					IDs    []int32 `json:"ids"`
				} `json:"complete"`
			}
			if err := json.Unmarshal(line, &row); err != nil {
				t.Fatal(err)
			}
			if row.Template != nil {
				return
			}
			if engine == SGLang {
				row.Render = row.Complete
			}
			var ids []int32
			body, err := parseBody(row.Body)
			if err == nil {
				ids, err = tok.promptOf(engine, body)
			}
			if engine == VLLM {
				ids = truncated(body, ids)
			}
			if row.Render.Status == 200 && len(row.Render.IDs) > 0 && (err != nil || !slices.Equal(ids, row.Render.IDs)) {
				t.Errorf("%s case %d %s: %v\n got %q\nwant %q\nbody %s", file, row.Case, row.Label, err, tok.Decode(ids), tok.Decode(row.Render.IDs), row.Body)
				return
			}
			equal++
		})
		t.Logf("%s: %d prompts equal", file, equal)
		if equal == 0 {
			t.Error("nothing compared")
		}
	}
}
