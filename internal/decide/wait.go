package decide

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/tokens/conv"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

// waiting holds the requests for which no target has capacity. The goroutine that frees capacity places them, in order
// and under the router's lock, so that none is overtaken. Their own goroutines sleep until then. Guarded by Decider.mu.
type waiting struct {
	queue routing.Queue
	byID  map[uint64]*waiter
	last  uint64
	// drained is set once the process ends: no request may wait then.
	drained bool
	// Scratch memory of attempts, which run one at a time. A request that leaves the queue keeps the explanation.
	matches  kvindex.Matches
	overlaps []routing.Overlap
	ex       *routing.Explanation
}

// waiter is a request in the queue. Returned as an error, it suspends the steps until the request has left the queue.
type waiter struct {
	id       uint64
	work     *work
	since    time.Duration
	deadline time.Duration
	// left is closed when another goroutine has taken the request out of the queue.
	left chan struct{}
	// placed and err are the outcome of the last attempt; panicked is the value of its panic.
	placed   *placed
	err      error
	panicked any
}

func (*waiter) Error() string { return "the request waits" }

// choose picks, or enters the queue if there is no capacity: the waiter returned then is not nil.
func (w *work) choose() (*placed, *waiter, error) {
	d := w.d
	d.mu.Lock()
	defer d.mu.Unlock()
	now := d.since(w.clock)
	if flow := &d.live.Load().Flow; flow.Requests > 0 && !w.query.Lookup {
		w.query.Tenant = w.flowTenant(flow)
		if w.entry.Tenant, w.entry.Priority = shown(flow, w.query.Tenant), w.query.Priority; flow.Bounded() {
			w.query.Share = flow.Share(w.query.Tenant)
		}
	}
	if w.replans > 0 {
		w.query.Waited = -1
	} else {
		// Capacity that became free merely because time passed goes to waiting requests.
		d.placeWaiting(now, false)
		if w.s.waited { // it has left the queue without a place, and may have one in another role
			w.overlap(w.tokens)
		}
	}
	p, err := w.try(now)
	lane, waits := w.lane(err)
	if w.replans > 0 || !waits {
		if err == nil {
			d.waiting.charge(w, p)
		}
		return p, nil, err
	}
	q := &waiter{id: d.waiting.last + 1, work: w, since: now, left: make(chan struct{}), err: err}
	if err := d.enqueue(q, lane, now); err != nil {
		return nil, nil, err
	}
	return nil, q, nil
}

// enqueue puts a request into the queue. An error is the answer to its client.
func (d *Decider) enqueue(q *waiter, lane routing.Lane, now time.Duration) error {
	live, w := d.live.Load(), q.work
	flow := &live.Flow
	if d.waiting.drained {
		return w.turnedAway(q.err, "kvlane_draining", "this proxy is being replaced; try again")
	}
	longest := live.MaxWait(w.query.Priority)
	if isAbsent(q.err) {
		longest = flow.ZeroWorkers.Std()
	}
	q.deadline = now + longest
	n := routing.Waiter{ID: q.id, Lane: lane, Priority: w.query.Priority, Tokens: w.uncached(), Since: now, Deadline: q.deadline}
	if flow.Requests > 0 {
		tenant := w.flowTenant(flow)
		n.Tenant, n.Bytes = shown(flow, tenant), int64(len(w.r.Body)+4*len(w.lastingIDs()))
		n.Weight = flow.Weights[tenant]
		switch flow.Order {
		case config.OrderShort:
			n.Cost = n.Tokens
		case config.OrderServed:
			n.Cost = d.waiting.queue.Attained(w.query.Conversation)
		}
	}
	shed, ok := d.waiting.queue.Push(n)
	for _, s := range shed {
		other := d.waiting.byID[s.ID]
		other.err = other.work.turnedAway(other.err, "kvlane_queue_shed", "the queue is full, and others come first; try again")
		d.waiting.dismiss(other)
	}
	if !ok {
		return w.turnedAway(q.err, "kvlane_queue_full", "the queue is full; try again")
	}
	d.waiting.last = q.id
	d.waiting.byID[q.id] = q
	w.slim()
	return nil
}

