package body

import (
	"bytes"
	"container/list"
	"hash/maphash"
	"slices"
	"sync"
)

// Memo remembers bodies that were parsed more than once, and what others computed from them, so that the same body again
// costs one hash and one comparison. A body is only taken for another if every byte is equal, so no input can make another
// one's answer wrong. It is safe for concurrent use and bounded in bytes; the least recently used bodies go first. Of chats it
// remembers the messages, for their next turn.
type Memo struct {
	limit int64
	seed  maphash.Seed

	mu     sync.Mutex
	bytes  int64
	bodies map[uint64]*list.Element // of *memoBody
	recent *list.List               // the latest first
	once   [memoOnce]uint64         // hashes of bodies seen once

	turns *turns
}

// memoOnce is the number of hashes kept of bodies that were seen once; memoFixed is about what a body costs beside its bytes;
// longer bodies than limit/memoShare are not kept.
const (
	memoOnce  = 4096
	memoFixed = 1024
	memoShare = 8
)

// memoBody is a body that came at least twice. Invariant: request is never changed and refers to its own copy.
type memoBody struct {
	memo     *Memo
	hash     uint64
	request  Request
	size     int64
	attached []attachment // under memo.mu
	gone     bool         // under memo.mu: taken out of the memo
}

type attachment struct{ key, value any }

// maxAttached bounds what one body can have attached.
const maxAttached = 8

// NewMemo makes a memo of at most limit bytes for bodies that come again, and half as many more for
// conversations that go on.
func NewMemo(limit int64) *Memo {
	seed := maphash.MakeSeed()
	return &Memo{
		limit: limit, seed: seed, bodies: map[uint64]*list.Element{}, recent: list.New(),
		turns: newTurns(limit+limit/2, seed),
	}
}

// Parse is like the function Parse. The Request may be shared with other callers: it must not be changed, nor reused with
// its method Parse. Its Body equals body.
func (m *Memo) Parse(api API, body []byte) (*Request, error) {
	return m.ParseInto(new(Request), api, body)
}

// ParseInto is Parse and reuses own's memory if the body is not kept; the result is then own.
func (m *Memo) ParseInto(own *Request, api API, body []byte) (*Request, error) {
	hash := m.digest(body) ^ uint64(api)*0x9e3779b97f4a7c15
	if b, again := m.find(hash); b != nil {
		if b.request.API == api && bytes.Equal(b.request.Body, body) {
			return &b.request, nil
		}
	} else if again && int64(len(body)) <= m.limit/memoShare {
		return m.keep(hash, api, body)
	}
	return own, m.turns.parse(own, api, body)
}

// Kept tells whether a Memo keeps the request, so that Attach may be of use. Such a request is shared.
func (r *Request) Kept() bool { return r.memo != nil }

// Longer bodies than sampleFrom are told apart by their length and some of their bytes: whoever is taken for known is compared
// whole anyway.
const (
	sampleFrom   = 8 << 10
	samples      = 32
	sampleLength = 64
)

func (m *Memo) digest(body []byte) uint64 {
	if len(body) <= sampleFrom {
		return maphash.Bytes(m.seed, body)
	}
	var h maphash.Hash
	h.SetSeed(m.seed)
	for i := range samples {
		at := (len(body) - sampleLength) / (samples - 1) * i
		_, _ = h.Write(body[at : at+sampleLength])
	}
	_, _ = h.Write(body[:8*sampleLength])
	_, _ = h.Write(body[len(body)-8*sampleLength:])
	return h.Sum64() + uint64(len(body))
}

// find gives the body with this hash, or tells whether one came before.
func (m *Memo) find(hash uint64) (b *memoBody, again bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if e, ok := m.bodies[hash]; ok {
		m.recent.MoveToFront(e)
		b, _ = e.Value.(*memoBody)
		return b, true
	}
	slot := &m.once[hash%memoOnce]
	again = *slot == hash
	*slot = hash
	return nil, again
}

func (m *Memo) keep(hash uint64, api API, body []byte) (*Request, error) {
	b := &memoBody{memo: m, hash: hash}
	if err := b.request.Parse(api, bytes.Clone(body)); err != nil {
		return &b.request, err
	}
	b.request.memo = b
	b.size = int64(len(body)) + int64(cap(b.request.Elements))*16 + int64(cap(b.request.others))*32 + memoFixed
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.bodies[hash]; ok { // another caller was faster
		b.request.memo = nil
		return &b.request, nil
	}
	m.bodies[hash] = m.recent.PushFront(b)
	m.grow(b.size)
	return &b.request, nil
}

// grow counts n bytes more and drops the oldest bodies until the limit holds.
func (m *Memo) grow(n int64) {
	for m.bytes += n; m.bytes > m.limit; {
		oldest := m.recent.Back()
		if oldest == nil {
			return
		}
		m.recent.Remove(oldest)
		if b, ok := oldest.Value.(*memoBody); ok {
			delete(m.bodies, b.hash)
			m.bytes -= b.size
			b.gone, b.attached = true, nil
		}
	}
}

// Bytes is the memory in use.
func (m *Memo) Bytes() int64 {
	m.turns.mu.Lock()
	defer m.turns.mu.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.bytes + m.turns.bytes
}

// Attached is what was attached to an equal body under key.
func (r *Request) Attached(key any) (value any, ok bool) {
	if r.memo == nil {
		return nil, false
	}
	r.memo.memo.mu.Lock()
	defer r.memo.memo.mu.Unlock()
	for i := range r.memo.attached {
		if r.memo.attached[i].key == key {
			return r.memo.attached[i].value, true
		}
	}
	return nil, false
}

// Attach keeps value, of about size bytes, for the next equal body. It does nothing for a Request that no Memo keeps.
func (r *Request) Attach(key, value any, size int64) {
	b := r.memo
	if b == nil {
		return
	}
	m := b.memo
	m.mu.Lock()
	defer m.mu.Unlock()
	if b.gone || len(b.attached) >= maxAttached || slices.ContainsFunc(b.attached, func(a attachment) bool { return a.key == key }) {
		return
	}
	b.attached = append(b.attached, attachment{key, value})
	b.size += size
	m.grow(size)
}
