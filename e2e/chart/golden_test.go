package chart

import (
	"flag"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the golden files anew")

// goldens are templates whose every field matters to others: what a gateway is told,
// and how Prometheus finds the series that the alerts ask for.
var goldens = []struct{ name, template, values string }{
	{"envoy-gateway", "envoy-gateway", "provider.name=envoy-gateway,httpRoute.create=true,httpRoute.inferenceGatewayName=g"},
	{"envoy-gateway-closed", "envoy-gateway", "provider.name=envoy-gateway,httpRoute.create=true,httpRoute.inferenceGatewayName=g,provider.envoyGateway.failOpen=false"},
	{"envoy-gateway-duplex", "envoy-gateway", "provider.name=envoy-gateway,httpRoute.create=true,httpRoute.inferenceGatewayName=g,httpRoute.requestTimeout=1h,messageTimeout=45s,provider.envoyGateway.failOpen=false,provider.envoyGateway.requestBody=FullDuplexStreamed,provider.envoyGateway.firstToken=false"},
	{"istio-envoyfilter", "istio", "provider.name=istio,provider.istio.envoyFilter.enabled=true,httpRoute.inferenceGatewayName=g"},
	{"istio-envoyfilter-pool", "istio", "provider.name=istio,provider.istio.envoyFilter.enabled=true,provider.istio.envoyFilter.firstToken=false,httpRoute.inferenceGatewayName=g,inferencePool.name=llm,messageTimeout=45s"},
	{"istio", "istio", "provider.name=istio,provider.istio.destinationRule.tls=true,inferencePool.extraPools[0]=b"},
	{"gateway", "gateway", "httpRoute.create=true,httpRoute.inferenceGatewayName=g"},
	{"podmonitor", "monitoring", "monitoring.prometheus.enabled=true"},
	{"podmonitor-envoy", "monitoring", "mode=standalone,monitoring.envoy.enabled=true,monitoring.prometheus.extraLabels.release=p"},
	{"test", "test", "mode=standalone,global.imageRegistry=r.test,metricsPort=9091,service.port=8000"},
	{"servicemonitor", "monitoring", "monitoring.prometheus.enabled=true,monitoring.prometheus.kind=ServiceMonitor"},
}

func TestGolden(t *testing.T) {
	t.Parallel()
	for _, g := range goldens {
		t.Run(g.name, func(t *testing.T) {
			got, err := render("--set", "modelServers.matchLabels.app=models", "--set", g.values, "--show-only", "templates/"+g.template+".yaml")
			if err != nil {
				t.Fatal(err)
			}
			file := "testdata/" + g.name + ".yaml"
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("is not what %s says (if it shall be: go test ./e2e/chart -run Golden -update)\n%s", file, got)
			}
		})
	}
}

// A pod reads its files when it starts, so each change of them has to replace the pods
// that have them, and nothing else has to.
func TestChangedFilesReplacePods(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ mode, values, replaced string }{
		{"gateway", "config.log.level=debug", "kvlane"},
		{"gateway", "service.annotations.a=b", ""},
		{"standalone", "config.log.level=debug", "kvlane"},
		{"standalone", "proxy.failOpen=false", "kvlane kvlane-proxy"}, // Kvlane's own file says it too
		{"sidecar", "proxy.failOpen=false", "kvlane"},
	} {
		templates := func(values string) map[string]string {
			rendered, err := render("--set", "modelServers.matchLabels.app=models,mode="+c.mode, "--set", values)
			if err != nil {
				t.Fatal(err)
			}
			pods := map[string]string{}
			for _, d := range ofKind(parse(t, rendered), "Deployment") {
				pods[text(d, "metadata", "name")] = shown(t, at(d, "spec", "template"))
			}
			return pods
		}
		before, after := templates(""), templates(c.values)
		var replaced []string
		for _, name := range []string{"kvlane", "kvlane-proxy"} {
			if before[name] != after[name] {
				replaced = append(replaced, name)
			}
		}
		if got := strings.Join(replaced, " "); got != c.replaced {
			t.Errorf("%s: %s replaces pods of %q, want %q", c.mode, c.values, got, c.replaced)
		}
	}
}
