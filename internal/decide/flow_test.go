package decide

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/tokens/shape"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/routing"
)

// text is a completion of n words that shares no block with those of other seeds.
func text(seed string, n int) string {
	return `{"model":"demo","prompt":"` + strings.Repeat(seed+" ", n) + `"}`
}

// flowBench has one worker; requests wait while it has more than 20 tokens queued.
func flowBench(t *testing.T, flow, more string) *bench {
	t.Helper()
	return newBench(t, "flow: {max_requests: 8, timeout: 1m, hold_tokens: 20"+flow+"}\n"+more, worker("a", 0))
}

// sendBody is send with a body.
func (b *bench) sendBody(wait int, body string, headers ...string) *asked {
	b.t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	b.t.Cleanup(stop)
	r := b.request("/v1/completions", body, headers...)
	a := &asked{id: r.ID, done: make(chan extproc.Decision, 1), stop: stop}
	go func() { a.done <- b.Decide(ctx, r) }()
	if wait > 0 {
		b.untilWaiting(wait)
	}
	return a
}

// drain gives the first tokens of requests that were placed, one after the other, until all of
// those asked are placed, and returns the order.
func (b *bench) inOrder(running extproc.Decision, all map[string]*asked) (order []string) {
	b.t.Helper()
	for len(all) > 0 {
		running.Ticket.FirstToken(time.Now())
		defer running.Ticket.End(time.Now())
		for next := ""; next == ""; runtime.Gosched() {
			for name, a := range all {
				select {
				case running = <-a.done:
					next = name
				default:
				}
			}
			if next != "" {
				if running.Reject != nil {
					b.t.Fatalf("%s: got %+v, want a place", next, running.Reject)
				}
				order = append(order, next)
				delete(all, next)
			}
		}
	}
	return order
}

// A request waits while its target has more than a step queued, though it is below all limits,
// and is placed with the knowledge of that moment.
func TestARequestWaitsHereNotInTheEngine(t *testing.T) {
	b := flowBench(t, "", "")
	long, _ := b.ask("/v1/completions", text("sea", 100))
	held := b.sendBody(1, text("sea", 100))
	if got := b.loads(); got != 1+101 && got != 1+100 {
		t.Errorf("got %d booked with a waiting request, want the first one alone", got)
	}
	long.Ticket.FirstToken(time.Now())
	d := <-held.done
	e := b.decisions.Find(held.id)
	if d.Reject != nil || e.Waited <= 0 || e.Matched == 0 {
		t.Errorf("got %+v after %s with %d cached tokens, want a place, a wait and the first one's blocks", d.Reject, e.Waited, e.Matched)
	}
	long.Ticket.End(time.Now())
	d.Ticket.End(time.Now())
	b.idle()
	if got := b.loads(); got != 0 {
		t.Errorf("got a load of %d at the end, want 0", got)
	}
}

// The tenant that floods does not delay the other one, whose requests come last.
func TestTenantsShareTheQueue(t *testing.T) {
	b := flowBench(t, ", order: arrival", "tenants: {header: X-Team}\n")
	running, _ := b.ask("/v1/completions", text("sea", 100))
	all := map[string]*asked{}
	for i := range 4 {
		name := fmt.Sprint("a", i)
		all[name] = b.sendBody(i+1, text(name, 100), "x-team", "a")
	}
	all["b0"] = b.sendBody(5, text("b0", 100), "x-team", "b")
	all["b1"] = b.sendBody(6, text("b1", 100), "x-team", "b")
	// Two headers: one may be the client's. It has no tenant.
	all["none"] = b.sendBody(7, text("none", 100), "x-team", "c", "x-team", "b")
	if got := strings.Join(b.inOrder(running, all), " "); got != "a0 b0 none a1 b1 a2 a3" {
		t.Errorf("got %s", got)
	}
}

// Without configuration a client names neither tenant nor priority.
func TestAClientChoosesNoClass(t *testing.T) {
	b := flowBench(t, ", order: arrival", "")
	running, _ := b.ask("/v1/completions", text("sea", 100))
	all := map[string]*asked{}
	for i, headers := range [][]string{nil, {"x-team", "b"}, {"x-kvlane-priority", "9"}, {"authorization", "Bearer other"}} {
		name := fmt.Sprint(i)
		all[name] = b.sendBody(i+1, text("t"+name, 100), headers...)
	}
	if got := strings.Join(b.inOrder(running, all), " "); got != "0 1 2 3" {
		t.Errorf("got %s, want the order of arrival", got)
	}
}

