package envoy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/goccy/go-yaml"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/kvlane/kvlane/internal/config"

	// Extensions that the bootstrap names.
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/access_loggers/grpc/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/header_mutation/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/header_to_metadata/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/load_balancing_policies/least_request/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/load_balancing_policies/override_host/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/load_balancing_policies/ring_hash/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/load_balancing_policies/round_robin/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/load_balancing_policies/subset/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/resource_monitors/downstream_connections/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/resource_monitors/fixed_heap/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/retry/host/previous_hosts/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
)

func defaults() *config.Config {
	c := config.Default()
	return &c
}

func shapes() map[string]*config.Config {
	plain := config.Default()
	all := plain
	all.Envoy.FailClosed, all.Envoy.FirstToken, all.Envoy.AccessLog = new(true), true, true
	all.Envoy.Prefill = "unix:@kvlane-prefill"
	duplex := plain
	duplex.Envoy.RequestBody, duplex.Envoy.ResponseBody = BodyFullDuplex, BodyFullDuplex
	duplex.Listen.Address = "127.0.0.1:9002"
	replicas, named := all, plain
	replicas.Envoy.Replicas, replicas.Routing.Headers = []string{"127.0.0.1:9002", "[::1]:9003"}, []string{"x-session-id", "x-correlation-id"}
	named.Envoy.Replicas = []string{"kvlane.test:9002"}
	open := all
	open.Envoy.Paths = []string{DefaultPaths, "/*"}
	return map[string]*config.Config{"every path": &open, "standalone": &plain, "everything": &all, "full duplex": &duplex, "replicas": &replicas, "replicas by name": &named}
}

func TestPathPattern(t *testing.T) {
	for want, paths := range map[string][]string{
		"":               {DefaultPaths, "/*"},
		`/a\.b|/v1/x/.*`: {"/a.b", "/v1/x/*"},
		pathPattern(defaults().Envoy.Paths) + "|/health": {DefaultPaths, "/health"},
	} {
		if got := pathPattern(paths); got != want {
			t.Errorf("%q: got %q, want %q", paths, got, want)
		}
	}
	served := regexp.MustCompile("^(?:" + pathPattern(defaults().Envoy.Paths) + ")$")
	for path, want := range map[string]bool{
		"/v1/chat/completions": true, "/v1/models": true, "/v1/responses/resp_1/cancel": true, "/v2/rerank": true, "/generate": true,
		"/metrics": false, "/health": false, "/reset_prefix_cache": false, "/v1/load_lora_adapter": false, "/generate/": false, "/": false,
		"/flush_cache": false, "/get_server_info": false, "/server_info": false, "/start_profile": false, "/v1x/models": false,
	} {
		if got := served.MatchString(path); got != want {
			t.Errorf("%s: got served %v, want %v", path, got, want)
		}
	}
}

func TestBootstrapDecodesAndValidates(t *testing.T) {
	for name, o := range shapes() {
		text, err := Bootstrap(o)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		js, err := yaml.YAMLToJSON(text)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		var b bootstrapv3.Bootstrap
		if err := protojson.Unmarshal(js, &b); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := b.ValidateAll(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if route := "timeout: 0s, idle_timeout: 300s, upgrade_configs: [{upgrade_type: websocket}]"; strings.Count(string(text), route) != 1 || strings.Count(string(text), "idle_timeout: 300s") != 1 {
			t.Errorf("%s: got no idle timeout of WebSockets, or others, want one route with %s", name, route)
		}
		for _, h := range StripHeaders() {
			if !strings.Contains(string(text), "{remove: "+h+"}") {
				t.Errorf("%s: header %s of a client is not removed", name, h)
			}
		}
	}
}

func TestBootstrapIsAcceptedByEnvoy(t *testing.T) {
	bin := os.Getenv("ENVOY")
	if bin == "" {
		t.Skip("ENVOY is not set: `make test` sets it")
	}
	valid := func(name, file string) {
		t.Helper()
		if out, err := exec.Command(bin, "--mode", "validate", "-c", file).CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", name, err, out)
		}
	}
	for name, o := range shapes() {
		text, err := Bootstrap(o)
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(t.TempDir(), "envoy.yaml")
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
		valid(name, file)
	}
	valid("compose", "../docs/examples/compose/envoy.yaml")
}

