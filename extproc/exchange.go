package extproc

import (
	"context"
	"crypto/rand"
	"errors"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/mem"
)

// phase is the state of the request direction of an exchange.
type phase uint8

const (
	// phaseOpen: not decided; the headers may have been answered (BUFFERED).
	phaseOpen phase = iota
	// phaseDecided: the decision was sent; the rest of the body may still follow.
	phaseDecided
	// phaseAbandoned: a response arrived, or the request was rejected, before or instead of a decision.
	phaseAbandoned
)

// errHandlerCancelled ends a stream whose request was cancelled during Decide.
var errHandlerCancelled = errors.New("request given up while it was decided")

// exchange is the state machine of one stream: handle consumes a message and sends the answers
// that the mode requires. It is used by one goroutine at a time.
type exchange struct {
	mu   sync.Mutex // held while a message is handled
	ctx  context.Context
	srv  *Server
	send func(*answer) error

	started           bool
	request, response Mode
	observer          bool

	phase phase
	// over reports that nothing is left to do: the handler may return nil.
	over bool
	// reqDone and respDone report that the direction has ended and its last message was answered.
	reqDone, respDone bool

	req  Request // empty once it is decided
	id   requestHash
	view headerView
	// clientID is the request id as the client sent it, if view.requestID replaces it.
	clientID string
	// contentLength is -1 if unknown.
	contentLength int
	client        address // that Server.clients counts it for
	// body holds the received pieces. Invariant: bodySize is the sum of their sizes and at most
	// Options.BodyLimit while they are held.
	body     mem.BufferSlice
	bodySize int
	held     int64   // memory of body, as Server.bodies counts it
	arrival  arrival // its x is nil unless the body is awaited
	frames   []frame // GRPC mode: the messages that body consists of
	owed     int     // STREAMED held: messages that wait for an answer

	extension extension
	// pending is the decision that the handler has postponed; its Wait is nil if it has not.
	pending pending

	flight *flight
	abort  <-chan *Reject // Decision.Abort
	begun  bool           // response headers or a piece of its body have arrived
	token  bool           // the first response chunk has been seen
	edits  bool           // the response body is shown to the ticket for changes
	holds  bool           // the ticket holds back bytes of the response body
	closed bool
}

// pending holds a postponed decision with what exchange.decided needs to send it.
type pending struct {
	*Wait

	kind               Kind
	editable, trailers bool
	received           time.Time
}

// frame is one message of a held gRPC body.
type frame struct {
	size int
	piece
}

// mode is the mode by which metrics label the exchange.
func (x *exchange) mode() Mode {
	if x.observer {
		return ModeObserve
	}
	return x.request
}

// next handles a message, or the error in its place. It reports whether the request waits for more of them.
func (x *exchange) next(err error, m *message) (open bool, _ error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	switch {
	case x.over: // its body was dropped meanwhile
		m.free()
		return false, nil
	case err == nil:
		err = x.handle(m)
	default:
		err = x.refuse(err)
	}
	return x.phase == phaseOpen && !x.over && err == nil, err
}

// handle answers one message. The exchange takes ownership of the message's body.
func (x *exchange) handle(m *message) error {
	defer m.free()
	x.srv.opts.Metrics.Message(m.kind)
	if !x.started {
		x.start(m)
	}
	if m.flowControl {
		if err := x.send(windowUpdate); err != nil {
			return err
		}
	}
	if x.observer {
		x.observe(m)
		return nil
	}
	if m.tooLong && x.phase == phaseOpen {
		return x.reject(x.tooManyHeaders())
	}
	var err error
	switch m.kind {
	case KindRequestHeaders:
		err = x.requestHeaders(m)
	case KindRequestBody:
		err = x.requestBody(m)
	case KindRequestTrailers:
		err = x.requestTrailers()
	case KindResponseHeaders:
		err = x.responseHeaders(m)
	case KindResponseBody:
		err = x.responseBody(m)
	case KindResponseTrailers:
		x.respDone = true
		err = x.send(empty[KindResponseTrailers])
	case KindNone: // a bare window update
	}
	x.over = x.over || x.reqDone && x.respDone
	return err
}

