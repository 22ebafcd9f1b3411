package envoy

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/cache/types"
	cachev3 "github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	serverv3 "github.com/envoyproxy/go-control-plane/pkg/server/v3"
	"google.golang.org/grpc"
)

// XDS serves the workers' addresses to any number of Envoys by EDS over ADS. It
// is safe for concurrent use.
type XDS struct {
	cache *cachev3.LinearCache

	mu      sync.Mutex
	version uint64
	last    []string
}

// NewXDS returns a server without endpoints. Envoys wait for the first Set.
func NewXDS() *XDS {
	return &XDS{cache: cachev3.NewLinearCache(resource.EndpointType)}
}

// Register adds the service to a gRPC server. ctx ends its streams.
func (x *XDS) Register(ctx context.Context, g *grpc.Server) {
	mux := &cachev3.MuxCache{
		Classify: func(r *cachev3.Request) string { return r.GetTypeUrl() },
		ClassifyDelta: func(r *cachev3.DeltaRequest) string {
			return r.GetTypeUrl()
		},
		Caches: map[string]cachev3.Cache{resource.EndpointType: x.cache},
	}
	discoveryv3.RegisterAggregatedDiscoveryServiceServer(g, serverv3.NewServer(ctx, mux, nil))
}

// Set replaces the endpoints ("ip:port"). Running answers of a removed endpoint
// go on; new requests do not reach it. Equal sets change nothing.
func (x *XDS) Set(addresses []string) error {
	sorted := slices.Compact(slices.Sorted(slices.Values(addresses)))
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.version > 0 && slices.Equal(sorted, x.last) {
		return nil
	}
	endpoints := make([]*endpointv3.LbEndpoint, 0, len(sorted))
	for _, a := range sorted {
		host, port, err := net.SplitHostPort(a)
		if err != nil {
			return fmt.Errorf("endpoint %q: %w", a, err)
		}
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil {
			return fmt.Errorf("endpoint %q: port: %w", a, err)
		}
		if net.ParseIP(host) == nil {
			return fmt.Errorf("endpoint %q: not an IP address", a)
		}
		endpoints = append(endpoints, &endpointv3.LbEndpoint{HostIdentifier: &endpointv3.LbEndpoint_Endpoint{
			Endpoint: &endpointv3.Endpoint{Address: socketAddress(host, uint32(n))},
		}})
	}
	x.version++
	x.last = sorted
	return x.cache.UpdateResources(map[string]types.Resource{Cluster: &endpointv3.ClusterLoadAssignment{
		ClusterName: Cluster,
		Endpoints:   []*endpointv3.LocalityLbEndpoints{{LbEndpoints: endpoints}},
	}}, nil)
}

func socketAddress(host string, port uint32) *corev3.Address {
	return &corev3.Address{Address: &corev3.Address_SocketAddress{SocketAddress: &corev3.SocketAddress{
		Address: host, PortSpecifier: &corev3.SocketAddress_PortValue{PortValue: port},
	}}}
}
