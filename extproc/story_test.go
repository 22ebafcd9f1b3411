package extproc

import (
	"bytes"
	"context"
	"fmt"
	"sort"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	epv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
)

// A story plays messages of Envoy against the state machine, without gRPC. See testdata/stories;
// go test -rewrite rewrites the expectations.
func TestStories(t *testing.T) {
	played := 0
	datadriven.Walk(t, "testdata/stories", func(t *testing.T, path string) {
		played++
		st := &story{t: t, answer: &Decision{Endpoint: "10.0.0.1:8000"}}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			st.t = t
			return st.run(d)
		})
	})
	if played == 0 {
		t.Fatal("no stories found")
	}
}

type story struct {
	t      *testing.T
	opts   Options
	srv    *Server
	x      *exchange
	cancel context.CancelFunc
	first  *epv3.ProtocolConfiguration
	observ bool
	out    strings.Builder
	answer *Decision
	panics bool
	ticket bool
	edits  bool
}

func (s *story) printf(format string, args ...any) { fmt.Fprintf(&s.out, format+"\n", args...) }

// Decide implements Handler.
func (s *story) Decide(_ context.Context, r *Request) Decision {
	s.printf("  decide mode=%s method=%q path=%q authority=%q id=%q partial=%v body=%s", r.Mode, r.Method, r.Path, r.Authority, r.ID, r.Partial, short(r.Body))
	if r.HasSubset {
		s.printf("  subset %q", r.Subset)
	}
	if s.panics {
		panic("scripted")
	}
	d := *s.answer
	switch {
	case s.edits:
		d.Ticket = &storyEditor{storyTicket: storyTicket{s}}
	case s.ticket:
		d.Ticket = storyTicket{s}
	}
	return d
}

type storyTicket struct{ s *story }

func (t storyTicket) ResponseHeaders(status int, served string) []Header {
	t.s.printf("  ticket: response status=%d served=%q", status, served)
	return []Header{{"x-kvlane-target", "w/1"}}
}
func (t storyTicket) ResponseBody(chunk []byte, last bool) {
	t.s.printf("  ticket: body %s last=%v", short(chunk), last)
}
func (t storyTicket) FirstToken(time.Time) { t.s.printf("  ticket: first token") }
func (t storyTicket) End(time.Time)        { t.s.printf("  ticket: end") }
func (t storyTicket) Outcome(o Outcome) {
	t.s.printf("  ticket: outcome %d %s", o.Status, o.Details)
}

// storyEditor turns lower case into upper case and holds back everything after an open bracket
// until it is closed.
type storyEditor struct {
	storyTicket
	held []byte
}

func (t *storyEditor) EditsBody() bool { return true }

func (t *storyEditor) EditBody(chunk []byte, last bool) (out []byte, changed, holds bool) {
	if bytes.Contains(chunk, []byte("panic")) {
		panic("scripted")
	}
	text := append(t.held, chunk...)
	t.held = nil
	if open := bytes.LastIndexByte(text, '('); open > bytes.LastIndexByte(text, ')') && !last {
		t.held = bytes.Clone(text[open:])
		text = text[:open]
	}
	out = bytes.ToUpper(text)
	return out, !bytes.Equal(out, chunk), len(t.held) > 0
}

func short(b []byte) string {
	if len(b) > 40 {
		return fmt.Sprintf("%q... (%d)", b[:8], len(b))
	}
	return strconv.Quote(string(b))
}

var storyModes = map[string]filterv3.ProcessingMode_BodySendMode{"none": 0, "streamed": 1, "buffered": 2, "partial": 3, "fds": 4, "grpc": 5}