// slim gives back the scratch memory that placing does not need, because the request may now wait for long: the spans of a
// hostile body's elements take several times the body's memory, and overlaps and explanations grow with the targets.
func (w *work) slim() {
	s := w.s
	w.s = &scratch{hashes: slices.Clone(s.hashes), others: s.others, prefix: slices.Clone(s.prefix), exclude: slices.Clone(s.exclude), waited: true}
	w.query.Prefix, w.query.Exclude, w.query.Subset = w.s.prefix, w.s.exclude, nil // each attempt sets the subset
	w.tokens.ids = slices.Clone(w.lastingIDs())                                    // those may be in larger memory of s
	if w.in.body != nil {
		r := *w.in.body
		r.Elements = nil
		w.in.body = &r
	}
	w.ex, s.turn = nil, &conv.Turn{} // the old turn may own the memory of the body
	w.d.keepScratch(s)
}

// lastingIDs returns the ids of the prompt if they are needed again after a wait, else nil.
func (w *work) lastingIDs() []uint32 {
	if m := w.in.model; w.d.legs == nil && (m == nil || m.Config.HandIDs == nil || !*m.Config.HandIDs) {
		return nil
	}
	return w.tokens.ids
}

// turnedAway is the answer to a request that could not be placed because of err and may not wait, or not any longer.
// Without flow it is err. The Retry-After header has err's time, or that in which the queue drains if it is longer.
func (w *work) turnedAway(err error, details, message string) error {
	d, after := w.d, retryAfter(err)
	if d.live.Load().Flow.Requests == 0 {
		return err
	}
	if q := &d.waiting.queue; !d.waiting.drained {
		after = max(after, d.router.RetryAfter(q.Tokens()), q.Drain(d.since(d.now())))
	}
	return &answerError{Reject: w.tooMany(details, message+" in ", after), why: err.Error()}
}

// retryAfter is the time after which a client should try again after an error.
func retryAfter(err error) time.Duration {
	if full, ok := errors.AsType[*routing.CapacityError](err); ok {
		return full.RetryAfter
	}
	if held, ok := errors.AsType[*routing.HeldError](err); ok {
		return held.RetryAfter
	}
	if unmet, ok := errors.AsType[*routing.UnmetError](err); ok {
		return unmet.RetryAfter
	}
	return 5 * time.Second // a worker starts in minutes
}

// postponed is the decision while the request waits: until it is placed or shed, its time is up, or its client
// disconnects.
func (q *waiter) postponed(ctx context.Context) extproc.Decision {
	w := q.work
	w.r.Hold(true)
	timer := time.AfterFunc(q.deadline-q.since, q.expire)
	return extproc.Decision{Wait: &extproc.Wait{Ready: q.left, Resume: func() extproc.Decision {
		timer.Stop()
		w.r.Hold(false)
		return w.survive(ctx, func() (extproc.Decision, error) { return w.conclude(ctx) })
	}}}
}

// expire ends the wait of a request whose time is up.
func (q *waiter) expire() {
	d := q.work.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.waiting.byID[q.id] == q {
		q.late() // while the queue has it, whose length Retry-After depends on
		d.waiting.queue.Remove(q.id)
		d.waiting.dismiss(q)
	}
}

func (q *waiter) late() {
	q.err = q.work.turnedAway(q.err, "kvlane_queue_timeout", "no worker became free in time; try again")
}

// waited returns how the wait of a request ended. If it is still in the queue, its client has disconnected.
func (d *Decider) waited(q *waiter) (*placed, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	w, now := q.work, d.now()
	w.entry.Wait(now.Sub(w.clock))
	w.elsewhere += w.entry.Waited
	w.clock = now
	if d.waiting.queue.Remove(q.id) {
		delete(d.waiting.byID, q.id)
		return nil, errClientGone
	}
	if q.panicked != nil {
		panic(q.panicked)
	}
	return q.placed, q.err
}

