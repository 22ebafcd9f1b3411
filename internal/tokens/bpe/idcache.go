package bpe

import (
	"bytes"
	"encoding/binary"
	"math"
	"math/bits"
	"math/rand/v2"
)

// store caches the ids of texts in a fixed amount of memory and evicts the oldest first. A hit compares the text
// itself, so a hash collision costs time but never causes a wrong result. It is not safe for concurrent use.
//
// Invariant: textEnd and idsEnd count everything written since the last clear; an entry is live while its text
// and ids are within the last len(text) bytes and len(ids) ids.
type store struct {
	slots   []storeSlot
	text    []byte
	ids     []uint32
	textEnd uint64
	idsEnd  uint64
}

// storeSlot is 16 bytes, so that a bucket is a cache line.
type storeSlot struct {
	hash            uint32 // its upper half
	text, ids       uint32 // positions in the sequence of everything written since the last clear
	textLen, idsLen uint16
}

const (
	// storeWays is the number of slots per hash bucket. With two, one text in ten found its bucket full when the memo was.
	storeWays = 4
	storeTurn = 1 << 31 // the position at which everything is cleared: those of slots have 32 bits
)

// newStore requires sizes that are powers of two.
func newStore(slots, text, ids int) *store {
	return &store{slots: make([]storeSlot, slots), text: make([]byte, text), ids: make([]uint32, ids)}
}

// bucket returns the slots that a text with this hash may be in.
func (c *store) bucket(hash uint64) *[storeWays]storeSlot {
	return (*[storeWays]storeSlot)(c.slots[hash&uint64(len(c.slots)-1)&^(storeWays-1):])
}

// get returns the ids of key, valid until the next put.
func (c *store) get(hash uint64, key []byte) ([]uint32, bool) {
	bucket := c.bucket(hash)
	for i := range bucket {
		e := &bucket[i]
		text, ids := int(e.text)&(len(c.text)-1), int(e.ids)&(len(c.ids)-1)
		if e.hash == uint32(hash>>32) && int(e.textLen) == len(key) &&
			c.textEnd-uint64(e.text) <= uint64(len(c.text)) && c.idsEnd-uint64(e.ids) <= uint64(len(c.ids)) &&
			bytes.Equal(c.text[text:text+len(key)], key) {
			return c.ids[ids : ids+int(e.idsLen)], true
		}
	}
	return nil, false
}

// roomFor reports whether a text of n bytes and as many ids fits before the first eviction for space.
func (c *store) roomFor(n int) bool {
	return c.textEnd+uint64(n) <= uint64(len(c.text)) && c.idsEnd+uint64(n) <= uint64(len(c.ids))
}

// put stores ids for key, unless a slot has no room for their number or they exceed a quarter of the store.
func (c *store) put(hash uint64, key []byte, ids []uint32) {
	if len(key) == 0 || len(key) > min(len(c.text)/4, math.MaxUint16) || len(ids) > min(len(c.ids)/4, math.MaxUint16) {
		return
	}
	if max(c.textEnd, c.idsEnd) >= storeTurn {
		clear(c.slots)
		c.textEnd, c.idsEnd = 0, 0
	}
	bucket := c.bucket(hash)
	e := &bucket[0]
	for i := range bucket {
		if bucket[i].text < e.text {
			e = &bucket[i]
		}
	}
	c.textEnd = skipWrap(c.textEnd, len(key), len(c.text))
	c.idsEnd = skipWrap(c.idsEnd, len(ids), len(c.ids))
	*e = storeSlot{hash: uint32(hash >> 32), text: uint32(c.textEnd), ids: uint32(c.idsEnd), textLen: uint16(len(key)), idsLen: uint16(len(ids))}
	copy(c.text[c.textEnd&uint64(len(c.text)-1):], key)
	copy(c.ids[c.idsEnd&uint64(len(c.ids)-1):], ids)
	c.textEnd += uint64(len(key))
	c.idsEnd += uint64(len(ids))
}

// skipWrap advances a position to the next turn of the ring if n entries do not fit before its end.
func skipWrap(at uint64, n, size int) uint64 {
	if left := uint64(size) - at&uint64(size-1); left < uint64(n) {
		at += left
	}
	return at
}

// Multipliers of the word hash, after wyhash.
const (
	mulA = 0xa0761d6478bd642f
	mulB = 0xe7037ed1a0b428db
	mulC = 0x9e3779b97f4a7c15
)

// The words are random per process: a file whose tokens begin with a known one (the product is 0) would put all of them in
// one place of the vocabulary. Caches and the table of short tokens have known words too, but buckets of a fixed size:
// chosen text can evict others' entries of caches, no more. Words affect only time: every hit compares the bytes.
var hashSeed, hashA, hashB = rand.Uint64(), rand.Uint64(), rand.Uint64()

func fold(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	return hi ^ lo
}

// hashBytes hashes a word or a paragraph.
func hashBytes(b []byte) uint64 {
	n := len(b)
	h := hashSeed ^ uint64(n)*mulC
	switch {
	case n > 16:
		tail := b[n-16:]
		for len(b) > 16 {
			h = fold(binary.LittleEndian.Uint64(b)^hashA, binary.LittleEndian.Uint64(b[8:16])^h)
			b = b[16:]
		}
		return fold(fold(binary.LittleEndian.Uint64(tail)^hashB, binary.LittleEndian.Uint64(tail[8:])^h), mulC)
	case n >= 8:
		return fold(fold(binary.LittleEndian.Uint64(b)^hashA, binary.LittleEndian.Uint64(b[n-8:])^h), hashB)
	case n >= 4:
		x := uint64(binary.LittleEndian.Uint32(b))<<32 | uint64(binary.LittleEndian.Uint32(b[n-4:]))
		return fold(fold(x^hashA, h), hashB)
	case n > 0:
		x := uint64(b[0])<<16 | uint64(b[n>>1])<<8 | uint64(b[n-1])
		return fold(fold(x^hashA, h), hashB)
	}
	return h
}
