package kvindex

// EventKind is the kind of change that an Event makes.
type EventKind uint8

const (
	// Stored adds blocks after Parent.
	Stored EventKind = iota + 1
	// Removed drops blocks by engine hash.
	Removed
	// Cleared drops everything that the target holds.
	Cleared
)

// Tier is the kind of storage that holds a block.
type Tier uint8

const (
	Device Tier = iota
	Host
	Disk
	External
	// NumTiers is the number of tiers.
	NumTiers = 4
)

// EngineHash is an engine's name for a block. It is opaque, scoped to one target, and used only
// to find a parent or a block to remove. Digests that are published as bytes are folded to 64
// bits by the decoder (vLLM: the low 8 bytes, big endian, like its integer hashes).
type EngineHash uint64

// Event is one change of one target's cache, in the same form for all engines. The caller of
// Apply keeps ownership of the slices.
type Event struct {
	Kind EventKind
	Tier Tier
	// Group is the engine's KV-cache group (vLLM group_idx, TensorRT-LLM layer_group_id); 0
	// where the engine has none. Equal hashes in several groups are counted separately. Decoders
	// drop the groups that are neither main attention nor have a known window.
	Group int32
	// Window is the length in tokens of the sliding window of the event's group, 0 for full attention.
	// A Stored event with a Window declares the group; it needs no Tokens, and its Hashes may be empty.
	Window int
	// Lone is set in Stored events of a group with a sliding window that is the only one, and so takes the place of main
	// attention: the window's length in tokens. Such an engine keeps the window before a prompt's last token. A Cleared
	// event with it clears only what such events have stored since the index was made or resumed.
	Lone int
	// Hashes are the blocks stored or removed, in chain order for Stored.
	Hashes []EngineHash
	// Parent is the block before Hashes[0]; meaningful only if HasParent.
	Parent    EngineHash
	HasParent bool
	// Tokens are the token ids of the stored blocks, len(Hashes)*BlockSize of them.
	Tokens    []uint32
	BlockSize int
	// Adapter and Salt, like the target's model, separate caches of equal tokens. They must be
	// set at least on a chain's first block; later blocks inherit them from the parent.
	Adapter, Salt string
	// Extra contains, per block, a digest of further keys (prompt embeddings) that the engine
	// mixes into the block's hash; nil without such keys.
	Extra []uint64
	// Media are the images, audio and video that begin in these blocks, in order. One that began in
	// an earlier block is part of that block's hash.
	Media []Medium
}

// Medium is an image, audio or video that tokens stand for. It is part of the block in which it
// begins and thereby of all later ones.
type Medium struct {
	// At is the position of its first token, counted from the event's or the prompt's first.
	At int
	// Digest is a hash of the identifier that the engine gives it.
	Digest uint64
}
