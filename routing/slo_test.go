package routing

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/kvlane/kvlane/kvindex"
)

// sloRouter has two trained targets of 10,000 tokens a second, and what it does with requests that none of them meets.
func sloRouter(t *testing.T, unmet Unmet) (*Router, time.Duration) {
	t.Helper()
	r := newRouter(t, preset(t, DefaultPreset), 2)
	r.config.Unmet = unmet
	return r, train(r, 10_000)
}

// unmetAt reports whether a request of 1,000 tokens is refused at the time because of its target.
func unmetAt(t *testing.T, r *Router, now, ttft time.Duration) bool {
	t.Helper()
	plan, err := r.Pick(now, &Query{ID: "asks", PromptTokens: 1000, TTFT: ttft}, nil, nil)
	if _, unmet := errors.AsType[*UnmetError](err); unmet {
		return true
	}
	if err != nil {
		t.Fatal(err)
	}
	r.FirstToken(now+100*time.Millisecond, plan.Reservation)
	r.Release(now+100*time.Millisecond, plan.Reservation)
	return false
}

// Prompts that will not be computed, and those that are, do not count as due, whether or not their first tokens are seen.
func TestWhatHasEndedIsNotDue(t *testing.T) {
	for _, end := range []string{"stays", "abort", "4xx", "whole", "streamed abort", "remote", "remote decoding"} {
		t.Run(end, func(t *testing.T) {
			r, now := sloRouter(t, UnmetRefuse)
			before := planAt(t, r, now, &Query{ID: "before", PromptTokens: 100})
			for i := range 100 {
				id := ReservationID(i + 1)
				b := Booking{Replica: "other", ID: id, Decode: kvindex.Target{Worker: "w", Rank: int32(i % 2)}, Miss: 100_000, KV: 100_000}
				switch end {
				case "remote":
					r.ApplyRemote(now, b)
					continue
				case "remote decoding":
					b.Phase = uint8(decoding)
					r.ApplyRemote(now, b)
					continue
				}
				plan := planAt(t, r, now, &Query{ID: fmt.Sprint(i), PromptTokens: 100_000, Whole: end != "streamed abort"})
				switch end {
				case "stays":
					continue
				case "4xx":
					r.Refused(plan.Reservation)
				case "whole":
					r.FirstToken(now+time.Millisecond, plan.Reservation)
				}
				r.Release(now+time.Millisecond, plan.Reservation)
			}
			now += 10 * time.Millisecond
			for i := range 100 {
				if end == "remote" {
					r.RemoteRelease(now, "other", ReservationID(i+1))
				}
			}
			if got := unmetAt(t, r, now, 2*time.Second); got != (end == "stays") {
				t.Errorf("got refused %v after 100 prompts, want %v", got, end == "stays")
			}
			if end == "stays" {
				return
			}
			// The first token of one that was booked before them does not bring them back.
			r.FirstToken(now+time.Millisecond, before.Reservation)
			for i := range 2 {
				if due := r.targets[i].progress.Due; due > now+2*time.Second {
					t.Errorf("target %d: got due %s after the end of all, want soon", i, due-now)
				}
			}
		})
	}
}

// A first token that does not come makes its target one for which others are refused; now and then one tries it.
func TestLateTargetsAreTried(t *testing.T) {
	r, now := sloRouter(t, UnmetRefuse)
	late := []Plan{}
	for range 2 {
		late = append(late, planAt(t, r, now, &Query{ID: "late", PromptTokens: 100}))
	}
	if late[0].Decode == late[1].Decode {
		t.Fatal("got both late requests on one target, want one on each")
	}
	now += 3 * time.Second
	var tries []Plan
	for i := range 20 {
		plan, err := r.Pick(now, &Query{ID: fmt.Sprint(i), PromptTokens: 1000, TTFT: time.Second}, nil, nil)
		if err == nil {
			tries = append(tries, plan)
		}
		now += 10 * time.Millisecond
	}
	if len(tries) != 2 || tries[0].Decode == tries[1].Decode {
		t.Fatalf("got %d requests placed within 200 ms, want one for each target", len(tries))
	}
	now += retryOverdue - time.Second
	if !unmetAt(t, r, now, time.Second) {
		t.Error("got a further request placed soon, want none while the first tries have no answer")
	}
	r.FirstToken(now, tries[0].Reservation)
	if unmetAt(t, r, now+time.Second, time.Second) {
		t.Error("got a request refused after the first token of a try, want it placed")
	}
}

