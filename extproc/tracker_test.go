package extproc

import (
	"context"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

type decideFunc func(*Request) Decision

func (f decideFunc) Decide(_ context.Context, r *Request) Decision { return f(r) }

// exchangeFor is an exchange of a server whose failures are counted, fed with the
// headers of a request without a body.
func exchangeFor(t *testing.T, ctx context.Context, o Options, h Handler, id string) (*exchange, map[Failure]int) {
	t.Helper()
	failures := map[Failure]int{}
	o.Metrics.Failure = func(f Failure) { failures[f]++ }
	x := &exchange{ctx: ctx, srv: NewServer(o, h), send: func(a *answer) error { a.bufs.Free(); return nil }}
	m := &message{first: true, configured: true, kind: KindRequestHeaders, reqMode: ModeBuffered, last: true,
		headers: []Header{{":method", "POST"}, {":path", "/v1/chat/completions"}, {requestIDKey, id}}}
	if err := x.handle(m); err != nil && ctx.Err() == nil {
		t.Fatal(err)
	}
	return x, failures
}

// tell sends what the observing filter and the access log report of a request.
func tell(x *exchange, id string) {
	look := &exchange{srv: x.srv, observer: true, req: Request{ID: id}}
	look.observe(&message{kind: KindResponseBody})
	(&accessLog{srv: x.srv}).entry(&accesslogv3.HTTPAccessLogEntry{Request: &accesslogv3.HTTPRequestProperties{RequestId: id}, CommonProperties: throughUpstream})
}

// throughUpstream is what the access log says of a request that reached a worker.
var throughUpstream = &accesslogv3.AccessLogCommon{UpstreamRemoteAddress: &corev3.Address{
	Address: &corev3.Address_SocketAddress{SocketAddress: &corev3.SocketAddress{Address: "10.0.0.1"}},
}}

// Envoy answers some requests before it asks anyone, such as uploads that stop: only what a worker got should have come here.
func TestWhatEnvoyEndsItselfIsNotMissed(t *testing.T) {
	x, failures := exchangeFor(t, t.Context(), Options{LateTickets: 9}, decideFunc(func(*Request) Decision { return Decision{} }), "a")
	for i, c := range []*accesslogv3.AccessLogCommon{nil, throughUpstream} {
		(&accessLog{srv: x.srv}).entry(&accesslogv3.HTTPAccessLogEntry{Request: &accesslogv3.HTTPRequestProperties{RequestId: "stranger"}, CommonProperties: c})
		if n := failures[FailureUnknownRequest]; n != i {
			t.Errorf("got %d counted as unknown after entry %d, want %d", n, i, i)
		}
	}
}

// What was refused is not the outcome of an open request with the same id.
func TestARefusedRequestOfTheSameIDHasNoOutcome(t *testing.T) {
	ticket := &recordedTicket{ended: make(chan struct{})}
	x, failures := exchangeFor(t, t.Context(), Options{LateTickets: 9}, decideFunc(func(*Request) Decision { return Decision{Ticket: ticket} }), "a")
	entry := func(status uint32, details, upstream string) {
		e := &accesslogv3.HTTPAccessLogEntry{Request: &accesslogv3.HTTPRequestProperties{RequestId: "a"}, CommonProperties: &accesslogv3.AccessLogCommon{},
			Response: &accesslogv3.HTTPResponseProperties{ResponseCode: wrapperspb.UInt32(status), ResponseCodeDetails: details}}
		if upstream != "" {
			e.CommonProperties.UpstreamRemoteAddress = &corev3.Address{Address: &corev3.Address_SocketAddress{SocketAddress: &corev3.SocketAddress{Address: upstream}}}
		}
		(&accessLog{srv: x.srv}).entry(e)
	}
	entry(400, "path_normalization_failed", "")
	entry(503, "extproc_too_many_bodies", "")
	x.close()
	entry(404, "kvlane_models", "")
	if n := len(ticket.outcomes); n != 0 || failures[FailureUnknownRequest] != 0 {
		t.Fatalf("got %d outcomes, %d counted as unknown; want none", n, failures[FailureUnknownRequest])
	}
	entry(404, "via_upstream", "10.0.0.1")
	if len(ticket.outcomes) != 1 || ticket.outcomes[0].Status != 404 {
		t.Errorf("got outcomes %+v, want the engine's 404", ticket.outcomes)
	}
}

// Envoy's observing filter and its access log report on requests that we answered ourselves too.
// These are known, in whatever order the reports come.
func TestAnsweredHereIsKnown(t *testing.T) {
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	for name, c := range map[string]struct {
		ctx    context.Context
		late   int
		decide decideFunc
	}{
		"rejected":                     {t.Context(), 0, func(*Request) Decision { return Decision{Reject: &Reject{Status: 503}} }},
		"rejected, without access log": {t.Context(), -1, func(*Request) Decision { return Decision{Reject: &Reject{Status: 503}} }},
		"no ticket":                    {t.Context(), 0, func(*Request) Decision { return Decision{} }},
		"no ticket, but another id":    {t.Context(), 0, func(*Request) Decision { return Decision{Set: []Header{{requestIDKey, "b"}}} }},
		"panic":                        {t.Context(), 0, func(*Request) Decision { panic("scripted") }},
		"gone while it was decided":    {gone, 0, func(*Request) Decision { return Decision{Ticket: &recordedTicket{ended: make(chan struct{})}} }},
		"rejected with a ticket to end": {t.Context(), 0, func(*Request) Decision {
			return Decision{Reject: &Reject{Status: 400}, Ticket: &recordedTicket{ended: make(chan struct{})}}
		}},
		"gone, and rejected nonetheless": {gone, 0, func(*Request) Decision { return Decision{Reject: &Reject{Status: 499}} }},
	} {
		t.Run(name, func(t *testing.T) {
			x, failures := exchangeFor(t, c.ctx, Options{LateTickets: c.late}, c.decide, "a")
			id := "a"
			if name == "no ticket, but another id" {
				id = "b"
			}
			tell(x, id)
			x.close()
			tell(x, id)
			if n := failures[FailureUnknownRequest]; n != 0 {
				t.Errorf("got %d counted as unknown, want 0", n)
			}
			tell(x, "stranger")
			if n := failures[FailureUnknownRequest]; n != 2 {
				t.Errorf("got %d counted for an unknown request, want 2: first token and access log", n)
			}
		})
	}
}

// When we answer instead of a worker, the response that an observer sees does not count as the
// worker's first token.
func TestAnswerInAWorkersPlaceHasNoFirstToken(t *testing.T) {
	tk := &recordedTicket{ended: make(chan struct{})}
	x, failures := exchangeFor(t, t.Context(), Options{}, decideFunc(func(*Request) Decision {
		return Decision{Endpoint: "10.0.0.1:8000", Ticket: tk}
	}), "a")
	if !x.giveUp(&Reject{Status: 502}) {
		t.Fatal("got a request that is not given up")
	}
	tell(x, "a")
	x.close()
	tell(x, "a")
	if tk.tokens != 0 {
		t.Errorf("got %d first tokens, want 0", tk.tokens)
	}
	if len(tk.gotOutcomes()) != 1 || !tk.gotOutcomes()[0].FirstToken.IsZero() {
		t.Errorf("outcomes %+v", tk.gotOutcomes())
	}
	if len(failures) != 0 {
		t.Errorf("counted: %v", failures)
	}
}

// Of two open requests with one id the second gets another one, so that what is reported of one does not count for the other.
func TestOpenRequestsHaveDifferentIDs(t *testing.T) {
	var tickets []*recordedTicket
	own := []Header(nil)
	x, failures := exchangeFor(t, t.Context(), Options{}, decideFunc(func(*Request) Decision {
		tickets = append(tickets, &recordedTicket{ended: make(chan struct{})})
		return Decision{Endpoint: "10.0.0.1:8000", Ticket: tickets[len(tickets)-1], Set: own}
	}), "a")
	ask := func() (other *exchange, id string) {
		var sent []byte
		other = &exchange{ctx: t.Context(), srv: x.srv, send: func(a *answer) error { sent = append(sent, a.bufs.Materialize()...); a.bufs.Free(); return nil }}
		m := &message{first: true, configured: true, kind: KindRequestHeaders, reqMode: ModeBuffered, last: true,
			headers: []Header{{":method", "POST"}, {":path", "/"}, {requestIDKey, "a"}}}
		if err := other.handle(m); err != nil {
			t.Fatal(err)
		}
		return other, string(regexp.MustCompile(`a-[A-Z2-7]{26}`).Find(sent))
	}
	second, id := ask()
	if id == "" {
		t.Error("got the same id for a second open request, want another one")
	}
	if tell(x, "a"); tickets[0].tokens != 1 || tickets[1].tokens != 0 {
		t.Errorf("got %d and %d first tokens, want one of the first request", tickets[0].tokens, tickets[1].tokens)
	}
	if tell(second, id); tickets[1].tokens != 1 {
		t.Errorf("got %d first tokens of the second request, want 1", tickets[1].tokens)
	}
	x.close()
	second.close()
	if _, id := ask(); id != "" {
		t.Errorf("got id %q after the end of the others, want it unchanged", id)
	}
	own = []Header{{requestIDKey, "leg"}}
	if _, id := ask(); id != "" {
		t.Errorf("got id %q, want the handler's", id)
	}
	if failures[FailureUnknownRequest] != 0 {
		t.Errorf("counted: %v", failures)
	}
}

// Memory for requests without a flight is bounded: the oldest is forgotten.
func TestUnfollowedAreBounded(t *testing.T) {
	unknown := 0
	tr := newTracker(1, func(Failure) { unknown++ })
	for i := range 3 * maxUnfollowed {
		tr.pass(tr.hash(strconv.Itoa(i)))
		tr.pass(tr.hash(strconv.Itoa(i)))
	}
	if len(tr.unfollowed) != maxUnfollowed || len(tr.order) != maxUnfollowed {
		t.Fatalf("got %d requests in the set and %d in the ring", len(tr.unfollowed), len(tr.order))
	}
	tr.find(tr.hash(strconv.Itoa(3*maxUnfollowed-1)), true)
	tr.find(tr.hash(strconv.Itoa(2*maxUnfollowed)), true)
	if unknown != 0 {
		t.Error("got older requests, want the newest kept")
	}
	tr.find(tr.hash(strconv.Itoa(2*maxUnfollowed-1)), true)
	if unknown != 1 {
		t.Error("got an evicted request, want it forgotten")
	}
}

// Ended requests that wait for their outcome keep hashes of their ids, however long the ids are.
func TestLongRequestIDsAreNotKept(t *testing.T) {
	const size, requests = 60 << 10, 500
	tr := newTracker(requests, func(Failure) {})
	before := heapInUse()
	for i := range requests {
		id := strings.Repeat("x", size) + strconv.Itoa(i)
		f := &flight{id: tr.hash(id)}
		tr.add(f)
		tr.retire(f)
		if tr.find(tr.hash(id), true) != f {
			t.Fatalf("got no flight for request %d", i)
		}
	}
	if grown := heapInUse() - before; grown > requests*size/4 {
		t.Errorf("got %d bytes kept for %d ids of %d bytes", grown, requests, size)
	}
	if tr.hash("a") == tr.hash("b") || tr.hash("a") == newTracker(1, func(Failure) {}).hash("a") || tr.hash("") != (requestHash{}) {
		t.Error("got equal hashes, want them to differ by id and process")
	}
	if a, b := tr.hash("a"), tr.hash("b"); a[0] == b[0] || a[1] == b[1] || a[0] == a[1] {
		t.Errorf("got hashes %x and %x, want 128 bits", a, b)
	}
	runtime.KeepAlive(tr)
}

// A decided exchange keeps nothing of its request but the hash of the id.
func TestADecidedExchangeKeepsNoRequestID(t *testing.T) {
	x, _ := exchangeFor(t, t.Context(), Options{}, decideFunc(func(*Request) Decision { return Decision{} }), "a")
	if x.req.ID != "" || x.hash() != x.srv.tracker.hash("a") {
		t.Errorf("got id %q, hash %v, want the hash only", x.req.ID, x.hash())
	}
	x.close()
}
