package bpe

import (
	"bytes"
	"container/list"
	"encoding/binary"
	"hash/maphash"
	"slices"
	"sort"
	"sync"

	"github.com/kvlane/kvlane/internal/tokens/freelist"
)

// Cache caches the ids of whole prompts, so that the next turn of a conversation costs only its
// own text. A prompt reuses the ids up to the last hard cut that it shares with a cached one: the
// end of a special token whose match no following text can change. Reused text is compared byte
// by byte, so a hash collision cannot cause wrong ids. It is safe for concurrent use and bounded
// in bytes; the least recently used prompts are evicted first.
type Cache struct {
	t    *Tokenizer
	max  int
	seed maphash.Seed

	mu     sync.Mutex
	blocks map[uint64]*conversation // digest of a prompt's first n blocks -> a conversation that has them
	recent *list.List               // of *conversation, most recently used first
	bytes  int
	once   [onceSize]uint64    // digests seen before, by their low bits
	texts  freelist.List[byte] // of evicted conversations
	ids    freelist.List[uint32]
}

// conversation is a prompt up to its last hard cut.
//
// Invariant: text, ids and cuts are append-only, so a slice taken under the lock stays readable
// after it is released. The last cut is the end of text and ids. digests[i] is the digest of the
// first i+1 blocks. An evicted conversation has a nil place; its text and ids are recycled when
// its last reader leaves.
type conversation struct {
	text    []byte
	ids     []uint32
	cuts    []hardCut
	digests []uint64
	values  map[ValuesKey][]uint64
	size    int
	place   *list.Element
	readers int // Encode calls between find and leave
}

// hardCut is an offset in a text and the number of ids before it.
type hardCut struct{ text, ids int }

const (
	// prefixBlock is the number of bytes per digest. Shorter prompts are not kept: encoding them
	// costs less than a lookup saves.
	prefixBlock = 2048
	// cutDistance is the least number of bytes between two recorded cuts.
	cutDistance = 256
	// conversationCost is the approximate overhead of a conversation, in bytes, in addition to
	// its slices.
	conversationCost = 512
	// freshText is the maximum text, in bytes, that is kept at its first occurrence. More of it
	// is kept when it occurs again: most long prompts never do.
	freshText = 64 << 10
	onceSize  = 1 << 14
	// maxBlocks bounds the digests of a prompt; the remainder of the prompt is not kept.
	maxBlocks = 4096
)

// NewCache returns a cache of at most maxBytes, an eighth of which holds recycled memory of
// evicted conversations.
func NewCache(t *Tokenizer, maxBytes int) *Cache {
	dropped := maxBytes / 8
	return &Cache{t: t, max: maxBytes - dropped, seed: maphash.MakeSeed(), blocks: map[uint64]*conversation{}, recent: list.New(),
		texts: freelist.List[byte]{Limit: dropped / 2}, ids: freelist.List[uint32]{Limit: dropped / 2 / 4}}
}

// Prefix describes what the cache holds of a prompt that was just encoded. The zero value holds
// nothing.
type Prefix struct {
	// Reused is the number of leading ids that came from the cache.
	Reused int
	// Kept is the number of leading ids that the cache now holds.
	Kept int

	cache *Cache
	entry *conversation
}

// Encode is Tokenizer.Encode through the cache.
func (c *Cache) Encode(dst []uint32, text string, addSpecial bool) ([]uint32, Prefix, error) {
	return c.EncodeUntil(nil, dst, text, addSpecial)
}

