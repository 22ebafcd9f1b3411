package extproc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	epv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/structpb"
)

// recorder is a Handler that records requests and tickets.
type recorder struct {
	decide func(ctx context.Context, r *Request) Decision
	edits  bool // tickets change response bodies

	mu      sync.Mutex
	bodies  [][]byte
	tickets []*recordedTicket
}

// Decide implements Handler.
func (h *recorder) Decide(ctx context.Context, r *Request) Decision {
	h.mu.Lock()
	h.bodies = append(h.bodies, bytes.Clone(r.Body))
	decide := h.decide
	h.mu.Unlock()
	d := Decision{Endpoint: "10.0.0.1:8000"}
	if decide != nil {
		d = decide(ctx, r)
	}
	t := &recordedTicket{ended: make(chan struct{})}
	h.mu.Lock()
	h.tickets = append(h.tickets, t)
	h.mu.Unlock()
	d.Ticket = t
	if h.edits {
		d.Ticket = &editingTicket{recordedTicket: t}
	}
	return d
}

func (h *recorder) seen() [][]byte {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.bodies)
}

func (h *recorder) ticket(i int) *recordedTicket {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.tickets[i]
}

func (h *recorder) count() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.tickets)
}

// recordedTicket checks the order of calls. The fields need no lock because calls are
// serialised.
type recordedTicket struct {
	status   int
	served   string
	body     []byte
	tokens   int
	bodyDone bool
	ends     int
	afterEnd []string
	ended    chan struct{} // closed by the first End

	outcomeMu sync.Mutex
	outcomes  []Outcome
}

func (t *recordedTicket) call(what string) {
	if t.ends > 0 {
		t.afterEnd = append(t.afterEnd, what)
	}
}

func (t *recordedTicket) ResponseHeaders(status int, served string) []Header {
	t.call("response headers")
	t.status, t.served = status, served
	return []Header{{"x-kvlane-target", "w"}}
}

func (t *recordedTicket) ResponseBody(chunk []byte, last bool) {
	t.call("response body")
	t.body = append(t.body, chunk...)
	t.bodyDone = t.bodyDone || last
}

func (t *recordedTicket) FirstToken(time.Time) {
	t.call("first token")
	t.tokens++
}

func (t *recordedTicket) End(time.Time) {
	t.ends++
	if t.ends == 1 {
		close(t.ended)
	}
}

func (t *recordedTicket) Outcome(o Outcome) {
	t.outcomeMu.Lock()
	t.outcomes = append(t.outcomes, o)
	t.outcomeMu.Unlock()
}

func (t *recordedTicket) gotOutcomes() []Outcome {
	t.outcomeMu.Lock()
	defer t.outcomeMu.Unlock()
	return slices.Clone(t.outcomes)
}

// editingTicket doubles digits, and holds back the last byte of each piece.
type editingTicket struct {
	*recordedTicket

	held []byte
}

func (t *editingTicket) EditsBody() bool { return true }

func (t *editingTicket) EditBody(chunk []byte, last bool) (out []byte, changed, holds bool) {
	text := append(t.held, chunk...)
	if t.held = nil; !last && len(text) > 0 {
		t.held = bytes.Clone(text[len(text)-1:])
		text = text[:len(text)-1]
	}
	return twice(text), true, len(t.held) > 0
}

// twice is the result of an editingTicket for a text.
func twice(text []byte) (out []byte) {
	for _, c := range text {
		if out = append(out, c); c >= '0' && c <= '9' {
			out = append(out, c)
		}
	}
	return out
}

// mustEnd waits for End and checks that it came once and last.
func (t *recordedTicket) mustEnd(tb testing.TB) {
	tb.Helper()
	select {
	case <-t.ended:
	case <-time.After(20 * time.Second):
		tb.Fatal("got no End of the ticket")
	}
	if t.ends != 1 || len(t.afterEnd) > 0 {
		tb.Fatalf("got %d calls of End, want 1; calls after it: %v", t.ends, t.afterEnd)
	}
}

