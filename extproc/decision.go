package extproc

import (
	"strconv"

	"google.golang.org/grpc/mem"
)

// sendDecision sends a decision in the form that the exchange's mode requires, as the answer to a message of kind k.
func (x *exchange) sendDecision(k Kind, d *Decision, editable bool) error {
	fail, pick := x.srv.opts.Metrics.Failure, d.Endpoint
	if pick != "" && !endpoint(pick) {
		fail(FailureBadPick)
		pick = ""
	}
	m, refused := x.srv.controls.requestMutation(&x.view, d, pick)
	for range refused {
		fail(FailureBadHeader)
	}
	body, size, edited := x.body, x.bodySize, d.Body != nil
	if edited && (!editable || k == KindRequestTrailers || x.owed == 0 || x.request == ModeGRPC) {
		fail(FailureBadEdit)
		edited = false
	}
	if edited {
		body, size = mem.BufferSlice{mem.SliceBuffer(d.Body)}, len(d.Body)
		if size != x.bodySize {
			x.fixLength(&m, size)
		}
	}
	if !x.view.makeRoom(&m) && k != KindRequestTrailers {
		return x.reject(x.tooManyHeaders())
	}
	c := common{mutation: m, pick: pick, clearRoute: d.ClearRouteCache}
	switch {
	case k == KindRequestTrailers:
		return x.send(trailersPick(pick))
	case k == KindRequestBody && edited:
		c.replace, c.body, c.bodySize = true, body, size
	}
	send := x.send
	if k == KindRequestHeaders && !x.view.seen {
		// Headers were not sent to us, so an answer to them would be spurious. The first answer to the body carries the pick.
		send = withPick(x.send, pick)
	} else {
		if err := x.send(c.encode(k)); err != nil {
			return err
		}
	}
	switch {
	case k == KindRequestBody:
		return nil
	case x.request == ModeStreamedHeld:
		return x.answerChunks(send, body, size, edited)
	case x.request == ModeGRPC:
		return x.echoFrames(send)
	case x.request.duplex() && x.owed > 0:
		return echoPieces(send, KindRequestBody, body, size, x.reqDone)
	}
	return nil
}

// withPick adds the pick's metadata to the first answer that is sent.
func withPick(send func(*answer) error, pick string) func(*answer) error {
	return func(a *answer) error {
		if pick == "" {
			return send(a)
		}
		e := newEncoder(192)
		encodePick(e, pick)
		pick = ""
		bufs := make(mem.BufferSlice, 0, len(a.bufs)+1)
		bufs = append(bufs, a.bufs...)
		return send(&answer{bufs: append(bufs, e.finish().bufs...)})
	}
}

// fixLength updates content-length when the body's length changes. Envoy keeps the header only
// in BUFFERED mode, where it has to be right. In the other modes Envoy removes it and ignores
// ours; if it is configured to keep the header, the old value must go.
func (x *exchange) fixLength(m *mutation, size int) {
	if x.contentLength < 0 {
		return
	}
	if x.request == ModeBuffered {
		m.put("content-length", strconv.Itoa(size))
		return
	}
	m.drop("content-length")
}

// answerChunks answers every chunk of a held STREAMED body. The first answer carries the new
// body, the others empty their chunks.
func (x *exchange) answerChunks(send func(*answer) error, body mem.BufferSlice, size int, edited bool) error {
	for i := range x.owed {
		a := empty[KindRequestBody]
		switch {
		case edited && i == 0:
			c := common{replace: true, body: body, bodySize: size}
			a = c.encode(KindRequestBody)
		case edited:
			a = cleared
		}
		if err := send(a); err != nil {
			return err
		}
	}
	return nil
}

// echoPieces returns size bytes of body to Envoy in pieces. If last is set, the last piece ends the stream.
// The caller keeps ownership of body.
func echoPieces(send func(*answer) error, k Kind, body mem.BufferSlice, size int, last bool) error {
	c := cutter{refs: body}
	for size > 0 || last {
		n := min(size, maxPiece)
		size -= n
		if err := send(echo(k, c.next(n), n, piece{last: last && size == 0})); err != nil {
			return err
		}
		if size == 0 {
			return nil
		}
	}
	return nil
}

// echoFrames sends each held gRPC message as one piece.
func (x *exchange) echoFrames(send func(*answer) error) error {
	c := cutter{refs: x.body}
	for _, f := range x.frames {
		if err := send(echo(KindRequestBody, c.next(f.size), f.size, f.piece)); err != nil {
			return err
		}
	}
	return nil
}
