package extproc

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"net"
	"net/http"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	alsv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	epv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/types/known/structpb"
	"pgregory.net/rapid"
)

// hog opens a stream whose body never ends and sends size bytes of it, in pieces. It returns the
// status of the answer, 0 if none came.
func hog(t *testing.T, b *bed, size, piece int) (end context.CancelFunc, status int) {
	t.Helper()
	ctx, end := context.WithCancel(t.Context())
	st, err := b.client.Process(ctx)
	if err != nil {
		t.Fatal(err)
	}
	before := b.failed(FailureTooManyBodies)
	state := func() (count, arriving int, held int64) {
		b.srv.bodies.mu.Lock()
		defer b.srv.bodies.mu.Unlock()
		return b.srv.bodies.count, b.srv.bodies.arriving.Len(), b.srv.bodies.bytes
	}
	count, arriving, held := state()
	for sent := 0; sent < size && b.failed(FailureTooManyBodies) == before; sent += piece {
		m := bodyMessage(false, bytes.Repeat([]byte("x"), piece), false)
		m.ProtocolConfig = &epv3.ProtocolConfiguration{RequestBodyMode: filterv3.ProcessingMode_FULL_DUPLEX_STREAMED}
		if err := st.Send(m); err != nil {
			break // answered
		}
	}
	waitFor(t, func() bool {
		n, a, bytes := state()
		// All of it has arrived and is counted, see heldBytes: a piece that was still to come could be refused later, and a
		// message that is being read is counted twice, one after the other.
		return b.failed(FailureTooManyBodies) > before || n == count+1 && a == arriving+1 && bytes-held >= int64(size+size/4)
	})
	if b.failed(FailureTooManyBodies) == before {
		return end, 0
	}
	for {
		r, err := st.Recv()
		if err != nil {
			t.Fatalf("got %v, want an answer", err)
		}
		if i := r.GetImmediateResponse(); i != nil {
			if set := i.GetHeaders().GetSetHeaders(); len(set) == 0 || set[0].GetHeader().GetKey() != "retry-after" {
				t.Errorf("got headers %v, want retry-after", set)
			}
			if _, err := st.Recv(); !errors.Is(err, io.EOF) {
				t.Errorf("got %v, want the end of the stream", err)
			}
			return end, int(i.GetStatus().GetCode())
		}
	}
}

func heapInUse() int64 {
	for range 3 { // two collections empty the pools
		runtime.GC()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapInuse)
}

// A gateway may buffer more than BodyLimit, and go on without a server that fails: a longer body is answered, however long.
func TestOneMessageFarAboveTheLimit(t *testing.T) {
	b := newBed(t, Options{BodyLimit: 1000}, &recorder{})
	st, err := b.client.Process(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	m := bodyMessage(false, bytes.Repeat([]byte("x"), 9<<20), true)
	m.ProtocolConfig = &epv3.ProtocolConfiguration{RequestBodyMode: filterv3.ProcessingMode_BUFFERED}
	if err := st.Send(m); err != nil {
		t.Fatal(err)
	}
	r, err := st.Recv()
	if got := r.GetImmediateResponse().GetStatus().GetCode(); err != nil || got != 413 {
		t.Errorf("got status %d and %v, want 413", got, err)
	}
}

// announce begins a message of n bytes on a stream of its own, of which it sends part, and returns the answer's body and the
// gRPC status, both "" while the server waits for more.
func announce(t *testing.T, b *bed, method string, n uint32, part int) (body, status string) {
	t.Helper()
	_, before := b.srv.InFlight()
	protocols := &http.Protocols{}
	protocols.SetUnencryptedHTTP2(true)
	client := &http.Client{Transport: &http.Transport{Protocols: protocols, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", b.socket)
	}}}
	t.Cleanup(client.CloseIdleConnections)
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	r, w := io.Pipe()
	t.Cleanup(func() { _ = w.Close() })
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://kvlane/"+method, r)
	if err != nil {
		t.Fatal(err)
	}
	req.Header = http.Header{"Content-Type": {"application/grpc"}, "Te": {"trailers"}}
	type answer struct{ body, status string }
	got := make(chan answer, 1)
	go func() {
		resp, err := client.Do(req)
		if err != nil {
			return // the test has ended
		}
		defer resp.Body.Close()
		text, _ := io.ReadAll(resp.Body)
		got <- answer{string(text), resp.Trailer.Get("Grpc-Status") + resp.Header.Get("Grpc-Status")}
	}()
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		_, _ = w.Write(append(binary.BigEndian.AppendUint32([]byte{0}, n), make([]byte, part)...))
	}()
	for range 200 {
		select {
		case a := <-got:
			return a.body, a.status
		case <-sent:
			if _, held := b.srv.InFlight(); held > before {
				return "", ""
			}
		default:
		}
		time.Sleep(10 * time.Millisecond)
	}
	return "", ""
}

