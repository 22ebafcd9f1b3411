package routing

import (
	"encoding/json"
	"testing"

	"github.com/kvlane/kvlane/kvindex"
)

func TestADecisionWithoutStateIsAnError(t *testing.T) {
	if plan, ex, err := new(Decision).Rerun(); err == nil || ex != nil || plan != (Plan{}) {
		t.Errorf("%+v %v %v", plan, ex, err)
	}
}

// FuzzDecision runs decisions from outside: a bad one is an error, never a panic, and
// a good one comes out the same twice.
func FuzzDecision(f *testing.F) {
	for _, name := range []string{DefaultPreset, "conversation", "two-phase", "kv-aware-trt"} {
		r := newRouter(f, preset(f, name), 3)
		r.SetTarget(3, TargetInfo{Target: kvindex.Target{Worker: "p", Rank: kvindex.NoRank}, Ready: true, Role: Prefill, Models: []string{"m"}})
		mustPick(f, r, &Query{ID: "a", PromptTokens: 900, Prefix: []uint64{1, 2, 3}})
		r.Release(0, mustPick(f, r, &Query{ID: "b", PromptTokens: 900, Conversation: "c"}).Reservation)
		q := &Query{ID: "d", PromptTokens: 900, Conversation: "c", Subset: new(SlotSet)}
		q.Subset.Add(1)
		d, err := r.PickRecorded(5, q, []Overlap{held(1, 300)}, nil)
		if err != nil {
			f.Fatal(err)
		}
		data, err := json.Marshal(d) //nolint:musttag // kvindex.Target goes by the names of its fields
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Add([]byte(`{}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		var d Decision
		if json.Unmarshal(data, &d) != nil { //nolint:musttag // as above
			return
		}
		first, _, errFirst := d.Rerun()
		second, _, errSecond := d.Rerun()
		if first != second || (errFirst == nil) != (errSecond == nil) {
			t.Errorf("%+v %v, then %+v %v", first, errFirst, second, errSecond)
		}
	})
}