// bed is a server behind a real gRPC connection on a Unix socket.
type bed struct {
	srv    *Server
	grpc   *grpc.Server
	conn   *grpc.ClientConn
	client epv3.ExternalProcessorClient
	socket string

	mu       sync.Mutex
	failures map[Failure]int
}

// testControls are names and prefixes, as a server with its own control headers would set them.
var testControls = []string{pickKey, subsetKey, "x-gateway-inference-objective", "x-override-*", "x-kvlane-*"}

func newBed(tb testing.TB, o Options, h Handler) *bed {
	tb.Helper()
	b := &bed{failures: map[Failure]int{}, socket: filepath.Join(tb.TempDir(), "s")}
	o.Metrics.Failure = func(f Failure) {
		b.mu.Lock()
		b.failures[f]++
		b.mu.Unlock()
	}
	if o.ControlHeaders == nil {
		o.ControlHeaders = testControls
	}
	b.srv = NewServer(o, h)
	b.srv.bodies.patience = time.Hour // a slow machine is not a slow client
	b.grpc = grpc.NewServer(GRPCOptions(o)...)
	b.srv.Register(b.grpc)
	lis, err := Listen(context.Background(), "unix:"+b.socket, nil)
	if err != nil {
		tb.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- b.grpc.Serve(lis) }()
	b.conn, err = grpc.NewClient("passthrough:///s", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", b.socket)
		}), grpc.WithInitialWindowSize(16<<20), grpc.WithInitialConnWindowSize(64<<20))
	if err != nil {
		tb.Fatal(err)
	}
	b.client = epv3.NewExternalProcessorClient(b.conn)
	tb.Cleanup(func() {
		_ = b.conn.Close()
		b.grpc.Stop()
		if err := <-served; err != nil {
			tb.Errorf("serve: %v", err)
		}
		waitFor(tb, func() bool { return b.srv.streamsOpen() == 0 })
	})
	return b
}

func (b *bed) failed(f Failure) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.failures[f]
}

// call is an HTTP exchange that the fake data plane plays.
type call struct {
	request, response filterv3.ProcessingMode_BodySendMode
	eager             bool
	headers           []Header
	chunks            [][]byte
	emptyEnd          bool // the end comes as an extra empty message
	repeatEnd         bool // and once more
	trailers          bool
	halfClose         bool // right after the request
	respChunks        [][]byte
	respTrailers      bool
	early             bool // response headers come before the last request chunk (STREAMED)
}

// planeResult is the outcome of a call at the fake data plane.
type planeResult struct {
	immediate  *epv3.ImmediateResponse
	set        map[string]string
	removed    []string
	pick       string
	body       []byte
	respBody   []byte
	respSet    map[string]string
	answers    int
	trailersOK bool
}

// violation is an answer that Envoy would treat as spurious.
type violation struct{ what string }

func (v violation) Error() string { return "spurious: " + v.what }

// play enforces Envoy's state machine on one stream: which answers are allowed when, and the
// resulting bodies.
func (b *bed) play(ctx context.Context, c *call) (*planeResult, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	st, err := b.client.Process(ctx)
	if err != nil {
		return nil, err
	}
	p := &planeRun{call: c, stream: st, res: &planeResult{set: map[string]string{}, respSet: map[string]string{}}}
	err = p.run()
	if errors.Is(err, errImmediate) {
		err = nil
	}
	return p.res, err
}

var errImmediate = errors.New("immediate response")

type planeRun struct {
	*call
	stream epv3.ExternalProcessor_ProcessClient
	res    *planeResult
	begun  bool
}

func (p *planeRun) send(r *epv3.ProcessingRequest) error {
	if !p.begun {
		p.begun = true
		r.ProtocolConfig = &epv3.ProtocolConfiguration{RequestBodyMode: p.request, ResponseBodyMode: p.response, SendBodyWithoutWaitingForHeaderResponse: p.eager}
	}
	err := p.stream.Send(r)
	if errors.Is(err, io.EOF) { // the server has closed the stream: its answers can be read
		return nil
	}
	return err
}

