package shape_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/encoders"
	"github.com/kvlane/kvlane/internal/tokens/shape"
)

// A family is a row of docs/models.md: models that an engine does not render by a chat template.
type family struct {
	name         string
	modelType    string   // of config.json, "" if it does not matter
	architecture string   // of config.json
	files        []string // others that decide
	vllm, sglang string   // how chats are treated
}

const (
	exact    = "exact"
	template = "by its chat template"
	byLoad   = "by load: its encoder is missing"
)

var families = []family{
	{"gpt-oss", "gpt_oss", "GptOssForCausalLM", nil, exact, template},
	{"DeepSeek-V3.2", "deepseek_v32", "DeepseekV32ForCausalLM", nil, exact, "by load: it has no chat template"},
	{"DeepSeek-V4, text", "deepseek_v4", "DeepseekV4ForCausalLM", nil, exact, byLoad},
	{"DeepSeek-V4 with images", "deepseek_v4", "DeepseekV4ForConditionalGeneration", nil, exact + " up to the first image", byLoad},
	{"DeepSeek-V4.1", "deepseek_v41", "DeepseekV41ForCausalLM", nil, byLoad, byLoad},
	{"Kimi K3", "kimi_k3", "KimiK3ForConditionalGeneration", nil, byLoad, byLoad},
	{"Kimi-Audio", "kimi_audio", "MoonshotKimiaForCausalLM", nil, byLoad, template},
	{"Inkling", "inkling", "InklingForConditionalGeneration", nil, byLoad, byLoad},
	{"Mistral in its own format", "mistral", "MistralForCausalLM", []string{"tekken.json", "consolidated.safetensors"}, exact, template},
	{"Mistral in Hugging Face's format", "mistral", "MistralForCausalLM", []string{"tekken.json"}, template, template},
	{"Cohere", "cohere2", "Cohere2ForCausalLM", nil, template, template},
	{"Kimi K2", "kimi_k2", "DeepseekV3ForCausalLM", nil, template, template},
}

// TestFamilies: each family is treated as docs/models.md says.
func TestFamilies(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../../docs/models.md")
	if err != nil {
		t.Fatal(err)
	}
	raw := byteTokenizer("<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|channel|>")
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			row := fmt.Sprintf("| %s | `%s` | %s | %s |\n", f.name, f.architecture, f.vllm, f.sglang)
			if !strings.Contains(string(page), row) {
				t.Errorf("docs/models.md lacks the row %s", row)
			}
			files := fstest.MapFS{
				"tokenizer.json": {Data: raw},
				"config.json":    {Data: fmt.Appendf(nil, `{"model_type": %q, "architectures": [%q], "vision_config": {}}`, f.modelType, f.architecture)},
			}
			for _, name := range f.files {
				files[name] = &fstest.MapFile{Data: tekkenOf(t, "v13", bytesVocabulary())}
			}
			if f.sglang == template {
				files["chat_template.jinja"] = &fstest.MapFile{Data: []byte("{{ messages[0].content }}")}
			}
			m, err := shape.Load(files, shape.Options{})
			if err != nil {
				t.Fatal(err)
			}
			for engine, want := range map[shape.Engine]string{shape.VLLM: f.vllm, shape.SGLang: f.sglang} {
				req, err := body.Parse(body.Chat, []byte(`{"messages": [{"role": "user", "content": "a"}]}`))
				if err != nil {
					t.Fatal(err)
				}
				res, err := m.RenderPrompt(req, engine)
				got := exact
				switch {
				case errors.Is(err, encoders.ErrMissing):
					got = byLoad
				case errors.Is(err, shape.ErrNoTemplate):
					got = "by load: it has no chat template"
				case err != nil:
					t.Fatal(err)
				case res.Text == "a":
					got = template
				}
				if !strings.HasPrefix(want, got) {
					t.Errorf("%v: got %q, want %q", engine, got, want)
				}
			}
		})
	}
}

// byteTokenizer returns a tokenizer.json with a token for each byte, and these added tokens.
func byteTokenizer(added ...string) []byte {
	vocab, next := map[string]int{}, rune(256)
	for b := range rune(256) {
		c := b
		if b < '!' || b > '~' && b < 0xa1 || b == 0xad {
			c = next
			next++
		}
		vocab[string(c)] = int(b)
	}
	tokens := []map[string]any{}
	for i, content := range added {
		tokens = append(tokens, map[string]any{"id": 256 + i, "content": content, "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false})
	}
	raw, err := json.Marshal(map[string]any{
		"added_tokens": tokens, "model": map[string]any{"type": "BPE", "vocab": vocab, "merges": []string{}},
		"pre_tokenizer": map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
	})
	if err != nil {
		panic(err)
	}
	return raw
}
