package decide

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kvlane/kvlane/routing"
)

// waiting are the requests for which no target has room. Whoever makes room places
// them, in order and under the router's lock, so that nobody is overtaken; the
// goroutines of the requests sleep meanwhile. Guarded by Decider.mu.
type waiting struct {
	queue routing.Queue
	// patience is the longest wait.
	patience time.Duration
	byID     map[uint64]*waiter
	last     uint64
	// full lists the models without room during one serve.
	full []string
}

// waiter is a request in the queue. Its job belongs to whoever holds Decider.mu until
// it has left the queue.
type waiter struct {
	id  uint64
	job *job
	ex  *routing.Explanation
	// left is closed when the request has left the queue by the hand of another.
	left chan struct{}
	// plan and err are the outcome of the last attempt.
	plan routing.Plan
	err  error
	// panicked is what an attempt by another's hand panicked with.
	panicked any
}

// choose picks at once, or enters the queue if there is no room: the waiter returned
// then is not nil. A request that is planned anew never enters it: a prefill worker may
// hold its blocks, for as long as their lease. The caller holds d.mu.
func (d *Decider) choose(j *job, ex *routing.Explanation) (routing.Plan, *waiter, error) {
	now := d.since(j.clock)
	if j.replans > 0 {
		plan, err := j.try(now, ex)
		return plan, nil, err
	}
	ahead := d.waiting.ahead(j)
	var plan routing.Plan
	var err error
	if ahead == nil {
		if plan, err = j.try(now, ex); !isFull(err) {
			return plan, nil, err
		}
	} else {
		err = ahead.err
	}
	w := &waiter{id: d.waiting.last + 1, job: j, ex: ex, left: make(chan struct{}), err: err}
	shed, hasShed, ok := d.waiting.queue.Push(routing.Waiter{ID: w.id, Priority: j.query.Priority, Deadline: now + d.waiting.patience})
	if !ok {
		return routing.Plan{}, nil, err
	}
	if hasShed {
		d.waiting.dismiss(d.waiting.byID[shed.ID])
	}
	d.waiting.last = w.id
	d.waiting.byID[w.id] = w
	if ahead != nil {
		// It did not ask for itself: room that came with time alone shows here.
		d.serve(now)
	}
	return routing.Plan{}, w, nil
}

// wait sleeps until the request was placed, has been shed, has waited long enough, or
// the client is gone.
func (d *Decider) wait(ctx context.Context, w *waiter) (routing.Plan, error) {
	timer := time.NewTimer(d.waiting.patience)
	defer timer.Stop()
	w.job.r.Hold(true)
	defer w.job.r.Hold(false)
	gone := false
	select {
	case <-w.left:
	case <-timer.C:
	case <-ctx.Done():
		gone = true
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.waiting.queue.Remove(w.id) {
		delete(d.waiting.byID, w.id)
		if gone {
			return routing.Plan{}, errClientGone
		}
	}
	if w.panicked != nil {
		panic(w.panicked)
	}
	return w.plan, w.err
}

// serve places those who wait, as far as there is room now. It is called, under d.mu,
// after whatever may have made room.
func (d *Decider) serve(now time.Duration) {
	if d.waiting.queue.Len() == 0 {
		return
	}
	defer func() {
		clear(d.waiting.full) // the names share memory with requests
		d.waiting.full = d.waiting.full[:0]
	}()
	d.waiting.queue.Serve(now, func(next routing.Waiter) bool {
		w := d.waiting.byID[next.ID]
		if w.plain() && slices.Contains(d.waiting.full, w.job.query.Model) {
			return false
		}
		w.attempt(now)
		if isFull(w.err) {
			if w.plain() {
				d.waiting.full = append(d.waiting.full, w.job.query.Model)
			}
			return false
		}
		d.waiting.dismiss(w)
		return true
	})
}

// attempt tries again for a waiter. A panic is the waiter's, not that of whoever made
// room, and takes it out of the queue: the others get their turn.
func (w *waiter) attempt(now time.Duration) {
	defer func() {
		if w.panicked = recover(); w.panicked != nil {
			w.err = nil
		}
	}()
	w.job.overlap() // the index has changed while the request waited
	w.plan, w.err = w.job.try(now, w.ex)
}

// ahead returns a waiter that has the better right to the room that j asks for.
func (q *waiting) ahead(j *job) *waiter {
	for _, w := range q.byID {
		if w.job.query.Model == j.query.Model && w.job.query.Priority >= j.query.Priority && w.plain() {
			return w
		}
	}
	return nil
}

func (q *waiting) dismiss(w *waiter) {
	delete(q.byID, w.id)
	close(w.left)
}

// plain requests of a model can go to all its targets: if one of them finds no room,
// the others behind it find none.
func (w *waiter) plain() bool {
	q := &w.job.query
	return q.Pin == nil && q.Subset == nil && len(q.Exclude) == 0
}

func isFull(err error) bool {
	_, full := errors.AsType[*routing.CapacityError](err)
	return full
}

// try picks and books. The caller holds d.mu.
func (j *job) try(now time.Duration, ex *routing.Explanation) (routing.Plan, error) {
	d := j.d
	if j.r.HasSubset {
		j.s.subset.Reset()
		d.router.AddressSet(&j.s.subset, j.r.Subset)
		j.query.Subset = &j.s.subset
	}
	var plan routing.Plan
	var err error
	if d.record == 0 && j.entry.Recorded == nil {
		plan, err = d.router.Pick(now, &j.query, j.s.overlaps, ex)
	} else {
		if j.entry.Recorded == nil {
			d.record--
		}
		j.entry.Recorded, err = d.router.PickRecorded(now, &j.query, j.s.overlaps, ex)
		plan = j.entry.Recorded.Plan
	}
	if err == nil {
		// The router forgets a target before its slot can be another's in the fleet: under
		// its lock both speak of the same worker.
		f := d.fleet.View()
		j.decodeAt, j.prefillAt = f.Endpoint(plan.Decode), f.Endpoint(plan.Prefill)
	}
	return plan, err
}