// EncodeUntil is Tokenizer.EncodeUntil through the cache.
func (c *Cache) EncodeUntil(stop <-chan struct{}, dst []uint32, text string, addSpecial bool) ([]uint32, Prefix, error) {
	if len(text) < prefixBlock {
		ids, err := c.t.EncodeUntil(stop, dst, text, addSpecial)
		return ids, Prefix{}, err
	}
	w := c.t.acquire(stop)
	if w == nil {
		return dst, Prefix{}, ErrStopped
	}
	defer c.t.release(w)
	w.digests = c.digest(w.digests[:0], text, addSpecial)
	entry, known, again := c.find(w.digests)
	defer c.leave(entry)
	cut := known.reusable(text)
	if err := checkText(text[cut.text:]); err != nil {
		return dst, Prefix{}, err
	}
	if dst == nil {
		dst = make([]uint32, 0, cut.ids+(len(text)-cut.text)/3+16)
	}
	base := len(dst)
	if cut.text > 0 {
		dst = append(dst, known.ids[:cut.ids]...)
	} else if addSpecial {
		dst = append(dst, c.t.before...)
	}
	w.cuts = w.cuts[:0]
	w.cutBase, w.lastCut, w.recording = base, cut.text, true
	dst, err := w.encode(dst, text, cut.text)
	w.recording = false
	if err != nil {
		return dst, Prefix{}, err
	}
	p := Prefix{Reused: cut.ids, Kept: cut.ids, cache: c, entry: entry}
	if len(text)-cut.text > freshText {
		// The text seen before may extend into the block after the known ones.
		w.cuts = w.cuts[:sort.Search(len(w.cuts), func(i int) bool { return again == 0 || w.cuts[i].text > (again+1)*prefixBlock })]
	}
	if n := len(w.cuts); n > 0 && w.cuts[n-1].text <= maxBlocks*prefixBlock {
		p.Kept = w.cuts[n-1].ids
		p.entry = c.keep(w, entry, known, cut, text, dst[base:])
	}
	if addSpecial {
		dst = append(dst, c.t.after...)
	}
	return dst, p, nil
}

// digest appends the digest of each prefix of whole blocks.
func (c *Cache) digest(dst []uint64, text string, addSpecial bool) []uint64 {
	var h uint64
	if addSpecial {
		h = mulB
	}
	for i := 0; i+prefixBlock <= len(text) && len(dst) < maxBlocks; i += prefixBlock {
		h = fold(h^maphash.String(c.seed, text[i:i+prefixBlock]), mulA)
		dst = append(dst, h)
	}
	return dst
}

// snapshot is the part of a conversation that may be read without the lock.
type snapshot struct {
	text []byte
	ids  []uint32
	cuts []hardCut
}

// find returns the conversation that shares the most blocks, and the number of leading blocks
// that were seen before, kept or not. The caller must call leave.
func (c *Cache) find(digests []uint64) (e *conversation, known snapshot, again int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, d := range digests {
		slot := &c.once[d%onceSize]
		if *slot == d {
			again = i + 1
		}
		*slot = d
	}
	for _, d := range slices.Backward(digests) {
		if e := c.blocks[d]; e != nil {
			c.recent.MoveToFront(e.place)
			e.readers++
			return e, snapshot{e.text, e.ids, e.cuts}, again
		}
	}
	return nil, snapshot{}, again
}

// leave releases the conversation returned by find; its snapshot must not be read afterwards.
func (c *Cache) leave(e *conversation) {
	if e == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	e.readers--
	c.reclaim(e)
}

// reclaim recycles the memory of an evicted conversation without readers.
func (c *Cache) reclaim(e *conversation) {
	if e.place == nil && e.readers == 0 {
		c.texts.Give(e.text)
		c.ids.Give(e.ids)
		e.text, e.ids = nil, nil
	}
}

// reusable returns the last cut up to which the texts are equal.
func (s snapshot) reusable(text string) hardCut {
	n := commonPrefix(s.text, bytesOf(text))
	i := sort.Search(len(s.cuts), func(i int) bool { return s.cuts[i].text > n })
	if i == 0 {
		return hardCut{}
	}
	return s.cuts[i-1]
}

