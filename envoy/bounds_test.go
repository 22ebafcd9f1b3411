package envoy

import (
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	overloadv3 "github.com/envoyproxy/go-control-plane/envoy/config/overload/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	connectionsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/resource_monitors/downstream_connections/v3"
	heapv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/resource_monitors/fixed_heap/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/anypb"
)

// What a client can hold open is bounded in every bootstrap: connections, streams, headers, bodies, answers that are not read;
// so is the wait for a Kvlane that hangs. docs/envoy-hardening.md has the reasons.
func TestBootstrapBoundsWhatIsHeldOpen(t *testing.T) {
	for name, o := range shapes() {
		js := bootstrapJSON(t, o)
		var b bootstrapv3.Bootstrap
		if err := protojson.Unmarshal(js, &b); err != nil {
			t.Fatal(err)
		}
		bounds := map[string]bool{}
		for _, m := range b.GetOverloadManager().GetResourceMonitors() {
			switch m := decoded(t, m.GetTypedConfig()).(type) {
			case *heapv3.FixedHeapConfig:
				bounds["heap"] = m.GetMaxHeapSizeBytes() == uint64(o.Envoy.MaxHeap)
			case *connectionsv3.DownstreamConnectionsConfig:
				n := m.GetMaxActiveDownstreamConnections()
				bounds["connections"] = n > 0 && n <= 65535
			}
		}
		// What holds memory must end before other clients are disturbed, or one client can keep the heap at that point.
		from, to := map[string]float64{}, map[string]float64{}
		at := func(name string, triggers []*overloadv3.Trigger) {
			for _, trigger := range triggers {
				name = strings.TrimPrefix(strings.TrimPrefix(name, "envoy.overload_actions."), "envoy.load_shed_points.")
				if from[name], to[name] = trigger.GetThreshold().GetValue(), trigger.GetThreshold().GetValue(); trigger.GetScaled() != nil {
					from[name], to[name] = trigger.GetScaled().GetScalingThreshold(), trigger.GetScaled().GetSaturationThreshold()
				}
			}
		}
		for _, a := range b.GetOverloadManager().GetActions() {
			at(a.GetName(), a.GetTriggers())
		}
		for _, p := range b.GetOverloadManager().GetLoadshedPoints() {
			at(p.GetName(), p.GetTriggers())
		}
		bounds["streams that stand still and large ones end first"] = true
		for _, first := range []string{"reduce_timeouts", "reset_high_memory_stream"} {
			for _, then := range []string{"http2_server_go_away_and_close_on_dispatch", "http1_server_abort_dispatch", "stop_accepting_requests", "stop_accepting_connections"} {
				if from[then] == 0 || to[first] >= from[then] {
					bounds["streams that stand still and large ones end first"] = false
				}
			}
		}
		actions := map[string]bool{}
		for _, a := range b.GetOverloadManager().GetActions() {
			actions[a.GetName()] = len(a.GetTriggers()) > 0
		}
		for _, p := range b.GetOverloadManager().GetLoadshedPoints() {
			actions[p.GetName()] = len(p.GetTriggers()) > 0
		}
		for _, a := range []string{"overload_actions.reset_high_memory_stream", "overload_actions.stop_accepting_requests",
			"overload_actions.stop_accepting_connections", "load_shed_points.http1_server_abort_dispatch", "load_shed_points.http2_server_go_away_and_close_on_dispatch", "overload_actions.reduce_timeouts"} {
			bounds[a] = actions["envoy."+a]
		}
		l := b.GetStaticResources().GetListeners()[0]
		n := l.GetPerConnectionBufferLimitBytes().GetValue()
		bounds["buffers of a connection"] = n > 0 && n <= 1<<20
		h, _ := decoded(t, l.GetFilterChains()[0].GetFilters()[0].GetTypedConfig()).(*hcmv3.HttpConnectionManager)
		streams := h.GetHttp2ProtocolOptions().GetMaxConcurrentStreams().GetValue()
		bounds["streams of a connection"] = streams > 0 && streams <= 1024
		runtime := b.GetLayeredRuntime().GetLayers()
		bounds["requests of a burst"] = len(runtime) > 0 && runtime[0].GetStaticLayer().GetFields()["http.max_requests_per_io_cycle"].GetNumberValue() == 1
		idle := h.GetStreamIdleTimeout().AsDuration() // 0 would not be scaled
		bounds["time of a stream that stands still"] = idle >= time.Hour
		headers := h.GetRequestHeadersTimeout().AsDuration()
		bounds["time of headers"] = headers > 0 && headers <= 30*time.Second
		bounds["time of a body"] = h.GetRequestTimeout().AsDuration() == o.Envoy.UploadTimeout.Std() && o.Envoy.UploadTimeout > 0
		bounds["time of an answer's end"] = h.GetStreamFlushTimeout().AsDuration() > 0
		bounds["paths as the engine reads them"] = h.GetNormalizePath().GetValue() && h.GetMergeSlashes() &&
			h.GetPathWithEscapedSlashesAction() == hcmv3.HttpConnectionManager_UNESCAPE_AND_FORWARD
		for _, f := range h.GetHttpFilters() {
			if p, ok := decoded(t, f.GetTypedConfig()).(*extprocv3.ExternalProcessor); ok && f.GetName() == "kvlane" {
				bounds["wait for a decision"] = p.GetMessageTimeout().AsDuration() == o.Envoy.StallTimeout.Std() && p.GetMaxMessageTimeout().AsDuration() == o.Envoy.MessageTimeout.Std()
			}
		}
		bounds["size of a body"] = true
		for _, r := range h.GetRouteConfig().GetVirtualHosts()[0].GetRoutes() {
			if r.GetRoute() != nil && len(r.GetRoute().GetUpgradeConfigs()) == 0 {
				bounds["size of a body"] = bounds["size of a body"] && int64(r.GetRequestBodyBufferLimit().GetValue()) == int64(o.Limits.MaxBody)
			}
		}
		for what, is := range bounds {
			if !is {
				t.Errorf("%s: got no bound, or another: %s", name, what)
			}
		}
		if len(bounds) != 19 {
			t.Errorf("%s: got %d bounds, want 18: %v", name, len(bounds), bounds)
		}
	}
	e := defaults().Envoy
	if stall, upload := e.StallTimeout.Std(), e.UploadTimeout.Std(); stall < time.Second || stall > 5*time.Second || upload > 5*time.Minute {
		t.Errorf("got %v for a Kvlane that hangs and %v for an upload by default, want 1 to 5 s, and 5 minutes at most", stall, upload)
	}
}

