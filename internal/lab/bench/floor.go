package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocfilter "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/kvlane/kvlane/envoy"
)

// floor speaks ext_proc with the generated code and makes no decision: it picks round robin and echoes what is required.
type floor struct {
	extprocv3.UnimplementedExternalProcessorServer

	addresses []string
	next      atomic.Uint64
}

// runFloor serves until ctx ends.
func runFloor(ctx context.Context, socket, addresses string) error {
	f := &floor{addresses: strings.Split(addresses, ",")}
	lis, err := new(net.ListenConfig).Listen(ctx, "unix", socket)
	if err != nil {
		return err
	}
	// the transport is Kvlane's (extproc.GRPCOptions), but for the pool of buffers: gRPC's own clears those that it reuses
	g := grpc.NewServer(grpc.MaxRecvMsgSize(64<<20), grpc.InitialWindowSize(256<<10), grpc.InitialConnWindowSize(32<<20), grpc.ReadBufferSize(128<<10), grpc.WriteBufferSize(128<<10), grpc.NumStreamWorkers(32))
	extprocv3.RegisterExternalProcessorServer(g, f)
	alive := health.NewServer()
	alive.SetServingStatus("liveness", grpc_health_v1.HealthCheckResponse_SERVING) // the bootstrap's health check, BUFFERED
	alive.SetServingStatus("readiness", grpc_health_v1.HealthCheckResponse_SERVING)
	grpc_health_v1.RegisterHealthServer(g, alive)
	xds := envoy.NewXDS()
	xds.Register(ctx, g)
	if err := xds.Set(envoy.Endpoints{Serve: f.addresses}); err != nil {
		return err
	}
	context.AfterFunc(ctx, g.Stop)
	return g.Serve(lis)
}

// Process implements the protocol for BUFFERED and FULL_DUPLEX_STREAMED bodies.
func (f *floor) Process(stream extprocv3.ExternalProcessor_ProcessServer) error {
	duplex := false
	var body [][]byte
	for {
		m, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF), err != nil && stream.Context().Err() != nil:
			return nil //nolint:nilerr // the request is over
		case err != nil:
			return err
		}
		if c := m.GetProtocolConfig(); c != nil {
			duplex = c.GetRequestBodyMode() == extprocfilter.ProcessingMode_FULL_DUPLEX_STREAMED
		}
		var out []*extprocv3.ProcessingResponse
		switch r := m.GetRequest().(type) {
		case *extprocv3.ProcessingRequest_RequestHeaders:
			if !duplex || r.RequestHeaders.GetEndOfStream() {
				out = append(out, f.headers(r.RequestHeaders.GetEndOfStream()))
			}
		case *extprocv3.ProcessingRequest_RequestBody:
			if !duplex {
				out = append(out, f.picked(&extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestBody{
					RequestBody: &extprocv3.BodyResponse{Response: f.change()}}}))
				break
			}
			if body = append(body, r.RequestBody.GetBody()); r.RequestBody.GetEndOfStream() {
				out = append(out, f.headers(true))
				for i, piece := range body {
					out = append(out, echo(piece, i == len(body)-1))
				}
			}
		case *extprocv3.ProcessingRequest_ResponseHeaders:
			out = append(out, &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseHeaders{ResponseHeaders: &extprocv3.HeadersResponse{}}})
		case *extprocv3.ProcessingRequest_ResponseTrailers:
			out = append(out, &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseTrailers{ResponseTrailers: &extprocv3.TrailersResponse{}}})
		default:
			return fmt.Errorf("unexpected message %T", r)
		}
		for _, o := range out {
			if err := stream.Send(o); err != nil {
				return nil //nolint:nilerr // the client went away
			}
		}
	}
}

// headers answers request headers, with the pick if it is due.
func (f *floor) headers(pick bool) *extprocv3.ProcessingResponse {
	h := &extprocv3.HeadersResponse{}
	out := &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: h}}
	if !pick {
		return out
	}
	h.Response = f.change()
	return f.picked(out)
}

// change is the header mutation of a decision.
func (f *floor) change() *extprocv3.CommonResponse {
	return &extprocv3.CommonResponse{HeaderMutation: &extprocv3.HeaderMutation{SetHeaders: []*corev3.HeaderValueOption{
		{Header: &corev3.HeaderValue{Key: "x-data-parallel-rank", RawValue: []byte("0")}},
	}}}
}

// picked adds the endpoint to an answer.
func (f *floor) picked(out *extprocv3.ProcessingResponse) *extprocv3.ProcessingResponse {
	address := f.addresses[f.next.Add(1)%uint64(len(f.addresses))]
	out.DynamicMetadata = &structpb.Struct{Fields: map[string]*structpb.Value{"envoy.lb": structpb.NewStructValue(&structpb.Struct{
		Fields: map[string]*structpb.Value{"x-gateway-destination-endpoint": structpb.NewStringValue(address)},
	})}}
	return out
}

func echo(piece []byte, last bool) *extprocv3.ProcessingResponse {
	return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestBody{RequestBody: &extprocv3.BodyResponse{
		Response: &extprocv3.CommonResponse{BodyMutation: &extprocv3.BodyMutation{Mutation: &extprocv3.BodyMutation_StreamedResponse{
			StreamedResponse: &extprocv3.StreamedBodyResponse{Body: piece, EndOfStream: last},
		}}},
	}}}
}
