package e2e

import (
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

// Every tokenizer family end to end: the predicted numbers of cached tokens equal the
// reported ones over turns, and all comparisons of ids agree.
func TestEveryTokenizerFamily(t *testing.T) {
	for _, family := range []string{"qwen3", "deepseek_v3", "gptoss", "mistral_nemo", "mistral_7b"} {
		t.Run(family, func(t *testing.T) {
			dir := "../internal/tokens/models/" + family
			tok, err := enginesim.LoadTokenizer(os.DirFS(dir))
			if err != nil {
				t.Fatal(err)
			}
			if tok.Plain() {
				t.Fatal("got no chat template, want one")
			}
			b := newBed(t, shape{tokenizer: dir, check: "every: 1, retry: 1s", engine: func(_ int, o *enginesim.Options) { o.Tokenizer = tok }})
			hard := "Grüße, 東京! def f(x):\n\treturn x ** 2  # 1234567\n"

			first := b.ask(hard + prose(family, 150))
			second := b.ask(hard + prose(family, 150) + " And then? " + prose("more", 40))
			b.served(second, first, 100)

			talk := []message{{"user", hard + prose(family+" talk", 150)}}
			last := b.chat(talk...)
			for _, question := range []string{"And then?", "Why? " + hard} {
				talk = append(talk, message{"assistant", last.text()}, message{"user", question})
				next := b.chat(talk...)
				b.served(next, last, 0)
				last = next
			}
			if last.matched < 100 {
				t.Errorf("the third turn found %d tokens", last.matched)
			}

			out, err := exec.Command(kvlaneBinary, "tokens-check", "--tokenizer", dir, "--engine", b.engines[0].URL()).CombinedOutput()
			if err != nil || !strings.Contains(string(out), "7 prompts compared, 0 differ") {
				t.Errorf("tokens-check: %v\n%s", err, out)
			}
			b.until("requests in service were compared", func() bool { return b.metric("kvlane_token_checks_total", `outcome="equal"`) >= 10 })
			if n := b.metric("kvlane_token_checks_total", `outcome="different"`); n != 0 {
				t.Errorf("%v comparisons in service differ", n)
			}
		})
	}
}

// ask sends a prompt as text.
func (b *bed) ask(prompt string) *reply {
	b.t.Helper()
	body, err := json.Marshal(map[string]any{"model": modelName, "max_tokens": 4, "prompt": prompt})
	if err != nil {
		b.t.Fatal(err)
	}
	r := b.post("/v1/completions", body)
	if r.status != http.StatusOK {
		b.t.Fatalf("status %d: %s", r.status, r.body)
	}
	return r
}

// served checks that a request went to the rank that cached the one before and found there
// the predicted tokens, at least `least`.
func (b *bed) served(next, before *reply, least int) {
	b.t.Helper()
	if next.target != before.target || next.matched < least || next.matched != next.answer.Usage.Details.Cached {
		b.t.Errorf("on %s, then on %s; %d matched, %d cached", before.target, next.target, next.matched, next.answer.Usage.Details.Cached)
	}
}
