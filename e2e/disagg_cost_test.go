package e2e

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

// A request that is split may cost Kvlane's process twice the CPU time of one that is not: 8,000 tokens, all but the last
// few the same, engines with zero latency. Both are measured in turns, and the cheapest round of each counts. What a
// process needs differs from start to start by a third on a busy machine, so three pairs of them may be tried. The time
// between prefill answer and decode leg is only logged: it depends on the load of the machine.
func TestCostOfAPrefillLeg(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector changes what things cost")
	}
	for attempt := range 3 {
		whole, split := costOfALeg(t)
		t.Logf("processor time of Kvlane a request: whole %.0f us, split %.0f us, %.2f times as much", whole*1e6, split*1e6, split/whole)
		if split <= 2*whole {
			return
		}
		if attempt == 2 {
			t.Error("a split request costs more than twice as much as a whole one, three times")
		}
	}
}

func costOfALeg(t *testing.T) (whole, split float64) {
	const rounds, requests = 6, 200 // the CPU clock of processes ticks every 10 ms
	text := prose("cost", 7500)
	front := func(rules string) (round func(n int) float64, b *bed) {
		p := pairs()[0]
		p.rules = rules
		b = newPools(t, p, "")
		ask := func(n int) {
			body, err := json.Marshal(map[string]any{"model": modelName, "prompt": fmt.Sprint(text, "number ", n), "max_tokens": 2})
			if err != nil {
				t.Fatal(err)
			}
			if r := b.post("/v1/completions", body); r.status != http.StatusOK || (r.header.Get("X-Kvlane-Prefill") != "") != (rules != "mode: off") {
				t.Fatalf("status %d, prefill %q: %s", r.status, r.header.Get("X-Kvlane-Prefill"), r.body)
			}
		}
		for n := range 20 {
			ask(-n)
		}
		return func(round int) float64 {
			before := b.metric("process_cpu_seconds_total")
			for n := range requests {
				ask(round*requests + n)
			}
			return (b.metric("process_cpu_seconds_total") - before) / requests
		}, b
	}
	ofWhole, _ := front("mode: off")
	ofSplit, b := front("mode: threshold, threshold: 0")
	// In turns: what a request costs changes with what else the machine does.
	whole, split = math.Inf(1), math.Inf(1)
	for round := range rounds {
		whole, split = min(whole, ofWhole(round)), min(split, ofSplit(round))
	}
	gaps := gapsBetween(b.engines)
	if len(gaps) < requests {
		t.Fatalf("%d requests had two legs", len(gaps))
	}
	at := func(part float64) time.Duration { return gaps[int(part*float64(len(gaps)-1))].Round(time.Microsecond) }
	t.Logf("from the prefill engine's answer to the decode engine's request, through Envoy both ways: p10 %v, p50 %v, p90 %v, p99 %v", at(0.1), at(0.5), at(0.9), at(0.99))
	return whole, split
}

// gapsBetween returns the times between the ends of prefill answers and the starts of their
// decode legs, sorted.
func gapsBetween(engines []*enginesim.Engine) []time.Duration {
	answered := map[string]time.Time{}
	for _, e := range engines[:2] {
		for _, r := range e.Stats().Requests {
			answered[r.RequestID] = r.Answered
		}
	}
	var gaps []time.Duration
	for _, e := range engines[2:] {
		for _, r := range e.Stats().Requests {
			if before, ok := answered[r.RequestID]; ok && !before.IsZero() {
				gaps = append(gaps, r.Came.Sub(before))
			}
		}
	}
	slices.Sort(gaps)
	return gaps
}
