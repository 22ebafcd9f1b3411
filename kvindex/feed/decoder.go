package feed

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed/msgpack"
)

// Engine is the event dialect of a feed.
type Engine string

// Engines.
const (
	VLLM   Engine = "vllm"
	SGLang Engine = "sglang"
	TRTLLM Engine = "trtllm"
)

// Batch is one decoded message of an engine.
type Batch struct {
	// Time is the engine's time of publishing in Unix seconds; 0 if unknown.
	Time float64
	// Rank is the data-parallel rank that the batch carries; NoRank if it carries none.
	Rank int32
	// Events are the changes in order. They and their slices are valid until the next Decode of the same Decoder.
	Events []kvindex.Event
	// Rest decodes the next part of a large payload; nil after the last one.
	Rest func() (*Batch, error)
	// Dropped counts the events that are not in Events, by reason.
	Dropped []Drop
}

// Drop is the number of events dropped for one reason.
type Drop struct {
	Reason Reason
	Count  int
}

// ErrBatch means that a payload is not an event batch.
var ErrBatch = errors.New("feed: payload is not an event batch")

// Decoder turns payloads of one publisher into events. It keeps state that later payloads need (which groups are main
// attention, the block size) and its buffers. Use one Decoder per feed, from one goroutine at a time.
type Decoder struct {
	engine Engine
	batch  Batch
	hashes []kvindex.EngineHash
	tokens []uint32
	extra  []uint64
	media  []kvindex.Medium
	names  interner
	// If a payload is decoded in parts, rest is at the events that follow, left is their number, and fault is the error
	// that comes after them.
	parts bool
	rest  msgpack.Reader
	left  int
	fault error
	// otherGroups are the groups known not to be main attention.
	otherGroups map[int32]bool
	// several is set if there are groups besides one with a sliding window, lone if that one was taken as main attention.
	several, lone bool
	trt           trtState
}

// NewDecoder returns a Decoder for an engine. blockSize is the worker's block size in tokens if
// it is known and 0 otherwise; only TensorRT-LLM needs it, because its events do not carry it.
func NewDecoder(engine Engine, blockSize int) *Decoder {
	return &Decoder{engine: engine, otherGroups: map[int32]bool{}, trt: trtState{blockSize: blockSize, fixed: blockSize > 0}}
}

// Forget resets the state learned from earlier payloads. Call it after a restart of the engine.
func (d *Decoder) Forget() {
	clear(d.otherGroups)
	d.several, d.lone = false, false
	if d.trt = (trtState{blockSize: d.trt.blockSize, fixed: d.trt.fixed}); !d.trt.fixed {
		d.trt.blockSize = 0
	}
}

// Decode decodes a payload. An invalid event is dropped alone and counted in Batch.Dropped;
// ErrBatch means that the payload could not be read to its end: what came before counts, and
// Batch.Rest returns the error with the last part. The Batch is valid until the next Decode.
func (d *Decoder) Decode(payload []byte) (*Batch, error) {
	d.reset()
	if d.engine == TRTLLM && bytes.HasPrefix(bytes.TrimLeft(payload, " \t\r\n"), []byte("{")) { // no MessagePack batch begins so
		return &d.batch, d.decodeJSON(payload)
	}
	r := msgpack.NewReader(payload)
	d.parts, d.left = len(payload) > maxWhole, 0
	var err error
	switch r.Kind() {
	case msgpack.Array:
		err = d.batchArray(&r)
	case msgpack.Map:
		err = d.batchMap(&r)
	default:
		err = fmt.Errorf("%w: neither array nor map", ErrBatch)
	}
	if d.left > 0 {
		d.fault = err
		return d.part()
	}
	return d.whole(), err
}

// part decodes the next events of a large payload.
func (d *Decoder) part() (*Batch, error) {
	at, rank := d.batch.Time, d.batch.Rank
	d.reset()
	d.batch.Time, d.batch.Rank = at, rank
	for d.left > 0 && max(len(d.batch.Events), len(d.hashes)/16, len(d.tokens)/16, len(d.media)) < maxPart {
		d.left--
		if err := d.next(&d.rest); err != nil {
			d.left = 0
			return d.whole(), err
		}
	}
	if d.left > 0 {
		d.batch.Rest = d.part
		return d.whole(), nil
	}
	return d.whole(), d.fault
}

// whole returns the batch. If all layers of a model have one window, its group counts as main attention: a target that
// has all blocks of a prefix has the window before its end. Events that lack blocks are then dropped.
func (d *Decoder) whole() *Batch {
	if d.several {
		return &d.batch
	}
	kept := d.batch.Events[:0]
	for _, ev := range d.batch.Events {
		if ev.Window > 0 {
			if ev.Window, ev.Lone = 0, ev.Window; len(ev.Tokens) == 0 {
				d.drop(Placeholder)
				continue
			}
			d.lone = true
		}
		kept = append(kept, ev)
	}
	d.batch.Events = kept
	return &d.batch
}

// maxKept bounds the elements of each buffer that is kept for the next payload: as many as a long prompt has tokens.
// A payload of 64 MiB may have needed buffers of a gigabyte.
const maxKept = 1 << 17

