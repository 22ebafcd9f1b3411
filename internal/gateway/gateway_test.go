package gateway

import (
	"context"
	"reflect"
	"testing"
	"time"

	"google.golang.org/grpc/metadata"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/workers"
)

// recorder records the requests that it gets.
type recorder struct {
	asked *extproc.Request
	extproc.Decision
}

func (r *recorder) Decide(_ context.Context, q *extproc.Request) extproc.Decision {
	r.asked = q
	return r.Decision
}

var (
	one = workers.Pool{Namespace: "ns", Name: "one", Service: "epp-one", Port: 9002, Endpoints: []string{"10.0.0.1:8000", "10.0.0.1:8001"}}
	two = workers.Pool{Namespace: "ns", Name: "two", Service: "epp-two", Port: 9002, Endpoints: []string{"10.0.0.2:8000"}}
)

// silent is a ticket that adds nothing.
type silent struct{}

func (silent) ResponseHeaders(int, string) []extproc.Header { return nil }
func (silent) ResponseBody([]byte, bool)                    {}
func (silent) FirstToken(time.Time)                         {}
func (silent) End(time.Time)                                {}

func TestARequestReachesItsOwnPoolOnly(t *testing.T) {
	shared := two
	shared.Service = one.Service
	otherPort := shared
	otherPort.Port = 9003
	selector := workers.Pool{Namespace: "ns", Endpoints: one.Endpoints}
	for _, c := range []struct {
		name             string
		pools            []workers.Pool
		authority, named string
		subset           []string
		want             []string // nil: refused
	}{
		{name: "istio, the one pool", pools: []workers.Pool{one}, authority: "outbound|9002||epp-one.ns.svc.cluster.local", want: []string{"any"}},
		{name: "istio, another pool's picker", pools: []workers.Pool{one}, authority: "outbound|9002||epp-three.ns.svc.cluster.local"},
		{name: "istio, another namespace", pools: []workers.Pool{one}, authority: "outbound|9002||epp-one.other.svc.cluster.local"},
		{name: "istio, another port", pools: []workers.Pool{one}, authority: "outbound|9009||epp-one.ns.svc.cluster.local"},
		{name: "istio, second of two", pools: []workers.Pool{one, two}, authority: "outbound|9002||epp-two.ns.svc.cluster.local", want: two.Endpoints},
		{name: "gateway, first of two", pools: []workers.Pool{one, two}, authority: "epp-one.ns:9002", want: one.Endpoints},
		{name: "a service address", pools: []workers.Pool{one, two}, authority: "epp-one.ns.svc:9002", want: one.Endpoints},
		{name: "nothing tells, one pool", pools: []workers.Pool{one}, authority: "10.0.0.20:9002", want: []string{"any"}},
		{name: "nothing tells, two pools", pools: []workers.Pool{one, two}, authority: "10.0.0.20:9002"},
		{name: "a public host tells nothing", pools: []workers.Pool{one}, authority: "kvlane.example.com:443", want: []string{"any"}},
		{name: "no authority", pools: []workers.Pool{one}, want: []string{"any"}},
		{name: "one picker for two pools", pools: []workers.Pool{one, shared}, authority: "outbound|9002||epp-one.ns.svc.cluster.local"},
		{name: "two ports for two pools", pools: []workers.Pool{one, otherPort}, authority: "outbound|9003||epp-one.ns.svc.cluster.local", want: two.Endpoints},
		{name: "the picker of a pool that does not exist", pools: []workers.Pool{one, {Namespace: "ns", Name: "ghost"}}, authority: "outbound|9002||epp-ghost.ns.svc.cluster.local"},
		{name: "beside a pool that does not exist", pools: []workers.Pool{{Namespace: "ns", Name: "ghost"}, one}, authority: "outbound|9002||epp-one.ns.svc.cluster.local", want: one.Endpoints},
		{name: "named", pools: []workers.Pool{one, two}, named: "ns/two", authority: "outbound|9002||epp-one.ns.svc.cluster.local", want: two.Endpoints},
		{name: "named wrongly", pools: []workers.Pool{one, two}, named: "three"},
		{name: "a selector has no picker", pools: []workers.Pool{selector}, authority: "outbound|9002||x.ns.svc.cluster.local", want: []string{"any"}},
		{name: "the data plane's subset is kept", pools: []workers.Pool{one, two}, named: "one", subset: []string{"10.0.0.1", "10.0.0.2:8000"}, want: one.Endpoints},
		{name: "and bounded", pools: []workers.Pool{one, two}, named: "one", subset: []string{"10.0.0.1:8001", "10.0.0.2:8000"}, want: one.Endpoints[1:]},
	} {
		t.Run(c.name, func(t *testing.T) {
			next, refused := &recorder{}, 0
			g := &Gate{Next: next, Pools: func() []workers.Pool { return c.pools }, Refused: func(*extproc.Request) { refused++ }}
			md := metadata.MD{}
			if c.authority != "" {
				md.Set(":authority", c.authority)
			}
			if c.named != "" {
				md.Set(PoolHeader, c.named)
			}
			r := &extproc.Request{Subset: c.subset, HasSubset: c.subset != nil}
			d := g.Decide(metadata.NewIncomingContext(t.Context(), md), r)
			if c.want == nil {
				if d.Reject == nil || d.Reject.Status != 503 || next.asked != nil || refused != 1 {
					t.Errorf("not refused: %+v", d)
				}
				return
			}
			if d.Reject != nil || next.asked == nil || refused != 0 {
				t.Fatalf("refused: %+v", d.Reject)
			}
			if c.want[0] == "any" {
				c.want = nil
			}
			if !reflect.DeepEqual(r.Subset, c.want) || r.HasSubset != (c.want != nil) {
				t.Errorf("subset %v %v, want %v", r.HasSubset, r.Subset, c.want)
			}
		})
	}
}

