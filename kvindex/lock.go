package kvindex

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// gate excludes lookups and changes from each other. A lookup registers on one of a few counters (two uncontended
// atomic additions per lookup). A writer raises a flag and waits for the registered lookups, so at most for the
// duration of one lookup. A lookup that finds the flag raised unregisters and tries again; changes are split into steps
// of at most writeStep blocks, so it waits for microseconds.
//
// A lookup that has tried for long queues for the writers' mutex, which is fair.
type gate struct {
	writers sync.Mutex
	raised  atomic.Uint32
	_       [52]byte
	inside  [8]struct {
		n atomic.Int64
		_ [56]byte
	}
	turn atomic.Uint32
}

// writeStep is the largest number of blocks changed while lookups wait.
const writeStep = 256

// spins is after how many attempts a lookup gives up.
const spins = 256

// pause lets other goroutines run now and then between attempts.
func pause(attempt int) {
	if attempt%16 == 15 {
		runtime.Gosched()
	}
}

// enter registers a lookup. It reports false if the gate was shut for long.
func (l *gate) enter(stripe uint32) bool {
	n := &l.inside[stripe%uint32(len(l.inside))].n
	for try := 0; try < spins; {
		if n.Add(1); l.raised.Load() == 0 {
			return true
		}
		n.Add(-1)
		for ; try < spins && l.raised.Load() != 0; try++ {
			pause(try)
		}
	}
	return false
}

func (l *gate) leave(stripe uint32) { l.inside[stripe%uint32(len(l.inside))].n.Add(-1) }

// shut excludes lookups until open; the caller must hold the writers' mutex.
func (l *gate) shut() {
	l.raised.Store(1)
	for i := range l.inside {
		for try := 0; l.inside[i].n.Load() != 0; try++ {
			pause(try)
		}
	}
}

func (l *gate) open() { l.raised.Store(0) }

// isShut reports whether the gate is shut. The caller must hold the writers' mutex.
func (l *gate) isShut() bool { return l.raised.Load() != 0 }

// change is what a decision changes in the index. It is queued because another writer held the mutex.
type change struct {
	next   *change
	apply  func() // called with the writers' mutex
	credit Credit // what Speculate claimed; valid after apply, with the mutex
}

// handOver leaves a change to the writer that holds the mutex, so that the caller need not wait: it is
// applied at the latest when that writer unlocks, after all that were handed over before.
//
// No change is left behind: if TryLock fails here, some writer holds the mutex after the change
// was queued, and looks at the queue after it has unlocked.
func (x *Index) handOver(c *change) {
	for {
		c.next = x.handed.Load()
		if x.handed.CompareAndSwap(c.next, c) {
			break
		}
	}
	if x.tryLock() {
		x.unlock()
	}
}

func (x *Index) lock() {
	x.gate.writers.Lock()
	x.applyHandedFirst()
}

// tryLock is lock, except that it returns false if another writer is at work.
func (x *Index) tryLock() bool {
	if !x.gate.writers.TryLock() {
		return false
	}
	x.applyHandedFirst()
	return true
}

func (x *Index) unlock() {
	for {
		x.applyHandedLast()
		if x.handed.Load() == nil || !x.gate.writers.TryLock() {
			return
		}
	}
}

// applyHandedFirst is applyHanded for a writer that begins: after a panic the writer does not hold the mutex.
func (x *Index) applyHandedFirst() {
	ready := false
	defer func() {
		if !ready {
			x.gate.writers.Unlock()
		}
	}()
	x.applyHanded()
	ready = true
}

// applyHandedLast is applyHanded for a writer that ends. It unlocks the mutex, after a panic too.
func (x *Index) applyHandedLast() {
	defer x.gate.writers.Unlock()
	x.applyHanded()
}

// applyHanded applies the changes that were handed over, in their order. The caller holds the
// mutex, also after a panic, and is not in the middle of a change.
func (x *Index) applyHanded() {
	if x.handed.Load() == nil {
		return
	}
	var first *change
	for c := x.handed.Swap(nil); c != nil; {
		c.next, first, c = first, c, c.next
	}
	x.applyFrom(first)
}

// applyFrom applies a list of changes. If one panics, so does applyFrom, but only after applying the others, which
// belong to other callers.
func (x *Index) applyFrom(c *change) {
	defer func() {
		if c != nil {
			x.gate.open()
			x.applyFrom(c.next)
		}
	}()
	for ; c != nil; c = c.next {
		apply := c.apply
		c.apply = nil // it refers to the prompt
		apply()
	}
}
