package routing

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvlane/kvlane/kvindex"
)

// engine is a worker of bed: it computes prompts one after the other.
type engine struct {
	perToken time.Duration
	// hung engines answer nothing, mute ones begin an answer at once and never go on,
	// failing ones answer with an error at once, breaking ones break their answers off.
	hung, mute, failing, breaking bool
	busy                          time.Duration
}

// bed runs a router in front of modelled engines.
type bed struct {
	t       *testing.T
	r       *Router
	engines []engine
	events  []event // in order of time
	got     []int   // requests per engine
	// patience is how long a client waits for its answer.
	patience time.Duration
	n        int
	suspects map[string]int // judgements by name and reason
}

type event struct {
	at time.Duration
	do func(now time.Duration)
}

func newBed(t *testing.T, n int, change func(*Config)) *bed {
	cfg := DefaultConfig()
	if change != nil {
		change(&cfg)
	}
	r, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	b := &bed{t: t, r: r, engines: make([]engine, n), got: make([]int, n), patience: time.Hour, suspects: map[string]int{}}
	for i := range n {
		b.engines[i].perToken = 100 * time.Microsecond
		r.SetTarget(kvindex.Slot(i), TargetInfo{Target: kvindex.Target{Worker: fmt.Sprint("w", i), Rank: kvindex.NoRank}, Ready: true})
	}
	return b
}

func (b *bed) at(at time.Duration, do func(now time.Duration)) {
	i, _ := slices.BinarySearchFunc(b.events, at, func(e event, at time.Duration) int {
		if e.at <= at {
			return -1
		}
		return 1
	})
	b.events = slices.Insert(b.events, i, event{at, do})
}

// clients sends n requests with prompts of so many tokens, one every so often.
func (b *bed) clients(n int, every time.Duration, tokens int64, change func(*Query)) {
	for i := range n {
		b.at(time.Duration(i)*every, func(now time.Duration) {
			b.n++
			q := &Query{ID: fmt.Sprint("r", b.n), PromptTokens: tokens, Conversation: fmt.Sprint("c", b.n)}
			if change != nil {
				change(q)
			}
			b.send(now, q)
		})
	}
}

func (b *bed) send(now time.Duration, q *Query) {
	plan, err := b.r.Pick(now, q, nil, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	for slot := range b.engines {
		if why := b.r.Suspect(kvindex.Slot(slot)); why != "" {
			b.suspects[fmt.Sprintf("w%d: %s", slot, why)]++
		}
	}
	b.got[plan.Decode]++
	e := &b.engines[plan.Decode]
	first, end := time.Duration(-1), now+b.patience
	switch {
	case e.failing:
		b.r.Failed(plan.Reservation)
		b.r.FirstToken(now, plan.Reservation)
		b.r.Release(now, plan.Reservation)
		return
	case e.breaking:
		b.r.FirstToken(now, plan.Reservation)
		b.r.Release(now, plan.Reservation)
		b.r.BrokenOff(plan.Decode, b.r.targets[plan.Decode].info.Target, true)
		return
	case e.mute:
		first = now
	case !e.hung:
		e.busy = max(e.busy, now) + 10*time.Millisecond + time.Duration(q.PromptTokens)*e.perToken
		first, end = e.busy, e.busy+2*time.Second
	}
	if first >= 0 {
		b.at(first, func(now time.Duration) { b.r.FirstToken(now, plan.Reservation) })
	}
	b.at(end, func(now time.Duration) {
		b.r.Release(now, plan.Reservation)
		if first >= 0 {
			b.r.BrokenOff(plan.Decode, b.r.targets[plan.Decode].info.Target, false)
		}
	})
}

func (b *bed) run(until time.Duration) {
	for len(b.events) > 0 && b.events[0].at <= until {
		e := b.events[0]
		b.events = b.events[1:]
		e.do(e.at)
	}
}

// One of eight workers does not answer. It must not draw the new clients, whether
// they are patient or give up, which empties its queue.
func TestAHungWorkerGetsFewNewClients(t *testing.T) {
	for _, tc := range []struct {
		name     string
		hang     func(*engine)
		patience time.Duration
		most     int
		why      string
	}{
		{"hung", func(e *engine) { e.hung = true }, time.Hour, 5, "w3: no first token"},
		{"hung, impatient clients", func(e *engine) { e.hung = true }, 4 * time.Second, 4, "w3: no first token"},
		{"answers that stop after the first token", func(e *engine) { e.mute = true }, time.Hour, 9, ""},
		{"errors", func(e *engine) { e.failing = true }, time.Hour, 6, "w3: failures"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := newBed(t, 8, nil)
			b.patience = tc.patience
			b.clients(16, 500*time.Millisecond, 2000, nil)
			b.run(8 * time.Second)
			tc.hang(&b.engines[3])
			before := b.got[3]
			for i := range 60 {
				b.at(8*time.Second+time.Duration(i)*500*time.Millisecond, func(now time.Duration) {
					b.send(now, &Query{ID: fmt.Sprint(i), PromptTokens: 2000, Conversation: fmt.Sprint("new", i)})
				})
			}
			b.run(time.Minute)
			if got := b.got[3] - before; got > tc.most || got == 0 {
				t.Errorf("the hung worker got %d of 60 new clients, want 1 to %d", got, tc.most)
			}
			for who := range b.suspects {
				if who != tc.why {
					t.Errorf("suspect: %s, want only %q", who, tc.why)
				}
			}
		})
	}
}

