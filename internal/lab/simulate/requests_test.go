package simulate

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/decide"
	"github.com/kvlane/kvlane/internal/fleet"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/tokens/models"
	"github.com/kvlane/kvlane/internal/tokens/shape"
	"github.com/kvlane/kvlane/internal/workers"
)

// office is a Decider with its clients. It runs in a bubble: its clock is not the machine's, and every operation ends
// when all goroutines sleep.
type office struct {
	rng     *rand.Rand
	trace   *strings.Builder
	reached map[string]int
	began   time.Time

	d        *decide.Decider
	registry *prometheus.Registry
	most     int // requests of a target
	room     int // of the queue
	patience time.Duration
	list     []workers.Worker
	arrived  int
	waiting  []*client // in the order in which they should be served
	served   []*client
	moved    bool // a retry may exceed the limits
}

// client is a request at the Decider.
type client struct {
	id       string
	priority int
	pinned   bool
	deadline time.Time
	stop     context.CancelFunc
	gone     bool
	done     chan extproc.Decision
	ticket   extproc.Ticket
	phase    int
}

func (o *office) reach(what string) { o.reached[what]++ }

func (o *office) sayf(format string, args ...any) {
	if o.trace != nil {
		fmt.Fprintf(o.trace, "  %8.3fs  "+format+"\n", append([]any{time.Since(o.began).Seconds()}, args...)...)
	}
}

// officeKinds is what can happen at a Decider.
var officeKinds = []kind[*office]{
	{"request", 30, (*office).arrive},
	{"progress", 40, (*office).progress},
	{"client leaves", 3, func(o *office) {
		if len(o.served) > 0 {
			o.end(o.served[o.rng.IntN(len(o.served))])
		}
	}},
	{"waiter leaves", 5, (*office).leave},
	{"time", 10, func(o *office) { time.Sleep(time.Duration(1+o.rng.IntN(3000)) * time.Millisecond) }},
	{"workers change", 4, (*office).change},
}

// tokenizer is loaded once.
var tokenizer = sync.OnceValues(func() (*shape.Model, error) {
	files, err := models.Open("builtin:qwen3")
	if err != nil {
		return nil, err
	}
	return shape.Load(files, shape.Options{Names: []string{"demo"}})
})

func openOffice(seed uint64, trace *strings.Builder, reached map[string]int) *office {
	rng := rngOf(seed, 2)
	o := &office{
		rng: rng, trace: trace, reached: reached, began: time.Now(), registry: prometheus.NewRegistry(),
		most: 1 + rng.IntN(3), room: rng.IntN(6), patience: time.Duration(1+rng.IntN(20)) * time.Second,
	}
	text := fmt.Sprintf("models: [{name: demo, tokenizer: \"builtin:qwen3\", check: {disabled: true}}]\nindex: {key: test}\nlimits: {decision_timeout: 0s}\n"+
		"routing: {trust_overrides: true, wait: {max_requests: %d, timeout: %s}, policy: {limits: {max_active: %d}}}\n", o.room, o.patience, o.most)
	c, err := config.Parse("simulated.yaml", []byte(text))
	if err != nil {
		panic(err)
	}
	tokens, err := tokenizer()
	if err != nil {
		panic(err)
	}
	metrics := observe.New("simulated")
	metrics.Registry = o.registry // only what is read from the Decider's state
	o.d, err = decide.New(decide.Options{Config: c, Models: []*fleet.Model{{Config: c.Models[0], Tokens: tokens}}, Metrics: metrics, Log: zerolog.Nop()})
	if err != nil {
		panic(err)
	}
	for i := range 1 + rng.IntN(3) {
		o.list = append(o.list, workers.Worker{Ready: true, Generation: 1, Worker: config.Worker{
			Name: fmt.Sprint("w", i), Address: fmt.Sprintf("127.0.0.%d:1", i+1), Engine: "vllm", Role: "both", Ranks: rng.IntN(3), RankBy: "header", Speed: 1, Models: []string{"demo"},
		}})
	}
	o.sayf("scenario: %d workers, limit %d requests, queue %d for %s", len(o.list), o.most, o.room, o.patience)
	o.d.Fleet().SetWorkers(slices.Clone(o.list))
	return o
}