func TestAPIKeysShareTheQueue(t *testing.T) {
	b := flowBench(t, ", order: arrival, fairness: api_key, weights: {"+keyHash+": 1}", "")
	running, _ := b.ask("/v1/completions", text("sea", 100))
	all := map[string]*asked{}
	for i, headers := range [][]string{{"authorization", "Bearer a"}, {"authorization", "bearer  a"}, {"x-api-key", "a"}, {"x-api-key", "b"}} {
		name := fmt.Sprint(i)
		all[name] = b.sendBody(i+1, text("t"+name, 100), headers...)
	}
	b.mu.Lock()
	for id, q := range b.waiting.byID {
		if got := q.work.flowTenant(&b.cfg.Flow); (got == keyHash) != (id < 4) {
			t.Errorf("request %d: got tenant %s", id, got)
		}
	}
	b.mu.Unlock()
	if got := strings.Join(b.inOrder(running, all), " "); got != "0 3 1 2" {
		t.Errorf("got %s", got)
	}
}

// keyHash is 'printf a | sha256sum | cut -c1-16'.
const keyHash = "ca978112ca1bbdca"

// The order within a tenant: shortest first, or the conversation that was served least.
func TestOrderWithinATenant(t *testing.T) {
	b := flowBench(t, "", "")
	running, _ := b.ask("/v1/completions", text("sea", 100))
	all := map[string]*asked{"long": b.sendBody(1, text("long", 30000)), "short": b.sendBody(2, text("short", 30))}
	if got := strings.Join(b.inOrder(running, all), " "); got != "short long" {
		t.Errorf("shortest: got %s", got)
	}
	b = flowBench(t, ", order: least_served", "")
	running, _ = b.ask("/v1/completions", text("sea", 30000), "x-session-id", "old")
	all = map[string]*asked{"old": b.sendBody(1, text("long", 30), "x-session-id", "old"), "new": b.sendBody(2, text("short", 30), "x-session-id", "new")}
	if got := strings.Join(b.inOrder(running, all), " "); got != "new old" {
		t.Errorf("least served: got %s", got)
	}
}

func refusal(d extproc.Decision) string {
	if d.Reject == nil {
		return "placed"
	}
	return fmt.Sprint(d.Reject.Status, " ", d.Reject.Details, " ", len(d.Reject.Headers))
}

// What does not fit is answered 429 with a reason and Retry-After; a client that leaves leaves
// the queue, and a priority has bounds of its own.
func TestWhatDoesNotFitInTheQueue(t *testing.T) {
	b := newBench(t, `flow: {max_requests: 3, max_bytes: 1KiB, timeout: 1m, hold_tokens: 20, bands: [{priority: -1, models: [alias], max_requests: 1}]}
tenants: {header: x-team}
`, worker("a", 0))
	running, _ := b.ask("/v1/completions", text("sea", 100))
	batch := b.sendBody(1, strings.Replace(text("batch", 10), "demo", "alias", 1))
	_ = batch
	first := b.sendBody(2, text("one", 10), "x-team", "a")
	second := b.sendBody(3, text("two", 10), "x-team", "a")
	for name, c := range map[string]struct{ body, want string }{
		"full":      {text("three", 10), "429 kvlane_queue_full 1"},
		"too large": {text("three", 1000), "429 kvlane_queue_full 1"},
	} {
		if d, e := b.ask("/v1/completions", c.body, "x-team", "a"); refusal(d) != c.want || e.Refusal == "" {
			t.Errorf("%s: got %s (%s), want %s", name, refusal(d), e.Refusal, c.want)
		}
	}
	other := b.sendBody(0, text("other", 10), "x-team", "b")
	if got := refusal(<-second.done); got != "429 kvlane_queue_shed 1" {
		t.Errorf("the youngest of the tenant with the most: got %s", got)
	}
	b.untilWaiting(3)
	first.stop()
	if got := refusal(<-first.done); got != "499 kvlane_client_gone 0" {
		t.Errorf("a client that left: got %s", got)
	}
	b.untilWaiting(2)
	running.Ticket.End(time.Now())
	for _, a := range []*asked{other, batch} {
		d := <-a.done
		if d.Reject != nil {
			t.Fatalf("got %s, want a place", refusal(d))
		}
		d.Ticket.End(time.Now())
	}
	b.idle()
}

