package routing

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/kvlane/kvlane/kvindex"
)

// newRouter returns a router with n ranks of one worker, slots 0 to n-1.
func newRouter(t testing.TB, policy Policy, n int) *Router {
	t.Helper()
	cfg := DefaultConfig()
	cfg.Policy = policy
	r, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	for i := range n {
		r.SetTarget(kvindex.Slot(i), TargetInfo{Target: kvindex.Target{Worker: "w", Rank: int32(i)}, Ready: true})
	}
	return r
}

func preset(t fataler, name string) Policy {
	t.Helper()
	p, ok := Preset(name)
	if !ok {
		t.Fatalf("no preset %q", name)
	}
	return p
}

// newWorkers returns a router with n workers without ranks.
func newWorkers(t testing.TB, policy Policy, n int) *Router {
	t.Helper()
	r := newRouter(t, policy, 0)
	for i := range n {
		r.SetTarget(kvindex.Slot(i), TargetInfo{Target: kvindex.Target{Worker: fmt.Sprint("w", i), Rank: kvindex.NoRank}, Ready: true})
	}
	return r
}

// fataler is what testing and rapid have in common here.
type fataler interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

func mustPick(t fataler, r *Router, q *Query, overlaps ...Overlap) Plan {
	t.Helper()
	plan, err := r.Pick(0, q, overlaps, nil)
	if err != nil {
		t.Fatal(err)
	}
	return plan
}

func held(slot kvindex.Slot, tokens int32) Overlap {
	return Overlap{Slot: slot, Tokens: [kvindex.NumTiers]int32{tokens}}
}

// Two routers of one history decide alike, for every preset.
func TestTheSameStateGivesTheSameDecision(t *testing.T) {
	for _, name := range Presets() {
		a, b := newRouter(t, preset(t, name), 8), newRouter(t, preset(t, name), 8)
		for i := range 500 {
			q := &Query{ID: fmt.Sprint(i), PromptTokens: int64(i * 37 % 5000), Conversation: fmt.Sprint("c", i%40)}
			o := held(kvindex.Slot(i%8), int32(i*13%3000))
			pa, errA := a.Pick(0, q, []Overlap{o}, nil)
			pb, errB := b.Pick(0, q, []Overlap{o}, nil)
			if pa != pb || (errA == nil) != (errB == nil) {
				t.Fatalf("%s, request %d: %+v and %+v", name, i, pa, pb)
			}
		}
		if a.anyModel.Cursor != b.anyModel.Cursor || a.anyModel.Rotation != b.anyModel.Rotation {
			t.Errorf("%s: got other cursors, want the same", name)
		}
	}
}

func TestConversationsSpreadOverRanks(t *testing.T) {
	// 96 conversations of 20 turns over 8 ranks, all with a 2,000-token prompt that
	// rank 0 holds. A rank holds what was sent to it.
	measure := func(name string) (cv, ratio float64) {
		r := newRouter(t, preset(t, name), 8)
		cached := map[[2]int]int32{}
		counts := make([]float64, 8)
		var live []ReservationID
		for turn := range 20 {
			for c := range 96 {
				prompt := int64(5000 + 1000*turn)
				var overlaps []Overlap
				for s := range 8 {
					n := cached[[2]int{c, s}]
					if n == 0 && (s == 0 || counts[s] > 0) {
						n = 2000
					}
					if n > 0 {
						overlaps = append(overlaps, held(kvindex.Slot(s), n))
					}
				}
				plan := mustPick(t, r, &Query{ID: fmt.Sprint(c, turn), PromptTokens: prompt, Conversation: fmt.Sprint(c)}, overlaps...)
				counts[plan.Decode]++
				cached[[2]int{c, int(plan.Decode)}] = int32(prompt)
				if live = append(live, plan.Reservation); len(live) > 24 {
					r.FirstToken(0, live[0])
					r.Release(0, live[0])
					live = live[1:]
				}
			}
		}
		mean, sum, least, most := 96*20/8.0, 0.0, math.Inf(1), 0.0
		for _, n := range counts {
			sum += (n - mean) * (n - mean)
			least, most = min(least, n), max(most, n)
		}
		return math.Sqrt(sum/8) / mean, most / least
	}
	for _, name := range []string{"first-turn-round-robin", "conversation-rank", DefaultPreset} {
		if cv, ratio := measure(name); cv >= 0.10 || ratio >= 1.3 {
			t.Errorf("%s: got CV %.3f and max/min %.2f, want below 0.10 and 1.3", name, cv, ratio)
		}
	}
}

