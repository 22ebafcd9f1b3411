package routing

import (
	"cmp"
	"fmt"
	"testing"

	"github.com/kvlane/kvlane/kvindex"
)

// placeNew places 128 new conversations in flight on 64 targets, with prompts of 26,000 tokens
// that share a prefix, after requests of which each conversation sends the given number, with prompts
// that have all but brings tokens cached. It returns the targets that got any and the requests of the busiest.
func placeNew(t *testing.T, shared int32, turns int, brings int32) (used, busiest int) {
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
		cached := Overlap{Slot: kvindex.Slot(i % n), Tokens: [kvindex.NumTiers]int32{1000 - brings}}
		plan := mustPick(t, r, &Query{ID: fmt.Sprint("before", i), PromptTokens: 1000, Conversation: fmt.Sprint("before", i/turns)}, cached)
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
		{shared: 12_500, turns: 1, targets: 7, most: 19}, // a miss costs 1.5 a token, as much as 19 requests
	} {
		if used, busiest := placeNew(t, c.shared, c.turns, 1000); used < c.targets || busiest > c.most {
			t.Errorf("%d shared tokens, %d turns: got %d targets, the busiest with %d requests; want at least %d, with at most %d",
				c.shared, c.turns, used, busiest, c.targets, c.most)
		}
	}
	// Questions about a document compute little after it. With 3 for a miss, two targets cost less than 75 requests on one.
	for _, c := range []struct {
		shared, brings int32
		low, high      int
	}{{25_000, 20, 1, 3}, {25_000, 1000, 64, 64}, {5000, 20, 64, 64}} {
		if used, _ := placeNew(t, c.shared, 20, c.brings); used < c.low || used > c.high {
			t.Errorf("%d shared tokens, later turns bring %d: got %d targets, want %d to %d", c.shared, c.brings, used, c.low, c.high)
		}
	}
	// In flight together, 128 of them cost more than computing the prompt a few times; with all at the full price of a miss, not.
	if used, busiest := placeNew(t, 25_000, 1, 1000); used < 4 || used > 8 {
		t.Errorf("requests that stand alone: got their prompt on %d targets, the busiest with %d; want 4 to 8", used, busiest)
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
			if share := r.anyModel.Returning[mainLeg]; share < c.from || share > c.to {
				t.Errorf("got the share %.3f, want %.2f to %.2f", share, c.from, c.to)
			} else if share != same.anyModel.Returning[mainLeg] {
				t.Errorf("got the share %v after an import, want %v", share, same.anyModel.Returning[mainLeg])
			}
			if alone, want := r.anyModel.Alone[mainLeg], same.anyModel.Alone[mainLeg]; alone != want {
				t.Errorf("got the share %v of first turns after an import, want %v", alone, want)
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
		r.anyModel.Returning[mainLeg] = 1
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
	r.BindRemote(mainLeg, r.config.keyOf("a"), 0, 1, target)
	mustPick(t, r, &Query{PromptTokens: 1000, Conversation: "a"})
	if share := r.anyModel.Returning[mainLeg]; share != 1.0/returningOver {
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

func (l *relay) Used(leg int, key Key, tail uint64, turns uint32, target kvindex.Target, _ bool) {
	for i, r := range *l.to {
		if i != l.own {
			r.BindRemote(leg, key, tail, turns, target)
		}
	}
}

// learned is what a pool has learned that other replicas are told of.
type learned struct {
	returning [numLegs]float64
	cursor    [numLegs]int32
}

func learnedFor(r *Router, model string) learned {
	p := r.poolOf(model)
	return learned{p.Returning, p.Cursor}
}

// sharing returns routers that tell each other of all, with ten targets each. With a threshold
// three of these compute the prompts that are longer.
func sharing(t *testing.T, count int, models []string, threshold int64) []*Router {
	t.Helper()
	var routers []*Router
	for i := range count {
		config := DefaultConfig()
		if threshold > 0 {
			config.Disagg.Mode, config.Disagg.Threshold = ModeThreshold, threshold
			config.Disagg.Prefill, config.Disagg.Decode = config.Policy, config.Policy
		}
		r, err := New(config)
		if err != nil {
			t.Fatal(err)
		}
		for slot := range kvindex.Slot(10) {
			role := Both
			if threshold > 0 {
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
	return routers
}

// Replicas that share learn from all turns and go on with each other's round robin, so that they decide as one does, in both
// pools of a disaggregated fleet; a turn counts in the pools that it is for, and what does not count at one replica does at none;
// one client's turns count no more with many replicas. Where a target serves several models each goes alone.
func TestReplicasLearnTheShareTogether(t *testing.T) {
	turnOf := func(i int) Query { return Query{PromptTokens: 4000, Conversation: fmt.Sprint("agent", i/20)} }
	// begin returns conversations of three turns, of which the first is of another length.
	begin := func(first int64) func(i int) Query {
		return func(i int) Query {
			q := Query{PromptTokens: 8000, Conversation: fmt.Sprint("begun", i/3)}
			if i%3 == 0 {
				q.PromptTokens = first
			}
			return q
		}
	}
	for _, c := range []struct {
		name      string
		models    []string
		threshold int64
		query     func(i int) Query
		alone     bool
	}{
		{name: "conversations", query: turnOf},
		{name: "conversations of a model, split", models: []string{"m"}, threshold: 1, query: turnOf},
		{name: "later turns split", threshold: 3000, query: begin(1000)},
		{name: "a short prompt before", query: begin(100)},
		{name: "one id", query: func(int) Query { return Query{PromptTokens: 4000, Conversation: "flood"} }},
		{name: "one id with short prompts", query: func(i int) Query { return Query{PromptTokens: 4000 - 3900*int64(i%2), Conversation: "flood"} }},
		{name: "one id with retries", query: func(i int) Query {
			return Query{PromptTokens: 4000, Conversation: "flood", Exclude: []kvindex.Slot{5}[:i%2]}
		}},
		{name: "several models", models: []string{"m", "n"}, query: turnOf, alone: true},
	} {
		learn := func(count int) (got []learned) {
			model := ""
			if len(c.models) > 0 {
				model = c.models[0]
			}
			routers := sharing(t, count, c.models, c.threshold)
			for i := range 600 {
				r, q := routers[i*7/5%count], c.query(i)
				q.Model = model
				r.Release(0, mustPick(t, r, &q).Reservation)
			}
			for _, r := range routers {
				got = append(got, learnedFor(r, model))
			}
			return got
		}
		one, split := learn(1)[0], c.threshold > 0
		if one.returning[mainLeg] == 0 || one.cursor[mainLeg] == 0 || split != (one.returning[prefillLeg] != 0) || split != (one.cursor[prefillLeg] != 0) {
			t.Fatalf("%s: got %v of one replica, want all above 0", c.name, one)
		}
		for i, got := range learn(3) {
			if (got != one) != c.alone {
				t.Errorf("%s: got shares and cursors %v at replica %d, %v with one replica, want them equal: %v", c.name, got, i, one, !c.alone)
			}
		}
	}
	r := sharing(t, 1, nil, 0)[0]
	r.ApplyRemote(0, Booking{Replica: "other", ID: 1, Decode: r.targets[9].info.Target, Prefill: r.targets[8].info.Target, Turn: [numLegs]uint8{0, 2}, InTurn: 2})
	if got, want := learnedFor(r, ""), (learned{[numLegs]float64{0, 1.0 / returningOver}, [numLegs]int32{0, 2}}); got != want {
		t.Errorf("a booking whose prefill target alone was chosen in turn, for a later turn: got %v, want %v", got, want)
	}
}

// A request that names no model moves only the pool of such requests, at the others too.
func TestReplicasKeepModelsApart(t *testing.T) {
	for model, moved := range map[string]bool{"": false, "unlisted": false, "m": true} {
		routers := sharing(t, 2, []string{"m"}, 0)
		for i := range 50 {
			plan := mustPick(t, routers[0], &Query{PromptTokens: 4000, Conversation: fmt.Sprint("agent", i/5), Model: model})
			routers[0].Release(0, plan.Reservation)
		}
		if here, there := learnedFor(routers[0], model), learnedFor(routers[1], "m"); here == (learned{}) || (there != learned{}) != moved || moved && here != there {
			t.Errorf("requests for model %q: got %v here and %v for model m there, want the same there: %v, or none", model, here, there, moved)
		}
	}
}

// Where hardly a request continues a conversation, a miss costs little while a target is idle, and twice as much as
// otherwise where all targets are busy. It costs as much as before for requests without an id, and where conversations return.
func TestAMissIsCheapForOneShotRequestsOnAnIdleTarget(t *testing.T) {
	for name, c := range map[string]struct {
		turns, active int
		more          int // requests on the target that has the prompt, 12 if 0
		speculative   int32
		id            string
		off           bool // cost.one_shot: 1
		want          kvindex.Slot
	}{
		"one target is idle":                 {turns: 1, id: "new", want: 1},
		"both are busy":                      {turns: 1, id: "new", active: 200, more: 60, want: 0},
		"both are busy, no id":               {turns: 1, active: 200, more: 60, want: 1},
		"both are very busy, one much more":  {turns: 1, id: "new", active: 200, more: 100, want: 1},
		"it is being computed there now":     {turns: 1, id: "new", speculative: 100, want: 0},
		"the rule is off":                    {turns: 1, id: "new", off: true, want: 0},
		"both are busy, the rule is off":     {turns: 1, id: "new", active: 200, more: 60, off: true, want: 1},
		"without an id":                      {turns: 1, want: 0},
		"half of the requests begin one":     {turns: 2, id: "new", want: 0},
		"few turns were seen, all first":     {turns: 0, id: "new", want: 0},
		"four turns in each, a known prompt": {turns: 4, id: "before1", want: 0},
	} {
		cfg := DefaultConfig()
		if c.off {
			cfg.Policy.Cost.OneShot = 1
		}
		r, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		for s := range kvindex.Slot(2) {
			r.SetTarget(s, TargetInfo{Target: kvindex.Target{Worker: fmt.Sprint("w", s), Rank: kvindex.NoRank}, Ready: true})
		}
		n := 2000
		if c.turns == 0 {
			n, c.turns = 300, 1
		}
		for i := range n {
			plan := mustPick(t, r, &Query{ID: fmt.Sprint("before", i), PromptTokens: 1000, Conversation: fmt.Sprint("before", i/c.turns)})
			r.Release(0, plan.Reservation)
		}
		for i := range 2 * c.active {
			plan := mustPick(t, r, &Query{ID: fmt.Sprint("busy", i), Pin: &Pin{Worker: fmt.Sprint("w", i%2), Rank: kvindex.NoRank}})
			r.FirstToken(0, plan.Reservation)
		}
		// 6,000 tokens of the prompt are worth 36,000 at a price of 6, 7,200 to 72,000 at those of one-shot requests
		for i := range cmp.Or(c.more, 12) {
			plan := mustPick(t, r, &Query{ID: fmt.Sprint("more", i), Pin: &Pin{Worker: "w0", Rank: kvindex.NoRank}})
			r.FirstToken(0, plan.Reservation)
		}
		plan := mustPick(t, r, &Query{ID: "last", PromptTokens: 10_000, Conversation: c.id}, Overlap{Slot: 0, Tokens: [kvindex.NumTiers]int32{6000}, Speculative: c.speculative})
		if plan.Decode != c.want {
			t.Errorf("%s: got target %d, want %d", name, plan.Decode, c.want)
		}
	}
}
