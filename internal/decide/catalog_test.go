package decide

import (
	"testing"

	"github.com/kvlane/kvlane/internal/workers"
)

// TestWhoseModel covers which workers may serve a name: the names that workers declare, and
// those that a configured model has.
func TestWhoseModel(t *testing.T) {
	declaring := func(name string, models ...string) workers.Worker {
		w := worker(name, 0)
		w.Address, w.Models = "127.0.0.1:1", models // no listener there: a worker that does not answer may serve any name
		return w
	}
	gone := declaring("c", "demo", "other")
	gone.Ready = false // so it is not asked
	absent := gone
	absent.Models = []string{"other"}
	for name, c := range map[string]struct {
		yaml    string
		workers []workers.Worker
		model   string
		status  int // 0: Kvlane forwards the request instead of answering it
	}{
		"known":                   {"", []workers.Worker{gone}, "demo", 503}, // no worker is ready
		"unknown":                 {"", []workers.Worker{gone}, "nope", 404},
		"routed all the same":     {"limits: {unknown_model: route}\n", []workers.Worker{gone}, "nope", 503},
		"an alias":                {"", []workers.Worker{gone}, "alias", 503},
		"an adapter":              {"", []workers.Worker{gone}, "sql", 503},
		"SGLang's adapter":        {"", []workers.Worker{gone}, "demo:fast", 503},
		"configured, not served":  {"", []workers.Worker{absent}, "demo", 503},
		"a worker of any":         {"", []workers.Worker{declaring("a", "demo"), declaring("b")}, "nope", 0},
		"a worker that is silent": {"", []workers.Worker{declaring("a", "demo")}, "nope", 0},
		"none, one model":         {"", []workers.Worker{declaring("a", "demo"), declaring("b", "alias", "sql")}, "", 0},
		"none, one in common":     {"", []workers.Worker{declaring("a", "demo", "x"), declaring("b", "demo", "y")}, "", 0},
		"none, two models":        {"", []workers.Worker{declaring("a", "demo"), declaring("b", "y")}, "", 400},
		"none, routed":            {"limits: {unknown_model: route}\n", []workers.Worker{declaring("a", "demo"), declaring("b", "y")}, "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, c.yaml, c.workers...)
			d, e := b.ask("/v1/completions", `{"model":"`+c.model+`","prompt":"x"}`)
			got := 0
			if d.Reject != nil {
				got = d.Reject.Status
			}
			if got != c.status {
				t.Errorf("status %d, want %d: %s %+v", got, c.status, e.Reason, d.Reject)
			}
		})
	}
}
