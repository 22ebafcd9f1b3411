package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"testing"
)

// A request that is split may cost Kvlane's process twice the processor time of one
// that is not: 8,000 tokens, all but the last few the same, engines that take no
// time. The lesser of two rounds counts.
func TestCostOfAPrefillLeg(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector changes what things cost")
	}
	const rounds, requests = 2, 250 // the clock of processes ticks every 10 ms
	cost := func(rules string) float64 {
		p := pairs()[0]
		p.rules = rules
		b := newPools(t, p, "")
		text := prose("cost", 7500)
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
		least := 0.0
		for round := range rounds {
			before := b.metric("process_cpu_seconds_total")
			for n := range requests {
				ask(round*requests + n)
			}
			if used := (b.metric("process_cpu_seconds_total") - before) / requests; round == 0 || used < least {
				least = used
			}
		}
		return least
	}
	whole, split := cost("mode: off"), cost("mode: threshold, threshold: 0")
	t.Logf("whole %.0f us, split %.0f us: %.2f times as much", whole*1e6, split*1e6, split/whole)
	if split > 2*whole {
		t.Errorf("a split request costs %.2f times as much as a whole one", split/whole)
	}
}
