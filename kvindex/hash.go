package kvindex

import (
	"math/bits"
	"slices"
)

// MaxBlockSize is the largest number of tokens in a block.
const MaxBlockSize = 4096

// Hash identifies a block and, because hashes are chained, the whole prompt up to and including it: two prompts share
// their first n blocks if and only if their n-th hashes are equal (except for collisions, with a probability of 2^-64
// per pair, which cannot be constructed without the key).
type Hash uint64

// Key is the secret of the block hash. It is configuration: replicas that exchange snapshots
// must share it, and clients must never learn it.
type Key [16]byte

// Hasher computes block hashes. It is immutable after NewHasher and safe for concurrent use.
//
// A block's tokens are packed in pairs into 64-bit words. The words are taken in pairs, each word is masked with a
// secret of its position, and the two halves of each 128-bit product are xored and added to a sum. (This is the
// multiply-mix of wyhash, with secrets by position instead of a chain, so that the products of a block are independent
// of each other.) The sum is chained to the parent's hash by one more product.
type Hasher struct {
	chainKey, blockKey uint64
	extraKey, extraMul uint64
	textKey            uint64
	nameKey, nameMul   uint64
	position           [MaxBlockSize/2 + 2]uint64
}

// NewHasher derives the secrets of all positions from key.
func NewHasher(key Key) *Hasher {
	h := &Hasher{}
	state := uint64(0x9e3779b97f4a7c15)
	for i, b := range key {
		state ^= uint64(b) << (8 * (i % 8))
		if i%8 == 7 {
			state = fold(state, 0xd6e8feb86659fd93) + state
		}
	}
	next := func() uint64 { // splitmix64
		state += 0x9e3779b97f4a7c15
		z := state
		z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
		z = (z ^ z>>27) * 0x94d049bb133111eb
		return z ^ z>>31
	}
	h.chainKey, h.blockKey, h.extraKey = next(), next(), next()
	h.extraMul, h.textKey = next()|1, next()
	for i := range h.position {
		h.position[i] = next()
	}
	h.nameKey, h.nameMul = next(), next()|1
	return h
}

// mixName returns the key of a name in a table. Engines choose names: with a mix that they know, one could choose names
// that collide, whose searches take time in proportion to their number and stop everybody.
func (h *Hasher) mixName(name uint64) uint64 { return fold(name^h.nameKey, h.nameMul) }

// Seed returns the parent of the first block of every prompt for this model, adapter and salt.
// Prompts that differ in any of them share no hash.
func (h *Hasher) Seed(model, adapter, salt string) Hash {
	acc := h.textKey
	for _, s := range [...]string{model, adapter, salt} {
		acc = fold(acc^uint64(len(s)), h.extraMul)
		for len(s) > 0 {
			var w uint64
			n := min(len(s), 8)
			for i := range n {
				w |= uint64(s[i]) << (8 * i)
			}
			acc = fold(acc^w, h.extraKey^acc>>32)
			s = s[n:]
		}
	}
	return Hash(fold(acc^h.blockKey, h.textKey|1))
}

// AppendHashes appends to dst the hashes of the full blocks of tokens; a partial block at the end has none. parent is a
// Seed, or the last hash of the part before tokens, so that the next turn of a conversation hashes only its new blocks.
// It appends nothing if blockSize is outside 1..MaxBlockSize.
func (h *Hasher) AppendHashes(dst []Hash, parent Hash, tokens []uint32, blockSize int) []Hash {
	return h.AppendHashesExtra(dst, parent, tokens, blockSize, nil, nil)
}

// AppendHashesExtra is AppendHashes for prompts with further content: extra[i] is the digest of what the engine mixes
// into block i in addition to its tokens, 0 for nothing; blocks past the end of extra have none. media are in order.
func (h *Hasher) AppendHashesExtra(dst []Hash, parent Hash, tokens []uint32, blockSize int, extra []uint64, media []Medium) []Hash {
	if blockSize < 1 || blockSize > MaxBlockSize {
		return dst
	}
	n := len(tokens) / blockSize
	dst = slices.Grow(dst, n)
	out := dst[len(dst) : len(dst)+n]
	if blockSize == 16 && len(extra) == 0 && len(media) == 0 {
		h.fillSixteen(out, parent, tokens)
		return dst[:len(dst)+n]
	}
	for i := range out {
		c := h.content(tokens[:blockSize])
		if i < len(extra) {
			c = h.withExtra(c, extra[i])
		}
		c, media = h.withMedia(c, media, i*blockSize, (i+1)*blockSize, 0)
		parent = h.chain(parent, c)
		out[i] = parent
		tokens = tokens[blockSize:]
	}
	return dst[:len(dst)+n]
}

