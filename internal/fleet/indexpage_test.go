package fleet

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/kvindex"
)

// Every count of the index is a metric, and the debug page has refusals by name and every
// target's feed.
func TestTheIndexIsSeen(t *testing.T) {
	r := newRig(t, nil)
	b := newFleet(t, sameKey, r.worker)
	for n := range 40 {
		r.send(n)
	}
	r.settle(b)
	if err := b.index.Apply(0, &kvindex.Event{Kind: kvindex.Stored, BlockSize: 16, HasParent: true, Parent: 77, Hashes: []kvindex.EngineHash{1}, Tokens: make([]uint32, 16)}); err == nil {
		t.Fatal("a block behind an unknown parent was taken")
	}
	rec := httptest.NewRecorder()
	(&observe.Pages{Index: b.IndexPage}).Handler().ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/debug/index", nil))
	var page struct {
		Index struct {
			Stored, HolderBlocks int64
			Refused              map[string]int64
			Targets              []struct{ Held [4]int64 }
		} `json:"index"`
		Feeds []struct {
			Target, State string
			Connects      int
		} `json:"feeds"`
	}
	if err := json.Unmarshal(rec.Body.Bytes(), &page); err != nil {
		t.Fatal(err)
	}
	if page.Index.Refused["unknown_parent_block"] != 1 || page.Index.Stored == 0 || len(page.Index.Targets) != 2 || page.Index.Targets[1].Held[0] == 0 {
		t.Errorf("%+v", page.Index)
	}
	if len(page.Feeds) != 2 || page.Feeds[0].Target != "w/0" || page.Feeds[1].State != "live" || page.Feeds[0].Connects != 1 {
		t.Errorf("%+v", page.Feeds)
	}
	seen := map[string]float64{}
	b.Collect(func(name, _ string, v float64, labels ...string) {
		seen[strings.Join(append([]string{name}, labels...), " ")] = v
	})
	st := b.index.Stats()
	for name, want := range map[string]float64{
		"index_bytes": float64(st.Bytes), "index_reserved_bytes": float64(st.Reserved), "index_distinct_blocks": float64(st.Blocks),
		"index_segments": float64(st.Segments), "index_stored_blocks_total": float64(st.Stored), "index_removed_blocks_total": float64(st.Removed),
		"index_unknown_removed_blocks_total": float64(st.UnknownRemoved), "index_evicted_blocks_total": 0, "index_rebuilt_segments_total": float64(st.Rebuilt),
		"index_speculative_blocks": 0, "index_cleared_total": float64(st.Cleared), "index_warmed_targets": 0,
		"index_refused_events_total reason unknown_parent_block": 1,
		"index_blocks worker w rank 1 tier device":               float64(st.Targets[1].Held[0]),
		"index_aliases worker w rank 0":                          float64(st.Targets[0].Aliases), "index_pages worker w rank 0": 0, "index_window_blocks worker w rank 0": 0,
		"feed_state worker w rank 1 state live": 1, "feed_state worker w rank 1 state gap": 0,
		"feed_lost_batches_total worker w rank 0": 0, "feed_connects_total worker w rank 0": 1,
	} {
		if got, ok := seen[name]; !ok || got != want {
			t.Errorf("%s is %v (%v), want %v", name, got, ok, want)
		}
	}
	if seen["feed_batches_total worker w rank 0"] == 0 || st.Removed == 0 {
		t.Error("no batch was counted, or none evicted anything")
	}
	b.SetWorkers([]workers.Worker{})
	seen = map[string]float64{}
	b.Collect(func(name, _ string, v float64, labels ...string) { seen[name] += v })
	if _, ok := seen["feed_state"]; ok || seen["index_blocks"] != 0 {
		t.Error("a worker that is gone has metrics")
	}
}
