package e2e

import (
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

// The ids of prompts of 256 tokens or more are sent with the request by default, those of shorter ones are not.
func TestIDsTravelByDefault(t *testing.T) {
	sglang := func(_ int, o *enginesim.Options) { o.Engine = enginesim.SGLang }
	for name, s := range map[string]shape{"vllm": {}, "sglang": {engine: sglang, worker: ", engine: sglang", model: ", engine: sglang"}} {
		t.Run(name, func(t *testing.T) {
			s.otherwise = true
			b := newBed(t, s)
			b.untilHanded(message{"user", strings.Repeat("one more word ", 90)})
			for range 4 {
				if b.handed(message{"user", strings.Repeat("one more word ", 70)}) {
					t.Fatal("got the ids of a prompt of 220 tokens, want none")
				}
			}
		})
	}
}

// handed reports whether the engine got more than was sent.
func (b *bed) handed(m message) bool {
	_, rec, ok := b.seen(b.chat(m).header.Get("X-Request-ID"))
	return ok && rec.BodyBytes > len(chatBody(m))
}

// untilHanded waits until both engines were asked whether they take ids.
func (b *bed) untilHanded(m message) {
	b.t.Helper()
	for range 200 {
		taken := 0
		for range 4 {
			if b.handed(m) {
				taken++
			}
		}
		if taken == 4 {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	b.t.Fatal("no ids were handed on")
}

// The ids are sent with the request, the engine computes the same prompt from them, and the
// second turn is cached as without them.
func TestIDsTravelWithTheRequest(t *testing.T) {
	b := newBed(t, shape{model: ", hand_ids: true", otherwise: true})
	b.untilHanded(message{"user", "Hi"})
	messages := []message{{"system", system}, {"user", "Where are the maps?"}}
	first := b.chat(messages...)
	second := b.chat(append(messages, message{"assistant", first.text()}, message{"user", "And the letters?"})...)
	if second.target != first.target || second.matched == 0 || second.matched != second.answer.Usage.Details.Cached {
		t.Errorf("on %s, then on %s; %d matched, %d cached", first.target, second.target, second.matched, second.answer.Usage.Details.Cached)
	}
	sent := chatBody(messages...)
	_, rec, ok := b.seen(first.header.Get("X-Request-ID"))
	if !ok || rec.BodyBytes <= len(sent) {
		t.Fatalf("the body of %d bytes came as %d bytes", len(sent), rec.BodyBytes)
	}
	if n := first.answer.Usage.Prompt; n < strings.Count(system, " ") {
		t.Errorf("%d prompt tokens", n)
	}
}
