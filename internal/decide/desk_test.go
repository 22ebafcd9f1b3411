package decide

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/model"
	"github.com/kvlane/kvlane/internal/models"
)

// fickle is the context of a client that goes away after some looks at it.
type fickle struct {
	context.Context
	looks int
}

func (f *fickle) Err() error {
	if f.looks--; f.looks < 0 {
		return context.Canceled
	}
	return nil
}

func isGone(d extproc.Decision) bool {
	return d.Reject != nil && d.Reject.Status == 499 && d.Reject.Details == "kvlane_client_gone" && d.Ticket == nil
}

// untouched wants no trace of a request in what later decisions look at.
func (b *bench) untouched() {
	b.t.Helper()
	b.idle()
	if b.loads() != 0 || b.count("kvlane_picks_total") != 0 || b.fleet.Index().Stats().Speculative != 0 || len(b.desks) != 0 {
		b.t.Errorf("load %d, %v picks, %d blocks credited, %d desks taken", b.loads(), b.count("kvlane_picks_total"), b.fleet.Index().Stats().Speculative, len(b.desks))
	}
}

func TestADeadRequestIsNotRoutedWhereverItIs(t *testing.T) {
	b := newBench(t, "", worker("a", 0))
	looks := 0
	for ; looks < 20; looks++ {
		r := b.request("/v1/completions", completion(800, ""))
		d := b.Decide(&fickle{context.Background(), looks}, r)
		if d.Reject == nil {
			break
		}
		e := b.decisions.Find(r.ID)
		if !isGone(d) || e == nil || e.Refusal != errClientGone.Error() || e.API == "" {
			t.Errorf("after %d looks: %+v, journal %+v", looks, d.Reject, e)
		}
		if looks <= 1 && e.PromptTokens != 0 {
			t.Errorf("after %d looks: tokenized", looks)
		}
		b.untouched()
	}
	// At the start, before the tokens, after them and before the pick.
	if looks < 4 || looks == 20 {
		t.Fatalf("routed after %d looks", looks)
	}
	if b.count("kvlane_picks_total", "a") != 1 || b.fleet.Index().Stats().Speculative == 0 {
		t.Error("a live request leaves no trace: the test sees nothing")
	}
}

func TestADeadRequestWaitsForNoDesk(t *testing.T) {
	b := newBench(t, "", worker("a", 0))
	for range cap(b.desks) {
		b.desks <- struct{}{}
	}
	ctx, stop := context.WithCancel(context.Background())
	r := b.request("/v1/completions", completion(40, ""))
	done := make(chan extproc.Decision, 1)
	go func() { done <- b.Decide(ctx, r) }()
	stop()
	if d := <-done; !isGone(d) {
		t.Errorf("%+v", d.Reject)
	}
	if e := b.decisions.Find(r.ID); e == nil || e.Rejected != 499 {
		t.Errorf("journal: %+v", e)
	}
	if len(b.desks) != cap(b.desks) {
		t.Error("it took another's desk")
	}
	for range cap(b.desks) {
		<-b.desks
	}
	b.untouched()
}

// A client that leaves while its prompt is tokenized is answered as one that left, and
// its prompt is not tokenized to the end.
func TestAClientLeavesDuringItsTokens(t *testing.T) {
	ctx, leave := context.WithCancel(t.Context())
	files, err := models.Open("builtin:qwen3")
	if err != nil {
		t.Fatal(err)
	}
	m, err := model.Load(files, model.Options{Names: []string{"demo"}, Now: func() time.Time { leave(); return time.Now() }})
	if err != nil {
		t.Fatal(err)
	}
	b := newBench(t, "", worker("a", 0))
	b.fleet.Model("demo").Tokens = m
	r := b.request("/v1/chat/completions", `{"model":"demo","messages":[{"role":"user","content":"`+strings.Repeat("sea ", 1<<18)+`"}]}`)
	d := b.Decide(ctx, r)
	e := b.decisions.Find(r.ID)
	if !isGone(d) || e == nil || e.Refusal != errClientGone.Error() || e.PromptTokens != 0 {
		t.Errorf("%+v, journal %+v", d.Reject, e)
	}
	b.untouched()
}