// start reads the stream's configuration from its first message.
func (x *exchange) start(m *message) {
	x.started = true
	x.contentLength = -1
	x.observer = m.observed
	x.request, x.response = m.reqMode, m.respMode
	if !m.configured {
		// A data plane older than protocol_config: answer message by message.
		x.request, x.response = ModeNone, ModeStreamed
		if m.kind == KindRequestBody {
			x.request = ModeBuffered
		}
	}
	if x.request == ModeStreamed && m.eager {
		x.request = ModeStreamedHeld
	}
	x.req.Mode = x.request
	x.req.ID = m.requestID
	x.req.Subset, x.req.HasSubset = m.subset, m.hasSubset
	x.srv.opts.Metrics.Opened(x.mode())
}

// observe serves an observing filter, which only reports the first response chunk.
func (x *exchange) observe(m *message) {
	if x.req.ID == "" {
		x.req.ID = m.requestID
	}
	switch m.kind {
	case KindResponseHeaders:
		x.over = m.last
	case KindResponseBody:
		x.over = true
		if f := x.srv.tracker.find(x.hash(), true); f != nil {
			f.firstToken(x.srv.opts.Now())
		}
	default:
		x.srv.opts.Metrics.Failure(FailureObservedRequest)
		x.over = true
	}
}

func (x *exchange) requestHeaders(m *message) error {
	if x.view.seen || x.phase != phaseOpen {
		x.srv.opts.Metrics.Failure(FailureUnexpected)
		return nil
	}
	if len(m.headers) > mostHeaders {
		return x.reject(x.tooManyHeaders())
	}
	x.readHeaders(m)
	if m.addressed && m.client == 0 {
		x.srv.opts.Metrics.Failure(FailureNoAddress)
	}
	if m.client != 0 && !x.srv.clients.enter(m.client) {
		x.srv.opts.Metrics.Failure(FailureTooManyRequests)
		return x.reject(x.tooMany(429, "too_many_requests", "rate_limit_error", "too many requests of this address are open"))
	}
	x.client = m.client
	switch {
	case m.last:
		x.reqDone = true
		return x.decide(KindRequestHeaders, true)
	case x.request == ModeNone || x.request == ModeStreamed:
		x.req.Partial = true
		x.reqDone = x.request == ModeNone
		return x.decide(KindRequestHeaders, false)
	case x.contentLength > x.srv.opts.BodyLimit && x.request != ModeBufferedPartial:
		return x.refuse(errTooLong)
	}
	x.arrival.x = x
	if x.arrival.size = int64(min(x.contentLength, x.srv.opts.BodyLimit)); x.request.duplex() {
		x.arrival.size = 0 // Envoy passes it on
	} else if x.contentLength < 0 {
		x.arrival.size, x.arrival.grows = int64(x.srv.opts.BodyLimit), true
	}
	x.arrival.size += int64(x.view.bytes)
	if !x.srv.bodies.announce(&x.arrival) {
		x.arrival.x = nil
		return x.refuse(errNoRoom)
	}
	if x.request.holds() {
		return nil
	}
	// The decision is sent with the answer to the body, if there is one. The client's control headers are removed now.
	if m := x.srv.controls.strip(&x.view); !m.empty() {
		if !x.view.fits(&m) {
			return x.reject(x.tooManyHeaders())
		}
		c := common{mutation: m}
		return x.send(c.encode(KindRequestHeaders))
	}
	return x.send(empty[KindRequestHeaders])
}

