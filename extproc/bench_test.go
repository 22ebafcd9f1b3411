package extproc

import (
	"bytes"
	"context"
	"fmt"
	"runtime"
	"syscall"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	epv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
)

// benchHeaders are the headers of a typical chat request as Envoy sends them.
var benchHeaders = []Header{
	{":authority", "llm.example"}, {":path", "/v1/chat/completions"}, {":method", "POST"}, {":scheme", "http"},
	{"user-agent", "OpenAI/Python 1.99.0"}, {"content-type", "application/json"}, {"accept", "application/json"},
	{"authorization", "Bearer sk-0123456789abcdef0123456789abcdef"}, {"x-forwarded-proto", "http"},
	{"x-request-id", "2f1c0d0a-6f4c-4b7e-9a53-2f8d3c8a7f11"}, {"x-stainless-lang", "python"}, {"x-stainless-os", "Linux"},
}

func marshal(tb testing.TB, m proto.Message) []byte {
	tb.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

// frames cuts a message into buffers of HTTP/2 frame size.
func frames(b []byte) (out mem.BufferSlice) {
	for len(b) > 0 {
		n := min(16384, len(b))
		out = append(out, mem.SliceBuffer(b[:n]))
		b = b[n:]
	}
	return out
}

// exchangeMessages are the messages of one request in the given mode, with a
// response phase of headers only.
func exchangeMessages(tb testing.TB, mode filterv3.ProcessingMode_BodySendMode, size int) []mem.BufferSlice {
	tb.Helper()
	hm := &corev3.HeaderMap{}
	for _, h := range benchHeaders {
		hm.Headers = append(hm.Headers, &corev3.HeaderValue{Key: h.Name, RawValue: []byte(h.Value)})
	}
	hm.Headers = append(hm.Headers, &corev3.HeaderValue{Key: "content-length", RawValue: fmt.Append(nil, size)})
	out := []mem.BufferSlice{frames(append(
		marshal(tb, &epv3.ProcessingRequest{Request: &epv3.ProcessingRequest_RequestHeaders{RequestHeaders: &epv3.HttpHeaders{Headers: hm}}}),
		marshal(tb, &epv3.ProcessingRequest{MetadataContext: &corev3.Metadata{}, ProtocolConfig: &epv3.ProtocolConfiguration{RequestBodyMode: mode, SendBodyWithoutWaitingForHeaderResponse: true}})...))}
	body := bytes.Repeat([]byte("x"), size)
	for len(body) > 0 && mode != filterv3.ProcessingMode_NONE {
		n := min(len(body), 16384)
		if mode == filterv3.ProcessingMode_BUFFERED {
			n = len(body)
		}
		out = append(out, frames(marshal(tb, bodyMessage(false, body[:n], n == len(body)))))
		body = body[n:]
	}
	return append(out, frames(marshal(tb, &epv3.ProcessingRequest{
		Request: &epv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: &epv3.HttpHeaders{
			Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{{Key: ":status", RawValue: []byte("200")}}}}},
		MetadataContext: &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{
			lbNamespace: {Fields: map[string]*structpb.Value{servedKey: structpb.NewStringValue("10.0.0.1:8000")}}}},
	})))
}

var benchModes = []filterv3.ProcessingMode_BodySendMode{
	filterv3.ProcessingMode_NONE, filterv3.ProcessingMode_BUFFERED, filterv3.ProcessingMode_STREAMED, filterv3.ProcessingMode_FULL_DUPLEX_STREAMED,
}

var benchSizes = []int{2 << 10, 8 << 10, 32 << 10, 128 << 10, 400 << 10, 1 << 20}

type nopTicket struct{}

func (nopTicket) ResponseHeaders(int, string) []Header { return nil }
func (nopTicket) ResponseBody([]byte, bool)            {}
func (nopTicket) FirstToken(time.Time)                 {}
func (nopTicket) End(time.Time)                        {}

var benchHandler = handlerFunc(func(context.Context, *Request) Decision {
	return Decision{Endpoint: "10.0.0.1:8000", Ticket: nopTicket{}}
})

// BenchmarkExchange measures codec and state machine without gRPC and sockets: one request from
// its first message to its end.
func BenchmarkExchange(b *testing.B) {
	for _, mode := range benchModes {
		for _, size := range benchSizes {
			b.Run(fmt.Sprintf("%s/%dKiB", mode, size>>10), func(b *testing.B) {
				msgs := exchangeMessages(b, mode, size)
				srv := NewServer(Options{}, benchHandler)
				b.ReportAllocs()
				for b.Loop() {
					x := &exchange{ctx: context.Background(), srv: srv, send: func(a *answer) error { a.bufs.Free(); return nil }}
					m := &message{first: true}
					for _, raw := range msgs {
						if err := m.decode(raw); err != nil {
							b.Fatal(err)
						}
						if err := x.handle(m); err != nil {
							b.Fatal(err)
						}
					}
					x.close()
				}
			})
		}
	}
}

// BenchmarkGenerated decodes the same messages with the generated code alone, for comparison.
func BenchmarkGenerated(b *testing.B) {
	for _, size := range benchSizes {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			msgs := exchangeMessages(b, filterv3.ProcessingMode_BUFFERED, size)
			c := Codec()
			b.ReportAllocs()
			for b.Loop() {
				for _, raw := range msgs {
					if err := c.Unmarshal(raw, &epv3.ProcessingRequest{}); err != nil {
						b.Fatal(err)
					}
				}
			}
		})
	}
}

func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkStream plays whole requests over a Unix socket. cpu-µs/req is the CPU
// time of server and client together.
func BenchmarkStream(b *testing.B) {
	for _, mode := range benchModes {
		for _, size := range []int{8 << 10, 128 << 10, 400 << 10} {
			b.Run(fmt.Sprintf("%s/%dKiB", mode, size>>10), func(b *testing.B) {
				bd := newBed(b, Options{}, benchHandler)
				c := &call{request: mode, eager: true, headers: benchHeaders}
				for n := size; n > 0; n -= 16384 {
					c.chunks = append(c.chunks, make([]byte, min(n, 16384)))
				}
				runtime.GC()
				start := cpuTime(b)
				n := 0
				for b.Loop() {
					if _, err := bd.play(b.Context(), c); err != nil {
						b.Fatal(err)
					}
					n++
				}
				b.ReportMetric(float64((cpuTime(b)-start).Microseconds())/float64(n), "cpu-µs/req")
			})
		}
	}
}
