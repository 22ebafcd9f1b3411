package feed

// Reason names why an event was dropped, a target was cleared, or a feed changed
// its state. Reasons are the label values of metrics: short, fixed, few.
type Reason string

// Why one event was dropped. Nothing else is lost with it.
const (
	// Malformed: the bytes do not have the form of an event.
	Malformed Reason = "malformed"
	// UnknownTag: an event type that this version does not know.
	UnknownTag Reason = "unknown_tag"
	// OtherGroup: a KV-cache group that is not main attention (sliding window,
	// mamba, cross attention...), or a window that is not the largest.
	OtherGroup Reason = "other_group"
	// Placeholder: a stored event without blocks.
	Placeholder Reason = "placeholder"
	// Misaligned: the number of tokens is not hashes x block size.
	Misaligned Reason = "misaligned"
	// UnknownMedium: a storage medium that maps to no tier.
	UnknownMedium Reason = "unknown_medium"
	// NotLocal: blocks of another worker, or owned by something else.
	NotLocal Reason = "not_local"
	// OwnParent: the parent is one of the event's own blocks.
	OwnParent Reason = "own_parent"
	// Partial: a block that is not full (TensorRT-LLM publishes them).
	Partial Reason = "partial_block"
	// NoEffect: events that say nothing about which blocks are held (TensorRT-LLM
	// created, updated).
	NoEffect Reason = "no_effect"
	// WrongBlockSize: neither divides nor is divided by the configured block size.
	WrongBlockSize Reason = "wrong_block_size"
	// UnknownHash: a hash algorithm that is not known; the whole worker is refused.
	UnknownHash Reason = "unknown_hash_algo"
	// Refused: the index did not take the event; its own reason follows if it has one
	// ("refused: unknown parent block").
	Refused Reason = "refused"
	// WrongRank: the batch names another rank than the feed is configured for.
	WrongRank Reason = "wrong_rank"
)

// Why a target was cleared or a state was entered.
const (
	// Connected: the connection is up.
	Connected Reason = "connected"
	// Disconnected: the connection broke or was never made.
	Disconnected Reason = "disconnected"
	// CaughtUp: everything up to the newest batch has been applied.
	CaughtUp Reason = "caught_up"
	// Missing: batches are missing and are being asked for.
	Missing Reason = "missing_batches"
	// Lost: batches are missing and cannot be had.
	Lost Reason = "lost_batches"
	// Restarted: the engine began a new sequence.
	Restarted Reason = "engine_restarted"
	// Silent: requests finish but no events come.
	Silent Reason = "silent"
	// Probing: the engine is asked whether a silent feed has missed something.
	Probing Reason = "probing"
	// BlockSizeChanged: the engine's block size is not what it was.
	BlockSizeChanged Reason = "block_size_changed"
)
