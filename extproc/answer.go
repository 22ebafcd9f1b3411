package extproc

import (
	"time"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
)

// answer is an encoded ProcessingResponse. Sending it frees its references.
type answer struct{ bufs mem.BufferSlice }

// answerField returns the field of ProcessingResponse's oneof that answers a message of kind k:
// its number is one below that of the request's field.
func answerField(k Kind) protowire.Number { return protowire.Number(k) - 1 }

const (
	fieldImmediate       = 7
	fieldDynamicMetadata = 8
	fieldModeOverride    = 9
	fieldOverrideTimeout = 10
	fieldWindowUpdate    = 14
)

// empty holds the answers that change nothing, by kind. All streams share them; they are read-only.
var empty = func() (out [KindResponseTrailers + 1]*answer) {
	for k := KindRequestHeaders; k <= KindResponseTrailers; k++ {
		e := newEncoder(2)
		e.wrap(answerField(k), 0)
		out[k] = e.finish()
	}
	return out
}()

// cleared empties a request body chunk whose content was already sent with an earlier one.
var cleared = func() *answer {
	e := newEncoder(16)
	e.number(2, 1) // BodyMutation.clear_body
	e.wrap(3, 0)   // CommonResponse.body_mutation
	e.wrap(1, 0)   // BodyResponse.response
	e.wrap(answerField(KindRequestBody), 0)
	return e.finish()
}()

// windowGrant is a flow-control window that is never used up: the server reads promptly and bounds bodies itself.
const windowGrant = 1 << 40

var windowUpdate = func() *answer {
	e := newEncoder(32)
	e.number(2, windowGrant) // upstream to us
	e.number(1, windowGrant) // downstream to us
	e.wrap(fieldWindowUpdate, 0)
	return e.finish()
}()

// extendTimeout asks for more time for the message that is being answered.
func extendTimeout(d time.Duration) *answer {
	e := newEncoder(32)
	if ns := d % time.Second; ns > 0 {
		e.number(2, uint64(ns))
	}
	if s := d / time.Second; s > 0 {
		e.number(1, uint64(s))
	}
	e.wrap(fieldOverrideTimeout, 0)
	return e.finish()
}

// common is the content of a CommonResponse, with the response's dynamic metadata.
type common struct {
	mutation   mutation
	pick       string // dynamic metadata, "" for none
	clearRoute bool
	replace    bool // body is the new content
	body       mem.BufferSlice
	bodySize   int
	override   *modeOverride
}

// encode answers a headers or body message.
func (r *common) encode(k Kind) *answer {
	e := newEncoder(192 + r.mutation.size())
	if r.override != nil {
		r.override.encode(e)
	}
	if r.pick != "" {
		encodePick(e, r.pick)
	}
	start := e.size
	if r.clearRoute && !r.mutation.empty() {
		e.number(5, 1)
	}
	if r.replace {
		mut := e.size
		if r.bodySize > 0 {
			e.splice(1, r.body, r.bodySize)
		} else {
			e.number(2, 1)
		}
		e.wrap(3, mut)
	}
	if !r.mutation.empty() {
		mut := e.size
		r.mutation.encode(e)
		e.wrap(2, mut)
	}
	if e.size > start {
		e.wrap(1, start)
	}
	e.wrap(answerField(k), start)
	return e.finish()
}

// trailersPick answers trailers and sets the pick as metadata.
func trailersPick(pick string) *answer {
	if pick == "" {
		return empty[KindRequestTrailers]
	}
	e := newEncoder(192)
	encodePick(e, pick)
	e.wrap(answerField(KindRequestTrailers), e.size)
	return e.finish()
}

// encodePick writes dynamic_metadata {"envoy.lb": {pickKey: pick}}.
func encodePick(e *encoder, pick string) {
	start := e.size
	e.text(3, pick) // Value.string_value
	e.wrap(2, start)
	e.text(1, pickKey)
	e.wrap(1, start) // Struct.fields
	e.wrap(5, start) // Value.struct_value
	e.wrap(2, start)
	e.text(1, lbNamespace)
	e.wrap(1, start)
	e.wrap(fieldDynamicMetadata, start)
}

// piece is a StreamedBodyResponse.
type piece struct {
	last, compressed, withoutMessage bool
}

// echo returns body bytes to Envoy in FULL_DUPLEX_STREAMED or GRPC mode. It owns refs.
func echo(k Kind, refs mem.BufferSlice, n int, p piece) *answer {
	e := newEncoder(40)
	if p.compressed {
		e.number(4, 1)
	}
	if p.withoutMessage {
		e.number(3, 1)
	}
	if p.last {
		e.number(2, 1)
	}
	if n > 0 {
		e.splice(1, refs, n)
	}
	e.wrap(3, 0) // BodyMutation.streamed_response
	e.wrap(3, 0) // CommonResponse.body_mutation
	e.wrap(1, 0) // BodyResponse.response
	e.wrap(answerField(k), 0)
	return e.finish()
}

// modeOverride is a ProcessingMode for the rest of the stream.
type modeOverride struct{ request, response Mode }

func (o *modeOverride) encode(e *encoder) {
	start := e.size
	e.number(6, 1) // response_trailer_mode SEND: keeps the stream open until the response ends
	if o.response != ModeNone {
		e.number(4, uint64(o.response))
	}
	if o.request != ModeNone {
		e.number(3, uint64(o.request))
	}
	e.wrap(fieldModeOverride, start)
}

// immediate encodes an ImmediateResponse.
func immediate(r *Reject) *answer {
	m := mutation{}
	typed := false
	for _, h := range r.Headers {
		name, ok := headerName(h.Name)
		if !ok || guarded(name) {
			continue
		}
		typed = typed || name == "content-type"
		m.put(name, h.Value)
	}
	if !typed && len(r.Body) > 0 {
		m.put("content-type", "application/json")
	}
	status := r.Status
	if status < 200 || status > 599 {
		status = 500
	}
	e := newEncoder(128 + len(r.Body) + len(r.Details) + m.size())
	if d := detailsWord(r.Details); d != "" {
		e.text(5, d)
	}
	if len(r.Body) > 0 {
		e.room(len(r.Body))
		start := e.size
		e.prepend(string(r.Body))
		e.wrap(3, start)
	}
	if !m.empty() {
		start := e.size
		m.encode(e)
		e.wrap(2, start)
	}
	start := e.size
	e.number(1, uint64(status))
	e.wrap(1, start)
	e.wrap(fieldImmediate, 0)
	return e.finish()
}