// A worker that hangs still reads out what it has stored: such answers do not show that it computes, others do. No cap
// refuses a lookup, and other replicas do not hear of it.
func TestLookupsAreNoSignThatAWorkerComputes(t *testing.T) {
	for _, lookup := range []bool{true, false} {
		b := newBed(t, 8, func(c *Config) { c.Policy.Cap.Hard, c.Policy.PinOverflow = 100, true })
		b.patience = 4 * time.Second
		shared := &bookings{}
		b.clients(16, 500*time.Millisecond, 2000, nil)
		b.run(8 * time.Second)
		b.engines[3].hung = true
		for i := range 60 {
			at := 8*time.Second + time.Duration(i)*500*time.Millisecond
			b.at(at, func(now time.Duration) {
				b.send(now, &Query{ID: fmt.Sprint(i), PromptTokens: 2000, Conversation: fmt.Sprint("new", i)})
			})
			b.at(at+250*time.Millisecond, func(now time.Duration) {
				b.r.Share(shared)
				defer b.r.Share(nil)
				plan, err := b.r.Pick(now, &Query{ID: fmt.Sprint("get", i), Pin: &Pin{Worker: "w3", Rank: kvindex.NoRank, Strict: true}, Lookup: lookup, Waited: -1}, nil, nil)
				if err != nil || plan.Decode != 3 {
					t.Fatalf("got %+v, %v, want w3", plan, err)
				}
				b.r.FirstToken(now, plan.Reservation)
				b.r.Release(now, plan.Reservation)
			})
		}
		b.run(time.Minute)
		if got := b.suspects["w3: no first token"] > 0; got != lookup {
			t.Errorf("lookup %v: got %v, want the hung worker suspect only if its answers are lookups", lookup, b.suspects)
		}
		if got := shared.n == 0; got != lookup {
			t.Errorf("lookup %v: got %d changes shared", lookup, shared.n)
		}
	}
}

