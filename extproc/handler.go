package extproc

import (
	"context"
	"time"
)

// Handler decides what happens to a request. Implementations are safe for
// concurrent use.
type Handler interface {
	// Decide is called once per HTTP request, when its headers and as much of its
	// body as the processing mode delivers have arrived. ctx ends when the client,
	// Envoy or the server gives the request up. Decide may block (a prefill leg).
	// The Request and its Body are valid until Decide returns. A panic is recovered
	// and counted, and the request goes on without a decision.
	Decide(ctx context.Context, r *Request) Decision
}

// Header is one header; Name is lower case.
type Header struct{ Name, Value string }

// Request is one HTTP request as Envoy sent it.
type Request struct {
	// ID is Envoy's request id (header x-request-id, else the attribute
	// request.id), "" if there is none.
	ID string
	// Method, Path and Authority are the pseudo headers, "" if missing.
	Method, Path, Authority string
	// Headers are all others, in order, names in lower case.
	Headers []Header
	// Body is the whole body in one piece, nil if there is none.
	Body []byte
	// Partial says that Envoy kept the rest of the body to itself
	// (BUFFERED_PARTIAL) or that the body is not here when the decision is due
	// (NONE, STREAMED): do not parse, do not edit.
	Partial bool
	// Subset lists the endpoints ("ip" or "ip:port") that the data plane allows;
	// HasSubset distinguishes an empty list (nothing is allowed) from none.
	Subset    []string
	HasSubset bool
	// Received is when the last byte of the body arrived.
	Received time.Time
	// Mode is how the body reaches us.
	Mode Mode

	hold func(on bool) // of the exchange; nil outside of one
}

// Hold marks the parts of Decide that may take long for a good reason: queueing,
// tokenizing, a prefill leg. While it is on, a decision older than Options.ExtendAfter
// makes us ask Envoy for Options.ExtendTimeout, once. Off, a Decide that hangs costs no
// more than Envoy's message_timeout. Call it from the goroutine of Decide.
func (r *Request) Hold(on bool) {
	if r.hold != nil {
		r.hold(on)
	}
}

// Header returns the first value of the header with the given lower-case name.
func (r *Request) Header(name string) (string, bool) {
	for i := range r.Headers {
		if r.Headers[i].Name == name {
			return r.Headers[i].Value, true
		}
	}
	return "", false
}

// Decision is the answer to a Request. The zero Decision lets the request go on
// unrouted.
type Decision struct {
	// Reject, if not nil, is sent to the client and ends the request.
	Reject *Reject
	// Endpoint is the pick, "ip:port", or a comma-separated list in order of
	// preference. "" leaves the choice to Envoy's fallback policy.
	Endpoint string
	// Set and Remove change request headers on their way to the worker. Headers
	// that Envoy guards (host, pseudo headers but :path, x-envoy-*) and those of
	// message framing are left out; bytes that a header cannot hold become spaces.
	Set    []Header
	Remove []string
	// Body replaces the request body if not nil. It must not share memory with
	// Request.Body and must not be written to afterwards: it is sent as it is.
	Body []byte
	// Edits change parts of the request body and leave all other bytes as they
	// came, without a copy. They are in ascending order, do not overlap, and are
	// used only if Body is nil. What Body says of memory holds for Insert.
	Edits []Edit
	// ClearRouteCache asks Envoy to match the route again, because a header of Set
	// takes part in it.
	ClearRouteCache bool
	// Abort, if not nil, may deliver one Reject while the worker has not begun to
	// answer: the client gets it, and the worker's request is reset. What comes later,
	// and what Envoy no longer listens to, is lost.
	Abort <-chan *Reject
	// Ticket follows the request until its end; may be nil.
	Ticket Ticket
}

// requestID is the id that Envoy knows the request by from here on: a decision may
// give it another one.
func (d *Decision) requestID(before string) string {
	for i := range d.Set {
		if d.Set[i].Name == requestIDKey {
			return d.Set[i].Value
		}
	}
	return before
}

// Edit replaces Length bytes of a body at Offset by Insert.
type Edit struct {
	Offset, Length int
	Insert         []byte
}

// Reject is an answer that Envoy gives in place of a worker.
type Reject struct {
	// Status is 200..599; others become 500.
	Status int
	// Body is sent as application/json unless Headers has a content-type.
	Body    []byte
	Headers []Header
	// Details is one word for Envoy's access log (%RESPONSE_CODE_DETAILS%).
	Details string
}

// Ticket is a decided request on its way. Calls come from one goroutine at a
// time. End comes exactly once and last, whatever ended the request. A Ticket of
// a Decision with Reject gets End only.
type Ticket interface {
	// ResponseHeaders tells status and the endpoint that served ("" if unknown), and
	// returns headers to add to the response.
	ResponseHeaders(status int, served string) []Header
	// ResponseBody shows a piece of the response body, only in shapes that send it
	// to us. The bytes are valid during the call.
	ResponseBody(chunk []byte, last bool)
	// FirstToken says that the first piece of the response body passed. It comes
	// at most once, and not at all if it was seen only after End: a short answer's
	// observing stream may lag behind. Outcome.FirstToken has it then.
	FirstToken(at time.Time)
	// End says that the request is over, or that the server is draining and lets
	// it go on unseen.
	End(at time.Time)
}

// EditTicket is a Ticket that may change the response body on its way to the
// client.
type EditTicket interface {
	Ticket
	// EditsBody is asked after ResponseHeaders of an answer that has a body. If true,
	// Envoy is asked for the body where it is not configured to send it, and the answer
	// loses its content-length. Without allow_mode_override no body comes then.
	EditsBody() bool
	// EditBody follows ResponseBody with the same bytes. If changed, out goes to the
	// client in their place; it may be empty, shares no memory with chunk and is not
	// written to afterwards. holds says that bytes are kept back for a later piece; with
	// last none may be.
	EditBody(chunk []byte, last bool) (out []byte, changed, holds bool)
}

// OutcomeTicket is a Ticket that wants Envoy's own account of the request, from
// its access log. It is the exception to End being last.
type OutcomeTicket interface {
	Ticket
	// Outcome comes at most once and after End; an entry that arrives earlier is
	// kept until then. It does not come if Envoy sends no access log, more than
	// Options.LateTickets requests ended since, or that is below 0 and it came late.
	Outcome(o Outcome)
}

// Outcome is one access log entry. Durations count from the request's first
// byte and are 0 if the event did not happen.
type Outcome struct {
	// Status is the code that the client got, 0 if none.
	Status int
	// Flags name what went wrong, as in Envoy's API (snake case); nil if nothing did.
	Flags []string
	// Details is %RESPONSE_CODE_DETAILS%.
	Details string
	// Upstream is the "ip:port" that served, "" if none was reached.
	Upstream string
	// BytesReceived and BytesSent are request and response body bytes.
	BytesReceived, BytesSent uint64
	// FirstUpstreamByte is the arrival of response headers, LastUpstreamByte the
	// end of the response, Duration the end of the request.
	FirstUpstreamByte, LastUpstreamByte, Duration time.Duration
	// FirstToken is set if the first token was seen only after End.
	FirstToken time.Time
}
