//go:build linux

package k8s

import (
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// ownEnvoy are values of the modes that bring an Envoy.
var ownEnvoy = []string{"provider.name=none", "httpRoute.create=false", "service.type=LoadBalancer", "proxy.drainSeconds=12",
	"drainSeconds=12", "drainQuietSeconds=3", "proxy.image.repository=envoy", "proxy.concurrency=1"}

// disaggregatedInAllShapes is the chart in each shape that stands with Istio or
// alone.
func disaggregatedInAllShapes(t *testing.T, c *cluster) {
	for _, shape := range []struct {
		name, class string
		values      []string
	}{
		{"sidecar", "", append(slices.Clone(ownEnvoy), "mode=sidecar")},
		{"standalone", "", append(slices.Clone(ownEnvoy), "mode=standalone")},
		{"pool", "istio", nil},
		{"filter", "istio", []string{"provider.istio.envoyFilter.enabled=true"}},
	} {
		concurrent(t, shape.name, func(t *testing.T) { disaggregated(t, c, "disagg-"+shape.name, shape.class, shape.values...) })
	}
}

// disaggregated is the chart with separate prefill and decode workers, the roles by label,
// behind a Gateway of a class, or with an Envoy of its own. In mode sidecar prefill legs go
// through Envoy, else from Kvlane to the worker.
func disaggregated(t *testing.T, c *cluster, in, class string, values ...string) {
	r := &release{c: c, in: in, values: append(slices.Clone(values),
		"config.disagg.connector=nixl", "config.routing.disagg.mode=threshold", "config.routing.disagg.threshold=64")}
	c.emptyNamespace(t, in)
	if class != "" {
		c.makeGateway(t, in, class)
	}
	engines, err := os.ReadFile("testdata/disagg.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, role := range []string{"prefill", "decode"} {
		c.kubectl(t, strings.ReplaceAll(string(engines), "ROLE", role), "apply", "-n", in, "--server-side", "-f", "-")
	}
	c.ready(t, in, "prefill", 1)
	c.ready(t, in, "decode", 1)
	r.put(t, "install")
	var address string
	if class != "" {
		address = c.gateway(t, in, "llm")
	} else {
		address = c.service(t, in, "kvlane")
	}
	chat := address + "/v1/chat/completions"
	routed(t, chat)
	const legs = `kvlane_prefill_legs_total`
	for i := range 4 {
		before := c.metric(t, in, legs)
		got, err := post(t.Context(), chat, chatBody("demo", essay(fmt.Sprint("apart ", i), 300), i%2 == 0))
		if err != nil || got.status != http.StatusOK || !strings.HasPrefix(got.target, "decode-") {
			t.Errorf("%d by %q: %.300s %v", got.status, got.target, got.body, err)
		}
		if n := c.metric(t, in, legs) - before; n != 1 {
			t.Errorf("%v prefill legs for a long prompt, want 1", n)
		}
	}
	short, err := post(t.Context(), chat, chatBody("demo", "Short.", false))
	if err != nil || short.status != http.StatusOK || !strings.HasPrefix(short.target, "decode-") {
		t.Errorf("short prompt: %d by %q %v", short.status, short.target, err)
	}
	// Without a prefill worker decode computes by itself.
	c.kubectl(t, "", "scale", "-n", in, "deployment/prefill", "--replicas=0")
	eventually(t, reasonable, "the end of the prefill pod", func() error { return c.node.leaving(in) })
	eventually(t, reasonable, "a prompt without a prefill leg", func() error {
		before := c.metric(t, in, legs)
		alone, err := post(t.Context(), chat, chatBody("demo", essay("alone "+time.Now().Format(time.StampNano), 300), false))
		if err != nil || alone.status != http.StatusOK || !strings.HasPrefix(alone.target, "decode-") {
			t.Fatalf("without a prefill worker: %d by %q %.300s %v", alone.status, alone.target, alone.body, err)
		}
		if n := c.metric(t, in, legs) - before; n != 0 {
			return fmt.Errorf("%v legs to a pod that is gone", n) // Kvlane learns of it with a short delay
		}
		return nil
	})
	r.end(t)
}
