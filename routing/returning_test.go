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

// One client cannot set the share of returning conversations for all; agents have it.
func TestTheShareOfReturningConversations(t *testing.T) {
	newRouter := func() *Router {
		r, err := New(DefaultConfig())
		if err != nil {
			t.Fatal(err)
		}
		r.SetTarget(0, TargetInfo{Target: kvindex.Target{Worker: "w", Rank: kvindex.NoRank}, Ready: true})
		return r
	}
	send := func(r *Router, conversation string, prompt int64) {
		plan := mustPick(t, r, &Query{PromptTokens: prompt, Conversation: conversation})
		r.Release(0, plan.Reservation)
	}
	for name, c := range map[string]struct {
		send     func(r *Router, i int)
		from, to float64
	}{
		"two turns each, and one id with tiny prompts": {from: 0.45, to: 0.52, send: func(r *Router, i int) {
			send(r, fmt.Sprint("two", i/2), 4000)
			if i%2 == 0 {
				send(r, "flood", 1)
			}
		}},
		"single requests, and one id with long prompts": {from: 0, to: 0.1, send: func(r *Router, i int) {
			send(r, fmt.Sprint("one", i), 4000)
			send(r, "flood", 50_000)
		}},
		"no ids, and one id with long prompts": {from: 0, to: 0.1, send: func(r *Router, i int) {
			send(r, "", 4000)
			send(r, "flood", 50_000)
		}},
		"tiny prompts of many ids": {from: 0, to: 0, send: func(r *Router, i int) {
			send(r, fmt.Sprint("tiny", i/20), countedPrompt-1)
		}},
		"agents of 20 turns": {from: 0.93, to: 0.97, send: func(r *Router, i int) {
			send(r, fmt.Sprint("agent", i%10, "/", i/200), 20_000)
		}},
		"agents of 20 turns that begin with a short prompt": {from: 0.93, to: 0.97, send: func(r *Router, i int) {
			conversation := fmt.Sprint("agent", i/20)
			if i%20 == 0 {
				send(r, conversation, 50)
			}
			send(r, conversation, 20_000)
		}},
		"agents of 200 turns": {from: 0.93, to: 0.99, send: func(r *Router, i int) {
			send(r, fmt.Sprint("agent", i%20, "/", i/4000), 20_000)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			r, same := newRouter(), newRouter()
			for i := range 12_000 {
				c.send(r, i)
				c.send(same, i)
				if i == 11_930 { // a router with the state counts alike
					var err error
					if r, err = importState(r.export(nil)); err != nil {
						t.Fatal(err)
					}
				}
			}
			if share := r.anyModel.returning[mainLeg]; share < c.from || share > c.to {
				t.Errorf("got the share %.3f, want %.2f to %.2f", share, c.from, c.to)
			} else if share != same.anyModel.returning[mainLeg] {
				t.Errorf("got the share %v after an import, want %v", share, same.anyModel.returning[mainLeg])
			}
		})
	}
}

// Requests without an id are routed as if no conversation returned.
func TestRequestsWithoutAnIDIgnoreReturningConversations(t *testing.T) {
	for conversation, want := range map[string]kvindex.Slot{"": 0, "known": 1} {
		r, err := New(DefaultConfig())
		if err != nil {
			t.Fatal(err)
		}
		for s := range kvindex.Slot(2) {
			r.SetTarget(s, TargetInfo{Target: kvindex.Target{Worker: fmt.Sprint("w", s), Rank: kvindex.NoRank}, Ready: true})
		}
		known := mustPick(t, r, &Query{PromptTokens: 1000, Conversation: "known"})
		r.Release(0, known.Reservation)
		r.anyModel.returning[mainLeg] = 1
		// 40,000 queued tokens on target 0, which has 9,000 of the prompt: 54,000 at a price of 6, 27,000 at 3
		mustPick(t, r, &Query{PromptTokens: 40_000, Pin: &Pin{Worker: "w0", Rank: kvindex.NoRank}})
		plan := mustPick(t, r, &Query{PromptTokens: 10_000, Conversation: conversation},
			Overlap{Slot: 0, Tokens: [kvindex.NumTiers]int32{9000}})
		if plan.Decode != want {
			t.Errorf("conversation %q: got target %d, want %d", conversation, plan.Decode, want)
		}
	}
}