// What is too long is answered, and the stream ended, before any of it is received.
func TestLongMessagesAreRefusedUnread(t *testing.T) {
	b := newBed(t, Options{}, &recorder{})
	for method, want := range map[string]string{
		serviceName + "/Process":                                       "0",
		"grpc.health.v1.Health/Check":                                  "8",
		"grpc.health.v1.Health/Watch":                                  "8",
		"envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs": "1",
	} {
		body, status := announce(t, b, method, math.MaxInt32, 1000)
		if status != want || strings.Contains(body, "request_too_large") != (want == "0") {
			t.Errorf("%s: got status %q and %q, want %s", method, status, body, want)
		}
	}
	if b.failed(FailureBodyTooLarge) != 1 {
		t.Errorf("got %d bodies too large, want 1", b.failed(FailureBodyTooLarge))
	}
}

// Large messages on their way count as bodies: what finds no room is answered 503 unread.
func TestMessagesOnTheirWayAreBounded(t *testing.T) {
	b := newBed(t, Options{MaxBodyBytes: 64 << 20}, &recorder{})
	refused := 0
	for range 5 {
		body, status := announce(t, b, serviceName+"/Process", 30<<20, 1000)
		if status != "" {
			refused++
			if !strings.Contains(body, "retry-after") {
				t.Errorf("got status %s and %q, want retry-after", status, body)
			}
		}
	}
	if _, held := b.srv.InFlight(); refused != 4 || held < 30<<20 || held > 64<<20 {
		t.Errorf("got %d refused and %d bytes held, want 4 refused and one held", refused, held)
	}
}

// What others than Envoy can hold of a stream that is not read is far less than a body, and longer messages count from their beginning.
func TestABodyCountsBeforeItIsWhole(t *testing.T) {
	b := newBed(t, Options{}, &recorder{})
	for _, n := range []uint32{100 << 10, 1 << 20} {
		_, before := b.srv.InFlight()
		announce(t, b, serviceName+"/Process", n, 1000)
		if _, held := b.srv.InFlight(); held > before != (n == 1<<20) {
			t.Errorf("got %d bytes held of a message of %d, want only the longer one counted", held-before, n)
		}
	}
}

// Long messages of other services share a room of their own while they are received. Calls take short ones only.
func TestMessagesOfOtherServicesAreBounded(t *testing.T) {
	b := newBed(t, Options{}, &recorder{})
	var refused, held atomic.Int64
	var wg sync.WaitGroup
	for range 9 {
		wg.Go(func() {
			switch _, status := announce(t, b, "envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs", 15<<20, 1000); status {
			case "":
				held.Add(1)
			case "1":
				refused.Add(1)
			default:
				t.Errorf("got status %s, want 1 for what finds no room", status)
			}
		})
	}
	wg.Wait()
	if held.Load() != 7 || refused.Load() != 2 {
		t.Errorf("got %d messages held and %d refused, want 7 and 2", held.Load(), refused.Load())
	}
	if _, status := announce(t, b, "grpc.health.v1.Health/Check", maxUnary+1, 1000); status != "8" {
		t.Errorf("got status %q for a long health check, want 8", status)
	}
}

// blocking is an access log service that hands each message over and waits before it asks for the next one.
type blocking struct {
	alsv3.UnimplementedAccessLogServiceServer

	got, next chan struct{}
}

// StreamAccessLogs implements the service.
func (b blocking) StreamAccessLogs(stream alsv3.AccessLogService_StreamAccessLogsServer) error {
	for {
		if _, err := stream.Recv(); err != nil {
			return nil //nolint:nilerr // the client has left
		}
		b.got <- struct{}{}
		<-b.next
	}
}

// Messages of other services are decoded while the bytes of those that are being handled leave room, and short ones always: decoded
// they take several times their bytes.
func TestDecodedMessagesAreBounded(t *testing.T) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer(GRPCOptions(Options{})...)
	service := blocking{got: make(chan struct{}), next: make(chan struct{})}
	alsv3.RegisterAccessLogServiceServer(g, service)
	go func() { _ = g.Serve(lis) }()
	defer g.Stop()
	send := func(size int) {
		conn, err := grpc.NewClient(lis.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		stream, err := alsv3.NewAccessLogServiceClient(conn).StreamAccessLogs(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			_ = stream.Send(&alsv3.StreamAccessLogsMessage{Identifier: &alsv3.StreamAccessLogsMessage_Identifier{LogName: strings.Repeat("x", size)}})
		}()
	}
	handled := func(wait time.Duration) bool {
		select {
		case <-service.got:
			return true
		case <-time.After(wait):
			return false
		}
	}
	send(9 << 20)
	if !handled(10 * time.Second) {
		t.Fatal("the first long message: got nothing")
	}
	send(9 << 20)
	if handled(300 * time.Millisecond) {
		t.Error("a second message of 9 MiB was decoded while the first one was handled, want at most 16 MiB")
	}
	send(maxUnary / 2)
	if !handled(10 * time.Second) {
		t.Error("a short message waits for a long one")
	}
	service.next <- struct{}{} // of one of them
	service.next <- struct{}{}
	if !handled(10 * time.Second) {
		t.Error("the second message: got nothing after the first one was handled")
	}
	close(service.next)
	g.Stop()
	o := &other{}
	o.hold(0, true)
	for end := time.Now().Add(10 * time.Second); !decoded.TryAcquire(maxOther); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("after all streams have ended, something is held")
		}
	}
	o.hold(maxOther, false) // a message that comes while its handler returns
	if !decoded.TryAcquire(maxOther) {
		t.Error("a message after the end of its stream is held")
	}
	decoded.Release(maxOther)
}