func (s *story) run(d *datadriven.TestData) string {
	s.out.Reset()
	arg := func(name string) (string, bool) {
		for _, a := range d.CmdArgs {
			if a.Key == name {
				return strings.Join(a.Vals, ","), true
			}
		}
		return "", false
	}
	number := func(name string) int {
		v, ok := arg(name)
		if !ok {
			return 0
		}
		n, err := strconv.Atoi(v)
		if err != nil {
			s.t.Fatal(err)
		}
		return n
	}
	_, last := arg("last")
	switch d.Cmd {
	case "open":
		s.open(d, arg, number)
	case "handler":
		s.handler(d, arg)
	case "headers", "response":
		hm := &corev3.HeaderMap{}
		for line := range strings.Lines(d.Input) {
			k, v, _ := strings.Cut(strings.TrimSpace(line), " ")
			h := &corev3.HeaderValue{Key: k, RawValue: []byte(v)}
			if d.Cmd == "headers" && d.HasArg("plain") {
				h = &corev3.HeaderValue{Key: k, Value: v}
			}
			hm.Headers = append(hm.Headers, h)
		}
		hh := &epv3.HttpHeaders{Headers: hm, EndOfStream: last}
		r := &epv3.ProcessingRequest{Request: &epv3.ProcessingRequest_RequestHeaders{RequestHeaders: hh}}
		if d.Cmd == "response" {
			r.Request = &epv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: hh}
		}
		r.MetadataContext = &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{}}
		if v, ok := arg("served"); ok {
			r.MetadataContext.FilterMetadata[lbNamespace] = &structpb.Struct{Fields: map[string]*structpb.Value{servedKey: structpb.NewStringValue(v)}}
		}
		if v, ok := arg("subset"); ok {
			r.MetadataContext.FilterMetadata[subsetNamespace] = &structpb.Struct{Fields: map[string]*structpb.Value{subsetKey: structpb.NewStringValue(v)}}
		}
		if v, ok := arg("upstream"); ok {
			r.Attributes = map[string]*structpb.Struct{attributesKey: {Fields: map[string]*structpb.Value{"upstream.address": structpb.NewStringValue(v)}}}
		}
		s.send(r)
	case "body", "response-body":
		b := []byte(strings.TrimSuffix(d.Input, "\n"))
		if n := number("size"); n > 0 {
			b = []byte(strings.Repeat("a", n))
		}
		hb := &epv3.HttpBody{Body: b, EndOfStream: last, GrpcMessageCompressed: d.HasArg("compressed")}
		r := &epv3.ProcessingRequest{Request: &epv3.ProcessingRequest_RequestBody{RequestBody: hb}}
		if d.Cmd == "response-body" {
			r.Request = &epv3.ProcessingRequest_ResponseBody{ResponseBody: hb}
		}
		if v, ok := arg("id"); ok {
			r.Attributes = map[string]*structpb.Struct{attributesKey: {Fields: map[string]*structpb.Value{"request.id": structpb.NewStringValue(v)}}}
		}
		s.send(r)
	case "trailers":
		s.send(&epv3.ProcessingRequest{Request: &epv3.ProcessingRequest_RequestTrailers{RequestTrailers: &epv3.HttpTrailers{}}})
	case "response-trailers":
		s.send(&epv3.ProcessingRequest{Request: &epv3.ProcessingRequest_ResponseTrailers{ResponseTrailers: &epv3.HttpTrailers{}}})
	case "window":
		s.send(&epv3.ProcessingRequest{FlowControlInit: &epv3.ProcessingRequest_FlowControlInit{}})
	case "close":
		s.x.close()
		s.x.close()
	case "may-leave":
		s.printf("  %v", s.x.mayLeave())
	default:
		s.t.Fatalf("unknown command %q", d.Cmd)
	}
	return s.out.String()
}

func (s *story) open(d *datadriven.TestData, arg func(string) (string, bool), number func(string) int) {
	reqMode, _ := arg("request")
	respMode, _ := arg("response")
	s.opts = Options{BodyLimit: number("limit"), SkipResponseBody: d.HasArg("skip-response-body"), Now: func() time.Time { return time.Unix(0, 0) }}
	s.opts.Metrics.Failure = func(f Failure) { s.printf("  count %s", f) }
	if s.srv == nil || !d.HasArg("same-server") {
		s.opts.ControlHeaders = testControls
		s.srv = NewServer(s.opts, s)
	}
	var ctx context.Context
	ctx, s.cancel = context.WithCancel(context.Background())
	s.t.Cleanup(s.cancel)
	s.observ = d.HasArg("observe")
	s.first = &epv3.ProtocolConfiguration{RequestBodyMode: storyModes[reqMode], ResponseBodyMode: storyModes[respMode], SendBodyWithoutWaitingForHeaderResponse: d.HasArg("eager")}
	if d.HasArg("unconfigured") {
		s.first = nil
	}
	s.x = &exchange{ctx: ctx, srv: s.srv, send: func(a *answer) error {
		s.describe(parse(s.t, a))
		a.bufs.Free()
		return nil
	}}
}

