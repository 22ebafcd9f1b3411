package routing

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/kvlane/kvlane/kvindex"
)

// A shadow decision is the one that a router with that policy would make, and leaves no trace.
func TestShadowChangesNothing(t *testing.T) {
	decide := func(preset, shadow string) string {
		config := DefaultConfig()
		config.Policy, _ = Preset(preset)
		r, err := New(config)
		if err != nil {
			t.Fatal(err)
		}
		for slot := range kvindex.Slot(3) {
			r.SetTarget(slot, TargetInfo{Target: kvindex.Target{Worker: string(rune('a' + slot)), Rank: kvindex.NoRank}, Ready: true})
		}
		var chosen kvindex.Slot
		for n := range 20 {
			q := &Query{ID: "r", PromptTokens: 1000, Conversation: string(rune('A' + n%4)), Prefix: []uint64{uint64(n % 3)}}
			overlaps := []Overlap{{Slot: kvindex.Slot(n % 2), Tokens: [kvindex.NumTiers]int32{int32(40 * n)}}}
			if shadow != "" {
				policy, known := Preset(shadow)
				slot, _, _, ok := r.Shadow(time.Duration(n)*time.Second, q, overlaps, &policy)
				if !known || !ok {
					t.Fatalf("%s: got no decision", shadow)
				}
				chosen = slot
			}
			plan, err := r.Pick(time.Duration(n)*time.Second, q, overlaps, nil)
			if err != nil {
				t.Fatal(err)
			}
			if shadow == preset && chosen != plan.Decode {
				t.Errorf("%s, request %d: got slot %d, want %d as the same policy picks", preset, n, chosen, plan.Decode)
			}
		}
		state, err := json.Marshal(r.export(nil))
		if err != nil {
			t.Fatal(err)
		}
		return string(state)
	}
	for _, preset := range Presets() {
		without := decide(DefaultPreset, "")
		with := decide(DefaultPreset, preset)
		if with != without {
			t.Errorf("%s: got state %s, want %s as without a shadow", preset, with, without)
		}
		decide(preset, preset)
	}
}
