package routing

import (
	"fmt"
	"testing"

	"github.com/kvlane/kvlane/kvindex"
)

// Two models, each with pools of its own and a rule of its own; a third has the general
// one.
func TestAModelsPoolsHaveTheirOwnRule(t *testing.T) {
	cfg := DefaultConfig()
	cfg.Disagg.Mode, cfg.Disagg.Threshold = ModeThreshold, 1000
	dear, never := cfg.Disagg, cfg.Disagg
	dear.Mode, dear.K, dear.LocalBelow = ModeCost, 100, 0
	never.Mode = ModeOff
	cfg.DisaggOf = map[string]*Disagg{"dear": &dear, "never": &never}
	r, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	for m, model := range []string{"dear", "never", "other"} {
		for i, role := range []Role{Prefill, Decode} {
			r.SetTarget(kvindex.Slot(2*m+i), TargetInfo{Target: kvindex.Target{Worker: fmt.Sprint(model, i), Rank: kvindex.NoRank}, Role: role,
				Models: []string{model}, Ready: true})
		}
	}
	for model, want := range map[string]map[int64]bool{
		"dear":  {100: true, 500: true, 2000: true},
		"never": {100: false, 500: false, 2000: false},
		"other": {100: false, 500: false, 2000: true},
	} {
		for tokens, split := range want {
			plan, err := r.Pick(0, &Query{ID: model, Model: model, PromptTokens: tokens}, nil, nil)
			if err != nil || (plan.Prefill != NoSlot) != split {
				t.Errorf("%s, %d tokens: %+v %v, want split %v", model, tokens, plan, err, split)
			}
			r.Release(0, plan.Reservation)
		}
	}
	if sum := total(r); sum != (Load{}) {
		t.Errorf("left: %+v", sum)
	}
}

// The rule holds for the next prefill target too: a pair of one zone stays one.
func TestAModelsRuleHoldsForTheNextPrefillTarget(t *testing.T) {
	cfg := DefaultConfig()
	near := cfg.Disagg
	near.Mode, near.Threshold, near.SameZone = ModeThreshold, 0, true
	cfg.DisaggOf = map[string]*Disagg{"m": &near}
	r, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	add := func(slot kvindex.Slot, name string, role Role, zone string) {
		r.SetTarget(slot, TargetInfo{Target: kvindex.Target{Worker: name, Rank: kvindex.NoRank}, Role: role, Ready: true, Zone: zone})
	}
	add(0, "d", Decode, "a")
	add(1, "p1", Prefill, "a")
	add(2, "p2", Prefill, "a")
	add(3, "p0", Prefill, "b")
	q := &Query{ID: "x", Model: "m", PromptTokens: 1000}
	plan, err := r.Pick(0, q, nil, nil)
	if err != nil || plan.Prefill != 1 && plan.Prefill != 2 {
		t.Fatal(plan, err)
	}
	q.Exclude = []kvindex.Slot{plan.Prefill}
	next, err := r.MovePrefill(0, plan.Reservation, q, nil, nil)
	if err != nil || next.Prefill != 3-plan.Prefill {
		t.Errorf("%+v %v after %+v", next, err, plan)
	}
}

func TestAModelsRuleHasBounds(t *testing.T) {
	cfg := DefaultConfig()
	bad := cfg.Disagg
	bad.K = -1
	cfg.DisaggOf = map[string]*Disagg{"m": &bad}
	if ps := cfg.Problems(); len(ps) != 1 || ps[0].Path != "disaggOf.m.k" {
		t.Errorf("%v", ps)
	}
}