// A strict pin holds under policies that set others aside, and a lookup finds room in a full target.
func TestStrictPins(t *testing.T) {
	for name, change := range map[string]func(*Policy){
		"overflow": func(p *Policy) { p.PinOverflow = true }, "soft": func(p *Policy) { p.PinSoft = true }, "binding wins": func(p *Policy) { p.Sticky.BindingWins, p.Sticky.Mode = true, StickyTarget },
	} {
		for _, strict := range []bool{true, false} {
			b := newBed(t, 2, func(c *Config) { c.Policy.Cap.Hard = 1; change(&c.Policy) })
			pin := &Pin{Worker: "w0", Rank: kvindex.NoRank, Strict: strict}
			if name == "binding wins" {
				b.r.BindRemote(mainLeg, b.r.config.keyOf("c"), 0, 1, kvindex.Target{Worker: "w1", Rank: kvindex.NoRank})
			} else if _, err := b.r.Pick(0, &Query{PromptTokens: 10, Pin: pin}, nil, nil); err != nil {
				t.Fatal(err)
			}
			plan, err := b.r.Pick(0, &Query{PromptTokens: 10, Conversation: "c", Pin: pin}, nil, nil)
			if moved := err == nil && plan.Decode == 1; moved == strict {
				t.Errorf("%s, strict %v: got target %d, %v", name, strict, plan.Decode, err)
			}
			if plan, err := b.r.Pick(0, &Query{Pin: pin, Lookup: true, Waited: -1}, nil, nil); err != nil || plan.Decode != 0 {
				t.Errorf("%s: a lookup at a full target: got %d, %v, want it there", name, plan.Decode, err)
			}
		}
	}
}

// bookings counts what a router shares of its bookings.
type bookings struct {
	Sharer
	n int
}

func (b *bookings) Booked(*Booking)                                     { b.n++ }
func (b *bookings) Progressed(ReservationID, uint8)                     { b.n++ }
func (b *bookings) Released(ReservationID)                              { b.n++ }
func (b *bookings) Used(int, Key, uint64, uint32, kvindex.Target, bool) {}

// New clients come every millisecond. A worker that fails immediately looks idle: it is
// suspect after five failures, not when targets are judged again.
func TestAWorkerThatFailsQuicklyIsSuspectAtTheFifthFailure(t *testing.T) {
	for _, tc := range []struct {
		fails, least, most int
		breaks             bool
	}{
		{100, suspectFailures, suspectFailures, false}, {suspectFailures - 1, 8, 20, false},
		{100, suspectFailures, suspectFailures, true}, {suspectFailures - 1, 8, 20, true},
	} {
		b := newBed(t, 8, nil)
		b.clients(16, 500*time.Millisecond, 2000, nil)
		b.run(8 * time.Second)
		before := b.got[3]
		for i := range 100 {
			b.at(8*time.Second+time.Duration(i)*time.Millisecond, func(now time.Duration) {
				fails := b.got[3]-before < tc.fails
				b.engines[3].failing, b.engines[3].breaking = fails && !tc.breaks, fails && tc.breaks
				b.send(now, &Query{ID: fmt.Sprint(i), PromptTokens: 2000, Conversation: fmt.Sprint("new", i)})
			})
		}
		b.run(9 * time.Second)
		if got := b.got[3] - before; got < tc.least || got > tc.most {
			t.Errorf("up to %d failures, broken off: %t: got %d of 100 new clients at the worker, want %d to %d", tc.fails, tc.breaks, got, tc.least, tc.most)
		}
	}
}

