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
	// The Request and its Body are valid until Decide returns.
	Decide(ctx context.Context, r *Request) Decision
}

// Header is one header; Name is lower case.
type Header struct{ Name, Value string }

// Request is one HTTP request as Envoy sent it.
type Request struct {
	// ID is Envoy's request id (x-request-id), "" if there is none.
	ID string
	// Method, Path and Authority are the pseudo headers, "" if missing.
	Method, Path, Authority string
	// Headers are all others, in order, names in lower case.
	Headers []Header
	// Body is the whole body in one piece, nil if there is none.
	Body []byte
	// Partial says that Envoy kept the rest of the body to itself
	// (BUFFERED_PARTIAL) or that no body is sent to us (NONE): do not parse.
	Partial bool
	// Subset lists the endpoints ("ip" or "ip:port") that the data plane allows;
	// HasSubset distinguishes an empty list (nothing is allowed) from none.
	Subset    []string
	HasSubset bool
	// Received is when the last byte of the body arrived.
	Received time.Time
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

// Decision is the answer to a Request.
type Decision struct {
	// Reject, if not nil, is sent to the client and ends the request.
	Reject *Reject
	// Endpoint is the pick, "ip:port", or a comma-separated list in order of
	// preference. "" leaves the choice to Envoy's fallback policy.
	Endpoint string
	// Set and Remove change request headers on their way to the worker.
	Set    []Header
	Remove []string
	// Body replaces the request body if not nil.
	Body []byte
	// Ticket follows the request until its end; may be nil.
	Ticket Ticket
}

// Reject is an answer that Envoy gives in place of a worker.
type Reject struct {
	Status  int
	Body    []byte
	Headers []Header
	// Details is one word for Envoy's access log (%RESPONSE_CODE_DETAILS%).
	Details string
}

// Ticket is a decided request on its way. Calls come from one goroutine at a
// time. End comes exactly once and last, whatever ended the request.
type Ticket interface {
	// ResponseHeaders tells status and the endpoint that served ("" if unknown), and
	// returns headers to add to the response.
	ResponseHeaders(status int, served string) []Header
	// ResponseBody shows a piece of the response body, only in shapes that send it
	// to us. The bytes are valid during the call.
	ResponseBody(chunk []byte, last bool)
	// FirstToken says that the first piece of the response body passed.
	FirstToken(at time.Time)
	// End says that the request is over.
	End(at time.Time)
}
