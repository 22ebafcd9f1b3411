package feed

import (
	"bytes"
	"cmp"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math/bits"
	"strconv"
	"strings"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed/msgpack"
)

// isTRTType reports whether a type belongs to TensorRT-LLM's layout.
func isTRTType(tag []byte) bool {
	switch string(tag) {
	case "created", "stored", "removed", "updated":
		return true
	}
	return false
}

// trtHashAlgos are the known block hash algorithms of TensorRT-LLM; a server that reports none uses the first.
var trtHashAlgos = map[string]bool{"": true, "auto": true, "v1_block_key": true, "v2_sha256": true, "v2_sha256_64": true}

// trtState is the state that later events of a TensorRT-LLM feed depend on.
type trtState struct {
	blockSize int  // 0 until known
	fixed     bool // blockSize was configured
	// window is the largest window of the created events; only events of that window describe the prefix cache.
	window int64
	algo   string
	// refused reports that the worker uses an unknown hash algorithm.
	refused bool
}

// trtHash is a block hash: an unsigned 64-bit number, or the first 8 bytes of a digest in hex.
type trtHash uint64

// UnmarshalJSON reads the number without converting it to a float.
func (h *trtHash) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '"' {
		var s string
		if err := json.Unmarshal(b, &s); err != nil {
			return err
		}
		v, err := hexHash(s)
		*h = trtHash(v)
		return err
	}
	if v, err := strconv.ParseUint(string(b), 10, 64); err == nil {
		*h = trtHash(v)
		return nil
	}
	v, err := strconv.ParseInt(string(b), 10, 64)
	*h = trtHash(v)
	return err
}

func hexHash(s string) (uint64, error) {
	if len(s) > 2 && strings.EqualFold(s[:2], "0x") {
		s = s[2:]
	}
	if len(s) > 16 {
		if _, err := hex.DecodeString(s); err != nil {
			return 0, fmt.Errorf("hash %q: %w", s, err)
		}
		s = s[:16]
	}
	return strconv.ParseUint(s, 16, 64)
}

// trtToken is a token of a block, possibly with an id of further content.
type trtToken struct {
	ID    uint32
	Extra uint64
}

// UnmarshalJSON reads a number or {"token_id", "token_extra_id"}.
func (t *trtToken) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] != '{' {
		return json.Unmarshal(b, &t.ID)
	}
	var v struct {
		ID    *uint32 `json:"token_id"`
		Extra uint64  `json:"token_extra_id"`
	}
	if err := json.Unmarshal(b, &v); err != nil {
		return err
	}
	if v.ID == nil {
		return fmt.Errorf("token without token_id")
	}
	t.ID, t.Extra = *v.ID, v.Extra
	return nil
}

// trtTokens are a block's tokens.
type trtTokens []trtToken

// UnmarshalJSON reads a list of tokens. The form that servers write, flat objects of numbers and
// plain texts, has a fast path; other forms use the general decoder.
func (ts *trtTokens) UnmarshalJSON(b []byte) error {
	if fast, ok := appendTokens((*ts)[:0], b); ok {
		*ts = fast
		return nil
	}
	return json.Unmarshal(b, (*[]trtToken)(ts))
}

// appendTokens reads [{"key": number or plain text, ...}, ...]. b must be valid JSON. It returns
// false for any other form.
func appendTokens(dst []trtToken, b []byte) ([]trtToken, bool) {
	s := jsonScan{b: b}
	if !s.next('[') {
		return nil, false
	}
	for first := true; !s.next(']'); first = false {
		if !first && !s.next(',') || !s.next('{') {
			return nil, false
		}
		var t trtToken
		seen := false
		for inner := true; !s.next('}'); inner = false {
			if !inner && !s.next(',') {
				return nil, false
			}
			key, ok := s.text()
			if !ok || !s.next(':') {
				return nil, false
			}
			v, isNumber := s.number()
			switch {
			case string(key) == "token_id":
				if !isNumber || v > 1<<32-1 {
					return nil, false
				}
				t.ID, seen = uint32(v), true
			case string(key) == "token_extra_id":
				if !isNumber {
					return nil, false
				}
				t.Extra = v
			case !isNumber:
				if _, ok := s.text(); !ok {
					return nil, false
				}
				fallthrough
			default:
				// The general decoder ignores the case of names.
				if bytes.EqualFold(key, []byte("token_id")) || bytes.EqualFold(key, []byte("token_extra_id")) {
					return nil, false
				}
			}
		}
		if !seen {
			return nil, false
		}
		dst = append(dst, t)
	}
	return dst, s.end()
}

