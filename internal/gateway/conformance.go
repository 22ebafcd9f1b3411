package gateway

import (
	"context"
	"strings"

	"github.com/kvlane/kvlane/extproc"
)

const (
	// selectHeader lists the endpoints, "ip" or "ip:port", that a test wants picked.
	selectHeader = "test-epp-endpoint-selection"
	// servedHeader names the endpoint that served, for the test.
	servedHeader = "x-conformance-test-served-endpoint"
)

// Conformance implements the behaviour that the conformance tests of the Gateway API inference extension need of an
// endpoint picker: requests name the pods to pick from, and responses name the pod that served. Clients can then choose
// pods, so it is for tests only.
type Conformance struct {
	Next extproc.Handler
	// Endpoints returns the addresses of our pool: a test may ask for others and must not get them.
	Endpoints func() []string
}

// Decide implements extproc.Handler.
func (c *Conformance) Decide(ctx context.Context, r *extproc.Request) extproc.Decision {
	if v, ok := r.Header(selectHeader); ok {
		wanted := strings.FieldsFunc(v, func(r rune) bool { return r == ',' || r == ' ' })
		restrict(r, c.Endpoints()) // what the data plane allows within our pool
		both := extproc.Request{HasSubset: true, Subset: wanted}
		restrict(&both, r.Subset)
		r.Subset = both.Subset
	}
	d := extproc.Await(ctx, c.Next.Decide(ctx, r))
	if d.Ticket != nil {
		d.Ticket = servedTicket{d.Ticket}
	}
	return d
}

// servedTicket adds servedHeader to the response headers.
type servedTicket struct{ extproc.Ticket }

// ResponseHeaders implements extproc.Ticket.
func (t servedTicket) ResponseHeaders(status int, served string) []extproc.Header {
	out := t.Ticket.ResponseHeaders(status, served)
	if served != "" {
		out = append(out, extproc.Header{Name: servedHeader, Value: served})
	}
	return out
}
