package extproc

import (
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
)

// encoder writes a protobuf message backwards, so that a length is known when its prefix is
// written. Body bytes are spliced in by reference.
type encoder struct {
	buf  []byte // written part is buf[at:]
	at   int
	size int             // bytes of the message so far, spliced ones included
	tail mem.BufferSlice // what follows buf[at:]
}

func newEncoder(room int) *encoder { return &encoder{buf: make([]byte, room), at: room} }

// room makes n bytes free before the written part.
func (e *encoder) room(n int) {
	if e.at >= n {
		return
	}
	written, grown := len(e.buf)-e.at, make([]byte, 2*(len(e.buf)+n))
	at := len(grown) - written
	copy(grown[at:], e.buf[e.at:])
	e.buf, e.at = grown, at
}

func (e *encoder) prepend(s string) {
	e.room(len(s))
	e.at -= len(s)
	e.size += len(s)
	copy(e.buf[e.at:], s)
}

func (e *encoder) varint(v uint64) {
	n := protowire.SizeVarint(v)
	e.room(n)
	e.at -= n
	e.size += n
	protowire.AppendVarint(e.buf[e.at:e.at], v)
}

// number writes a varint field.
func (e *encoder) number(num protowire.Number, v uint64) {
	e.varint(v)
	e.varint(protowire.EncodeTag(num, protowire.VarintType))
}

// text writes a bytes or string field.
func (e *encoder) text(num protowire.Number, s string) {
	start := e.size
	e.prepend(s)
	e.wrap(num, start)
}

// wrap makes the bytes that were written since size was start a sub-message in field num.
func (e *encoder) wrap(num protowire.Number, start int) {
	e.varint(uint64(e.size - start))
	e.varint(protowire.EncodeTag(num, protowire.BytesType))
}

// splice prepends a bytes field of n bytes by reference. It takes ownership of refs.
func (e *encoder) splice(num protowire.Number, refs mem.BufferSlice, n int) {
	out := make(mem.BufferSlice, 1, len(refs)+len(e.tail)+2) // the first element is reserved for finish
	out = append(out, refs...)
	if e.at < len(e.buf) {
		out = append(out, mem.SliceBuffer(e.buf[e.at:]))
	}
	if len(e.tail) > 0 {
		out = append(out, e.tail[1:]...)
	}
	e.tail = out
	e.buf = e.buf[:e.at:e.at]
	e.size += n
	e.wrap(num, e.size-n)
}

// finish returns the message.
func (e *encoder) finish() *answer {
	head := mem.SliceBuffer(e.buf[e.at:])
	if e.tail == nil {
		return &answer{bufs: mem.BufferSlice{head}}
	}
	e.tail[0] = head
	return &answer{bufs: e.tail}
}