func TestTheQueueHasADeadline(t *testing.T) {
	b := newBench(t, "flow: {max_requests: 3, timeout: 20ms, hold_tokens: 20}\n", worker("a", 0))
	running, _ := b.ask("/v1/completions", text("sea", 100))
	if d, _ := b.ask("/v1/completions", text("one", 10)); refusal(d) != "429 kvlane_queue_timeout 1" {
		t.Errorf("got %s", refusal(d))
	}
	running.Ticket.End(time.Now())
	b.idle()
}

// Retry-After of one whose time is up counts it: it would wait again for as long.
func TestTheLastOneInTheQueueIsLate(t *testing.T) {
	b := newBench(t, "flow: {max_requests: 3, timeout: 1s, hold_tokens: 0}\nrouting: {policy: {limits: {max_active: 1}}}\n", worker("a", 0))
	var later atomic.Int64
	start := b.start
	b.now = func() time.Time { return start.Add(time.Duration(later.Load())) }
	running, _ := b.ask("/v1/completions", text("sea", 10))
	waits := b.sendBody(1, text("one", 10))
	later.Store(int64(30 * time.Second))
	if d := <-waits.done; refusal(d) != "429 kvlane_queue_timeout 1" || d.Reject.Headers[0].Value != "30" {
		t.Errorf("got %s, %+v, want a Retry-After of the 30 s in which none got a place", refusal(d), d.Reject)
	}
	running.Ticket.End(b.now())
	b.idle()
}

// A held request whose time ends after flow was switched off gets the answer of routing.wait.
func TestTheDeadlineAfterFlowIsSwitchedOff(t *testing.T) {
	b := newBench(t, "flow: {max_requests: 3, timeout: 1s, hold_tokens: 20}\n", worker("a", 0))
	running, _ := b.ask("/v1/completions", text("sea", 100))
	waits := b.sendBody(1, text("one", 10))
	next := *b.live.Load()
	next.Flow.Requests, next.Routing.Wait.Requests = 0, 3
	b.live.Store(&next)
	if got := refusal(<-waits.done); got != "429 kvlane_capacity_exhausted 1" {
		t.Errorf("got %s", got)
	}
	running.Ticket.End(time.Now())
	b.idle()
}

// A request whose model has no worker any more waits for one where the configuration allows it, both before and while it
// waits for capacity. Workers of other models would answer 404.
func TestAModelWithoutWorkersWaitsForItsOwn(t *testing.T) {
	for _, zero := range []string{"", ", zero_workers: 1m"} {
		other := listing(t, "b", `{"data":[{"id":"other"}]}`, "other")
		b := flowBench(t, zero, "")
		b.Fleet().SetWorkers([]workers.Worker{worker("a", 0), other})
		running, _ := b.ask("/v1/completions", text("one", 100))
		waits := b.sendBody(1, text("two", 100))
		b.Fleet().SetWorkers([]workers.Worker{other})
		if zero == "" {
			if d := <-waits.done; refusal(d) != "503 kvlane_no_eligible_worker 0" {
				t.Errorf("without zero_workers: got %s, endpoint %q", refusal(d), d.Endpoint)
			}
			running.Ticket.End(time.Now())
			b.idle()
			continue
		}
		late := b.sendBody(2, text("three", 100))
		if d, _ := b.ask("/v1/completions", strings.Replace(text("four", 9), "demo", "other", 1)); d.Endpoint != other.Address {
			t.Errorf("a request for the other model: got %+v, want %s", d, other.Address)
		} else {
			d.Ticket.End(time.Now())
		}
		running.Ticket.End(time.Now())
		b.untilWaiting(2)
		b.Fleet().SetWorkers([]workers.Worker{other, worker("c", 0)})
		for range 2 {
			var d extproc.Decision
			select {
			case d = <-waits.done:
			case d = <-late.done:
			}
			if d.Endpoint != "10.0.0.99:8000" {
				t.Fatalf("got %+v, want the model's new worker", d)
			}
			d.Ticket.FirstToken(time.Now())
			d.Ticket.End(time.Now())
		}
		b.idle()
	}
}