// Payloads of more than maxWhole bytes are decoded in parts, because decoded events may take 20 times as much memory. A
// part ends with the event that brings it to maxPart. An event with more hashes or tokens than these bounds is
// malformed.
const maxWhole, maxPart, maxHashes, maxTokens = 128 << 10, maxKept / 16, 8 * maxKept, 64 * maxKept

// trim releases the payload, what events refer to, and buffers that are larger than usual payloads need.
func (d *Decoder) trim() {
	clear(d.batch.Events)
	if d.left == 0 {
		d.rest = msgpack.Reader{}
	}
	if max(cap(d.batch.Events), cap(d.hashes), cap(d.tokens), cap(d.extra), cap(d.media)) > maxKept {
		d.batch.Events, d.hashes, d.tokens, d.extra, d.media = nil, nil, nil, nil, nil
	}
}

func (d *Decoder) reset() {
	d.trim()
	d.batch.Time, d.batch.Rank, d.batch.Rest = 0, kvindex.NoRank, nil
	d.batch.Events, d.batch.Dropped = d.batch.Events[:0], d.batch.Dropped[:0]
	d.hashes, d.tokens, d.extra, d.media = d.hashes[:0], d.tokens[:0], d.extra[:0], d.media[:0]
}

// batchArray reads [time, events, rank?].
func (d *Decoder) batchArray(r *msgpack.Reader) error {
	n, err := r.Array()
	if err != nil || n < 2 {
		return fmt.Errorf("%w: an array of %d", ErrBatch, n)
	}
	if d.batch.Time, err = r.Float64(); err != nil {
		return fmt.Errorf("%w: time: %w", ErrBatch, err)
	}
	if err := d.events(r); err != nil {
		return err
	}
	if n > 2 {
		d.rank(r)
	}
	return nil
}

// batchMap reads {ts, events, data_parallel_rank}.
func (d *Decoder) batchMap(r *msgpack.Reader) error {
	n, err := r.Map()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrBatch, err)
	}
	seen := false
	for range n {
		key, err := r.Bytes()
		if err != nil {
			return fmt.Errorf("%w: key: %w", ErrBatch, err)
		}
		switch string(key) {
		case "ts":
			if d.batch.Time, err = r.Float64(); err != nil {
				return fmt.Errorf("%w: time: %w", ErrBatch, err)
			}
		case "events":
			if seen {
				return fmt.Errorf("%w: events twice", ErrBatch)
			}
			seen = true
			if err := d.events(r); err != nil {
				return err
			}
		case "data_parallel_rank", "attn_dp_rank":
			d.rank(r)
		default:
			if err := r.Skip(); err != nil {
				return fmt.Errorf("%w: %w", ErrBatch, err)
			}
		}
	}
	if !seen {
		return fmt.Errorf("%w: a map without events", ErrBatch)
	}
	return nil
}

// rank reads the batch's rank. A value that is nil or not a number counts as missing.
func (d *Decoder) rank(r *msgpack.Reader) {
	if k := r.Kind(); k == msgpack.Uint || k == msgpack.Int {
		if v, err := r.Int64(); err == nil && v >= 0 && v < 1<<20 {
			d.batch.Rank = int32(v)
		}
		return
	}
	_ = r.Skip()
}

func (d *Decoder) events(r *msgpack.Reader) error {
	n, err := r.Array()
	if err != nil {
		return fmt.Errorf("%w: events: %w", ErrBatch, err)
	}
	if d.parts { // skip the events first: the rank comes after them, and each part needs it
		d.rest, d.left = *r, n
	}
	for i := range n {
		if !d.parts {
			err = d.next(r)
		} else if err = r.Skip(); err != nil {
			d.left = i + 1 // part fails at this event, too
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// next decodes an event, or drops it.
func (d *Decoder) next(r *msgpack.Reader) error {
	at := *r
	if d.event(r) {
		return nil
	}
	// Even if an event is invalid, the next one starts after it.
	*r = at
	d.drop(Malformed)
	if err := r.Skip(); err != nil {
		return fmt.Errorf("%w: an event is cut off: %w", ErrBatch, err)
	}
	return nil
}

// drop counts one dropped event.
func (d *Decoder) drop(why Reason) {
	for i := range d.batch.Dropped {
		if d.batch.Dropped[i].Reason == why {
			d.batch.Dropped[i].Count++
			return
		}
	}
	d.batch.Dropped = append(d.batch.Dropped, Drop{why, 1})
}

// digestHash folds a hash that was published as bytes to the low 8 bytes, big endian, which is
// how vLLM makes its integer hashes.
func digestHash(b []byte) kvindex.EngineHash {
	if len(b) >= 8 {
		return kvindex.EngineHash(binary.BigEndian.Uint64(b[len(b)-8:]))
	}
	var v uint64
	for _, c := range b {
		v = v<<8 | uint64(c)
	}
	return kvindex.EngineHash(v)
}

// interner converts bytes that repeat to strings, without an allocation for each.
type interner map[string]string

// maxInterned limits the strings of the table, and maxName the length of each in bytes, because salts come from clients.
const maxInterned, maxName = 4096, 256

func (in *interner) get(b []byte) string {
	if len(b) == 0 {
		return ""
	}
	if len(b) > maxName {
		return string(b)
	}
	if s, ok := (*in)[string(b)]; ok {
		return s
	}
	if *in == nil || len(*in) >= maxInterned {
		*in = interner{}
	}
	s := string(b)
	(*in)[s] = s
	return s
}