// A part of a message may be encoded in two bytes, and takes many times as many once it is decoded.
func TestMessagesOfManyPartsAreRefused(t *testing.T) {
	b := newBed(t, Options{}, &recorder{})
	deep := structpb.NewNullValue()
	for range maxDepth {
		deep = structpb.NewListValue(&structpb.ListValue{Values: []*structpb.Value{deep}})
	}
	text := strings.Repeat("x", 2<<10)
	entry := &accesslogv3.HTTPAccessLogEntry{Request: &accesslogv3.HTTPRequestProperties{Path: text, UserAgent: text}}
	nested := &accesslogv3.HTTPAccessLogEntry{
		Request:          &accesslogv3.HTTPRequestProperties{Path: strings.Repeat("x", 2*maxUnary)},
		CommonProperties: &accesslogv3.AccessLogCommon{Metadata: &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{"a": {Fields: map[string]*structpb.Value{"b": deep}}}}},
	}
	for name, c := range map[string]struct {
		entries []*accesslogv3.HTTPAccessLogEntry
		taken   bool
	}{
		"entries of a busy Envoy": {slices.Repeat([]*accesslogv3.HTTPAccessLogEntry{entry}, 1000), true},
		"empty entries":           {slices.Repeat([]*accesslogv3.HTTPAccessLogEntry{{}}, maxParts), false},
		"deep metadata":           {[]*accesslogv3.HTTPAccessLogEntry{nested}, false},
	} {
		stream, err := alsv3.NewAccessLogServiceClient(b.conn).StreamAccessLogs(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		_ = stream.Send(&alsv3.StreamAccessLogsMessage{LogEntries: &alsv3.StreamAccessLogsMessage_HttpLogs{HttpLogs: &alsv3.StreamAccessLogsMessage_HTTPAccessLogEntries{LogEntry: c.entries}}})
		if _, err = stream.CloseAndRecv(); (err == nil) != c.taken {
			t.Errorf("%s: got %v, want taken %v", name, err, c.taken)
		}
	}
	m, empty := message{first: true}, strings.Repeat("\x0a\x00", 1<<17) // headers without a name
	headers := protowire.AppendString([]byte{0x0a}, empty)
	if err := m.decode(mem.BufferSlice{mem.SliceBuffer(protowire.AppendBytes([]byte{0x12}, headers))}); err != nil || len(m.headers) != mostHeaders+1 {
		t.Errorf("got %d headers and %v, want %d, which are refused", len(m.headers), err, mostHeaders+1)
	}
}

// Headers, metadata and attributes stay until the request is decided, and the outcome's texts as long as its decision.
func TestWhatComesWithARequestIsBounded(t *testing.T) {
	b := newBed(t, Options{}, &recorder{})
	send := func(n int, with func(m *epv3.ProcessingRequest, text string)) int {
		st, err := b.client.Process(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		m := &epv3.ProcessingRequest{Request: &epv3.ProcessingRequest_RequestHeaders{RequestHeaders: &epv3.HttpHeaders{Headers: &corev3.HeaderMap{}}}}
		m.ProtocolConfig = &epv3.ProtocolConfiguration{RequestBodyMode: filterv3.ProcessingMode_STREAMED}
		with(m, strings.Repeat("x", n))
		if err := st.Send(m); err != nil {
			t.Fatal(err)
		}
		r, err := st.Recv()
		if err != nil {
			t.Fatal(err)
		}
		return int(r.GetImmediateResponse().GetStatus().GetCode())
	}
	values := func(text string) *structpb.Struct {
		return &structpb.Struct{Fields: map[string]*structpb.Value{"a": structpb.NewStringValue(text)}}
	}
	for what, with := range map[string]func(m *epv3.ProcessingRequest, text string){
		"headers": func(m *epv3.ProcessingRequest, text string) {
			m.GetRequestHeaders().Headers.Headers = []*corev3.HeaderValue{{Key: "a", RawValue: []byte(text)}}
		},
		"metadata": func(m *epv3.ProcessingRequest, text string) {
			m.MetadataContext = &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{subsetNamespace: values(text)}}
		},
		"attributes": func(m *epv3.ProcessingRequest, text string) {
			m.Attributes = map[string]*structpb.Struct{attributesKey: values(text)}
		},
	} {
		for n, want := range map[int]int{maxAbout / 2: 0, maxAbout: 431} {
			if got := send(n, with); got != want {
				t.Errorf("%s of %d bytes: got status %d, want %d", what, n, got, want)
			}
		}
	}
	m := message{first: true} // two parts may each be as long as allowed
	part := protowire.AppendBytes([]byte{0x12}, protowire.AppendBytes([]byte{0x7a}, make([]byte, maxAbout*2/3)))
	if err := m.decode(mem.BufferSlice{mem.SliceBuffer(slices.Repeat(part, 2))}); err != nil || !m.tooLong {
		t.Errorf("two parts: got too long %v and %v, want them counted together", m.tooLong, err)
	}
	long := strings.Repeat("x", 1<<20)
	o := outcomeOf(&accesslogv3.HTTPAccessLogEntry{
		Response:         &accesslogv3.HTTPResponseProperties{ResponseCodeDetails: long},
		CommonProperties: &accesslogv3.AccessLogCommon{UpstreamRemoteAddress: &corev3.Address{Address: &corev3.Address_Pipe{Pipe: &corev3.Pipe{Path: long}}}},
	})
	if len(o.Details)+len(o.Upstream) > 2<<10 {
		t.Errorf("got %d and %d bytes of an outcome's texts, want 1 KiB each", len(o.Details), len(o.Upstream))
	}
	for text, want := range map[string]int{"999": 999, "1000": 0, "34463": 0, "-5": 0} {
		tk := &recordedTicket{status: -1, ended: make(chan struct{})}
		x := &exchange{srv: b.srv, phase: phaseDecided, flight: &flight{ticket: tk}, send: func(a *answer) error { a.bufs.Free(); return nil }}
		if err := x.responseHeaders(&message{status: text}); err != nil || tk.status != want {
			t.Errorf("status %s: got %d and %v, want %d", text, tk.status, err, want)
		}
	}
}