// recv receives the next answer that belongs to the request or response.
func (p *planeRun) recv() (*epv3.ProcessingResponse, error) {
	for {
		r, err := p.stream.Recv()
		if err != nil {
			return nil, err
		}
		p.res.answers++
		if err := validator(r).ValidateAll(); err != nil {
			return nil, err
		}
		if v := r.GetDynamicMetadata().GetFields()[lbNamespace].GetStructValue().GetFields()[pickKey]; v != nil {
			p.res.pick = v.GetStringValue()
		}
		if ir := r.GetImmediateResponse(); ir != nil {
			p.res.immediate = ir
			return nil, errImmediate
		}
		if r.GetOverrideMessageTimeout() != nil {
			continue
		}
		return r, nil
	}
}

func mutate(set map[string]string, removed *[]string, m *epv3.HeaderMutation) {
	for _, h := range m.GetSetHeaders() {
		set[h.GetHeader().GetKey()] = string(h.GetHeader().GetRawValue())
	}
	if removed != nil {
		*removed = append(*removed, m.GetRemoveHeaders()...)
	}
}

func (p *planeRun) recvRequestHeaders() error {
	r, err := p.recv()
	if err != nil {
		return err
	}
	h := r.GetRequestHeaders()
	if h == nil {
		return violation{fmt.Sprintf("%T for request headers", r.GetResponse())}
	}
	mutate(p.res.set, &p.res.removed, h.GetResponse().GetHeaderMutation())
	return nil
}

func bodyMessage(response bool, b []byte, last bool) *epv3.ProcessingRequest {
	hb := &epv3.HttpBody{Body: b, EndOfStream: last}
	if response {
		return &epv3.ProcessingRequest{Request: &epv3.ProcessingRequest_ResponseBody{ResponseBody: hb}}
	}
	return &epv3.ProcessingRequest{Request: &epv3.ProcessingRequest_RequestBody{RequestBody: hb}}
}

// recvBody receives the answer to one body message and returns the resulting body.
func (p *planeRun) recvBody(response bool, original []byte) ([]byte, error) {
	r, err := p.recv()
	if err != nil {
		return nil, err
	}
	a := r.GetRequestBody()
	if response {
		a = r.GetResponseBody()
	}
	if a == nil {
		return nil, violation{fmt.Sprintf("%T for a body chunk", r.GetResponse())}
	}
	if !response && (p.request == filterv3.ProcessingMode_BUFFERED || p.request == filterv3.ProcessingMode_BUFFERED_PARTIAL) {
		mutate(p.res.set, &p.res.removed, a.GetResponse().GetHeaderMutation())
	}
	switch v := a.GetResponse().GetBodyMutation().GetMutation().(type) {
	case nil:
		return original, nil
	case *epv3.BodyMutation_Body:
		return v.Body, nil
	case *epv3.BodyMutation_ClearBody:
		return nil, nil
	}
	return nil, violation{"streamed response outside full duplex"}
}

// recvDuplex receives echoes until the direction's end.
func (p *planeRun) recvDuplex(response, trailers bool) (out []byte, err error) {
	for {
		r, err := p.recv()
		if err != nil {
			return out, err
		}
		if r.GetRequestTrailers() != nil && !response || r.GetResponseTrailers() != nil && response {
			if !trailers {
				return out, violation{"trailers answer without trailers"}
			}
			return out, nil
		}
		a := r.GetRequestBody()
		if response {
			a = r.GetResponseBody()
		}
		sr := a.GetResponse().GetBodyMutation().GetStreamedResponse()
		if sr == nil {
			return out, violation{fmt.Sprintf("%T without streamed response", r.GetResponse())}
		}
		if len(sr.GetBody()) > 64<<10 {
			return out, violation{"piece over 64 KiB"}
		}
		out = append(out, sr.GetBody()...)
		if sr.GetEndOfStream() {
			if trailers {
				return out, violation{"end of stream before trailers"}
			}
			return out, nil
		}
	}
}

