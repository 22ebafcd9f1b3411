package feed

import "github.com/kvlane/kvlane/kvindex"

// Sink takes what feeds say. Calls for one target come in order and never at the
// same time; calls for different targets may be concurrent.
type Sink interface {
	// Apply changes what the target holds. The event and its slices belong to the
	// feed and are only valid during the call. An error is counted and costs this
	// event alone.
	Apply(t kvindex.Target, ev *kvindex.Event) error
	// Clear forgets everything that the target holds.
	Clear(t kvindex.Target, why Reason)
	// State says how far the target's events can be believed from now on.
	State(t kvindex.Target, s State, why Reason)
	// Warn reports something that an operator should see.
	Warn(t kvindex.Target, why Reason, detail string)
}

// Batcher is a Sink that wants to know where batches begin and end: one that
// copies what its targets hold together with how far their sequences got.
type Batcher interface {
	Sink
	// BeginBatch and EndBatch enclose the events of one batch for t. From EndBatch to
	// the next BeginBatch or Clear, what the sink has of t is what c stands for. Calls
	// do not nest, and Clear and State are never called in between.
	BeginBatch(t kvindex.Target)
	EndBatch(t kvindex.Target, c Cursor)
}

// Status is what a feed has seen since it began.
type Status struct {
	Worker string
	// Targets that events have come for, with the feed's state for each.
	Targets []TargetStatus
	// Counts of batches; for a feed with several sequences (TensorRT-LLM's poll has
	// one per rank) their sums.
	Counts Counts
	// Events and Blocks that went to the sink.
	Events, Blocks uint64
	// Dropped events by reason.
	Dropped map[Reason]uint64
	// Connects counts connections made (or polls answered), Errors those that failed
	// or broke. LastError is the newest.
	Connects, Errors uint64
	LastError        string
	// BlockSize is that of the last stored event; 0 if there was none.
	BlockSize int
}

// TargetStatus is the state of one target's events.
type TargetStatus struct {
	Target kvindex.Target
	State  State
	// Cursor is how far its sequence has been applied.
	Cursor Cursor
}
