package routing

import (
	"testing"

	"github.com/kvlane/kvlane/kvindex"
)

// pools is a router with prefill targets 0 and 1 (workers of their own) and decode
// targets 2 and 3, which disaggregates everything.
func pools(t *testing.T) *Router {
	t.Helper()
	cfg := DefaultConfig()
	cfg.Disagg.Mode, cfg.Disagg.Threshold = ModeThreshold, 0
	r, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	for i, name := range []string{"p0", "p1", "d0", "d1"} {
		role := Prefill
		if i > 1 {
			role = Decode
		}
		r.SetTarget(kvindex.Slot(i), TargetInfo{Target: kvindex.Target{Worker: name, Rank: kvindex.NoRank}, Role: role, Ready: true})
	}
	return r
}

func total(r *Router) (sum Load) {
	r.Targets(func(_ kvindex.Slot, _ *TargetInfo, l Load) bool {
		sum.Queue, sum.Work, sum.KV, sum.Active = sum.Queue+l.Queue, sum.Work+l.Work, sum.KV+l.KV, sum.Active+l.Active
		sum.Transferring, sum.TransferTokens = sum.Transferring+l.Transferring, sum.TransferTokens+l.TransferTokens
		return true
	})
	return sum
}

// X3: the prefill leg fails, and what was reserved on the decode side is given back
// under the key that it was reserved with, whatever was tried in between.
func TestAFailedPrefillLegReleasesBothSides(t *testing.T) {
	for name, between := range map[string]func(r *Router, q *Query, p Plan){
		"at once": func(*Router, *Query, Plan) {},
		"after another prefill target": func(r *Router, q *Query, p Plan) {
			q.Exclude = []kvindex.Slot{p.Prefill}
			if _, err := r.MovePrefill(0, p.Reservation, q, nil, nil); err != nil {
				t.Fatal(err)
			}
		},
		"after computing locally": func(r *Router, _ *Query, p Plan) {
			if !r.ComputeLocally(0, p.Reservation, p.DecodeMiss) {
				t.Fatal("not computed locally")
			}
		},
	} {
		r := pools(t)
		q := &Query{ID: "a", PromptTokens: 1000}
		plan, err := r.Pick(0, q, nil, nil)
		if err != nil || plan.Prefill == NoSlot {
			t.Fatal(plan, err)
		}
		between(r, q, plan)
		if !r.Release(0, plan.Reservation) || total(r) != (Load{}) || r.Live() != 0 {
			t.Errorf("%s: %+v is left", name, total(r))
		}
	}
}

func TestAPrefillMovesToTheNextTarget(t *testing.T) {
	r := pools(t)
	q := &Query{ID: "a", PromptTokens: 1000}
	plan, err := r.Pick(0, q, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	q.Exclude = []kvindex.Slot{plan.Prefill}
	r.PrefillFailed(plan.Reservation)
	if got := r.targets[plan.Prefill].health.Failures; got != 1 {
		t.Errorf("got %d failures, want 1", got)
	}
	moved, err := r.MovePrefill(0, plan.Reservation, q, []Overlap{{Slot: 1 - plan.Prefill, Tokens: [kvindex.NumTiers]int32{400}}}, nil)
	if err != nil || moved.Prefill != 1-plan.Prefill || moved.Decode != plan.Decode || moved.Matched != 400 || moved.Miss != 600 {
		t.Fatalf("%+v %v", moved, err)
	}
	if r.Load(plan.Prefill) != (Load{}) || r.Load(moved.Prefill).Queue != 600 || r.Load(plan.Decode).Active != 1 {
		t.Errorf("before %+v, now %+v, decode %+v", r.Load(plan.Prefill), r.Load(moved.Prefill), r.Load(plan.Decode))
	}
	// No third target: the booking stays as it is.
	q.Exclude = []kvindex.Slot{0, 1}
	if _, err := r.MovePrefill(0, plan.Reservation, q, nil, nil); err == nil || r.Load(moved.Prefill).Queue != 600 {
		t.Errorf("%v, %+v", err, r.Load(moved.Prefill))
	}
	// Computing locally moves the work to the decode target until the first token.
	if !r.ComputeLocally(0, plan.Reservation, 900) || r.Load(moved.Prefill) != (Load{}) || r.Load(plan.Decode).Queue != 900 {
		t.Errorf("locally: %+v", r.Load(plan.Decode))
	}
	if _, err := r.MovePrefill(0, plan.Reservation, q, nil, nil); err == nil {
		t.Error("a local booking was moved")
	}
	if !r.FirstToken(0, plan.Reservation) || r.Load(plan.Decode).Queue != 0 || r.ComputeLocally(0, plan.Reservation, 1) {
		t.Errorf("after the first token: %+v", r.Load(plan.Decode))
	}
	r.Release(0, plan.Reservation)
	if total(r) != (Load{}) {
		t.Errorf("%+v is left", total(r))
	}
}

// A request that no protocol can split computes where it decodes, and counts the
// decode cursor once like any other.
func TestARequestThatCannotBeSplit(t *testing.T) {
	r := pools(t)
	plan, err := r.Pick(0, &Query{PromptTokens: 100_000, Local: true}, nil, nil)
	if err != nil || plan.Prefill != NoSlot || plan.Decode < 2 {
		t.Fatalf("%+v %v", plan, err)
	}
}
