package chart

import (
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
)

// pairs are what the manifests and the chart both say, where they have to say the
// same: the manifest, the values with which the chart says it, and of which object
// what is compared.
var pairs = []struct {
	file, values, object string
	path                 []any
}{
	{"istio-envoyfilter/envoyfilter.yaml", inFilter, "EnvoyFilter", []any{"spec", "configPatches"}},
	{"envoy-gateway/policies.yaml", inEnvoyGateway, "EnvoyExtensionPolicy", []any{"spec", "extProc"}},
	{"envoy-gateway/full-duplex.yaml", inEnvoyGateway + ",provider.envoyGateway.requestBody=FullDuplexStreamed,provider.envoyGateway.failOpen=false,provider.envoyGateway.firstToken=false", "EnvoyExtensionPolicy", []any{"spec", "extProc"}},
	{"envoy-gateway/policies.yaml", inEnvoyGateway, "BackendTrafficPolicy", []any{"spec"}},
	{"envoy-gateway/policies.yaml", inEnvoyGateway, "ClientTrafficPolicy", []any{"spec"}},
	{"istio/destinationrule.yaml", "provider.name=istio,provider.istio.destinationRule.tls=true", "DestinationRule", []any{"spec", "trafficPolicy"}},
	{"istio/envoyfilter.yaml", "provider.name=istio,httpRoute.inferenceGatewayName=llm", "EnvoyFilter", []any{"spec"}},
	{"istio/pool.yaml", "inferencePool.create=true", "InferencePool", []any{"spec"}},
	{"envoy-gateway/kvlane.yaml", inEnvoyGateway, "Deployment", []any{"probes"}},
	{"istio/kvlane.yaml", "provider.name=istio", "Deployment", []any{"probes"}},
	{"istio-envoyfilter/kvlane.yaml", inFilter, "Deployment", []any{"probes"}},
	{"sidecar/kvlane.yaml", "mode=sidecar,probes.type=http", "Deployment", []any{"probes"}},
	{"sidecar/kvlane.yaml", "mode=sidecar", "Service", []any{"spec", "ports", 0, "port"}},
}

const (
	inFilter       = "fleet.mode=off,provider.name=istio,provider.istio.envoyFilter.enabled=true,modelServers.service.name=llm,httpRoute.inferenceGatewayName=llm"
	inEnvoyGateway = "provider.name=envoy-gateway,modelServers.service.name=llm,httpRoute.create=true,httpRoute.inferenceGatewayName=llm"
)

func TestManifestsAgree(t *testing.T) {
	t.Parallel()
	for _, p := range pairs {
		t.Run(p.file+"/"+p.object, func(t *testing.T) {
			file, err := os.ReadFile(root + "/envoy/manifests/" + p.file)
			if err != nil {
				t.Fatal(err)
			}
			rendered, err := run(nil, tool("helm"), "template", "kvlane", chart, "--namespace", "default", "--kube-version", kubeVersion,
				"--set", "modelServers.matchLabels.app=llm,"+p.values)
			if err != nil {
				t.Fatal(err)
			}
			want, got := compared(t, string(file), p.object, p.path), compared(t, rendered, p.object, p.path)
			if !reflect.DeepEqual(got, want) {
				t.Errorf("the chart says\n%s\nthe manifest\n%s", shown(t, got), shown(t, want))
			}
		})
	}
}

// compared is a part of the one object of a kind, in one form: JSON's types, defaults
// written out, references to objects left out, and what has no order sorted.
func compared(t *testing.T, stream, kind string, path []any) any {
	t.Helper()
	objects := ofKind(parse(t, stream), kind)
	if kind == "Service" && len(objects) > 1 { // the one for clients
		objects = slices.DeleteFunc(objects, func(o object) bool { return text(o, "metadata", "name") != "kvlane" })
	}
	if len(objects) != 1 {
		t.Fatalf("%d of %s", len(objects), kind)
	}
	var part any
	if path[0] == "probes" {
		probes := map[string]any{}
		for _, c := range list(objects[0], "spec", "template", "spec", "containers") {
			for _, probe := range []string{"startupProbe", "readinessProbe", "livenessProbe"} {
				probes[text(c, "name")+" "+probe] = at(c, probe)
			}
		}
		part = probes
	} else {
		part = at(objects[0], path...)
	}
	js, err := json.Marshal(part)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(js, &part); err != nil || part == nil {
		t.Fatalf("%s has nothing at %v (%v)", kind, path, err)
	}
	if spec, ok := part.(map[string]any); ok {
		delete(spec, "targetRefs")
		if ref, ok := spec["endpointPickerRef"].(map[string]any); ok { // core's Service is the default
			delete(ref, "group")
			delete(ref, "kind")
		}
		if at(spec, "connection", "bufferLimit") == "32Mi" {
			spec["connection"] = map[string]any{"bufferLimit": "33554432"}
		}
	}
	all, ok := part.([]any)
	if !ok {
		return part
	}
	for _, e := range all {
		if entry := e.(map[string]any); entry["backendRefs"] != nil && entry["failOpen"] == nil {
			entry["failOpen"] = false
		}
	}
	if kind == "EnvoyFilter" { // only patches of the same kind have an order
		slices.SortStableFunc(all, func(a, b any) int {
			key := func(v any) string { return text(v, "applyTo") + fmt.Sprint(at(v, "match", "cluster", "service")) }
			return strings.Compare(key(a), key(b))
		})
	}
	return all
}

func shown(t *testing.T, v any) string {
	t.Helper()
	out, err := yaml.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}