// w0 and w1 answer, w2 still owes its first token when the router's process stops for ten
// seconds. That time is not w2's.
func TestAPauseOfTheRouterIsNotAWait(t *testing.T) {
	const start, begins, ends = 20 * time.Second, 20500 * time.Millisecond, 30 * time.Second
	pick := func(r *Router, now time.Duration) {
		id := mustPickAt(t, r, now, &Query{ID: "x", PromptTokens: 1000, Pin: &Pin{Worker: "w0", Rank: kvindex.NoRank}})
		r.FirstToken(now+100*time.Millisecond, id)
	}
	for _, tc := range []struct {
		name string
		// runs tells the router so during the ten seconds.
		runs bool
		// first is what the router sees first after them.
		first func(r *Router, w2 ReservationID)
		// after is how long w2 continues to owe its first token.
		after time.Duration
		want  string
	}{
		{"a pause, then a pick", false, func(r *Router, _ ReservationID) { pick(r, ends) }, 0, ""},
		{"a pause, then a sign of life", false, func(r *Router, _ ReservationID) { r.Awake(ends) }, 0, ""},
		{"a pause, then the client of w2 gives up", false, func(r *Router, w2 ReservationID) { r.Release(ends, w2) }, 0, ""},
		{"a pause, then a pick whose clock was read before", false, func(r *Router, _ ReservationID) {
			r.Awake(ends)
			mustPickAt(t, r, begins, &Query{ID: "late", PromptTokens: 100, Pin: &Pin{Worker: "w2", Rank: kvindex.NoRank}})
		}, 0, ""},
		{"a pause, then the first token of w2", false, func(r *Router, w2 ReservationID) {
			r.FirstToken(ends, w2)
			if got := r.targets[2].health.Pace; got > 1e-3 {
				t.Errorf("got %g s per token with the pause, want less than 1e-3", got)
			}
		}, 0, ""},
		{"a pause, then a pick that is recorded", false, func(r *Router, _ ReservationID) {
			d, err := r.PickRecorded(ends, &Query{ID: "recorded", PromptTokens: 1000}, []Overlap{held(2, 1000)}, nil)
			if again, _, rerunErr := d.Rerun(); err != nil || rerunErr != nil || again.Decode != 2 || d.Plan.Decode != 2 {
				t.Errorf("got slot %d, error %v, and %d, error %v, from the record, want slot 2", d.Plan.Decode, err, again.Decode, rerunErr)
			}
		}, 0, ""},
		{"a pause, and w2 hangs", false, func(r *Router, _ ReservationID) { pick(r, ends) }, 2 * time.Second, silentTarget},
		{"no pause", true, func(r *Router, _ ReservationID) { pick(r, ends) }, 0, silentTarget},
	} {
		r := newBed(t, 3, nil).r
		r.Awake(start)
		// An earlier request of w1 was lost. A later one overtakes it.
		mustPickAt(t, r, start, &Query{ID: "lost", PromptTokens: 1000, Pin: &Pin{Worker: "w1", Rank: kvindex.NoRank}})
		var w2 ReservationID
		for _, worker := range []string{"w2", "w2", "w1", "w0"} {
			id := mustPickAt(t, r, start+10*time.Millisecond, &Query{ID: worker, PromptTokens: 1000, Pin: &Pin{Worker: worker, Rank: kvindex.NoRank}})
			if worker == "w2" {
				w2 = id
			} else {
				r.FirstToken(start+200*time.Millisecond, id)
			}
		}
		r.FirstToken(begins, mustPickAt(t, r, start+300*time.Millisecond, &Query{ID: "later", PromptTokens: 1000, Pin: &Pin{Worker: "w0", Rank: kvindex.NoRank}}))
		for now := begins; tc.runs && now < ends; now += AwakeEvery {
			r.Awake(now)
		}
		tc.first(r, w2)
		if got := r.Suspect(2); got != "" && !tc.runs {
			t.Errorf("%s: got suspicion %q immediately, want none", tc.name, got)
		}
		for now := ends; now < ends+tc.after; now += AwakeEvery {
			r.Awake(now)
		}
		pick(r, ends+tc.after+judgeEvery)
		if got := r.Suspect(2); got != tc.want {
			t.Errorf("%s: got suspicion %q, want %q", tc.name, got, tc.want)
		}
	}
}

// A replica that hangs does not tell of first tokens. Its bookings, and their end, make no
// target suspect, and two bookings of this replica that wait as long do.
func TestAReplicaThatHangsMakesNoSuspect(t *testing.T) {
	for _, tc := range []struct {
		name string
		own  bool
		end  func(r *Router, now time.Duration)
		want string
	}{
		{"copies wait", false, func(*Router, time.Duration) {}, ""},
		{"copies are released", false, func(r *Router, now time.Duration) { r.RemoteRelease(now, "other", 1) }, ""},
		{"two own requests wait", true, func(*Router, time.Duration) {}, silentTarget},
	} {
		b := newBed(t, 3, nil)
		to := func(now time.Duration, worker string) ReservationID {
			return mustPickAt(t, b.r, now, &Query{ID: "x", PromptTokens: 1000, Pin: &Pin{Worker: worker, Rank: kvindex.NoRank}})
		}
		if tc.own {
			to(0, "w2")
			to(0, "w2")
		} else if !b.r.ApplyRemote(0, Booking{Replica: "other", ID: 1, Decode: b.r.targets[2].info.Target, Miss: 1000, KV: 1000}) {
			t.Fatal("the copy was not applied")
		}
		now := time.Duration(0)
		for ; now < 3*time.Second; now += 100 * time.Millisecond {
			for _, worker := range []string{"w0", "w1"} {
				b.r.FirstToken(now+50*time.Millisecond, to(now, worker))
			}
		}
		tc.end(b.r, now)
		to(now+judgeEvery, "w0")
		if got := b.r.Suspect(2); got != tc.want {
			t.Errorf("%s: got suspicion %q, want %q", tc.name, got, tc.want)
		}
	}
}

