package routing

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvlane/kvlane/kvindex"
	"pgregory.net/rapid"
)

func TestADecisionWithoutStateIsAnError(t *testing.T) {
	if plan, ex, err := new(Decision).Rerun(); err == nil || ex != nil || plan != (Plan{}) {
		t.Errorf("%+v %v %v", plan, ex, err)
	}
}

// FuzzDecision has decisions made in random states, and some members of their records changed: a record that was not changed gives
// the same decision, which obeys the laws of TestLaws; a bad one is an error, never a panic, and gives the same twice.
func FuzzDecision(f *testing.F) {
	for seed := range uint64(8) {
		data := make([]byte, 16<<10)
		random := rand.New(rand.NewPCG(seed, 0))
		for i := range data {
			data[i] = byte(random.Uint32())
		}
		f.Add(data)
	}
	f.Fuzz(rapid.MakeFuzz(func(t *rapid.T) {
		laws(t, 10, func(data []byte) {
			rerunTwice(t, data)
			for range rapid.IntRange(0, 31).Draw(t, "copies") { // few histories have several records
				var record any
				if err := json.Unmarshal(data, &record); err != nil {
					t.Fatal(err)
				}
				for range rapid.IntRange(1, 3).Draw(t, "changes") {
					change(t, &record)
				}
				changed, err := json.Marshal(record)
				if err != nil {
					t.Fatal(err)
				}
				rerunTwice(t, changed)
			}
		})
	}))
}

// change replaces or removes a member somewhere in a JSON value.
func change(t *rapid.T, at *any) {
	switch v := (*at).(type) {
	case map[string]any:
		if len(v) > 0 && rapid.IntRange(0, 9).Draw(t, "here") > 0 {
			key := rapid.SampledFrom(slices.Sorted(maps.Keys(v))).Draw(t, "key")
			inner := v[key]
			if change(t, &inner); inner == nil {
				delete(v, key)
				return
			}
			v[key] = inner
			return
		}
	case []any:
		if len(v) > 0 && rapid.IntRange(0, 9).Draw(t, "here") > 0 {
			change(t, &v[rapid.IntRange(0, len(v)-1).Draw(t, "item")])
			return
		}
		if rapid.Bool().Draw(t, "twice") {
			*at = append(v, v...)
			return
		}
	}
	*at = rapid.SampledFrom([]any{nil, 0, -1, 1, 2, 5, 63, 64, 1 << 20, 1 << 62, -1 << 62, 0.5, 1e300, -1e300, "", "w", "m", true, false, []any{}, []any{1, 1},
		map[string]any{}}).Draw(t, "value")
}

// rerunTwice repeats the decision of a record that may be damaged, unless data does not have the form of one.
func rerunTwice(t rapid.TB, data []byte) {
	var d Decision
	if json.Unmarshal(data, &d) != nil { //nolint:musttag // kvindex.Target goes by the names of its fields
		return
	}
	first, _, errFirst := d.Rerun()
	second, _, errSecond := d.Rerun()
	if first != second || fmt.Sprint(errFirst) != fmt.Sprint(errSecond) {
		t.Errorf("%+v %v, then %+v %v", first, errFirst, second, errSecond)
	}
}

// FuzzRecord is FuzzDecision for a record as text.
func FuzzRecord(f *testing.F) {
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
	f.Fuzz(func(t *testing.T, data []byte) { rerunTwice(t, data) })
}