func TestConformanceTestsChooseAmongOurPods(t *testing.T) {
	for _, c := range []struct {
		header string
		want   []string
	}{
		{"10.0.0.1", one.Endpoints},
		{"10.0.0.9:8000, 10.0.0.1:8001", one.Endpoints[1:]},
		{"10.0.0.9", nil},
		{"", nil},
	} {
		next := &recorder{}
		r := &extproc.Request{Headers: []extproc.Header{{Name: selectHeader, Value: c.header}}}
		(&Conformance{Next: next, Endpoints: func() []string { return one.Endpoints }}).Decide(t.Context(), r)
		if !r.HasSubset || !reflect.DeepEqual(r.Subset, c.want) {
			t.Errorf("%q: %v %v, want %v", c.header, r.HasSubset, r.Subset, c.want)
		}
	}
	r := &extproc.Request{}
	d := (&Conformance{Next: &recorder{Decision: extproc.Decision{Ticket: silent{}}}, Endpoints: func() []string { return nil }}).Decide(t.Context(), r)
	if r.HasSubset {
		t.Error("a request without the header is restricted")
	}
	if got := d.Ticket.ResponseHeaders(200, "10.0.0.1:8000"); len(got) != 1 || got[0] != (extproc.Header{Name: servedHeader, Value: "10.0.0.1:8000"}) {
		t.Errorf("response headers %v", got)
	}
	if got := d.Ticket.ResponseHeaders(503, ""); got != nil {
		t.Errorf("response headers %v", got)
	}
}

func FuzzParseAuthority(f *testing.F) {
	for _, s := range []string{"outbound|9002||epp.ns.svc.cluster.local", "epp.ns:9002", "10.0.0.1:9002", "a|b|c|d", "[::1]:1", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		service, namespace, _, ok := parseAuthority(s)
		if ok && (len(service)+len(namespace) > len(s)) {
			t.Errorf("%q: %q %q", s, service, namespace)
		}
	})
}