func mustPickAt(t *testing.T, r *Router, now time.Duration, q *Query) ReservationID {
	t.Helper()
	plan, err := r.Pick(now, q, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	return plan.Reservation
}

// New clients with long prompts come faster than prompts are computed. A worker whose
// answers begin at once and never end, or fail at once, has no queue: it must not draw
// nearly all of them.
func TestAnEmptyQueueIsNotAWorkerThatWorks(t *testing.T) {
	for name, tc := range map[string]struct {
		e      engine
		tokens int64
		most   int
	}{
		"answers that stop": {engine{mute: true}, 10_000, 30},
		"errors":            {engine{failing: true}, 30_000, 10},
	} {
		b := newBed(t, 8, nil)
		tc.e.perToken = b.engines[3].perToken
		b.engines[3] = tc.e
		b.clients(60, 50*time.Millisecond, tc.tokens, nil)
		b.run(time.Minute)
		if b.got[3] > tc.most {
			t.Errorf("%s: the worker got %d of 60 new clients, want %d at most", name, b.got[3], tc.most)
		}
	}
}

func TestASuspectWorkerComesBack(t *testing.T) {
	for name, hang := range map[string]func(*engine, bool){
		"hung":   func(e *engine, on bool) { e.hung = on },
		"errors": func(e *engine, on bool) { e.failing = on },
		"breaks": func(e *engine, on bool) { e.breaking = on },
	} {
		b := newBed(t, 8, nil)
		b.patience = 5 * time.Second
		hang(&b.engines[3], true)
		b.clients(400, 500*time.Millisecond, 2000, nil)
		b.run(40 * time.Second)
		if b.r.Suspect(3) == "" {
			t.Fatalf("%s: got no suspicion, want one", name)
		}
		hang(&b.engines[3], false)
		before := b.got[3]
		b.run(200 * time.Second)
		if got := b.got[3] - before; got < 20 || b.r.Suspect(3) != "" {
			t.Errorf("%s: after it works again it got %d requests and is suspect for %q, want at least 20 and not suspect", name, got, b.r.Suspect(3))
		}
	}
}

// A target's count of answers that broke off is forgotten when its engine restarts or another target takes its slot.
func TestARestartForgetsBrokenAnswers(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(r *Router, info TargetInfo)
		want   string
	}{
		"the same engine": {func(r *Router, info TargetInfo) { r.SetTarget(2, info) }, failingTarget},
		"a restart": {func(r *Router, info TargetInfo) {
			info.Ready = false
			r.SetTarget(2, info)
			info.Ready = true
			r.SetTarget(2, info)
		}, ""},
		"another target": {func(r *Router, info TargetInfo) {
			old := info.Target
			info.Worker = "other"
			r.SetTarget(2, info)
			for range suspectFailures {
				r.BrokenOff(2, old, true)
			}
			mustPickAt(t, r, time.Minute, &Query{ID: "y", PromptTokens: 10})
		}, ""},
	} {
		b := newBed(t, 4, nil)
		info := b.r.targets[2].info
		for range suspectFailures {
			b.r.BrokenOff(2, info.Target, true)
		}
		mustPickAt(t, b.r, time.Second, &Query{ID: "x", PromptTokens: 10})
		if got := b.r.Suspect(2); got != failingTarget {
			t.Fatalf("got %q, want a suspicion of failures", got)
		}
		tc.change(b.r, info)
		if got := b.r.Suspect(2); got != tc.want {
			t.Errorf("%s: got suspicion %q, want %q", name, got, tc.want)
		}
	}
}

