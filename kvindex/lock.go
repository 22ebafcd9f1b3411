package kvindex

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// gate excludes lookups and changes from each other. A lookup registers on one of a few counters
// (two uncontended atomic additions per lookup). A writer raises a flag and waits for the
// registered lookups, so at most for the duration of one lookup. A lookup that finds the flag
// raised unregisters and tries again; changes are split into steps of at most writeStep blocks,
// so it waits for microseconds. After several attempts it queues for the writers' mutex, which
// is fair.
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

// enter registers a lookup. It returns whether it took the writers' mutex instead; pass that to
// leave.
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

// shut excludes lookups until open; the caller must hold the writers' mutex.
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

// isShut reports whether the gate is shut. The caller must hold the writers' mutex.
func (l *gate) isShut() bool { return l.raised.Load() != 0 }
