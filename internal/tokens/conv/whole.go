package conv

import (
	"bytes"
	"hash/maphash"
	"unsafe"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// Prompt is what an engine will compute for a request.
type Prompt struct {
	// IDs are the prompt's token ids, nil if they are unknown. Later results may share them: do not modify them, and append
	// only to a copy.
	IDs []uint32
	// Media are the images in IDs, in order.
	Media []Medium
	// Text is the prompt as text, "" if it was not requested or the request contained ids.
	Text string
	// Prompts is the number of prompts in the request. IDs and Text are those of the first one.
	Prompts int
	// Partial is the reason why IDs are only the start of the prompt, or missing; "" if they are the whole prompt.
	Partial string
	// Assumed names a rule that no recording of a real engine confirms, "" if all are confirmed.
	Assumed string
}

// Medium is an image in a prompt.
type Medium struct {
	At         int    // position of its first token
	Identifier string // by which the engine distinguishes the blocks of different images
}

// whole is a body that was seen at least twice. Invariant: request is immutable and refers to the entry's own text.
type whole struct {
	request body.Request
	results []*result
}

// result is what was computed for a body. Invariant: Prompt is immutable.
type result struct {
	Prompt

	space  uint64
	hashes hashes
}

// maxResults bounds the results kept with a body.
const maxResults = 4

func (w *whole) memory() int {
	n := w.request.Memory()
	for _, r := range w.results {
		n += 4*cap(r.IDs) + len(r.Text) + r.hashes.memory() + 128
	}
	return n
}

// Of a body longer than sampleFrom, only the length and some bytes are hashed. That is safe because
// a body with an equal hash is compared in full.
const (
	sampleFrom   = 8 << 10
	samples      = 32
	sampleLength = 64
)

func (c *Cache) sample(raw []byte) uint64 {
	if len(raw) <= sampleFrom {
		return maphash.Bytes(c.seed, raw)
	}
	var h maphash.Hash
	h.SetSeed(c.seed)
	for i := range samples {
		at := (len(raw) - sampleLength) / (samples - 1) * i
		_, _ = h.Write(raw[at : at+sampleLength])
	}
	_, _ = h.Write(raw[:8*sampleLength])
	_, _ = h.Write(raw[len(raw)-8*sampleLength:])
	return h.Sum64() + uint64(len(raw))
}

func (c *Cache) keepBody(t *Turn, space, key uint64, api body.API, raw []byte) error {
	e := &entry{kind: bodies, space: space, text: bytes.Clone(raw), keys: []uint64{key}, body: new(whole)}
	if err := e.body.request.Parse(api, e.text); err != nil {
		return err
	}
	t.Request = &e.body.request
	if c.put(e) {
		t.whole = e
	}
	return nil
}

// Kept reports whether the cache holds the whole body. Keep then stores the result, so its ids must not be in reused
// memory.
func (t *Turn) Kept() bool { return t.whole != nil }

// Result returns the result that Keep stored for this body or an equal one.
func (t *Turn) Result(space uint64) (Prompt, bool) {
	if t.whole == nil {
		return Prompt{}, false
	}
	t.cache.mu.Lock()
	defer t.cache.mu.Unlock()
	for _, r := range t.whole.body.results {
		if r.space == space {
			t.forget()
			t.result = r
			return r.Prompt, true
		}
	}
	return Prompt{}, false
}

// Keep stores the result for the next equal body, if Kept. Results of one space must depend on the body only.
func (t *Turn) Keep(space uint64, p *Prompt) {
	if t.whole == nil {
		return
	}
	t.cache.mu.Lock()
	defer t.cache.mu.Unlock()
	w := t.whole.body
	if t.whole.place == nil || len(w.results) >= maxResults {
		return
	}
	for _, r := range w.results {
		if r.space == space {
			return
		}
	}
	t.result = &result{Prompt: *p, space: space}
	w.results = append(w.results, t.result)
	t.cache.resize(t.whole)
}

// bytesOf returns the bytes of s, which must not be modified.
func bytesOf(s string) []byte { return unsafe.Slice(unsafe.StringData(s), len(s)) }
