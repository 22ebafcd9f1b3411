package bpe

import "math/bits"

// shortSize is the length in bytes of the longest token in the table of short tokens.
const shortSize = 7

// The key of a short word has its bytes in the lower 56 bits and its size in the three bits above.
const (
	keyBits = 8*shortSize + 3
	keyMask = 1<<keyBits - 1
	// keyMul is odd, so multiplying a key by it is invertible.
	keyMul = mulC & keyMask
	// shortWays is the number of slots of a bucket, which is one cache line.
	shortWays = 8
)

// shortTokens looks up words of up to shortSize bytes that are tokens, which are most words of most texts. An entry
// takes eight bytes. A lookup reads one cache line and compares no further memory.
//
// Invariant: the product of a key and keyMul, keyBits wide, is split into the bucket number (the upper bits) and a tag,
// so bucket and tag together determine the key. A slot holds tag, wholeBit, and id+1 in the lower idBits; 0 is empty.
// The slots of a bucket are filled cyclically from the one that the tag's highest bits select. overflow has a bit for
// each bucket that could not hold all of its tokens.
type shortTokens struct {
	slots    []uint64
	overflow []uint64
	tagBits  uint // of the product, below the bucket bits
	tagMask  uint64
	slotAt   uint // lowest bit of the slot number in the product
	idBits   uint
	idLimit  uint64
}

// shortKey returns the key of a word whose first eight bytes are x.
func shortKey(x uint64, size int) uint64 { return x&headMask[size&7] | uint64(size)<<(8*shortSize) }

// newShortTokens returns a table of the short tokens of v for which answers is true, that is, for
// which a word of the same bytes is this one token.
func newShortTokens(v *vocab, answers func(id uint32) bool) *shortTokens {
	n := 0
	for id := range v.has {
		if size := v.start[id+1] - v.start[id]; size > 0 && size <= shortSize {
			n++
		}
	}
	idBits := max(6, uint(bits.Len(uint(len(v.has))))) // the keys of a bucket then fit a slot
	// A slot has 64 bits for tag and id; the load factor is two fifths.
	bucketBits := max(keyBits+idBits-64, uint(bits.Len(uint(n*5/2/shortWays))))
	t := &shortTokens{
		slots: make([]uint64, shortWays<<bucketBits), overflow: make([]uint64, (1<<bucketBits+63)/64),
		tagBits: keyBits - bucketBits, tagMask: 1<<(keyBits-bucketBits) - 1, slotAt: keyBits - bucketBits - 3,
		idBits: idBits, idLimit: 1<<idBits - 1,
	}
	for id := range v.has {
		b := v.bytes(uint32(id))
		if len(b) > 0 && len(b) <= shortSize && answers(uint32(id)) {
			t.put(shortKey(tail(b), len(b)), uint32(id))
		}
	}
	return t
}

// home returns the first slot to try for a product, and its tag as stored in a slot.
func (t *shortTokens) home(product uint64) (slot int, tag uint64) {
	return int(product >> t.slotAt), product & t.tagMask << t.idBits
}

// find returns the token of a word by its key. sure is false if the bucket overflowed, so that the vocabulary must be searched.
func (t *shortTokens) find(key uint64) (id uint32, ok, sure bool) {
	product := key * keyMul & keyMask
	at, tag := t.home(product)
	for range shortWays {
		slot := t.slots[at]
		if slot == 0 {
			return 0, false, true
		}
		if d := slot ^ tag; d <= t.idLimit {
			return uint32(d) - 1, true, true
		}
		at = at&^(shortWays-1) | (at+1)&(shortWays-1)
	}
	bucket := product >> t.tagBits
	return 0, false, t.overflow[bucket/64]>>(bucket%64)&1 == 0
}

func (t *shortTokens) put(key uint64, id uint32) {
	product := key * keyMul & keyMask
	at, tag := t.home(product)
	for range shortWays {
		if t.slots[at] == 0 {
			t.slots[at] = tag | uint64(id+1)
			return
		}
		at = at&^(shortWays-1) | (at+1)&(shortWays-1)
	}
	bucket := product >> t.tagBits
	t.overflow[bucket/64] |= 1 << (bucket % 64)
}
