package e2e

import (
	"encoding/json"
	"net/http"
	"os"
	"testing"

	"github.com/kvlane/kvlane/internal/enginesim"
)

// Every tokenizer family on the whole road: the engine has a tokenizer of its own,
// so equal numbers of cached tokens mean equal ids.
func TestEveryTokenizerFamily(t *testing.T) {
	for _, family := range []string{"qwen3", "deepseek_v3", "gptoss", "mistral_nemo", "mistral_7b"} {
		t.Run(family, func(t *testing.T) {
			dir := "../internal/models/" + family
			tok, err := enginesim.LoadTokenizer(os.DirFS(dir))
			if err != nil {
				t.Fatal(err)
			}
			// The simulated engine renders chats as Qwen3 does, so the others are asked by text
			// and not compared by chats.
			b := newBed(t, shape{tokenizer: dir, check: "disabled: true", engine: func(_ int, o *enginesim.Options) { o.Tokenizer = tok }})
			prompt := "Grüße, 東京! def f(x):\n\treturn x ** 2  # 1234567\n" + prose(family, 150)
			ask := func(prompt string) *reply {
				body, err := json.Marshal(map[string]any{"model": modelName, "max_tokens": 4, "prompt": prompt})
				if err != nil {
					t.Fatal(err)
				}
				r := b.post("/v1/completions", body)
				if r.status != http.StatusOK {
					t.Fatalf("status %d: %s", r.status, r.body)
				}
				return r
			}
			first := ask(prompt)
			second := ask(prompt + " And then? " + prose("more", 40))
			if second.target != first.target || second.matched < 100 || second.matched != second.answer.Usage.Details.Cached {
				t.Errorf("on %s, then on %s; %d matched, %d cached", first.target, second.target, second.matched, second.answer.Usage.Details.Cached)
			}
		})
	}
}