func TestEndpointsReachEveryEnvoy(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	x := NewXDS()
	g := grpc.NewServer()
	x.Register(ctx, g)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- g.Serve(l) }()
	defer func() {
		cancel()
		g.Stop()
		if err := <-done; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			t.Error(err)
		}
	}()
	if err := x.Set(Endpoints{Serve: []string{"10.0.0.2:8000", "10.0.0.1:8000", "10.0.0.1:8000"}, Spare: []string{"10.0.0.9:8000", "10.0.0.1:8000"}}); err != nil {
		t.Fatal(err)
	}
	conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	var streams []discoveryv3.AggregatedDiscoveryService_StreamAggregatedResourcesClient
	for _, node := range []string{"one", "two"} {
		s, err := discoveryv3.NewAggregatedDiscoveryServiceClient(conn).StreamAggregatedResources(ctx)
		if err != nil {
			t.Fatal(err)
		}
		ask(t, s, node, "", "")
		streams = append(streams, s)
	}
	for _, s := range streams {
		expect(t, s, "10.0.0.1:8000 10.0.0.2:8000 | 10.0.0.9:8000")
	}
	if err := x.Set(Endpoints{Spare: []string{"10.0.0.3:8000"}}); err != nil {
		t.Fatal(err)
	}
	for _, s := range streams {
		expect(t, s, "10.0.0.3:8000")
	}
	// An invalid address is named in the error and does not affect the others.
	for i, bad := range []string{"host:8000", "10.0.0.1", "10.0.0.1:x", "10.0.0.1:65536"} {
		good := fmt.Sprintf("10.0.1.%d:8000", i)
		if err := x.Set(Endpoints{Serve: []string{bad, good}, Spare: []string{bad}}); err == nil || !strings.Contains(err.Error(), strconv.Quote(bad)+" left out") {
			t.Errorf("endpoint %q: %v", bad, err)
		}
		for _, s := range streams {
			expect(t, s, good)
		}
	}
	if err := x.Set(Endpoints{Serve: []string{"host:8000"}, Spare: []string{"10.0.0.3:8000"}}); err == nil {
		t.Error("accepted")
	}
	for _, s := range streams {
		expect(t, s, "10.0.0.3:8000")
	}
}

// Set waits for the Envoys that subscribed until they acknowledge, but not forever, nor for the streams of other types.
func TestAnEnvoyThatAcknowledgesIsNotBehind(t *testing.T) {
	x := NewXDS()
	set := func(address string) {
		t.Helper()
		if err := x.Set(Endpoints{Serve: []string{address}}); err != nil {
			t.Fatal(err)
		}
	}
	start := func(r *discoveryv3.DiscoveryRequest) *listed {
		s := &listed{ctx: t.Context(), requests: make(chan *discoveryv3.DiscoveryRequest), answers: make(chan *discoveryv3.DiscoveryResponse, 4)}
		ended := make(chan error, 1)
		go func() { ended <- x.StreamAggregatedResources(s) }()
		t.Cleanup(func() {
			close(s.requests)
			if err := <-ended; err != nil || x.behind() {
				t.Errorf("got error %v, behind %v after the end of the streams", err, x.behind())
			}
		})
		s.requests <- r
		s.requests <- &discoveryv3.DiscoveryRequest{TypeUrl: "other"} // r has been read
		return s
	}
	set("10.0.0.1:80")
	start(&discoveryv3.DiscoveryRequest{TypeUrl: "type.googleapis.com/envoy.config.cluster.v3.Cluster"})
	if set("10.0.0.2:80"); x.behind() {
		t.Error("got a stream that did not ask for endpoints behind")
	}
	s := start(&discoveryv3.DiscoveryRequest{TypeUrl: endpointType, VersionInfo: "1000"}) // of an earlier server
	r := <-s.answers
	if !x.behind() {
		t.Error("got an Envoy that has acknowledged nothing not behind")
	}
	s.requests <- &discoveryv3.DiscoveryRequest{TypeUrl: endpointType, VersionInfo: r.GetVersionInfo(), ResponseNonce: r.GetNonce()}
	s.requests <- &discoveryv3.DiscoveryRequest{TypeUrl: "other"}
	if x.behind() {
		t.Error("got an Envoy that has acknowledged behind")
	}
	if set("10.0.0.3:80"); !x.behind() { // it returns without an acknowledgement
		t.Error("got an Envoy that has not acknowledged the last endpoints not behind")
	}
}

func ask(t *testing.T, s discoveryv3.AggregatedDiscoveryService_StreamAggregatedResourcesClient, node, version, nonce string) {
	t.Helper()
	if err := s.Send(&discoveryv3.DiscoveryRequest{
		Node: &corev3.Node{Id: node}, TypeUrl: endpointType, ResourceNames: []string{Cluster},
		VersionInfo: version, ResponseNonce: nonce,
	}); err != nil {
		t.Fatal(err)
	}
}

func expect(t *testing.T, s discoveryv3.AggregatedDiscoveryService_StreamAggregatedResourcesClient, want string) {
	t.Helper()
	timer := time.AfterFunc(10*time.Second, func() { panic("no answer from the xDS server") })
	defer timer.Stop()
	r, err := s.Recv()
	if err != nil {
		t.Fatal(err)
	}
	var cla endpointv3.ClusterLoadAssignment
	if err := r.GetResources()[0].UnmarshalTo(&cla); err != nil {
		t.Fatal(err)
	}
	var got []string
	for i, group := range cla.GetEndpoints() {
		if group.GetPriority() != uint32(i) {
			t.Errorf("group %d has priority %d", i, group.GetPriority())
		}
		if i > 0 {
			got = append(got, "|")
		}
		for _, e := range group.GetLbEndpoints() {
			a := e.GetEndpoint().GetAddress().GetSocketAddress()
			got = append(got, net.JoinHostPort(a.GetAddress(), "8000"))
		}
	}
	if g := strings.Join(got, " "); g != want {
		t.Errorf("endpoints %q, want %q", g, want)
	}
	ask(t, s, "", r.GetVersionInfo(), r.GetNonce())
}