// messages are the body messages of the request with their end marks.
func (p *planeRun) messages() (out []*epv3.ProcessingRequest) {
	chunks := p.chunks
	if p.emptyEnd && !p.trailers {
		chunks = append(slices.Clone(chunks), nil)
	}
	for i, ch := range chunks {
		out = append(out, bodyMessage(false, ch, i == len(chunks)-1 && !p.trailers))
	}
	return out
}

func (p *planeRun) run() error {
	hm := &corev3.HeaderMap{}
	for _, h := range p.headers {
		hm.Headers = append(hm.Headers, &corev3.HeaderValue{Key: h.Name, RawValue: []byte(h.Value)})
	}
	noBody := len(p.chunks) == 0 && !p.emptyEnd && !p.trailers
	if err := p.send(&epv3.ProcessingRequest{Request: &epv3.ProcessingRequest_RequestHeaders{RequestHeaders: &epv3.HttpHeaders{Headers: hm, EndOfStream: noBody}}}); err != nil {
		return err
	}
	var err error
	switch {
	case noBody:
		err = p.recvRequestHeaders()
	case p.request == filterv3.ProcessingMode_NONE:
		if err = p.recvRequestHeaders(); err == nil {
			p.res.body = bytes.Join(p.chunks, nil)
		}
	case p.request == filterv3.ProcessingMode_BUFFERED:
		err = p.runBuffered(bytes.Join(p.chunks, nil), nil)
	case p.request == filterv3.ProcessingMode_BUFFERED_PARTIAL:
		whole := bytes.Join(p.chunks, nil)
		n := min(len(whole), 1000)
		err = p.runBuffered(whole[:n], whole[n:])
	case p.request == filterv3.ProcessingMode_STREAMED:
		err = p.runStreamed()
	default:
		err = p.runDuplex()
	}
	if err != nil {
		return err
	}
	if p.halfClose {
		if err := p.stream.CloseSend(); err != nil {
			return err
		}
		return p.silence()
	}
	if err := p.runResponse(); err != nil {
		return err
	}
	if err := p.stream.CloseSend(); err != nil {
		return err
	}
	return p.silence()
}

// silence checks that no further answer comes and that the stream ends without an error.
func (p *planeRun) silence() error {
	r, err := p.recv()
	if errors.Is(err, io.EOF) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("at the end: %w", err)
	}
	return violation{fmt.Sprintf("%T at the end", r.GetResponse())}
}

func (p *planeRun) sendTrailers() error {
	return p.send(&epv3.ProcessingRequest{Request: &epv3.ProcessingRequest_RequestTrailers{RequestTrailers: &epv3.HttpTrailers{}}})
}

func (p *planeRun) recvTrailers() error {
	r, err := p.recv()
	if err != nil {
		return err
	}
	if r.GetRequestTrailers() == nil {
		return violation{fmt.Sprintf("%T for trailers", r.GetResponse())}
	}
	p.res.trailersOK = true
	return nil
}

func (p *planeRun) runBuffered(seen, rest []byte) error {
	if err := p.recvRequestHeaders(); err != nil {
		return err
	}
	if err := p.send(bodyMessage(false, seen, !p.trailers && len(rest) == 0)); err != nil {
		return err
	}
	b, err := p.recvBody(false, seen)
	if err != nil {
		return err
	}
	p.res.body = append(bytes.Clone(b), rest...)
	if p.trailers {
		if err := p.sendTrailers(); err != nil {
			return err
		}
		return p.recvTrailers()
	}
	return nil
}

func (p *planeRun) runStreamed() error {
	if !p.eager {
		if err := p.recvRequestHeaders(); err != nil {
			return err
		}
	}
	ms := p.messages()
	for i, m := range ms {
		if p.early && i == len(ms)-1 {
			if err := p.respond(); err != nil {
				return err
			}
		}
		if err := p.send(m); err != nil {
			return err
		}
		if !p.eager {
			b, err := p.recvBody(false, m.GetRequestBody().GetBody())
			if err != nil {
				return err
			}
			p.res.body = append(p.res.body, b...)
		}
	}
	if p.eager {
		if err := p.recvRequestHeaders(); err != nil {
			return err
		}
		for _, m := range ms {
			b, err := p.recvBody(false, m.GetRequestBody().GetBody())
			if err != nil {
				return err
			}
			p.res.body = append(p.res.body, b...)
		}
	}
	if p.trailers {
		if err := p.sendTrailers(); err != nil {
			return err
		}
		return p.recvTrailers()
	}
	return nil
}