// readHeaders fills the Request from the headers message.
func (x *exchange) readHeaders(m *message) {
	x.view.seen = true
	x.view.total = len(m.headers)
	ids, rest := 0, m.headers[:0]
	for _, h := range m.headers {
		x.view.bytes += len(h.Name) + len(h.Value)
		switch h.Name {
		case ":method":
			x.req.Method = h.Value
		case ":path":
			x.req.Path = h.Value
		case ":authority":
			x.req.Authority = h.Value
		case requestIDKey:
			if ids++; ids == 1 || x.srv.opts.RequestID == nil {
				x.req.ID = strings.Clone(h.Value) // outlives the headers, which share one string
			} else {
				x.req.ID += "," + h.Value // which of them counts is the worker's choice
			}
		case "content-length":
			if n, err := strconv.Atoi(h.Value); err == nil && n >= 0 {
				x.contentLength = n
			}
		}
		if h.Name == "" || h.Name[0] != ':' {
			rest = append(rest, h)
		}
	}
	x.req.Headers = rest
	x.view.headers = rest
	m.headers = nil // the request owns them now
	x.rename()
}

// rename replaces the client's request id by that of Options.RequestID.
func (x *exchange) rename() {
	if x.srv.opts.RequestID == nil {
		return
	}
	if id := headerText(x.srv.opts.RequestID(x.req.ID)); id != "" && id != x.req.ID {
		x.clientID, x.req.ID, x.view.requestID = x.req.ID, id, id
	}
}

func (x *exchange) requestBody(m *message) error {
	if x.phase != phaseOpen {
		return x.passBody(m)
	}
	if x.request == ModeNone || x.request == ModeStreamed { // headers were not sent to us
		x.req.Partial = true
		x.reqDone = m.last
		return x.decide(KindRequestBody, false)
	}
	refs, n := m.take()
	if !x.srv.bodies.grow(&x.held, heldBytes(refs)) {
		refs.Free()
		return x.refuse(errNoRoom)
	}
	x.body = append(x.body, refs...)
	x.bodySize += n
	x.owed++
	if x.request == ModeGRPC {
		x.frames = append(x.frames, frame{size: n, piece: piece{last: m.last, compressed: m.compressed, withoutMessage: m.withoutMessage}})
	}
	if x.bodySize > x.srv.opts.BodyLimit {
		return x.refuse(errTooLong)
	}
	whole := m.last || x.bodySize == x.contentLength
	switch x.request {
	case ModeBufferedPartial:
		x.req.Partial = !whole
		x.reqDone = whole
		return x.decide(KindRequestBody, whole)
	case ModeBuffered: // without end_of_stream trailers follow; the body is whole
		x.reqDone = m.last
		return x.decide(KindRequestBody, true)
	case ModeStreamedHeld:
		// Envoy does not send trailers before the headers are answered: a body that is complete
		// by its length must not wait for them.
		if whole {
			x.reqDone = m.last
			return x.decide(KindRequestHeaders, true)
		}
	default:
		if m.last {
			x.reqDone = true
			return x.decide(KindRequestHeaders, true)
		}
	}
	if x.arrival.x == nil { // others read it once it is announced
		x.arrival.x = x
	}
	x.srv.bodies.arrive(&x.arrival)
	return nil
}

// makeRoom answers a request whose body was dropped for others.
func (x *exchange) makeRoom() {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.phase == phaseOpen && !x.closed {
		_ = x.refuse(errNoRoom) // the stream is broken otherwise
	}
}

// passBody answers body messages that arrive after the decision.
func (x *exchange) passBody(m *message) error {
	done := x.reqDone
	x.reqDone = x.reqDone || m.last
	if x.request.duplex() {
		x.srv.opts.Metrics.Failure(FailureExtraMessage) // everything was already sent
		return nil
	}
	if done || x.request == ModeBuffered {
		x.srv.opts.Metrics.Failure(FailureExtraMessage)
	}
	return x.send(empty[KindRequestBody])
}

func (x *exchange) requestTrailers() error {
	if x.phase != phaseOpen {
		x.reqDone = true
		return x.send(empty[KindRequestTrailers])
	}
	if x.request.holds() {
		x.pending.trailers = true
		return x.decide(KindRequestHeaders, true)
	}
	// Trailers without a body: only metadata can carry the pick.
	x.reqDone = true
	return x.decide(KindRequestTrailers, true)
}