func TestTheSoftCapIsNotBelowTheBusiestTarget(t *testing.T) {
	r := newRouter(t, preset(t, "conversation-rank"), 8)
	for i := range 40 {
		mustPick(t, r, &Query{ID: fmt.Sprint(i), PromptTokens: 10, Conversation: "one"})
	}
	busiest, total := int64(0), int64(0)
	r.Targets(func(_ kvindex.Slot, _ *TargetInfo, l Load) bool {
		busiest, total = max(busiest, l.Active), total+l.Active
		return true
	})
	if busiest != 40 {
		t.Fatalf("busiest rank: got %d requests, want 40", busiest)
	}
	if got := fairShareCap(2, total, 8, busiest); got != 40 {
		t.Errorf("got cap %d, want 40 as the busiest rank has", got)
	}
}

func TestARemovedTargetLeavesNoConversations(t *testing.T) {
	r := newWorkers(t, preset(t, "conversation"), 2)
	gone := mustPick(t, r, &Query{ID: "a", PromptTokens: 500, Conversation: "A", Prefix: []uint64{1, 2, 3}})
	mustPick(t, r, &Query{ID: "b", PromptTokens: 500, Conversation: "B", Prefix: []uint64{1, 2, 4}})
	r.RemoveTarget(gone.Decode)
	c := &r.conversations[mainLeg]
	if c.find(new(Config).keyOf("A")) != none || c.bySlot[gone.Decode] != none || c.size() != 1 || c.pathSteps() != 3 {
		t.Errorf("table %d, steps %d, list of the slot %d", c.size(), c.pathSteps(), c.bySlot[gone.Decode])
	}
	if at, _ := c.deepest([]uint64{1, 2, 3}, 3, func(kvindex.Slot) bool { return true }); at != none {
		t.Error("a block of the removed conversation is still found")
	}
	if p := mustPick(t, r, &Query{ID: "a2", PromptTokens: 500, Conversation: "A"}); p.Decode == gone.Decode {
		t.Error("sent to the removed target")
	}
}

func TestAConversationTableHasRoom(t *testing.T) {
	cfg := DefaultConfig()
	for _, n := range []int{0, -1} {
		cfg.MaxConversations = n
		if _, err := New(cfg); err == nil {
			t.Errorf("max_conversations %d: got no error, want one", n)
		}
	}
}

// Prompts that differ only after a common beginning are one conversation unless the beginning is skipped.
func TestPrefixSkip(t *testing.T) {
	prompt := func(own uint32) []uint32 {
		tokens := make([]uint32, 500)
		for i := range tokens {
			if tokens[i] = 1; i >= 400 {
				tokens[i] = own
			}
		}
		return tokens
	}
	for skip, same := range map[int]bool{0: true, 400: false} {
		r := newWorkers(t, preset(t, "conversation"), 2)
		a := mustPick(t, r, &Query{ID: "a", PromptTokens: 500, Prefix: PrefixBlocks(nil, prompt(2), 128, skip)})
		b := mustPick(t, r, &Query{ID: "b", PromptTokens: 500, Prefix: PrefixBlocks(nil, prompt(3), 128, skip)})
		if (a.Decode == b.Decode) != same {
			t.Errorf("skip %d: got targets %d and %d, want the same one: %v", skip, a.Decode, b.Decode, same)
		}
	}
	if n := len(PrefixBlocks(nil, make([]uint32, 1000), 128, 400)); n != 5 { // ceil(599/128)
		t.Errorf("1000 tokens without 400: got %d blocks, want 5", n)
	}
	if n := len(PrefixBlocks(nil, make([]uint32, 400), 128, 400)); n != 0 {
		t.Errorf("400 tokens without 400: got %d blocks, want 0", n)
	}
}

func TestGeneratedKeysDifferBetweenNodes(t *testing.T) {
	keys := map[Key]bool{}
	for node := range uint64(2) {
		cfg := DefaultConfig()
		cfg.Policy, cfg.Node = preset(t, "conversation"), node+1
		r, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		r.SetTarget(0, TargetInfo{Target: kvindex.Target{Worker: "w"}, Ready: true})
		keys[mustPick(t, r, &Query{ID: "a", PromptTokens: 5, Prefix: []uint64{1}}).Conversation] = true
	}
	if len(keys) != 2 || keys[Key{}] {
		t.Errorf("got keys %v, want two that are not zero", keys)
	}
}

