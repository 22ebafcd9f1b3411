package decide

import (
	"fmt"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	epv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvlane/kvlane/extproc"
)

// A request whose headers leave no room for those of its decision is refused, not routed: neither load nor credit is left of it.
func TestNoRoomForTheHeadersOfADecision(t *testing.T) {
	for _, c := range []struct {
		headers         int
		status          int
		routed, refused float64
	}{{80, 0, 1, 0}, {100, 431, 0, 1}} {
		b := newBench(t, "", worker("a", 2))
		opts := extproc.Options{BodyLimit: 1 << 20}
		srv, g := extproc.NewServer(opts, b), grpc.NewServer(extproc.GRPCOptions(opts)...)
		srv.Register(g)
		lis, err := extproc.Listen(t.Context(), "127.0.0.1:0", nil)
		if err != nil {
			t.Fatal(err)
		}
		served := make(chan error, 1)
		go func() { served <- g.Serve(lis) }()
		conn, err := grpc.NewClient(lis.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		stream, err := epv3.NewExternalProcessorClient(conn).Process(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		headers := []*corev3.HeaderValue{{Key: ":method", RawValue: []byte("POST")}, {Key: ":path", RawValue: []byte("/v1/completions")}}
		for i := range c.headers - len(headers) {
			headers = append(headers, &corev3.HeaderValue{Key: fmt.Sprint("h", i), RawValue: []byte("v")})
		}
		var answer *epv3.ProcessingResponse
		for _, m := range []*epv3.ProcessingRequest{
			{
				ProtocolConfig: &epv3.ProtocolConfiguration{RequestBodyMode: 2}, // BUFFERED
				Request:        &epv3.ProcessingRequest_RequestHeaders{RequestHeaders: &epv3.HttpHeaders{Headers: &corev3.HeaderMap{Headers: headers}}},
			},
			{Request: &epv3.ProcessingRequest_RequestBody{RequestBody: &epv3.HttpBody{Body: []byte(completion(100, "")), EndOfStream: true}}},
		} {
			if err := stream.Send(m); err != nil {
				t.Fatal(err)
			}
			if answer, err = stream.Recv(); err != nil {
				t.Fatal(err)
			}
		}
		if got := int(answer.GetImmediateResponse().GetStatus().GetCode()); got != c.status {
			t.Errorf("%d headers: got status %d, want %d", c.headers, got, c.status)
		}
		_ = stream.CloseSend()
		_ = conn.Close()
		g.GracefulStop()
		if err := <-served; err != nil {
			t.Error(err)
		}
		routed := testutil.ToFloat64(b.metrics.Requests.WithLabelValues("completions", "routed"))
		refused := testutil.ToFloat64(b.metrics.Rejected.WithLabelValues("431", "kvlane_too_many_headers"))
		if routed != c.routed || refused != c.refused {
			t.Errorf("%d headers: got %v routed and %v refused, want %v and %v", c.headers, routed, refused, c.routed, c.refused)
		}
		if got := b.loads(); got != 0 {
			t.Errorf("%d headers: got a load of %d, want 0", c.headers, got)
		}
		_, e := b.ask("/v1/completions", completion(100, ""))
		if got, want := e.Matched > 0, c.status == 0; got != want {
			t.Errorf("%d headers: the next request with its prompt: got credit %v, want %v", c.headers, got, want)
		}
	}
}
