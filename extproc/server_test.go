package extproc

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	alsv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	epv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"go.uber.org/goleak"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var requestModes = []filterv3.ProcessingMode_BodySendMode{
	filterv3.ProcessingMode_NONE, filterv3.ProcessingMode_STREAMED, filterv3.ProcessingMode_BUFFERED,
	filterv3.ProcessingMode_BUFFERED_PARTIAL, filterv3.ProcessingMode_FULL_DUPLEX_STREAMED,
}

var responseModes = []filterv3.ProcessingMode_BodySendMode{
	filterv3.ProcessingMode_NONE, filterv3.ProcessingMode_STREAMED, filterv3.ProcessingMode_BUFFERED, filterv3.ProcessingMode_FULL_DUPLEX_STREAMED,
}

func genChunks(t *rapid.T, label string) [][]byte {
	n := rapid.IntRange(0, 6).Draw(t, label)
	var out [][]byte
	for range n {
		size := rapid.SampledFrom([]int{0, 1, 100, 16384, 62000, 62001, 200000}).Draw(t, "size")
		seed := byte(rapid.IntRange(1, 250).Draw(t, "seed"))
		b := make([]byte, size)
		for i := range b {
			b[i] = seed + byte(i*7)
		}
		out = append(out, b)
	}
	return out
}

// Law 3: any body in any chunks arrives unchanged, in every mode, with every kind of end; the
// handler saw exactly this body; and the answers are those that Envoy allows.
func TestBodiesArriveUnchanged(t *testing.T) {
	h := &recorder{}
	b := newBed(t, Options{}, h)
	rapid.Check(t, func(t *rapid.T) {
		c := &call{
			request:      rapid.SampledFrom(requestModes).Draw(t, "request mode"),
			response:     rapid.SampledFrom(responseModes).Draw(t, "response mode"),
			eager:        rapid.Bool().Draw(t, "eager"),
			chunks:       genChunks(t, "chunks"),
			emptyEnd:     rapid.Bool().Draw(t, "empty end"),
			repeatEnd:    rapid.Bool().Draw(t, "repeat end"),
			trailers:     rapid.Bool().Draw(t, "trailers"),
			respChunks:   genChunks(t, "response chunks"),
			respTrailers: rapid.Bool().Draw(t, "response trailers"),
			headers:      []Header{{":method", "POST"}, {":path", "/"}, {pickKey, "6.6.6.6:6"}},
		}
		streamed := c.request == filterv3.ProcessingMode_STREAMED
		if streamed && c.eager && c.trailers {
			c.trailers = false // Envoy never gets there: see TestEagerBodyWithTrailers
		}
		if streamed && !c.eager && len(c.chunks) > 0 {
			c.early = rapid.Bool().Draw(t, "early")
		}
		if c.request == filterv3.ProcessingMode_NONE {
			c.trailers = false
		}
		if c.respTrailers && c.response == filterv3.ProcessingMode_BUFFERED && len(c.respChunks) == 0 {
			c.respTrailers = false
		}
		before := h.count()
		res, err := b.play(context.Background(), c)
		if err != nil {
			t.Fatalf("%v (%s, %s)", err, c.request, c.response)
		}
		whole := bytes.Join(c.chunks, nil)
		if !bytes.Equal(res.body, whole) {
			t.Fatalf("got a request body of %d bytes, want %d", len(res.body), len(whole))
		}
		if want := bytes.Join(c.respChunks, nil); !bytes.Equal(res.respBody, want) {
			t.Fatalf("got a response body of %d bytes, want %d", len(res.respBody), len(want))
		}
		if res.pick != "10.0.0.1:8000" || res.set[pickKey] != res.pick {
			t.Fatalf("pick %q, header %q", res.pick, res.set[pickKey])
		}
		if h.count() != before+1 {
			t.Fatalf("got %d decisions, want 1", h.count()-before)
		}
		seen := h.seen()[before]
		switch {
		case c.request == filterv3.ProcessingMode_NONE || streamed && !c.eager:
			if len(seen) != 0 {
				t.Fatal("got a body in a mode that sends none")
			}
		case c.request == filterv3.ProcessingMode_BUFFERED_PARTIAL:
			if !bytes.HasPrefix(whole, seen) {
				t.Fatal("got a body that is not a prefix of the whole one")
			}
		case !bytes.Equal(seen, whole):
			t.Fatalf("got %d bytes at the handler, want %d", len(seen), len(whole))
		}
		tk := h.ticket(before)
		<-tk.ended
		if tk.ends != 1 || len(tk.afterEnd) > 0 || tk.status != 200 || tk.served != "10.0.0.9:1" {
			t.Fatalf("ticket: %d ends, after %v, status %d, served %q", tk.ends, tk.afterEnd, tk.status, tk.served)
		}
		if c.response != filterv3.ProcessingMode_NONE && !bytes.Equal(tk.body, bytes.Join(c.respChunks, nil)) {
			t.Fatal("got another response body at the ticket")
		}
		if res.respSet["x-kvlane-target"] != "w" {
			t.Fatal("got no response header of the ticket")
		}
	})
}