// Headers are not counted anywhere, and stay until their stream ends.
func TestHeadersOfAStreamAreBounded(t *testing.T) {
	b := newBed(t, Options{}, &recorder{})
	protocols := &http.Protocols{}
	protocols.SetUnencryptedHTTP2(true)
	client := &http.Client{Transport: &http.Transport{Protocols: protocols, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", b.socket)
	}}}
	defer client.CloseIdleConnections()
	for size, taken := range map[int]bool{16 << 10: true, 100 << 10: false} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://kvlane/grpc.health.v1.Health/Check", strings.NewReader("\x00\x00\x00\x00\x00"))
		if err != nil {
			t.Fatal(err)
		}
		req.Header = http.Header{"Content-Type": {"application/grpc"}, "Te": {"trailers"}, "A": {strings.Repeat("b", size)}}
		resp, err := client.Do(req)
		if err == nil {
			resp.Body.Close()
		}
		if got := err == nil && resp.StatusCode == http.StatusOK; got != taken {
			t.Errorf("%d bytes of headers: got taken %v (%v), want %v", size, got, err, taken)
		}
	}
}

// More headers than a data plane passes on are refused before any pass over them.
func TestTooManyHeadersAreNotRead(t *testing.T) {
	for n, want := range map[int]bool{mostHeaders - 10: true, 5_000: false} {
		asked := false
		x := &exchange{ctx: t.Context(), send: func(a *answer) error { a.bufs.Free(); return nil }}
		x.srv = NewServer(Options{ControlHeaders: []string{"x-kvlane-*"}}, decideFunc(func(*Request) Decision { asked = true; return Decision{} }))
		m := &message{first: true, configured: true, kind: KindRequestHeaders, reqMode: ModeBuffered, last: true}
		for i := range n {
			m.headers = append(m.headers, Header{"x-kvlane-" + strconv.Itoa(i), ""})
		}
		if err := x.handle(m); err != nil || asked != want {
			t.Errorf("%d headers: got asked %v (%v), want %v", n, asked, err, want)
		}
	}
}

// Bodies that never end take no more memory than the options allow, however many there are; once
// they are gone, requests are accepted again.
func TestHeldBodiesAreBounded(t *testing.T) {
	const streams, size, most = 40, 4 << 20, 32 << 20
	b := newBed(t, Options{MaxBodyBytes: most}, &recorder{})
	before := heapInUse()
	var ends []context.CancelFunc
	refused := 0
	for range streams {
		end, status := hog(t, b, size, 64<<10)
		ends = append(ends, end)
		if status == 503 {
			refused++
		} else if status != 0 {
			t.Fatalf("got status %d, want 503", status)
		}
	}
	count, held := b.srv.InFlight()
	if held > most || held < most-2*size || count != streams-refused || refused < streams/2 {
		t.Errorf("got %d bodies of %d bytes and %d refused, want at most %d bytes", count, held, refused, most)
	}
	grown := heapInUse() - before
	t.Logf("%d bodies, %d bytes counted, %d bytes of heap", count, held, grown)
	if grown > most+most/2 {
		t.Errorf("got %d bytes of heap for a bound of %d", grown, most)
	}
	for _, end := range ends {
		end()
	}
	waitFor(t, func() bool { n, held := b.srv.InFlight(); return n == 0 && held == 0 })
	for _, m := range requestModes {
		res, err := b.play(t.Context(), &call{request: m, chunks: [][]byte{bytes.Repeat([]byte("y"), size), []byte("z")}})
		if err != nil || res.immediate != nil {
			t.Errorf("%s, after the others left: got %v, %v, want a decision", m, res, err)
		}
	}
	waitFor(t, func() bool { n, held := b.srv.InFlight(); return n == 0 && held == 0 })
}

