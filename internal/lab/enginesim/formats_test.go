package enginesim

import (
	"os"
	"testing"
	"time"
)

// The texts are those that the families' own templates print with Jinja2.
func TestChatFormats(t *testing.T) {
	const (
		system = `{"role":"system","content":"S"}`
		first  = `{"role":"user","content":"a"},{"role":"assistant","content":"b"}`
		turns  = first + `,{"role":"user","content":[{"type":"text","text":"c"},{"type":"text","text":"d"}]}`
	)
	head := "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\nCurrent date: " +
		time.Now().Format("2006-01-02") + "\n\nReasoning: "
	channels := "\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>"
	for _, row := range []struct{ family, body, want string }{
		{"deepseek_v3", `{"messages":[` + system + `,` + turns + `,` + system + `]}`,
			"<｜begin▁of▁sentence｜>S\n\nS<｜User｜>a<｜Assistant｜>b<｜end▁of▁sentence｜><｜User｜>c\nd<｜Assistant｜>"},
		{"deepseek_v3", `{"messages":[` + first + `],"add_generation_prompt":false,"continue_final_message":true}`,
			"<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜>b"},
		{"deepseek_v3", `{"messages":[{"role":"tool","content":"x"}]}`, ""},
		{"gptoss", `{"messages":[` + turns + `],"reasoning_effort":"low"}`, head + "low" + channels +
			"<|start|>user<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|end|><|start|>user<|message|>c\nd<|end|><|start|>assistant"},
		{"gptoss", `{"messages":[` + system + `,` + first + `],"add_generation_prompt":false}`, head + "medium" + channels +
			"<|start|>developer<|message|># Instructions\n\nS\n\n<|end|><|start|>user<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>"},
		{"mistral_nemo", `{"messages":[` + system + `,` + turns + `]}`, "<s>[INST]a[/INST]b</s>[INST]S\n\nc\nd[/INST]"},
		{"mistral_nemo", `{"messages":[` + system + `,` + first + `]}`, "<s>[INST]a[/INST]b</s>"},
		{"mistral_nemo", `{"messages":[{"role":"user","content":"a"},{"role":"user","content":"a"}]}`, ""},
		{"mistral_7b", `{"messages":[` + system + `,` + turns + `]}`, "<s>[INST] S\n\na [/INST] b</s>[INST] c\nd [/INST]"},
		{"mistral_7b", `{"messages":[` + first + `],"tools":[{"type":"function","function":{"name":"f"}}]}`, ""},
	} {
		tok, err := LoadTokenizer(os.DirFS("../../models/" + row.family))
		if err != nil {
			t.Fatal(err)
		}
		if tok.ChatFormat() != row.family {
			t.Fatalf("%s is written as %s", row.family, tok.ChatFormat())
		}
		body, err := parseBody([]byte(row.body))
		if err != nil {
			t.Fatal(err)
		}
		c, err := parseChat(VLLM, body)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := tok.render(c); (err == nil) != (row.want != "") || got != row.want {
			t.Errorf("%s %s: %v\ngot  %q\nwant %q", row.family, row.body, err, got, row.want)
		}
	}
}

func TestAnUnknownFamilyIsWrittenPlainly(t *testing.T) {
	tok := &Tokenizer{format: formatOf(map[string]int32{"a": 0})}
	got, err := tok.render(&chat{messages: []object{{{"role", "user"}, {"content", "a"}}}, generate: true})
	if want := "user: a\nassistant:"; err != nil || got != want || tok.ChatFormat() != "plain" {
		t.Errorf("%s: got %q, want %q (%v)", tok.ChatFormat(), got, want, err)
	}
}