// jsonScan reads the forms that appendTokens accepts.
type jsonScan struct {
	b []byte
	i int
}

func (s *jsonScan) space() {
	for s.i < len(s.b) && (s.b[s.i] == ' ' || s.b[s.i] == '\n' || s.b[s.i] == '\t' || s.b[s.i] == '\r') {
		s.i++
	}
}

func (s *jsonScan) end() bool { s.space(); return s.i == len(s.b) }

// next consumes c if it is the next byte.
func (s *jsonScan) next(c byte) bool {
	s.space()
	if s.i < len(s.b) && s.b[s.i] == c {
		s.i++
		return true
	}
	return false
}

// text reads a string without escapes.
func (s *jsonScan) text() ([]byte, bool) {
	if !s.next('"') {
		return nil, false
	}
	n := bytes.IndexAny(s.b[s.i:], `"\\`)
	if n < 0 || s.b[s.i+n] != '"' {
		return nil, false
	}
	t := s.b[s.i : s.i+n]
	s.i += n + 1
	return t, true
}

// number reads an unsigned integer of at most 19 digits that ends where a value may.
func (s *jsonScan) number() (v uint64, ok bool) {
	s.space()
	from := s.i
	i := from
	for i < len(s.b) && s.b[i] >= '0' && s.b[i] <= '9' {
		v = v*10 + uint64(s.b[i]-'0')
		i++
	}
	if i == from || i-from > 19 || i == len(s.b) || strings.IndexByte(",}] \n\t\r", s.b[i]) < 0 {
		return 0, false
	}
	s.i = i
	return v, true
}

type trtBlock struct {
	Hash   trtHash           `json:"block_hash"`
	Tokens trtTokens         `json:"tokens"`
	MMKeys []json.RawMessage `json:"mm_keys"`
	Salt   *string           `json:"cache_salt"`
}

// Bounds for values that take much more memory than bytes of JSON. A block of 1,024 tokens has 60 KB of JSON.
const minBlockText, maxBlockText, maxMMKeys = 16, 256 << 10, 1024

var errTRTSize = errors.New("feed: not the size of an engine's blocks")

// UnmarshalJSON refuses values that are too short or too long for a block.
func (b *trtBlock) UnmarshalJSON(text []byte) error {
	type plain trtBlock
	if len(text) < minBlockText || len(text) > maxBlockText {
		return errTRTSize
	}
	err := json.Unmarshal(text, (*plain)(b))
	if len(b.MMKeys) > maxMMKeys {
		return errTRTSize
	}
	return err
}

type trtHashes []trtHash

// UnmarshalJSON refuses more hashes than an engine has blocks.
func (hs *trtHashes) UnmarshalJSON(text []byte) error {
	if bytes.Count(text, []byte{','}) > 8*maxKept {
		return errTRTSize
	}
	return json.Unmarshal(text, (*[]trtHash)(hs))
}

// trtData is the body of an event; which fields are set depends on Type.
type trtData struct {
	Type   string     `json:"type"`
	Parent *trtHash   `json:"parent_hash"`
	Blocks []trtBlock `json:"blocks"`
	Hashes trtHashes  `json:"block_hashes"`
}