// Requests wait for a pool that starts from nothing where the configuration allows it.
func TestWaitingForTheFirstWorker(t *testing.T) {
	b := flowBench(t, ", zero_workers: 1m", "")
	b.Fleet().SetWorkers(nil)
	first, second := b.sendBody(1, text("one", 100)), b.sendBody(2, text("two", 100))
	b.Fleet().SetWorkers([]workers.Worker{worker("b", 0)})
	// A new worker is not flooded: it gets a step, the rest waits.
	var d extproc.Decision
	select {
	case d = <-first.done:
	case d = <-second.done:
	}
	b.untilWaiting(1)
	if d.Reject != nil || d.Endpoint != "10.0.0.98:8000" {
		t.Errorf("got %+v", d)
	}
	d.Ticket.End(time.Now())
	select {
	case d = <-first.done:
	case d = <-second.done:
	}
	d.Ticket.End(time.Now())
	b.idle()

	b = flowBench(t, "", "")
	b.Fleet().SetWorkers(nil)
	if d, _ := b.ask("/v1/completions", text("one", 100)); refusal(d) != "503 kvlane_no_eligible_worker 0" {
		t.Errorf("without zero_workers: got %s", refusal(d))
	}
}

// When the process ends all waiting requests are answered.
func TestDrainAnswersTheQueue(t *testing.T) {
	b := flowBench(t, "", "")
	running, _ := b.ask("/v1/completions", text("sea", 100))
	waits := b.sendBody(1, text("one", 10))
	b.Drain()
	if got := refusal(<-waits.done); got != "429 kvlane_draining 1" {
		t.Errorf("got %s", got)
	}
	if d, _ := b.ask("/v1/completions", text("two", 10)); refusal(d) != "429 kvlane_draining 1" {
		t.Errorf("a later one: got %s", refusal(d))
	}
	running.Ticket.End(time.Now())
	b.idle()
}

// A held request is placed elsewhere once it has waited for what that costs, without any event.
func TestAHeldRequestLooksElsewhere(t *testing.T) {
	b := newBench(t, "routing: {trust_overrides: true, prefill_rate: 1000}\nflow: {max_requests: 8, timeout: 1m, hold_tokens: 20}\n", worker("a", 0), worker("b", 0))
	first, _ := b.ask("/v1/completions", text("sea", 400), "x-kvlane-pin", "a")
	held := b.sendBody(1, text("sea", 400))
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); b.KeepAwake(ctx) }()
	d := <-held.done
	if d.Reject != nil || d.Endpoint != "10.0.0.98:8000" {
		t.Errorf("got %+v, want b", d)
	}
	stop()
	<-done
	first.Ticket.End(time.Now())
	d.Ticket.End(time.Now())
	b.idle()
}

// A waiter that stays for its cache does not keep those behind it from a target that becomes idle.
func TestAHeldRequestBlocksNoOther(t *testing.T) {
	b := newBench(t, "routing: {trust_overrides: true, prefill_rate: 1000}\nflow: {max_requests: 8, timeout: 1m, hold_tokens: 20, order: arrival}\n",
		worker("a", 0), worker("b", 0))
	warm, _ := b.ask("/v1/completions", text("sea", 4000), "x-kvlane-pin", "a")
	warm.Ticket.End(time.Now())
	onA, _ := b.ask("/v1/completions", text("one", 100), "x-kvlane-pin", "a")
	onB, _ := b.ask("/v1/completions", text("two", 2000), "x-kvlane-pin", "b")
	stays := b.sendBody(1, text("sea", 4000))
	goes := b.sendBody(2, text("new", 100))
	b.mu.Lock()
	for id, q := range b.waiting.byID {
		if held, ok := errors.AsType[*routing.HeldError](q.err); !ok || (held.Slot == routing.NoSlot) != (id == 2) {
			t.Errorf("request %d: got %v, want the first one held for a, and the other one for any target", id, q.err)
		}
	}
	b.mu.Unlock()
	onB.Ticket.End(time.Now())
	b.untilWaiting(1)
	d := <-goes.done
	if d.Reject != nil || d.Endpoint != "10.0.0.98:8000" {
		t.Errorf("got %+v, want b", d)
	}
	d.Ticket.End(time.Now())
	b.untilWaiting(1)
	onA.Ticket.End(time.Now())
	if d = <-stays.done; d.Reject != nil || d.Endpoint == "10.0.0.98:8000" {
		t.Errorf("got %+v, want a", d)
	}
	d.Ticket.End(time.Now())
	b.idle()
}