// fillSixteen hashes len(out) blocks of sixteen tokens, the most common size. It combines sixteen and chain in one
// loop: the compiler does not inline a function of that size, and the call costs a third of the time.
func (h *Hasher) fillSixteen(out []Hash, parent Hash, tokens []uint32) {
	k := (*[8]uint64)(h.position[:])
	chainKey, blockKey := h.chainKey, h.blockKey
	p := uint64(parent)
	for i := range out {
		t := (*[16]uint32)(tokens)
		tokens = tokens[16:]
		c := fold((uint64(t[0])|uint64(t[1])<<32)^k[0], (uint64(t[2])|uint64(t[3])<<32)^k[1])
		c += fold((uint64(t[4])|uint64(t[5])<<32)^k[2], (uint64(t[6])|uint64(t[7])<<32)^k[3])
		c += fold((uint64(t[8])|uint64(t[9])<<32)^k[4], (uint64(t[10])|uint64(t[11])<<32)^k[5])
		c += fold((uint64(t[12])|uint64(t[13])<<32)^k[6], (uint64(t[14])|uint64(t[15])<<32)^k[7])
		p = fold(p^chainKey, c^blockKey)
		out[i] = Hash(p)
	}
}

// AppendContents chains hashes of blocks' content after parent, as AppendHashes does for tokens.
func (h *Hasher) AppendContents(dst []Hash, parent Hash, contents []uint64) []Hash {
	for _, c := range contents {
		parent = h.chain(parent, c)
		dst = append(dst, parent)
	}
	return dst
}

// fold is the multiply-mix: both halves of a 128-bit product, xored.
func fold(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	return hi ^ lo
}

// chain returns a block's hash, given its parent's hash and its own content.
func (h *Hasher) chain(parent Hash, content uint64) Hash {
	return Hash(fold(uint64(parent)^h.chainKey, content^h.blockKey))
}

// content hashes one block of at most MaxBlockSize tokens.
func (h *Hasher) content(tokens []uint32) uint64 {
	var sum uint64
	at := 0
	for ; len(tokens) >= 16; tokens, at = tokens[16:], at+8 {
		sum += h.sixteen((*[16]uint32)(tokens), at)
	}
	for ; len(tokens) >= 4; tokens, at = tokens[4:], at+2 {
		a := uint64(tokens[0]) | uint64(tokens[1])<<32
		b := uint64(tokens[2]) | uint64(tokens[3])<<32
		k := (*[2]uint64)(h.position[at:])
		sum += fold(a^k[0], b^k[1])
	}
	if len(tokens) > 0 {
		var t [4]uint32
		copy(t[:], tokens)
		sum += h.quad(t, at)
	}
	return sum
}

// sixteen returns the contribution of sixteen tokens to a content hash, of which the first is token 2*at of the block.
func (h *Hasher) sixteen(t *[16]uint32, at int) uint64 {
	k := (*[8]uint64)(h.position[at:])
	return fold((uint64(t[0])|uint64(t[1])<<32)^k[0], (uint64(t[2])|uint64(t[3])<<32)^k[1]) +
		fold((uint64(t[4])|uint64(t[5])<<32)^k[2], (uint64(t[6])|uint64(t[7])<<32)^k[3]) +
		fold((uint64(t[8])|uint64(t[9])<<32)^k[4], (uint64(t[10])|uint64(t[11])<<32)^k[5]) +
		fold((uint64(t[12])|uint64(t[13])<<32)^k[6], (uint64(t[14])|uint64(t[15])<<32)^k[7])
}

// quad returns the contribution of four tokens to a content hash, of which the first is token 2*at of the block.
func (h *Hasher) quad(t [4]uint32, at int) uint64 {
	a := uint64(t[0]) | uint64(t[1])<<32
	b := uint64(t[2]) | uint64(t[3])<<32
	return fold(a^h.position[at], b^h.position[at+1])
}

// withExtra mixes a digest of further content into a content hash.
func (h *Hasher) withExtra(content, extra uint64) uint64 {
	if extra == 0 {
		return content
	}
	return content + fold(extra^h.extraKey, h.extraMul)
}

// withMedia mixes the media that begin in tokens from..to into a content hash, and returns the
// others. before is the number of the block's tokens before from.
func (h *Hasher) withMedia(content uint64, media []Medium, from, to, before int) (uint64, []Medium) {
	for len(media) > 0 && media[0].At < to {
		at := uint64(media[0].At - from + before)
		content += fold((media[0].Digest+at*h.textKey)^h.extraKey, h.extraMul)
		media = media[1:]
	}
	return content, media
}
