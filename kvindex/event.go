package kvindex

// EventKind says what an Event does.
type EventKind uint8

const (
	// Stored adds blocks after Parent.
	Stored EventKind = iota + 1
	// Removed drops blocks by engine hash.
	Removed
	// Cleared drops everything that the target holds.
	Cleared
)

// Tier is where a block lives.
type Tier uint8

const (
	Device Tier = iota
	Host
	Disk
	External
	// NumTiers is the number of tiers.
	NumTiers = 4
)

// EngineHash is an engine's name for a block: opaque, scoped to one target,
// used only to find a parent or a removal. Engines that publish digests as
// bytes are folded to 64 bits by the decoder (vLLM: the low 8 bytes, big
// endian, as its integers are made).
type EngineHash uint64

// Event is one change of one target's cache, the same for all engines. Slices
// belong to the caller of Apply and are not kept.
type Event struct {
	Kind EventKind
	Tier Tier
	// Group is the engine's KV-cache group (vLLM group_idx, TensorRT-LLM
	// layer_group_id); 0 where the engine has none. Decoders drop the groups that
	// are not main attention; equal hashes in several groups are counted apart.
	Group int32
	// Hashes are the blocks stored or removed, in chain order for Stored.
	Hashes []EngineHash
	// Parent is the block before Hashes[0]; meaningful only if HasParent.
	Parent    EngineHash
	HasParent bool
	// Tokens are the ids of the stored blocks, len(Hashes)*BlockSize of them.
	Tokens    []uint32
	BlockSize int
	// Model, Adapter and Salt separate caches of equal tokens. Adapter and Salt are
	// set on a chain's first block at least; later blocks inherit from the parent.
	Adapter string
	Salt    string
	// Extra holds, per block, a digest of further keys (multimodal content) that the
	// engine mixes into a block's hash; nil where there are none.
	Extra []uint64
}