// Predictions that are wrong because of a burst are mended by requests on targets that have none, and a busy target is
// not tried.
func TestWrongPredictionsRefuseNotForEver(t *testing.T) {
	r := newRouter(t, preset(t, DefaultPreset), 4)
	r.config.Unmet = UnmetRefuse
	const each = 1200 * time.Millisecond
	now, free := time.Second, map[kvindex.Slot]time.Duration{}
	plans := make([]Plan, 60)
	ends := make([]time.Duration, len(plans))
	for i := range plans {
		plans[i] = planAt(t, r, now, &Query{ID: fmt.Sprint(i), PromptTokens: 20_000})
		slot := plans[i].Decode
		free[slot] = max(free[slot], now) + each
		ends[i], now = free[slot], now+150*time.Millisecond
	}
	for i, p := range plans {
		end := max(now, ends[i])
		r.FirstToken(end, p.Reservation)
		r.Release(end, p.Reservation)
	}
	now += time.Hour
	refused := 0
	for range 100 {
		if now += time.Minute; unmetAt(t, r, now, 2*time.Second) {
			refused++
		}
	}
	if refused != 0 {
		t.Errorf("got %d of 100 requests to idle targets refused, want none", refused)
	}
	// Each is busy, with its first token seen.
	var busy []Plan
	for i := range 4 {
		plan := planAt(t, r, now, &Query{ID: fmt.Sprint("busy", i), PromptTokens: 1000, Pin: &Pin{Worker: "w", Rank: int32(i)}})
		r.FirstToken(now+100*time.Millisecond, plan.Reservation)
		busy = append(busy, plan)
	}
	if now += time.Minute; !unmetAt(t, r, now, 10*time.Millisecond) {
		t.Error("got a request that no target meets placed on a busy one, want it refused")
	}
	r.Release(now, busy[2].Reservation)
	plan, err := r.Pick(now, &Query{ID: "tries", PromptTokens: 1000, TTFT: 10 * time.Millisecond}, nil, nil)
	if err != nil || plan.Decode != busy[2].Decode {
		t.Fatalf("got %v on target %d, want it on the one without requests", err, plan.Decode)
	}
	r.FirstToken(now, plan.Reservation)
	r.Release(now, plan.Reservation)
	if !unmetAt(t, r, now+time.Second, 10*time.Millisecond) || unmetAt(t, r, now+retryOverdue, 10*time.Millisecond) {
		t.Error("want the next try after 2 s, and none before")
	}
}

// One that no target meets waits until its target has computed its prompts, and delays no other waiter of it.
func TestUnmetWaitersDelayNone(t *testing.T) {
	r, now := sloRouter(t, UnmetQueue)
	r.config.Hold = 8192
	pin := &Pin{Worker: "w", Rank: 0}
	full := planAt(t, r, now, &Query{ID: "full", PromptTokens: 20_000, Pin: pin})
	planAt(t, r, now, &Query{ID: "other", PromptTokens: 50_000, Pin: &Pin{Worker: "w", Rank: 1}})
	overlaps := []Overlap{held(0, 900)}
	q := Queue{Bounds: Bounds{Requests: 10}}
	queries := map[uint64]*Query{}
	for id := range uint64(6) {
		query := &Query{ID: fmt.Sprint(id), PromptTokens: 1000, Pin: pin}
		if id == 0 {
			query.Pin, query.TTFT = nil, time.Millisecond
		}
		_, err := r.Pick(now, query, overlaps, nil)
		held, ok := errors.AsType[*HeldError](err)
		if !ok || held.Slot != 0 || held.Unmet != (id == 0) {
			t.Fatalf("waiter %d: got %+v, want it held for target 0, unmet %v", id, err, id == 0)
		}
		queries[id] = query
		q.Push(Waiter{ID: id, Lane: held.Lane("class")})
	}
	var placed []uint64
	place := func() {
		q.Place(now, r, true, func(w *Waiter) Outcome {
			plan, err := r.Pick(now, queries[w.ID], overlaps, nil)
			if held, ok := errors.AsType[*HeldError](err); ok {
				return Outcome{Moves: true, To: held.Lane("class")}
			}
			placed = append(placed, w.ID)
			return Placed(&plan)
		})
	}
	// The target has capacity, and still prompts to compute.
	r.FirstToken(now, full.Reservation)
	planAt(t, r, now, &Query{ID: "next", PromptTokens: 5000, Pin: pin})
	if place(); fmt.Sprint(placed) != "[1 2 3 4 5]" {
		t.Fatalf("got waiters %v placed while the target has prompts to compute, want all but 0", placed)
	}
	now += time.Minute
	if place(); len(placed) != 6 {
		t.Errorf("got waiters %v placed a minute later, want all", placed)
	}
}

