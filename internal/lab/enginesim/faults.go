package enginesim

import "sync"

// Faults are the faults to simulate; the zero value is a healthy engine. As JSON they are the body of POST /sim/faults.
type Faults struct {
	// StopEvents: batches are not sent, kept or counted; the stream just falls silent.
	StopEvents bool `json:"stop_events,omitempty"`
	// DropBatches is the number of batches still to be lost on the wire: they have a
	// sequence number, and are in the replay buffer unless ForgetDropped is set.
	DropBatches   int  `json:"drop_batches,omitempty"`
	ForgetDropped bool `json:"forget_dropped,omitempty"`
	// RepeatBatches sends each batch this many times more.
	RepeatBatches int `json:"repeat_batches,omitempty"`
	// GarbageBatches: what is sent is random, what is kept for replays is not.
	GarbageBatches bool `json:"garbage_batches,omitempty"`
	// NoReplay: replay requests get no answer.
	NoReplay bool `json:"no_replay,omitempty"`
	// EventDelayMS delays every batch and keeps their order.
	EventDelayMS int `json:"event_delay_ms,omitempty"`
	// WrongBlockSize is written into events instead of the real one.
	WrongBlockSize int `json:"wrong_block_size,omitempty"`
	// ClockAheadMS is added to the times in events; it may be negative.
	ClockAheadMS int `json:"clock_ahead_ms,omitempty"`
	// FailStatus answers the next FailCount requests for generation with this status; FailCount -1 means all of them.
	FailStatus int `json:"fail_status,omitempty"`
	FailCount  int `json:"fail_count,omitempty"`
	// AnswerDelayMS delays requests for generation before they are read; a change of the faults ends the delay.
	AnswerDelayMS int `json:"answer_delay_ms,omitempty"`
	// HoldAfterTokens pauses an answer after this many sent tokens; a change of the faults resumes it.
	HoldAfterTokens int `json:"hold_after_tokens,omitempty"`
	// DieAfterTokens cuts the connection of an answer after this many tokens.
	DieAfterTokens int `json:"die_after_tokens,omitempty"`
	// CachedTokensLie is added to the cached tokens in usage.
	CachedTokensLie int `json:"cached_tokens_lie,omitempty"`
	// Refuse closes the listening sockets of the engine's API until it is unset.
	Refuse bool `json:"refuse,omitempty"`
	// NoTransferParams: a prefill answer lacks what the decode side needs.
	NoTransferParams bool `json:"no_transfer_params,omitempty"`
	// ContextEnds: the first token of a TensorRT-LLM context_only request ends its answer,
	// so that no blocks are handed over.
	ContextEnds bool `json:"context_ends,omitempty"`
}

type faultBox struct {
	mu      sync.Mutex
	f       Faults
	changed chan struct{} // closed by the next change; nil unless someone waits for it
}

func (b *faultBox) get() Faults {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.f
}

func (b *faultBox) set(f Faults) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.f = f
	if b.changed != nil {
		close(b.changed)
		b.changed = nil
	}
}

// at returns the faults, and a channel that the next change closes.
func (b *faultBox) at() (Faults, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.changed == nil {
		b.changed = make(chan struct{})
	}
	return b.f, b.changed
}

// takeBatch returns the faults for one batch and counts a dropped one down.
func (b *faultBox) takeBatch() Faults {
	b.mu.Lock()
	defer b.mu.Unlock()
	f := b.f
	if b.f.DropBatches > 0 && !b.f.StopEvents {
		b.f.DropBatches--
	}
	return f
}

// takeFailure returns the status of a request that must fail, or 0.
func (b *faultBox) takeFailure() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.f.FailStatus == 0 || b.f.FailCount == 0 {
		return 0
	}
	if b.f.FailCount > 0 {
		b.f.FailCount--
	}
	return b.f.FailStatus
}
