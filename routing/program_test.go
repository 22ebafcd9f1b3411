package routing

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/kvlane/kvlane/kvindex"
)

// New conversations wait while those that have begun use the memory, and these go on. One that has
// been idle for too long, or has ended, makes room.
func TestProgramsAreAdmittedWhole(t *testing.T) {
	config := DefaultConfig()
	config.KVTokens = 10_000
	r, err := New(config)
	if err != nil {
		t.Fatal(err)
	}
	for i, name := range []string{"a", "b"} {
		r.SetTarget(kvindex.Slot(i), TargetInfo{Target: kvindex.Target{Worker: name}, Ready: true})
	}
	now := time.Duration(0)
	turn := func(id string, tokens int64, final bool) bool {
		t.Helper()
		q := &Query{ID: fmt.Sprint(now), Conversation: id, PromptTokens: tokens, Final: final}
		d, err := r.PickRecorded(now, q, nil, nil)
		if held, ok := errors.AsType[*HeldError](err); err != nil && (!ok || held.Slot != NoSlot) {
			t.Fatalf("%s: got %v", id, err)
		}
		if plan, _, again := d.Rerun(); (again == nil) != (err == nil) || plan.Decode != d.Plan.Decode {
			t.Errorf("%s: got %v again, want %v", id, again, err)
		}
		if err == nil {
			r.Release(now, d.Plan.Reservation)
		}
		return err == nil
	}
	for _, step := range []struct {
		id     string
		tokens int64
		final  bool
		later  int // seconds
		want   bool
	}{
		{"one", 50_000, false, 0, true}, // alone: never refused
		{"two", 1000, false, 0, false},
		{"", 50_000, false, 0, true},       // no conversation
		{"one", 11_000, false, 0, true},    // its last prompt counts
		{"two", 900, false, 0, true},       // 11,900 of 12,000
		{"three", 900, false, 0, false},    // has not begun
		{"two", 9000, false, 0, true},      // has begun: grows beyond the memory
		{"three", 900, false, 0, false},    //
		{"one", 11_000, true, 0, true},     // its last turn: frees 11,000
		{"three", 900, false, 0, true},     //
		{"four", 9000, false, 2, false},    // two and three are still expected back
		{"two", 9000, false, 0, true},      //
		{"four", 2500, false, 2, true},     // three is not, 4 s after its turn
		{"five", 9000, false, 0, false},    //
		{"five", 9000, false, 10, true},    // nor any other
		{"six", 1000, false, 0, true},      // 10,000
		{"seven", 50_000, false, 10, true}, // the memory is free again
	} {
		now += time.Duration(step.later) * time.Second
		if got := turn(step.id, step.tokens, step.final); got != step.want {
			t.Errorf("%q of %d tokens at %s with %d live: got admitted %v, want %v", step.id, step.tokens, now, r.anyModel.Live, got, step.want)
		}
	}
	now += time.Minute
	if r.programs.expire(now); len(r.programs.byKey)+len(r.programs.idle) != 0 || r.anyModel.Live != 0 {
		t.Errorf("got %d programs, %d ends, %d tokens when all are over, want none", len(r.programs.byKey), len(r.programs.idle), r.anyModel.Live)
	}
}