// placeWaiting places waiting requests, under d.mu, after every change that may have freed capacity for them.
func (d *Decider) placeWaiting(now time.Duration, all bool) {
	d.waiting.queue.Place(now, d.router, all, func(next *routing.Waiter) (out routing.Outcome) {
		q := d.waiting.byID[next.ID]
		if q.deadline > now {
			q.attempt(now)
			if lane, waits := q.work.lane(q.err); waits {
				d.waiting.ex, q.work.ex = q.work.ex, nil
				return routing.Outcome{Moves: true, To: lane}
			}
		} else {
			q.late()
		}
		d.waiting.dismiss(q)
		if q.placed == nil {
			return routing.Outcome{Leaves: true}
		}
		d.waiting.charge(q.work, q.placed)
		return routing.Placed(&q.placed.plan)
	})
}

// attempt tries again to place a waiter, with the current content of the index. A panic is reported to the waiter's own
// goroutine, not to the one that freed capacity. It removes the waiter from the queue, so that the others get their
// turn.
func (q *waiter) attempt(now time.Duration) {
	w, l := q.work, &q.work.d.waiting
	w.s.matches, w.s.overlaps = l.matches, l.overlaps
	defer func() {
		if q.panicked = recover(); q.panicked != nil {
			q.err = nil
		}
		l.matches, l.overlaps, w.s.matches = w.s.matches, w.s.overlaps, kvindex.Matches{}
		if q.panicked != nil {
			l.matches, l.overlaps = kvindex.Matches{}, nil
		}
		if w.s.overlaps = nil; q.placed != nil {
			w.s.overlaps = slices.Clone(l.overlaps)
		}
	}()
	if w.explained {
		if w.ex, l.ex = l.ex, nil; w.ex == nil {
			w.ex = w.d.decisions.Blank()
		}
	}
	w.query.Waited = now - q.since
	w.overlap(w.tokens)
	q.placed, q.err = w.try(now)
}

// dismiss wakes a waiter that is out of the queue, or leaves it now.
func (l *waiting) dismiss(q *waiter) {
	delete(l.byID, q.id)
	close(q.left)
}

// lane returns the lane for a request that was refused with err, and whether it may wait.
func (w *work) lane(err error) (routing.Lane, bool) {
	live := w.d.live.Load()
	held, isHeld := errors.AsType[*routing.HeldError](err)
	if isHeld && held.Slot != routing.NoSlot {
		return held.Lane(""), live.Flow.Requests > 0
	}
	_, full := errors.AsType[*routing.CapacityError](err)
	waits := isHeld && live.Flow.Requests > 0 || full && live.Waits() || isAbsent(err) && w.stored.Pin == nil && live.Flow.Requests > 0 && live.Flow.ZeroWorkers > 0
	if !waits {
		return routing.Lane{}, false
	}
	// Requests that may go to the same targets share a lane.
	class, q := w.class(), &w.query
	if q.Pin != nil || q.Subset != nil || len(q.Exclude) > 0 {
		subset := slices.Sorted(slices.Values(w.r.Subset))
		class = fmt.Sprint(class, "\x00", w.r.HasSubset, subset, q.Exclude)
		if q.Pin != nil {
			class += q.Pin.Worker + "/" + strconv.Itoa(int(q.Pin.Rank))
		}
	}
	if isHeld { // it waits for memory for a new program, or for a place of its tenant's, not for capacity of a target
		return held.Lane(class), true
	}
	return routing.Lane{Class: class, Slot: routing.NoSlot}, true
}

// class is the model name by which the queue groups the request. It is "" for unknown names: clients could send a new
// one in each request, and all of them go to the same targets. The caller holds d.mu.
func (w *work) class() string {
	if w.query.Listed || w.in.model != nil || w.d.router.Lists(w.query.Model) {
		return strings.Clone(w.query.Model)
	}
	return ""
}

// isAbsent reports whether a request was refused because no worker could serve it.
func isAbsent(err error) bool {
	none, ok := errors.AsType[*routing.NoTargetError](err)
	return ok && none.Pool != routing.Prefill
}

