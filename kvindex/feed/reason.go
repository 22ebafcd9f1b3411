package feed

// Reason is why an event was dropped, a target was cleared, or a feed changed its state. Reasons
// are metric labels: short, fixed and few.
type Reason string

// Why one event was dropped. No other event is lost with it.
const (
	// Malformed: the bytes do not have the form of an event.
	Malformed Reason = "malformed"
	// UnknownTag: an event type unknown to this version.
	UnknownTag Reason = "unknown_tag"
	// OtherGroup: a KV-cache group that is neither main attention, a sliding window nor a recurrent state (such as
	// attention in chunks or cross attention); for TensorRT-LLM all windows except the largest.
	OtherGroup Reason = "other_group"
	// Placeholder: a stored event without blocks.
	Placeholder Reason = "placeholder"
	// Misaligned: the number of tokens is not hashes x block size.
	Misaligned Reason = "misaligned"
	// UnknownMedium: a storage medium that maps to no tier.
	UnknownMedium Reason = "unknown_medium"
	// NotLocal: blocks of another worker, or owned by another component.
	NotLocal Reason = "not_local"
	// OwnParent: the parent is one of the event's own blocks.
	OwnParent Reason = "own_parent"
	// Partial: a block that is not full (TensorRT-LLM publishes them).
	Partial Reason = "partial_block"
	// NoEffect: events that do not change which blocks are held (TensorRT-LLM created, updated).
	NoEffect Reason = "no_effect"
	// WrongBlockSize: neither a divisor nor a multiple of the configured block size.
	WrongBlockSize Reason = "wrong_block_size"
	// UnknownHash: an unknown hash algorithm; all events of the worker are dropped.
	UnknownHash Reason = "unknown_hash_algo"
	// Refused: the index refused the event; its own reason follows if it has one ("refused_unknown_parent_block").
	Refused Reason = "refused"
	// WrongRank: the batch carries a rank other than the configured one.
	WrongRank Reason = "wrong_rank"
)

// Why a target was cleared or a state was entered.
const (
	// Connected: the connection is up.
	Connected Reason = "connected"
	// Disconnected: the connection broke or could not be made.
	Disconnected Reason = "disconnected"
	// Unreachable: a connection failed or broke; there is at most one such warning a minute.
	Unreachable Reason = "unreachable"
	// CaughtUp: all batches up to the newest have been applied.
	CaughtUp Reason = "caught_up"
	// Missing: batches are missing and have been requested.
	Missing Reason = "missing_batches"
	// Lost: batches are missing and cannot be recovered.
	Lost Reason = "lost_batches"
	// Restarted: the engine began a new sequence.
	Restarted Reason = "engine_restarted"
	// Silent: requests finish but no events come.
	Silent Reason = "silent"
	// Probing: a replay checks whether a silent feed has missed events.
	Probing Reason = "probing"
	// BlockSizeChanged: the engine's block size has changed.
	BlockSizeChanged Reason = "block_size_changed"
)
