package conv

import (
	"bytes"
	"container/list"
	"hash/maphash"
	"sync"
	"sync/atomic"

	"github.com/kvlane/kvlane/internal/tokens/freelist"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// Cache holds what was computed for earlier requests, of all models. It is safe for concurrent use.
type Cache struct {
	limit atomic.Int64 // bytes; written under the lock, read without it, too
	seed  maphash.Seed

	mu      sync.Mutex
	bytes   int64 // sum of all entries' sizes, at most limit
	used    uint64
	entries map[uint64]*entry
	kinds   [kinds]lruList
	once    [onceSize]uint64    // keys seen before, by their low bits
	texts   freelist.List[byte] // of evicted chats and prompts
	ids     freelist.List[uint32]
}

// lruList holds the entries of one kind.
type lruList struct {
	recent *list.List // of *entry, most recently used first
	bytes  int64
}

type kind uint8

const (
	bodies kind = iota
	chats
	messages
	prompts
	kinds
)

// shares are the maximum that a kind may use, in sixteenths of the limit: prompts save the most time
// per byte and may use all that the others do not.
var shares = [kinds]int64{bodies: 2, chats: 3, messages: 4, prompts: 16}

const (
	onceSize = 1 << 15
	// textShare: the text of a body or chat has at most limit/textShare bytes.
	textShare = 16
)

// entry is one cached body, chat, message or prompt.
//
// Invariant: text, marks, ids and lists of hashes are append-only, so a slice taken under the lock stays readable after
// it is released. The memory of an evicted chat or prompt is recycled when its last reader leaves.
type entry struct {
	kind  kind
	space uint64 // separates equal texts of different models
	text  []byte
	keys  []uint64      // under which it is found
	place *list.Element // nil if evicted
	used  uint64        // value of Cache.used at its last use
	size  int64

	value jinja.Value // of a message; refers to text
	body  *whole      // of a body
	trail             // of a chat or a prompt
}

// New returns a cache that uses at most limit bytes, an eighth of them for recycled memory. If limit
// is not positive it returns nil, which is a cache that keeps nothing.
func New(limit int64) *Cache {
	if limit <= 0 {
		return nil
	}
	c := &Cache{seed: maphash.MakeSeed(), entries: map[uint64]*entry{}}
	for k := range c.kinds {
		c.kinds[k].recent = list.New()
	}
	c.SetLimit(limit)
	return c
}

// SetLimit changes the limit, in bytes, and evicts what exceeds it. A limit below 1 is ignored; c may be nil.
func (c *Cache) SetLimit(limit int64) {
	if c == nil || limit <= 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	recycled := int(limit / 8)
	// New lists, because those in use may hold more than the new limit.
	c.texts, c.ids = freelist.List[byte]{Limit: recycled / 2}, freelist.List[uint32]{Limit: recycled / 2 / 4}
	c.limit.Store(limit - int64(recycled))
	for k := range kinds {
		c.fit(k)
	}
}

var spaces atomic.Uint64

// NewSpace returns a number that separates the entries of one model from those of others. The model may use it plus 0 to 255.
func NewSpace() uint64 { return spaces.Add(1) << 8 }

// get returns the entry under a key, nil if there is none of this kind and space. The caller holds the lock, as for again, add,
// extend, resize, fit, drop and reclaim.
func (c *Cache) get(k kind, space, key uint64) *entry {
	e := c.entries[key]
	if e == nil || e.kind != k || e.space != space {
		return nil
	}
	c.used++
	e.used = c.used
	c.kinds[k].recent.MoveToFront(e.place)
	return e
}

// again records a key and reports whether it was seen before, unless another key has overwritten it since.
func (c *Cache) again(key uint64) bool {
	slot := &c.once[key%onceSize]
	seen := *slot == key
	*slot = key
	return seen
}

// add stores an entry under its keys. It may be evicted again by the time add returns.
func (c *Cache) add(e *entry) {
	c.used++
	e.used = c.used
	e.place = c.kinds[e.kind].recent.PushFront(e)
	c.extend(e, 0)
}

// extend indexes an entry's keys from index from on, and counts its size.
func (c *Cache) extend(e *entry, from int) {
	for _, key := range e.keys[from:] {
		c.entries[key] = e
	}
	c.resize(e)
}

// resize counts the size of an entry that has changed, and evicts what exceeds the limits.
func (c *Cache) resize(e *entry) {
	size := e.memory()
	of := &c.kinds[e.kind]
	of.bytes += size - e.size
	c.bytes += size - e.size
	e.size = size
	c.fit(e.kind)
}

// fit evicts what exceeds the limits of a kind and of all.
func (c *Cache) fit(k kind) {
	of := &c.kinds[k]
	for of.bytes > c.limit.Load()*shares[k]/16 && of.recent.Len() > 0 {
		c.drop(of.oldest())
	}
	for c.bytes > c.limit.Load() {
		var oldest *entry
		for k := range c.kinds {
			if e := c.kinds[k].oldest(); e != nil && (oldest == nil || e.used < oldest.used) {
				oldest = e
			}
		}
		if oldest == nil {
			return
		}
		c.drop(oldest)
	}
}

func (g *lruList) oldest() *entry {
	if last := g.recent.Back(); last != nil {
		return last.Value.(*entry) //nolint:forcetypeassert // the list holds nothing else
	}
	return nil
}

// drop evicts an entry.
func (c *Cache) drop(e *entry) {
	c.kinds[e.kind].recent.Remove(e.place)
	c.kinds[e.kind].bytes -= e.size
	c.bytes -= e.size
	e.place, e.size = nil, 0
	for _, key := range e.keys {
		if c.entries[key] == e {
			delete(c.entries, key)
		}
	}
	c.reclaim(e)
}

// entryCost is the approximate overhead of an entry, in bytes, in addition to its slices.
const entryCost = 512

// memory returns the approximate memory of an entry in bytes.
func (e *entry) memory() int64 {
	n := entryCost + cap(e.text) + 4*cap(e.ids) + 16*cap(e.marks) + 40*cap(e.keys) + e.hashes.memory()
	switch e.kind {
	case messages:
		n += cap(e.text) // most texts have escapes, so value has a decoded copy
		// Each comma may end a value, and each bracket may begin an object or list.
		n += 32*bytes.Count(e.text, []byte{','}) + 96*(bytes.Count(e.text, []byte{'{'})+bytes.Count(e.text, []byte{'['}))
	case bodies:
		n += e.body.memory()
	case chats, prompts, kinds:
	}
	return int64(n)
}
