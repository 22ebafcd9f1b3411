package tokenizer

import "bytes"

// store remembers the ids of texts in a fixed amount of memory, forgetting the
// oldest first. A hit compares the text itself, so a prepared hash can cost time
// and never a wrong answer. It is not safe for concurrent use.
//
// Invariant: textEnd and idsEnd count all that was ever written; an entry is
// alive while its text and ids are within the last len(text) bytes and len(ids)
// ids.
type store struct {
	slots   []storeSlot
	text    []byte
	ids     []uint32
	textEnd uint64
	idsEnd  uint64
}

type storeSlot struct {
	hash      uint64
	text, ids uint64 // positions among all that was ever written
	textLen   uint32
	idsLen    uint32
}

// storeWays is how many slots share a hash bucket.
const storeWays = 2

// newStore takes sizes that are powers of two.
func newStore(slots, text, ids int) *store {
	return &store{slots: make([]storeSlot, slots), text: make([]byte, text), ids: make([]uint32, ids)}
}

// get is the ids of key, valid until the next put.
func (c *store) get(hash uint64, key []byte) ([]uint32, bool) {
	at := hash & uint64(len(c.slots)-1) &^ (storeWays - 1)
	for i := at; i < at+storeWays; i++ {
		e := &c.slots[i]
		if e.hash != hash || int(e.textLen) != len(key) ||
			c.textEnd-e.text > uint64(len(c.text)) || c.idsEnd-e.ids > uint64(len(c.ids)) {
			continue
		}
		from := int(e.text & uint64(len(c.text)-1))
		if !bytes.Equal(c.text[from:from+len(key)], key) {
			continue
		}
		from = int(e.ids & uint64(len(c.ids)-1))
		return c.ids[from : from+int(e.idsLen)], true
	}
	return nil, false
}

// put remembers ids for key, unless they are more than a quarter of the store.
func (c *store) put(hash uint64, key []byte, ids []uint32) {
	if len(key) == 0 || len(key) > len(c.text)/4 || len(ids) > len(c.ids)/4 {
		return
	}
	at := hash & uint64(len(c.slots)-1) &^ (storeWays - 1)
	e := &c.slots[at]
	for i := at + 1; i < at+storeWays; i++ {
		if c.slots[i].text < e.text {
			e = &c.slots[i]
		}
	}
	c.textEnd = skipWrap(c.textEnd, len(key), len(c.text))
	c.idsEnd = skipWrap(c.idsEnd, len(ids), len(c.ids))
	*e = storeSlot{hash: hash, text: c.textEnd, ids: c.idsEnd, textLen: uint32(len(key)), idsLen: uint32(len(ids))}
	copy(c.text[c.textEnd&uint64(len(c.text)-1):], key)
	copy(c.ids[c.idsEnd&uint64(len(c.ids)-1):], ids)
	c.textEnd += uint64(len(key))
	c.idsEnd += uint64(len(ids))
}

// skipWrap moves a position to the next turn of the ring if n entries would not
// fit before its end.
func skipWrap(at uint64, n, size int) uint64 {
	if left := uint64(size) - at&uint64(size-1); left < uint64(n) {
		at += left
	}
	return at
}

func (c *store) reset() {
	clear(c.slots)
}
