package decide

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/routing"
)

// TestEveryPresetServes: with every preset, requests of all kinds get a target and nothing
// is booked after they have ended.
func TestEveryPresetServes(t *testing.T) {
	for _, preset := range routing.Presets() {
		t.Run(preset, func(t *testing.T) {
			b := newBench(t, "routing: {preset: "+preset+"}\n", worker("a", 2), worker("b", 2), worker("c", 0))
			for turn := range 3 {
				var open []func()
				for c := range 6 {
					headers := []string{"x-session-id", fmt.Sprint("c", c)}
					if c%3 == 0 {
						headers = nil
					}
					d, e := b.ask("/v1/completions", completion(200+40*c+100*turn, ""), headers...)
					if d.Reject != nil || d.Endpoint == "" {
						t.Fatalf("turn %d, conversation %d: %+v, %s", turn, c, d, e.Text())
					}
					open = append(open, func() { d.Ticket.ResponseHeaders(200, d.Endpoint); d.Ticket.End(time.Now()) })
				}
				for _, end := range open {
					end()
				}
			}
			if b.loads() != 0 || b.router.Live() != 0 {
				t.Error("load left after the end")
			}
		})
	}
}

// TestConversationsAreRecognisedByTheirPrefix: without an id the next turn goes to the
// target of the previous one; texts that share only the skipped part are different
// conversations.
func TestConversationsAreRecognisedByTheirPrefix(t *testing.T) {
	system := strings.Repeat("sea ", 400)
	ask := func(b *bench, own, more string) string {
		d, e := b.ask("/v1/completions", `{"model":"demo","prompt":"`+system+strings.Repeat(own, 100)+more+`"}`)
		defer d.Ticket.End(time.Now())
		return e.Target
	}
	for _, skip := range []int{0, 400} {
		b := newBench(t, fmt.Sprintf("routing: {preset: conversation, prefix_skip: %d}\n", skip), worker("a", 0), worker("b", 0))
		one, two := ask(b, "ship ", ""), ask(b, "rope ", "")
		if (one == two) != (skip == 0) {
			t.Errorf("skip %d: strangers on %s and %s", skip, one, two)
		}
		again := []string{ask(b, "ship ", "and then"), ask(b, "rope ", "and then")}
		if !slices.Equal(again, []string{one, two}) {
			t.Errorf("skip %d: next turns on %s, first ones on %s and %s", skip, again, one, two)
		}
	}
}
