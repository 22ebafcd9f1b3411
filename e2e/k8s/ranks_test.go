//go:build linux

package k8s

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"
)

// ranksOfPorts is a pool whose engines have one port for each data-parallel rank.
// Kvlane is there before its pool is: until then it is not ready.
func ranksOfPorts(t *testing.T, c *cluster) {
	const in = "ranks"
	c.applyText(t, "{apiVersion: v1, kind: Namespace, metadata: {name: "+in+"}}")
	t.Cleanup(func() { _, _ = c.run(t.Context(), "", "kubectl", "delete", "namespace", in, "--wait=false") })
	c.kubectl(t, edited(t, "engines/simulated.yaml", `--side-listen, ":8001", --ranks, "2"`, `--side-listen, ":8100", --ranks, "2", --port-per-rank`), "apply", "-n", in, "--server-side", "-f", "-")
	c.kubectl(t, edited(t, "istio/kvlane.yaml", image, testImage, "kubernetes: {pool: llm}", "kubernetes: {pool: llm, rank_per_port: true}"), "apply", "-n", in, "--server-side", "-f", "-")
	c.apply(t, "-n", in, "-f", manifest("istio/gateway.yaml"), "-f", manifest("istio/route.yaml"))
	c.ready(t, in, "llm", 2)
	c.says(t, in, "there is no InferencePool "+in+"/llm")
	c.kubectl(t, edited(t, "istio/pool.yaml", "targetPorts: [{number: 8000}]", "targetPorts: [{number: 8000}, {number: 8001}]"), "apply", "-n", in, "--server-side", "-f", "-")
	c.ready(t, in, "kvlane", 2)
	chat := c.gateway(t, in, "llm") + "/v1/chat/completions"
	routed(t, chat)
	followsPicks(t, c, in, chat)
	served := map[string]bool{}
	for i := range 24 {
		r := c.ask(t, in, chat, chatBody("demo", essay(fmt.Sprint("port ", i), 60), false))
		_, target, _ := strings.Cut(r.target, ":")
		served[target] = true
		if len(served) == 2 {
			break
		}
	}
	if len(served) != 2 || !served["8000/0"] || !served["8001/1"] {
		t.Errorf("answers by port and rank %v, want 8000/0 and 8001/1", served)
	}
}

// says waits until each of Kvlane's pods gives a reason for not being ready.
func (c *cluster) says(t *testing.T, in, reason string) {
	t.Helper()
	eventually(t, reasonable, "Kvlane to say "+reason, func() error {
		pods := c.node.pickers(in)
		for _, s := range pods {
			r, err := c.readiness(t, s)
			if err != nil {
				return err
			}
			if r.status != http.StatusServiceUnavailable || !strings.Contains(string(r.body), reason) {
				return fmt.Errorf("%d %s", r.status, r.body)
			}
		}
		if len(pods) == 0 {
			return errors.New("no pods")
		}
		return nil
	})
}

func (c *cluster) readiness(t *testing.T, s *sandbox) (reply, error) {
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+s.ip+":9090/readyz", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	return do(req)
}

// disaggregated is the chart with prefill and decode apart: Envoy and Kvlane in one
// pod, the roles by label.
func disaggregated(t *testing.T, c *cluster) {
	const in = "disagg"
	r := &release{c: c, in: in, values: []string{"mode=sidecar", "provider.name=none", "httpRoute.create=false", "service.type=LoadBalancer", "proxy.drainSeconds=12",
		"drainSeconds=12", "drainQuietSeconds=3", "proxy.image.repository=envoy", "proxy.concurrency=1",
		"config.disagg.connector=nixl", "config.routing.disagg.mode=threshold", "config.routing.disagg.threshold=64"}}
	c.applyText(t, "{apiVersion: v1, kind: Namespace, metadata: {name: "+in+"}}")
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
	chat := c.service(t, in, "kvlane") + "/v1/chat/completions"
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
			return fmt.Errorf("%v legs to a pod that is gone", n) // Kvlane is told in a moment
		}
		return nil
	})
	r.end(t)
	_, _ = c.run(t.Context(), "", "kubectl", "delete", "namespace", in, "--wait=false")
}
