package chart

import (
	"maps"
	"slices"
	"testing"

	"github.com/goccy/go-yaml"
)

// What an EnvoyFilter inserts and merges is free text to Kubernetes and mostly so
// to istiod. Here the patches are put into a whole bootstrap, that of mode
// standalone, for Envoy to judge.
func TestEnvoyFilter(t *testing.T) {
	t.Parallel()
	// With a pool by name the filter has one field more.
	rendered, err := render("--values", chart+"/examples/istio-envoyfilter.yaml", "--set", "inferencePool.name=llm")
	if err != nil {
		t.Fatal(err)
	}
	base, err := render("--values", chart+"/examples/standalone.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var bootstrap map[string]any
	for _, o := range parse(t, base) {
		if file := text(o, "data", "envoy.yaml"); file != "" {
			if err := yaml.Unmarshal([]byte(file), &bootstrap); err != nil {
				t.Fatal(err)
			}
		}
	}
	manager := at(bootstrap, "static_resources", "listeners", 0, "filter_chains", 0, "filters", 0, "typed_config").(map[string]any)
	filters := list(manager, "http_filters")
	router := filters[len(filters)-1]
	route := at(manager, "route_config", "virtual_hosts", 0, "routes", 0).(map[string]any)
	var models, picker map[string]any
	for _, c := range list(bootstrap, "static_resources", "clusters") {
		switch text(c, "name") {
		case "kvlane": // as Istio calls the Service's cluster
			picker = c.(map[string]any)
			picker["name"] = "outbound|9002||kvlane.llm.svc.cluster.local"
		case "model_servers":
			models = c.(map[string]any)
		}
	}
	delete(bootstrap, "dynamic_resources") // and with it the endpoints over ADS
	models["type"] = "STATIC"
	delete(models, "eds_cluster_config")
	delete(models, "load_balancing_policy")
	delete(manager, "access_log")
	delete(route, "request_body_buffer_limit")

	patched := []any{}
	applied := map[string]int{}
	for _, o := range ofKind(parse(t, rendered), "EnvoyFilter") {
		for _, p := range list(o, "spec", "configPatches") {
			kind, value := text(p, "applyTo"), at(p, "patch", "value").(map[string]any)
			applied[kind]++
			switch kind {
			case "HTTP_FILTER":
				patched = append(patched, value)
			case "HTTP_ROUTE":
				maps.Copy(route, value)
			case "CLUSTER":
				cluster := map[string]map[string]any{"kvlane.llm.svc.cluster.local": picker, "kvlane-models.llm.svc.cluster.local": models}[text(p, "match", "cluster", "service")]
				maps.Copy(cluster, value)
			default:
				t.Errorf("%s is more than this test understands", kind)
			}
		}
	}
	if want := map[string]int{"HTTP_FILTER": 3, "HTTP_ROUTE": 1, "CLUSTER": 2}; !maps.Equal(applied, want) {
		t.Errorf("patches are %v, want %v", applied, want)
	}
	manager["http_filters"] = slices.Concat(patched, []any{router})
	whole, err := yaml.Marshal(bootstrap)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := run(nil, envoy, "--mode", "validate", "--log-level", "error", "--config-path", write(t, "envoy.yaml", string(whole))); err != nil {
		t.Error(err)
	}
}
