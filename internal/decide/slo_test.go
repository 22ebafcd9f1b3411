package decide

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// answers lets the only worker answer 40 requests, each with its first token after 100 ms.
func (b *bench) answers(status int, more string) {
	b.t.Helper()
	for i := range 40 {
		d, _ := b.ask("/v1/completions", completion(100+10*(i%8), more), ttftHeader, "5000")
		if d.Reject != nil {
			b.t.Fatalf("got %+v, want a place", d.Reject)
		}
		d.Ticket.ResponseHeaders(status, d.Endpoint)
		at := time.Now().Add(100 * time.Millisecond)
		d.Ticket.FirstToken(at)
		d.Ticket.End(at)
	}
}

// busy leaves the only worker with a request, as one without any takes a request whatever its prediction.
func (b *bench) busy() {
	b.t.Helper()
	d, _ := b.ask("/v1/completions", completion(100, ""))
	if d.Reject != nil {
		b.t.Fatalf("got %+v, want a place", d.Reject)
	}
	d.Ticket.ResponseHeaders(200, d.Endpoint)
	d.Ticket.FirstToken(time.Now().Add(100 * time.Millisecond))
	b.t.Cleanup(func() { d.Ticket.End(time.Now()) })
}

// A request that asks for its first token sooner than the worker gives it is refused, once the
// first tokens of streamed answers have shown how long it takes.
func TestATargetThatCannotBeMetIsRefused(t *testing.T) {
	const stream = `,"stream":true`
	for _, c := range []struct {
		name, config, more string
		status             int
		learns             bool
	}{
		{"streamed", "envoy: {first_token: true}\n", stream, 200, true},
		{"in one piece", "envoy: {first_token: true}\n", "", 200, false},
		{"refused by the engine", "envoy: {first_token: true}\n", stream, 404, false},
		{"not observed", "", stream, 200, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t, c.config+"slo: {unmet: refuse}\n", worker("a", 0))
			b.answers(c.status, c.more)
			b.busy()
			for target, refused := range map[string]bool{"20": true, "900": false, "": false, "0": false, "-1": false, "soon": false, "99999999999999": false} {
				d, e := b.ask("/v1/completions", completion(100, stream), ttftHeader, target)
				if got := d.Reject != nil; got != (refused && c.learns) {
					t.Errorf("target %q: got refused %v, want %v", target, got, refused && c.learns)
				}
				if d.Reject == nil {
					d.Ticket.End(time.Now())
					continue
				}
				if d.Reject.Status != 429 || e.Reason != "kvlane_ttft_unmet" || len(d.Reject.Headers) != 1 || d.Reject.Headers[0].Name != "retry-after" {
					t.Errorf("got %+v (%s), want 429 with Retry-After and the reason kvlane_ttft_unmet", d.Reject, e.Reason)
				}
			}
			// The first 32 answers have no prediction.
			want := map[bool]float64{true: 1}[c.learns]
			for name, n := range map[string]float64{"kvlane_first_token_prediction_ratio": 8 * want, "kvlane_first_token_targets_total": 40 * want} {
				if got := samples(t, b.metrics.Registry, name); got != n {
					t.Errorf("%s: got %v, want %v", name, got, n)
				}
			}
		})
	}
}

// samples is the number of values of a histogram, or the sum of a counter's.
func samples(t *testing.T, from prometheus.Gatherer, name string) (n float64) {
	t.Helper()
	all, err := from.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range all {
		if family.GetName() == name {
			for _, m := range family.GetMetric() {
				n += float64(m.GetHistogram().GetSampleCount()) + m.GetCounter().GetValue()
			}
		}
	}
	return n
}

// A model's own target holds unless the request carries one, and a new configuration takes effect.
func TestTargetsOfAModelChangeWhileItRuns(t *testing.T) {
	const first = "envoy: {first_token: true}\n"
	b := newBench(t, first, worker("a", 0))
	b.answers(200, `,"stream":true`)
	b.busy()
	refused := func(headers ...string) bool {
		d, _ := b.ask("/v1/completions", completion(100, `,"stream":true`), headers...)
		if d.Reject == nil {
			d.Ticket.End(time.Now())
		}
		return d.Reject != nil
	}
	if refused() || refused(ttftHeader, "10") {
		t.Error("got a refusal by default, want none")
	}
	next := *b.live.Load()
	next.SLO.TTFT, next.SLO.Unmet = 10e6, "refuse"
	if err := b.Reload(&next); err != nil {
		t.Fatal(err)
	}
	if !refused() || refused(ttftHeader, "3000") {
		t.Error("got no refusal of a request without a target of its own, or one of a request with 3 s, want it the other way")
	}
}
