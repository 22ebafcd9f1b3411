package extproc

import (
	"bytes"
	"context"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	alsv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	epv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// counting is a buffer pool that knows how many buffers are out.
type counting struct{ out int }

func (c *counting) Get(n int) *[]byte { c.out++; b := make([]byte, n); return &b }
func (c *counting) Put(*[]byte)       { c.out-- }

// script plays one exchange from bytes, in any order of messages.
type script struct {
	t       *testing.T
	in      []byte
	pool    counting
	srv     *Server
	x       *exchange
	cancel  context.CancelFunc
	handler *recorder
	got     [8]int // messages by kind
	sent    [8]int // answers by kind
	// Bytes of bodies that were received, and those that were echoed in duplex modes, by direction.
	bytesIn, bytesOut [2]int
	ended             bool // an immediate response was sent
	timeouts          int
}

func (s *script) next() byte {
	if len(s.in) == 0 {
		return 0
	}
	b := s.in[0]
	s.in = s.in[1:]
	return b
}

// answer checks what is sent, which the generated code must be able to read.
func (s *script) answer(a *answer) error {
	defer a.bufs.Free()
	r := parse(s.t, a)
	if s.ended {
		s.t.Fatalf("got %v after an immediate response, want nothing", r)
	}
	echoed := func(k Kind, side int, c *epv3.CommonResponse) {
		s.sent[k]++
		s.bytesOut[side] += len(c.GetBodyMutation().GetStreamedResponse().GetBody())
	}
	switch v := r.GetResponse().(type) {
	case *epv3.ProcessingResponse_RequestHeaders:
		s.sent[KindRequestHeaders]++
	case *epv3.ProcessingResponse_ResponseHeaders:
		s.sent[KindResponseHeaders]++
	case *epv3.ProcessingResponse_RequestBody:
		echoed(KindRequestBody, 0, v.RequestBody.GetResponse())
	case *epv3.ProcessingResponse_ResponseBody:
		echoed(KindResponseBody, 1, v.ResponseBody.GetResponse())
	case *epv3.ProcessingResponse_RequestTrailers:
		s.sent[KindRequestTrailers]++
	case *epv3.ProcessingResponse_ResponseTrailers:
		s.sent[KindResponseTrailers]++
	case *epv3.ProcessingResponse_ImmediateResponse:
		s.ended = true
	default:
		s.timeouts++
	}
	return nil
}

// decide draws a decision.
func (s *script) decide(_ context.Context, r *Request) Decision {
	d := Decision{Endpoint: "10.0.0.1:8000"}
	switch choice := s.next(); choice % 8 {
	case 1:
		d.Endpoint = "no endpoint\n"
		d.Set = []Header{{"X-A", "a\x00b"}, {":path", "/x"}, {"host", "evil"}, {"", ""}}
		d.Remove = []string{"x-kvlane-a", ":method", "content-length", ""}
	case 2:
		d.Reject = &Reject{Status: 429, Body: []byte("no"), Headers: []Header{{"retry-after", "1"}}}
	case 3:
		d.Body = bytes.Repeat([]byte("b"), int(choice))
	case 4:
		d.Body = []byte{}
	case 5:
		d.Body = append([]byte("longer"), r.Body...)
	case 6:
		panic("scripted")
	case 7:
		s.cancel()
	}
	return d
}

var fuzzNames = []string{":path", ":method", "content-length", "x-request-id", "x-kvlane-pin", pickKey, ":status", "host", "", "x-a"}

func (s *script) headers() *corev3.HeaderMap {
	hm := &corev3.HeaderMap{}
	n := int(s.next())
	if n > 200 {
		n = 95 // near the limits of Envoy
	} else {
		n %= 8
	}
	for range n {
		name, value := s.next(), s.next()
		hm.Headers = append(hm.Headers, &corev3.HeaderValue{Key: fuzzNames[int(name)%len(fuzzNames)], RawValue: bytes.Repeat([]byte{'0' + value%10}, int(value/10))})
	}
	return hm
}

func (s *script) body() *epv3.HttpBody {
	op := s.next()
	sizes := []int{0, 1, 100, 1500, 5000, maxPiece, maxPiece + 1, 100_000}
	return &epv3.HttpBody{Body: bytes.Repeat([]byte("7"), sizes[op%8]), EndOfStream: op&8 != 0, GrpcMessageCompressed: op&16 != 0}
}

// message draws the next message.
func (s *script) message() *epv3.ProcessingRequest {
	r := &epv3.ProcessingRequest{}
	switch op := s.next(); op % 9 {
	case 0, 1:
		r.Request = &epv3.ProcessingRequest_RequestHeaders{RequestHeaders: &epv3.HttpHeaders{Headers: s.headers(), EndOfStream: op&128 != 0}}
	case 2, 3:
		r.Request = &epv3.ProcessingRequest_RequestBody{RequestBody: s.body()}
	case 4:
		r.Request = &epv3.ProcessingRequest_RequestTrailers{RequestTrailers: &epv3.HttpTrailers{}}
	case 5:
		r.Request = &epv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: &epv3.HttpHeaders{Headers: s.headers(), EndOfStream: op&128 != 0}}
	case 6:
		r.Request = &epv3.ProcessingRequest_ResponseBody{ResponseBody: s.body()}
	case 7:
		r.Request = &epv3.ProcessingRequest_ResponseTrailers{ResponseTrailers: &epv3.HttpTrailers{}}
	case 8:
		r.FlowControlInit = &epv3.ProcessingRequest_FlowControlInit{}
	}
	return r
}