func commonPrefix(a, b []byte) int {
	n := min(len(a), len(b))
	a, b = a[:n], b[:n]
	if bytes.Equal(a, b) {
		return n
	}
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

// keep stores text up to the last cut of w.cuts. It extends the reused conversation if that ends
// at cut, else it creates another.
func (c *Cache) keep(enc *encoder, entry *conversation, known snapshot, cut hardCut, text string, ids []uint32) *conversation {
	last := enc.cuts[len(enc.cuts)-1]
	if entry != nil && cut.text == len(known.text) && cut.text > 0 {
		if c.extend(enc, entry, cut, last, text, ids) {
			return entry
		}
	}
	e := &conversation{cuts: make([]hardCut, 0, len(enc.cuts)+8)}
	c.mu.Lock()
	e.text, e.ids = c.texts.Take(roomy(last.text)), c.ids.Take(roomy(last.ids))
	c.mu.Unlock()
	e.text = append(slices.Grow(e.text, roomy(last.text)), text[:last.text]...)
	e.ids = append(slices.Grow(e.ids, roomy(last.ids)), ids[:last.ids]...)
	for _, k := range known.cuts {
		if k.text <= cut.text {
			e.cuts = append(e.cuts, k)
		}
	}
	e.cuts = append(e.cuts, enc.cuts...)
	e.digests = append(e.digests, enc.digests[:min(len(enc.digests), last.text/prefixBlock)]...)
	c.mu.Lock()
	defer c.mu.Unlock()
	if entry != nil {
		for key, values := range entry.values {
			if n := min(len(values), cut.ids/key.Stride); n > 0 {
				e.setValues(key, append([]uint64(nil), values[:n]...))
			}
		}
	}
	e.place = c.recent.PushFront(e)
	c.register(e, 0)
	return e
}

// roomy returns a capacity that leaves room for another turn.
func roomy(n int) int { return n + n/8 + 256 }

// extend grows a conversation from cut to last; false if another goroutine was faster.
func (c *Cache) extend(enc *encoder, e *conversation, cut, last hardCut, text string, ids []uint32) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(e.text) != cut.text || e.place == nil {
		return false
	}
	e.text = append(e.text, text[cut.text:last.text]...)
	e.ids = append(e.ids, ids[cut.ids:last.ids]...)
	e.cuts = append(e.cuts, enc.cuts...)
	from := len(e.digests)
	if to := min(len(enc.digests), last.text/prefixBlock); to > from {
		e.digests = append(e.digests, enc.digests[from:to]...)
	}
	c.register(e, from)
	return true
}

// register indexes the digests of e from index from on, counts its bytes and evicts the oldest
// conversations.
func (c *Cache) register(e *conversation, from int) {
	for _, d := range e.digests[from:] {
		c.blocks[d] = e
	}
	c.resize(e)
	c.makeRoom()
}

func (c *Cache) makeRoom() {
	for c.bytes > c.max && c.recent.Len() > 0 {
		c.drop(c.recent.Back().Value.(*conversation)) //nolint:forcetypeassert // the list holds nothing else
	}
}

func (c *Cache) resize(e *conversation) {
	size := conversationCost + cap(e.text) + 4*cap(e.ids) + 16*cap(e.cuts) + 40*cap(e.digests)
	for _, v := range e.values {
		size += 8*cap(v) + 64
	}
	c.bytes += size - e.size
	e.size = size
}

func (c *Cache) drop(e *conversation) {
	c.recent.Remove(e.place)
	e.place = nil
	c.bytes -= e.size
	e.size = 0
	for _, d := range e.digests {
		if c.blocks[d] == e {
			delete(c.blocks, d)
		}
	}
	c.reclaim(e)
}

// Bytes returns the memory in use, in bytes.
func (c *Cache) Bytes() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bytes
}

// ValuesKey identifies a list of values that a caller derives from ids, such as chained block
// hashes: value i depends only on the first (i+1)*Stride ids and on Seed. Stride must be
// positive.
type ValuesKey struct {
	Seed   uint64
	Stride int
}

// maxValues bounds the number of lists per conversation.
const maxValues = 8

// Values appends the values stored under key for the ids of this prompt. They cover its first
// n*Stride ids, n being the number of values appended.
func (p Prefix) Values(dst []uint64, key ValuesKey) []uint64 {
	if p.entry == nil {
		return dst
	}
	p.cache.mu.Lock()
	v := p.entry.values[key]
	p.cache.mu.Unlock()
	return append(dst, v[:min(len(v), p.Kept/key.Stride)]...)
}

// SetValues stores values derived from this prompt's ids. Values for ids that the cache does not
// keep are dropped.
func (p Prefix) SetValues(key ValuesKey, values []uint64) {
	if p.entry == nil {
		return
	}
	n := min(len(values), p.Kept/key.Stride)
	p.cache.mu.Lock()
	defer p.cache.mu.Unlock()
	e := p.entry
	if have := e.values[key]; n <= len(have) || e.place == nil || have == nil && len(e.values) >= maxValues {
		return
	}
	have := e.values[key]
	if have == nil {
		have = append(make([]uint64, 0, roomy(n)), values[:n]...)
	}
	e.setValues(key, append(have, values[len(have):n]...))
	p.cache.resize(e)
	p.cache.makeRoom()
}

func (e *conversation) setValues(key ValuesKey, v []uint64) {
	if e.values == nil {
		e.values = map[ValuesKey][]uint64{}
	}
	e.values[key] = v
}
