package e2e

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	epv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/protobuf/types/known/structpb"
)

// plane is a data plane like Envoy AI Gateway and agentgateway: TLS without certificate
// verification, both bodies full duplex, the pick read from the header and as exactly one
// socket address, no subset hint, and (for one of them) the endpoint that served reported
// back.
type plane struct {
	conn   *grpc.ClientConn
	served bool
	split  bool // the body is the decode leg's, not the client's
}

func newPlane(t *testing.T, b *bed, served bool) *plane {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+b.file("k.sock"), grpc.WithTransportCredentials(
		credentials.NewTLS(&tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12})))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return &plane{conn: conn, served: served}
}

const (
	headerChunk = 16 << 10
	requestID   = "5f2b1c1e-1111-4222-8333-444455556666"
)

func header(key, value string) *corev3.HeaderValue {
	return &corev3.HeaderValue{Key: key, RawValue: []byte(value)}
}

// exchange sends one request through the picker to the endpoint that it names, and the
// answer back through the picker.
func (p *plane) exchange(t *testing.T, body []byte) answer {
	t.Helper()
	stream, err := epv3.NewExternalProcessorClient(p.conn).Process(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	send := func(m *epv3.ProcessingRequest) {
		t.Helper()
		if err := stream.Send(m); err != nil {
			t.Fatal(err)
		}
	}
	send(&epv3.ProcessingRequest{
		Request: &epv3.ProcessingRequest_RequestHeaders{RequestHeaders: &epv3.HttpHeaders{Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{
			header(":method", "POST"), header(":path", "/v1/chat/completions"), header(":authority", "gateway"), header("content-type", "application/json"),
			header("x-request-id", requestID),
			header("x-gateway-destination-endpoint", "192.0.2.1:1"), // set by a client
		}}}},
		ProtocolConfig: &epv3.ProtocolConfiguration{
			RequestBodyMode: filterv3.ProcessingMode_FULL_DUPLEX_STREAMED, ResponseBodyMode: filterv3.ProcessingMode_FULL_DUPLEX_STREAMED},
	})
	for rest := body; len(rest) > 0; {
		n := min(len(rest), headerChunk)
		send(&epv3.ProcessingRequest{Request: &epv3.ProcessingRequest_RequestBody{RequestBody: &epv3.HttpBody{Body: rest[:n], EndOfStream: n == len(rest)}}})
		rest = rest[n:]
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://invalid/v1/chat/completions", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", requestID)
	first, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	endpoint := ""
	for _, h := range first.GetRequestHeaders().GetResponse().GetHeaderMutation().GetSetHeaders() {
		name, value := h.GetHeader().GetKey(), string(h.GetHeader().GetRawValue())
		if name == "x-gateway-destination-endpoint" {
			endpoint = value
			continue
		}
		req.Header.Set(name, value)
	}
	if _, err := netip.ParseAddrPort(endpoint); err != nil {
		t.Fatalf("pick %q is not one socket address", endpoint)
	}
	echoed := receive(t, stream, func(m *epv3.ProcessingResponse) *epv3.BodyResponse { return m.GetRequestBody() })
	if bytes.Equal(echoed, body) == p.split {
		t.Fatalf("the body came back with %d bytes, %d were sent", len(echoed), len(body))
	}
	req.URL.Host, req.Host = endpoint, endpoint
	req.Body, req.ContentLength = io.NopCloser(bytes.NewReader(echoed)), int64(len(echoed))
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	if err != nil {
		t.Fatal(err)
	}
	m := &epv3.ProcessingRequest{Request: &epv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: &epv3.HttpHeaders{Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{
		header(":status", fmt.Sprint(resp.StatusCode)), header("content-type", resp.Header.Get("Content-Type"))}}}}}
	if p.served {
		lb, err := structpb.NewStruct(map[string]any{"x-gateway-destination-endpoint-served": endpoint})
		if err != nil {
			t.Fatal(err)
		}
		m.MetadataContext = &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{"envoy.lb": lb}}
	}
	send(m)
	second, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	added := http.Header{}
	for _, h := range second.GetResponseHeaders().GetResponse().GetHeaderMutation().GetSetHeaders() {
		added.Set(h.GetHeader().GetKey(), string(h.GetHeader().GetRawValue()))
	}
	half := len(text) / 2
	send(&epv3.ProcessingRequest{Request: &epv3.ProcessingRequest_ResponseBody{ResponseBody: &epv3.HttpBody{Body: text[:half]}}})
	send(&epv3.ProcessingRequest{Request: &epv3.ProcessingRequest_ResponseBody{ResponseBody: &epv3.HttpBody{Body: text[half:], EndOfStream: true}}})
	back := receive(t, stream, func(m *epv3.ProcessingResponse) *epv3.BodyResponse { return m.GetResponseBody() })
	if !bytes.Equal(back, text) {
		t.Fatalf("the answer came back as %q, not %q", back, text)
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		t.Fatalf("the stream ends with %v", err)
	}
	return answer{resp.StatusCode, added.Get("X-Kvlane-Target"), added.Get("X-Kvlane-Matched-Tokens"), endpoint, string(back)}
}

