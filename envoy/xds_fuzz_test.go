package envoy

import (
	"bytes"
	"context"
	"io"
	"testing"

	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protodelim"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// listed is a stream of requests that were recorded.
type listed struct {
	grpc.ServerStream

	ctx      context.Context
	requests chan *discoveryv3.DiscoveryRequest
	answers  chan *discoveryv3.DiscoveryResponse
}

func (l *listed) Context() context.Context { return l.ctx }

func (l *listed) Recv() (*discoveryv3.DiscoveryRequest, error) {
	r, ok := <-l.requests
	if !ok {
		return nil, io.EOF
	}
	return r, nil
}

func (l *listed) Send(r *discoveryv3.DiscoveryResponse) error {
	l.answers <- r
	return nil
}

// FuzzXDS sends any requests of discovery: no more answers come than there were subscriptions, and all are of endpoints.
func FuzzXDS(f *testing.F) {
	seed := func(requests ...*discoveryv3.DiscoveryRequest) {
		var b bytes.Buffer
		for _, r := range requests {
			if _, err := protodelim.MarshalTo(&b, r); err != nil {
				f.Fatal(err)
			}
		}
		f.Add(b.Bytes())
	}
	subscribe := &discoveryv3.DiscoveryRequest{TypeUrl: endpointType, ResourceNames: []string{Cluster}}
	seed(subscribe)
	seed(subscribe, &discoveryv3.DiscoveryRequest{TypeUrl: endpointType, VersionInfo: "1", ResponseNonce: "1"}, subscribe)
	seed(&discoveryv3.DiscoveryRequest{TypeUrl: "type.googleapis.com/envoy.config.cluster.v3.Cluster"}, subscribe, &discoveryv3.DiscoveryRequest{ResponseNonce: "x"})
	f.Fuzz(func(t *testing.T, raw []byte) {
		var requests []*discoveryv3.DiscoveryRequest
		subscriptions := 0
		for in := bytes.NewReader(raw); in.Len() > 0; {
			r := &discoveryv3.DiscoveryRequest{}
			if (protodelim.UnmarshalOptions{MaxSize: 1 << 16}).UnmarshalFrom(in, r) != nil {
				break
			}
			requests = append(requests, r)
			if r.GetTypeUrl() == endpointType && r.GetResponseNonce() == "" {
				subscriptions++
			}
		}
		x := NewXDS()
		if err := x.Set(Endpoints{Serve: []string{"10.0.0.1:80"}}); err != nil {
			t.Fatal(err)
		}
		s := &listed{ctx: t.Context(), requests: make(chan *discoveryv3.DiscoveryRequest), answers: make(chan *discoveryv3.DiscoveryResponse, len(requests)+1)}
		ended := make(chan error, 1)
		go func() { ended <- x.StreamAggregatedResources(s) }()
		for _, r := range requests {
			s.requests <- r
		}
		if subscriptions > 0 { // the server answers while we wait; several subscriptions may share one answer
			first := <-s.answers
			if first.GetTypeUrl() != endpointType || len(first.GetResources()) != 1 || first.GetNonce() == "" {
				t.Fatalf("got %v, want the endpoints with a nonce", first)
			}
		}
		close(s.requests)
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		close(s.answers)
		more := 0
		for range s.answers {
			more++
		}
		if more > max(subscriptions-1, 0) {
			t.Fatalf("got %d answers more than the first to %d subscriptions", more, subscriptions)
		}
	})
}

// FuzzEndpoints sets any addresses: what is published is valid, and has each address that is one once.
func FuzzEndpoints(f *testing.F) {
	for _, a := range []string{"10.0.0.1:80", "[::1]:80", "10.0.0.1:65536", "host:80", ":80", "10.0.0.1", "[fe80::1%eth0]:80", "\xff:1", "127.0.0.1:+1"} {
		f.Add(a, "10.0.0.2:80")
	}
	f.Fuzz(func(t *testing.T, serve, spare string) {
		x := NewXDS()
		err := x.Set(Endpoints{Serve: []string{serve, serve}, Spare: []string{spare, serve}})
		_, resource, _ := x.state()
		if resource == nil {
			t.Fatalf("got nothing published (%v), want at least an empty list", err)
		}
		m, unpacked := anypb.UnmarshalNew(resource, proto.UnmarshalOptions{})
		if unpacked != nil {
			t.Fatal(unpacked)
		}
		if err := m.(interface{ ValidateAll() error }).ValidateAll(); err != nil {
			t.Fatalf("%q, %q: %v", serve, spare, err)
		}
		want := map[string]bool{}
		for _, a := range []string{serve, spare} {
			if _, err := lbEndpoint(a); err == nil {
				want[a] = true
			}
		}
		got := 0
		for _, g := range m.(*endpointv3.ClusterLoadAssignment).GetEndpoints() {
			got += len(g.GetLbEndpoints())
		}
		if got != len(want) {
			t.Fatalf("%q, %q: got %d endpoints (%v), want %d", serve, spare, got, err, len(want))
		}
	})
}
