package extproc

import (
	"cmp"
	"strconv"

	"google.golang.org/grpc/mem"
)

func (x *exchange) responseHeaders(m *message) error {
	x.respDone, x.begun = m.last, true
	c := common{}
	x.abandon()
	if x.flight != nil {
		status, err := strconv.Atoi(m.status)
		if err != nil || status < 100 || status > 999 {
			status = 0 // metrics have a label for its class, and Envoy passes on an engine's 1000
		}
		m.status = ""
		var refused int
		c.mutation, refused = responseMutation(x.flight.responseHeaders(status, cmp.Or(m.served, m.upstream)))
		for range refused {
			x.srv.opts.Metrics.Failure(FailureBadHeader)
		}
	}
	if !m.last && x.mayEdit() && x.flight.editsBody() {
		x.edits = true
		c.mutation.drop("content-length") // it describes the original body
		if x.response == ModeNone {
			x.response = ModeStreamed
			c.override = &modeOverride{request: x.request, response: x.response}
		}
	} else if x.skipsBody() && !m.last {
		c.override = &modeOverride{request: x.request, response: ModeNone}
	}
	if c.mutation.empty() && c.override == nil {
		return x.send(empty[KindResponseHeaders])
	}
	return x.send(c.encode(KindResponseHeaders))
}

// abandon gives up a request that is not decided yet: a response arrived first, so Envoy has
// answered by itself. What is held for the request is released.
func (x *exchange) abandon() {
	if x.phase != phaseOpen {
		return
	}
	x.phase = phaseAbandoned
	x.srv.opts.Metrics.Failure(FailureAbandoned)
	x.unfollowed()
	x.dropBody()
}

// mayEdit reports whether the response body is sent to the server or can be requested.
func (x *exchange) mayEdit() bool {
	switch {
	case x.flight == nil || x.response == ModeGRPC:
		return false
	case x.response != ModeNone:
		return true
	default:
		return x.mayOverride()
	}
}

// mayOverride reports whether Envoy considers a mode_override.
func (x *exchange) mayOverride() bool {
	return !x.response.duplex() && !x.request.duplex() && x.request != ModeStreamedHeld
}

// skipsBody reports whether to ask, by mode_override, for trailers, which mark the end, instead of the response body.
// Envoy ignores mode_override in full duplex modes and with eager sending, and where it is not allowed. Asking is
// worthwhile even where no body is sent, because the configuration does not show whether trailers are: Envoy Gateway
// cannot configure them, and without them Envoy before 1.40 ends the stream at the response headers.
func (x *exchange) skipsBody() bool { return x.srv.opts.SkipResponseBody && x.mayOverride() }

func (x *exchange) responseBody(m *message) error {
	x.abandon()
	x.respDone, x.begun = x.respDone || m.last, true
	x.showBody(m)
	edited := x.edits && x.editBody(m)
	if !x.response.duplex() {
		if !edited {
			return x.send(empty[KindResponseBody])
		}
		c := common{replace: true}
		c.body, c.bodySize = m.take()
		return x.send(c.encode(KindResponseBody))
	}
	refs, n := m.take()
	if x.response == ModeGRPC {
		return x.send(echo(KindResponseBody, refs, n, piece{last: m.last, compressed: m.compressed, withoutMessage: m.withoutMessage}))
	}
	if n <= maxPiece {
		if n == 0 && !m.last {
			return nil
		}
		return x.send(echo(KindResponseBody, refs, n, piece{last: m.last}))
	}
	defer refs.Free()
	return echoPieces(x.send, KindResponseBody, refs, n, m.last)
}

// editBody lets the ticket change a chunk; m then holds the new one.
func (x *exchange) editBody(m *message) bool {
	m.body = join(m.body, m.size)
	out, changed, holds := x.flight.editBody(whole(m.body), m.last)
	x.holds = holds
	if !changed {
		return false
	}
	m.free()
	if len(out) > 0 {
		m.body, m.size = mem.BufferSlice{mem.SliceBuffer(out)}, len(out)
	}
	return true
}

// showBody passes a chunk to the ticket.
func (x *exchange) showBody(m *message) {
	if x.flight == nil {
		return
	}
	if !x.token && m.size > 0 {
		x.token = true
		x.flight.firstToken(x.srv.opts.Now())
	}
	for i, b := range m.body {
		x.flight.responseBody(b.ReadOnlyData(), m.last && i == len(m.body)-1)
	}
	if len(m.body) == 0 && m.last {
		x.flight.responseBody(nil, true)
	}
}