func (s *script) send(r *epv3.ProcessingRequest) (more bool) {
	raw, err := proto.Marshal(r)
	if err != nil {
		s.t.Fatal(err)
	}
	var bufs mem.BufferSlice
	for len(raw) > 0 {
		n := min(len(raw), 4096)
		piece := s.pool.Get(n)
		copy(*piece, raw)
		if mem.IsBelowBufferPoolingThreshold(n) {
			s.pool.Put(piece)
		}
		bufs = append(bufs, mem.NewBuffer(piece, &s.pool))
		raw = raw[n:]
	}
	m := &message{first: !s.x.started}
	if err := m.decode(bufs); err != nil {
		s.t.Fatalf("got error %v of a valid message", err)
	}
	bufs.Free() // as gRPC does
	s.got[m.kind]++
	if m.kind.isBody() {
		side := 0
		if m.kind == KindResponseBody {
			side = 1
		}
		s.bytesIn[side] += m.size
	}
	return s.x.handle(m) == nil && !s.x.over
}

// play plays all of in and checks what holds for every order of messages.
func (s *script) play() {
	var ctx context.Context
	ctx, s.cancel = context.WithCancel(context.Background())
	defer s.cancel()
	setup := s.next()
	s.handler = &recorder{decide: s.decide, edits: setup&1 != 0}
	s.srv = NewServer(Options{
		BodyLimit: 150_000, MaxBodyBytes: 1 << 20, LateTickets: -1, ControlHeaders: testControls, SkipResponseBody: setup&2 != 0,
		RequestID: func(id string) string { return map[bool]string{true: "", false: "ours-" + id}[setup&4 == 0] },
		Now:       func() time.Time { return time.Unix(0, 0) },
	}, s.handler)
	s.x = &exchange{ctx: ctx, srv: s.srv, send: s.answer}
	modes := s.next()
	config := &epv3.ProtocolConfiguration{
		RequestBodyMode: filterv3.ProcessingMode_BodySendMode(modes % 7), ResponseBodyMode: filterv3.ProcessingMode_BodySendMode(modes / 7 % 7),
		SendBodyWithoutWaitingForHeaderResponse: setup&8 != 0,
	}
	reqMode, respMode := config.GetRequestBodyMode(), config.GetResponseBodyMode()
	for first, more := true, true; more && len(s.in) > 0; first = false {
		if s.in[0] == 255 { // not a message
			s.next()
			s.x.mayLeave()
			more = !s.x.giveUp(&Reject{Status: 503})
			continue
		}
		r := s.message()
		if first && setup&16 == 0 {
			r.ProtocolConfig, r.ObservabilityMode = config, setup&96 == 96
		}
		more = s.send(r)
	}
	s.x.close()
	s.x.close()
	s.check(reqMode, respMode)
}

func (s *script) check(reqMode, respMode filterv3.ProcessingMode_BodySendMode) {
	for k := KindRequestHeaders; k <= KindResponseTrailers; k++ {
		duplex := k == KindRequestBody && reqMode >= filterv3.ProcessingMode_FULL_DUPLEX_STREAMED || k == KindResponseBody && respMode >= filterv3.ProcessingMode_FULL_DUPLEX_STREAMED
		if s.sent[k] > s.got[k] && !duplex {
			s.t.Fatalf("%v: got %d answers to %d messages, want at most one each", k, s.sent[k], s.got[k])
		}
	}
	for side, out := range s.bytesOut {
		if most := 2*s.bytesIn[side] + 256; out > most { // edits of this test add less than that
			s.t.Fatalf("direction %d: got %d bytes for %d, want at most %d", side, out, s.bytesIn[side], most)
		}
	}
	if count, held := s.srv.InFlight(); count != 0 || held != 0 {
		s.t.Fatalf("got %d bodies of %d bytes held after the end, want none", count, held)
	}
	if n := len(s.srv.tracker.byID); n != 0 {
		s.t.Fatalf("got %d requests followed after the end, want none", n)
	}
	if s.pool.out != 0 {
		s.t.Fatalf("got %d buffers not freed (or freed twice, if negative)", s.pool.out)
	}
	for _, ticket := range s.handler.tickets {
		if ticket.ends > 1 || len(ticket.afterEnd) > 0 {
			s.t.Fatalf("got %d ends of a ticket and %v after it, want one end, last", ticket.ends, ticket.afterEnd)
		}
	}
	if n := len(s.handler.tickets); n > 1 {
		s.t.Fatalf("got %d decisions, want at most one", n)
	}
}