// A compressed message would be a thousand times what flow control has counted.
func TestCompressedMessagesAreRefused(t *testing.T) {
	b := newBed(t, Options{}, &recorder{})
	for _, c := range []struct {
		with []grpc.CallOption
		code codes.Code
	}{{nil, codes.OK}, {[]grpc.CallOption{grpc.UseCompressor(gzip.Name)}, codes.Internal}} {
		st, err := b.client.Process(t.Context(), c.with...)
		if err == nil {
			m := bodyMessage(true, make([]byte, 1<<20), true)
			m.ProtocolConfig = &epv3.ProtocolConfiguration{RequestBodyMode: filterv3.ProcessingMode_BUFFERED}
			_ = st.Send(m)
			_, err = st.Recv()
		}
		if status.Code(err) != c.code {
			t.Errorf("got %v, want %v", err, c.code)
		}
	}
}

func TestTheNumberOfHeldBodiesIsBounded(t *testing.T) {
	b := newBed(t, Options{MaxBodies: 3}, &recorder{})
	var first context.CancelFunc
	for i := range 5 {
		end, status := hog(t, b, 100, 1)
		defer end()
		if want := map[bool]int{true: 503}[i >= 3]; status != want {
			t.Errorf("body %d: got status %d, want %d", i, status, want)
		}
		if i == 0 {
			first = end
		}
	}
	first()
	waitFor(t, func() bool { n, _ := b.srv.InFlight(); return n == 2 })
	if _, status := hog(t, b, 100, 100); status != 0 {
		t.Errorf("got status %d, want room again", status)
	}
}

// answered reads the answer to a stream that was refused.
func answered(t *testing.T, st epv3.ExternalProcessor_ProcessClient) int {
	t.Helper()
	for {
		r, err := st.Recv()
		if err != nil {
			t.Fatalf("got %v, want an answer", err)
		}
		if i := r.GetImmediateResponse(); i != nil {
			return int(i.GetStatus().GetCode())
		}
	}
}

