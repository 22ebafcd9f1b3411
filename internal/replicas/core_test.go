package replicas

import (
	"testing"
	"time"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

func newRouter(t testing.TB, targets int) *routing.Router {
	t.Helper()
	config := routing.DefaultConfig()
	config.MaxConversations, config.Policy.Sticky.Mode = 1000, routing.StickyTarget
	r, err := routing.New(config)
	if err != nil {
		t.Fatal(err)
	}
	for n := range targets {
		r.SetTarget(kvindex.Slot(n), routing.TargetInfo{Target: target(n), Ready: true})
	}
	return r
}

func target(n int) kvindex.Target {
	return kvindex.Target{Worker: "w" + string(rune('a'+n/2)), Rank: int32(n % 2)}
}

// deliver passes all messages between cores until there are none.
func deliver(t testing.TB, now time.Duration, cores ...*Core) {
	t.Helper()
	for sent := true; sent; {
		sent = false
		for _, from := range cores {
			for _, o := range from.Take() {
				sent = true
				messages := []*message{o.Message}
				if o.Build != nil {
					messages = o.Build()
				}
				for _, m := range messages {
					for _, to := range cores {
						if to != from && (o.To == "" || o.To == to.id) && (o.Reply == "" || o.Reply == to.id) {
							to.Receive(now, recode(t, m), from.id)
						}
					}
				}
			}
		}
	}
}

func TestTwoReplicasShare(t *testing.T) {
	ra, rb := newRouter(t, 4), newRouter(t, 4)
	a, b := New("a", ra, 0, func() {}), New("b", rb, 0, func() {})
	ra.Share(a)
	rb.Share(b)
	plan, err := ra.Pick(0, &routing.Query{ID: "1", Conversation: "c", PromptTokens: 1000}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	deliver(t, time.Millisecond, a, b)
	if got := rb.Load(plan.Decode); got.Active != 1 || got.Queue != 1000 {
		t.Errorf("b's load of the target: got %+v, want one request with 1000 tokens queued", got)
	}
	other, err := rb.Pick(2*time.Millisecond, &routing.Query{ID: "2", Conversation: "c", PromptTokens: 1000}, nil, nil)
	if err != nil || other.Decode != plan.Decode || other.Via != routing.ViaSticky {
		t.Errorf("the same conversation at b: got %v via %s, %v, want %v", other.Decode, other.Via, err, plan.Decode)
	}
	deliver(t, 2*time.Millisecond, a, b)
	if got := ra.Load(plan.Decode); got.Active != 2 {
		t.Errorf("a's load of the target: got %+v, want two requests", got)
	}
	ra.FirstToken(3*time.Millisecond, plan.Reservation)
	deliver(t, 3*time.Millisecond, a, b)
	if got := rb.Load(plan.Decode); got.Queue != 1000 || got.Active != 2 {
		t.Errorf("after a first token: got %+v, want one request with 1000 tokens queued", got)
	}
	ra.Release(4*time.Millisecond, plan.Reservation)
	rb.Release(4*time.Millisecond, other.Reservation)
	deliver(t, 5*time.Millisecond, a, b)
	for _, r := range []*routing.Router{ra, rb} {
		if r.Live() != 0 || r.Load(plan.Decode) != (routing.Load{}) {
			t.Errorf("after the end: got %d bookings, load %+v, want none", r.Live(), r.Load(plan.Decode))
		}
	}
}