func (s *story) handler(d *datadriven.TestData, arg func(string) (string, bool)) {
	s.answer = &Decision{ClearRouteCache: d.HasArg("clear-route-cache")}
	s.panics, s.ticket, s.edits = d.HasArg("panics"), d.HasArg("ticket"), d.HasArg("edits")
	s.answer.Endpoint, _ = arg("pick")
	for line := range strings.Lines(d.Input) {
		op, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		a, b, _ := strings.Cut(rest, " ")
		switch op {
		case "set":
			s.answer.Set = append(s.answer.Set, Header{a, strings.ReplaceAll(b, `\n`, "\n")})
		case "remove":
			s.answer.Remove = append(s.answer.Remove, a)
		case "body":
			s.answer.Body = []byte(rest)
		case "reject":
			st, err := strconv.Atoi(a)
			if err != nil {
				s.t.Fatal(err)
			}
			s.answer.Reject = &Reject{Status: st, Body: []byte(b), Details: "kvlane_test"}
		}
	}
}

func (s *story) send(r *epv3.ProcessingRequest) {
	r.ProtocolConfig, s.first = s.first, nil
	r.ObservabilityMode = s.observ
	raw, err := proto.Marshal(r)
	if err != nil {
		s.t.Fatal(err)
	}
	m := &message{first: !s.x.started}
	half := len(raw) / 2
	if err := m.decode(mem.BufferSlice{mem.SliceBuffer(raw[:half]), mem.SliceBuffer(raw[half:])}); err != nil {
		s.t.Fatal(err)
	}
	if err := s.x.handle(m); err != nil {
		s.printf("  stream ends: %v", err)
	}
	if s.x.over {
		s.printf("  over")
	}
}

// describe prints an answer in one line.
func (s *story) describe(r *epv3.ProcessingResponse) {
	var b strings.Builder
	var c *epv3.CommonResponse
	switch v := r.GetResponse().(type) {
	case *epv3.ProcessingResponse_RequestHeaders:
		b.WriteString("request_headers")
		c = v.RequestHeaders.GetResponse()
	case *epv3.ProcessingResponse_RequestBody:
		b.WriteString("request_body")
		c = v.RequestBody.GetResponse()
	case *epv3.ProcessingResponse_RequestTrailers:
		b.WriteString("request_trailers")
	case *epv3.ProcessingResponse_ResponseHeaders:
		b.WriteString("response_headers")
		c = v.ResponseHeaders.GetResponse()
	case *epv3.ProcessingResponse_ResponseBody:
		b.WriteString("response_body")
		c = v.ResponseBody.GetResponse()
	case *epv3.ProcessingResponse_ResponseTrailers:
		b.WriteString("response_trailers")
	case *epv3.ProcessingResponse_ImmediateResponse:
		ir := v.ImmediateResponse
		fmt.Fprintf(&b, "immediate %d %s details=%s", ir.GetStatus().GetCode(), short(ir.GetBody()), ir.GetDetails())
		for _, h := range ir.GetHeaders().GetSetHeaders() {
			fmt.Fprintf(&b, " %s=%q", h.GetHeader().GetKey(), h.GetHeader().GetRawValue())
		}
	}
	for _, h := range c.GetHeaderMutation().GetSetHeaders() {
		fmt.Fprintf(&b, " set %s=%q", h.GetHeader().GetKey(), h.GetHeader().GetRawValue())
	}
	removed := append([]string(nil), c.GetHeaderMutation().GetRemoveHeaders()...)
	sort.Strings(removed)
	for _, h := range removed {
		fmt.Fprintf(&b, " remove %s", h)
	}
	switch v := c.GetBodyMutation().GetMutation().(type) {
	case *epv3.BodyMutation_Body:
		fmt.Fprintf(&b, " body=%s", short(v.Body))
	case *epv3.BodyMutation_ClearBody:
		b.WriteString(" clear_body")
	case *epv3.BodyMutation_StreamedResponse:
		fmt.Fprintf(&b, " echo=%s eos=%v", short(v.StreamedResponse.GetBody()), v.StreamedResponse.GetEndOfStream())
		if v.StreamedResponse.GetGrpcMessageCompressed() {
			b.WriteString(" compressed")
		}
	}
	if c.GetClearRouteCache() {
		b.WriteString(" clear_route_cache")
	}
	if p := r.GetDynamicMetadata().GetFields()[lbNamespace].GetStructValue().GetFields()[pickKey].GetStringValue(); p != "" {
		fmt.Fprintf(&b, " pick=%s", p)
	}
	if o := r.GetModeOverride(); o != nil {
		fmt.Fprintf(&b, " mode_override(%s/%s/trailers %s)", o.GetRequestBodyMode(), o.GetResponseBodyMode(), o.GetResponseTrailerMode())
	}
	if r.GetServerWindowUpdate() != nil {
		b.WriteString("window_update")
	}
	s.printf("  %s", b.String())
}
