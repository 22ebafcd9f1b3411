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

// memo is what requests have in common with the ones before: messages that were shaped for the template, and the ids of
// prompts up to their last special token. Everything is compared byte by byte before it is used again.
type memo struct {
	messages *messageMemo
	prompts  *bpe.Cache
}

// defaultCache is Options.CacheBytes if it is 0.
const defaultCache = 64 << 20

func newMemo(tok *bpe.Tokenizer, limit int64) *memo {
	if limit == 0 {
		limit = defaultCache
	}
	return &memo{messages: newMessageMemo(limit / 4), prompts: bpe.NewCache(tok, int(limit-limit/4))}
}

// shapeKind separates messages that are shaped differently.
type shapeKind uint64

const (
	shapeSGLang shapeKind = 1 << iota
	shapeOpenAI
	shapeReasoning
	shapeTRTLLM
)

// messageMemo maps the bytes of a message to the value that the template gets. Values are never changed, so they are
// shared. It is safe for concurrent use.
type messageMemo struct {
	limit int64
	seed  maphash.Seed

	mu      sync.Mutex
	bytes   int64
	entries map[uint64]*list.Element // of *shapedMessage
	recent  *list.List
	once    [onceSize]uint64 // hashes of long messages that came once
}

// shapedMessage is one message. Invariant: value refers to raw, which is the memo's own copy.
type shapedMessage struct {
	hash  uint64
	kind  shapeKind
	raw   []byte
	value jinja.Value
}

// size is the message's memory: most texts have escapes, so that the value has one of its own.
func (s *shapedMessage) size() int64 { return int64(2*len(s.raw)) + messageCost }

// messageCost is about what a message takes in addition to its bytes; largeMessage is the largest that is kept; messages beyond
// longMessage are kept when they come again: most never do.
const (
	messageCost  = 700
	longMessage  = 16 << 10
	largeMessage = 256 << 10
	onceSize     = 1 << 10
)

func newMessageMemo(limit int64) *messageMemo {
	return &messageMemo{limit: limit, seed: maphash.MakeSeed(), entries: map[uint64]*list.Element{}, recent: list.New()}
}

// shaped gives the value of every element of a request's messages: known ones from the memo, others by shape. cacheable
// reports, after shape, whether the last one may be kept.
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

// again reports whether a hash came before.
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

// shaper makes the value that the template gets of a message.
type shaper func(v jinja.Value) (jinja.Value, error)

func shaped(in input, raw []byte, shape shaper) (jinja.Value, error) {
	v, err := in.parse("messages", raw)
	if err != nil {
		return v, err
	}
	return shape(v)
}

// shapeMessages is every message shaped.
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

// resultKey is the key of a result that is attached to a body.
type resultKey struct {
	model  *Model
	engine Engine
}

// resultCost is the memory of a result.
func resultCost(r *Result) int64 { return int64(4*cap(r.IDs)+len(r.Text)) + 128 }
