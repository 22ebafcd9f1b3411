package decide

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/tokens/models"
	"github.com/kvlane/kvlane/internal/tokens/shape"
)

// fickle is the context of a client that disconnects after a number of calls of Err.
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

// untouched checks that the request left nothing behind that later decisions depend on.
func (b *bench) untouched() {
	b.t.Helper()
	b.idle()
	if b.loads() != 0 || b.count("kvlane_picks_total") != 0 || b.fleet.Index().Stats().Speculative != 0 || b.cpu.used() != 0 {
		b.t.Errorf("load %d, %v picks, %d blocks credited, %d places in use", b.loads(), b.count("kvlane_picks_total"), b.fleet.Index().Stats().Speculative, b.cpu.used())
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
	// At the start, before and after the tokens, and before the pick.
	if looks < 4 || looks == 20 {
		t.Fatalf("routed after %d looks", looks)
	}
	if b.count("kvlane_picks_total", "a") != 1 || b.fleet.Index().Stats().Speculative == 0 {
		t.Error("a live request leaves no trace: the test sees nothing")
	}
}

func TestADeadRequestWaitsForNoProcessor(t *testing.T) {
	b := newBench(t, "", worker("a", 0))
	for range cap(b.cpu.all) {
		b.cpu.all <- struct{}{}
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
	if b.cpu.used() != cap(b.cpu.all) {
		t.Errorf("got %d places in use, want %d", b.cpu.used(), cap(b.cpu.all))
	}
	for range cap(b.cpu.all) {
		<-b.cpu.all
	}
	b.untouched()
}

// A client that disconnects while its prompt is tokenized gets the answer for that, and
// tokenizing stops.
func TestAClientLeavesDuringItsTokens(t *testing.T) {
	ctx, leave := context.WithCancel(t.Context())
	b := newBench(t, "", worker("a", 0))
	b.withClock(leave)
	r := b.request("/v1/chat/completions", `{"model":"demo","messages":[{"role":"user","content":"`+strings.Repeat("sea ", 1<<18)+`"}]}`)
	d := b.Decide(ctx, r)
	e := b.decisions.Find(r.ID)
	if !isGone(d) || e == nil || e.Refusal != errClientGone.Error() || e.PromptTokens != 0 {
		t.Errorf("%+v, journal %+v", d.Reject, e)
	}
	b.untouched()
}

func TestLargeBodiesHoldHalfOfTheProcessors(t *testing.T) {
	l := newCPULimit(32 << 20)
	ended, end := context.WithCancel(t.Context())
	end()
	var held []cpuPlace
	take := func(size int) bool {
		p, ok := l.acquire(ended, size) // does not wait
		if ok {
			held = append(held, p)
		}
		return ok
	}
	large := 0
	for take(largeBody + 1) {
		large++
	}
	if want := max(1, cap(l.all)/2); large != want || l.used() != want {
		t.Errorf("got %d large bodies and %d places in use, want %d", large, l.used(), want)
	}
	small := 0
	for take(largeBody) {
		small++
	}
	if want := cap(l.all) - large; small != want || small < 1 {
		t.Errorf("got %d small bodies, want %d", small, want)
	}
	held[0].release()
	held[0].release()
	if l.used() != cap(l.all)-1 {
		t.Errorf("got %d places in use after one release, want %d", l.used(), cap(l.all)-1)
	}
	if !take(1) || take(largeBody+1) || len(l.large) != large-1 {
		t.Errorf("got %d large places in use, want %d: who does not get a place keeps none", len(l.large), large-1)
	}
	for i := range held {
		held[i].release()
	}
	if l.used() != 0 || len(l.large) != 0 {
		t.Errorf("got %d places and %d large ones in use, want none", l.used(), len(l.large))
	}
}

// Decisions about large bodies allocate many times their size: together they have no more bytes than the largest body.
func TestLargeBodiesShareTheirBytes(t *testing.T) {
	l := newCPULimit(32 << 20)
	l.all, l.large = make(chan struct{}, 16), make(chan struct{}, 8) // as on 16 processors
	ended, end := context.WithCancel(t.Context())
	end()
	first, ok := l.acquire(ended, 20<<20)
	if !ok {
		t.Fatal("got no place for a body of 20 MiB, want one")
	}
	if _, ok := l.acquire(ended, 13<<20); ok || l.used() != 1 || len(l.large) != 1 {
		t.Errorf("got a place for 13 MiB more: %v, %d places and %d large ones in use; want none, 1 and 1", ok, l.used(), len(l.large))
	}
	second, ok := l.acquire(ended, 12<<20)
	if !ok {
		t.Error("got no place for 12 MiB more, want one")
	}
	if _, ok := l.acquire(ended, largeBody); !ok {
		t.Error("got no place for a small body, want one")
	}
	first.release()
	second.release()
	if _, ok := l.acquire(ended, 40<<20); !ok {
		t.Error("got no place for a body above the limit, which a reload may have lowered; want one")
	}
}

const soon = "limits: {decision_timeout: 20ms}\n"

// wantDeadline checks that a request was routed by load because its deadline had passed.
func (b *bench) wantDeadline(d extproc.Decision, e *observe.Entry) {
	b.t.Helper()
	if d.Reject != nil || d.Endpoint == "" || e.Degraded != degradedDeadline || e.Matched != 0 || e.PromptTokens != 0 ||
		!strings.Contains(e.Refusal, "limits.decision_timeout") || !strings.Contains(e.Text(), "deadline") {
		b.t.Errorf("got %+v, degraded %q (%s), %d tokens, want it routed by load with reason deadline", d, e.Degraded, e.Refusal, e.PromptTokens)
	}
}

// A request that gets no processor in time is routed by load; one whose tokens are cached
// with its body needs none.
func TestADecisionDoesNotWaitForAProcessorForever(t *testing.T) {
	b := newBench(t, soon, worker("a", 0))
	for range cap(b.cpu.all) {
		b.cpu.all <- struct{}{}
	}
	d, e := b.ask("/v1/completions", completion(800, ""))
	b.wantDeadline(d, e)
	d.Ticket.End(time.Now())
	if n := b.count("kvlane_degraded_total", degradedDeadline); n != 1 {
		t.Errorf("got %v in the metric, want 1", n)
	}
	if b.cpu.used() != cap(b.cpu.all) {
		t.Errorf("got %d places in use, want %d", b.cpu.used(), cap(b.cpu.all))
	}
	for range cap(b.cpu.all) {
		<-b.cpu.all
	}
	b.cfg.Limits.DecisionTimeout = 0
	d, e = b.ask("/v1/completions", completion(800, ""))
	if e.Degraded != "" || e.PromptTokens < 800 {
		t.Errorf("got %d tokens, degraded %q, want 800 as soon as there is a processor", e.PromptTokens, e.Degraded)
	}
	d.Ticket.End(time.Now())
	b.idle()
}

// Bodies whose time is over are parsed only: one large one at a time, and small ones do not wait for it.
func TestLateBodiesArePlacedToo(t *testing.T) {
	b := newBench(t, soon, worker("a", 0))
	for range cap(b.cpu.all) {
		b.cpu.all <- struct{}{}
	}
	b.cpu.lateLarge <- struct{}{}
	large := make(chan extproc.Decision, 2)
	ctx, leave := context.WithCancel(t.Context())
	waits, leaves := b.request("/v1/chat/completions", chat(largeBody+1<<10)), b.request("/v1/chat/completions", chat(largeBody+1<<10))
	go func() { large <- b.Decide(ctx, leaves) }()
	d, e := b.ask("/v1/completions", completion(800, ""))
	b.wantDeadline(d, e)
	d.Ticket.End(time.Now())
	leave()
	if d := <-large; !isGone(d) {
		t.Errorf("got %+v, want nothing done for a client that has left", d.Reject)
	}
	go func() { large <- b.Decide(t.Context(), waits) }()
	select {
	case d := <-large:
		t.Errorf("got %+v while another large body is parsed, want it to wait", d.Reject)
		large <- d
	case <-time.After(3 * b.cfg.Limits.DecisionTimeout.Std()):
	}
	<-b.cpu.lateLarge
	d = <-large
	b.wantDeadline(d, b.decisions.Find(waits.ID))
	d.Ticket.End(time.Now())
	if len(b.cpu.lateLarge) > 0 || len(b.cpu.lateSmall) > 0 || len(b.cpu.large) > 0 {
		t.Errorf("got %d, %d and %d places in use, want none", len(b.cpu.lateLarge), len(b.cpu.lateSmall), len(b.cpu.large))
	}
	for range cap(b.cpu.all) {
		<-b.cpu.all
	}
	b.idle()
}

// withClock replaces the model by one that calls now before it renders a chat.
func (b *bench) withClock(now func()) {
	b.t.Helper()
	files, err := models.Open("builtin:qwen3")
	if err != nil {
		b.t.Fatal(err)
	}
	m, err := shape.Load(files, shape.Options{Names: []string{"demo"}, Now: func() time.Time { now(); return time.Now() }})
	if err != nil {
		b.t.Fatal(err)
	}
	b.fleet.Model("demo").Tokens = m
}

func chat(bytes int) string {
	return `{"model":"demo","messages":[{"role":"user","content":"` + strings.Repeat("sea ", bytes/4) + `"}]}`
}

func TestTheDeadlineEndsRenderingAndTokenizing(t *testing.T) {
	b := newBench(t, soon, worker("a", 0))
	b.withClock(func() { time.Sleep(40 * time.Millisecond) })
	d, e := b.ask("/v1/chat/completions", chat(1<<20))
	b.wantDeadline(d, e)
	d.Ticket.End(time.Now())
	b.cfg.Limits.DecisionTimeout = 0
	d, e = b.ask("/v1/chat/completions", chat(1<<20))
	if e.Degraded != "" || e.PromptTokens < 1<<18 {
		t.Errorf("got %d tokens, degraded %q, want all of them without a deadline", e.PromptTokens, e.Degraded)
	}
	d.Ticket.End(time.Now())
	b.untouchedByWork()
}

func (b *bench) untouchedByWork() {
	b.t.Helper()
	if b.idle(); b.cpu.used() != 0 || len(b.cpu.large) != 0 {
		b.t.Errorf("got %d places and %d large ones in use, want none", b.cpu.used(), len(b.cpu.large))
	}
}

// Large bodies that hang, however many, do not block small ones.
func TestLargeBodiesDoNotStarveSmallOnes(t *testing.T) {
	b := newBench(t, "", worker("a", 0))
	stuck := make(chan struct{})
	b.withClock(func() { <-stuck })
	const hogs = 8
	done := make(chan extproc.Decision, hogs)
	for range hogs {
		r := b.request("/v1/chat/completions", chat(largeBody+1<<10))
		go func() { done <- b.Decide(t.Context(), r) }()
	}
	for len(b.cpu.large) < cap(b.cpu.large) || b.cpu.used() < cap(b.cpu.large) {
		time.Sleep(time.Millisecond)
	}
	for range 20 {
		d, e := b.ask("/v1/completions", completion(100, ""))
		if e.Degraded != "" || e.PromptTokens < 100 {
			t.Errorf("got %d tokens, degraded %q, want 100 tokens", e.PromptTokens, e.Degraded)
		}
		d.Ticket.End(time.Now())
	}
	if len(done) != 0 {
		t.Errorf("got %d large bodies decided, want none", len(done))
	}
	close(stuck)
	for range hogs {
		d := <-done
		d.Ticket.End(time.Now())
	}
	b.untouchedByWork()
}

// Clients send long words that take a second to merge. Other decisions do not queue behind
// them, as they would with one queue for all bodies.
func TestHostileWordsDelayOnlyThemselves(t *testing.T) {
	const clients, honest = 4, 20
	word := make([]byte, 200<<10)
	r := rand.New(rand.NewPCG(5, 6))
	for i := range word {
		word[i] = byte('a' + r.IntN(26))
	}
	for _, timeout := range []string{"0s", "50ms"} {
		b := newBench(t, "limits: {decision_timeout: "+timeout+"}\n", worker("a", 0))
		var number, finished atomic.Int64
		ctx, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for range clients {
			wg.Go(func() {
				for ctx.Err() == nil {
					body := []byte(`{"model":"demo","prompt":"`)
					for range 4 { // words that have not been seen before
						body = fmt.Appendf(body, " x%s%s", strings.Repeat("y", int(number.Add(1))), word)
					}
					body = append(body, `"}`...)
					if d := b.Decide(ctx, &extproc.Request{Method: "POST", Path: "/v1/completions", Body: body}); d.Ticket != nil {
						d.Ticket.End(time.Now())
						finished.Add(1)
					}
				}
			})
		}
		for b.cpu.used() == 0 {
			time.Sleep(time.Millisecond)
		}
		if timeout == "0s" {
			before := finished.Load()
			for range honest {
				d, _ := b.ask("/v1/completions", completion(100, ""))
				d.Ticket.End(time.Now())
			}
			if n := finished.Load() - before; n > honest/2 {
				t.Errorf("got %d hostile decisions during %d honest ones, want less than half as many", n, honest)
			}
		} else {
			for finished.Load() < clients {
				time.Sleep(time.Millisecond)
			}
		}
		stop()
		wg.Wait()
		if n := b.count("kvlane_degraded_total", degradedDeadline); (n >= clients) != (timeout != "0s") {
			t.Errorf("timeout %s: got %v decisions by load, want them with a timeout only", timeout, n)
		}
		b.untouchedByWork()
	}
}

// used is the number of places taken.
func (l *cpuLimit) used() int { return len(l.all) }