// The metrics name the waiting requests of each model and priority.
func TestMetricsOfFlow(t *testing.T) {
	b := flowBench(t, ", bands: [{priority: 2, models: [demo]}]", "")
	value := func(name string) (v float64, labels string) {
		families, err := b.metrics.Registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			if f.GetName() == name {
				for _, l := range f.GetMetric()[0].GetLabel() {
					labels += l.GetName() + "=" + l.GetValue() + " "
				}
				return f.GetMetric()[0].GetGauge().GetValue(), labels
			}
		}
		t.Fatalf("got no %s", name)
		return 0, ""
	}
	for _, name := range []string{"kvlane_flow_waiting_requests", "kvlane_flow_waiting_tokens", "kvlane_flow_saturation", "kvlane_flow_drain_seconds"} {
		if v, labels := value(name); v != 0 || !strings.HasPrefix(labels, "model=demo ") {
			t.Errorf("%s: got %v of %s, want 0 of model demo", name, v, labels)
		}
	}
	running, _ := b.ask("/v1/completions", text("sea", 100))
	waits := b.sendBody(1, text("one", 100))
	if v, labels := value("kvlane_flow_waiting_requests"); v != 1 || labels != "model=demo priority=2 " {
		t.Errorf("got %v waiting of %s, want 1 of priority 2", v, labels)
	}
	tokens, _ := value("kvlane_flow_waiting_tokens")
	drain, _ := value("kvlane_flow_drain_seconds")
	if full, _ := value("kvlane_flow_saturation"); full != 1 || tokens < 100 || drain < 0.02 {
		t.Errorf("got %v tokens waiting, saturation %v and %v s to drain, want 100 or more, 1, and 200 tokens at 10,000 a second", tokens, full, drain)
	}
	running.Ticket.End(time.Now())
	(<-waits.done).Ticket.End(time.Now())
	b.idle()
}

// waitingMemory is what each of n waiting requests adds to its body: heap, with its goroutine's stack. The prompts
// differ in their last word only, as what the tokenizer remembers has a bound of its own.
func waitingMemory(t *testing.T, n, words int) (each int64) {
	t.Helper()
	return memoryOf(t, n, "/v1/completions", strings.Replace(text("sea", words), ` "}`, ` %d"}`, 1))
}

// memoryOf is the memory that each of n waiting requests takes besides its body, which has a %d.
func memoryOf(t *testing.T, n int, path, format string) (each int64) {
	t.Helper()
	b := newBench(t, fmt.Sprintf("flow: {max_requests: %d, timeout: 4m, hold_tokens: 20}\n", n), worker("a", 0))
	running, _ := b.ask("/v1/completions", text("sea", 500))
	requests := make([]*extproc.Request, n)
	for i := range requests {
		requests[i] = b.request(path, fmt.Sprintf(format, i))
	}
	ctx, stop := context.WithCancel(t.Context())
	var before int64
	done := make(chan struct{}, n)
	for i, r := range requests {
		go func() { b.Decide(ctx, r); done <- struct{}{} }()
		if i%64 == 63 || i == n-1 || i == n/2-1 {
			b.untilWaiting(i + 1)
		}
		if i == n/2-1 {
			before = memory() // what the first requests need once is in it
		}
	}
	each = (memory() - before) / int64(n-n/2)
	stop()
	for range n {
		<-done
	}
	running.Ticket.End(time.Now())
	b.idle()
	return each
}

func memory() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}

