package routing

import (
	"sort"
	"time"
)

// Waiter is a request that waits for capacity.
type Waiter struct {
	// ID is chosen by the caller.
	ID uint64
	// Priority: greater first; below 0 may be shed for others.
	Priority int
	// Deadline is when the request stops waiting, since start.
	Deadline time.Duration
}

// Queue is a bounded wait queue: greater priority first, then first in first out. It
// orders waiters; the caller holds the streams. The zero value refuses all. It is not
// safe for concurrent use.
type Queue struct {
	// Max is the greatest number of waiters.
	Max int
	// waiters are in the order in which they are served.
	waiters []Waiter
}

// Push adds a waiter. A full queue sheds its last waiter if that one has a negative
// priority, below the new one's; otherwise it refuses the new one.
func (q *Queue) Push(w Waiter) (shed Waiter, hasShed, accepted bool) {
	if len(q.waiters) >= q.Max {
		if len(q.waiters) == 0 {
			return Waiter{}, false, false
		}
		last := q.waiters[len(q.waiters)-1]
		if last.Priority >= 0 || last.Priority >= w.Priority {
			return Waiter{}, false, false
		}
		q.waiters = q.waiters[:len(q.waiters)-1]
		shed, hasShed = last, true
	}
	at := sort.Search(len(q.waiters), func(i int) bool { return q.waiters[i].Priority < w.Priority })
	q.waiters = append(q.waiters, Waiter{})
	copy(q.waiters[at+1:], q.waiters[at:])
	q.waiters[at] = w
	return shed, hasShed, true
}

// Serve calls serve for the waiters whose deadline has not passed, in order. Those for
// which it returns true leave the queue. serve must not change the queue.
func (q *Queue) Serve(now time.Duration, serve func(w Waiter) bool) {
	n := 0
	for _, w := range q.waiters {
		if w.Deadline > now && serve(w) {
			continue
		}
		q.waiters[n] = w
		n++
	}
	q.waiters = q.waiters[:n]
}

// Remove removes a waiter whose client has gone or whose deadline has passed, and
// reports whether it was there.
func (q *Queue) Remove(id uint64) bool {
	for i, w := range q.waiters {
		if w.ID == id {
			q.waiters = append(q.waiters[:i], q.waiters[i+1:]...)
			return true
		}
	}
	return false
}

// Len is the number of waiters.
func (q *Queue) Len() int { return len(q.waiters) }