// FuzzExchange plays messages of Envoy in any order, in every mode.
func FuzzExchange(f *testing.F) {
	for setup := range byte(2) {
		for modes := byte(0); modes < 49; modes += 3 {
			// headers, two pieces of body, trailers, response with body and trailers
			f.Add([]byte{setup, modes, 0, 2, 0, 21, 9, 11, 2, 3, 0, 11, 12, 4, 0, 5, 1, 6, 20, 6, 3, 6, 14, 7})
		}
	}
	random := rand.New(rand.NewPCG(1, 2))
	for range 30 {
		in := make([]byte, 20+random.IntN(60))
		for i := range in {
			in[i] = byte(random.Uint32())
		}
		f.Add(in)
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) > 400 {
			return
		}
		(&script{t: t, in: in}).play()
	})
}

// FuzzAccessLog reads entries of the access log, of requests that are followed and of others, before and after their end.
func FuzzAccessLog(f *testing.F) {
	full := &alsv3.StreamAccessLogsMessage{LogEntries: &alsv3.StreamAccessLogsMessage_HttpLogs{HttpLogs: &alsv3.StreamAccessLogsMessage_HTTPAccessLogEntries{
		LogEntry: []*accesslogv3.HTTPAccessLogEntry{{
			CommonProperties: &accesslogv3.AccessLogCommon{
				AccessLogType: accesslogv3.AccessLogType_DownstreamEnd, ResponseFlags: &accesslogv3.ResponseFlags{UpstreamConnectionFailure: true},
				UpstreamRemoteAddress:     &corev3.Address{Address: &corev3.Address_SocketAddress{SocketAddress: &corev3.SocketAddress{Address: "::1", PortSpecifier: &corev3.SocketAddress_PortValue{PortValue: 80}}}},
				TimeToFirstUpstreamRxByte: durationpb.New(time.Second), Duration: &durationpb.Duration{Seconds: 1 << 60, Nanos: -1},
			},
			Request:  &accesslogv3.HTTPRequestProperties{RequestId: "r", RequestBodyBytes: 1 << 63},
			Response: &accesslogv3.HTTPResponseProperties{ResponseCode: wrapperspb.UInt32(503), ResponseCodeDetails: "x"},
		}, {Request: &accesslogv3.HTTPRequestProperties{RequestId: "other"}}},
	}}}
	raw, err := proto.Marshal(full)
	if err != nil {
		f.Fatal(err)
	}
	for _, end := range []bool{false, true} {
		f.Add(raw, end)
		f.Add(raw[:len(raw)/2], end)
		f.Add([]byte{}, end)
	}
	f.Fuzz(func(t *testing.T, raw []byte, endFirst bool) {
		m := &alsv3.StreamAccessLogsMessage{}
		if proto.Unmarshal(raw, m) != nil {
			return
		}
		unknown := 0
		o := Options{LateTickets: 2}
		o.Metrics.Failure = func(got Failure) {
			if got == FailureUnknownRequest {
				unknown++
			}
		}
		srv := NewServer(o, &recorder{})
		ticket := &recordedTicket{ended: make(chan struct{})}
		flight := &flight{id: srv.tracker.hash("r"), ticket: ticket, failed: srv.opts.Metrics.Failure, panicked: srv.opts.OnPanic}
		srv.tracker.add(flight)
		end := func() {
			if flight.end(time.Unix(1, 0)) {
				srv.tracker.retire(flight)
			} else {
				srv.tracker.remove(flight)
			}
		}
		if endFirst {
			end()
		}
		entries := m.GetHttpLogs().GetLogEntry()
		for _, e := range entries {
			(&accessLog{srv: srv}).entry(e)
		}
		if !endFirst {
			end()
		}
		final := func(e *accesslogv3.HTTPAccessLogEntry) bool {
			kind := e.GetCommonProperties().GetAccessLogType()
			return e.GetRequest().GetRequestId() == "r" && (kind == accesslogv3.AccessLogType_NotSet || kind == accesslogv3.AccessLogType_DownstreamEnd)
		}
		told := slices.ContainsFunc(entries, final)
		if got := len(ticket.gotOutcomes()); (got == 1) != told || got > 1 {
			t.Fatalf("got %d outcomes of %v, want one exactly if an entry is of the request", got, entries)
		}
		if left := len(srv.tracker.byID); left > 0 == told {
			t.Fatalf("got %d requests followed, want one exactly if the outcome is not known", left)
		}
		if unknown > len(entries) {
			t.Fatalf("got %d unknown requests of %d entries", unknown, len(entries))
		}
	})
}
