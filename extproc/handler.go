package extproc

import (
	"context"
	"time"
)

// Handler decides what happens to a request. Implementations must be safe for concurrent use.
type Handler interface {
	// Decide is called once per HTTP request, when its headers and as much of its body as the processing mode delivers
	// have arrived. ctx ends when the client, Envoy or the server gives up on the request. Decide may block, for example
	// on a prefill leg; for long waits, of many requests, see Decision.Wait. The Request and its Body are valid until it
	// returns a Decision without Wait. A panic is recovered and counted, and the request continues without a decision.
	Decide(ctx context.Context, r *Request) Decision
}

// Header is one header; Name is lower case.
type Header struct{ Name, Value string }

// Request is one HTTP request as Envoy sent it.
type Request struct {
	// ID is Envoy's request id (header x-request-id, else the attribute request.id), "" if there is none.
	ID string
	// Method, Path and Authority are the pseudo headers, "" if missing.
	Method, Path, Authority string
	// Headers are all other headers, in order, names in lower case.
	Headers []Header
	// Body is the whole body in one piece, nil if there is none.
	Body []byte
	// Partial reports that Body is not the whole body, because Envoy did not send the rest (BUFFERED_PARTIAL) or the
	// decision is due before the body arrives (NONE, STREAMED). Do not parse or edit such a body.
	Partial bool
	// Subset lists the endpoints ("ip" or "ip:port") that the data plane allows;
	// HasSubset distinguishes an empty list (nothing is allowed) from none.
	Subset    []string
	HasSubset bool
	// Received is when the last byte of the body arrived.
	Received time.Time
	// Mode is how the body reaches the server.
	Mode Mode

	extension *extension // of the exchange; nil outside of one
	// view and controls belong to the exchange. They are nil outside of one and where no header is changed.
	view     *headerView
	controls *controls
}

// Fits reports whether Envoy would accept the header changes of a decision. If not, the server answers
// the request with status 431; a handler that calls Fits first can undo the decision's bookings.
func (r *Request) Fits(d *Decision) bool {
	if r.view == nil {
		return true
	}
	size := r.view.bytes + maxHeaderTotal/4 // above what the pick and the id take
	for i := range d.Set {
		size += len(d.Set[i].Name) + len(d.Set[i].Value)
	}
	if r.view.total+len(d.Set)+2 <= maxHeaders && size <= maxHeaderTotal {
		return true
	}
	m, _ := r.controls.requestMutation(r.view, d, d.Endpoint)
	return r.view.makeRoom(&m)
}