func (p *planeRun) runDuplex() error {
	for _, m := range p.messages() {
		if err := p.send(m); err != nil {
			return err
		}
	}
	if p.repeatEnd && !p.trailers {
		if err := p.send(bodyMessage(false, nil, true)); err != nil {
			return err
		}
	}
	if p.trailers {
		if err := p.sendTrailers(); err != nil {
			return err
		}
	}
	if p.halfClose {
		if err := p.stream.CloseSend(); err != nil {
			return err
		}
	}
	if err := p.recvRequestHeaders(); err != nil {
		return err
	}
	var err error
	p.res.body, err = p.recvDuplex(false, p.trailers)
	p.res.trailersOK = p.trailers && err == nil
	return err
}

// respond sends response headers and receives their answer.
func (p *planeRun) respond() error {
	none := len(p.respChunks) == 0 && !p.respTrailers
	err := p.send(&epv3.ProcessingRequest{
		Request: &epv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: &epv3.HttpHeaders{EndOfStream: none,
			Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{{Key: ":status", RawValue: []byte("200")}}}}},
		MetadataContext: &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{
			lbNamespace: {Fields: map[string]*structpb.Value{servedKey: structpb.NewStringValue("10.0.0.9:1")}}}},
	})
	if err != nil {
		return err
	}
	r, err := p.recv()
	if err != nil {
		return err
	}
	h := r.GetResponseHeaders()
	if h == nil {
		return violation{fmt.Sprintf("%T for response headers", r.GetResponse())}
	}
	mutate(p.res.respSet, nil, h.GetResponse().GetHeaderMutation())
	return nil
}

func (p *planeRun) runResponse() error {
	if !p.early {
		if err := p.respond(); err != nil {
			return err
		}
	}
	if len(p.respChunks) == 0 && !p.respTrailers {
		return nil
	}
	send := func(b []byte, last bool) error { return p.send(bodyMessage(true, b, last)) }
	switch p.response {
	case filterv3.ProcessingMode_NONE:
		p.res.respBody = bytes.Join(p.respChunks, nil)
	case filterv3.ProcessingMode_BUFFERED, filterv3.ProcessingMode_STREAMED:
		chunks := p.respChunks
		if p.response == filterv3.ProcessingMode_BUFFERED {
			chunks = [][]byte{bytes.Join(chunks, nil)}
		}
		for i, ch := range chunks {
			if err := send(ch, i == len(chunks)-1 && !p.respTrailers); err != nil {
				return err
			}
			b, err := p.recvBody(true, ch)
			if err != nil {
				return err
			}
			p.res.respBody = append(p.res.respBody, b...)
		}
	default:
		for i, ch := range p.respChunks {
			if err := send(ch, i == len(p.respChunks)-1 && !p.respTrailers); err != nil {
				return err
			}
		}
	}
	if p.respTrailers {
		if err := p.send(&epv3.ProcessingRequest{Request: &epv3.ProcessingRequest_ResponseTrailers{ResponseTrailers: &epv3.HttpTrailers{}}}); err != nil {
			return err
		}
	}
	if p.response == filterv3.ProcessingMode_FULL_DUPLEX_STREAMED {
		var err error
		p.res.respBody, err = p.recvDuplex(true, p.respTrailers)
		return err
	}
	if p.respTrailers {
		r, err := p.recv()
		if err != nil {
			return err
		}
		if r.GetResponseTrailers() == nil {
			return violation{fmt.Sprintf("%T for response trailers", r.GetResponse())}
		}
	}
	return nil
}