type answer struct {
	status            int
	target, matched   string
	endpoint, content string
}

// receive collects the pieces of a body until the last one.
func receive(t *testing.T, stream epv3.ExternalProcessor_ProcessClient, of func(*epv3.ProcessingResponse) *epv3.BodyResponse) []byte {
	t.Helper()
	var out []byte
	for {
		m, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		piece := of(m).GetResponse().GetBodyMutation().GetStreamedResponse()
		if piece == nil {
			t.Fatalf("not a piece of the body: %v", m)
		}
		if len(piece.GetBody()) > 64<<10 {
			t.Errorf("a piece of %d bytes: these gateways take 64 KiB", len(piece.GetBody()))
		}
		out = append(out, piece.GetBody()...)
		if piece.GetEndOfStream() {
			return out
		}
	}
}

func TestGatewaysThatReadTheHeaderOnly(t *testing.T) {
	b := newBed(t, shape{})
	for name, served := range map[string]bool{"Envoy AI Gateway": false, "agentgateway": true} {
		t.Run(name, func(t *testing.T) {
			p := newPlane(t, b, served)
			body := b.remember([]byte(fmt.Sprintf(`{"model": %q, "max_tokens": 4, "messages": [{"role": "user", "content": %q}]}`, modelName, name+strings.Repeat(" and so on", 3000))))
			before := b.metric("kvlane_index_blocks", `tier="device"`)
			first := p.exchange(t, body)
			if first.status != http.StatusOK {
				t.Fatalf("%+v", first)
			}
			b.until("the index has the prompt", func() bool { return b.metric("kvlane_index_blocks", `tier="device"`) > before+100 })
			second := p.exchange(t, body)
			if second.status != http.StatusOK {
				t.Fatalf("%+v", second)
			}
			if second.target != first.target || second.endpoint != first.endpoint || second.target == "" {
				t.Errorf("first at %q %s, second at %q %s", first.target, first.endpoint, second.target, second.endpoint)
			}
			if second.matched == "0" || !strings.Contains(second.content, `"cached_tokens":`+second.matched) && !strings.Contains(second.content, `"cached_tokens": `+second.matched) {
				t.Errorf("%s tokens predicted as cached, the engine says %s", second.matched, second.content)
			}
		})
	}
}

// A split request too gets exactly one endpoint, although two decode workers could serve
// its decode leg.
func TestGatewaysThatReadTheHeaderOnlyAndSplitRequests(t *testing.T) {
	for _, pair := range pairs() {
		if pair.connector != "nixl" && pair.connector != "sglang" {
			continue
		}
		t.Run(pair.connector, func(t *testing.T) {
			b := newPools(t, pair, "")
			p := newPlane(t, b, false)
			p.split = true
			body := []byte(fmt.Sprintf(`{"model": %q, "max_tokens": 4, "messages": [{"role": "user", "content": %q}]}`, modelName, strings.Repeat(" and so on", 300)))
			if a := p.exchange(t, body); a.status != http.StatusOK || !strings.HasPrefix(a.target, "e2") && !strings.HasPrefix(a.target, "e3") {
				t.Errorf("%+v", a)
			}
		})
	}
}
