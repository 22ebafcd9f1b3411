package decide

import (
	"testing"
	"time"

	"github.com/kvlane/kvlane/routing"
)

// A worker that answers with server errors is avoided; statuses for client errors have no
// effect.
func TestAWorkerWhoseAnswersFailIsAvoided(t *testing.T) {
	for status, want := range map[int]string{500: "failures", 404: "", 200: ""} {
		b := newBench(t, "routing: {trust_overrides: true}\n", worker("a", 0), worker("b", 0))
		for range 5 {
			d, _ := b.ask("/v1/completions", completion(40, ""), pinHeader, "a")
			d.Ticket.ResponseHeaders(status, d.Endpoint)
			d.Ticket.End(time.Now())
		}
		slot := b.fleet.View().Member("a").Slots[0]
		// Suspicion takes effect with the next decision.
		if _, err := b.router.Pick(b.since(time.Now())+time.Second, &routing.Query{ID: "r", PromptTokens: 10}, nil, nil); err != nil {
			t.Fatal(err)
		}
		if got := b.router.Suspect(slot); got != want {
			t.Errorf("status %d: got suspicion %q, want %q", status, got, want)
		}
	}
}