func TestSlowWorkersAreNotSuspect(t *testing.T) {
	for name, run := range map[string]func(b *bed){
		"all become slow": func(b *bed) {
			b.at(20*time.Second, func(time.Duration) {
				for i := range b.engines {
					b.engines[i].perToken *= 30
				}
			})
			b.clients(200, 500*time.Millisecond, 2000, nil)
		},
		"all hang": func(b *bed) {
			b.patience = 10 * time.Second
			b.at(20*time.Second, func(time.Duration) {
				for i := range b.engines {
					b.engines[i].hung = true
				}
			})
			b.clients(200, 500*time.Millisecond, 2000, nil)
		},
		"all fail": func(b *bed) {
			for i := range b.engines {
				b.engines[i].failing = true
			}
			b.clients(200, 500*time.Millisecond, 2000, nil)
		},
		"long prompts": func(b *bed) {
			b.clients(10, 10*time.Second, 200_000, func(q *Query) { q.Pin = &Pin{Worker: "w3", Rank: kvindex.NoRank} })
			b.clients(300, 300*time.Millisecond, 50, nil)
		},
		"half as fast": func(b *bed) {
			b.engines[3].perToken *= 3
			b.clients(300, 300*time.Millisecond, 2000, nil)
		},
		"one lost request": func(b *bed) {
			b.at(time.Second, func(now time.Duration) {
				b.engines[3].hung = true
				b.send(now, &Query{ID: "lost", PromptTokens: 2000, Pin: &Pin{Worker: "w3", Rank: kvindex.NoRank}})
				b.engines[3].hung = false
			})
			b.clients(300, 300*time.Millisecond, 2000, nil)
		},
	} {
		b := newBed(t, 8, nil)
		run(b)
		b.run(2 * time.Minute)
		if len(b.suspects) > 0 {
			t.Errorf("%s: got suspects %v, want none", name, b.suspects)
		}
	}
}

// Where nothing else is eligible a suspect target serves, and its explanation tells why
// it is avoided elsewhere.
func TestNothingElseThanASuspect(t *testing.T) {
	b := newBed(t, 8, nil)
	b.patience = 4 * time.Second
	b.engines[3].hung = true
	b.clients(40, 500*time.Millisecond, 2000, nil)
	b.run(20 * time.Second)
	only := new(SlotSet)
	only.Add(3)
	plan, err := b.r.Pick(20*time.Second, &Query{ID: "a", PromptTokens: 100, Subset: only}, nil, nil)
	if err != nil || plan.Decode != 3 {
		t.Errorf("got slot %d and error %v, want slot 3", plan.Decode, err)
	}
	ex := new(Explanation)
	if _, err := b.r.Pick(20*time.Second, &Query{ID: "b", PromptTokens: 100}, nil, ex); err != nil || ex.Candidates[3].Dropped != "suspect" {
		t.Errorf("got %q and error %v, want the target dropped as suspect\n%s", ex.Candidates[3].Dropped, err, ex)
	}
	// Off means off.
	b = newBed(t, 8, func(c *Config) { c.SuspectAfter = 0 })
	b.engines[3].hung = true
	b.clients(40, 500*time.Millisecond, 2000, nil)
	b.run(20 * time.Second)
	if len(b.suspects) > 0 {
		t.Errorf("got suspects %v with suspect_after 0, want none", b.suspects)
	}
}

