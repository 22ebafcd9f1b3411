package routing

import (
	"fmt"
	"testing"

	"github.com/kvlane/kvlane/kvindex"
)

// placeNew places 128 new conversations in flight on 64 targets, with prompts of 26,000 tokens
// that share a prefix, after requests of which each conversation sends the given number. It
// returns the targets that got any and the requests of the busiest.
func placeNew(t *testing.T, shared int32, turns int) (used, busiest int) {
	t.Helper()
	const n = 64
	r, err := New(DefaultConfig())
	if err != nil {
		t.Fatal(err)
	}
	for s := range n {
		r.SetTarget(kvindex.Slot(s), TargetInfo{Target: kvindex.Target{Worker: fmt.Sprint("w", s), Rank: kvindex.NoRank}, Ready: true})
	}
	for i := range 2000 {
		plan := mustPick(t, r, &Query{ID: fmt.Sprint("before", i), PromptTokens: 1000, Conversation: fmt.Sprint("before", i/turns)})
		r.Release(0, plan.Reservation)
	}
	counts := make([]int, n)
	for i := range 128 {
		var overlaps []Overlap
		for s, count := range counts {
			if count > 0 || i == 0 && s == 0 { // the first target had the prefix before
				overlaps = append(overlaps, Overlap{Slot: kvindex.Slot(s), Tokens: [kvindex.NumTiers]int32{shared}})
			}
		}
		plan := mustPick(t, r, &Query{ID: fmt.Sprint("new", i), PromptTokens: 26_000, Conversation: fmt.Sprint("new", i)}, overlaps...)
		r.FirstToken(0, plan.Reservation)
		counts[plan.Decode]++
	}
	for _, count := range counts {
		busiest = max(busiest, count)
		if count > 0 {
			used++
		}
	}
	return used, busiest
}

// Where conversations have many turns, new ones spread although they share a long prefix;
// where requests stand alone, they go to the targets that have it.
func TestNewConversationsSpreadWhereConversationsReturn(t *testing.T) {
	for _, c := range []struct {
		shared        int32
		turns         int
		targets, most int
	}{
		{shared: 0, turns: 20, targets: 64, most: 2},
		{shared: 12_500, turns: 20, targets: 64, most: 2},
		{shared: 16_000, turns: 20, targets: 64, most: 2},
		{shared: 25_000, turns: 20, targets: 64, most: 2},
		{shared: 12_500, turns: 1, targets: 8, most: 16},
	} {
		if used, busiest := placeNew(t, c.shared, c.turns); used < c.targets || busiest > c.most {
			t.Errorf("%d shared tokens, %d turns: got %d targets, the busiest with %d requests; want at least %d, with at most %d",
				c.shared, c.turns, used, busiest, c.targets, c.most)
		}
	}
	if used, _ := placeNew(t, 25_000, 1); used > 2 {
		t.Errorf("requests that stand alone: got their prompt on %d targets, want at most 2", used)
	}
}
