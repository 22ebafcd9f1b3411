package routing

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvlane/kvlane/kvindex"
)

// A tenant with all places and a long queue gives way to one that comes: its waiters do not use up what a freed place
// is offered to, and they get its own places again.
func TestATenantAboveItsShareGivesWay(t *testing.T) {
	cfg := DefaultConfig()
	cfg.Hold, cfg.Policy.Limits.MaxActive = 8192, 2
	r, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	for s := range kvindex.Slot(2) {
		r.SetTarget(s, TargetInfo{Target: kvindex.Target{Worker: "w", Rank: int32(s)}, Ready: true})
	}
	q := Queue{Bounds: Bounds{Requests: 1000}}
	var placed []string
	live := map[string][]ReservationID{}
	now := time.Second
	try := func(tenant string) error {
		plan, err := r.Pick(now, &Query{Tenant: tenant, Share: 0.75, PromptTokens: 10}, nil, nil)
		if err == nil {
			live[tenant] = append(live[tenant], plan.Reservation)
			r.FirstToken(now, plan.Reservation)
		}
		return err
	}
	lane := func(err error) Lane {
		if held, ok := errors.AsType[*HeldError](err); ok {
			return held.Lane("model")
		}
		return Lane{Class: "model", Slot: NoSlot}
	}
	offers := 0
	ask := func(tenant string) {
		if err := try(tenant); err != nil {
			q.Push(Waiter{ID: uint64(q.Len() + 1), Tenant: tenant, Lane: lane(err), Since: now})
		}
	}
	end := func(tenant string) []string {
		r.Release(now, live[tenant][0])
		live[tenant] = live[tenant][1:]
		placed, offers = nil, 0
		q.Place(now, r, true, func(w *Waiter) Outcome {
			offers++
			if err := try(w.Tenant); err != nil {
				return Outcome{Moves: true, To: lane(err)}
			}
			placed = append(placed, w.Tenant)
			return Outcome{Leaves: true, Served: 1}
		})
		return placed
	}
	for range 300 {
		ask("evil")
	}
	ask("good")
	ask("good")
	if len(live["evil"]) != 4 || q.Len() != 298 {
		t.Fatalf("got %d places of the first tenant and %d waiters, want 4 and 298", len(live["evil"]), q.Len())
	}
	var got []string
	for range 2 {
		got = append(got, fmt.Sprint(end("evil"), offers <= 3))
	}
	got = append(got, fmt.Sprint(end("evil"), offers <= 3), fmt.Sprint(end("good"), offers <= 3))
	if want := []string{"[good] true", "[evil] true", "[evil] true", "[good] true"}; !slices.Equal(got, want) {
		t.Errorf("got %v after each end, want %v", got, want)
	}
	// The last one of the other tenant has ended. Its place is kept, until 5 minutes later it is not.
	if got := end("good"); len(got) != 0 || len(live["evil"]) != 3 {
		t.Errorf("got %v placed and %d places of the first tenant, want none and 3", got, len(live["evil"]))
	}
	now += recently + 1
	if got := end("evil"); len(got) != 2 || len(live["evil"]) != 4 || len(q.lanes) > 2 {
		t.Errorf("got %v placed, %d places and %d lanes of a tenant that is alone, want 2, 4 and at most 2", got, len(live["evil"]), len(q.lanes))
	}
}

// What a target remembers of tenants does not grow with their number.
func TestATargetForgetsTenants(t *testing.T) {
	r := newRouter(t, preset(t, DefaultPreset), 1)
	r.config.Policy.Limits.MaxActive = 2
	for i := range 1000 {
		plan := planAt(t, r, time.Duration(i), &Query{Tenant: fmt.Sprint(i), Share: 0.75})
		r.Release(time.Duration(i), plan.Reservation)
	}
	if n := len(r.targets[0].tenants.places); n != 0 {
		t.Errorf("got %d tenants without requests, want none", n)
	}
}

// A request for several answers costs its tenant and conversation as much as several requests.
func TestAnswersAreCharged(t *testing.T) {
	for sequences, want := range map[int64]int64{0: 1050, 1: 1050, 3: 3050, 1 << 40: 1<<16*1000 + 50} {
		q, plan := Queue{}, Plan{Miss: 50, Sequences: sequences}
		q.Charge("c", &plan)
		if got := Placed(&plan).Served; got != want || q.Attained("c") != want {
			t.Errorf("%d answers: got %d tokens for the tenant, %d for the conversation, want %d", sequences, got, q.Attained("c"), want)
		}
	}
}
