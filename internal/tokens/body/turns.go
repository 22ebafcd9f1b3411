package body

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

// turns caches bodies up to the end of their last message, so that the next turn of a
// conversation is parsed from its first new message. JSON is scanned forwards only: the state at
// the end of a message depends only on the bytes before it, so after comparing those bytes the
// scan can resume there. It is safe for concurrent use and bounded in bytes; the conversations
// that were continued least recently are evicted first.
type turns struct {
	limit int64
	seed  maphash.Seed

	mu     sync.Mutex
	bytes  int64
	blocks map[uint64]*turn    // digest of the first n blocks of a body -> a turn that starts with them
	recent *list.List          // of *turn, most recently used first
	texts  freelist.List[byte] // of evicted turns
}

// turn is a body up to the end of its last message. Invariant: text, elements and digests are
// append-only, so a slice taken under the lock stays readable after it is released. An evicted
// turn has a nil place; its text is recycled when its last reader leaves.
type turn struct {
	start    int    // of the message list
	text     []byte // ends with the last element
	elements []Span
	digests  []uint64
	place    *list.Element
	size     int64
	readers  int // parse calls between find and leave
}

const (
	turnBlock = 4 << 10
	// turnFresh is the maximum text that one body may add, in bytes: most longer prompts are
	// never repeated.
	turnFresh = 64 << 10
	// turnLongest bounds the bodies that are looked up and kept, in bytes.
	turnLongest = 4 << 20
	turnFixed   = 512
)

// known is the part of a turn that a body continues.
type known struct {
	start    int
	elements []Span
}

func newTurns(limit int64, seed maphash.Seed) *turns {
	dropped := limit / 8
	return &turns{limit: limit - dropped, seed: seed, blocks: map[uint64]*turn{}, recent: list.New(), texts: freelist.List[byte]{Limit: int(dropped)}}
}

// parse is r.Parse, resumed after the last known message.
func (t *turns) parse(r *Request, api API, body []byte) error {
	if len(body) < turnBlock || len(body) > turnLongest || api.promptField() != FieldMessages {
		return r.Parse(api, body)
	}
	digests := t.digest(r.digests[:0], body)
	last, text, elements := t.find(digests)
	defer t.leave(last)
	k := known{}
	if last != nil {
		common := commonPrefix(text, body)
		k = known{last.start, elements[:sort.Search(len(elements), func(i int) bool { return elements[i].End > common })]}
	}
	err := r.parse(api, body, k)
	r.digests = digests
	if err == nil && r.Form == FormMessages && len(r.Elements) == r.Count && r.Count > 0 && !r.LongInteger {
		shared := len(k.elements)
		if r.Prompt.Start != k.start { // of duplicate message lists the last one counts
			shared = 0
		}
		t.keep(last, r, len(elements), shared, digests)
	}
	return err
}

func (t *turns) digest(dst []uint64, body []byte) []uint64 {
	var h uint64
	for i := 0; i+turnBlock <= len(body); i += turnBlock {
		h = (h ^ maphash.Bytes(t.seed, body[i:i+turnBlock])) * 0x9e3779b97f4a7c15
		dst = append(dst, h)
	}
	return dst
}

// find returns the turn that shares the most blocks, with its text and elements. The caller must
// call leave.
func (t *turns) find(digests []uint64) (*turn, []byte, []Span) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, d := range slices.Backward(digests) {
		if e := t.blocks[d]; e != nil {
			t.recent.MoveToFront(e.place)
			e.readers++
			return e, e.text, e.elements
		}
	}
	return nil, nil, nil
}

// leave releases the turn returned by find; its text must not be read afterwards.
func (t *turns) leave(e *turn) {
	if e == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	e.readers--
	t.reclaim(e)
}

// reclaim recycles the text of an evicted turn without readers.
func (t *turns) reclaim(e *turn) {
	if e.place == nil && e.readers == 0 {
		t.texts.Give(e.text)
		e.text = nil
	}
}

// keep stores the body of r, whose first shared elements equal those of last. had is the number
// of elements that last had when it was found.
func (t *turns) keep(last *turn, r *Request, had, shared int, digests []uint64) {
	end := r.Elements[r.Count-1].End
	fresh := end
	if shared > 0 {
		fresh -= r.Elements[shared-1].End
	}
	if fresh > turnFresh {
		return
	}
	digests = digests[:end/turnBlock]
	t.mu.Lock()
	defer t.mu.Unlock()
	if last != nil && shared == had && last.start == r.Prompt.Start && last.place != nil {
		if len(last.elements) != had {
			return // another goroutine was faster
		}
		size := int64(end-len(last.text)) + int64(r.Count-had)*16
		last.text = append(last.text, r.Body[len(last.text):end]...)
		last.elements = append(last.elements, r.Elements[had:]...)
		from := min(len(last.digests), len(digests))
		last.digests = append(last.digests, digests[from:]...)
		t.register(last, from, size)
		return
	}
	if len(digests) == 0 || int64(end) > t.limit/memoShare {
		return
	}
	e := &turn{start: r.Prompt.Start, elements: append(make([]Span, 0, roomy(r.Count)), r.Elements...), digests: slices.Clone(digests)}
	e.text = append(slices.Grow(t.texts.Take(roomy(end)), roomy(end)), r.Body[:end]...)
	e.place = t.recent.PushFront(e)
	t.register(e, 0, int64(cap(e.text))+int64(cap(e.elements))*16+turnFixed)
}

// roomy returns a capacity that leaves room for a turn or two.
func roomy(n int) int { return n + n/8 + 64 }

// register indexes the digests of e from index from on, adds size to the bytes in use, and evicts
// the oldest turns until the limit holds.
func (t *turns) register(e *turn, from int, size int64) {
	for _, d := range e.digests[from:] {
		t.blocks[d] = e
	}
	e.size += size
	for t.bytes += size; t.bytes > t.limit; {
		oldest := t.recent.Back()
		if oldest == nil {
			return
		}
		t.recent.Remove(oldest)
		if gone, ok := oldest.Value.(*turn); ok {
			for _, d := range gone.digests {
				if t.blocks[d] == gone {
					delete(t.blocks, d)
				}
			}
			t.bytes -= gone.size
			gone.place = nil
			t.reclaim(gone)
		}
	}
}

// commonPrefix returns the number of leading bytes that two slices share.
func commonPrefix(a, b []byte) int {
	n := min(len(a), len(b))
	if bytes.Equal(a[:n], b[:n]) {
		return n
	}
	i := 0
	for i+turnBlock <= n && bytes.Equal(a[i:i+turnBlock], b[i:i+turnBlock]) {
		i += turnBlock
	}
	for i+8 <= n && binary.LittleEndian.Uint64(a[i:]) == binary.LittleEndian.Uint64(b[i:]) {
		i += 8
	}
	for i < n && a[i] == b[i] {
		i++
	}
	return i
}
