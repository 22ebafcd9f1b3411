package routing

import (
	"crypto/sha256"
	"encoding/binary"

	"github.com/kvlane/kvlane/kvindex"
)

// Key identifies a conversation by 128 bits of hash, so that the table needs no strings. The zero Key is none.
type Key struct {
	Hi uint64 `json:"hi"`
	Lo uint64 `json:"lo"`
}

// keyOf returns the key of an id; "" gives the zero Key. Clients choose ids; without the seed they cannot construct ids
// that collide in the table.
func (c *Config) keyOf(id string) Key {
	if id == "" {
		return Key{}
	}
	text := append(binary.LittleEndian.AppendUint64(make([]byte, 0, 128), c.HashSeed), id...)
	sum := sha256.Sum256(text)
	return Key{Hi: binary.LittleEndian.Uint64(sum[:]), Lo: binary.LittleEndian.Uint64(sum[8:]) | 1}
}

// generatedKey returns the key of the n-th conversation without an id on a node.
func generatedKey(node, n uint64) Key {
	return Key{Hi: mix(node ^ 0x6E6F6465), Lo: mix(n^mix(node)) | 1}
}

// entry is one conversation. Invariant: an entry in use is in the table, in the LRU
// list and, if it has a slot, in that slot's list.
type entry struct {
	key Key
	// slot is the target that the conversation is bound to, NoSlot for none.
	slot kvindex.Slot
	// newer and older link the LRU list, left and right the list of the slot.
	newer, older, left, right uint32
	// path is the number of its last step, depth how many steps it has.
	path, depth uint32
	// turns is the number of turns that countTurn has counted, at most countedTurns.
	turns uint32
}

// step is one block of one conversation's prompt. A block hash covers all blocks before it, so the steps of all
// conversations are a trie: its nodes are the distinct hashes.
type step struct {
	hash uint64
	conv uint32
	// up is the previous step of the same conversation; next and prev link the steps of equal hash, newest first.
	up, next, prev uint32
}

// maxSiblings bounds the conversations that are tried for one block. If none of the
// newest maxSiblings has an eligible target, a shorter prefix is tried.
const maxSiblings = 1024

// conversations is an LRU table of conversations, bounded in number and in steps. An explicit id takes 48 bytes and a
// table place, a block of an implicit conversation 24 bytes and a place.
type conversations struct {
	max, maxSteps  int
	entries        []entry
	free           []uint32
	byKey          table
	newest, oldest uint32
	bySlot         []uint32
	bound          []int64 // number of conversations in each list of bySlot

	steps     []step
	freeSteps []uint32
	byHash    table
	generated uint64
}

func newConversations(limit, maxSteps int) conversations {
	return conversations{max: limit, maxSteps: maxSteps, newest: none, oldest: none}
}

// size is the number of conversations.
func (c *conversations) size() int { return c.byKey.size }

// pathSteps is the number of steps of all conversations.
func (c *conversations) pathSteps() int { return len(c.steps) - len(c.freeSteps) }

func (c *conversations) find(k Key) uint32 {
	if k == (Key{}) {
		return none
	}
	h := uint32(k.Hi)
	for at := c.byKey.first(h); c.byKey.places[at].entry != none; at = c.byKey.next(at) {
		if p := c.byKey.places[at]; p.hash == h && c.entries[p.entry].key == k {
			return p.entry
		}
	}
	return none
}

// put adds a conversation that is not in the table and returns its entry.
func (c *conversations) put(k Key, slot kvindex.Slot) uint32 {
	for c.size() >= c.max {
		c.remove(c.oldest)
	}
	var i uint32
	if n := len(c.free); n > 0 {
		i, c.free = c.free[n-1], c.free[:n-1]
	} else {
		i = uint32(len(c.entries))
		c.entries = append(c.entries, entry{})
	}
	c.entries[i] = entry{key: k, slot: NoSlot, newer: none, older: none, left: none, right: none, path: none}
	c.byKey.insert(uint32(k.Hi), i)
	c.linkNewest(i)
	c.bind(i, slot)
	return i
}

// bind binds a conversation to a slot, NoSlot for none.
func (c *conversations) bind(i uint32, slot kvindex.Slot) {
	e := &c.entries[i]
	if e.slot == slot {
		return
	}
	if e.slot != NoSlot {
		c.bound[e.slot]--
		if e.left != none {
			c.entries[e.left].right = e.right
		} else {
			c.bySlot[e.slot] = e.right
		}
		if e.right != none {
			c.entries[e.right].left = e.left
		}
	}
	e.slot, e.left, e.right = slot, none, none
	if slot == NoSlot {
		return
	}
	for int(slot) >= len(c.bySlot) {
		c.bySlot, c.bound = append(c.bySlot, none), append(c.bound, 0)
	}
	c.bound[slot]++
	if e.right = c.bySlot[slot]; e.right != none {
		c.entries[e.right].left = i
	}
	c.bySlot[slot] = i
}

// Only the first countedTurns turns of a conversation, with prompts of at least countedPrompt tokens, count for
// pool.Returning. Otherwise a client with one id, or with tiny prompts, could set the share for all.
const (
	countedTurns  = 32
	countedPrompt = 256
)