// decoded is the message in an Any.
func decoded(t *testing.T, a *anypb.Any) any {
	t.Helper()
	m, err := a.UnmarshalNew()
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// Every shape leaves a Kvlane that hangs: its message timeout is short, and a host that is not healthy is not asked. Envoy Gateway
// knows no longer timeout on request, so its full duplex, which has no timer, keeps the long one.
func TestEveryShapeLeavesAKvlaneThatHangs(t *testing.T) {
	short := regexp.MustCompile(`(?m)^\s+(?:message_timeout|messageTimeout): (?:2s|\{\{\.StallTimeout\}\}|\{\{ \.Values\.stallTimeout \}\}|\{\{ ternary \.Values\.messageTimeout \.Values\.stallTimeout )`)
	calm := regexp.MustCompile(`healthy_panic_threshold: \{value: 0\}|panicThreshold: 0,?\s`)
	for file, timed := range map[string]bool{
		"bootstrap.yaml.tmpl": true, "manifests/sidecar/kvlane.yaml": true, "manifests/istio-envoyfilter/envoyfilter.yaml": true, "manifests/istio/envoyfilter.yaml": false,
		"manifests/envoy-gateway/policies.yaml": true, "manifests/envoy-gateway/full-duplex.yaml": false,
		"../charts/kvlane/templates/istio.yaml": true, "../charts/kvlane/templates/_bootstrap.tpl": true, "../charts/kvlane/templates/envoy-gateway.yaml": true,
	} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if got := short.Match(text); got != timed {
			t.Errorf("%s: got a short message timeout: %v, want %v", file, got, timed)
		}
		if !calm.Match(text) || !strings.Contains(string(text), "grpc") && !strings.Contains(string(text), "GRPC") {
			t.Errorf("%s: got no health check by gRPC, or one without effect when there is one Kvlane", file)
		}
	}
}
