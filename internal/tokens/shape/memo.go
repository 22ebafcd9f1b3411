package shape

import (
	"bytes"
	"container/list"
	"hash/maphash"
	"sync"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/bpe"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// memo caches parts of earlier requests: messages shaped for the template, and the ids of prompts
// up to their last special token. Hits are compared byte by byte.
type memo struct {
	messages *messageMemo
	prompts  *bpe.Cache
}

// defaultCache is the default of Options.CacheBytes.
const defaultCache = 64 << 20

func newMemo(tok *bpe.Tokenizer, limit int64) *memo {
	if limit == 0 {
		limit = defaultCache
	}
	return &memo{messages: newMessageMemo(limit / 4), prompts: bpe.NewCache(tok, int(limit-limit/4))}
}

// shapeKind distinguishes the ways of shaping a message.
type shapeKind uint64

const (
	shapeSGLang shapeKind = 1 << iota
	shapeOpenAI
	shapeReasoning
	shapeTRTLLM
)

// messageMemo maps the bytes of a message to the value that the template gets. Values are
// immutable and shared. It is safe for concurrent use.
type messageMemo struct {
	limit int64
	seed  maphash.Seed

	mu      sync.Mutex
	bytes   int64
	entries map[uint64]*list.Element // of *shapedMessage
	recent  *list.List
	once    [onceSize]uint64 // hashes of long messages seen once
}

// shapedMessage is one cached message. Invariant: value refers to raw, which is the memo's own
// copy.
type shapedMessage struct {
	hash  uint64
	kind  shapeKind
	raw   []byte
	value jinja.Value
}

// size returns the message's memory in bytes. Most texts have escapes, so value has a decoded
// copy.
func (s *shapedMessage) size() int64 { return int64(2*len(s.raw)) + messageCost }

// messageCost is the approximate overhead of a message in bytes. Messages above largeMessage are
// not kept. Those above longMessage are kept from their second occurrence on, which most never
// have.
const (
	messageCost  = 700
	longMessage  = 16 << 10
	largeMessage = 256 << 10
	onceSize     = 1 << 10
)

func newMessageMemo(limit int64) *messageMemo {
	return &messageMemo{limit: limit, seed: maphash.MakeSeed(), entries: map[uint64]*list.Element{}, recent: list.New()}
}

// shaped returns the shaped value of every element of a request's messages: from the memo if
// known, else by shape. After a call of shape, cacheable reports whether its result may be kept.
func (c *messageMemo) shaped(in input, kind shapeKind, shape shaper, cacheable func() bool) ([]jinja.Value, error) {
	out := make([]jinja.Value, 0, len(in.Elements))
	hashes := make([]uint64, len(in.Elements))
	for i, e := range in.Elements {
		hashes[i] = maphash.Bytes(c.seed, e.Of(in.Body)) + uint64(kind)
	}
	found := c.find(make([]*shapedMessage, len(hashes)), hashes)
	for i, e := range in.Elements {
		raw := e.Of(in.Body)
		if f := found[i]; f != nil && f.kind == kind && bytes.Equal(f.raw, raw) {
			out = append(out, f.value)
			continue
		}
		keep := found[i] == nil && len(raw) <= largeMessage && (len(raw) <= longMessage || c.again(hashes[i]))
		if keep {
			raw = bytes.Clone(raw) // the value refers to it
		}
		v, err := shaped(in, raw, shape)
		if err != nil {
			return nil, err
		}
		out = append(out, v)
		if keep && cacheable() {
			c.keep(&shapedMessage{hash: hashes[i], kind: kind, raw: raw, value: v})
		}
	}
	return out, nil
}

func (c *messageMemo) find(found []*shapedMessage, hashes []uint64) []*shapedMessage {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, h := range hashes {
		if e, ok := c.entries[h]; ok {
			c.recent.MoveToFront(e)
			found[i], _ = e.Value.(*shapedMessage)
		}
	}
	return found
}

// again reports whether a hash was seen before.
func (c *messageMemo) again(hash uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	slot := &c.once[hash%onceSize]
	came := *slot == hash
	*slot = hash
	return came
}

func (c *messageMemo) keep(s *shapedMessage) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.entries[s.hash]; ok {
		return
	}
	c.entries[s.hash] = c.recent.PushFront(s)
	for c.bytes += s.size(); c.bytes > c.limit; {
		oldest := c.recent.Back()
		if oldest == nil {
			return
		}
		c.recent.Remove(oldest)
		if s, ok := oldest.Value.(*shapedMessage); ok {
			delete(c.entries, s.hash)
			c.bytes -= s.size()
		}
	}
}

// shaper converts a message to the value that the template gets.
type shaper func(v jinja.Value) (jinja.Value, error)

func shaped(in input, raw []byte, shape shaper) (jinja.Value, error) {
	v, err := in.parse("messages", raw)
	if err != nil {
		return v, err
	}
	return shape(v)
}

// shapeMessages returns every message, shaped.
func (m *Model) shapeMessages(in input, kind shapeKind, p *plan, shape shaper) ([]jinja.Value, error) {
	if m.memo != nil && in.Form == body.FormMessages && len(in.Elements) == in.Count {
		return m.memo.messages.shaped(in, kind, shape, func() bool { return !p.hasMedia() })
	}
	raw := in.Raw(body.FieldMessages)
	if len(raw) == 0 || raw[0] != '[' {
		return nil, refuse("messages: input should be a valid list")
	}
	out := make([]jinja.Value, 0, in.Count)
	var first error
	body.EachItem(raw, func(item []byte) {
		if first != nil {
			return
		}
		var v jinja.Value
		v, first = shaped(in, item, shape)
		out = append(out, v)
	})
	return out, first
}

// resultKey is the key under which a result is attached to a body.
type resultKey struct {
	model  *Model
	engine Engine
}

// resultCost returns the approximate memory of a result in bytes.
func resultCost(r *Result) int64 { return int64(4*cap(r.IDs)+len(r.Text)) + 128 }
