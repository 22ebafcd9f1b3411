package decide

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/tokens/shape"
)

// chatWith is a chat of about words tokens.
func chatWith(words int, more string) string {
	return `{"model":"demo","messages":[{"role":"user","content":"` + strings.Repeat("sea ", words) + `"}]` + more + `}`
}

// TestAnUnreadCache: a request for which the engine does not read its cache counts on no cached
// token, goes where the load is least and is credited, because the engine stores its prompt.
func TestAnUnreadCache(t *testing.T) {
	const sticky = "routing: {preset: conversation}\n"
	for _, c := range []struct {
		rules, path, session, more string
		unread                     bool
	}{
		{"", "/v1/completions", "", ``, false},
		{"", "/v1/completions", "", `,"prompt_logprobs":null`, false},
		{"", "/v1/completions", "", `,"prompt_logprobs":0`, true},
		{"", "/v1/completions", "", `,"echo":true,"logprobs":1`, true},
		{"", "/v1/completions", "", `,"logprobs":1`, false},
		{"", "/v1/chat/completions", "", `,"logprobs":true`, false},
		{"", "/v1/chat/completions", "", `,"prompt_logprobs":3`, true},
		{sticky, "/v1/completions", `,"session_id":"s"`, ``, false},
		{sticky, "/v1/completions", `,"session_id":"s"`, `,"prompt_logprobs":0`, true},
		{sticky, "/v1/completions", "", ``, false}, // known by its prefix
		{sticky, "/v1/completions", "", `,"prompt_logprobs":0`, true},
	} {
		t.Run(c.rules+c.path+c.session+c.more, func(t *testing.T) {
			b := newBench(t, c.rules, worker("a", 0), worker("b", 0))
			prompt := completion
			if strings.Contains(c.path, "chat") {
				prompt = chatWith
			}
			_, home := b.ask(c.path, prompt(800, c.session))
			if home.Matched != 0 || home.Cache != "" {
				t.Fatalf("first request: got %d tokens matched, cache %q, want 0, none", home.Matched, home.Cache)
			}
			_, e := b.ask(c.path, prompt(800, c.session+c.more))
			if got := e.Matched == 0; got != c.unread {
				t.Errorf("got %d of %d tokens matched, want none: %v", e.Matched, e.PromptTokens, c.unread)
			}
			// The first request still runs on its target, so load alone prefers the other one.
			if got := e.Target != home.Target; got != c.unread {
				t.Errorf("got target %s after %s, want another: %v", e.Target, home.Target, c.unread)
			}
			if got := e.Cache == "unread" && strings.Contains(e.Text(), "cache: unread"); got != c.unread || e.Degraded != "" {
				t.Errorf("got cache %q, degraded %q, want unread: %v and no degradation", e.Cache, e.Degraded, c.unread)
			}
		})
	}
}

// TestAnUnreadPromptIsStored: later requests count on a prompt for which the cache was not read.
func TestAnUnreadPromptIsStored(t *testing.T) {
	b := newBench(t, "", worker("a", 0))
	d, first := b.ask("/v1/completions", completion(800, `,"prompt_logprobs":1`))
	d.Ticket.ResponseHeaders(200, d.Endpoint)
	d.Ticket.End(time.Now())
	if _, e := b.ask("/v1/completions", completion(800, "")); first.Matched != 0 || e.Matched < 780 {
		t.Errorf("got %d, then %d tokens matched, want 0, then at least 780", first.Matched, e.Matched)
	}
}

// TestACacheThatIsReadInPart: SGLang takes at most logprob_start_len tokens from its cache, and
// nothing for overridden embeddings, which it does not store either.
func TestACacheThatIsReadInPart(t *testing.T) {
	b := newBench(t, "", worker("a", 0))
	b.Fleet().Model("demo").Engine = shape.SGLang
	text := strings.Replace(completion(800, ""), "prompt", "text", 1)
	with := func(more string) string { return strings.TrimSuffix(text, "}") + more + "}" }
	b.ask("/generate", text)
	_, whole := b.ask("/generate", text)
	block := int64(b.cfg.Index.BlockSize)
	for start, want := range map[int64]int64{-1: whole.Matched, 0: 0, block - 1: 0, block: block, 5*block + 3: 5 * block, 10_000: whole.Matched} {
		_, e := b.ask("/generate", with(fmt.Sprintf(`,"return_logprob":true,"logprob_start_len":%d`, start)))
		if e.Matched != want || whole.Matched < 780 {
			t.Errorf("logprob_start_len %d: got %d tokens matched, want %d", start, e.Matched, want)
		}
	}
	before := b.credited()
	input := func(more string) string {
		return strings.NewReplacer("prompt", "input", "sea", "sky").Replace(completion(800, more))
	}
	if _, e := b.ask("/v1/embeddings", input(`,"embed_override_token_id":1,"embed_overrides":[[[1]]]`)); e.Matched != 0 || e.Cache != "unread" || b.credited() != before {
		t.Errorf("overridden embeddings: got %d tokens matched, cache %q, %v blocks credited, want 0, unread, %v", e.Matched, e.Cache, b.credited(), before)
	}
	if b.ask("/v1/embeddings", input("")); b.credited() == before {
		t.Error("plain embeddings: got no credit, want some")
	}
}

// TestUnreadRequestsAreNotSplit: vLLM's decode engines would compute such a prompt again; SGLang's
// need the prefill.
func TestUnreadRequestsAreNotSplit(t *testing.T) {
	for connector, engine := range map[string]string{"nixl": "vllm", "sglang": "sglang"} {
		for more, unread := range map[string]bool{``: false, `,"logprobs":1`: false, `,"echo":true`: false, `,"prompt_logprobs":null`: false,
			`,"prompt_logprobs":0`: true, `,"prompt_logprobs":3`: true, `,"echo":true,"logprobs":1`: true} {
			t.Run(connector+more, func(t *testing.T) {
				p := newPoolsOf(t, connector)
				for i := range p.list {
					p.list[i].Engine = engine
				}
				p.Fleet().SetWorkers(p.list)
				d := p.Decide(t.Context(), &extproc.Request{ID: "r", Method: http.MethodPost, Path: "/v1/completions",
					Body: []byte(`{"prompt":"` + strings.Repeat("word ", 400) + `"` + more + `}`)})
				if d.Reject != nil {
					t.Fatalf("rejected: %s", d.Reject.Body)
				}
				want := engine == "sglang" || !unread
				if got := p.decisions.Find("r").Prefill != ""; got != want {
					t.Errorf("got split %v, want %v", got, want)
				}
				if e := p.decisions.Find("r"); e.Degraded != "model_unknown" {
					t.Errorf("degraded: got %q, want only model_unknown", e.Degraded)
				}
				end(&d, 200)
			})
		}
	}
}