func TestAPromptWithoutBlocksIsNotAConversation(t *testing.T) {
	if blocks := PrefixBlocks(nil, []uint32{1, 2, 3}, 128, 3); len(blocks) != 0 {
		t.Errorf("got %d blocks, want 0", len(blocks))
	}
	r := newRouter(t, preset(t, "conversation"), 2)
	if p := mustPick(t, r, &Query{ID: "a", PromptTokens: 3}); p.Conversation != (Key{}) {
		t.Error("a request without blocks became a conversation")
	}
}

func TestFairShareIsRoundedUp(t *testing.T) {
	if got := fairShareCap(1.5, 4, 4, 0); got != 2 {
		t.Errorf("got cap %d, want 2", got)
	}
}

func TestBoundsOfGateAndCap(t *testing.T) {
	for _, tc := range []struct {
		threshold, multiplier float64
		ok                    bool
	}{
		{-0.1, 1, false}, {1.1, 1, false}, {math.NaN(), 1, false}, {0.1, 0.9, false}, {0.1, 0, false}, {0.1, math.NaN(), false},
		{0, 1, true}, {1, 1, true},
	} {
		cfg := DefaultConfig()
		cfg.Policy.Gate.Threshold, cfg.Policy.Cap.Multiplier = tc.threshold, tc.multiplier
		if _, err := New(cfg); (err == nil) != tc.ok {
			t.Errorf("threshold %v, multiplier %v: got %v, want accepted %v", tc.threshold, tc.multiplier, err, tc.ok)
		}
	}
}

func TestTiesAreDrawnEvenlyByRequest(t *testing.T) {
	p := preset(t, "kv-aware-trt")
	counts := make([]int, 8)
	for i := 1; i <= 8000; i++ {
		r := newRouter(t, p, 8)
		q := &Query{ID: fmt.Sprint(i), PromptTokens: 100}
		first := mustPick(t, r, q)
		r.Release(0, first.Reservation)
		if second := mustPick(t, r, q); second.Decode != first.Decode {
			t.Fatalf("id %d: %d, then %d", i, first.Decode, second.Decode)
		}
		counts[first.Decode]++
	}
	for rank, n := range counts {
		if n < 900 || n > 1100 {
			t.Errorf("rank %d: got %d of 8000, want 900 to 1100", rank, n)
		}
	}
}

func TestPrefixBlocksAreChained(t *testing.T) {
	tokens := make([]uint32, 10)
	for i := range tokens {
		tokens[i] = uint32(i + 1)
	}
	// The last token is never keyed: the third block is token 9 alone.
	got := PrefixBlocks(nil, tokens, 4, 0)
	want := []uint64{924206229973855, 2728178455351807326, 5840390857880430736}
	if len(got) != 3 || got[0] != want[0] || got[1] != want[1] || got[2] != want[2] {
		t.Errorf("got %v, want %v", got, want)
	}
	if got := blockKey(924206229973855, []uint32{5, 6}); got != 6875034662206558884 {
		t.Errorf("second block: got %d, want 6875034662206558884", got)
	}
}

// TestConversationsAgainstNaive runs random operations on the table and on maps.
func TestConversationsAgainstNaive(t *testing.T) {
	const ops = 100_000
	rng := rand.New(rand.NewPCG(1, 2))
	c := newConversations(50, 600)
	type conv struct {
		slot kvindex.Slot
		path []uint64
	}
	naive := map[Key]*conv{}
	for range ops {
		key := new(Config).keyOf(fmt.Sprint(rng.IntN(120)))
		at := c.find(key)
		if _, ok := naive[key]; at != none && !ok {
			t.Fatal("found a conversation that is not there")
		}
		switch slot := kvindex.Slot(rng.IntN(5)); rng.IntN(20) {
		case 0:
			c.removeSlot(slot)
			for k, v := range naive {
				if v.slot == slot {
					delete(naive, k)
				}
			}
		case 1:
			if at != none {
				c.remove(at)
				delete(naive, key)
			}
		default:
			if at == none {
				at = c.put(key, slot)
			} else {
				c.touch(at)
				c.bind(at, slot)
			}
			path := make([]uint64, rng.IntN(30))
			h := uint64(rng.IntN(3))
			for i := range path {
				if rng.IntN(8) == 0 {
					h += uint64(rng.IntN(3))
				}
				h = mix(h + 1)
				path[i] = h
			}
			c.setPath(at, path)
			naive[key] = &conv{slot, path}
		}
		// The table decides who was evicted; it must be within bounds and consistent.
		for k := range naive {
			if c.find(k) == none {
				delete(naive, k)
			}
		}
	}
	sum, listed := 0, 0
	for k, v := range naive {
		at := c.find(k)
		if c.entries[at].slot != v.slot || int(c.entries[at].depth) != len(v.path) {
			t.Errorf("conversation differs: %+v", c.entries[at])
		}
		sum += len(v.path)
		for i, h := range v.path {
			got, depth := c.deepest(v.path[:i+1], i+1, func(kvindex.Slot) bool { return true })
			if got == none || depth != i+1 {
				t.Fatalf("block %d (%x) of a stored path is not found", i, h)
			}
		}
	}
	for _, head := range c.bySlot {
		for at := head; at != none; at = c.entries[at].right {
			listed++
		}
	}
	if c.size() != len(naive) || c.size() > 50 || listed != c.size() {
		t.Errorf("size %d, naive %d, in the lists of slots %d", c.size(), len(naive), listed)
	}
	if c.pathSteps() != sum || sum > 600 {
		t.Errorf("%d steps, stored paths have %d", c.pathSteps(), sum)
	}
	c.removeAll()
	if c.size() != 0 || c.pathSteps() != 0 || c.byHash.size != 0 {
		t.Errorf("left: %d conversations, %d steps, %d nodes", c.size(), c.pathSteps(), c.byHash.size)
	}
}

