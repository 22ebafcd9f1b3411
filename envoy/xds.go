package envoy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/anypb"
)

// endpointType is the only resource type that is served.
const endpointType = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"

// XDS serves the workers' addresses to any number of Envoys: EDS over ADS, state of the
// world, as in envoy/service/discovery/v3. It is safe for concurrent use.
//
// It uses go-control-plane's types but not its cache, which links every resource of Envoy:
// 5 MB of binary for one list of addresses.
type XDS struct {
	discoveryv3.UnimplementedAggregatedDiscoveryServiceServer

	done <-chan struct{}

	mu sync.Mutex
	// version is 0 until the first Set; Envoys get no answer until then.
	version uint64
	current *anypb.Any
	changed chan struct{} // closed and replaced on each change
	// acked holds the last version that each stream's Envoy acknowledged.
	acked map[discoveryv3.AggregatedDiscoveryService_StreamAggregatedResourcesServer]uint64
}

// NewXDS returns a server without endpoints.
func NewXDS() *XDS {
	return &XDS{changed: make(chan struct{}), acked: map[discoveryv3.AggregatedDiscoveryService_StreamAggregatedResourcesServer]uint64{}}
}

// Register adds the service to a gRPC server. ctx ends its streams.
func (x *XDS) Register(ctx context.Context, g *grpc.Server) {
	x.done = ctx.Done()
	discoveryv3.RegisterAggregatedDiscoveryServiceServer(g, x)
}

// Endpoints are the workers that Envoy may forward to, as "ip:port". A pick may be any of
// them; without a pick Envoy uses Spare only if Serve is empty.
type Endpoints struct {
	Serve []string
	Spare []string // prefill workers: they can serve whole requests, at the cost of their actual task
}

// Set replaces the endpoints. Running answers of a removed endpoint continue; it gets no new requests. Setting the same
// endpoints again has no effect. Addresses other than "ip:port" are left out and named in the error; the others are set
// nevertheless. It returns when all connected Envoys have acknowledged the endpoints, after 100 ms at the latest.
func (x *XDS) Set(e Endpoints) error {
	var wrong []error
	known := map[string]*endpointv3.LbEndpoint{}
	sorted := func(addresses []string) []string {
		all := slices.Compact(slices.Sorted(slices.Values(addresses)))
		return slices.DeleteFunc(all, func(a string) bool {
			lb, err := lbEndpoint(a)
			if err != nil {
				wrong = append(wrong, fmt.Errorf("endpoint %q left out: %w", a, err))
			}
			known[a] = lb
			return err != nil
		})
	}
	serve, spare := sorted(e.Serve), sorted(e.Spare)
	spare = slices.DeleteFunc(spare, func(a string) bool {
		_, serves := slices.BinarySearch(serve, a)
		return serves
	})
	if len(serve) == 0 {
		serve, spare = spare, nil // priorities must start at 0
	}
	groups := make([]*endpointv3.LocalityLbEndpoints, 0, 2)
	for i, addresses := range [][]string{serve, spare} {
		if i > 0 && len(addresses) == 0 {
			continue
		}
		g := &endpointv3.LocalityLbEndpoints{Priority: uint32(i)}
		for _, a := range addresses {
			g.LbEndpoints = append(g.LbEndpoints, known[a])
		}
		groups = append(groups, g)
	}
	resource, err := anypb.New(&endpointv3.ClusterLoadAssignment{ClusterName: Cluster, Endpoints: groups})
	if err != nil {
		return err
	}
	x.publish(resource)
	for until := time.Now().Add(patience); x.behind() && time.Now().Before(until); {
		time.Sleep(time.Millisecond)
	}
	return errors.Join(wrong...)
}

// patience is how long Set waits for Envoys to acknowledge new endpoints. Requests are placed on them afterwards.
const patience = 100 * time.Millisecond

// behind reports whether an Envoy has not acknowledged the current version.
func (x *XDS) behind() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, version := range x.acked {
		if version < x.version {
			return true
		}
	}
	return false
}

func (x *XDS) publish(resource *anypb.Any) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.version > 0 && bytes.Equal(resource.GetValue(), x.current.GetValue()) {
		return
	}
	x.version++
	x.current = resource
	close(x.changed)
	x.changed = make(chan struct{})
}

func lbEndpoint(address string) (*endpointv3.LbEndpoint, error) {
	a, err := netip.ParseAddrPort(address)
	if err == nil && a.Addr().Zone() != "" {
		err = errors.New("it has a zone") // which may be no UTF-8 text
	}
	if err != nil {
		return nil, err
	}
	return &endpointv3.LbEndpoint{HostIdentifier: &endpointv3.LbEndpoint_Endpoint{Endpoint: &endpointv3.Endpoint{
		Address: &corev3.Address{Address: &corev3.Address_SocketAddress{SocketAddress: &corev3.SocketAddress{
			Address: a.Addr().String(), PortSpecifier: &corev3.SocketAddress_PortValue{PortValue: uint32(a.Port())},
		}}},
	}}}, nil
}

// state returns what a stream has to send; version is 0 before the first Set.
func (x *XDS) state() (version uint64, resource *anypb.Any, changed <-chan struct{}) {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.version, x.current, x.changed
}

// StreamAggregatedResources implements ADS: an Envoy that subscribed to endpoints gets each version once. ACK and NACK
// have no effect: there is one resource, and a refused one can only be replaced by a newer version.
func (x *XDS) StreamAggregatedResources(stream discoveryv3.AggregatedDiscoveryService_StreamAggregatedResourcesServer) error {
	asked := make(chan struct{}, 1)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			r, err := stream.Recv()
			x.mu.Lock()
			switch {
			case err != nil:
				delete(x.acked, stream)
			case r.GetTypeUrl() == endpointType && r.GetResponseNonce() == "": // a new subscription; its version may be another server's
				x.acked[stream] = 0
			case r.GetTypeUrl() == endpointType:
				x.acked[stream], _ = strconv.ParseUint(r.GetVersionInfo(), 10, 64)
			}
			x.mu.Unlock()
			if err != nil {
				return
			}
			// Requests for other types are not answered, like those to any server without such resources.
			if r.GetTypeUrl() == endpointType && r.GetResponseNonce() == "" {
				select {
				case asked <- struct{}{}:
				default:
				}
			}
		}
	}()
	subscribed, sent := false, uint64(0)
	for {
		version, resource, changed := x.state()
		if subscribed && version > sent {
			text := strconv.FormatUint(version, 10)
			if err := stream.Send(&discoveryv3.DiscoveryResponse{
				VersionInfo: text, Nonce: text, TypeUrl: endpointType, Resources: []*anypb.Any{resource},
			}); err != nil {
				return err
			}
			sent = version
		}
		select {
		case <-changed:
		case <-asked:
			subscribed, sent = true, 0
		case <-ended:
			return nil
		case <-x.done:
			return nil
		}
	}
}
