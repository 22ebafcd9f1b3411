package feed

import (
	"sync"

	"golang.org/x/sync/semaphore"

	"github.com/kvlane/kvlane/kvindex"
)

// Sink receives what feeds deliver. Calls for one target are serialised and in order; calls for different targets may be
// concurrent.
type Sink interface {
	// Apply changes what the target holds. The event and its slices are only valid during the
	// call. An error is counted and affects this event alone.
	Apply(t kvindex.Target, ev *kvindex.Event) error
	// Clear forgets everything that the target holds.
	Clear(t kvindex.Target, why Reason)
	// State reports how far the target's events can be trusted from now on.
	State(t kvindex.Target, s State, why Reason)
	// Warn reports a condition that an operator should see.
	Warn(t kvindex.Target, why Reason, detail string)
}

// Turner is a Sink whose feeds, such as those of one worker, process batches one at a time.
type Turner interface {
	Sink
	// Turn returns the lock that a feed holds while it processes a batch. It is always the same.
	Turn() *sync.Mutex
}

// Limiter is a Sink whose pushed batches have the limits of MachineConfig.Pending.
type Limiter interface {
	Sink
	Pending() []*semaphore.Weighted
}

// guard protects machines: turn is held while they get input and their actions run. The mutex is held too when their
// state changes or is read, but not while events are applied.
type guard struct {
	sync.Mutex
	turn *sync.Mutex
}

func newGuard(s Sink) *guard {
	if t, ok := s.(Turner); ok {
		return &guard{turn: t.Turn()}
	}
	return &guard{turn: new(sync.Mutex)}
}

func (g *guard) enter() {
	g.turn.Lock()
	g.Lock()
}

func (g *guard) leave() {
	g.Unlock()
	g.turn.Unlock()
}

// silent calls do, which reports a request without events, unless a batch is being processed.
func (g *guard) silent(do func()) {
	if g.turn.TryLock() {
		defer g.leave()
		g.Lock()
		do()
	}
}

// Batcher is a Sink that needs to know where batches begin and end, for example to copy what its
// targets hold together with the positions of their sequences.
type Batcher interface {
	Sink
	// BeginBatch and EndBatch enclose the events of one batch for t. From EndBatch to the next BeginBatch or Clear, what
	// the sink holds for t is the result of all batches up to c. Calls do not nest, and Clear and State are never called in between.
	BeginBatch(t kvindex.Target)
	EndBatch(t kvindex.Target, c Cursor)
}

// Status contains a feed's counters since it started.
type Status struct {
	Worker string
	// Targets that events have arrived for, with the feed's state for each.
	Targets []TargetStatus
	// Counts of batches; for a feed with several sequences (TensorRT-LLM's poll has one per rank) their sums.
	Counts Counts
	// Events and Blocks passed to the sink.
	Events, Blocks uint64
	// Dropped events by reason.
	Dropped map[Reason]uint64
	// Connects counts connections made (or polls answered), Errors those that failed or broke.
	// LastError is the newest error.
	Connects, Errors uint64
	LastError        string
	// BlockSize is the block size of the last stored event in tokens; 0 if there was none.
	BlockSize int
}

// TargetStatus is the state of one target's events.
type TargetStatus struct {
	Target kvindex.Target
	State  State
	// Cursor is the position up to which the target's sequence has been applied.
	Cursor Cursor
}
