package extproc_test

import (
	"context"
	"fmt"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	epv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvlane/kvlane/extproc"
)

// byModel sends each model to its own worker.
type byModel map[string]string

// Decide implements extproc.Handler.
func (b byModel) Decide(_ context.Context, r *extproc.Request) extproc.Decision {
	if r.Partial {
		return extproc.Decision{} // not the whole body: let Envoy choose
	}
	for model, worker := range b {
		if strings.Contains(string(r.Body), `"`+model+`"`) {
			return extproc.Decision{Endpoint: worker}
		}
	}
	return extproc.Decision{Reject: &extproc.Reject{Status: 404, Body: []byte(`{"error":{"message":"no such model"}}`)}}
}

func ExampleHandler() {
	h := byModel{"qwen3": "10.0.0.1:8000"}
	fmt.Println(h.Decide(context.Background(), &extproc.Request{Body: []byte(`{"model":"qwen3"}`)}).Endpoint)
	fmt.Println(h.Decide(context.Background(), &extproc.Request{Body: []byte(`{"model":"other"}`)}).Reject.Status)
	// Output:
	// 10.0.0.1:8000
	// 404
}

// A server for Envoy, asked once as Envoy asks it: headers and the whole body of a request.
func ExampleServer() {
	ctx := context.Background()
	opts := extproc.Options{BodyLimit: 32 << 20}
	srv := extproc.NewServer(opts, byModel{"qwen3": "10.0.0.1:8000"})
	g := grpc.NewServer(extproc.GRPCOptions(opts)...)
	srv.Register(g)
	lis, err := extproc.Listen(ctx, "127.0.0.1:0", nil)
	if err != nil {
		panic(err)
	}
	served := make(chan error, 1)
	go func() { served <- g.Serve(lis) }()

	conn, err := grpc.NewClient(lis.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		panic(err)
	}
	stream, err := epv3.NewExternalProcessorClient(conn).Process(ctx)
	if err != nil {
		panic(err)
	}
	var headers []*corev3.HeaderValue
	for _, h := range [][2]string{{":method", "POST"}, {":path", "/v1/chat/completions"}, {"x-request-id", "1"}} {
		headers = append(headers, &corev3.HeaderValue{Key: h[0], RawValue: []byte(h[1])})
	}
	for _, m := range []*epv3.ProcessingRequest{
		{
			ProtocolConfig: &epv3.ProtocolConfiguration{RequestBodyMode: 2}, // BUFFERED
			Request:        &epv3.ProcessingRequest_RequestHeaders{RequestHeaders: &epv3.HttpHeaders{Headers: &corev3.HeaderMap{Headers: headers}}},
		},
		{Request: &epv3.ProcessingRequest_RequestBody{RequestBody: &epv3.HttpBody{Body: []byte(`{"model":"qwen3"}`), EndOfStream: true}}},
	} {
		if err := stream.Send(m); err != nil {
			panic(err)
		}
		answer, err := stream.Recv()
		if err != nil {
			panic(err)
		}
		if body := answer.GetRequestBody(); body != nil {
			for _, h := range body.GetResponse().GetHeaderMutation().GetSetHeaders() {
				fmt.Printf("%s: %s\n", h.GetHeader().GetKey(), h.GetHeader().GetRawValue())
			}
		}
	}
	_ = stream.CloseSend()
	_ = conn.Close()
	g.Stop()
	fmt.Println("served:", <-served)
	// Output:
	// x-gateway-destination-endpoint: 10.0.0.1:8000
	// served: <nil>
}
