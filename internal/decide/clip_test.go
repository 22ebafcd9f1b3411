package decide

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/workers"
)

func TestWhatIsKeptOfAClientIsBounded(t *testing.T) {
	b := newBench(t, "")
	long := strings.Repeat("m", 10<<20)
	everything := worker("c", 0)
	everything.Models = nil
	b.Fleet().SetWorkers([]workers.Worker{everything})
	r := b.request("/"+long[:1<<16]+"/v1/completions", `{"model":"`+long+`","prompt":"x","session_id":"`+long[:4000]+`"}`)
	r.ID = long[:1<<16]
	d := b.Decide(t.Context(), r)
	e := b.decisions.Find(r.ID)
	if e == nil || d.Endpoint == "" {
		t.Fatalf("not routed: %+v", d.Reject)
	}
	if e.Explanation == nil {
		t.Fatal("not explained")
	}
	for name, kept := range map[string]string{
		"id": e.ID, "model": e.Model, "conversation": e.Conversation,
		"explained id": e.Explanation.Request, "explained model": e.Explanation.Model, "explained conversation": e.Explanation.Conversation,
	} {
		if len(kept) != observe.MaxClient || !strings.HasSuffix(kept, "…") {
			t.Errorf("%s: got %d bytes, want %d", name, len(kept), observe.MaxClient)
		}
	}
	text, err := e.MarshalJSON()
	if err != nil || len(text) > 1<<16 {
		t.Errorf("an entry of %d bytes, %v", len(text), err)
	}
}

func TestLongConversationIDsStayDistinct(t *testing.T) {
	b := newBench(t, "", worker("a", 0))
	long := strings.Repeat("s", 4*observe.MaxClient)
	keys := map[string]bool{}
	for _, end := range []string{"1", "2"} {
		b.mu.Lock()
		b.record = 1
		b.mu.Unlock()
		_, e := b.ask("/v1/completions", completion(40, `,"session_id":"`+long+end+`"`))
		keys[fmt.Sprint(e.Recorded.Plan.Conversation)] = true
	}
	if len(keys) != 2 {
		t.Errorf("keys %v", keys)
	}
}