func (c *conversations) removeAll() {
	for c.oldest != none {
		c.remove(c.oldest)
	}
}

func TestErrorsAreTyped(t *testing.T) {
	r := newRouter(t, preset(t, DefaultPreset), 0)
	_, err := r.Pick(0, &Query{ID: "a"}, nil, nil)
	if _, ok := errors.AsType[*NoTargetError](err); !ok {
		t.Errorf("no target: %v", err)
	}
	p := preset(t, DefaultPreset)
	p.Cap.Hard = 1
	r = newRouter(t, p, 1)
	mustPick(t, r, &Query{ID: "a", PromptTokens: 250_000})
	_, err = r.Pick(0, &Query{ID: "b"}, nil, nil)
	var full *CapacityError
	if !errors.As(err, &full) || full.Counts[ReasonCap] != 1 || full.RetryAfter.Seconds() != 25 {
		t.Errorf("full: %v", err)
	}
}

func TestReasonsHaveNames(t *testing.T) {
	seen := map[string]bool{}
	for r := range NumReasons {
		if name := r.String(); name == "" || seen[name] {
			t.Errorf("reason %d: got name %q, want one of its own", uint8(r), name)
		} else {
			seen[name] = true
		}
	}
	if got := Reason(200).String(); got != "Reason(200)" {
		t.Errorf("got %q, want Reason(200)", got)
	}
}

// A request moves to the target that served it after a retry, and takes its conversation
// along. If its first target left and another one got that slot, the conversation's
// binding to the new one stays.
func TestRebookLeavesTheBindingToALaterTargetOfTheSlot(t *testing.T) {
	for _, replaced := range []bool{false, true} {
		r := newWorkers(t, preset(t, "conversation-rank"), 2)
		pinned := &Query{ID: "a", PromptTokens: 10, Conversation: "c", Pin: &Pin{Worker: "w0", Rank: kvindex.NoRank}}
		first := mustPick(t, r, pinned)
		want := kvindex.Target{Worker: "w1", Rank: kvindex.NoRank}
		if replaced {
			want.Worker = "new"
			r.SetTarget(first.Decode, TargetInfo{Target: want, Ready: true})
			pinned.Pin.Worker = "new"
			mustPick(t, r, pinned)
		}
		if !r.Rebook(0, first.Reservation, 1-first.Decode) {
			t.Fatal("got no move, want one")
		}
		if got, ok := r.Bound(mainLeg, r.config.keyOf("c")); !ok || got != want {
			t.Errorf("target replaced %v: got the conversation bound to %v, want %v", replaced, got, want)
		}
	}
}

// The limit of requests counts what was booked since a report, also where the rule reads reports only.
func TestALimitCountsBookingsThatNoReportKnows(t *testing.T) {
	for _, running := range []int64{0, 1} {
		policy := preset(t, "least-loaded")
		policy.Limits.MaxActive = 2
		r := newRouter(t, policy, 1)
		r.Report(0, 0, Report{Running: running})
		for n := range int64(3) {
			_, err := r.Pick(0, &Query{ID: fmt.Sprint(n), PromptTokens: 10}, nil, nil)
			if full := n >= 2; (err != nil) != full {
				t.Errorf("%d reported, request %d: got error %v, want one: %t", running, n, err, full)
			}
		}
	}
}