// trtEvent is an event with its wrapper. A bare body is accepted too.
type trtEvent struct {
	ID     *uint64  `json:"event_id"`
	Window int64    `json:"window_size"`
	Algo   string   `json:"hash_algo"`
	Rank   *int32   `json:"attention_dp_rank"`
	Group  int32    `json:"layer_group_id"`
	Data   *trtData `json:"data"`
	trtData
}

// decodeJSON decodes one event as POST /kv_cache_events returns it.
func (d *Decoder) decodeJSON(payload []byte) error {
	var e trtEvent
	if err := json.Unmarshal(payload, &e); err != nil {
		d.drop(Malformed)
		return fmt.Errorf("%w: %w", ErrBatch, err)
	}
	if e.Rank != nil && *e.Rank >= 0 {
		d.batch.Rank = *e.Rank
	}
	d.trtEvent(&e)
	return nil
}

// HashRefused reports whether the worker publishes hashes of an unknown algorithm, and which.
// Its events are dropped until Forget.
func (d *Decoder) HashRefused() (algo string, refused bool) { return d.trt.algo, d.trt.refused }

// trtEvent appends the changes of an event, or counts why it is dropped.
func (d *Decoder) trtEvent(e *trtEvent) {
	if !trtHashAlgos[e.Algo] {
		d.trt.algo, d.trt.refused = strings.Clone(e.Algo[:min(len(e.Algo), maxName)]), true
	}
	if d.trt.refused {
		d.drop(UnknownHash)
		return
	}
	data := cmp.Or(e.Data, &e.trtData)
	if data.Type == "created" {
		d.trt.window = max(d.trt.window, e.Window)
		d.drop(NoEffect)
		return
	}
	if e.Window != 0 && d.trt.window != 0 && e.Window != d.trt.window {
		d.drop(OtherGroup)
		return
	}
	switch data.Type {
	case "stored":
		d.trtStored(e, data)
	case "removed":
		at := len(d.hashes)
		for _, h := range data.Hashes {
			d.hashes = append(d.hashes, kvindex.EngineHash(h))
		}
		d.batch.Events = append(d.batch.Events, kvindex.Event{Kind: kvindex.Removed, Group: e.Group, Hashes: d.hashes[at:]})
	case "updated":
		// A block that moves between device and host is still a hit. Its removal does not report
		// where it was, so all of TensorRT-LLM's blocks are kept as device blocks.
		d.drop(NoEffect)
	default:
		d.drop(UnknownTag)
	}
}

// trtStored appends the full blocks of a chain, up to the first block that is not full.
func (d *Decoder) trtStored(e *trtEvent, data *trtData) {
	if len(data.Blocks) == 0 {
		d.drop(Placeholder)
		return
	}
	d.learnBlockSize(data.Blocks)
	size := d.trt.blockSize
	ev := kvindex.Event{Kind: kvindex.Stored, Group: e.Group, BlockSize: size}
	if data.Parent != nil {
		ev.Parent, ev.HasParent = kvindex.EngineHash(*data.Parent), true
	}
	hashes, tokens, extra := len(d.hashes), len(d.tokens), len(d.extra)
	some := false
	for i := range data.Blocks {
		b := &data.Blocks[i]
		if len(b.Tokens) != size || size == 0 {
			if len(b.Tokens) > size {
				d.drop(Misaligned)
			} else {
				d.drop(Partial)
			}
			break
		}
		if ev.HasParent && kvindex.EngineHash(b.Hash) == ev.Parent {
			d.drop(OwnParent)
			d.hashes, d.tokens, d.extra = d.hashes[:hashes], d.tokens[:tokens], d.extra[:extra]
			return
		}
		if i == 0 && b.Salt != nil {
			ev.Salt = *b.Salt
		}
		var digest uint64
		for _, t := range b.Tokens {
			d.tokens = append(d.tokens, t.ID)
			if t.Extra != 0 {
				digest = ExtraDigest(digest, strconv.AppendUint(nil, t.Extra, 10))
			}
		}
		for _, k := range b.MMKeys {
			digest = ExtraDigest(digest, k)
		}
		some = some || digest != 0
		d.hashes = append(d.hashes, kvindex.EngineHash(b.Hash))
		d.extra = append(d.extra, digest)
	}
	if len(d.hashes) == hashes {
		return
	}
	ev.Hashes, ev.Tokens = d.hashes[hashes:], d.tokens[tokens:]
	if some {
		ev.Extra = d.extra[extra:]
	}
	d.batch.Events = append(d.batch.Events, ev)
}

