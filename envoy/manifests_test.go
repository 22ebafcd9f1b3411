package envoy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"github.com/goccy/go-yaml"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/steering"
)

// documents reads every object of a manifest as JSON.
func documents(t *testing.T, file string) []json.RawMessage {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var out []json.RawMessage
	for doc := range bytes.SplitSeq(text, []byte("\n---\n")) {
		js, err := yaml.YAMLToJSON(doc)
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		out = append(out, js)
	}
	return out
}

// A Kvlane that hangs is left by new requests before the pings end its connections: a request that its end fails would
// otherwise be repeated on a new connection to the same process. Both happen within the stall timeout. Kvlane decides requests
// that consist of trailers, too.
func TestWhatEveryEnvoyOfOursSets(t *testing.T) {
	checks := regexp.MustCompile(`health_checks: \[\{timeout: ([\d.]+)s, interval: ([\d.]+)s, no_traffic_interval: ([\d.]+)s, unhealthy_threshold: 2,`)
	pings := regexp.MustCompile(`connection_keepalive: \{interval: ([\d.]+)s, timeout: ([\d.]+)s\}`)
	number := func(text string) float64 {
		n, err := strconv.ParseFloat(text, 64)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	for _, file := range []string{"bootstrap.yaml.tmpl", "manifests/istio/envoyfilter.yaml", "manifests/istio-envoyfilter/envoyfilter.yaml", "manifests/sidecar/kvlane.yaml",
		"../charts/kvlane/templates/istio.yaml", "../charts/kvlane/templates/_bootstrap.tpl"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(text), "request_body_mode: BUFFERED, request_trailer_mode: SKIP") {
			t.Errorf("%s: got bodies without trailers, want both: a request of trailers alone would pass undecided", file)
		}
		check, ping := checks.FindStringSubmatch(string(text)), pings.FindStringSubmatch(string(text))
		if check == nil || ping == nil {
			t.Errorf("%s: got no health check or no pings", file)
			continue
		}
		failed := 2 * (number(check[1]) + max(number(check[2]), number(check[3])))
		first := number(ping[2])
		last := first + 1.15*number(ping[1]) // Envoy's jitter is 15 %
		if stall := defaults().Envoy.StallTimeout.Std().Seconds(); failed >= first || last > stall {
			t.Errorf("%s: got checks that have failed after %v s and pings that end a connection after %v to %v s, want the checks first, and all within %v s", file, failed, first, last, stall)
		}
	}
}

// TestManifestsAreObjects checks the form only; an API server checks the rest (make
// test-k8s, make test-eg).
func TestManifestsAreObjects(t *testing.T) {
	files, err := filepath.Glob("manifests/*/*.yaml")
	if err != nil || len(files) < 10 {
		t.Fatalf("%d manifests, %v", len(files), err)
	}
	for _, f := range files {
		for _, doc := range documents(t, f) {
			var o struct {
				APIVersion string                `json:"apiVersion"`
				Kind       string                `json:"kind"`
				Metadata   struct{ Name string } `json:"metadata"`
			}
			if err := json.Unmarshal(doc, &o); err != nil || o.APIVersion == "" || o.Kind == "" || o.Metadata.Name == "" {
				t.Errorf("%s: %+v %v", f, o, err)
			}
		}
	}
}

// removes collects the names that header mutations, and Envoy Gateway's early ones, take off requests. It
// reports whether one of them removes all that begin with x-envoy-.
func removes(v any, in bool) (names []string, envoys bool) {
	each := func(v any, in bool) {
		more, all := removes(v, in)
		names, envoys = append(names, more...), envoys || all
	}
	switch v := v.(type) {
	case []any:
		for _, e := range v {
			each(e, in)
		}
	case map[string]any:
		for key, e := range v {
			each(e, in && key != "remove_on_match" || key == "request_mutations" || key == "earlyRequestHeaders")
			envoys = envoys || in && key == "remove_on_match" && strings.Contains(fmt.Sprint(e), "map[prefix:x-envoy-]")
		}
	case string:
		if in {
			names = append(names, v)
		}
	}
	return names, envoys
}

// bootstrapJSON is the bootstrap of a configuration in JSON.
func bootstrapJSON(t *testing.T, o *config.Config) []byte {
	t.Helper()
	text, err := Bootstrap(o)
	if err != nil {
		t.Fatal(err)
	}
	js, err := yaml.YAMLToJSON(text)
	if err != nil {
		t.Fatal(err)
	}
	return js
}

