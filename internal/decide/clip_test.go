package decide

import (
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/kvlane/kvlane/internal/workers"
)

func TestWhatIsKeptOfAClientIsBounded(t *testing.T) {
	b := newBench(t, "")
	long := strings.Repeat("m", 10<<20)
	everything := worker("c", 0)
	everything.Models = nil
	b.SetWorkers([]workers.Worker{everything})
	r := b.request("/v1/completions?"+long[:1<<16], `{"model":"`+long+`","prompt":"x","session_id":"`+long+`"}`)
	r.ID = long[:1<<16]
	d := b.Decide(t.Context(), r)
	e := b.journal.find(r.ID)
	if e == nil || d.Endpoint == "" {
		t.Fatalf("not routed: %+v", d.Reject)
	}
	if e.Explanation == nil {
		t.Fatal("not explained")
	}
	for name, kept := range map[string]string{
		"id": e.ID, "path": e.Path, "model": e.Model, "conversation": e.Conversation,
		"explained id": e.Explanation.Request, "explained model": e.Explanation.Model, "explained conversation": e.Explanation.Conversation,
	} {
		if len(kept) != maxKept || !strings.HasSuffix(kept, clipMark) {
			t.Errorf("%s: %d bytes kept", name, len(kept))
		}
	}
	text, err := e.MarshalJSON()
	if err != nil || len(text) > 1<<16 {
		t.Errorf("an entry of %d bytes, %v", len(text), err)
	}
}

func TestLongConversationsAreStillToldApart(t *testing.T) {
	b := newBench(t, "", worker("a", 0))
	long := strings.Repeat("s", 4*maxKept)
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

func TestClipCutsBetweenCharacters(t *testing.T) {
	for _, s := range []string{"", "short", strings.Repeat("é", maxKept), "x" + strings.Repeat("é", maxKept), strings.Repeat("\x80", 2*maxKept)} {
		got := clip(s)
		if len(got) > maxKept || utf8.ValidString(s) && !utf8.ValidString(got) || clip(got) != got {
			t.Errorf("%d bytes became %q", len(s), got)
		}
		if len(s) <= maxKept && got != s {
			t.Errorf("%q became %q", s, got)
		}
	}
}