// A conversation that another replica has begun is known.
func TestConversationsOfOtherReplicasReturn(t *testing.T) {
	r, err := New(DefaultConfig())
	if err != nil {
		t.Fatal(err)
	}
	target := kvindex.Target{Worker: "w", Rank: kvindex.NoRank}
	r.SetTarget(0, TargetInfo{Target: target, Ready: true})
	r.BindRemote(mainLeg, r.config.keyOf("a"), 0, target)
	mustPick(t, r, &Query{PromptTokens: 1000, Conversation: "a"})
	if share := r.anyModel.returning[mainLeg]; share != 1.0/returningOver {
		t.Errorf("got the share %v, want %v", share, 1.0/returningOver)
	}
}

// relay tells other routers what one shares.
type relay struct {
	bookings

	name string
	to   *[]*Router
	own  int
}

func (l *relay) Booked(b *Booking) {
	c := *b
	c.Replica = l.name
	for i, r := range *l.to {
		if i != l.own {
			r.ApplyRemote(0, c)
			r.RemoteRelease(0, c.Replica, c.ID)
		}
	}
}

func (l *relay) Used(leg int, key Key, tail uint64, target kvindex.Target, _ bool) {
	for i, r := range *l.to {
		if i != l.own {
			r.BindRemote(leg, key, tail, target)
		}
	}
}

// Replicas that share learn from all turns and go on with each other's round robin, so that they decide as one does, in both
// pools of a disaggregated fleet; one client's turns count no more with many replicas. Where a target serves several models
// each goes alone.
func TestReplicasLearnTheShareTogether(t *testing.T) {
	type learned struct {
		returning [numLegs]float64
		cursor    [numLegs]int32
	}
	turnsOf := func(i int) string { return fmt.Sprint("agent", i/20) }
	oneID := func(int) string { return "flood" }
	learn := func(count int, models []string, split bool, conversation func(i int) string) (got []learned) {
		var routers []*Router
		for i := range count {
			config := DefaultConfig()
			if split {
				config.Disagg.Mode, config.Disagg.Threshold = ModeThreshold, 1
				config.Disagg.Prefill, config.Disagg.Decode = config.Policy, config.Policy
			}
			r, err := New(config)
			if err != nil {
				t.Fatal(err)
			}
			for slot := range kvindex.Slot(10) {
				role := Both
				if split {
					role = Decode
					if slot > 6 {
						role = Prefill
					}
				}
				r.SetTarget(9-slot, TargetInfo{Target: kvindex.Target{Worker: fmt.Sprint("w", slot), Rank: kvindex.NoRank}, Role: role, Models: models, Ready: true})
			}
			r.Share(&relay{name: fmt.Sprint(i), to: &routers, own: i})
			routers = append(routers, r)
		}
		q := Query{PromptTokens: 4000}
		if len(models) > 0 {
			q.Model = models[0]
		}
		for i := range 600 {
			r := routers[i*7/5%count]
			q.Conversation = conversation(i)
			r.Release(0, mustPick(t, r, &q).Reservation)
		}
		for _, r := range routers {
			p := r.poolOf(q.Model)
			got = append(got, learned{p.returning, p.cursor})
		}
		return got
	}
	for _, c := range []struct {
		name         string
		models       []string
		split        bool
		conversation func(i int) string
		alone        bool
	}{
		{name: "conversations", conversation: turnsOf},
		{name: "conversations of a model, split", models: []string{"m"}, split: true, conversation: turnsOf},
		{name: "one id", conversation: oneID},
		{name: "several models", models: []string{"m", "n"}, conversation: turnsOf, alone: true},
	} {
		one := learn(1, c.models, c.split, c.conversation)[0]
		if one.returning[mainLeg] == 0 || one.cursor[mainLeg] == 0 || c.split != (one.returning[prefillLeg] != 0) || c.split != (one.cursor[prefillLeg] != 0) {
			t.Fatalf("%s: got %v of one replica, want all above 0", c.name, one)
		}
		for i, got := range learn(3, c.models, c.split, c.conversation) {
			if (got != one) != c.alone {
				t.Errorf("%s: got shares and cursors %v at replica %d, %v with one replica, want them equal: %v", c.name, got, i, one, !c.alone)
			}
		}
	}
	r, err := New(DefaultConfig())
	if err != nil {
		t.Fatal(err)
	}
	for slot, worker := range []string{"a", "b", "c"} {
		r.SetTarget(kvindex.Slot(slot), TargetInfo{Target: kvindex.Target{Worker: worker}, Ready: true})
	}
	r.ApplyRemote(0, Booking{Replica: "other", ID: 1, Decode: kvindex.Target{Worker: "a"}, Prefill: kvindex.Target{Worker: "b"}, InTurn: 2})
	if got := r.anyModel.cursor; got != [numLegs]int32{0, 2} {
		t.Errorf("a booking whose prefill target alone was chosen in turn: got the cursors %v, want 0 and 2", got)
	}
}