// refuse rejects a body that is too long or exceeds the memory limits, and returns any other error.
func (x *exchange) refuse(err error) error {
	switch {
	case errors.Is(err, errTooLong):
		x.srv.opts.Metrics.Failure(FailureBodyTooLarge)
		return x.reject(x.problem(413, "body_too_large", "invalid_request_error", "request_too_large", "request body is larger than "+strconv.Itoa(x.srv.opts.BodyLimit)+" bytes"))
	case errors.Is(err, errNoRoom):
		x.srv.opts.Metrics.Failure(FailureTooManyBodies)
		return x.reject(x.tooMany(503, "too_many_bodies", "service_unavailable_error", "too many requests are being received"))
	}
	return err
}

func (x *exchange) reject(r *Reject) error {
	x.phase, x.over = phaseAbandoned, true
	x.dropBody()
	x.unfollowed()
	return x.send(immediate(r))
}

// giveUp answers a request in place of its worker, unless the worker has begun to respond. It reports whether the
// exchange is over.
func (x *exchange) giveUp(r *Reject) bool {
	if x.begun || x.closed || x.phase != phaseDecided || r == nil {
		return false
	}
	return x.reject(r) == nil
}

// hash is the tracker's key of the request.
func (x *exchange) hash() requestHash {
	if x.req.ID == "" {
		return x.id
	}
	return x.srv.tracker.hash(x.req.ID)
}

// unfollowed marks the request as having no ticket or as answered by us, so that later messages
// of an observing filter and the access log are not attributed to a worker.
func (x *exchange) unfollowed() {
	id := x.hash()
	if f := x.flight; f != nil {
		f.answerHere()
		id = f.id
	}
	x.srv.tracker.pass(id)
	x.srv.tracker.pass(x.srv.tracker.hash(x.clientID)) // Envoy may not have received the new one
}

func (x *exchange) dropBody() {
	x.body.Free()
	x.body, x.bodySize, x.frames = nil, 0, nil
	if x.arrival.x != nil {
		x.srv.bodies.whole(&x.arrival)
	}
	x.srv.bodies.replace(&x.held, 0)
}

// decide calls the handler and sends the decision as the answer to a message of kind k. editable
// reports whether the whole body is held.
func (x *exchange) decide(k Kind, editable bool) error {
	if x.arrival.x != nil && !x.srv.bodies.whole(&x.arrival) {
		return x.refuse(errNoRoom)
	}
	x.req.Received = x.srv.opts.Now()
	x.pending.kind, x.pending.editable, x.pending.received = k, editable, x.req.Received
	if !x.view.seen {
		x.rename()
	}
	x.join()
	x.req.Body = whole(x.body)
	if k != KindRequestTrailers {
		x.req.view, x.req.controls = &x.view, &x.srv.controls
	}
	x.extension.start(x)
	return x.decided(x.ask(x.first))
}

// resume continues with a decision that was postponed and can be made now.
func (x *exchange) resume() error {
	again := x.pending.Resume
	x.pending.Wait = nil
	err := x.decided(x.ask(again))
	x.over = x.over || x.reqDone && x.respDone
	return err
}

// decided sends a decision, unless it is postponed.
func (x *exchange) decided(d Decision) error {
	if d.Wait != nil {
		x.pending.Wait = d.Wait
		return nil
	}
	x.extension.stop()
	now, p := x.srv.opts.Now, x.pending
	if d.Ticket != nil {
		x.flight = &flight{id: x.srv.tracker.hash(d.requestID(x.req.ID)), ticket: d.Ticket, failed: x.srv.opts.Metrics.Failure, panicked: x.srv.opts.OnPanic}
	}
	if x.ctx.Err() != nil {
		x.srv.opts.Metrics.Failure(FailureCancelled)
		x.unfollowed()
		return errHandlerCancelled
	}
	if d.Reject != nil {
		return x.reject(d.Reject)
	}
	x.abort = d.Abort
	if x.flight != nil {
		x.follow(&d)
	} else {
		x.srv.tracker.pass(x.srv.tracker.hash(d.requestID(x.req.ID)))
	}
	x.phase = phaseDecided
	err := x.sendDecision(p.kind, &d, p.editable)
	x.dropBody()
	x.id = x.hash()
	x.req = Request{}
	x.view.headers = nil
	if err != nil {
		return err
	}
	x.srv.opts.Metrics.Answered(x.request, now().Sub(p.received))
	if p.trailers && x.phase != phaseAbandoned {
		x.reqDone = true
		return x.send(empty[KindRequestTrailers])
	}
	return nil
}

