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

// A WebSocket goes to a worker of the model that its query names.
func TestWebSocketsGoToTheirModel(t *testing.T) {
	a, b2 := worker("a", 0), worker("b", 0)
	a.Address, b2.Address, a.Models, b2.Models = "127.0.0.1:1", "127.0.0.1:2", []string{"demo"}, []string{"org/other"}
	gone := b2
	gone.Ready = false
	for query, c := range map[string]struct {
		second workers.Worker
		status int    // 0: it is routed
		want   string // its endpoint
	}{
		"?model=demo":                  {b2, 0, a.Address},
		"?x=%zz&model=org%2Fother&y=1": {b2, 0, b2.Address},
		"":                             {b2, 400, ""},
		"?intent=transcription&model=": {b2, 400, ""},
		"?model=x":                     {gone, 404, ""},
	} {
		list := []workers.Worker{a, c.second}
		if c.status == 404 {
			list = list[1:] // a does not answer which models it has, so it may serve any
		}
		b := newBench(t, "", list...)
		for range 4 { // by load it would be either
			r := b.request("/v1/realtime"+query, "")
			r.Method, r.Partial, r.Body = "GET", true, nil
			d := b.Decide(t.Context(), r)
			got := 0
			if d.Reject != nil {
				got = d.Reject.Status
			}
			if got != c.status || d.Endpoint != c.want {
				t.Errorf("%q: got status %d, endpoint %q, want %d and %q: %+v", query, got, d.Endpoint, c.status, c.want, d.Reject)
			}
		}
	}
}