// An edit changes its own bytes and no others, and content-length stays correct.
func TestNewBody(t *testing.T) {
	h := &recorder{}
	b := newBed(t, Options{}, h)
	rapid.Check(t, func(t *rapid.T) {
		c := &call{
			request:  rapid.SampledFrom([]filterv3.ProcessingMode_BodySendMode{filterv3.ProcessingMode_STREAMED, filterv3.ProcessingMode_BUFFERED, filterv3.ProcessingMode_FULL_DUPLEX_STREAMED}).Draw(t, "mode"),
			eager:    true,
			chunks:   genChunks(t, "chunks"),
			emptyEnd: true,
		}
		whole := bytes.Join(c.chunks, nil)
		c.headers = []Header{{"content-length", strconv.Itoa(len(whole))}}
		want := rapid.SliceOfN(rapid.Byte(), 0, 2*len(whole)).Draw(t, "body")
		h.mu.Lock()
		h.decide = func(context.Context, *Request) Decision { return Decision{Body: want} }
		h.mu.Unlock()
		res, err := b.play(context.Background(), c)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(res.body, want) {
			t.Fatalf("got a body of %d bytes, want %d", len(res.body), len(want))
		}
		if c.request == filterv3.ProcessingMode_BUFFERED && len(want) != len(whole) && res.set["content-length"] != strconv.Itoa(len(want)) {
			t.Fatalf("got content-length %q, want %d", res.set["content-length"], len(want))
		}
		if c.request != filterv3.ProcessingMode_BUFFERED && len(want) != len(whole) && !slices.Contains(res.removed, "content-length") {
			t.Fatal("got the old content-length, want none")
		}
	})
}

// The data plane half-closes right after the body and still gets the decision.
func TestHalfCloseAfterBody(t *testing.T) {
	for _, m := range requestModes {
		t.Run(m.String(), func(t *testing.T) {
			h := &recorder{}
			b := newBed(t, Options{}, h)
			res, err := b.play(context.Background(), &call{request: m, chunks: [][]byte{[]byte("hello")}, halfClose: true})
			if err != nil {
				t.Fatal(err)
			}
			if res.pick == "" || string(res.body) != "hello" {
				t.Fatalf("pick %q, body %q", res.pick, res.body)
			}
			h.ticket(0).mustEnd(t)
		})
	}
}

// Trailers of an eagerly sent STREAMED body come only after the headers answer: a
// body complete by content-length is decided without waiting for them.
func TestEagerBodyWithTrailers(t *testing.T) {
	h := &recorder{}
	b := newBed(t, Options{}, h)
	res, err := b.play(context.Background(), &call{request: filterv3.ProcessingMode_STREAMED, eager: true, trailers: true,
		chunks: [][]byte{[]byte("hello"), []byte("world")}, headers: []Header{{"content-length", "10"}}})
	if err != nil || string(res.body) != "helloworld" || !res.trailersOK {
		t.Fatalf("%v, body %q, trailers %v", err, res.body, res.trailersOK)
	}
}