// uncached is the number of prompt tokens that even the best target would have to compute.
func (w *work) uncached() int64 {
	best := int64(0)
	for i := range w.s.overlaps {
		o := &w.s.overlaps[i]
		held := int64(o.Speculative)
		for _, n := range o.Tokens {
			held += int64(n)
		}
		best = max(best, held)
	}
	return max(w.query.PromptTokens-best, 0)
}

// flowTenant is the name under which a request shares capacity with others.
func (w *work) flowTenant(f *config.Flow) string {
	switch f.Fairness {
	case config.FairModel:
		return w.class()
	case config.FairKey:
		for _, name := range []string{"authorization", "x-api-key", "api-key"} {
			if v, ok := w.r.Header(name); ok {
				if scheme, key, found := strings.Cut(v, " "); found && strings.EqualFold(scheme, "bearer") {
					v = key
				}
				return digest(strings.TrimSpace(v))
			}
		}
	case config.FairTenant:
		return strings.Clone(w.query.Owner)
	}
	return ""
}

func digest(name string) string {
	sum := sha256.Sum256([]byte(name))
	return hex.EncodeToString(sum[:8])
}

// shown is a tenant as logs, pages and the queue name it, which a reload may find: the name may be a secret or long.
func shown(f *config.Flow, tenant string) string {
	if f.Fairness == config.FairTenant && tenant != "" {
		return digest(tenant)
	}
	return observe.Clip(tenant)
}

// charge adds the tokens of a placed request to those of its conversation, if the order of the queue depends on them.
func (l *waiting) charge(w *work, p *placed) {
	if f := &w.d.live.Load().Flow; f.Requests > 0 && f.Order == config.OrderServed && w.query.Conversation != "" {
		l.queue.Charge(w.query.Conversation, &p.plan)
	}
}

// Drain answers waiting requests, and those that would wait from now on, with 429. Call it when the process ends.
func (d *Decider) Drain() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.waiting.drained = true
	for id, q := range d.waiting.byID {
		d.waiting.queue.Remove(id)
		q.err = q.work.turnedAway(q.err, "kvlane_draining", "this proxy is being replaced; try again")
		d.waiting.dismiss(q)
	}
}

// flow returns, for the metrics, the waiters by model and priority and the saturation of each configured model's
// targets. The caller holds d.mu.
func (d *Decider) flow(now time.Duration) (classes []observe.FlowClass, pools []observe.FlowPool) {
	f := &d.live.Load().Flow
	if f.Requests == 0 {
		return nil, nil
	}
	sums, waits := map[observe.FlowClass]*observe.FlowClass{}, map[string]int64{} // waits: tokens by model
	add := func(model string, priority int) *observe.FlowClass {
		key := observe.FlowClass{Model: model, Priority: priority}
		if sums[key] == nil {
			sums[key] = &observe.FlowClass{Model: model, Priority: priority}
			waits[model] += 0
		}
		return sums[key]
	}
	for _, m := range d.live.Load().Models {
		add(m.Name, f.Priority(m.Name))
	}
	if len(sums) == 0 {
		add("", 0)
	}
	d.waiting.queue.Each(func(w *routing.Waiter) {
		model := ""
		if in := d.waiting.byID[w.ID].work.in; in.model != nil {
			model = in.model.Config.Name
		}
		c := add(model, w.Priority)
		c.Requests++
		c.Tokens += w.Tokens
		waits[model] += w.Tokens
	})
	for _, c := range sums {
		classes = append(classes, *c)
	}
	for model, waiting := range waits {
		p := observe.FlowPool{Model: model}
		var work int64
		var rate float64
		p.Saturation, work, rate = d.router.Saturation(now, model, max(f.Hold, 1))
		if work += waiting; rate > 0 {
			p.Drain = time.Duration(float64(work) / rate * float64(time.Second))
		} else if waiting > 0 {
			p.Saturation = 1
		}
		pools = append(pools, p)
	}
	return classes, pools
}
