package decide

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

// series counts those of a worker among the metrics of the request path.
func (b *bench) series(worker string) (n int) {
	b.t.Helper()
	families, err := b.metrics.Registry.Gather()
	if err != nil {
		b.t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if l.GetName() == "worker" && l.GetValue() == worker {
					n++
				}
			}
		}
	}
	return n
}

func TestAWorkerThatIsGoneLeavesNoSeries(t *testing.T) {
	b := newBench(t, "")
	for i := range 5 {
		w := worker("a", 2)
		w.Name = fmt.Sprintf("pod-%d", i)
		b.Fleet().SetWorkers([]workers.Worker{w})
		d, _ := b.ask("/v1/completions", completion(40, ""))
		d.Ticket.ResponseHeaders(200, d.Endpoint)
		running, _ := b.ask("/v1/completions", completion(40, ""))
		d.Ticket.End(time.Now())
		if b.series(w.Name) == 0 {
			t.Fatal("nothing counted")
		}
		b.Fleet().SetWorkers(nil)
		running.Ticket.ResponseHeaders(200, running.Endpoint)
		running.Ticket.FirstToken(time.Now())
		running.Ticket.End(time.Now())
		if n := b.series(w.Name); n != 0 {
			t.Errorf("%d series of %s left", n, w.Name)
		}
	}
}

func TestARestartedWorkerKeepsItsSeries(t *testing.T) {
	b := newBench(t, "", worker("a", 0))
	b.ask("/v1/completions", completion(40, ""))
	next := worker("a", 0)
	next.Generation++
	b.Fleet().SetWorkers([]workers.Worker{next})
	if n := b.count("kvlane_picks_total", "a"); n != 1 {
		t.Errorf("%v picks", n)
	}
}

// count is the sum of a counter's series that have all the label values.
func (b *bench) count(name string, values ...string) (sum float64) {
	b.t.Helper()
	families, err := b.metrics.Registry.Gather()
	if err != nil {
		b.t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			text := ""
			for _, l := range m.GetLabel() {
				text += "|" + l.GetValue() + "|"
			}
			has := true
			for _, v := range values {
				has = has && strings.Contains(text, "|"+v+"|")
			}
			if has {
				sum += m.GetCounter().GetValue()
			}
		}
	}
	return sum
}

func TestMatchedTokensAreCountedBySource(t *testing.T) {
	b := newBench(t, "", worker("a", 0))
	b.ask("/v1/completions", completion(800, ""))
	d, e := b.ask("/v1/completions", completion(800, ""))
	d.Ticket.ResponseHeaders(200, d.Endpoint)
	if n := b.count("kvlane_matched_tokens_total", "a", "speculative"); e.Matched == 0 || int64(n) != e.Matched {
		t.Errorf("%v speculative, the decision counted on %d", n, e.Matched)
	}
	if n := b.count("kvlane_matched_tokens_total", "a", "event"); n != 0 {
		t.Errorf("%v by events, none came", n)
	}
}

// panics reports whether f panics.
func panics(f func()) (yes bool) {
	defer func() { yes = recover() != nil }()
	f()
	return false
}

func TestAPanicLeavesNothingLocked(t *testing.T) {
	b := newBench(t, "", worker("a", 0))
	decision, _ := b.ask("/v1/completions", completion(40, ""))
	router := b.router
	b.router = nil
	for name, f := range map[string]func(){
		"first token": func() { decision.Ticket.ResponseHeaders(200, decision.Endpoint) },
		"end":         func() { decision.Ticket.End(time.Now()) },
		"moved":       func() { decision.Ticket.ResponseHeaders(200, "10.9.9.9:1") },
		"load":        func() { b.Fleet().Load("a", time.Now(), []workers.RankLoad{{Rank: kvindex.NoRank}}) },
		"metrics":     func() { b.collect(func(string, string, float64, ...string) {}) },
		"decision":    func() { b.Decide(t.Context(), b.request("/v1/completions", completion(40, ""))) },
	} {
		yes := panics(f)
		if !yes && name != "moved" && name != "first token" { // whichever of these two runs first records the first token
			t.Errorf("%s: no panic", name)
		}
		if !b.mu.TryLock() {
			t.Fatalf("%s: the router is locked", name)
		}
		b.mu.Unlock()
		if b.cpu.used() != 0 {
			t.Fatalf("%s: a processor is taken", name)
		}
	}
	b.router = router
	decision.Ticket.End(time.Now())
	if b.loads() != 0 {
		t.Error("the load did not end")
	}
}

func TestAPanicLeavesNothingBooked(t *testing.T) {
	b := newBench(t, "", worker("a", 0))
	counts := b.fleet.View().Endpoint(0).Counters
	picks := counts.Picks
	counts.Picks = nil // the first counter that forward uses
	func() {
		defer func() {
			if recover() == nil {
				t.Error("no panic")
			}
		}()
		b.Decide(t.Context(), b.request("/v1/completions", completion(40, "")))
	}()
	counts.Picks = picks
	if b.cpu.used() != 0 {
		t.Errorf("%d places in use", b.cpu.used())
	}
	if b.loads() != 0 || b.router.Live() != 0 || b.router.DoubleReleases() != 0 {
		t.Errorf("load %d, %d reservations", b.loads(), b.router.Live())
	}
	if n := b.count("kvlane_requests_total", "unrouted"); n != 1 {
		t.Errorf("%v counted as unrouted", n)
	}
	if d, _ := b.ask("/v1/completions", completion(40, "")); d.Endpoint == "" {
		t.Error("not routed afterwards")
	}
}

func TestMatchedTokensAreDivided(t *testing.T) {
	overlaps := []routing.Overlap{
		{Slot: 1, Tokens: [kvindex.NumTiers]int32{32, 16}, Speculative: 64}, {Slot: 2, Tokens: [kvindex.NumTiers]int32{16}},
	}
	for _, c := range []struct {
		plan               routing.Plan
		event, speculative int64
	}{
		{routing.Plan{Decode: 1, Prefill: routing.NoSlot, Matched: 112}, 48, 64},
		{routing.Plan{Decode: 1, Prefill: 2, Matched: 16}, 16, 0},
		{routing.Plan{Decode: 1, Prefill: routing.NoSlot, Matched: 40}, 40, 0},
		{routing.Plan{Decode: 3, Prefill: routing.NoSlot}, 0, 0},
	} {
		if event, speculative := matched(&c.plan, overlaps); event != c.event || speculative != c.speculative {
			t.Errorf("%+v: %d by events, %d speculative", c.plan, event, speculative)
		}
	}
}

func TestTheJournalNamesAssumedShapes(t *testing.T) {
	b := newBench(t, "", worker("a", 0))
	_, e := b.ask("/v1/messages", `{"model":"demo","max_tokens":5,"messages":[{"role":"user","content":"hello"}]}`)
	text, err := e.MarshalJSON()
	if e.Assumed == "" || err != nil || !strings.Contains(string(text), `"assumed":"`+e.Assumed+`"`) || !strings.Contains(e.Text(), "assumed: "+e.Assumed+"\n") {
		t.Errorf("%s, %v, %s", text, err, e.Text())
	}
	if _, e := b.ask("/v1/completions", completion(40, "")); e.Assumed != "" {
		t.Errorf("assumed %q", e.Assumed)
	}
}
