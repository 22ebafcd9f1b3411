package decide

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/observe"
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
