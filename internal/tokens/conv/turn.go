package conv

import (
	"bytes"
	"hash/maphash"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/bpe"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// Turn follows one request through the cache, from its bytes to its block hashes. The zero value is ready for
// Cache.Parse, which may be called again for another request. It is not safe for concurrent use.
type Turn struct {
	// Request is the parsed body. It may be shared with other turns: do not modify it or call its
	// Parse method. Its Body equals the one given to Parse, but may be another slice.
	*body.Request
	// Tenant must be set before Parse. It finds only its own results, so that the time of a request does not show what
	// other tenants have sent. "" is the tenant of all requests without one.
	Tenant string

	cache  *Cache
	space  uint64 // of Tenant, 0 for none
	own    body.Request
	whole  *entry // the body's entry, nil if it is not kept
	result *result
	prompt *entry // the entry of the prompt's first kept ids, nil if there is none
	kept   int
	reused int // number of leading ids that came from the cache

	// Reusable scratch memory.
	digests  []uint64
	elements []body.Span
	marks    []mark
	cuts     []bpe.Cut
	texts    []byte // strings of messages that are not kept
}

// tenantSeed makes spaces of tenants, even without a cache: tokenizers have caches of their own.
var tenantSeed = maphash.MakeSeed()

// Turn returns a turn for a request that was parsed without the cache.
func (c *Cache) Turn(req *body.Request) *Turn { return c.TurnOf("", req) }

// TurnOf is Turn for a tenant.
func (c *Cache) TurnOf(tenant string, req *body.Request) *Turn {
	t := &Turn{Request: req, Tenant: tenant, cache: c}
	t.separate()
	return t
}

func (t *Turn) separate() {
	if t.Tenant != "" {
		t.space = maphash.String(tenantSeed, t.Tenant)
	}
}

// Part returns a turn through the same cache for a request that is a part of t's.
func (t *Turn) Part(req *body.Request) *Turn {
	return &Turn{Request: req, cache: t.cache, space: t.space}
}

// Reset drops all references but scratch memory.
func (t *Turn) Reset() {
	t.own, t.Tenant = body.Request{Elements: t.own.Elements[:0]}, ""
	t.begin(nil, nil)
}

func (t *Turn) begin(c *Cache, req *body.Request) {
	t.cache, t.Request, t.whole, t.result, t.space = c, req, nil, nil, 0
	if t.texts = t.texts[:0]; cap(t.texts) > maxTexts {
		t.texts = nil
	}
	t.forget()
}

func (t *Turn) forget() { t.prompt, t.kept, t.reused = nil, 0, 0 }

// Parse parses a body, which must stay unchanged while t is in use. Its errors are those of body.Parse.
func (c *Cache) Parse(t *Turn, api body.API, raw []byte) error {
	t.begin(c, &t.own)
	t.separate()
	if c == nil {
		return t.own.Parse(api, raw)
	}
	space := t.space ^ uint64(api)
	key := c.sample(raw) ^ (space+1)*0x9e3779b97f4a7c15
	c.mu.Lock()
	e := c.get(bodies, space, key)
	again := e == nil && c.again(key)
	c.mu.Unlock()
	if e != nil && bytes.Equal(e.text, raw) {
		t.whole, t.Request = e, &e.body.request
		return nil
	}
	if again && int64(len(raw)) <= c.limit.Load()/textShare {
		return c.keepBody(t, space, key, api, raw)
	}
	return c.parseChat(t, api, raw)
}

// maxChat bounds the bodies whose messages are looked up, in bytes.
const maxChat = 4 << 20

// parseChat parses a body from the first message at which it differs from the cached chats.
func (c *Cache) parseChat(t *Turn, api body.API, raw []byte) error {
	r := &t.own
	if len(raw) < block || len(raw) > maxChat || !api.TakesMessages() {
		return r.Parse(api, raw)
	}
	t.digests = c.digest(t.digests[:0], t.space, raw)
	f := c.follow(chats, t.space, t.digests)
	defer c.leave(&f)
	shared := f.shared(raw)
	t.elements = t.elements[:0]
	for _, m := range shared {
		t.elements = append(t.elements, body.Span{Start: m.at, End: m.end})
	}
	err := r.Resume(api, raw, f.start, t.elements)
	if err != nil || r.Form != body.FormMessages || len(r.Elements) != r.Count || r.LongInteger {
		return err
	}
	if r.Prompt.Start != f.start { // of duplicate message lists the last one counts
		shared = nil
	}
	t.marks = t.marks[:0]
	for _, s := range r.Elements[len(shared):] {
		t.marks = append(t.marks, mark{end: s.End, at: s.Start})
	}
	c.keep(&entry{kind: chats, space: t.space, trail: trail{start: r.Prompt.Start}}, &f, shared, t.marks, raw, nil, t.digests)
	return nil
}

// Messages above longMessage bytes, most of which never occur again, are kept at their second occurrence; those above
// largeMessage are not kept.
const (
	longMessage  = 2 << 10
	largeMessage = 256 << 10
	maxTexts     = 256 << 10 // of strings whose memory a turn reuses
)

// Messages returns the value of each of r's elements: from the cache, or else from shape, which gets the JSON and
// reports whether its result may be cached. texts is nil if the value may be cached; otherwise shape may place strings
// in it, and the value is valid until the next Parse or Reset. r is the turn's request or one converted from it. Values
// of one space must depend on the JSON only; they are shared and must not be modified.
func (t *Turn) Messages(r *body.Request, space uint64, shape func(texts *[]byte, raw []byte) (v jinja.Value, keep bool, err error)) ([]jinja.Value, error) {
	c := t.cache
	space ^= t.space
	found := make([]*entry, len(r.Elements))
	keys := t.digests[:0]
	if c != nil {
		for _, e := range r.Elements {
			key := uint64(0) // of what is not kept
			if raw := e.Of(r.Body); len(raw) <= largeMessage {
				key = maphash.Bytes(c.seed, raw) ^ space*0x9e3779b97f4a7c15
			}
			keys = append(keys, key)
		}
		t.digests = keys
		c.mu.Lock()
		for i, s := range r.Elements {
			found[i] = c.get(messages, space, keys[i])
			if found[i] != nil || s.End-s.Start > longMessage && !c.again(keys[i]) {
				keys[i] = 0
			}
		}
		c.mu.Unlock()
	}
	out := make([]jinja.Value, 0, len(r.Elements))
	for i, s := range r.Elements {
		raw := s.Of(r.Body)
		if e := found[i]; e != nil && bytes.Equal(e.text, raw) {
			out = append(out, e.value)
			continue
		}
		texts, keep := &t.texts, c != nil && keys[i] != 0
		if keep {
			raw, texts = bytes.Clone(raw), nil // the value refers to it
		}
		v, may, err := shape(texts, raw)
		if err != nil {
			return nil, err
		}
		out = append(out, v)
		if keep && may {
			c.put(&entry{kind: messages, space: space, text: raw, value: v, keys: []uint64{keys[i]}})
		}
	}
	return out, nil
}

// put is add for a caller without the lock. It keeps nothing if another goroutine was faster.
func (c *Cache) put(e *entry) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.get(e.kind, e.space, e.keys[0]) != nil {
		return false
	}
	c.add(e)
	return true
}

