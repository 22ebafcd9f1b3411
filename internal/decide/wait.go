package decide

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kvlane/kvlane/routing"
)

// waiting are the requests for which no target has capacity. The goroutine that frees
// capacity places them, in order and under the router's lock, so that none is overtaken;
// their own goroutines sleep until then. Guarded by Decider.mu.
type waiting struct {
	queue routing.Queue
	byID  map[uint64]*waiter
	last  uint64
	// full lists the models without capacity during one placeWaiting.
	full []string
}

// waiter is a request in the queue.
type waiter struct {
	id   uint64
	work *work
	// left is closed when another goroutine has taken the request out of the queue.
	left chan struct{}
	// placed and err are the outcome of the last attempt; panicked is what it panicked
	// with.
	placed   *placed
	err      error
	panicked any
}

// choose picks, or enters the queue if there is no capacity: the waiter returned then
// is not nil.
func (w *work) choose() (*placed, *waiter, error) {
	d := w.d
	d.mu.Lock()
	defer d.mu.Unlock()
	now := d.since(w.clock)
	if w.again > 0 {
		p, err := w.try(now)
		return p, nil, err
	}
	ahead := d.waiting.ahead(w)
	var err error
	if ahead == nil {
		var p *placed
		if p, err = w.try(now); !isFull(err) {
			return p, nil, err
		}
	} else {
		err = ahead.err
	}
	q := &waiter{id: d.waiting.last + 1, work: w, left: make(chan struct{}), err: err}
	shed, hasShed, ok := d.waiting.queue.Push(routing.Waiter{ID: q.id, Priority: w.query.Priority, Deadline: now + d.live.Load().Routing.Wait.Timeout.Std()})
	if !ok {
		return nil, nil, err
	}
	if hasShed {
		d.waiting.dismiss(d.waiting.byID[shed.ID])
	}
	d.waiting.last = q.id
	d.waiting.byID[q.id] = q
	if ahead != nil {
		// It did not try for itself: this finds capacity that became free by the passage of
		// time alone.
		d.placeWaiting(now)
	}
	return nil, q, nil
}

// wait sleeps until the request was placed or shed, has waited for routing.wait.timeout, or its client
// has disconnected.
func (d *Decider) wait(ctx context.Context, q *waiter) (*placed, error) {
	timer := time.NewTimer(d.live.Load().Routing.Wait.Timeout.Std())
	defer timer.Stop()
	q.work.r.Hold(true)
	defer q.work.r.Hold(false)
	gone := false
	select {
	case <-q.left:
	case <-timer.C:
	case <-ctx.Done():
		gone = true
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.waiting.queue.Remove(q.id) {
		delete(d.waiting.byID, q.id)
		if gone {
			return nil, errClientGone
		}
	}
	if q.panicked != nil {
		panic(q.panicked)
	}
	return q.placed, q.err
}

// placeWaiting places waiting requests as far as there is capacity. Call it, under d.mu,
// after every change that may have freed some.
func (d *Decider) placeWaiting(now time.Duration) {
	if d.waiting.queue.Len() == 0 {
		return
	}
	defer func() {
		clear(d.waiting.full) // the names share memory with requests
		d.waiting.full = d.waiting.full[:0]
	}()
	d.waiting.queue.Serve(now, func(next routing.Waiter) bool {
		q := d.waiting.byID[next.ID]
		model := q.work.query.Model
		if q.plain() && slices.Contains(d.waiting.full, model) {
			return false
		}
		q.attempt(now)
		if isFull(q.err) {
			if q.plain() {
				d.waiting.full = append(d.waiting.full, model)
			}
			return false
		}
		d.waiting.dismiss(q)
		return true
	})
}

// attempt tries again for a waiter, with the index's current content. A panic is reported
// to the waiter's own goroutine, not to the one that freed capacity, and removes the waiter
// from the queue, so that the others get their turn.
func (q *waiter) attempt(now time.Duration) {
	defer func() {
		if q.panicked = recover(); q.panicked != nil {
			q.err = nil
		}
	}()
	q.work.overlap(q.work.tokens)
	q.placed, q.err = q.work.try(now)
}

// ahead returns a waiter that precedes w for the same capacity, nil if there is none.
func (l *waiting) ahead(w *work) *waiter {
	for _, q := range l.byID {
		if q.work.query.Model == w.query.Model && q.work.query.Priority >= w.query.Priority && q.plain() {
			return q
		}
	}
	return nil
}

func (l *waiting) dismiss(q *waiter) {
	delete(l.byID, q.id)
	close(q.left)
}

// plain reports whether the request may go to every target of its model: if one such
// request finds no capacity, later ones need not be tried.
func (q *waiter) plain() bool {
	query := &q.work.query
	return query.Pin == nil && query.Subset == nil && len(query.Exclude) == 0
}

func isFull(err error) bool {
	_, full := errors.AsType[*routing.CapacityError](err)
	return full
}
