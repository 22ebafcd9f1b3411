package shape

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/conv"
)

// A prompt that cannot fit the context is refused before it is tokenized; all others are not.
func TestAPromptBeyondTheContextIsNotTokenized(t *testing.T) {
	const context = 64
	m := load(t, "qwen3", Options{MaxModelLen: context})
	hopeless := strings.Repeat("sea ", 1<<16)
	for _, c := range []struct {
		name, body string
		api        body.API
		early      bool
	}{
		{"completion", `{"prompt":"` + hopeless + `","max_tokens":1}`, body.Completions, true},
		{"chat", `{"messages":[{"role":"user","content":"` + hopeless + `"}]}`, body.Chat, true},
		{"truncated by the engine", `{"prompt":"` + hopeless + `","truncate_prompt_tokens":16,"max_tokens":1}`, body.Completions, false},
		{"only counted", `{"prompt":"` + hopeless + `"}`, body.Tokenize, false},
		{"long tokens", `{"prompt":"` + strings.Repeat(" ", 1<<11) + `","max_tokens":1}`, body.Completions, false},
	} {
		req, err := body.Parse(c.api, []byte(c.body))
		if err != nil {
			t.Fatal(err)
		}
		res, err := m.PromptInto(t.Context(), nil, conv.New(0).Turn(req), VLLM)
		_, refused := errors.AsType[*Refusal](err)
		if refused != c.early {
			t.Errorf("%s: got refusal %v (%v), want %v", c.name, refused, err, c.early)
		}
		if c.early && (res.IDs != nil || !strings.Contains(err.Error(), "at least")) {
			t.Errorf("%s: got %d ids and %v, want a refusal without ids", c.name, len(res.IDs), err)
		}
	}
}

// A request whose context has ended gets a cached result; nothing is computed.
func TestAnEndedContextGetsOnlyWhatIsKept(t *testing.T) {
	m := load(t, "qwen3", Options{})
	c := conv.New(1 << 20)
	raw := []byte(`{"prompt":"` + strings.Repeat("sea ", 4096) + `"}`)
	ended, end := context.WithCancel(t.Context())
	end()
	kept := new(conv.Turn)
	for range 2 {
		if err := c.Parse(kept, body.Completions, raw); err != nil {
			t.Fatal(err)
		}
	}
	if !kept.Kept() {
		t.Fatal("got a body that is not kept, want it kept at its second occurrence")
	}
	if res, err := m.PromptInto(ended, nil, kept, VLLM); !errors.Is(err, context.Canceled) || len(res.IDs) != 0 {
		t.Errorf("before: got %d ids, %v, want none", len(res.IDs), err)
	}
	if _, err := m.PromptInto(t.Context(), nil, kept, VLLM); err != nil {
		t.Fatal(err)
	}
	if res, err := m.PromptInto(ended, nil, kept, VLLM); err != nil || len(res.IDs) != 4097 && len(res.IDs) != 4096 {
		t.Errorf("afterwards: got %d ids, %v, want all of them", len(res.IDs), err)
	}
}