// A program whose turn runs stays, however long it takes; without Config.KVTokens none is counted.
func TestARunningProgramIsLive(t *testing.T) {
	config := DefaultConfig()
	for _, config.KVTokens = range []int64{10_000, 0} {
		r, err := New(config)
		if err != nil {
			t.Fatal(err)
		}
		r.SetTarget(0, TargetInfo{Target: kvindex.Target{Worker: "a"}, Ready: true})
		plan, err := r.Pick(0, &Query{ID: "1", Conversation: "1", PromptTokens: 10_000}, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		other := &Query{ID: "2", Conversation: "2", PromptTokens: 10_000}
		if _, err = r.Pick(time.Hour, other, nil, nil); (err != nil) != (config.KVTokens > 0) {
			t.Errorf("%d tokens: got %v while the other runs", config.KVTokens, err)
		}
		other.Waited = -1 // it has targets already and must not wait
		if _, err = r.Pick(time.Hour, other, nil, nil); err != nil {
			t.Errorf("%d tokens: got %v for one that must not wait", config.KVTokens, err)
		}
		r.Release(time.Hour, plan.Reservation)
	}
}

// Only ids begin programs, each for its model, and a program whose turn runs lives on after its last turn.
func TestWhatIsALiveProgram(t *testing.T) {
	config := DefaultConfig()
	config.KVTokens, config.Policy.Sticky = 10_000, Sticky{Mode: StickyTarget, Implicit: true, MatchThreshold: 0.5}
	r, err := New(config)
	if err != nil {
		t.Fatal(err)
	}
	r.SetTarget(0, TargetInfo{Target: kvindex.Target{Worker: "a"}, Ready: true, Models: []string{"A"}})
	r.SetTarget(1, TargetInfo{Target: kvindex.Target{Worker: "b"}, Ready: true, Models: []string{"B"}})
	turn := func(now time.Duration, model, id string, final bool) (Plan, bool) {
		t.Helper()
		d, err := r.PickRecorded(now, &Query{ID: "x", Model: model, Conversation: id, PromptTokens: 5000, Final: final, Prefix: []uint64{1, 2}}, nil, nil)
		if plan, _, again := d.Rerun(); (again == nil) != (err == nil) || plan.Decode != d.Plan.Decode {
			t.Errorf("%s: got %v again, want %v", id, again, err)
		}
		return d.Plan, err == nil
	}
	for i := range 100 { // recognised by their prefix
		now := time.Duration(i) * time.Second
		plan, _ := turn(now, "A", "", false)
		r.Release(now, plan.Reservation)
	}
	if n := len(r.programs.byKey) + len(r.programs.idle); n != 0 {
		t.Errorf("got %d programs and ends without an id, want none", n)
	}
	now := time.Hour
	one, _ := turn(now, "A", "one", true)
	other, _ := turn(now, "B", "other", false)
	if _, ok := turn(now, "A", "two", false); ok {
		t.Error("got a new program admitted while the last turn of the first runs, want it held")
	}
	if _, ok := turn(now, "A", "other", false); ok {
		t.Error("got a program of the other model admitted, want it held")
	}
	again, ok := turn(now, "B", "other", false)
	if !ok {
		t.Error("got a program held that has begun, want it admitted")
	}
	r.Release(now, one.Reservation)
	if _, ok := turn(now, "A", "two", false); !ok {
		t.Error("got a new program held after the last turn of the first, want it admitted")
	}
	r.Release(now, other.Reservation)
	r.Release(now, again.Reservation)
	if n := r.poolOf("B").Live; n != 5000 {
		t.Errorf("got %d live tokens, want 5000", n)
	}
}

// A new program that does not fit is passed by those that do, but not for long.
func TestNewProgramsThatFitPass(t *testing.T) {
	config := DefaultConfig()
	config.KVTokens = 10_000
	r, err := New(config)
	if err != nil {
		t.Fatal(err)
	}
	r.SetTarget(0, TargetInfo{Target: kvindex.Target{Worker: "a"}, Ready: true})
	if _, err := r.Pick(0, &Query{ID: "runs", Conversation: "runs", PromptTokens: 4000}, nil, nil); err != nil {
		t.Fatal(err)
	}
	q := Queue{Bounds: Bounds{Requests: 10}}
	sizes := []int64{5000, 1000, 5000, 500, 100}
	for id := range sizes[:4] {
		q.Push(Waiter{ID: uint64(id), Lane: (&HeldError{Slot: NoSlot, New: true}).Lane("class")})
	}
	var placed []uint64
	place := func(now time.Duration) {
		q.Place(now, r, true, func(w *Waiter) Outcome {
			plan, err := r.Pick(now, &Query{ID: "x", Conversation: fmt.Sprint(w.ID), PromptTokens: sizes[w.ID]}, nil, nil)
			if held, ok := errors.AsType[*HeldError](err); ok {
				return Outcome{Moves: true, To: held.Lane("class")}
			}
			placed = append(placed, w.ID)
			return Placed(&plan)
		})
	}
	if place(time.Second); fmt.Sprint(placed) != "[1 3]" {
		t.Errorf("got %v placed, want those that fit: 1 and 3", placed)
	}
	q.Push(Waiter{ID: 4, Since: passFor, Lane: (&HeldError{Slot: NoSlot, New: true}).Lane("class")})
	if place(passFor); len(placed) != 2 {
		t.Errorf("got %v placed after %s, want the large ones to have their turn", placed, passFor)
	}
}