// First tokens that came while the process paused are not late.
func TestAPauseMakesNoTargetLate(t *testing.T) {
	for _, pauses := range []bool{false, true} {
		r, now := sloRouter(t, UnmetRoute)
		r.Awake(now)
		plan := planAt(t, r, now, &Query{ID: "waits", PromptTokens: 1000})
		end := now + time.Minute
		for ; !pauses && now < end; now += AwakeEvery {
			r.Awake(now)
		}
		r.judge(end)
		if late := r.targets[plan.Decode].progress.Overdue > time.Second; late == pauses {
			t.Errorf("pause %v: got late %v, want %v", pauses, late, !pauses)
		}
	}
}

// A request that moves is due on the target that computes it from then on, and not where it was.
func TestWhatMovesIsDueWhereItGoes(t *testing.T) {
	rebook := func(r *Router, now time.Duration, p *Plan, _ *Query) (kvindex.Slot, bool) {
		return 1 - p.Decode, r.Rebook(now, p.Reservation, 1-p.Decode)
	}
	prefill := func(r *Router, now time.Duration, p *Plan, q *Query) (kvindex.Slot, bool) {
		q.Exclude = []kvindex.Slot{p.Prefill}
		moved, err := r.MovePrefill(now, p.Reservation, q, nil, nil)
		return moved.Prefill, err == nil
	}
	local := func(r *Router, now time.Duration, p *Plan, _ *Query) (kvindex.Slot, bool) {
		return p.Decode, r.ComputeLocally(now, p.Reservation, p.DecodeMiss)
	}
	for _, c := range []struct {
		name  string
		pools bool
		move  func(r *Router, now time.Duration, p *Plan, q *Query) (kvindex.Slot, bool)
	}{{"rebook", false, rebook}, {"move prefill", true, prefill}, {"compute locally", true, local}} {
		t.Run(c.name, func(t *testing.T) {
			r := newRouter(t, preset(t, DefaultPreset), 2)
			if c.pools {
				r = pools(t)
			}
			now := train(r, 10_000)
			for _, slot := range r.order { // prefill workers compute as fast as the others
				r.targets[slot].paces.First[prefillLeg] = r.targets[slot].paces.First[mainLeg]
			}
			q := &Query{ID: "moves", PromptTokens: 20_000}
			plan := planAt(t, r, now, q)
			from := plan.Decode
			if c.pools {
				from = plan.Prefill
			}
			if due := r.targets[from].progress.Due - now; due < time.Second {
				t.Fatalf("got %s due where it was placed, want 2 s", due)
			}
			now += 10 * time.Millisecond
			to, ok := c.move(r, now, &plan, q)
			if !ok || to == from {
				t.Fatalf("got moved %v to target %d, want another than %d", ok, to, from)
			}
			old, here := r.targets[from].progress.Due-now, r.targets[to].progress.Due-now
			if old > 100*time.Millisecond || here < time.Second {
				t.Errorf("after the move: got %s due where it was and %s where it is, want none and 2 s", old, here)
			}
			now += time.Minute
			r.judge(now)
			if late := r.targets[to].progress.Overdue; late < 30*time.Second {
				t.Errorf("without a first token: got the target %s late, want a minute", late)
			}
			r.PrefillDone(now, plan.Reservation)
			r.FirstToken(now, plan.Reservation)
			if r.judge(now + time.Second); r.targets[to].progress.Overdue != 0 {
				t.Errorf("after the first token: got the target %s late, want it in time", r.targets[to].progress.Overdue)
			}
			if r.Release(now, plan.Reservation); total(r) != (Load{}) {
				t.Errorf("got %+v left, want none", total(r))
			}
		})
	}
}