// The memory of a waiting request without its stream is bounded, because its goroutine does not wait deep in a call stack.
func TestMemoryOfWaiting(t *testing.T) {
	const limit = 16 << 10 // 13 KB under the race detector
	got := waitingMemory(t, 1000, 500)
	if t.Logf("%d bytes a request of 500 words", got); got > limit {
		t.Errorf("got %d bytes for a waiting request, want at most %d", got, limit)
	}
	// A token more takes 1 byte, of hashes. Its id alone would take 4.
	const words = 8000
	each := (waitingMemory(t, 200, words) - got) / (words - 500)
	if t.Logf("%d bytes a further token", each); each > 3 {
		t.Errorf("got %d bytes for each token of a waiting request, want at most 3", each)
	}
	// Bodies of 200 KB of small elements, whose places take 16 bytes each.
	const elements = 1 << 16
	for name, body := range map[string]string{
		`"prompt":["",`: `"",`, `"prompt":[[],`: `[],`, `"messages":[{},`: `{},`,
	} {
		path := "/v1/completions"
		if strings.Contains(name, "messages") {
			path = "/v1/chat/completions"
		}
		got := memoryOf(t, 16, path, `{"model":"demo",`+name+strings.Repeat(body, elements)+body[:1]+body[1:2]+`],"user":"%d"}`)
		if t.Logf("%s: %d bytes a request", name, got); got > 2*limit {
			t.Errorf("%s: got %d bytes for a waiting request, want at most %d", name, got, 2*limit)
		}
	}
}

// A client that finds the queue full is told the time in which what waits is computed.
func TestRetryAfterOfAFullQueue(t *testing.T) {
	b := newBench(t, "flow: {max_requests: 1, timeout: 1m, hold_tokens: 20}\nrouting: {prefill_rate: 50}\n", worker("a", 0))
	running, _ := b.ask("/v1/completions", text("sea", 100)) // 2 s and a bit
	waiting := b.sendBody(1, text("one", 500))               // 10 s more
	d, _ := b.ask("/v1/completions", text("two", 10))
	if refusal(d) != "429 kvlane_queue_full 1" || d.Reject.Headers[0].Value != "13" {
		t.Errorf("got %s, %v, want a full queue and 13 s", refusal(d), d.Reject)
	}
	waiting.stop()
	<-waiting.done
	running.Ticket.End(time.Now())
}

// Where answers are long, the queue drains at the pace of places, not of tokens. A client that is refused gets that
// time, up to a minute. At the end of the process another one serves.
func TestRetryAfterFollowsThePaceOfPlaces(t *testing.T) {
	for _, c := range []struct {
		answer, stall time.Duration
		want          string
	}{{10 * time.Second, 0, "30"}, {100 * time.Millisecond, 0, "1"}, {10 * time.Second, 20 * time.Second, "60"}, {100 * time.Millisecond, time.Minute, "60"}} {
		b := newBench(t, "flow: {max_requests: 3, timeout: 4m, hold_tokens: 0}\nrouting: {policy: {limits: {max_active: 1}}}\n", worker("a", 0))
		var clock atomic.Int64
		start := b.start
		b.now = func() time.Time { return start.Add(time.Duration(clock.Load())) }
		running, _ := b.ask("/v1/completions", text("sea", 10))
		waiting := []*asked{b.sendBody(1, text("0", 10)), b.sendBody(2, text("1", 10)), b.sendBody(3, text("2", 10))}
		for i := range 2 {
			clock.Add(int64(c.answer))
			running.Ticket.End(b.now())
			running = <-waiting[i].done
			waiting = append(waiting, b.sendBody(3, text(fmt.Sprint(i+3), 10)))
		}
		clock.Add(int64(c.stall))
		d, _ := b.ask("/v1/completions", text("more", 10))
		if refusal(d) != "429 kvlane_queue_full 1" || d.Reject.Headers[0].Value != c.want {
			t.Errorf("answers of %s, then none for %s: got %s, %+v, want a full queue and %s s", c.answer, c.stall, refusal(d), d.Reject, c.want)
		}
		b.Drain()
		if d := <-waiting[2].done; refusal(d) != "429 kvlane_draining 1" || d.Reject.Headers[0].Value != "1" {
			t.Errorf("at the end: got %s, %+v, want 1 s", refusal(d), d.Reject)
		}
		running.Ticket.End(b.now())
	}
}

// A new conversation waits while those that have begun use the memory, and goes when one ends.
func TestANewConversationWaitsForTheMemory(t *testing.T) {
	b := flowBench(t, ", kv_tokens: 30", "")
	turn := func(headers ...string) {
		t.Helper()
		d, _ := b.ask("/v1/completions", text("sea", 10), headers...)
		if d.Reject != nil {
			t.Fatalf("%v: got %+v, want a place", headers, d.Reject)
		}
		d.Ticket.End(time.Now())
	}
	turn("x-session-id", "1")
	waits := b.sendBody(1, text("sea", 10), "x-session-id", "2")
	turn("x-session-id", "1")
	turn() // not a conversation
	if b.untilWaiting(1); len(waits.done) != 0 {
		t.Errorf("got an answer, want the new conversation to wait")
	}
	turn("x-session-id", "1", "x-dynamo-session-final", "true")
	d := <-waits.done
	if d.Reject != nil {
		t.Errorf("got %+v, want a place after the end of the other", d.Reject)
	}
	d.Ticket.End(time.Now())
	b.idle()
}