func TestRejectAndLimit(t *testing.T) {
	big := bytes.Repeat([]byte("x"), 3000)
	for _, m := range requestModes {
		for _, told := range []bool{true, false} {
			t.Run(m.String()+"/length told "+strconv.FormatBool(told), func(t *testing.T) {
				h := &recorder{}
				b := newBed(t, Options{BodyLimit: 2999}, h)
				c := &call{request: m, eager: true, chunks: [][]byte{big}}
				if told {
					c.headers = []Header{{"content-length", "3000"}}
				}
				res, err := b.play(context.Background(), c)
				if err != nil {
					t.Fatal(err)
				}
				if m == filterv3.ProcessingMode_NONE || m == filterv3.ProcessingMode_BUFFERED_PARTIAL {
					if res.immediate != nil {
						t.Fatal("got a rejection in a mode that does not hold the body")
					}
					return
				}
				if res.immediate.GetStatus().GetCode() != 413 || h.count() != 0 {
					t.Fatalf("answer %v, decided %d times", res.immediate, h.count())
				}
			})
		}
	}
	t.Run("handler", func(t *testing.T) {
		h := &recorder{decide: func(context.Context, *Request) Decision {
			return Decision{Reject: &Reject{Status: 429, Body: []byte("{}"), Headers: []Header{{"retry-after", "1"}}}}
		}}
		b := newBed(t, Options{}, h)
		for _, m := range requestModes {
			res, err := b.play(context.Background(), &call{request: m, chunks: [][]byte{[]byte("x")}})
			if err != nil || res.immediate.GetStatus().GetCode() != 429 {
				t.Fatalf("%s: %v, %v", m, res.immediate, err)
			}
		}
		for i := range requestModes {
			h.ticket(i).mustEnd(t)
		}
	})
}

func TestClientGoesWhileDeciding(t *testing.T) {
	entered := make(chan struct{})
	h := &recorder{decide: func(ctx context.Context, _ *Request) Decision {
		close(entered)
		<-ctx.Done()
		return Decision{Endpoint: "10.0.0.1:8000"}
	}}
	b := newBed(t, Options{}, h)
	ctx, cancel := context.WithCancel(context.Background())
	errs := make(chan error, 1)
	go func() {
		_, err := b.play(ctx, &call{request: filterv3.ProcessingMode_FULL_DUPLEX_STREAMED, chunks: [][]byte{[]byte("x")}})
		errs <- err
	}()
	<-entered
	cancel()
	if err := <-errs; err == nil {
		t.Fatal("got no error, want one")
	}
	waitFor(t, func() bool { return h.count() == 1 })
	h.ticket(0).mustEnd(t)
	if b.failed(FailureCancelled) != 1 {
		t.Error("got no count of the failure, want one")
	}
}