// Tokenizer is what Encode needs of a tokenizer: a bpe.Tokenizer or bpe.Marked.
type Tokenizer interface {
	EncodeAfter(stop <-chan struct{}, dst []uint32, cuts []bpe.Cut, text string, from bpe.Cut, addSpecial bool) ([]uint32, []bpe.Cut, error)
}

// Encode tokenizes through the cache: it reuses the ids up to the last mark that the text
// shares with an earlier one. The ids overwrite dst. All texts of one space must have the same tokenizer.
func (t *Turn) Encode(stop <-chan struct{}, dst []uint32, tok Tokenizer, space uint64, text string, addSpecial bool) ([]uint32, error) {
	t.forget()
	c := t.cache
	if c == nil || len(text) < block {
		return t.EncodeAlone(stop, dst[:0], tok, text, addSpecial)
	}
	if space ^= t.space; addSpecial {
		space++
	}
	raw := bytesOf(text)
	t.digests = c.digest(t.digests[:0], space, raw)
	f := c.follow(prompts, space, t.digests)
	defer c.leave(&f)
	shared, from := f.shared(raw), bpe.Cut{Space: t.space}
	if n := len(shared); n > 0 {
		from.Text, from.IDs = shared[n-1].end, shared[n-1].at
	}
	if dst == nil {
		dst = make([]uint32, 0, from.IDs+(len(text)-from.Text)/3+16)
	}
	ids, cuts, err := tok.EncodeAfter(stop, append(dst[:0], f.ids[:from.IDs]...), t.cuts[:0], text, from, addSpecial)
	t.cuts = cuts
	if err != nil {
		return ids, err
	}
	t.marks = t.marks[:0]
	for _, cut := range cuts {
		t.marks = append(t.marks, mark{end: cut.Text, at: cut.IDs})
	}
	e, last := c.keep(&entry{kind: prompts, space: space}, &f, shared, t.marks, raw, ids, t.digests)
	t.prompt, t.kept, t.reused = e, last.at, from.IDs
	return ids, nil
}

// EncodeAlone appends the ids of a text that is not looked up here. What the text leaves in the tokenizer's caches belongs
// to the tenant.
func (t *Turn) EncodeAlone(stop <-chan struct{}, dst []uint32, tok Tokenizer, text string, addSpecial bool) ([]uint32, error) {
	ids, _, err := tok.EncodeAfter(stop, dst, nil, text, bpe.Cut{Space: t.space}, addSpecial)
	return ids, err
}

// Cut must be called when the caller has changed the ids that Encode returned: their hashes are then not cached.
func (t *Turn) Cut() { t.forget() }
