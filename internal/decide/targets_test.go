package decide

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"runtime/debug"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/observe"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/kvindex"
)

// keepFew is the length of a short decision log.
const keepFew = 4

// repeated makes a Decider with count workers that all hold a prompt, by their events or
// because it was sent there before, and returns a function that decides a request with this
// prompt from body to end. Its decision log is short, so that explanations soon leave it
// and their memory is reused.
func repeated(tb testing.TB, count int, byEvents bool, shadow ...string) (decide func()) {
	tb.Helper()
	return repeatedBy(tb, newDecider(tb, count), count, byEvents, shadow...)
}

func repeatedBy(tb testing.TB, d *Decider, count int, byEvents bool, shadow ...string) (decide func()) {
	tb.Helper()
	d.decisions = observe.NewDecisions(keepFew)
	c := *d.cfg
	c.Routing.Shadow = shadow
	d.shadows = shadows(&c)
	body := prompts(tb, 8000, 1)[0]
	hashes, ids := blocksOf(tb, d, body)
	stored := kvindex.Event{Kind: kvindex.Stored, Tokens: ids[:len(hashes)*d.cfg.Index.BlockSize], BlockSize: d.cfg.Index.BlockSize}
	for i := range hashes {
		stored.Hashes = append(stored.Hashes, kvindex.EngineHash(i+1))
	}
	for slot := range count {
		if !byEvents {
			d.fleet.Index().Speculate(kvindex.Slot(slot), hashes, d.start.Add(time.Hour))
		} else if err := d.fleet.Index().Apply(kvindex.Slot(slot), &stored); err != nil {
			tb.Fatal(err)
		}
	}
	decide = func() {
		decision := d.Decide(context.Background(), &extproc.Request{ID: "r", Method: "POST", Path: "/v1/chat/completions", Body: body})
		if decision.Ticket == nil {
			tb.Fatal(decision.Reject)
		}
		decision.Ticket.ResponseHeaders(200, decision.Endpoint)
		decision.Ticket.End(d.now())
	}
	if decide(); d.decisions.Last(1)[0].Matched == 0 {
		tb.Fatal("nothing matched")
	}
	return decide
}

// BenchmarkTargets measures a whole decision for a repeated prompt of 2,000 tokens that
// every target holds: what remains is the part that grows with the number of targets.
func BenchmarkTargets(b *testing.B) {
	four := []string{"kv-aware", "least-loaded", "session-hash", "round-robin"}
	for _, c := range []struct {
		count    int
		byEvents bool
		shadow   []string
	}{{10, true, nil}, {100, true, nil}, {1000, true, nil}, {1000, false, nil}, {10, true, four}, {100, true, four}, {1000, true, four}} {
		name := fmt.Sprint(c.count)
		if c.shadow != nil {
			name += "-shadow"
		}
		if !c.byEvents {
			name += "-speculative"
		}
		b.Run(name, func(b *testing.B) {
			decide := repeated(b, c.count, c.byEvents, c.shadow...)
			for range (keepFew + 1) * observe.ExplainEvery {
				decide()
			}
			b.ReportAllocs()
			b.ResetTimer()
			start := processTime()
			for b.Loop() {
				decide()
			}
			b.ReportMetric(float64((processTime()-start).Nanoseconds())/1000/float64(b.N), "cpu-µs/op")
		})
	}
}

// The memory that a decision allocates does not grow with the number of targets.
func TestDecisionsAllocateTheSameForAnyNumberOfTargets(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // a collection empties sync.Pools
	const runs = 4 * observe.ExplainEvery
	bytes := func(count int) int64 {
		decide := repeated(t, count, true)
		for range (keepFew + 1) * observe.ExplainEvery {
			decide()
		}
		least := int64(math.MaxInt64)
		for range 4 { // the race detector makes pools drop some of what they are given
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			for range runs {
				decide()
			}
			runtime.ReadMemStats(&after)
			least = min(least, int64(after.TotalAlloc-before.TotalAlloc)/runs)
		}
		return least
	}
	few, many := bytes(10), bytes(1000)
	t.Logf("%d bytes a decision with 10 targets, %d with 1,000", few, many)
	if many > few+4096 { // ten bytes per target would exceed it
		t.Errorf("%d bytes a decision with 10 targets, %d with 1,000", few, many)
	}
}