func waitFor(tb testing.TB, ok func() bool) {
	tb.Helper()
	for range 2000 {
		if ok() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	tb.Fatal("waited too long for the condition")
}

// The server asks for more time once, while a decision that takes long is on hold: not before,
// and not for one that hangs without a hold.
func TestTimeoutIsExtended(t *testing.T) {
	release := make(chan struct{})
	h := &recorder{decide: func(_ context.Context, r *Request) Decision {
		time.Sleep(100 * time.Millisecond) // longer than ExtendAfter, and not on hold
		if r.Path == "/hangs" {
			return Decision{}
		}
		for range 2 {
			r.Hold(true)
			r.Hold(false)
		}
		<-release
		return Decision{}
	}}
	b := newBed(t, Options{ExtendTimeout: time.Minute, ExtendAfter: time.Millisecond}, h)
	hangs, err := b.client.Process(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := hangs.Send(&epv3.ProcessingRequest{
		Request: &epv3.ProcessingRequest_RequestHeaders{RequestHeaders: &epv3.HttpHeaders{EndOfStream: true,
			Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{{Key: ":path", RawValue: []byte("/hangs")}}}}},
		ProtocolConfig: &epv3.ProtocolConfiguration{},
	}); err != nil {
		t.Fatal(err)
	}
	if r, err := hangs.Recv(); err != nil || r.GetRequestHeaders() == nil {
		t.Fatalf("got %v, %v, want the decision and no more time", r, err)
	}
	st, err := b.client.Process(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := st.Send(&epv3.ProcessingRequest{
		Request:        &epv3.ProcessingRequest_RequestHeaders{RequestHeaders: &epv3.HttpHeaders{EndOfStream: true}},
		ProtocolConfig: &epv3.ProtocolConfiguration{},
	}); err != nil {
		t.Fatal(err)
	}
	r, err := st.Recv()
	if err != nil || r.GetOverrideMessageTimeout().AsDuration() != time.Minute {
		t.Fatalf("got %v, %v", r, err)
	}
	close(release)
	if r, err = st.Recv(); err != nil || r.GetRequestHeaders() == nil {
		t.Fatalf("got %v, %v", r, err)
	}
}

// openDecided opens a stream whose request is decided and which waits for its response.
func openDecided(t *testing.T, b *bed, resp filterv3.ProcessingMode_BodySendMode, id string) epv3.ExternalProcessor_ProcessClient {
	t.Helper()
	st, err := b.client.Process(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := st.Send(&epv3.ProcessingRequest{
		Request: &epv3.ProcessingRequest_RequestHeaders{RequestHeaders: &epv3.HttpHeaders{EndOfStream: true,
			Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{{Key: "x-request-id", RawValue: []byte(id)}}}}},
		ProtocolConfig: &epv3.ProtocolConfiguration{ResponseBodyMode: resp},
	}); err != nil {
		t.Fatal(err)
	}
	if _, err := st.Recv(); err != nil {
		t.Fatal(err)
	}
	return st
}

// A drain closes decided streams where that is safe, serves new ones, and keeps a full duplex
// response to its end.
func TestDrain(t *testing.T) {
	h := &recorder{}
	b := newBed(t, Options{DrainQuiet: time.Millisecond}, h)
	b.srv.SetServing(true)
	plain := openDecided(t, b, filterv3.ProcessingMode_NONE, "a")
	duplex := openDecided(t, b, filterv3.ProcessingMode_FULL_DUPLEX_STREAMED, "b")
	drained := make(chan struct{})
	go func() {
		b.srv.Drain(context.Background())
		close(drained)
	}()
	if r, err := plain.Recv(); err == nil || err.Error() != "EOF" {
		t.Fatalf("decided stream: %v, %v", r, err)
	}
	h.ticket(0).mustEnd(t)
	late, err := b.play(context.Background(), &call{request: filterv3.ProcessingMode_BUFFERED, chunks: [][]byte{[]byte("x")}, halfClose: true})
	if err != nil || late.pick == "" {
		t.Fatalf("new stream while draining: %v", err)
	}
	hc, err := grpc_health_v1.NewHealthClient(b.conn).Check(t.Context(), &grpc_health_v1.HealthCheckRequest{Service: serviceName})
	if err != nil || hc.GetStatus() != grpc_health_v1.HealthCheckResponse_NOT_SERVING {
		t.Fatalf("health %v, %v", hc, err)
	}
	select {
	case <-drained:
		t.Fatal("got the end of the drain, want it to wait for the full duplex response")
	default:
	}
	if err := duplex.Send(bodyMessage(true, []byte("tail"), true)); err != nil {
		t.Fatal(err)
	}
	r, err := duplex.Recv()
	if err != nil || string(r.GetResponseBody().GetResponse().GetBodyMutation().GetStreamedResponse().GetBody()) != "tail" {
		t.Fatalf("got %v, %v", r, err)
	}
	<-drained
	h.ticket(1).mustEnd(t)
}

// Many concurrent streams, in all modes, end without leaving anything behind.
func TestManyStreams(t *testing.T) {
	h := &recorder{}
	b := newBed(t, Options{}, h)
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			c := &call{request: requestModes[i%len(requestModes)], response: responseModes[i%len(responseModes)], eager: true,
				chunks: [][]byte{payload(20_000 + i), payload(i)}, respChunks: [][]byte{payload(100 + i), payload(70_000)}}
			res, err := b.play(context.Background(), c)
			if err != nil {
				t.Error(err)
				return
			}
			if !bytes.Equal(res.body, bytes.Join(c.chunks, nil)) || !bytes.Equal(res.respBody, bytes.Join(c.respChunks, nil)) {
				t.Error("got a changed body")
			}
		})
	}
	wg.Wait()
	if h.count() != 200 {
		t.Fatalf("got %d decisions, want 200", h.count())
	}
	for i := range 200 {
		h.ticket(i).mustEnd(t)
	}
}

func TestHealthNames(t *testing.T) {
	b := newBed(t, Options{}, &recorder{})
	hc := grpc_health_v1.NewHealthClient(b.conn)
	for _, c := range []struct{ serving, alive bool }{{false, true}, {true, true}, {true, false}, {true, true}} {
		b.srv.SetServing(c.serving)
		b.srv.SetAlive(c.alive)
		for _, name := range []string{"", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor", "inference-extension"} {
			r, err := hc.Check(t.Context(), &grpc_health_v1.HealthCheckRequest{Service: name})
			if err != nil {
				t.Fatalf("%q: %v", name, err)
			}
			if ok := r.GetStatus() == grpc_health_v1.HealthCheckResponse_SERVING; ok != (c.alive && (c.serving || name == "liveness")) {
				t.Errorf("%q: got %v while %+v", name, r.GetStatus(), c)
			}
		}
	}
}

