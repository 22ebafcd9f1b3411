package extproc

import "strconv"

func itoa(n int) string { return strconv.Itoa(n) }

func (x *exchange) responseHeaders(m *message) error {
	x.respDone = m.last
	c := common{}
	x.abandon()
	if x.flight != nil {
		served := m.served
		if served == "" {
			served = m.upstream
		}
		status, err := strconv.Atoi(m.status)
		if err != nil {
			status = 0
		}
		var refused int
		c.mutation, refused = responseMutation(x.flight.responseHeaders(status, served))
		for range refused {
			x.srv.opts.Metrics.Failure(FailureBadHeader)
		}
	}
	if x.skipsBody() && !m.last {
		c.override = &modeOverride{request: x.request, response: ModeNone}
	}
	if c.mutation.empty() && c.override == nil {
		return x.send(&empty[KindResponseHeaders])
	}
	a := c.encode(KindResponseHeaders)
	return x.send(&a)
}

// abandon gives the request up if it is not decided: a response came first, so
// Envoy answers for itself. What we hold is not needed any more.
func (x *exchange) abandon() {
	if x.phase != phaseOpen {
		return
	}
	x.phase = phaseAbandoned
	x.srv.opts.Metrics.Failure(FailureAbandoned)
	x.dropBody()
}

// skipsBody says that asking for no response body and for the trailers, which
// mark the end, is wanted and legal: Envoy ignores mode_override beside full
// duplex modes and eager sending, and where it is not allowed. It is worth asking
// where no body comes anyway, because nobody tells us whether trailers do: Envoy
// Gateway cannot configure them, and Envoys before 1.40 then end the stream at the
// response headers.
func (x *exchange) skipsBody() bool {
	return x.srv.opts.SkipResponseBody && !x.response.duplex() &&
		!x.request.duplex() && x.request != ModeStreamedHeld
}

func (x *exchange) responseBody(m *message) error {
	x.abandon()
	x.respDone = x.respDone || m.last
	x.showBody(m)
	if !x.response.duplex() {
		return x.send(&empty[KindResponseBody])
	}
	refs, n := m.take()
	if x.response == ModeGRPC {
		a := echo(KindResponseBody, refs, n, piece{last: m.last, compressed: m.compressed, withoutMessage: m.withoutMessage})
		return x.send(&a)
	}
	if n <= maxPiece {
		if n == 0 && !m.last {
			return nil
		}
		a := echo(KindResponseBody, refs, n, piece{last: m.last})
		return x.send(&a)
	}
	defer refs.Free()
	return echoPieces(x.send, KindResponseBody, refs, n, m.last)
}

// showBody lets the ticket see a chunk.
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