// learnBlockSize derives the block size, which these events do not carry: that of every block
// but the last of an event, or that of a single block if it is a power of two. A longer block
// corrects the learned size, and what was stored under the wrong size is cleared.
func (d *Decoder) learnBlockSize(blocks []trtBlock) {
	n := len(blocks[0].Tokens)
	sure := len(blocks) > 1
	if d.trt.fixed || n <= d.trt.blockSize || !sure && bits.OnesCount(uint(n)) != 1 {
		return
	}
	if d.trt.blockSize > 0 {
		d.batch.Events = append(d.batch.Events, kvindex.Event{Kind: kvindex.Cleared})
	}
	d.trt.blockSize = n
}

// trtMap reads an event of TensorRT-LLM's layout from MessagePack. It is rare, so it uses a generic conversion.
func (d *Decoder) trtMap(r *msgpack.Reader) bool {
	raw, ok := rawValue(r)
	if !ok {
		return false
	}
	in := msgpack.NewReader(raw)
	text, ok := appendJSON(nil, &in, 0)
	if !ok {
		return false
	}
	var e trtEvent
	if json.Unmarshal(text, &e) != nil {
		return false
	}
	if e.Rank != nil && *e.Rank >= 0 && d.batch.Rank == kvindex.NoRank {
		d.batch.Rank = *e.Rank
	}
	d.trtEvent(&e)
	return true
}

// maxDepth limits the nesting of an event that is converted.
const maxDepth = 16

// appendJSON converts a MessagePack value to JSON; byte strings become hex text.
func appendJSON(b []byte, r *msgpack.Reader, depth int) ([]byte, bool) {
	if depth > maxDepth {
		return nil, false
	}
	switch r.Kind() {
	case msgpack.Array, msgpack.Map:
		return appendJSONList(b, r, depth)
	case msgpack.Uint:
		v, err := r.Uint64()
		return strconv.AppendUint(b, v, 10), err == nil
	case msgpack.Int:
		v, err := r.Int64()
		return strconv.AppendInt(b, v, 10), err == nil
	case msgpack.Str:
		s, err := r.Bytes()
		if err != nil {
			return nil, false
		}
		q, err := json.Marshal(string(s))
		return append(b, q...), err == nil
	case msgpack.Bin:
		s, err := r.Bytes()
		return append(hex.AppendEncode(append(b, '"'), s), '"'), err == nil
	default:
		// nil, booleans, floats and extensions: values of these kinds are not used.
		return append(b, "null"...), r.Skip() == nil
	}
}

func appendJSONList(b []byte, r *msgpack.Reader, depth int) ([]byte, bool) {
	isMap := r.Kind() == msgpack.Map
	var n int
	var err error
	brackets := "[]"
	if isMap {
		brackets = "{}"
		n, err = r.Map()
	} else {
		n, err = r.Array()
	}
	if err != nil {
		return nil, false
	}
	b = append(b, brackets[0])
	for i := range n {
		if i > 0 {
			b = append(b, ',')
		}
		var ok bool
		if isMap {
			if r.Kind() != msgpack.Str {
				return nil, false
			}
			if b, ok = appendJSON(b, r, depth+1); !ok {
				return nil, false
			}
			b = append(b, ':')
		}
		if b, ok = appendJSON(b, r, depth+1); !ok {
			return nil, false
		}
	}
	return append(b, brackets[1]), true
}
