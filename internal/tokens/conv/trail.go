package conv

import (
	"bytes"
	"encoding/binary"
	"hash/maphash"
	"slices"
	"sort"
)

// trail is the part of a chat or prompt that later ones may share: a text up to its last mark. The
// entry's keys are the digests of its leading blocks: keys[i] is that of the first i+1.
type trail struct {
	start   int    // of a chat: where its list of messages begins
	marks   []mark // the last one is at the end of text
	ids     []uint32
	hashes  hashes
	readers int // callers between follow and leave
}

// mark is an offset: another text that is equal up to it may use the results of this one up to there. In a chat it is the
// end of a message, in a prompt the end of a special token that is recognized whatever text follows.
type mark struct {
	end int // offset in the text
	at  int // of a chat: where the message begins; of a prompt: the number of ids before end
}

// known is the state of an entry when it was found, which may be read without the lock until leave.
type known struct {
	*entry

	start int
	text  []byte
	marks []mark
	ids   []uint32
	again int // number of leading blocks that were seen before, cached or not
}

const (
	// block is the number of bytes per digest. Shorter texts are not kept: tokenizing them costs less than a lookup.
	block = 2 << 10
	// maxBlocks bounds the digests of a text; the remainder of the text is not kept.
	maxBlocks = 4096
	// freshText is the maximum number of bytes of a text that are kept at its first occurrence; the
	// rest is kept when the text occurs again, which most long prompts never do.
	freshText = 64 << 10
)

// digest appends the digest of each prefix of whole blocks.
func (c *Cache) digest(dst []uint64, space uint64, text []byte) []uint64 {
	h := space * 0x9e3779b97f4a7c15
	for i := 0; i+block <= len(text) && len(dst) < maxBlocks; i += block {
		h = (h ^ maphash.Bytes(c.seed, text[i:i+block])) * 0x9e3779b97f4a7c15
		h ^= h >> 32
		dst = append(dst, h)
	}
	return dst
}

// follow returns the entry that shares the most blocks with a text, or none. The caller must call leave.
func (c *Cache) follow(k kind, space uint64, digests []uint64) (f known) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, d := range digests {
		if c.again(d) {
			f.again = i + 1
		}
	}
	for _, d := range slices.Backward(digests) {
		if e := c.get(k, space, d); e != nil {
			e.readers++
			f.entry, f.start, f.text, f.marks, f.ids = e, e.start, e.text, e.marks, e.ids
			break
		}
	}
	return f
}

// leave releases what follow returned.
func (c *Cache) leave(f *known) {
	if f.entry == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	f.readers--
	c.reclaim(f.entry)
}

// reclaim recycles the memory of an evicted chat or prompt without readers.
func (c *Cache) reclaim(e *entry) {
	if e.place == nil && e.readers == 0 && (e.kind == chats || e.kind == prompts) {
		c.texts.Give(e.text)
		c.ids.Give(e.ids)
		e.text, e.ids = nil, nil
	}
}

// shared returns the marks up to which the text equals the known one.
func (f *known) shared(text []byte) []mark {
	n := commonPrefix(f.text, text)
	return f.marks[:sort.Search(len(f.marks), func(i int) bool { return f.marks[i].end > n })]
}

func commonPrefix(a, b []byte) int {
	n := min(len(a), len(b))
	i := 0
	for i+1024 <= n && bytes.Equal(a[i:i+1024], b[i:i+1024]) {
		i += 1024
	}
	for i+8 <= n && binary.LittleEndian.Uint64(a[i:]) == binary.LittleEndian.Uint64(b[i:]) {
		i += 8
	}
	for i < n && a[i] == b[i] {
		i++
	}
	return i
}

// keep stores a text up to the last of the marks fresh, which follow the marks that it shares with f: it extends f's
// entry if that ends at the last shared mark, or else adds the entry e. ids are those of the text, nil for a chat. It
// returns the entry that has the text, and the mark up to which it has it; nil if nothing is kept.
func (c *Cache) keep(e *entry, f *known, shared, fresh []mark, text []byte, ids []uint32, digests []uint64) (*entry, mark) {
	last := mark{}
	if len(shared) > 0 {
		last = shared[len(shared)-1]
	}
	if len(text)-last.end > freshText {
		// What was seen before may extend into the block after the last whole one.
		fresh = fresh[:sort.Search(len(fresh), func(i int) bool { return f.again == 0 || fresh[i].end > (f.again+1)*block })]
	}
	if len(fresh) == 0 {
		return f.entry, last
	}
	from := last
	last = fresh[len(fresh)-1]
	if last.end > maxBlocks*block || e.kind == chats && int64(last.end) > c.limit.Load()/textShare {
		return f.entry, from
	}
	digests, ids = digests[:min(len(digests), last.end/block)], ids[:min(len(ids), last.at)]
	if f.entry != nil && len(shared) == len(f.marks) && c.grow(f.entry, from, fresh, text, ids, digests) {
		return f.entry, last
	}
	if len(digests) == 0 {
		return f.entry, from
	}
	e.marks = append(append(make([]mark, 0, len(shared)+len(fresh)+8), shared...), fresh...)
	e.keys = slices.Clone(digests)
	c.mu.Lock()
	e.text = c.texts.Take(roomy(last.end))
	if ids != nil {
		e.ids = c.ids.Take(roomy(len(ids)))
	}
	c.mu.Unlock()
	e.text = append(slices.Grow(e.text, roomy(last.end)), text[:last.end]...)
	if ids != nil {
		e.ids = append(slices.Grow(e.ids, roomy(len(ids))), ids...)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if f.entry != nil {
		e.hashes = f.hashes.upTo(from.at, len(ids))
	}
	c.add(e)
	return e, last
}

// roomy returns a capacity that leaves room for another turn.
func roomy(n int) int { return n + n/8 + 256 }

// grow extends an entry that ends at from; false if another goroutine was faster.
func (c *Cache) grow(e *entry, from mark, fresh []mark, text []byte, ids []uint32, digests []uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(e.text) != from.end || e.place == nil {
		return false
	}
	e.text = append(e.text, text[from.end:fresh[len(fresh)-1].end]...)
	if ids != nil {
		e.ids = append(e.ids, ids[from.at:]...)
	}
	e.marks = append(e.marks, fresh...)
	had := len(e.keys)
	e.keys = append(e.keys, digests[min(had, len(digests)):]...)
	c.extend(e, had)
	return true
}