// A client that opens bodies and never ends them must not keep others out: they give way, the oldest first, whether
// places are short or bytes. Bodies that are whole and wait for their decision do not.
func TestSlowBodiesGiveWay(t *testing.T) {
	for name, o := range map[string]Options{"places": {MaxBodies: 4}, "bytes": {MaxBodyBytes: 4 * heldBytes(mem.BufferSlice{mem.SliceBuffer(make([]byte, 100))})}} {
		t.Run(name, func(t *testing.T) {
			decide, ready := make(chan struct{}), make(chan struct{})
			h := &recorder{decide: func(ctx context.Context, r *Request) Decision {
				if bytes.HasPrefix(r.Body, []byte("wait")) {
					close(ready)
					<-decide
				}
				return Decision{Endpoint: "10.0.0.1:8000"}
			}}
			b := newBed(t, o, h)
			open := func(body string, last bool) epv3.ExternalProcessor_ProcessClient {
				st, err := b.client.Process(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				m := bodyMessage(false, []byte(body+strings.Repeat(" ", 100-len(body))), last)
				m.ProtocolConfig = &epv3.ProtocolConfiguration{RequestBodyMode: filterv3.ProcessingMode_FULL_DUPLEX_STREAMED}
				if err := st.Send(m); err != nil {
					t.Fatal(err)
				}
				return st
			}
			whole := open("wait", true)
			<-ready
			var slow []epv3.ExternalProcessor_ProcessClient
			for i := range 3 {
				slow = append(slow, open("{", false))
				waitFor(t, func() bool { n, _ := b.srv.InFlight(); return n == 2+i })
			}
			if got := answered(t, open("{}", true)); got != 503 {
				t.Errorf("bodies that have just begun: got status %d for another one, want 503", got)
			}
			b.srv.bodies.mu.Lock()
			b.srv.bodies.patience = 0
			b.srv.bodies.mu.Unlock()
			for i := range 2 {
				if r, err := open("{}", true).Recv(); err != nil || r.GetRequestHeaders() == nil && r.GetRequestBody() == nil {
					t.Errorf("request %d beside slow bodies: got %v and %v, want a decision", i, r, err)
				}
			}
			// The oldest one was dropped for the first request, which had left its place when the second one came.
			if got := answered(t, slow[0]); got != 503 {
				t.Errorf("the oldest slow body: got status %d, want 503", got)
			}
			waitFor(t, func() bool { n, _ := b.srv.InFlight(); return n == 3 })
			if err := slow[1].Send(bodyMessage(false, []byte("}"), true)); err != nil {
				t.Fatal(err)
			}
			if r, err := slow[1].Recv(); err != nil || r.GetImmediateResponse() != nil {
				t.Errorf("a slow body that kept its place: got %v and %v, want a decision", r, err)
			}
			close(decide)
			if r, err := whole.Recv(); err != nil || r.GetImmediateResponse() != nil {
				t.Errorf("the body that waited for its decision: got %v and %v, want the decision", r, err)
			}
			// What remains is dropped again and again while bodies arrive: nothing is counted twice.
			for range 20 {
				open("{", false)
			}
			waitFor(t, func() bool { n, _ := b.srv.InFlight(); return n == 4 })
			for range 20 {
				if r, err := open("{}", true).Recv(); err != nil || r.GetImmediateResponse() != nil {
					t.Errorf("beside many slow bodies: got %v and %v, want a decision", r, err)
				}
			}
		})
	}
}

// Envoy holds a body that it buffers, and what it keeps of the request: its place counts from the headers. The oldest one gives
// way, but not to a body that finds no bytes: that would make no room.
func TestAnnouncedBodiesGiveWay(t *testing.T) {
	for _, mode := range []filterv3.ProcessingMode_BodySendMode{filterv3.ProcessingMode_BUFFERED, filterv3.ProcessingMode_FULL_DUPLEX_STREAMED} {
		t.Run(mode.String(), func(t *testing.T) {
			b := newBed(t, Options{MaxBodies: 3, MaxBodyBytes: 10_000}, &recorder{})
			patience := func(d time.Duration) {
				b.srv.bodies.mu.Lock()
				defer b.srv.bodies.mu.Unlock()
				b.srv.bodies.patience = d
			}
			patience(time.Hour)
			open := func() epv3.ExternalProcessor_ProcessClient {
				st, err := b.client.Process(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				m := &epv3.ProcessingRequest{
					Request: &epv3.ProcessingRequest_RequestHeaders{RequestHeaders: &epv3.HttpHeaders{Headers: &corev3.HeaderMap{
						Headers: []*corev3.HeaderValue{{Key: ":method", RawValue: []byte("POST")}, {Key: ":path", RawValue: []byte("/v1/completions")}},
					}}},
					ProtocolConfig: &epv3.ProtocolConfiguration{RequestBodyMode: mode},
				}
				if err := st.Send(m); err != nil {
					t.Fatal(err)
				}
				return st
			}
			body := func(st epv3.ExternalProcessor_ProcessClient, size int, last bool) {
				if err := st.Send(bodyMessage(false, make([]byte, size), last)); err != nil {
					t.Fatal(err)
				}
			}
			decided := func(what string, st epv3.ExternalProcessor_ProcessClient) {
				t.Helper()
				for {
					r, err := st.Recv()
					if err != nil || r.GetImmediateResponse() != nil {
						t.Fatalf("%s: got %v and %v, want a decision", what, r, err)
					}
					if r.GetRequestBody() != nil || mode != filterv3.ProcessingMode_BUFFERED {
						return
					}
				}
			}
			var waiting []epv3.ExternalProcessor_ProcessClient
			for i := range 3 {
				waiting = append(waiting, open())
				waitFor(t, func() bool { n, _ := b.srv.InFlight(); return n == i+1 })
			}
			if got := answered(t, open()); got != 503 {
				t.Errorf("bodies that were just announced: got status %d for another one, want 503", got)
			}
			patience(0)
			body(waiting[2], 20_000, true)
			if got := answered(t, waiting[2]); got != 503 {
				t.Errorf("a body that finds no bytes: got status %d, want 503", got)
			}
			waitFor(t, func() bool { n, _ := b.srv.InFlight(); return n == 2 })
			waiting[2] = open()
			waitFor(t, func() bool { n, _ := b.srv.InFlight(); return n == 3 })
			another := open()
			if got := answered(t, waiting[0]); got != 503 {
				t.Errorf("the oldest announced body: got status %d, want 503", got)
			}
			body(another, 10, true)
			decided("the body for which another one gave way", another)
			for _, st := range waiting[1:] {
				body(st, 10, true)
				decided("a body that kept its place", st)
			}
			waitFor(t, func() bool { n, held := b.srv.InFlight(); return n == 0 && held == 0 })
		})
	}
}

// Announced bodies that Envoy holds have a bound of their sum: when they come slowly, the longest give way, and those of unknown
// length, which may become as long as any. It needs no other request: an Envoy that is full passes none on.
func TestAnnouncedBytesGiveWay(t *testing.T) {
	for mode, kept := range map[filterv3.ProcessingMode_BodySendMode]bool{filterv3.ProcessingMode_BUFFERED: false, filterv3.ProcessingMode_FULL_DUPLEX_STREAMED: true} {
		t.Run(mode.String(), func(t *testing.T) {
			b := newBed(t, Options{BodyLimit: 50_000, MaxBodyBytes: 100_500}, &recorder{})
			b.srv.bodies.mu.Lock()
			b.srv.bodies.patience = 50 * time.Millisecond
			b.srv.bodies.mu.Unlock()
			open := func(length string) epv3.ExternalProcessor_ProcessClient {
				st, err := b.client.Process(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				headers := []*corev3.HeaderValue{{Key: ":method", RawValue: []byte("POST")}, {Key: ":path", RawValue: []byte("/v1/completions")}}
				if length != "" {
					headers = append(headers, &corev3.HeaderValue{Key: "content-length", RawValue: []byte(length)})
				}
				n, _ := b.srv.InFlight()
				if err := st.Send(&epv3.ProcessingRequest{
					Request:        &epv3.ProcessingRequest_RequestHeaders{RequestHeaders: &epv3.HttpHeaders{Headers: &corev3.HeaderMap{Headers: headers}}},
					ProtocolConfig: &epv3.ProtocolConfiguration{RequestBodyMode: mode},
				}); err != nil {
					t.Fatal(err)
				}
				waitFor(t, func() bool { now, _ := b.srv.InFlight(); return now == n+1 })
				return st
			}
			short, long, unknown := open("10"), open("40000"), open("")
			time.Sleep(100 * time.Millisecond) // 90,010 bytes fit
			if n, _ := b.srv.InFlight(); n != 3 {
				t.Fatalf("got %d bodies, want all that fit", n)
			}
			another := open("40000")
			if !kept {
				if got := answered(t, unknown); got != 503 {
					t.Errorf("the body of unknown length: got status %d, want 503", got)
				}
			}
			time.Sleep(100 * time.Millisecond)
			if n, _ := b.srv.InFlight(); n != map[bool]int{true: 4, false: 3}[kept] {
				t.Errorf("got %d bodies, want only as many dropped as it takes", n)
			}
			for what, st := range map[string]epv3.ExternalProcessor_ProcessClient{"short": short, "long": long, "another": another} {
				if err := st.Send(bodyMessage(false, []byte("{}"), true)); err != nil {
					t.Fatal(err)
				}
				for decided := false; !decided; {
					r, err := st.Recv()
					if err != nil || r.GetImmediateResponse() != nil {
						t.Fatalf("%s: got %v and %v, want a decision", what, r, err)
					}
					decided = r.GetRequestBody() != nil || kept
				}
			}
			b.srv.bodies.mu.Lock()
			defer b.srv.bodies.mu.Unlock()
			if kept {
				return // one of unknown length is left
			}
			if n := b.srv.bodies.promised; n != 0 {
				t.Errorf("got %d bytes promised after the last body", n)
			}
		})
	}
}

// Where longer bodies are let through in part, a length that no body has does not count beyond the limit.
func TestAnnouncedLengthsAreBounded(t *testing.T) {
	b := newBed(t, Options{BodyLimit: 50_000, MaxBodyBytes: 1_000_000}, &recorder{})
	for i := range 2 {
		st, err := b.client.Process(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		headers := []*corev3.HeaderValue{{Key: ":method", RawValue: []byte("POST")}, {Key: ":path", RawValue: []byte("/v1/completions")},
			{Key: "content-length", RawValue: []byte("4611686018427387904")}}
		if err := st.Send(&epv3.ProcessingRequest{
			Request:        &epv3.ProcessingRequest_RequestHeaders{RequestHeaders: &epv3.HttpHeaders{Headers: &corev3.HeaderMap{Headers: headers}}},
			ProtocolConfig: &epv3.ProtocolConfiguration{RequestBodyMode: filterv3.ProcessingMode_BUFFERED_PARTIAL},
		}); err != nil {
			t.Fatal(err)
		}
		waitFor(t, func() bool { n, _ := b.srv.InFlight(); return n == i+1 })
	}
	b.srv.bodies.mu.Lock()
	defer b.srv.bodies.mu.Unlock()
	if n := b.srv.bodies.promised; n < 100_000 || n > 101_000 {
		t.Errorf("got %d bytes promised, want two bodies of the limit and their headers", n)
	}
}

// Bodies that have just been announced drop no other, however many and long: a client that renews a few would end every upload that
// takes longer than its own.
func TestNewBodiesDropNoSlowOnes(t *testing.T) {
	b := newBed(t, Options{BodyLimit: 50_000, MaxBodyBytes: 100_000}, &recorder{})
	b.srv.bodies.mu.Lock()
	b.srv.bodies.patience = 200 * time.Millisecond
	b.srv.bodies.mu.Unlock()
	open := func(length string) (epv3.ExternalProcessor_ProcessClient, context.CancelFunc) {
		ctx, cancel := context.WithCancel(t.Context())
		st, err := b.client.Process(ctx)
		if err != nil {
			t.Fatal(err)
		}
		headers := []*corev3.HeaderValue{{Key: ":method", RawValue: []byte("POST")}, {Key: ":path", RawValue: []byte("/v1/completions")}}
		if length != "" {
			headers = append(headers, &corev3.HeaderValue{Key: "content-length", RawValue: []byte(length)})
		}
		if err := st.Send(&epv3.ProcessingRequest{
			Request:        &epv3.ProcessingRequest_RequestHeaders{RequestHeaders: &epv3.HttpHeaders{Headers: &corev3.HeaderMap{Headers: headers}}},
			ProtocolConfig: &epv3.ProtocolConfiguration{RequestBodyMode: filterv3.ProcessingMode_BUFFERED},
		}); err != nil {
			t.Fatal(err)
		}
		return st, cancel
	}
	slow, cancel := open("30000")
	defer cancel()
	for range 20 {
		var ends []context.CancelFunc
		for range 5 {
			_, end := open("")
			ends = append(ends, end)
		}
		time.Sleep(50 * time.Millisecond)
		for _, end := range ends {
			end()
		}
	}
	if err := slow.Send(bodyMessage(false, []byte("{}"), true)); err != nil {
		t.Fatal(err)
	}
	for decided := false; !decided; {
		r, err := slow.Recv()
		if err != nil || r.GetImmediateResponse() != nil {
			t.Fatalf("got %v and %v, want a decision", r, err)
		}
		decided = r.GetRequestBody() != nil
	}
}

// Headers count as well: they stay until the body is here, in full duplex too.
func TestHeadersOfAnnouncedBodiesGiveWay(t *testing.T) {
	b := newBed(t, Options{MaxBodyBytes: 100_000}, &recorder{})
	b.srv.bodies.mu.Lock()
	b.srv.bodies.patience = 50 * time.Millisecond
	b.srv.bodies.mu.Unlock()
	open := func(size int) epv3.ExternalProcessor_ProcessClient {
		st, err := b.client.Process(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := st.Send(&epv3.ProcessingRequest{
			Request: &epv3.ProcessingRequest_RequestHeaders{RequestHeaders: &epv3.HttpHeaders{Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{
				{Key: ":method", RawValue: []byte("POST")}, {Key: ":path", RawValue: []byte("/v1/completions")}, {Key: "content-length", RawValue: []byte("10")},
				{Key: "a", RawValue: bytes.Repeat([]byte("x"), size)},
			}}}},
			ProtocolConfig: &epv3.ProtocolConfiguration{RequestBodyMode: filterv3.ProcessingMode_FULL_DUPLEX_STREAMED},
		}); err != nil {
			t.Fatal(err)
		}
		return st
	}
	small := open(10)
	waitFor(t, func() bool { n, _ := b.srv.InFlight(); return n == 1 })
	large := open(45_000)
	waitFor(t, func() bool { n, _ := b.srv.InFlight(); return n == 2 })
	open(45_000)
	open(45_000)
	if got := answered(t, large); got != 503 {
		t.Errorf("large headers: got status %d, want 503", got)
	}
	waitFor(t, func() bool { n, _ := b.srv.InFlight(); return n == 3 })
	if err := small.Send(bodyMessage(false, []byte("{}"), true)); err != nil {
		t.Fatal(err)
	}
	if r, err := small.Recv(); err != nil || r.GetImmediateResponse() != nil {
		t.Errorf("small headers: got %v and %v, want a decision", r, err)
	}
}

// Large bodies leave room for small ones, whether they come whole or in pieces.
func TestLargeBodiesLeaveRoomForSmallOnes(t *testing.T) {
	const most, large, small = 16 << 20, 1 << 20, 256 << 10
	for _, piece := range []int{64 << 10, large} {
		b := newBed(t, Options{MaxBodyBytes: most}, &recorder{})
		taken := 0
		for {
			if _, status := hog(t, b, large, piece); status != 0 {
				break
			}
			taken++
		}
		if _, held := b.srv.InFlight(); held > most/8*7 || taken < 8 {
			t.Errorf("pieces of %d: got %d large bodies of %d bytes in all, want 8 or more within seven eighths of %d", piece, taken, held, most)
		}
		for i := range 4 {
			if _, status := hog(t, b, small, 64<<10); status != 0 {
				t.Errorf("pieces of %d: got status %d for small body %d, want it taken", piece, status, i)
			}
		}
		if _, status := hog(t, b, large, piece); status != 503 {
			t.Errorf("pieces of %d: got status %d for one more large body, want 503", piece, status)
		}
	}
}

func TestALargeBodyAloneIsTaken(t *testing.T) {
	b := newBed(t, Options{MaxBodyBytes: 1000}, &recorder{})
	if _, status := hog(t, b, 5000, 100); status != 0 {
		t.Errorf("got status %d, want it taken", status)
	}
	if _, status := hog(t, b, 1, 1); status != 503 {
		t.Errorf("got status %d while another body is held, want 503", status)
	}
}

// The memory counted for a body is never less than that of its buffers, joined or not.
func TestHeldBytesCoverTheBuffers(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var body mem.BufferSlice
		capacity, size := 0, 0
		for _, n := range rapid.SliceOfN(rapid.IntRange(1, 1<<20), 1, 4).Draw(t, "pieces") {
			if mem.IsBelowBufferPoolingThreshold(n) {
				body = append(body, mem.SliceBuffer(make([]byte, n)))
				capacity += n
			} else {
				b := buffers.Get(n)
				capacity += cap(*b)
				body = append(body, mem.NewBuffer(b, buffers))
			}
			size += n
		}
		if got := heldBytes(body); got < int64(capacity) || got > int64(size+size/4+len(body)*pieceOverhead) {
			t.Fatalf("got %d bytes, want at least %d", got, capacity)
		}
		body.Free()
	})
}

func TestMaxStreamsBoundsAConnection(t *testing.T) {
	b := newBed(t, Options{MaxStreams: 2}, &recorder{})
	var ends []context.CancelFunc
	for range 2 {
		end, _ := hog(t, b, 1, 1)
		ends = append(ends, end)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := b.client.Process(ctx); err == nil {
		t.Error("got a third stream, want it to wait")
	}
	ends[0]()
	if _, err := b.client.Process(t.Context()); err != nil {
		t.Errorf("got %v, want a stream when another has ended", err)
	}
	ends[1]()
}