// First token from an observing stream, outcome from the access log; both may
// come before or after the end.
func TestFirstTokenAndOutcome(t *testing.T) {
	h := &recorder{}
	b := newBed(t, Options{}, h)
	observe := func(id string) {
		t.Helper()
		st, err := b.client.Process(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		m := bodyMessage(true, []byte("data"), false)
		m.ObservabilityMode = true
		m.Attributes = map[string]*structpb.Struct{attributesKey: {Fields: map[string]*structpb.Value{"request.id": structpb.NewStringValue(id)}}}
		if err := st.Send(m); err != nil {
			t.Fatal(err)
		}
		if _, err := st.Recv(); err == nil || err.Error() != "EOF" {
			t.Fatalf("observing stream: %v", err)
		}
	}
	logEntry := func(id string) {
		t.Helper()
		als, err := alsv3.NewAccessLogServiceClient(b.conn).StreamAccessLogs(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		e := &accesslogv3.HTTPAccessLogEntry{
			CommonProperties: &accesslogv3.AccessLogCommon{ResponseFlags: &accesslogv3.ResponseFlags{DownstreamConnectionTermination: true}, UpstreamRemoteAddress: throughUpstream.GetUpstreamRemoteAddress()},
			Request:          &accesslogv3.HTTPRequestProperties{RequestId: id, RequestBodyBytes: 5},
			Response:         &accesslogv3.HTTPResponseProperties{ResponseCode: wrapperspb.UInt32(200), ResponseBodyBytes: 7, ResponseCodeDetails: "via_upstream"},
		}
		if err := als.Send(&alsv3.StreamAccessLogsMessage{LogEntries: &alsv3.StreamAccessLogsMessage_HttpLogs{
			HttpLogs: &alsv3.StreamAccessLogsMessage_HTTPAccessLogEntries{LogEntry: []*accesslogv3.HTTPAccessLogEntry{e}}}}); err != nil {
			t.Fatal(err)
		}
		if _, err := als.CloseAndRecv(); err != nil {
			t.Fatal(err)
		}
	}
	end := func(st epv3.ExternalProcessor_ProcessClient, i int) *recordedTicket {
		t.Helper()
		if err := st.CloseSend(); err != nil {
			t.Fatal(err)
		}
		tk := h.ticket(i)
		tk.mustEnd(t)
		return tk
	}
	a := openDecided(t, b, filterv3.ProcessingMode_NONE, "a")
	observe("a")
	observe("a")
	logEntry("a") // before the end: kept
	tk := end(a, 0)
	waitFor(t, func() bool { return len(tk.gotOutcomes()) == 1 })
	want := Outcome{Status: 200, Flags: []string{"downstream_connection_termination"}, Details: "via_upstream", BytesReceived: 5, BytesSent: 7}
	if o := tk.gotOutcomes()[0]; tk.tokens != 1 || o.Status != want.Status || !slices.Equal(o.Flags, want.Flags) || o.Details != want.Details ||
		o.BytesReceived != 5 || o.BytesSent != 7 || !o.FirstToken.IsZero() {
		t.Fatalf("tokens %d, outcome %+v", tk.tokens, o)
	}
	c := openDecided(t, b, filterv3.ProcessingMode_NONE, "c")
	tk = end(c, 1)
	waitFor(t, func() bool { return b.srv.streamsOpen() == 0 })
	observe("c") // late
	logEntry("c")
	waitFor(t, func() bool { return len(tk.gotOutcomes()) == 1 })
	if tk.tokens != 0 || tk.gotOutcomes()[0].FirstToken.IsZero() || b.failed(FailureLateFirstToken) != 1 {
		t.Fatal("got no late first token in the outcome")
	}
	logEntry("c") // a second entry finds no flight
	if b.failed(FailureUnknownRequest) != 1 || len(tk.gotOutcomes()) != 1 {
		t.Fatal("got two outcomes, want one")
	}
}

// Memory for late outcomes is bounded: the oldest is forgotten.
func TestLateTicketsAreBounded(t *testing.T) {
	lost := 0
	tr := newTracker(3, func(f Failure) {
		if f == FailureOutcomeOverflow {
			lost++
		}
	})
	for i := range 100 {
		f := &flight{id: tr.hash(strconv.Itoa(i)), ticket: &recordedTicket{ended: make(chan struct{})}, failed: func(Failure) {}}
		tr.add(f)
		if !f.end(time.Time{}) {
			t.Fatal("got a ticket that does not wait, want it to")
		}
		tr.retire(f)
	}
	if len(tr.byID) != 3 || len(tr.late) != 3 || lost != 97 {
		t.Fatalf("%d known, %d late, %d lost", len(tr.byID), len(tr.late), lost)
	}
	if tr.find(tr.hash("99"), true) == nil || tr.find(tr.hash("96"), true) != nil {
		t.Fatal("got older tickets, want the newest kept")
	}
}

// Without an access log no state of an ended request is kept, and nothing is counted.
func TestWithoutAnAccessLogNoTicketWaits(t *testing.T) {
	h := &recorder{}
	b := newBed(t, Options{LateTickets: -1}, h)
	for i := range 3 {
		st := openDecided(t, b, filterv3.ProcessingMode_NONE, strconv.Itoa(i))
		if err := st.CloseSend(); err != nil {
			t.Fatal(err)
		}
		h.ticket(i).mustEnd(t)
	}
	waitFor(t, func() bool { return b.srv.streamsOpen() == 0 })
	if n := len(b.srv.tracker.byID); n != 0 || cap(b.srv.tracker.late) != 0 {
		t.Errorf("got %d requests kept, want 0", n)
	}
	if n := b.failed(FailureOutcomeOverflow); n != 0 {
		t.Errorf("got %d counted as overflow, want 0", n)
	}
}

// A ticket that panics does no harm.
type panickyTicket struct{}

func (panickyTicket) ResponseHeaders(int, string) []Header { panic("headers") }
func (panickyTicket) ResponseBody([]byte, bool)            { panic("body") }
func (panickyTicket) FirstToken(time.Time)                 { panic("token") }
func (panickyTicket) End(time.Time)                        { panic("end") }

type handlerFunc func(context.Context, *Request) Decision

// Decide implements Handler.
func (f handlerFunc) Decide(ctx context.Context, r *Request) Decision { return f(ctx, r) }

func TestPanickyTicket(t *testing.T) {
	var mu sync.Mutex
	seen := map[any]string{}
	b := newBed(t, Options{OnPanic: func(value any, stack []byte) {
		mu.Lock()
		defer mu.Unlock()
		seen[value] = string(stack)
	}}, handlerFunc(func(context.Context, *Request) Decision { return Decision{Ticket: panickyTicket{}} }))
	res, err := b.play(context.Background(), &call{request: filterv3.ProcessingMode_BUFFERED, response: filterv3.ProcessingMode_STREAMED,
		chunks: [][]byte{[]byte("q")}, respChunks: [][]byte{[]byte("a")}})
	if err != nil || string(res.respBody) != "a" {
		t.Fatalf("%v, %q", err, res.respBody)
	}
	waitFor(t, func() bool { return b.failed(FailurePanic) == 4 })
	waitFor(t, func() bool { mu.Lock(); defer mu.Unlock(); return len(seen) == 4 })
	mu.Lock()
	defer mu.Unlock()
	for value, method := range map[string]string{"headers": "ResponseHeaders", "body": "ResponseBody", "token": "FirstToken", "end": "End"} {
		if !strings.Contains(seen[value], "panickyTicket."+method) {
			t.Errorf("panic %q: stack %s", value, seen[value])
		}
	}
}

// A panic of a handler is reported with its stack, and the request continues.
func TestPanickyHandler(t *testing.T) {
	told := make(chan string, 1)
	b := newBed(t, Options{OnPanic: func(value any, stack []byte) { told <- fmt.Sprint(value, string(stack)) }},
		handlerFunc(func(context.Context, *Request) Decision { panic("no decision") }))
	res, err := b.play(context.Background(), &call{request: filterv3.ProcessingMode_BUFFERED, chunks: [][]byte{[]byte("q")}})
	if err != nil {
		t.Fatalf("got error %v, want the request to pass", err)
	}
	if res.pick != "" {
		t.Errorf("got pick %q, want none", res.pick)
	}
	if text := <-told; !strings.Contains(text, "no decision") || !strings.Contains(text, "TestPanickyHandler") {
		t.Errorf("got %q, want the panic's value and its stack", text)
	}
}

// With PanicReject a panic of a handler is answered with it; other decisions are not.
func TestPanicReject(t *testing.T) {
	for panics, want := range map[bool]int{true: 500, false: 0} {
		b := newBed(t, Options{PanicReject: &Reject{Status: 500, Details: "panicked"}}, handlerFunc(func(context.Context, *Request) Decision {
			if panics {
				panic("no decision")
			}
			return Decision{}
		}))
		res, err := b.play(context.Background(), &call{request: filterv3.ProcessingMode_BUFFERED, chunks: [][]byte{[]byte("q")}})
		if err != nil {
			t.Fatalf("got error %v, want none", err)
		}
		if got := int(res.immediate.GetStatus().GetCode()); got != want || (b.failed(FailurePanic) == 1) != panics {
			t.Errorf("panics %v: got status %d and %d panics counted, want status %d", panics, got, b.failed(FailurePanic), want)
		}
	}
}

// Garbage instead of a message ends the stream and is counted.
func TestMalformedMessage(t *testing.T) {
	b := newBed(t, Options{}, &recorder{})
	st, err := b.conn.NewStream(t.Context(), &processDesc.Streams[0], "/"+serviceName+"/Process")
	if err != nil {
		t.Fatal(err)
	}
	if err := st.SendMsg(&grpc_health_v1.HealthCheckRequest{Service: "x"}); err != nil { // field 1: unknown, skipped
		t.Fatal(err)
	}
	// A string where field 2 must be a message.
	bad := &grpc_health_v1.HealthCheckRequest{}
	bad.ProtoReflect().SetUnknown([]byte{0x12, 0x02, 0x0a, 0x7f})
	if err := st.SendMsg(bad); err != nil {
		t.Fatal(err)
	}
	if err := st.RecvMsg(&grpc_health_v1.HealthCheckResponse{}); err == nil {
		t.Fatal("got an answer to garbage, want an error")
	}
	waitFor(t, func() bool { return b.failed(FailureProtocol) == 1 })
}

// Law 4: after our mutation no control header is the client's.
func TestClientCannotSteer(t *testing.T) {
	names := []string{pickKey, "x-gateway-inference-objective", "x-override-routed-dp-rank", "x-kvlane-rank", "x-kvlane-", "x-kvlane", "x-other"}
	ctl := newControls(testControls)
	rapid.Check(t, func(t *rapid.T) {
		v := &headerView{seen: true}
		for range rapid.IntRange(0, 6).Draw(t, "headers") {
			v.headers = append(v.headers, Header{rapid.SampledFrom(names).Draw(t, "name"), rapid.SampledFrom([]string{"", "evil", "1.1.1.1:1"}).Draw(t, "value")})
		}
		v.total = len(v.headers)
		pick := rapid.SampledFrom([]string{"", "1.1.1.1:1"}).Draw(t, "pick")
		d := &Decision{}
		if rapid.Bool().Draw(t, "own") {
			d.Set = []Header{{"x-kvlane-rank", "ours"}}
		}
		var ms []mutation
		if rapid.Bool().Draw(t, "in two answers") {
			ms = append(ms, ctl.strip(v))
		}
		m, _ := ctl.requestMutation(v, d, pick)
		after := v.headers
		for _, m := range append(ms, m) {
			after = apply(after, m)
		}
		for _, h := range after {
			switch {
			case h.Name == pickKey && h.Value == pick && pick != "":
			case h.Name == "x-kvlane-rank" && h.Value == "ours" && len(d.Set) > 0:
			case ctl.match(h.Name):
				t.Fatalf("got the control header %v left of %v", h, v.headers)
			}
		}
		if pick != "" && !slices.Contains(after, Header{pickKey, pick}) {
			t.Fatal("got no pick")
		}
	})
}

// apply does what Envoy does with a mutation: it removes headers first, then overwrites.
func apply(hs []Header, m mutation) (out []Header) {
	for _, h := range hs {
		if !slices.Contains(m.remove, h.Name) && !m.sets(h.Name) {
			out = append(out, h)
		}
	}
	return append(out, m.set...)
}

// Near the limits a mutation that would exceed them loses only the pick's header, which the
// metadata carries too. If it still does not fit, it is not sent.
func TestHeaderBudget(t *testing.T) {
	const pick = "1.1.1.1:1"
	set := &Decision{Set: []Header{{"x-new", "1"}, {"h0", "w"}}}
	long := strings.Repeat("v", maxHeaderTotal-500)
	for name, c := range map[string]struct {
		headers int
		first   string // value of the first header
		client  []Header
		d       *Decision
		fits    bool
		adds    int
	}{
		"room for both":        {98, "v", nil, set, true, 2},
		"room for one":         {99, "v", nil, set, true, 1},
		"no room":              {100, "v", nil, set, false, 0},
		"over by Envoy's":      {105, "v", nil, set, false, 0},
		"over, nothing to say": {105, "v", nil, &Decision{}, true, 0},
		"only the pick":        {100, "v", nil, &Decision{}, true, 0},
		"over, to be replaced": {101, "v", nil, &Decision{Set: []Header{{"h0", "w"}}}, false, 0},
		"to be replaced":       {100, "v", nil, &Decision{Set: []Header{{"h0", "w"}}}, true, 0},
		"a path":               {99, "v", []Header{{":path", "/"}}, &Decision{Set: []Header{{":path", "/other"}}}, true, 1},
		"removals make room":   {97, "v", []Header{{"x-steer", "1"}, {"x-steer", "2"}, {"x-gone", "3"}}, &Decision{Set: set.Set, Remove: []string{"x-gone"}}, true, 2},
		"limits raised":        {150, "v", nil, set, true, 2},
		"bytes":                {10, long, nil, &Decision{Set: []Header{{"x-new", strings.Repeat("v", 600)}}}, false, 0},
		"bytes, replaced":      {10, long, nil, &Decision{Set: []Header{{"h0", "w"}, {"x-new", strings.Repeat("v", 600)}}}, true, 2},
	} {
		v := &headerView{seen: true}
		for i := range c.headers {
			v.headers = append(v.headers, Header{"h" + strconv.Itoa(i), "v"})
		}
		v.headers[0].Value = c.first
		v.headers = append(v.headers, c.client...)
		v.total = len(v.headers)
		for _, h := range v.headers {
			v.bytes += len(h.Name) + len(h.Value)
		}
		ctl := newControls([]string{"x-steer"})
		m, refused := ctl.requestMutation(v, c.d, pick)
		if got := v.makeRoom(&m); got != c.fits || refused != 0 {
			t.Errorf("%s: fits: got %v, want %v; %d headers refused, want 0", name, got, c.fits, refused)
		}
		if !c.fits {
			continue
		}
		adds := 0
		for _, h := range m.set {
			if _, n := v.get(h.Name); n == 0 && h.Name[0] != ':' {
				adds++
			}
		}
		if adds != c.adds {
			t.Errorf("%s: got %d headers added, want %d", name, adds, c.adds)
		}
	}
}

// A request without room for the headers of its decision is rejected and releases its booking.
func TestNoRoomForADecision(t *testing.T) {
	for name, c := range map[string]struct {
		client []Header
		set    []Header
		reject bool
	}{
		"a rank":           {nil, []Header{{"x-rank", "1"}}, true},
		"nothing":          {nil, nil, false},
		"a control header": {[]Header{{subsetKey, "w"}}, nil, true},
	} {
		for _, mode := range []filterv3.ProcessingMode_BodySendMode{filterv3.ProcessingMode_BUFFERED, filterv3.ProcessingMode_FULL_DUPLEX_STREAMED, filterv3.ProcessingMode_NONE} {
			fits := false
			h := &recorder{decide: func(_ context.Context, r *Request) Decision {
				d := Decision{Endpoint: "10.0.0.1:8000", Set: c.set}
				fits = r.Fits(&d)
				return d
			}}
			b := newBed(t, Options{}, h)
			headers := slices.Clone(c.client)
			for i := range 103 {
				headers = append(headers, Header{"h" + strconv.Itoa(i), "v"})
			}
			res, err := b.play(t.Context(), &call{request: mode, headers: headers, chunks: [][]byte{[]byte("{}")}, emptyEnd: true})
			if err != nil {
				t.Fatal(err)
			}
			if got := res.immediate != nil; got != c.reject || got && res.immediate.GetStatus().GetCode() != 431 {
				t.Errorf("%s, %s: got %v, want a 431: %v", name, mode, res.immediate, c.reject)
			}
			if decided := h.count() > 0; decided && fits == c.reject {
				t.Errorf("%s, %s: fits: got %v, want %v", name, mode, fits, !c.reject)
			}
			if !c.reject && (res.pick != "10.0.0.1:8000" || len(res.set) > 0) {
				t.Errorf("%s, %s: got pick %q with headers %v, want the metadata alone", name, mode, res.pick, res.set)
			}
			for i := range h.count() {
				<-h.ticket(i).ended
			}
		}
	}
}