// The ids that a waiting request keeps count in the queue's bytes, 4 each. Those that are made anew, or not handed on, do not.
func TestIDsOfWaitingRequestsCount(t *testing.T) {
	for _, c := range []struct {
		hand  *bool
		bytes int
		want  string // for a second request
	}{{nil, 1000, ""}, {new(false), 1000, ""}, {new(true), 1000, "429 kvlane_queue_full 1"}, {new(true), 2000, ""}} {
		b := flowBench(t, fmt.Sprintf(", max_bytes: %dB", c.bytes), "")
		b.Fleet().Model("demo").Config.HandIDs = c.hand
		running, _ := b.ask("/v1/completions", text("sea", 100))
		body := text("one", 90) // 400 bytes, and as many of ids
		first := b.sendBody(1, body)
		second := b.sendBody(0, body)
		if c.want == "" {
			b.untilWaiting(2)
		} else if got := refusal(<-second.done); got != c.want {
			t.Errorf("ids handed on %v, %d bytes: got %s for the second request of %d bytes, want %s", c.hand, c.bytes, got, len(body), c.want)
		}
		running.Ticket.End(time.Now())
		for _, a := range []*asked{first, second}[:2-min(len(c.want), 1)] {
			d := <-a.done
			if d.Reject != nil {
				t.Fatalf("got %s, want a place", refusal(d))
			}
			d.Ticket.End(time.Now())
		}
		b.idle()
	}
}

// Ids that the engine gets are those of the prompt after a wait, too.
func TestIDsAreHandedOnAfterAWait(t *testing.T) {
	for _, hand := range []bool{false, true} {
		b := flowBench(t, "", "")
		b.Fleet().Model("demo").Config.HandIDs = &hand
		running, _ := b.ask("/v1/completions", text("sea", 3000)) // its memory is used again
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan extproc.Decision, 1)
		r := b.request("/v1/chat/completions", `{"model":"demo","messages":[{"role":"user","content":"`+strings.Repeat("one ", 100)+`"}]}`)
		go func() { done <- b.Decide(ctx, r) }()
		b.untilWaiting(1)
		b.mu.Lock()
		for _, q := range b.waiting.byID {
			ids := q.work.tokens.ids
			if kept := ids != nil; kept != hand || q.work.tokens.n < 100 || cap(ids) > 2*len(ids) {
				t.Errorf("hand_ids %v: got ids kept %v of %d while it waits, in memory for %d, want %v of 100 at least", hand, kept, q.work.tokens.n, cap(ids), hand)
			}
		}
		b.mu.Unlock()
		running.Ticket.FirstToken(time.Now())
		d := <-done
		if handed := strings.Contains(string(d.Body), `"prompt_token_ids":[151644,872,`); d.Reject != nil || handed != hand {
			t.Errorf("hand_ids %v: got %+v with body %.60s, want ids %v", hand, d.Reject, d.Body, hand)
		}
		stop()
		d.Ticket.End(time.Now())
		running.Ticket.End(time.Now())
		b.idle()
	}
}