// The answer to a prefill leg ends a suspicion of its target. Where legs run concurrently the first token may come before it.
// An error of the decode target does not.
func TestAPrefillThatEndsLateClearsItsTarget(t *testing.T) {
	for name, tc := range map[string]struct {
		answer func(r *Router, now time.Duration, id ReservationID)
		want   string
	}{
		"first token before the prefill's answer": {func(r *Router, now time.Duration, id ReservationID) {
			r.FirstToken(now, id)
			r.PrefillDone(now, id)
		}, ""},
		"prefill's answer before the first token": {func(r *Router, now time.Duration, id ReservationID) {
			r.PrefillDone(now, id)
			r.FirstToken(now, id)
		}, ""},
		"server error": {func(r *Router, now time.Duration, id ReservationID) {
			r.Failed(id)
			r.FirstToken(now, id)
		}, failingTarget},
		"refused by the decode target": {func(r *Router, now time.Duration, id ReservationID) {
			r.Refused(id)
			r.FirstToken(now, id)
		}, failingTarget},
	} {
		r := pools(t)
		q := &Query{ID: "a", PromptTokens: 1000, Exclude: []kvindex.Slot{1}}
		for range suspectFailures {
			id := mustPickAt(t, r, 0, q)
			r.PrefillFailed(id)
			r.Release(0, id)
		}
		now := time.Second
		id := mustPickAt(t, r, now, q)
		if got := r.Suspect(0); got != failingTarget {
			t.Fatalf("%s: got suspicion %q before the answer, want %q", name, got, failingTarget)
		}
		tc.answer(r, now, id)
		r.Release(now, id)
		if got := r.Suspect(0); got != tc.want {
			t.Errorf("%s: got suspicion %q, want %q", name, got, tc.want)
		}
	}
}

// Legs of one conversation that fail let only its requests avoid the prefill target; those of two, or of none, let all.
func TestFailedLegsOfOneConversation(t *testing.T) {
	for name, tc := range map[string]struct {
		ids  [suspectFailures]string
		want string
	}{
		"one": {[...]string{"c", "c", "c", "c", "c"}, ""}, "two": {[...]string{"c", "c", "c", "c", "d"}, failingTarget}, "none": {want: failingTarget},
	} {
		r := pools(t)
		for _, c := range tc.ids {
			id := mustPickAt(t, r, 0, &Query{ID: "a", Conversation: c, PromptTokens: 1000, Exclude: []kvindex.Slot{1}})
			r.PrefillFailed(id)
			r.Release(0, id)
		}
		avoids := r.ledger.get(mustPickAt(t, r, time.Second, &Query{ID: "a", Conversation: "c", PromptTokens: 1000})).Prefill == 1
		if got := r.Suspect(0); got != tc.want || !avoids {
			t.Errorf("%s: got suspicion %q, avoided by the conversation %t, want %q, true", name, got, avoids, tc.want)
		}
	}
}

// An API server may count tokens while its engine fails: only answers that were computed show that it works.
func TestAnAnswerThatComputesNothingAbsolvesNoTarget(t *testing.T) {
	for _, idle := range []bool{false, true} {
		r := newRouter(t, preset(t, DefaultPreset), 2)
		for i := range suspectFailures {
			if i == suspectFailures-1 {
				id := mustPickAt(t, r, 0, &Query{ID: "b", PromptTokens: 10, Exclude: []kvindex.Slot{1}, Idle: idle})
				r.FirstToken(0, id)
				r.Release(0, id)
			}
			id := mustPickAt(t, r, 0, &Query{ID: "a", PromptTokens: 1000, Exclude: []kvindex.Slot{1}})
			r.Failed(id)
			r.Release(0, id)
		}
		mustPickAt(t, r, time.Second, &Query{ID: "a", PromptTokens: 1000})
		if got := r.Suspect(0) != ""; got != idle {
			t.Errorf("the answer before the last failure computes nothing: %t: got suspect %t", idle, got)
		}
	}
}

