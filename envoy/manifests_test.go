package envoy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"github.com/goccy/go-yaml"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

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

// Headers that a client must not set are removed at every entrance: by the Envoys of this
// package, by gateways with the manifests, and by Kvlane itself, for gateways that cannot
// be configured to do so (InferencePool).
func TestEveryEntranceTakesTheSameHeadersOff(t *testing.T) {
	for _, h := range StripHeaders() {
		if !steering.Steers(h) && !strings.HasPrefix(h, "x-envoy-") { // ext_proc may not change these
			t.Errorf("Kvlane lets %s through", h)
		}
	}
	for file, form := range map[string]string{"istio-envoyfilter/envoyfilter.yaml": "{remove: %s}", "envoy-gateway/policies.yaml": "%s", "sidecar/kvlane.yaml": "{remove: %s}"} {
		text, err := os.ReadFile(filepath.Join("manifests", file))
		if err != nil {
			t.Fatal(err)
		}
		for _, h := range StripHeaders() {
			if !regexp.MustCompile(`[\[ ]` + regexp.QuoteMeta(fmt.Sprintf(form, h)) + `[],]`).Match(text) {
				t.Errorf("%s lets %s through", file, h)
			}
		}
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
