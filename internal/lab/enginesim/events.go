package enginesim

import (
	"bytes"

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
	hash      hasher
	blockSize int
}

// batch gives the msgpack payload [ts, events, rank].
func (e encoding) batch(ts float64, events []kvEvent, rank int) ([]byte, error) {
	var buf bytes.Buffer
	enc := msgpack.NewEncoder(&buf)
	enc.UseCompactInts(true)
	w := &packer{enc: enc}
	w.list(3)
	w.do(enc.EncodeFloat64(ts))
	w.list(len(events))
	for i := range events {
		if e.engine == SGLang {
			e.sglang(w, &events[i])
		} else {
			e.vllm(w, &events[i])
		}
	}
	w.num(int64(rank))
	return buf.Bytes(), w.err
}

// packer keeps the first error of a run of writes.
type packer struct {
	enc *msgpack.Encoder
	err error
}

func (w *packer) do(err error) {
	if w.err == nil {
		w.err = err
	}
}

func (w *packer) list(n int)    { w.do(w.enc.EncodeArrayLen(n)) }
func (w *packer) fields(n int)  { w.do(w.enc.EncodeMapLen(n)) }
func (w *packer) text(s string) { w.do(w.enc.EncodeString(s)) }
func (w *packer) num(n int64)   { w.do(w.enc.EncodeInt(n)) }
func (w *packer) null()         { w.do(w.enc.EncodeNil()) }

func (w *packer) textOrNull(s string) {
	if s == "" {
		w.null()
	} else {
		w.text(s)
	}
}

func (w *packer) tokens(ids []uint32) {
	w.list(len(ids))
	for _, id := range ids {
		w.num(int64(id))
	}
}

func (e encoding) digest(w *packer, d *digest) {
	switch {
	case d == nil:
		w.null()
	case e.bytes:
		w.do(w.enc.EncodeBytes(d[:]))
	case e.engine == SGLang:
		w.do(w.enc.EncodeInt(int64(e.hash.event(*d))))
	default:
		w.do(w.enc.EncodeUint(e.hash.event(*d)))
	}
}

func (e encoding) hashes(w *packer, list []digest) {
	w.list(len(list))
	for i := range list {
		e.digest(w, &list[i])
	}
}

// field is one element of an event: its key in the map form, its place in the array form.
type field struct {
	key   string
	write func()
}

// emit writes an event in the wanted form; fields are in the array's order.
func (e encoding) emit(w *packer, tag string, fields []field) {
	if e.arrays {
		w.list(1 + len(fields))
		w.text(tag)
		for _, f := range fields {
			f.write()
		}
		return
	}
	w.fields(1 + len(fields))
	w.text("type")
	w.text(tag)
	for _, f := range fields {
		w.text(f.key)
		f.write()
	}
}

func (e encoding) vllm(w *packer, ev *kvEvent) {
	medium := field{"medium", func() { w.text("GPU") }}
	group := field{"group_idx", func() { w.num(0) }}
	switch ev.kind {
	case allCleared:
		e.emit(w, "AllBlocksCleared", nil)
	case blockRemoved:
		e.emit(w, "BlockRemoved", []field{{"block_hashes", func() { e.hashes(w, ev.hashes) }}, medium, group})
	case blockStored:
		fields := []field{
			{"block_hashes", func() { e.hashes(w, ev.hashes) }},
			{"parent_block_hash", func() { e.digest(w, ev.parent) }},
			{"token_ids", func() { w.tokens(ev.tokens) }},
			{"block_size", func() { w.num(int64(e.blockSize)) }},
			{"lora_id", func() {
				if ev.loraID == 0 {
					w.null()
				} else {
					w.num(int64(ev.loraID))
				}
			}},
			medium,
			{"lora_name", func() { w.textOrNull(ev.id.lora) }},
			{"extra_keys", func() { e.extraKeys(w, ev) }},
			group,
			{"kv_cache_spec_kind", func() { w.text("full_attention") }},
		}
		if ev.session != "" && !e.arrays {
			fields = append(fields, field{"session_id", func() { w.text(ev.session) }})
		}
		e.emit(w, "BlockStored", fields)
	}
}

// extraKeys: every block of an adapter names it, block 0 the salt.
func (e encoding) extraKeys(w *packer, ev *kvEvent) {
	w.list(len(ev.hashes))
	for i := range ev.hashes {
		var keys []string
		if ev.id.lora != "" {
			keys = append(keys, ev.id.lora)
		}
		if ev.id.salt != "" && ev.from+i == 0 {
			keys = append(keys, ev.id.salt)
		}
		if keys == nil {
			w.null()
			continue
		}
		w.list(len(keys))
		for _, k := range keys {
			w.text(k)
		}
	}
}

func (e encoding) sglang(w *packer, ev *kvEvent) {
	medium := field{"medium", func() { w.text("GPU") }}
	switch ev.kind {
	case allCleared:
		e.emit(w, "AllBlocksCleared", nil)
	case blockRemoved:
		e.emit(w, "BlockRemoved", []field{{"block_hashes", func() { e.hashes(w, ev.hashes) }}, medium})
	case blockStored:
		fields := []field{
			{"block_hashes", func() { e.hashes(w, ev.hashes) }},
			{"parent_block_hash", func() { e.digest(w, ev.parent) }},
			{"token_ids", func() { w.tokens(ev.tokens) }},
			{"block_size", func() { w.num(int64(e.blockSize)) }},
			{"lora_id", w.null},
			medium,
		}
		var marks []field
		if ev.id.salt != "" {
			marks = append(marks, field{"cache_salt", func() { w.text(ev.id.salt) }})
		}
		if ev.session != "" {
			marks = append(marks, field{"session_id", func() { w.text(ev.session) }})
		}
		switch {
		case len(marks) == 0:
		case e.arrays:
			// The array form carries an eighth element, a map, only when there is a mark.
			fields = append(fields, field{"", func() {
				w.fields(len(marks))
				for _, m := range marks {
					w.text(m.key)
					m.write()
				}
			}})
		default:
			fields = append(fields, marks...)
		}
		e.emit(w, "BlockStored", fields)
	}
}