// follow registers the flight by its request id. If an open request has the same id, this one gets a new id: otherwise
// the access log entry of one would be attributed to the other.
func (x *exchange) follow(d *Decision) {
	if x.srv.tracker.add(x.flight) || !x.view.seen || x.pending.kind == KindRequestTrailers || d.requestID("") != "" {
		return
	}
	id := headerText(x.req.ID[:min(len(x.req.ID), 64)]) + "-" + rand.Text()
	d.Set = append([]Header{{requestIDKey, id}}, d.Set...)
	x.flight.id = x.srv.tracker.hash(id)
	x.srv.tracker.add(x.flight)
}

func (x *exchange) first() Decision { return x.srv.handler.Decide(x.ctx, &x.req) }

// ask calls the handler.
func (x *exchange) ask(handler func() Decision) (d Decision) {
	defer func() {
		if value := recover(); value != nil {
			x.srv.opts.Metrics.Failure(FailurePanic)
			x.srv.opts.OnPanic(value, debug.Stack())
			d = Decision{Reject: x.srv.opts.PanicReject}
		}
	}()
	return handler()
}

// join makes the body one piece. During the copy both copies count towards the limits.
func (x *exchange) join() {
	if len(x.body) < 2 {
		return
	}
	pieces := x.held
	_, size, _ := class(x.bodySize)
	joined := int64(max(size, x.bodySize)) + pieceOverhead
	x.srv.bodies.replace(&x.held, pieces+joined)
	x.body = join(x.body, x.bodySize)
	x.srv.bodies.replace(&x.held, joined)
}

// extension asks Envoy once for a longer message timeout, if the decision takes longer than ExtendAfter while the handler
// holds the request (Request.Hold).
type extension struct {
	mu               sync.Mutex
	timer            *time.Timer // nil if nothing is to be extended
	send             func(*answer) error
	timeout          time.Duration
	late, held, done bool // done: sent, or the decision is made
}

func (e *extension) start(x *exchange) {
	o := &x.srv.opts
	if o.ExtendTimeout <= 0 || x.request.duplex() {
		return
	}
	e.send, e.timeout = x.send, o.ExtendTimeout
	e.timer = time.AfterFunc(o.ExtendAfter, func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.late = true
		e.extend()
	})
	x.req.extension = e
}

func (e *extension) hold(on bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.held = on
	e.extend()
}

func (e *extension) extend() {
	if !e.late || !e.held || e.done {
		return
	}
	e.done = true
	_ = e.send(extendTimeout(e.timeout)) // the next send reports a broken stream
}

// stop ends the extension: nothing is sent afterwards.
func (e *extension) stop() {
	if e.timer != nil {
		e.timer.Stop()
		e.mu.Lock()
		e.done = true
		e.mu.Unlock()
	}
}

// close ends the exchange, however the stream ended.
func (x *exchange) close() {
	if x.closed {
		return
	}
	x.closed = true
	if x.started {
		if !x.observer && x.phase == phaseOpen {
			x.srv.opts.Metrics.Failure(FailureAbandoned)
			x.unfollowed()
		}
		x.srv.opts.Metrics.Closed(x.mode())
	}
	x.dropBody()
	if x.client != 0 {
		x.srv.clients.leave(x.client)
	}
	if f := x.flight; f != nil {
		if f.end(x.srv.opts.Now()) {
			x.srv.tracker.retire(f)
		} else {
			x.srv.tracker.remove(f)
		}
	}
}

// mayLeave reports whether the stream can be closed without harm to the request: the request is
// decided and we hold no bytes of the response.
func (x *exchange) mayLeave() bool {
	return x.phase == phaseDecided && (x.respDone || !x.response.duplex() && !x.holds)
}