// Headers that a client must not set are removed at every entrance, no more and no fewer: by the Envoys of this
// package, by gateways with the manifests or the chart, and by Kvlane itself, for gateways that cannot be
// configured to do so (InferencePool).
func TestEveryEntranceTakesTheSameHeadersOff(t *testing.T) {
	want := slices.Sorted(slices.Values(StripHeaders()))
	for _, h := range want {
		if !steering.Steers(h) && !strings.HasPrefix(h, "x-envoy-") { // ext_proc may not change these
			t.Errorf("Kvlane lets %s through", h)
		}
	}
	entrances := map[string][]json.RawMessage{}
	for name, o := range shapes() {
		js := bootstrapJSON(t, o)
		entrances["bootstrap of "+name] = []json.RawMessage{js}
	}
	for _, file := range []string{"manifests/istio-envoyfilter/envoyfilter.yaml", "manifests/envoy-gateway/policies.yaml", "../docs/examples/compose/envoy.yaml",
		"../e2e/chart/testdata/istio-envoyfilter.yaml", "../e2e/chart/testdata/istio-envoyfilter-pool.yaml", "../e2e/chart/testdata/envoy-gateway.yaml"} {
		entrances[file] = documents(t, file)
	}
	for name, docs := range entrances {
		var got []string
		all := false
		for _, js := range docs {
			var doc any
			if err := json.Unmarshal(js, &doc); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			names, envoys := removes(doc, false)
			got, all = append(got, names...), all || envoys
		}
		if slices.Sort(got); !slices.Equal(got, want) {
			t.Errorf("%s removes %q, want %q", name, got, want)
		}
		if gateway := strings.Contains(name, "istio") || strings.Contains(name, "envoy-gateway"); all == gateway {
			t.Errorf("%s: got all of x-envoy-* removed: %v, want %v", name, all, !gateway)
		}
	}
	// The bootstrap of the sidecar's manifest is text within a ConfigMap.
	text, err := os.ReadFile("manifests/sidecar/kvlane.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if list := "request_mutations: [{remove: " + strings.Join(StripHeaders(), "}, {remove: ") + "}, {remove_on_match: {key_matcher: {prefix: x-envoy-}}}]"; strings.Count(string(text), list) != 1 {
		t.Errorf("the sidecar's manifest has not once %s", list)
	}
}

// TestEnvoyFiltersPatchesAreWhatEnvoyTakes decodes each patch into Envoy's own types and
// validates it recursively.
func TestEnvoyFiltersPatchesAreWhatEnvoyTakes(t *testing.T) {
	var filter struct {
		Spec struct {
			ConfigPatches []struct {
				ApplyTo string `json:"applyTo"`
				Patch   struct {
					Operation string          `json:"operation"`
					Value     json.RawMessage `json:"value"`
				} `json:"patch"`
			} `json:"configPatches"`
		} `json:"spec"`
	}
	for _, doc := range documents(t, "manifests/istio-envoyfilter/envoyfilter.yaml") {
		if err := json.Unmarshal(doc, &filter); err != nil {
			t.Fatal(err)
		}
	}
	if len(filter.Spec.ConfigPatches) < 5 {
		t.Fatalf("%d patches", len(filter.Spec.ConfigPatches))
	}
	for i, p := range filter.Spec.ConfigPatches {
		kinds := map[string]func() validated{
			"HTTP_FILTER": func() validated { return &hcmv3.HttpFilter{} },
			"CLUSTER":     func() validated { return &clusterv3.Cluster{Name: "c"} },
			"HTTP_ROUTE":  func() validated { return &routev3.Route{} },
		}
		make, known := kinds[p.ApplyTo]
		if !known {
			t.Errorf("patch %d applies to %s", i, p.ApplyTo)
			continue
		}
		m := make()
		if err := protojson.Unmarshal(p.Patch.Value, m); err != nil {
			t.Errorf("patch %d: %v", i, err)
			continue
		}
		switch m := m.(type) {
		case *routev3.Route: // the rest of the route is Istio's
			m.Match = &routev3.RouteMatch{PathSpecifier: &routev3.RouteMatch_Prefix{Prefix: "/"}}
			m.Action = &routev3.Route_Route{Route: &routev3.RouteAction{ClusterSpecifier: &routev3.RouteAction_Cluster{Cluster: "c"}}}
		case *clusterv3.Cluster:
			m.Name = "c"
		}
		if err := m.ValidateAll(); err != nil {
			t.Errorf("patch %d: %v", i, err)
		}
		if f, ok := m.(*hcmv3.HttpFilter); ok {
			inner, err := f.GetTypedConfig().UnmarshalNew()
			if err != nil {
				t.Errorf("patch %d: %v", i, err)
			} else if v, ok := inner.(validated); !ok || v.ValidateAll() != nil {
				t.Errorf("patch %d: %T is not valid: %v", i, inner, v.ValidateAll())
			}
		}
	}
}

type validated interface {
	proto.Message
	ValidateAll() error
}
