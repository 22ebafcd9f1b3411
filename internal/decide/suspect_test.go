package decide

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/kvindex"
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
		if got := b.suspicion(slot); got != want {
			t.Errorf("status %d: got suspicion %q, want %q", status, got, want)
		}
	}
}

// While the process does not run, engines do not answer as far as it can see. That time is
// not theirs; the time in which it runs is.
func TestAPauseOfTheProcessMakesNoWorkerSuspect(t *testing.T) {
	for _, tc := range []struct {
		paused bool
		want   string
	}{{true, ""}, {false, "no first token"}} {
		synctest.Test(t, func(t *testing.T) {
			c, err := config.Parse("test.yaml", nil)
			if err != nil {
				t.Fatal(err)
			}
			d, err := New(Options{Config: c, Metrics: observe.New("test"), Log: zerolog.Nop()})
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			runs, stop := context.WithCancel(t.Context())
			defer stop()
			go d.KeepAwake(runs)
			ask := func(slot kvindex.Slot, answered bool) {
				d.Update(func(r *routing.Router, now time.Duration) {
					pin := &routing.Pin{Worker: fmt.Sprint("w", slot), Rank: kvindex.NoRank}
					r.SetTarget(slot, routing.TargetInfo{Target: kvindex.Target{Worker: pin.Worker, Rank: pin.Rank}, Ready: true})
					plan, err := r.Pick(now, &routing.Query{ID: "r", PromptTokens: 1000, Pin: pin}, nil, nil)
					if err != nil {
						t.Fatal(err)
					}
					if answered {
						r.FirstToken(now+50*time.Millisecond, plan.Reservation)
					}
				})
				time.Sleep(time.Second)
			}
			ask(0, true)
			ask(1, false)
			ask(1, false)
			ask(0, true)
			if tc.paused {
				stop()
			}
			time.Sleep(10 * time.Second)
			ask(0, true)
			if got := d.suspicion(1); got != tc.want {
				t.Errorf("paused %v: got suspicion %q, want %q", tc.paused, got, tc.want)
			}
		})
	}
}

// suspicion is Router.Suspect under the lock: the clock of the router moves on in a goroutine.
func (d *Decider) suspicion(slot kvindex.Slot) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.router.Suspect(slot)
}

// What Envoy tells late of an earlier process says nothing about the one that took its name: a whole answer would not
// end what the former one's broken ones began.
func TestBrokenAnswersOfAFormerProcess(t *testing.T) {
	list := []workers.Worker{worker("a", 0), worker("b", 0), worker("c", 0)}
	b := newBench(t, "routing: {trust_overrides: true}\n", list...)
	ask := func() *ticket {
		d, _ := b.ask("/v1/completions", completion(10, ""), pinHeader, "a")
		tick := d.Ticket.(*ticket) //nolint:forcetypeassert // of this package
		tick.ResponseHeaders(200, tick.endpoint.Address)
		tick.End(time.Now())
		return tick
	}
	cut := extproc.Outcome{Status: 200, Flags: []string{"upstream_remote_reset"}}
	for _, tc := range []struct {
		restarted bool
		want      string
	}{{true, ""}, {false, "failures"}} {
		var ended []*ticket
		for range 5 {
			ended = append(ended, ask())
		}
		if tc.restarted {
			b.Fleet().SetWorkers(list[1:])
			b.Fleet().SetWorkers(list)
		}
		for _, tick := range ended {
			tick.Outcome(cut)
		}
		d, _ := b.ask("/v1/completions", completion(10, ""), pinHeader, "b") // targets are judged at a pick
		d.Ticket.End(time.Now())
		if got := b.suspicion(ended[0].slot); got != tc.want {
			t.Errorf("restarted %v: got suspicion %q, want %q", tc.restarted, got, tc.want)
		}
	}
}

// The leg of a sidecar has no answer that Kvlane sees: a good answer of the decode engine shows that it was good, a
// refusal shows nothing.
func TestASidecarsAnswerShowsItsPrefill(t *testing.T) {
	for code, want := range map[int]string{200: "", 400: "failures"} {
		t.Run(strconv.Itoa(code), func(t *testing.T) {
			p := newPoolsWith(t, "sidecar", "routing: {trust_overrides: true, disagg: {mode: threshold, threshold: 0}}\n")
			ask := func() *ticket {
				d := p.Decide(t.Context(), &extproc.Request{ID: "r", Method: "POST", Path: "/v1/completions", Headers: []extproc.Header{{Name: excludeHeader, Value: "p1"}},
					Body: []byte(`{"prompt":"` + strings.Repeat("word ", 400) + `"}`)})
				tick := d.Ticket.(*ticket) //nolint:forcetypeassert // of this package
				if tick.entry.Prefill != "p0" {
					t.Fatalf("got prefill %q, want p0", tick.entry.Prefill)
				}
				return tick
			}
			for range 5 {
				tick := ask()
				p.Update(func(r *routing.Router, _ time.Duration) { r.PrefillFailed(tick.reservation) })
				tick.End(time.Now())
			}
			slot := p.fleet.View().Member("p0").Slots[0]
			tick := ask()
			if got := p.suspicion(slot); got != "failures" {
				t.Fatalf("got suspicion %q before the answer, want failures", got)
			}
			tick.ResponseHeaders(code, "")
			tick.End(time.Now())
			if got := p.suspicion(slot); got != want {
				t.Errorf("status %d: got suspicion %q, want %q", code, got, want)
			}
		})
	}
}

// What waits shows that a worker hangs, for everybody only if it is of two tenants where these are known.
func TestWaitsOfOneTenantConcernOnlyThis(t *testing.T) {
	for _, tc := range []struct{ yaml, one, other, want string }{
		{"", "bad", "bad", "no first token"},
		{"tenants: {header: x-tenant}\n", "bad", "bad", ""},
		{"tenants: {header: x-tenant}\n", "bad", "good", "no first token"},
		{"tenants: {salt_header: x-tenant}\n", "bad", "bad", ""},
		{"tenants: {salt_header: x-tenant}\n", "bad", "good", "no first token"},
	} {
		b := newBench(t, "routing: {trust_overrides: true}\n"+tc.yaml, worker("a", 0), worker("b", 0), worker("c", 0))
		var late time.Duration
		b.now = func() time.Time { return time.Now().Add(late) }
		ask := func(name, tenant string, answered bool) {
			d, _ := b.ask("/v1/completions", completion(100, ""), pinHeader, name, saltHeader, tenant)
			if answered {
				d.Ticket.ResponseHeaders(200, d.Endpoint)
			}
			late += 10 * time.Second
		}
		ask("a", tc.one, true)
		ask("b", tc.one, false)
		ask("b", tc.other, false)
		ask("a", tc.other, true)
		ask("a", "third", true)
		if got := b.suspicion(b.fleet.View().Member("b").Slots[0]); got != tc.want {
			t.Errorf("%q, waits of %s and %s: got suspicion %q, want %q", tc.yaml, tc.one, tc.other, got, tc.want)
		}
	}
}
