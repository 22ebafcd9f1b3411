package body

import (
	"bytes"
	"container/list"
	"hash/maphash"
	"slices"
	"sync"
)

// Memo caches bodies that were parsed more than once, and values that callers derived from them,
// so that a repeated body costs one hash and one comparison. Bodies match only if every byte is
// equal, so a hash collision cannot cause a wrong result. For chats it also remembers message
// offsets, to parse the next turn incrementally. It is safe for concurrent use and bounded in
// bytes; the least recently used bodies are evicted first.
type Memo struct {
	limit int64
	seed  maphash.Seed

	mu     sync.Mutex
	bytes  int64
	bodies map[uint64]*list.Element // of *memoBody
	recent *list.List               // most recently used first
	once   [memoOnce]uint64         // hashes of bodies seen once

	turns *turns
}

// memoOnce is the number of hashes kept of bodies seen once. memoFixed is the approximate
// overhead of a kept body. Bodies longer than limit/memoShare are not kept.
const (
	memoOnce  = 4096
	memoFixed = 1024
	memoShare = 8
)

// memoBody is a body that was seen at least twice. Invariant: request is immutable and refers to
// the memo's own copy of the body.
type memoBody struct {
	memo     *Memo
	hash     uint64
	request  Request
	size     int64
	attached []attachment // under memo.mu
	gone     bool         // under memo.mu: evicted
}

type attachment struct{ key, value any }

// maxAttached bounds the number of values attached to a body.
const maxAttached = 8

// NewMemo returns a memo that uses at most limit bytes for repeated bodies, and another 1.5 ×
// limit for ongoing conversations.
func NewMemo(limit int64) *Memo {
	seed := maphash.MakeSeed()
	return &Memo{
		limit: limit, seed: seed, bodies: map[uint64]*list.Element{}, recent: list.New(),
		turns: newTurns(limit+limit/2, seed),
	}
}

// Parse is like the function Parse, but the Request may be shared with other callers: do not
// modify it or call its Parse method. Its Body equals body, but may be another slice.
func (m *Memo) Parse(api API, body []byte) (*Request, error) {
	return m.ParseInto(new(Request), api, body)
}

// ParseInto is Parse, except that a body that is not kept is parsed into own, which is then the
// result.
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

// Kept reports whether a Memo keeps the request, so that Attach has an effect. Such a request is
// shared.
func (r *Request) Kept() bool { return r.memo != nil }

// Bodies longer than sampleFrom are hashed by their length and a sample of their bytes. That is
// safe because a body with a matching hash is compared in full.
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

// find returns the body with this hash. again reports whether the hash was seen before.
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
	if _, ok := m.bodies[hash]; ok { // another goroutine was faster
		b.request.memo = nil
		return &b.request, nil
	}
	m.bodies[hash] = m.recent.PushFront(b)
	m.grow(b.size)
	return &b.request, nil
}

// grow adds n to the bytes in use and evicts the oldest bodies until the limit holds.
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

// Bytes returns the memory in use, in bytes.
func (m *Memo) Bytes() int64 {
	m.turns.mu.Lock()
	defer m.turns.mu.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.bytes + m.turns.bytes
}

// Attached returns the value that was attached under key to this body or an equal one.
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

// Attach keeps value, of about size bytes, for the next equal body. It does nothing if no Memo
// keeps the request.
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
