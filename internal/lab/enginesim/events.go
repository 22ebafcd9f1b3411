package enginesim

import (
	"bytes"
	"errors"

	"github.com/vmihailenco/msgpack/v5"
)

type eventKind int

const (
	blockStored eventKind = iota
	blockRemoved
	allCleared
)

// kvEvent is one change of one rank's cache, before an engine's encoding.
type kvEvent struct {
	kind    eventKind
	hashes  []digest
	parent  *digest // nil: the first block begins at token 0
	tokens  []uint32
	from    int // index of the first block in its sequence
	id      identity
	loraID  int // 0: none
	session string
}

// encoding is how a publisher writes events.
type encoding struct {
	engine    EngineKind
	arrays    bool // elements by position, as engines did before mid 2026
	bytes     bool // whole digests instead of 64-bit numbers (vLLM)
	blockSize int
}

// field is one element of an event: its key in the map form, its place in the array form.
type field struct {
	key   string
	value any
}

// batch returns the msgpack payload [ts, events, rank].
func (e encoding) batch(ts float64, events []kvEvent, rank int) ([]byte, error) {
	var buf bytes.Buffer
	enc := msgpack.NewEncoder(&buf)
	enc.UseCompactInts(true)
	err := errors.Join(enc.EncodeArrayLen(3), enc.EncodeFloat64(ts), enc.EncodeArrayLen(len(events)))
	for i := range events {
		tag, fields := e.fields(&events[i])
		err = errors.Join(err, e.event(enc, append([]field{{"type", tag}}, fields...)))
	}
	err = errors.Join(err, enc.EncodeInt(int64(rank)))
	return buf.Bytes(), err
}

// event writes fields, which are in the order of the array form.
func (e encoding) event(enc *msgpack.Encoder, fields []field) error {
	var err error
	if e.arrays {
		err = enc.EncodeArrayLen(len(fields))
	} else {
		err = enc.EncodeMapLen(len(fields))
	}
	for _, f := range fields {
		if !e.arrays {
			err = errors.Join(err, enc.EncodeString(f.key))
		}
		err = errors.Join(err, enc.Encode(f.value))
	}
	return err
}

// digest is a block's hash as events carry it.
func (e encoding) digest(d digest) any {
	switch {
	case e.bytes:
		return d[:]
	case e.engine == SGLang:
		return int64(d.number())
	}
	return d.number()
}

func (e encoding) fields(ev *kvEvent) (tag string, fields []field) {
	if ev.kind == allCleared {
		return "AllBlocksCleared", nil
	}
	hashes := []any{}
	for _, d := range ev.hashes {
		hashes = append(hashes, e.digest(d))
	}
	if ev.kind == blockRemoved {
		fields = []field{{"block_hashes", hashes}, {"medium", "GPU"}}
		if e.engine != SGLang {
			fields = append(fields, field{"group_idx", 0})
		}
		return "BlockRemoved", fields
	}
	var parent any
	if ev.parent != nil {
		parent = e.digest(*ev.parent)
	}
	fields = []field{{"block_hashes", hashes}, {"parent_block_hash", parent}, {"token_ids", ev.tokens}, {"block_size", e.blockSize}}
	if e.engine == SGLang {
		return "BlockStored", append(append(fields, field{"lora_id", nil}, field{"medium", "GPU"}), e.sglangMarks(ev)...)
	}
	fields = append(fields, field{"lora_id", orNil(ev.loraID)}, field{"medium", "GPU"}, field{"lora_name", orNil(ev.id.lora)},
		field{"extra_keys", extraKeys(ev)}, field{"group_idx", 0}, field{"kv_cache_spec_kind", "full_attention"})
	if ev.session != "" && !e.arrays {
		fields = append(fields, field{"session_id", ev.session})
	}
	return "BlockStored", fields
}

// orNil returns v, or nil for a zero value.
func orNil[T comparable](v T) any {
	var zero T
	if v == zero {
		return nil
	}
	return v
}

// extraKeys: every block of an adapter names it, block 0 the salt.
func extraKeys(ev *kvEvent) [][]string {
	all := make([][]string, len(ev.hashes))
	for i := range all {
		if ev.id.lora != "" {
			all[i] = append(all[i], ev.id.lora)
		}
		if ev.id.salt != "" && ev.from+i == 0 {
			all[i] = append(all[i], ev.id.salt)
		}
	}
	return all
}

// sglangMarks are further keys. In the array form they are an eighth element, a map that is left out if empty.
func (e encoding) sglangMarks(ev *kvEvent) (marks []field) {
	if ev.id.salt != "" {
		marks = append(marks, field{"cache_salt", ev.id.salt})
	}
	if ev.session != "" {
		marks = append(marks, field{"session_id", ev.session})
	}
	if !e.arrays || marks == nil {
		return marks
	}
	m := object{}
	for _, f := range marks {
		m[f.key] = f.value
	}
	return []field{{"", m}}
}
