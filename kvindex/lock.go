package kvindex

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// gate keeps lookups and changes apart. Lookups announce themselves on one of a
// few counters (two uncontended atomic additions a lookup); a writer raises a
// flag and waits for the lookups that are inside, so for at most one lookup. A
// lookup that finds the flag up steps back and looks again; changes are cut into
// steps of at most writeStep blocks, so it waits microseconds. If it keeps
// finding the flag up it queues for the writers' mutex, which is fair.
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

const spins = 64

// enter lets a lookup in; it returns whether the writers' mutex was taken, for leave.
func (l *gate) enter(stripe uint32) (queued bool) {
	n := &l.inside[stripe%uint32(len(l.inside))].n
	for try := 0; ; try++ {
		n.Add(1)
		if l.raised.Load() == 0 {
			return false
		}
		n.Add(-1)
		for spin := 0; spin < spins && l.raised.Load() != 0; spin++ {
			if spin%16 == 15 {
				runtime.Gosched()
			}
		}
		if try == 3 {
			l.writers.Lock()
			return true
		}
	}
}

func (l *gate) leave(stripe uint32, queued bool) {
	if queued {
		l.writers.Unlock()
		return
	}
	l.inside[stripe%uint32(len(l.inside))].n.Add(-1)
}

// shut keeps lookups out; the caller holds the writers' mutex.
func (l *gate) shut() {
	l.raised.Store(1)
	for i := range l.inside {
		for spin := 0; l.inside[i].n.Load() != 0; spin++ {
			if spin%16 == 15 {
				runtime.Gosched()
			}
		}
	}
}

func (l *gate) open() { l.raised.Store(0) }

// isShut is for writers, under their mutex.
func (l *gate) isShut() bool { return l.raised.Load() != 0 }