// One tenant does not hold all places with long answers while another one was seen; alone it does.
func TestNoTenantHoldsAllPlaces(t *testing.T) {
	for _, c := range []struct {
		name, more string
		seen       bool
		evil       int // of ten requests, those that are placed
		good       string
	}{
		{"others seen", "", true, 3, "placed"},
		{"alone", "", false, 4, "499 kvlane_client_gone 0"},
		{"switched off", ", tenant_share: 1", true, 4, "499 kvlane_client_gone 0"},
		{"another share", ", tenant_share: 0.5", true, 2, "placed"},
		{"a weight", ", weights: {evil: 0.1}", true, 1, "placed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t, "flow: {max_requests: 100, timeout: 1m, hold_tokens: 0"+c.more+"}\n"+
				"tenants: {header: x-team}\nrouting: {policy: {limits: {max_active: 2}}}\n", worker("a", 0), worker("b", 0))
			if c.seen {
				d, _ := b.ask("/v1/completions", text("sea", 10), "x-team", "good")
				d.Ticket.End(time.Now())
			}
			var evil []*asked
			for i := range 10 {
				evil = append(evil, b.sendBody(max(i+1-c.evil, 0), text(fmt.Sprint(i), 10), "x-team", "evil"))
				for want := min(i+1, c.evil); b.placed() != want; runtime.Gosched() {
				}
			}
			good := b.sendBody(0, text("sea", 10), "x-team", "good")
			if c.evil == 4 {
				b.untilWaiting(10 - 4 + 1)
				good.stop()
			}
			d := <-good.done
			if refusal(d) != c.good {
				t.Errorf("the other tenant: got %s, want %s", refusal(d), c.good)
			}
			if d.Reject == nil {
				d.Ticket.End(time.Now())
			}
			if got := b.placed(); got != c.evil {
				t.Errorf("got %d requests of the first tenant placed at the end, want %d", got, c.evil)
			}
			// All are served, by turns.
			var all sync.WaitGroup
			for _, a := range evil {
				all.Go(func() {
					d := <-a.done
					if d.Reject != nil {
						t.Errorf("got %s, want a place", refusal(d))
						return
					}
					d.Ticket.End(time.Now())
				})
			}
			all.Wait()
			b.idle()
		})
	}
}

// placed is the number of requests that are placed.
func (b *bench) placed() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.router.Live()
}

// The answers that one request asks for count each, for the share of places and for what its tenant was served.
func TestARequestForManyAnswersCountsThem(t *testing.T) {
	b := newBench(t, "flow: {max_requests: 100, timeout: 20ms, hold_tokens: 0}\ntenants: {header: x-team}\nrouting: {policy: {limits: {max_active: 4}}}\n", worker("a", 0))
	good, _ := b.ask("/v1/completions", text("sea", 10), "x-team", "good")
	many, _ := b.ask("/v1/completions", strings.Replace(text("sea", 10), "{", `{"n":3,`, 1), "x-team", "evil")
	if refusal(good) != "placed" || refusal(many) != "placed" {
		t.Fatalf("got %s, %s, want both placed", refusal(good), refusal(many))
	}
	if d, _ := b.ask("/v1/completions", text("one", 10), "x-team", "evil"); refusal(d) != "429 kvlane_queue_timeout 1" {
		t.Errorf("got %s, want it to wait: the tenant has 3 of 4 places", refusal(d))
	}
	many.Ticket.End(time.Now())
	d, _ := b.ask("/v1/completions", text("one", 10), "x-team", "evil")
	if refusal(d) != "placed" {
		t.Errorf("got %s, want a place", refusal(d))
	}
	d.Ticket.End(time.Now())
	good.Ticket.End(time.Now())
	b.idle()
}

// What the engine ignores takes no places of others: only TensorRT-LLM reads best_of.
func TestWhatTheEngineIgnoresTakesNoPlaces(t *testing.T) {
	b := newBench(t, "routing: {policy: {limits: {max_active: 64}}}\n", worker("a", 0))
	for member, want := range map[string]string{`"n":64`: "429", `"best_of":64`: "placed", `"sampling_params":{"n":64}`: "placed", `"n":1`: "placed"} {
		first, _ := b.ask("/v1/completions", `{"model":"demo","prompt":"sea",`+member+`}`)
		if first.Reject != nil {
			t.Fatalf("%s: got %s, want a place", member, refusal(first))
		}
		second, _ := b.ask("/v1/completions", `{"model":"demo","prompt":"sea"}`)
		if got := refusal(second); !strings.HasPrefix(got, want) {
			t.Errorf("another one after %s: got %s, want %s", member, got, want)
		}
		first.Ticket.End(time.Now())
		if second.Ticket != nil {
			second.Ticket.End(time.Now())
		}
	}
	b.fleet.Model("demo").Engine = shape.TRTLLM
	first, _ := b.ask("/v1/completions", `{"model":"demo","prompt":"sea","best_of":64}`)
	if second, _ := b.ask("/v1/completions", `{"model":"demo","prompt":"sea"}`); second.Reject == nil {
		t.Error("TensorRT-LLM computes 64 answers: got a place for another request")
	}
	first.Ticket.End(time.Now())
	b.idle()
}