func (o *office) arrive() {
	o.arrived++
	c := &client{id: "q" + strconv.Itoa(o.arrived), done: make(chan extproc.Decision, 1), deadline: time.Now().Add(o.patience)}
	body := `{"model":"demo","prompt":"` + strings.Repeat("sea ", 1+o.rng.IntN(60)) + `"}`
	r := &extproc.Request{ID: c.id, Method: "POST", Path: "/v1/completions", Body: []byte(body), Received: time.Now()}
	if o.rng.IntN(3) == 0 {
		c.priority = o.rng.IntN(4) - 2
		r.Headers = append(r.Headers, extproc.Header{Name: "x-kvlane-priority", Value: strconv.Itoa(c.priority)})
	}
	if o.rng.IntN(6) == 0 {
		c.pinned = true
		r.Headers = append(r.Headers, extproc.Header{Name: "x-kvlane-pin", Value: fmt.Sprint("w", o.rng.IntN(3))})
	}
	ctx, stop := context.WithCancel(context.Background())
	c.stop = stop
	o.waiting = append(o.waiting, c)
	slices.SortStableFunc(o.waiting, func(a, b *client) int { return b.priority - a.priority })
	go func() { c.done <- extproc.Await(ctx, o.d.Decide(ctx, r)) }()
	o.settle()
	o.sayf("%s, priority %d, pinned %v", c.id, c.priority, c.pinned)
	if slices.Contains(o.waiting, c) {
		o.reach("waits")
	}
}

// settle lets all goroutines run until they sleep, and takes what was decided.
func (o *office) settle() {
	synctest.Wait()
	for i := 0; i < len(o.waiting); {
		c := o.waiting[i]
		select {
		case d := <-c.done:
			waited := time.Now().After(c.deadline.Add(-o.patience))
			o.waiting = slices.Delete(o.waiting, i, i+1)
			o.decided(c, d, i, waited)
		default:
			i++
		}
	}
	if len(o.waiting) > o.room {
		failf("the queue is bounded", "%d requests wait, want at most %d", len(o.waiting), o.room)
	}
}

func (o *office) decided(c *client, d extproc.Decision, at int, waited bool) {
	c.stop()
	if d.Reject == nil {
		for _, ahead := range o.waiting[:at] {
			if !ahead.pinned {
				failf("no waiter is overtaken", "%s was placed, %s waits before it", c.id, ahead.id)
			}
		}
		if waited {
			o.reach("placed after a wait")
		}
		c.ticket = d.Ticket
		o.served = append(o.served, c)
		return
	}
	o.sayf("%s is answered %d", c.id, d.Reject.Status)
	// A full queue drops it for one of greater priority, which waits.
	dropped := len(o.waiting) > 0 && o.waiting[0].priority > c.priority
	switch status := d.Reject.Status; {
	case status == 499 && c.gone, status == 503:
	case status == 429 && !time.Now().Before(c.deadline):
		o.reach("timed out")
	case status == 429 && waited && dropped:
		o.reach("shed")
	case status == 429 && !waited && len(o.waiting) >= o.room:
		o.reach("queue full")
	case status == 429 && dropped: // by what came at the same moment
	default:
		failf("no waiter is lost", "%s is answered %d after %s of %s, %d wait", c.id, status, time.Since(c.deadline.Add(-o.patience)), o.patience, len(o.waiting))
	}
}

// progress takes a request to its next phase: headers, first token, end.
func (o *office) progress() {
	if len(o.served) == 0 {
		return
	}
	c := o.served[o.rng.IntN(len(o.served))]
	c.phase++
	switch c.phase {
	case 1:
		status, by := []int{200, 200, 200, 200, 400, 429, 500, 503}[o.rng.IntN(8)], ""
		if o.rng.IntN(8) == 0 {
			by, o.moved = fmt.Sprintf("127.0.0.%d:1", 1+o.rng.IntN(3)), true
			o.reach("served elsewhere")
		}
		o.sayf("%s gets %d by %q", c.id, status, by)
		c.ticket.ResponseHeaders(status, by)
	case 2:
		o.sayf("%s gets its first token", c.id)
		c.ticket.FirstToken(time.Now())
	default:
		o.end(c)
	}
}

func (o *office) end(c *client) {
	o.sayf("%s ends", c.id)
	o.served = slices.DeleteFunc(o.served, func(other *client) bool { return other == c })
	c.ticket.End(time.Now())
}

func (o *office) leave() {
	if len(o.waiting) > 0 {
		c := o.waiting[o.rng.IntN(len(o.waiting))]
		o.sayf("%s leaves the queue", c.id)
		o.reach("left the queue")
		c.gone = true
		c.stop()
		if len(o.served) > 0 && o.rng.IntN(3) == 0 { // there is room at the very moment
			o.end(o.served[0])
		}
	}
}

