package gateway

import (
	"context"
	"net"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/grpc/metadata"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/workers"
)

// PoolHeader is gRPC metadata that names the pool of a stream: "name" or "namespace/name". Set it as initial_metadata
// in a data plane that is configured by hand; it takes precedence over the authority.
const PoolHeader = "x-kvlane-pool"

// Gate restricts each request to the pods of its pool. A gateway does not send the pool's name; it is derived from the
// authority of the gRPC call, which names the Service through which the gateway called.
type Gate struct {
	// Next handles the requests that pass.
	Next extproc.Handler
	// Pools returns our pools; it is called for each request.
	Pools func() []workers.Pool
	// Refused is called for each request for another pool.
	Refused func(*extproc.Request)
}

// Decide implements extproc.Handler.
func (g *Gate) Decide(ctx context.Context, r *extproc.Request) extproc.Decision {
	pools := g.Pools()
	named, authority := origin(ctx)
	at := find(pools, named, authority)
	if at < 0 {
		g.Refused(r)
		return extproc.Decision{Reject: &extproc.Reject{
			Status: 503, Details: "kvlane_other_pool",
			Body: []byte(`{"error":{"message":"this endpoint picker does not serve the pool that the request is for","type":"service_unavailable_error","code":503}}`),
		}}
	}
	if len(pools) > 1 {
		restrict(r, pools[at].Endpoints)
	}
	return g.Next.Decide(ctx, r)
}

// origin returns the pool named in the metadata of the gRPC call, and the call's authority.
func origin(ctx context.Context) (pool, authority string) {
	md, _ := metadata.FromIncomingContext(ctx)
	if v := md.Get(PoolHeader); len(v) > 0 {
		pool = v[0]
	}
	if v := md.Get(":authority"); len(v) > 0 {
		authority = v[0]
	}
	return pool, authority
}

// find returns the index of the pool that a call is for, -1 if it is for none or cannot be assigned to one of several.
func find(pools []workers.Pool, named, authority string) int {
	if named != "" {
		return slices.IndexFunc(pools, func(p workers.Pool) bool { return named == p.Name || named == p.Namespace+"/"+p.Name })
	}
	service, namespace, port, ok := parseAuthority(authority)
	if !ok {
		return only(pools)
	}
	found, informed := -1, false
	for i, p := range pools {
		if p.Service == "" {
			continue
		}
		informed = true
		if p.Service != service || p.Namespace != namespace || port != 0 && p.Port != 0 && p.Port != port {
			continue
		}
		if found >= 0 {
			return -1 // two pools share a picker's Service and port: they cannot be distinguished
		}
		found = i
	}
	if !informed {
		return only(pools)
	}
	return found
}

func only(pools []workers.Pool) int {
	if len(pools) == 1 {
		return 0
	}
	return -1
}

// parseAuthority extracts the Service from an Envoy cluster's name, which is the authority of its gRPC calls: Istio's
// outbound|9002||epp.ns.svc.cluster.local, and epp.ns:9002, epp.ns.svc:9002. For anything else, such as an address or
// the name of a cluster configured by hand, ok is false.
func parseAuthority(authority string) (service, namespace string, port int, ok bool) {
	host := authority
	if parts := strings.Split(authority, "|"); len(parts) == 4 && parts[0] == "outbound" {
		host = parts[3]
		port, _ = strconv.Atoi(parts[1])
	} else if h, p, err := net.SplitHostPort(authority); err == nil {
		host = h
		if port, err = strconv.Atoi(p); err != nil {
			return "", "", 0, false
		}
	}
	labels := strings.Split(host, ".")
	if len(labels) < 2 || net.ParseIP(host) != nil || len(labels) > 2 && labels[2] != "svc" {
		return "", "", 0, false
	}
	return labels[0], labels[1], port, true
}

// restrict removes endpoints outside the pool from those that the data plane allows. An entry without a port allows
// each port of its host.
func restrict(r *extproc.Request, endpoints []string) {
	if !r.HasSubset {
		r.HasSubset, r.Subset = true, endpoints
		return
	}
	var both []string
	for _, e := range endpoints {
		host, _, _ := net.SplitHostPort(e)
		if slices.ContainsFunc(r.Subset, func(s string) bool { return s == e || s == host }) {
			both = append(both, e)
		}
	}
	r.Subset = both
}