// A prefill target that hangs answers no leg. Where legs run concurrently the decode target may answer without it: with an error
// that the client caused, or with headers before the first token. That ends no suspicion, and a leg that fails later counts.
func TestAnAnswerOfDecodeSaysNothingOfPrefill(t *testing.T) {
	for name, tc := range map[string]struct {
		decode func(r *Router, now time.Duration, id ReservationID)
		want   string
	}{
		"refused":         {func(r *Router, now time.Duration, id ReservationID) { r.Refused(id); r.FirstToken(now, id) }, silentTarget},
		"headers":         {func(r *Router, now time.Duration, id ReservationID) { r.FirstToken(now, id) }, silentTarget},
		"prefill answers": {func(r *Router, now time.Duration, id ReservationID) { r.FirstToken(now, id); r.PrefillDone(now, id) }, ""},
	} {
		r := pools(t)
		ask := func(now time.Duration, prefill kvindex.Slot) ReservationID {
			id := mustPickAt(t, r, now, &Query{ID: "a", PromptTokens: 1000, Exclude: []kvindex.Slot{1 - prefill}})
			if got := r.ledger.get(id).Prefill; got != prefill {
				t.Fatalf("got prefill slot %d, want %d", got, prefill)
			}
			return id
		}
		id := ask(0, 0)
		ask(0, 0)
		for now := time.Second; now <= 20*time.Second; now += time.Second {
			other := ask(now, 1)
			r.PrefillDone(now+10*time.Millisecond, other)
			r.Release(now+10*time.Millisecond, other)
		}
		if got := r.Suspect(0); got != silentTarget {
			t.Fatalf("%s: got suspicion %q before the answer, want %q", name, got, silentTarget)
		}
		tc.decode(r, 20*time.Second, id)
		if got := r.Suspect(0); got != tc.want {
			t.Errorf("%s: got suspicion %q, want %q", name, got, tc.want)
		}
	}
	r := pools(t)
	for now := range time.Duration(suspectFailures) {
		id := mustPickAt(t, r, now, &Query{ID: "a", PromptTokens: 1000, Exclude: []kvindex.Slot{1}})
		r.FirstToken(now, id)
		r.PrefillFailed(id)
		r.Release(now, id)
	}
	mustPickAt(t, r, time.Second, &Query{ID: "a", PromptTokens: 1000})
	if got := r.Suspect(0); got != failingTarget {
		t.Errorf("legs that fail after decode's headers: got suspicion %q, want %q", got, failingTarget)
	}
}

// A worker that lost its cache works again, and the others hold all prompts: none comes to it that could clear it. It may be
// tried after a while, which is when it is no longer avoided, and a request that does try it is the only one.
func TestASuspicionLapsesWithoutRequests(t *testing.T) {
	b := newBed(t, 4, nil)
	b.r.Awake(time.Millisecond)
	for range suspectFailures {
		b.r.BrokenOff(3, b.r.targets[3].info.Target, true)
	}
	var held []Overlap
	for slot := range kvindex.Slot(3) {
		held = append(held, Overlap{Slot: slot, Tokens: [kvindex.NumTiers]int32{1000}})
	}
	pick := func(now time.Duration, overlaps []Overlap) kvindex.Slot {
		plan, err := b.r.Pick(now, &Query{ID: fmt.Sprint(now), PromptTokens: 1000}, overlaps, nil)
		if err != nil {
			t.Fatal(err)
		}
		b.r.FirstToken(now, plan.Reservation)
		if plan.Decode != 3 {
			b.r.Release(now, plan.Reservation)
		}
		return plan.Decode
	}
	const begins = 100 * time.Millisecond
	now := begins
	for ; now < 2*probeEvery; now += begins {
		if slot := pick(now, held); slot == 3 {
			t.Fatalf("after %v: got the target without the prompt, want one that holds it", now)
		}
		want := ""
		if now < begins+probeEvery {
			want = failingTarget
		}
		if got := b.r.Suspect(3); got != want {
			t.Fatalf("after %v: got suspicion %q, want %q", now, got, want)
		}
	}
	elsewhere := []Overlap{{Slot: 3, Tokens: [kvindex.NumTiers]int32{1000}}}
	if slot := pick(now, elsewhere); slot != 3 || b.r.Suspect(3) != failingTarget {
		t.Errorf("got slot %d and suspicion %q for a prompt that only the target holds, want slot 3 and %q until it has answered", slot, b.r.Suspect(3), failingTarget)
	}
	if slot := pick(now+time.Second, elsewhere); slot == 3 {
		t.Error("got a second request on the target that is being tried, want one elsewhere")
	}
}