// change is a worker that fails its health check, drains, comes back or is replaced.
func (o *office) change() {
	w := &o.list[o.rng.IntN(len(o.list))]
	switch o.rng.IntN(4) {
	case 0:
		w.Ready = !w.Ready
	case 1:
		w.Draining = !w.Draining
	case 2:
		w.Generation++
	default:
		w.Ready, w.Draining = true, false
	}
	o.sayf("%s: ready %v, draining %v, generation %d", w.Name, w.Ready, w.Draining, w.Generation)
	o.d.Fleet().SetWorkers(slices.Clone(o.list))
}

// check compares what the Decider says of its state with the clients.
func (o *office) check() {
	families, err := o.registry.Gather()
	if err != nil {
		failf("the state can be read", "%v", err)
	}
	for _, f := range families {
		sum := 0.0
		for _, m := range f.GetMetric() {
			value := m.GetGauge().GetValue() + m.GetCounter().GetValue()
			sum += value
			if len(m.GetLabel()) > 1 && f.GetName() == "kvlane_active_requests" {
				o.checkTarget(m.GetLabel()[1].GetValue(), int(value))
			}
			if value != 0 && len(o.served) == 0 && slices.Contains([]string{"kvlane_active_requests", "kvlane_queued_tokens", "kvlane_resident_tokens"}, f.GetName()) {
				failf("2: all loads end at zero", "%s is %v", f.GetName(), value)
			}
		}
		want := map[string]int{"kvlane_reservations": len(o.served), "kvlane_waiting_requests": len(o.waiting), "kvlane_double_releases_total": 0}
		if n, ok := want[f.GetName()]; ok && int(sum) != n {
			failf("2: every request is booked once", "%s is %v, want %d", f.GetName(), sum, n)
		}
	}
}

// checkTarget: no target has more requests than it may, and none has capacity for a request that waits.
func (o *office) checkTarget(worker string, active int) {
	if active > o.most && !o.moved {
		failf("limits hold", "%s has %d requests, want at most %d", worker, active, o.most)
	}
	i := slices.IndexFunc(o.list, func(w workers.Worker) bool { return w.Name == worker })
	if active >= o.most || !o.list[i].Ready || o.list[i].Draining {
		return
	}
	for _, c := range o.waiting {
		if !c.pinned && c.priority >= 0 {
			failf("no waiter is lost", "%s waits although %s has %d of %d requests", c.id, worker, active, o.most)
		}
	}
}

// runRequests plays a history at a new Decider.
func runRequests(t *testing.T) play {
	return func(h history, trace *strings.Builder, reached map[string]int) (bad *failure) {
		synctest.Test(t, func(*testing.T) {
			step := 0
			o := openOffice(h.seed, trace, reached)
			bad = guard(func() {
				for i, op := range h.operations {
					step = i
					o.rng = rngOf(op.seed, 3)
					time.Sleep(time.Millisecond)
					at := slices.IndexFunc(officeKinds, func(k kind[*office]) bool { return k.name == op.kind })
					officeKinds[at].run(o)
					o.settle()
					o.check()
				}
				step = len(h.operations)
				o.sayf("the end: all workers are well, all requests end")
				for i := range o.list {
					o.list[i].Ready, o.list[i].Draining = true, false
				}
				o.d.Fleet().SetWorkers(slices.Clone(o.list))
				for o.settle(); len(o.served) > 0; o.settle() {
					o.end(o.served[0])
				}
				time.Sleep(o.patience + time.Second) // pins to workers that do not exist
				o.settle()
				if len(o.waiting) > 0 {
					failf("no waiter is lost", "%d requests wait for ever", len(o.waiting))
				}
				o.check()
			})
			for _, c := range o.waiting {
				c.stop()
			}
			o.d.Close()
			if bad != nil {
				bad.step = step
			}
		})
		return bad
	}
}

// TestRequests is the simulation of decisions, their tickets and the wait queue, with goroutines and timers. A seed costs
// four times as much as one of TestCore: it runs a quarter of them.
func TestRequests(t *testing.T) {
	if _, err := tokenizer(); err != nil {
		t.Fatal(err)
	}
	seeds := number("SEEDS", 2000) / 4
	if raceDetector {
		seeds = 20
	}
	simulate(t, seeds, func(seed uint64) history { return draw(seed, 80, officeKinds) }, runRequests(t),
		[]string{"waits", "placed after a wait", "timed out", "shed", "queue full", "served elsewhere", "left the queue"})
}