// countTurn counts a turn and returns its Booking.Turn. The first turn that counts is the new one, so a short prompt
// before it does not make it a returning turn.
func (c *conversations) countTurn(i uint32, prompt int64) (turn uint8) {
	if e := &c.entries[i]; prompt >= countedPrompt && e.turns < countedTurns {
		e.turns++
		turn = uint8(min(e.turns, 2))
	}
	return turn
}

// touch makes a conversation the most recently used one.
func (c *conversations) touch(i uint32) {
	if c.newest != i {
		c.unlink(i)
		c.linkNewest(i)
	}
}

func (c *conversations) linkNewest(i uint32) {
	e := &c.entries[i]
	e.newer, e.older = none, c.newest
	if c.newest != none {
		c.entries[c.newest].newer = i
	} else {
		c.oldest = i
	}
	c.newest = i
}

func (c *conversations) unlink(i uint32) {
	e := &c.entries[i]
	if e.newer != none {
		c.entries[e.newer].older = e.older
	} else {
		c.newest = e.older
	}
	if e.older != none {
		c.entries[e.older].newer = e.newer
	} else {
		c.oldest = e.newer
	}
}

func (c *conversations) remove(i uint32) {
	c.setPath(i, nil)
	c.bind(i, NoSlot)
	c.unlink(i)
	h := uint32(c.entries[i].key.Hi)
	at := c.byKey.first(h)
	for c.byKey.places[at].entry != i {
		at = c.byKey.next(at)
	}
	c.byKey.removeAt(at)
	c.entries[i] = entry{}
	c.free = append(c.free, i)
}

// removeSlot removes every conversation that is bound to the slot.
func (c *conversations) removeSlot(slot kvindex.Slot) {
	if int(slot) >= len(c.bySlot) {
		return
	}
	for c.bySlot[slot] != none {
		c.remove(c.bySlot[slot])
	}
}

// setPath replaces the blocks of a conversation; common blocks stay.
func (c *conversations) setPath(i uint32, blocks []uint64) {
	if len(blocks) > c.maxSteps {
		blocks = blocks[:c.maxSteps]
	}
	e := &c.entries[i]
	for int(e.depth) > len(blocks) {
		c.popStep(i)
	}
	// A block hash covers its ancestors, so if two blocks are equal, all blocks before them are too.
	for e.depth > 0 && c.steps[e.path].hash != blocks[e.depth-1] {
		c.popStep(i)
	}
	for _, h := range blocks[e.depth:] {
		c.pushStep(i, h)
	}
	for c.pathSteps() > c.maxSteps && c.oldest != i {
		c.remove(c.oldest)
	}
}

func (c *conversations) pushStep(i uint32, hash uint64) {
	var s uint32
	if n := len(c.freeSteps); n > 0 {
		s, c.freeSteps = c.freeSteps[n-1], c.freeSteps[:n-1]
	} else {
		s = uint32(len(c.steps))
		c.steps = append(c.steps, step{})
	}
	e := &c.entries[i]
	c.steps[s] = step{hash: hash, conv: i, up: e.path, next: none, prev: none}
	if at := c.node(hash); c.byHash.places[at].entry != none {
		head := c.byHash.places[at].entry
		c.steps[s].next = head
		c.steps[head].prev = s
		c.byHash.places[at].entry = s
	} else {
		c.byHash.insert(fold(hash), s)
	}
	e.path = s
	e.depth++
}

func (c *conversations) popStep(i uint32) {
	e := &c.entries[i]
	s := e.path
	st := c.steps[s]
	if st.next != none {
		c.steps[st.next].prev = st.prev
	}
	switch {
	case st.prev != none:
		c.steps[st.prev].next = st.next
	case st.next != none:
		c.byHash.places[c.node(st.hash)].entry = st.next
	default:
		c.byHash.removeAt(c.node(st.hash))
	}
	e.path = st.up
	e.depth--
	c.freeSteps = append(c.freeSteps, s)
}

// node returns the place of a block hash, or the free place for it.
func (c *conversations) node(hash uint64) int {
	at := c.byHash.first(fold(hash))
	for {
		p := c.byHash.places[at]
		if p.entry == none || (p.hash == fold(hash) && c.steps[p.entry].hash == hash) {
			return at
		}
		at = c.byHash.next(at)
	}
}

// deepest returns the conversation with a valid slot that shares the most blocks with a prompt, and their number; none
// if that is below least.
func (c *conversations) deepest(blocks []uint64, least int, valid func(kvindex.Slot) bool) (uint32, int) {
	for depth := len(blocks); depth >= max(least, 1); depth-- {
		s := c.byHash.places[c.node(blocks[depth-1])].entry
		for n := 0; s != none && n < maxSiblings; n++ {
			if i := c.steps[s].conv; c.entries[i].slot != NoSlot && valid(c.entries[i].slot) {
				return i, depth
			}
			s = c.steps[s].next
		}
	}
	return none, 0
}

func fold(hash uint64) uint32 { return uint32(hash ^ hash>>32) }
