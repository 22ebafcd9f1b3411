package routing

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/kvindex"
)

// heldRouter has two targets that hold requests above 100 queued tokens, and a queue. With
// returning, each of its conversations has had several turns.
func heldRouter(t *testing.T, returning bool) (*Router, *Queue) {
	t.Helper()
	config := DefaultConfig()
	config.Hold = 100
	r, err := New(config)
	if err != nil {
		t.Fatal(err)
	}
	for i, name := range []string{"a", "b"} {
		r.SetTarget(kvindex.Slot(i), TargetInfo{Target: kvindex.Target{Worker: name}, Ready: true})
	}
	q := &Queue{Bounds: Bounds{Requests: 10}}
	r.UseQueue(q)
	for n := range 2000 {
		id := fmt.Sprint("c", n)
		if returning {
			id = fmt.Sprint("c", n/20)
		}
		plan, err := r.Pick(time.Duration(n), &Query{ID: id, Conversation: id, PromptTokens: 300}, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Release(time.Duration(n), plan.Reservation)
	}
	return r, q
}

// A new conversation avoids the target that others are held for, where conversations return.
func TestNewConversationsSeeTheHeld(t *testing.T) {
	for _, returning := range []bool{true, false} {
		r, q := heldRouter(t, returning)
		q.Push(Waiter{ID: 1, Lane: Lane{Slot: 0}, Tokens: 1_000_000})
		got := [2]int{}
		for n := range 10 {
			plan, err := r.Pick(time.Second, &Query{ID: fmt.Sprint("n", n), Conversation: fmt.Sprint("n", n), PromptTokens: 300}, nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			got[plan.Decode]++
			r.Release(time.Second, plan.Reservation)
		}
		if avoids := got[0] == 0; avoids != returning {
			t.Errorf("returning %v: got %d and %d, want the target that has waiters avoided %v", returning, got[0], got[1], returning)
		}
		d, err := r.PickRecorded(time.Second, &Query{ID: "r", Conversation: "r", PromptTokens: 300}, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		if plan, _, err := d.Rerun(); err != nil || plan.Decode != d.Plan.Decode || d.State.Targets[0].Held != 1_000_000 {
			t.Errorf("got %+v, %v with %d held, want %+v again with 1000000", plan, err, d.State.Targets[0].Held, d.Plan)
		}
	}
}

// A waiter counts on the target that it is held for as long as it waits, and not for itself.
func TestWaitersAreCountedOnTheirTargets(t *testing.T) {
	r, q := heldRouter(t, false)
	held := func(want ...int64) {
		t.Helper()
		for slot, n := range want {
			if got := r.held(kvindex.Slot(slot)); got != n {
				t.Errorf("target %d: got %d tokens, want %d", slot, got, n)
			}
		}
	}
	q.Push(Waiter{ID: 1, Lane: Lane{Slot: 0}, Tokens: 5})
	q.Push(Waiter{ID: 2, Lane: Lane{Slot: 1}, Tokens: 7})
	q.Push(Waiter{ID: 3, Lane: Lane{Class: "full", Slot: NoSlot}, Tokens: 9})
	held(5, 7)
	q.Place(0, r, true, func(w *Waiter) Outcome {
		switch w.ID {
		case 1:
			held(0, 7)
			return Outcome{Moves: true, To: Lane{Slot: 1}}
		default:
			return Placed(&Plan{Miss: w.Tokens})
		}
	})
	held(0, 5)
	q.Remove(1)
	held(0, 0)
	q.Charge("p", &Plan{Miss: 50})
	if got := q.Attained("p"); got != 50+perRequest || q.Attained("other") != 0 {
		t.Errorf("got %d and %d tokens served, want %d and 0", got, q.Attained("other"), 50+perRequest)
	}
}

// While a target is idle, a waiter that stays held blocks no other of its lane.
func TestPlaceSkipsWhileATargetIsIdle(t *testing.T) {
	for _, busy := range []bool{false, true} {
		r, q := heldRouter(t, false)
		for slot := range int32(2) {
			if busy || slot == 0 {
				if _, err := r.Pick(0, &Query{ID: "x", PromptTokens: 300, Pin: &Pin{Worker: []string{"a", "b"}[slot]}}, nil, nil); err != nil {
					t.Fatal(err)
				}
			}
		}
		_, err := r.Pick(0, &Query{ID: "y", PromptTokens: 300, Pin: &Pin{Worker: "a"}}, nil, nil)
		if _, ok := errors.AsType[*HeldError](err); !ok {
			t.Fatalf("got %v, want a full target", err)
		}
		q.Push(Waiter{ID: 1, Lane: Lane{Slot: 0}})
		q.Push(Waiter{ID: 2, Lane: Lane{Slot: 0}})
		offered := 0
		q.Place(0, r, true, func(w *Waiter) Outcome {
			offered++
			return Outcome{Moves: true, To: w.Lane}
		})
		if want := map[bool]int{false: 2, true: 1}[busy]; offered != want {
			t.Errorf("busy %v: got %d offers, want %d", busy, offered, want)
		}
	}
}

// Clients choose the ids: what is remembered of one does not depend on its length.
func TestChargeKeepsNoIDs(t *testing.T) {
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	q, before, id := Queue{}, heap(), strings.Repeat("x", 1<<16)
	for i := range 1000 {
		q.Charge(fmt.Sprint(id, i), &Plan{Miss: 50})
	}
	if grown := heap() - before; grown > 8<<20 {
		t.Errorf("got %d bytes for 1000 ids of 64 KiB, want at most 8 MiB", grown)
	}
	if got := q.Attained(fmt.Sprint(id, 7)); got != 50+perRequest {
		t.Errorf("got %d tokens served, want %d", got, 50+perRequest)
	}
}
