package decide

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/routing"
)

// asked is a decision that may still be waiting.
type asked struct {
	id   string
	done chan extproc.Decision
	stop context.CancelFunc
}

// send decides in a goroutine of its own. If wait is above 0 it returns when that many
// requests are in the queue.
func (b *bench) send(wait int, headers ...string) *asked {
	b.t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	b.t.Cleanup(stop)
	r := b.request("/v1/completions", completion(10, ""), headers...)
	a := &asked{id: r.ID, done: make(chan extproc.Decision, 1), stop: stop}
	go func() { a.done <- b.Decide(ctx, r) }()
	if wait > 0 {
		b.untilWaiting(wait)
	}
	return a
}

func (b *bench) untilWaiting(n int) {
	b.t.Helper()
	for range 12_000 { // a minute: slow machines decide on large bodies slowly
		b.mu.Lock()
		got := b.waiting.queue.Len()
		b.mu.Unlock()
		if got == n {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	b.t.Fatalf("never %d in the queue", n)
}

func (b *bench) idle() {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.waiting.queue.Len() != 0 || len(b.waiting.byID) != 0 || b.router.Live() != 0 {
		b.t.Errorf("left: %d in the queue, %d waiters, %d bookings", b.waiting.queue.Len(), len(b.waiting.byID), b.router.Live())
	}
}

const oneAtATime = "policy: {limits: {max_active: 1}}"

func TestWaitingIsOffByDefault(t *testing.T) {
	b := newBench(t, "routing: {"+oneAtATime+"}\n", worker("a", 0))
	b.ask("/v1/completions", completion(10, ""))
	if d, e := b.ask("/v1/completions", completion(10, "")); d.Reject == nil || d.Reject.Status != 429 || e.Waited != 0 {
		t.Errorf("%+v", d.Reject)
	}
}

func TestWaitersArePlacedInOrderAsRequestsEnd(t *testing.T) {
	b := newBench(t, "routing: {trust_overrides: true, wait: {max_requests: 8, timeout: 1m}, "+oneAtATime+"}\n", worker("a", 0))
	running, _ := b.ask("/v1/completions", completion(10, ""))
	var all []*asked
	for i, priority := range []string{"0", "-1", "5", "0", "5"} {
		all = append(all, b.send(i+1, priorityHeader, priority))
	}
	for _, i := range []int{2, 4, 0, 3, 1} {
		running.Ticket.End(time.Now())
		running = <-all[i].done
		if running.Reject != nil {
			t.Fatalf("request %d: %+v", i, running.Reject)
		}
		e := b.decisions.Find(all[i].id)
		if e.Waited <= 0 || !strings.Contains(e.Text(), "for capacity") {
			t.Errorf("request %d: journal does not say that it waited: %s", i, e.Text())
		}
	}
	running.Ticket.End(time.Now())
	b.idle()
}

// With a single CPU slot: no waiting request would be routed if it kept the slot.
func TestAWaitingRequestHoldsNoProcessor(t *testing.T) {
	b := newBench(t, "routing: {wait: {max_requests: 8, timeout: 1m}, "+oneAtATime+"}\n", worker("a", 0))
	b.cpu.all = make(chan struct{}, 1)
	running, _ := b.ask("/v1/completions", completion(10, ""))
	first, second := b.send(1), b.send(2)
	for _, a := range []*asked{first, second} {
		running.Ticket.End(time.Now())
		running = <-a.done
	}
	running.Ticket.End(time.Now())
	if b.idle(); b.cpu.used() != 0 {
		t.Errorf("got %d places in use, want none", b.cpu.used())
	}
}

// A waiter whose attempt panics affects neither the request that freed capacity nor the
// waiters behind it.
func TestAPanickingWaiterIsAlone(t *testing.T) {
	b := newBench(t, "routing: {wait: {max_requests: 8, timeout: 1m}, "+oneAtATime+"}\n", worker("a", 0))
	running, _ := b.ask("/v1/completions", completion(10, ""))
	died := make(chan bool, 1)
	r := b.request("/v1/completions", completion(10, ""))
	go func() { died <- panics(func() { b.Decide(context.Background(), r) }) }()
	b.untilWaiting(1)
	behind := b.send(2)
	b.mu.Lock()
	for _, w := range b.waiting.byID {
		if w.work.r == r {
			w.work.tokens = nil
		}
	}
	b.mu.Unlock()
	running.Ticket.End(time.Now())
	if !<-died {
		t.Error("the waiter did not panic")
	}
	running = <-behind.done
	if running.Ticket == nil {
		t.Fatalf("who stood behind was not placed: %+v", running.Reject)
	}
	running.Ticket.End(time.Now())
	b.idle()
}

func TestAFullQueueMakesRoomForGreaterPriority(t *testing.T) {
	b := newBench(t, "routing: {trust_overrides: true, wait: {max_requests: 2, timeout: 1m}, "+oneAtATime+"}\n", worker("a", 0))
	running, _ := b.ask("/v1/completions", completion(10, ""))
	batch := b.send(1, priorityHeader, "-2")
	first := b.send(2)
	// The queue is full: a request of higher priority replaces the batch job.
	second := b.send(0)
	if d := <-batch.done; d.Reject == nil || d.Reject.Status != 429 || len(d.Reject.Headers) != 1 {
		t.Fatalf("batch job: %+v", d)
	}
	b.untilWaiting(2)
	// What is not of greater priority is refused immediately.
	for _, priority := range []string{"0", "-1"} {
		if d, _ := b.ask("/v1/completions", completion(10, ""), priorityHeader, priority); d.Reject == nil || d.Reject.Status != 429 {
			t.Errorf("priority %s with a full queue: %+v", priority, d)
		}
	}
	// A full queue of ordinary requests keeps out no important one.
	urgent := b.send(0, priorityHeader, "9")
	if d := <-second.done; d.Reject == nil || d.Reject.Status != 429 {
		t.Fatalf("the youngest of lower priority: %+v", d)
	}
	b.untilWaiting(2)
	for _, a := range []*asked{urgent, first} {
		running.Ticket.End(time.Now())
		if running = <-a.done; running.Reject != nil {
			t.Fatalf("%+v", running.Reject)
		}
	}
	running.Ticket.End(time.Now())
	b.idle()
}

func TestAClientThatLeavesLeavesTheQueue(t *testing.T) {
	b := newBench(t, "routing: {wait: {max_requests: 2, timeout: 1m}, "+oneAtATime+"}\n", worker("a", 0))
	running, _ := b.ask("/v1/completions", completion(10, ""))
	gone, stays := b.send(1), b.send(2)
	gone.stop()
	if d := <-gone.done; d.Reject == nil || d.Reject.Status != 499 {
		t.Errorf("%+v", d)
	}
	b.untilWaiting(1)
	running.Ticket.End(time.Now())
	running = <-stays.done
	if running.Reject != nil {
		t.Errorf("%+v", running.Reject)
	}
	running.Ticket.End(time.Now())
	b.idle()
}

// Capacity becomes free at the very moment that the client of the next in the queue
// disconnects: nothing stays booked, and no target is credited with a prompt that is never
// sent.
func TestAPlaceForAClientThatIsGone(t *testing.T) {
	b := newBench(t, "routing: {wait: {max_requests: 2, timeout: 1m}, "+oneAtATime+"}\n", worker("a", 0))
	running, _ := b.ask("/v1/completions", completion(10, ""))
	prompt := completion(400, "")
	ctx, stop := context.WithCancel(t.Context())
	r := b.request("/v1/completions", prompt)
	done := make(chan extproc.Decision, 1)
	go func() { done <- b.Decide(ctx, r) }()
	b.untilWaiting(1)
	b.mu.Lock()
	stop()
	for _, w := range b.waiting.byID {
		// As book does for a request that ends, but without a gap.
		b.router.Release(b.since(time.Now()), running.Ticket.(*ticket).reservation)
		b.placeWaiting(b.since(time.Now()), false)
		if w.placed == nil {
			t.Errorf("not placed: %v", w.err)
		}
	}
	b.mu.Unlock()
	if d := <-done; d.Reject == nil || d.Reject.Status != 499 {
		t.Errorf("%+v", d)
	}
	b.idle()
	if d, e := b.ask("/v1/completions", prompt); d.Ticket == nil || e.Matched != 0 {
		t.Errorf("%d tokens are said to be there: %+v", e.Matched, d)
	} else {
		d.Ticket.End(time.Now())
	}
	b.idle()
}

func TestWaitingEndsAtTheDeadline(t *testing.T) {
	b := newBench(t, "routing: {wait: {max_requests: 2, timeout: 20ms}, "+oneAtATime+"}\n", worker("a", 0))
	running, _ := b.ask("/v1/completions", completion(10, ""))
	d, e := b.ask("/v1/completions", completion(10, ""))
	if d.Reject == nil || d.Reject.Status != 429 || len(d.Reject.Headers) != 1 || e.Waited < 20*time.Millisecond {
		t.Errorf("%+v after %s", d.Reject, e.Waited)
	}
	running.Ticket.End(time.Now())
	b.idle()
}

// TestRoomForAnotherModel: a request that waits for one model's workers does not block
// requests for other models, nor does a pinned one.
func TestRoomForAnotherModel(t *testing.T) {
	other := worker("b", 0)
	other.Models = []string{"other"}
	b := newBench(t, "routing: {trust_overrides: true, wait: {max_requests: 9, timeout: 1m}, "+oneAtATime+"}\n", worker("a", 0), other)
	running, _ := b.ask("/v1/completions", completion(10, ""))
	waits := b.send(1)
	d, _ := b.ask("/v1/completions", strings.Replace(completion(10, ""), "demo", "other", 1))
	if d.Reject != nil || d.Endpoint != other.Address {
		t.Fatalf("%+v", d)
	}
	d.Ticket.End(time.Now())
	b.untilWaiting(1)
	// A new worker is capacity, too.
	b.Fleet().SetWorkers([]workers.Worker{worker("a", 0), other, worker("c", 0)})
	placed := <-waits.done
	if placed.Reject != nil || placed.Endpoint != "10.0.0.99:8000" {
		t.Errorf("%+v", placed)
	}
	// When the workers leave the wait ends: no capacity can become free.
	waits = b.send(1)
	b.untilWaiting(1)
	b.Fleet().SetWorkers([]workers.Worker{other}) // its engine would answer 404
	if d := <-waits.done; d.Reject == nil || d.Reject.Status != 503 {
		t.Errorf("%+v", d)
	}
	running.Ticket.End(time.Now())
	placed.Ticket.End(time.Now())
	b.idle()
}

// TestManyWaiters: many requests pass through two places and none is lost.
func TestManyWaiters(t *testing.T) {
	b := newBench(t, "routing: {wait: {max_requests: 1000, timeout: 1m}, "+oneAtATime+"}\n", worker("a", 2))
	done := make(chan string, 60)
	for i := range 60 {
		r := b.request("/v1/completions", completion(10+i, ""))
		ctx, stop := context.WithCancel(context.Background())
		defer stop()
		if i%7 == 3 {
			stop() // leaves immediately, or is placed and ends immediately
		}
		go func() {
			d := b.Decide(ctx, r)
			if d.Ticket != nil {
				d.Ticket.End(time.Now())
			}
			done <- fmt.Sprint(d.Reject != nil && d.Reject.Status != 499)
		}()
	}
	for range 60 {
		if refused := <-done; refused == "true" {
			t.Error("refused")
		}
	}
	b.idle()
}

// Names that no worker lists are one model to the queue: otherwise a client that writes another one in each request makes
// every change of the router try as many waiters. Listed names are different ones.
func TestNamesOfClientsOpenNoLanes(t *testing.T) {
	for _, queue := range []string{"routing: {wait: {max_requests: 99, timeout: 1m}, " + oneAtATime + "}\n",
		"flow: {max_requests: 99, timeout: 1m, fairness: model}\nrouting: {" + oneAtATime + "}\n"} {
		listed := worker("a", 0)
		listed.Models = []string{"demo", "other"}
		b := newBench(t, "limits: {unknown_model: route}\n"+queue, listed)
		running, _ := b.ask("/v1/completions", completion(10, ""))
		all := map[string]*asked{}
		for i, name := range []string{"x1", "x2", "x3", "other", "demo"} {
			all[name] = b.sendBody(i+1, strings.Replace(completion(10, ""), "demo", name, 1))
		}
		lanes, tenants := map[string]routing.Lane{}, map[string]string{}
		b.mu.Lock()
		for _, q := range b.waiting.byID {
			lanes[q.work.query.Model], _ = q.work.lane(q.err)
			tenants[q.work.query.Model] = q.work.flowTenant(&b.live.Load().Flow)
		}
		b.mu.Unlock()
		if lanes["x1"] != lanes["x2"] || lanes["x2"] != lanes["x3"] || lanes["demo"] == lanes["other"] || lanes["demo"] == lanes["x1"] {
			t.Errorf("got lanes %v, want one for the names that no worker lists", lanes)
		}
		if tenants["x1"] != tenants["x2"] || strings.HasPrefix(queue, "flow") && (tenants["demo"] == tenants["other"] || tenants["demo"] == tenants["x1"]) {
			t.Errorf("got tenants %v, want one for the names that no worker lists", tenants)
		}
		w := &work{job: &job{d: b.Decider}, in: &input{model: b.fleet.Model("demo")}, query: routing.Query{Model: "alias"}}
		if got := w.class(); got != "alias" {
			t.Errorf("a name of the configuration that no worker lists: got class %q, want it", got)
		}
		running.Ticket.End(time.Now())
		for len(all) > 0 { // one after the other, in any order
			for name, a := range all {
				select {
				case d := <-a.done:
					if d.Reject != nil {
						t.Fatalf("%s: got %+v, want a place", name, d.Reject)
					}
					d.Ticket.End(time.Now())
					delete(all, name)
				default:
					time.Sleep(time.Millisecond)
				}
			}
		}
		b.idle()
	}
}
