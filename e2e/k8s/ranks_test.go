//go:build linux

package k8s

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// ranksOfPorts is a pool whose engines have one port for each data-parallel rank.
// Kvlane is there before its pool is: until then it is not ready.
func ranksOfPorts(t *testing.T, c *cluster) {
	const in = "ranks"
	c.emptyNamespace(t, in)
	c.kubectl(t, perRank(t), "apply", "-n", in, "--server-side", "-f", "-")
	c.kubectl(t, edited(t, "istio/kvlane.yaml", image, testImage, "kubernetes: {pools: [llm]}", "kubernetes: {pools: [llm], rank_per_port: true}"), "apply", "-n", in, "--server-side", "-f", "-")
	c.apply(t, "-n", in, "-f", manifest("istio/gateway.yaml"), "-f", manifest("istio/route.yaml"))
	c.ready(t, in, "llm", 2)
	c.says(t, in, "there is no InferencePool "+in+"/llm")
	c.kubectl(t, edited(t, "istio/pool.yaml", "targetPorts: [{number: 8000}]", "targetPorts: [{number: 8000}, {number: 8001}]"), "apply", "-n", in, "--server-side", "-f", "-")
	c.ready(t, in, "kvlane", 2)
	chat := c.gateway(t, in, "llm") + "/v1/chat/completions"
	routed(t, chat)
	followsPicks(t, c, in, chat)
	bothPorts(t, c, in, chat)
}

// perRank are simulated engines of two ranks with a port for each.
func perRank(t *testing.T) string {
	t.Helper()
	return edited(t, "engines/simulated.yaml", `--side-listen, ":8001", --ranks, "2"`, `--side-listen, ":8100", --ranks, "2", --port-per-rank`)
}

// bothPorts wants requests on both ports of perRank's engines, each with its rank.
func bothPorts(t *testing.T, c *cluster, in, chat string) {
	t.Helper()
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

// chartRanks is the chart for Envoy Gateway, where the two ports are two backends of
// one route: the pick is followed to either.
func chartRanks(t *testing.T, c *cluster) {
	const in = "ranks"
	r := &release{c: c, in: in, values: []string{"provider.name=envoy-gateway", "modelServers.targetPorts[0].number=8000", "modelServers.targetPorts[1].number=8001", "modelServers.rankPerPort=true"}}
	c.emptyNamespace(t, in)
	c.makeGateway(t, in, "envoy-gateway")
	c.kubectl(t, perRank(t), "apply", "-n", in, "--server-side", "-f", "-")
	c.ready(t, in, "llm", 2)
	r.put(t, "install")
	chat := c.gateway(t, in, "llm") + "/v1/chat/completions"
	routed(t, chat)
	accepted(t, c, in)
	followsPicks(t, c, in, chat)
	bothPorts(t, c, in, chat)
	r.end(t)
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