// Hold marks the parts of Decide that may legitimately take long: queueing, tokenizing, a prefill leg. While it is on,
// the server asks Envoy once for Options.ExtendTimeout if the decision is older than Options.ExtendAfter. While it is
// off, a Decide that hangs costs at most Envoy's message_timeout. Call it from the goroutine of Decide.
func (r *Request) Hold(on bool) {
	if r.extension != nil {
		r.extension.hold(on)
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

// Decision is the answer to a Request. The zero Decision lets the request continue unrouted.
type Decision struct {
	// Wait, if not nil, postpones the decision; the other fields are then ignored.
	Wait *Wait
	// Reject, if not nil, is sent to the client and ends the request.
	Reject *Reject
	// Endpoint is the pick, "ip:port", or a comma-separated list in order of preference. ""
	// leaves the choice to Envoy's fallback policy.
	Endpoint string
	// Set and Remove change request headers before they reach the worker. Headers that Envoy protects (host, pseudo
	// headers except :path, x-envoy-*) and framing headers are left out. Bytes that a header cannot hold become spaces.
	Set    []Header
	Remove []string
	// Body replaces the request body if not nil. It must not share memory with Request.Body and
	// must not be modified afterwards, because it is sent without a copy.
	Body []byte
	// ClearRouteCache asks Envoy to match the route again, because a header of Set takes part in the match.
	ClearRouteCache bool
	// Abort, if not nil, may deliver one Reject while the worker has not begun to respond: the client receives it, and
	// the worker's request is reset. A Reject that arrives later, or after Envoy has stopped listening, is dropped.
	Abort <-chan *Reject
	// Ticket follows the request until its end; may be nil.
	Ticket Ticket
}

// Wait is a decision that is not made yet. Returning one takes less memory than waiting inside Decide, because the
// stack of the request's goroutine is small once Decide has returned.
type Wait struct {
	// Ready is closed when the decision can be made.
	Ready <-chan struct{}
	// Resume makes the decision. It is called once, when Ready is closed or the request's context has ended.
	Resume func() Decision
}

// Await returns d, or the decision that follows once its Wait is over. It is for handlers that wrap another handler, and for
// use outside of a server.
func Await(ctx context.Context, d Decision) Decision {
	for d.Wait != nil {
		select {
		case <-d.Wait.Ready:
		case <-ctx.Done():
		}
		d = d.Wait.Resume()
	}
	return d
}

// requestID returns the id by which Envoy knows the request after the decision, which may replace it.
func (d *Decision) requestID(before string) string {
	for i := range d.Set {
		if d.Set[i].Name == requestIDKey {
			return d.Set[i].Value
		}
	}
	return before
}

// Reject is a response that Envoy sends instead of a worker's.
type Reject struct {
	// Status is 200 to 599; other values become 500.
	Status int
	// Body is sent as application/json unless Headers has a content-type.
	Body    []byte
	Headers []Header
	// Details is one word for Envoy's access log (%RESPONSE_CODE_DETAILS%).
	Details string
}

// Ticket follows a decided request. Calls are serialised. End is called exactly once and last,
// however the request ends. For a Decision with Reject only End is called.
type Ticket interface {
	// ResponseHeaders receives the status and the endpoint that served ("" if unknown), and
	// returns headers to add to the response.
	ResponseHeaders(status int, served string) []Header
	// ResponseBody receives a piece of the response body, only in modes that send it to the
	// server. The bytes are valid during the call.
	ResponseBody(chunk []byte, last bool)
	// FirstToken reports that the first piece of the response body has passed. It is called at most once. If the piece
	// is seen only after End, as the observing stream of a short response may lag behind, it is not called, and
	// Outcome.FirstToken holds the time.
	FirstToken(at time.Time)
	// End reports that the request is over, or that the server is draining and stops following it.
	End(at time.Time)
}

// EditTicket is a Ticket that may change the response body on its way to the client.
type EditTicket interface {
	Ticket
	// EditsBody is called after ResponseHeaders of a response that has a body. If it returns true, Envoy is asked for
	// the body where it is not configured to send it, and the response loses its content-length. Envoy follows only
	// with allow_mode_override.
	EditsBody() bool
	// EditBody follows ResponseBody with the same bytes. If changed is true, out is sent to the client instead; it may
	// be empty, must not share memory with chunk and must not be modified afterwards. holds reports that bytes are held
	// back for a later piece; it must be false if last is true.
	EditBody(chunk []byte, last bool) (out []byte, changed, holds bool)
}

// OutcomeTicket is a Ticket that also receives the access log entry of its request. Outcome is
// the one call that may follow End.
type OutcomeTicket interface {
	Ticket
	// Outcome is called at most once, after End; an entry that arrives earlier is kept until
	// then. It is not called if Envoy sends no access log, if more than Options.LateTickets
	// requests have ended since, or if LateTickets is negative and the entry came after End.
	Outcome(o Outcome)
}

// Outcome is one access log entry. Durations count from the request's first byte and are 0 if the event did not happen.
type Outcome struct {
	// Status is the code that the client got, 0 if none.
	Status int `json:"status"`
	// Flags are Envoy's response flags by their names in its API (snake case); nil if none are set.
	Flags []string `json:"flags"`
	// Details is %RESPONSE_CODE_DETAILS%.
	Details string `json:"details"`
	// Upstream is the "ip:port" that served, "" if none was reached.
	Upstream string `json:"upstream"`
	// BytesReceived and BytesSent are request and response body bytes.
	BytesReceived uint64 `json:"bytes_received"`
	BytesSent     uint64 `json:"bytes_sent"`
	// FirstUpstreamByte is the arrival of response headers, LastUpstreamByte the
	// end of the response, Duration the end of the request.
	FirstUpstreamByte time.Duration `json:"first_upstream_byte"`
	LastUpstreamByte  time.Duration `json:"last_upstream_byte"`
	Duration          time.Duration `json:"duration"`
	// FirstToken is set if the first token was seen only after End.
	FirstToken time.Time `json:"first_token"`
}
