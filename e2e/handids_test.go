package e2e

import (
	"strings"
	"testing"
	"time"
)

// The ids are sent with the request, the engine computes the same prompt from them, and the
// second turn is cached as without them.
func TestIDsTravelWithTheRequest(t *testing.T) {
	b := newBed(t, shape{model: ", hand_ids: true", otherwise: true})
	for range 200 { // until both engines were asked whether they take ids
		taken := 0
		for range 4 {
			_, rec, ok := b.seen(b.chat(message{"user", "Hi"}).header.Get("X-Request-ID"))
			if ok && rec.BodyBytes > len(chatBody(message{"user", "Hi"})) {
				taken++
			}
		}
		if taken == 4 {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
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
