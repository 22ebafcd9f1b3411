//go:build linux

package k8s

import (
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

var chartDir = filepath.Join("..", "..", "charts", "kvlane")

// release is Kvlane installed as operators do it: with Helm, which waits for
// readiness.
type release struct {
	c      *cluster
	in     string
	values []string // --set of every command
}

func (r *release) helm(t *testing.T, args ...string) {
	t.Helper()
	began := time.Now()
	if _, err := r.c.run(t.Context(), "", "helm", append(args, "-n", r.in, "--wait", "--timeout", "150s")...); err != nil {
		t.Fatal(err)
	}
	t.Logf("helm %s: %s", args[0], time.Since(began).Round(100*time.Millisecond))
}

// put installs or upgrades the chart with further values.
func (r *release) put(t *testing.T, command string, values ...string) {
	t.Helper()
	args := []string{command, "kvlane", chartDir, "-f", "testdata/values.yaml"}
	for _, v := range append(r.values, values...) {
		args = append(args, "--set", v)
	}
	r.helm(t, args...)
}

// end uninstalls it and waits until nothing is left.
func (r *release) end(t *testing.T) {
	t.Helper()
	kinds := "all,cm,secret,sa,role,rolebinding,pdb,networkpolicy,httproute"
	for _, further := range []string{"inferencepool", "destinationrule", "envoyfilter", "envoyextensionpolicy", "backendtrafficpolicy", "clienttrafficpolicy"} {
		if _, err := r.c.run(t.Context(), "", "kubectl", "get", further, "-n", r.in); err == nil { // the cluster knows it
			kinds += "," + further
		}
	}
	left := func() string {
		return r.c.kubectl(t, "", "get", kinds, "-n", r.in, "-l", "app.kubernetes.io/instance=kvlane", "-o", "name")
	}
	t.Logf("of the chart: %s", strings.ReplaceAll(left(), "\n", " "))
	r.helm(t, "uninstall", "kvlane")
	eventually(t, 2*time.Minute, "nothing left of the chart", func() error {
		if out := left(); out != "" {
			return fmt.Errorf("left: %s", out)
		}
		return nil
	})
}

// test runs `helm test`, which must find the release working, or not.
func (r *release) test(t *testing.T, works bool) {
	t.Helper()
	out, err := r.c.run(t.Context(), "", "helm", "test", "kvlane", "-n", r.in, "--timeout", "60s")
	if works != (err == nil && strings.Contains(out, "Succeeded")) {
		t.Errorf("helm test of a release that works (%v): got %v\n%s", works, err, out)
	}
}

// config is what the chart tells Kvlane and, in the modes that have one, its Envoy.
func (r *release) config(t *testing.T) string {
	t.Helper()
	return r.c.kubectl(t, "", "-n", r.in, "get", "configmaps", "-l", "app.kubernetes.io/instance=kvlane", "-o", "jsonpath={.items[*].data}")
}

// slowModel are values of a model whose requests Kvlane holds for long.
func slowModel(t *testing.T) []string {
	t.Helper()
	return []string{"models[1].name=slow", "models[1].check.renderer=" + slowRenderer(t), "models[1].check.timeout=30s"}
}

// revive makes Kvlane's pods anew that were killed.
func (r *release) revive(t *testing.T) {
	t.Helper()
	for _, s := range r.c.node.pickers(r.in) {
		r.c.kubectl(t, "", "-n", r.in, "delete", "pod", s.pod.Metadata.Name, "--wait=false")
	}
	r.settled(t)
	r.c.ready(t, r.in, "kvlane", 2)
}

// settled waits until the pods that were replaced have ended.
func (r *release) settled(t *testing.T) {
	t.Helper()
	eventually(t, reasonable, "the end of all old pods", func() error { return r.c.node.leaving(r.in) })
}

// upgradeAndBack upgrades the release with further values, under the load of the
// caller, and goes back to its first revision.
func (r *release) upgradeAndBack(t *testing.T, values ...string) {
	t.Helper()
	before := r.config(t)
	r.put(t, "upgrade", values...)
	r.settled(t)
	if r.config(t) == before {
		t.Errorf("the upgrade with %q changed nothing", values)
	}
	r.helm(t, "rollback", "kvlane", "1")
	r.settled(t)
	if r.config(t) != before {
		t.Error("the rollback does not give back what was installed")
	}
}

// chart installs each shape that stands with Istio or alone.
func chart(t *testing.T, c *cluster) {
	concurrent(t, "standalone", func(t *testing.T) { chartOwnEnvoy(t, c, "chart-standalone", "mode=standalone") })
	concurrent(t, "sidecar", func(t *testing.T) { chartOwnEnvoy(t, c, "chart-sidecar", "mode=sidecar") })
	concurrent(t, "InferencePool", func(t *testing.T) { chartPool(t, c) })
	concurrent(t, "EnvoyFilter", func(t *testing.T) { chartFilter(t, c) })
}

func chartPool(t *testing.T, c *cluster) {
	r := &release{c: c, in: "chart"}
	c.namespace(t, r.in)
	c.makeGateway(t, r.in, "istio")
	r.put(t, "install")
	c.ready(t, r.in, "llm", 2)
	r.test(t, true)
	chat := c.gateway(t, r.in, "llm") + "/v1/chat/completions"
	routed(t, chat)
	followsPicks(t, c, r.in, chat)
	hangs(t, c, r.in, chat)
	c.speaksTLS(t, r.in, "llm", "kvlane", false)
	c.envoyKnows(t, r.in, "llm", "outbound|9002||kvlane.chart.svc.cluster.local", `"max_requests": 4294967295`, true)
	steady(t, chat, func() {
		r.upgradeAndBack(t, "replicas=3", "config.log.level=debug")
		time.Sleep(time.Second)
	})
	warmStart(t, r, chat)
	// Not under load: Envoy ends its streams to a cluster that changes.
	r.put(t, "upgrade", "provider.istio.destinationRule.tls=true")
	c.speaksTLS(t, r.in, "llm", "kvlane", true)
	followsPicks(t, c, r.in, chat)
	r.end(t)
}

// warmStart has new replicas take the index from those that are ready.
func warmStart(t *testing.T, r *release, chat string) {
	r.c.applyText(t, "{apiVersion: v1, kind: Secret, metadata: {name: index, namespace: "+r.in+"}, stringData: {key: \"a long random text\"}}")
	r.put(t, "upgrade", "warmStart.enabled=true", "warmStart.secretName=index")
	r.c.ready(t, r.in, "kvlane", 2)
	followsPicks(t, r.c, r.in, chat)
	r.c.kubectl(t, "", "-n", r.in, "rollout", "restart", "deployment/kvlane")
	r.c.ready(t, r.in, "kvlane", 2)
	if n := r.c.metric(t, r.in, "kvlane_index_warmed_targets"); n < 2 {
		t.Errorf("two new replicas took the index of %v targets from others", n)
	}
	followsPicks(t, r.c, r.in, chat)
}

func chartFilter(t *testing.T, c *cluster) {
	r := &release{c: c, in: "chart-filter", values: append(slowModel(t), "provider.istio.envoyFilter.enabled=true")}
	c.namespace(t, r.in)
	c.makeGateway(t, r.in, "istio")
	r.put(t, "install")
	c.ready(t, r.in, "llm", 2)
	chat := c.gateway(t, r.in, "llm") + "/v1/chat/completions"
	routed(t, chat)
	held := meanwhile(func() { holds(t, chat) })
	followsPicks(t, c, r.in, chat)
	streams(t, c, r.in, chat)
	longPrompt(t, chat)
	steersNot(t, c, r.in, chat)
	replicasDecide(t, c, r.in, chat)
	held()
	c.envoyKnows(t, r.in, "llm", "outbound|9002||kvlane.chart-filter.svc.cluster.local", `"max_requests": 4294967295`, true)
	// As with the chart's own Envoy: a Kvlane that drains does not wait for the answer.
	finish := c.long(t, r.in, chat)
	steadily(t, chat, false, func() { r.upgradeAndBack(t, "replicas=3", "config.log.level=debug") })
	finish()
	c.nothingBooked(t, r.in)
	followsPicks(t, c, r.in, chat)
	failsOpen(t, c, r.in, chat)
	r.end(t)
}

// chartOwnEnvoy installs a mode in which the chart brings its Envoy.
func chartOwnEnvoy(t *testing.T, c *cluster, in, mode string) {
	r := &release{c: c, in: in, values: append(slices.Clone(ownEnvoy), mode)}
	c.namespace(t, in)
	c.ready(t, in, "llm", 2)
	r.put(t, "install")
	chat := c.service(t, in, "kvlane") + "/v1/chat/completions"
	routed(t, chat)
	r.test(t, true)
	followsPicks(t, c, in, chat)
	streams(t, c, in, chat)
	longPrompt(t, chat)
	steersNot(t, c, in, chat)
	if mode == "mode=standalone" { // Envoy balances over the replicas, whatever connections it has
		before := c.decided(t, in)
		for range 32 {
			routed(t, chat)
		}
		everyReplica(t, c, in, before)
	}
	// Clients keep their connections; Envoy ends them before it ends itself. A Kvlane
	// that drains decides, but does not wait for the answer to name the target.
	steadily(t, chat, false, func() {
		r.upgradeAndBack(t, "config.log.level=debug", "proxy.firstToken=true", "proxy.extraArgs[0]=--log-path", "proxy.extraArgs[1]=/dev/null")
	})
	c.nothingBooked(t, in)
	followsPicks(t, c, in, chat)
	r.put(t, "upgrade", "proxy.requestBody=FULL_DUPLEX_STREAMED", "proxy.firstToken=true")
	r.settled(t)
	followsPicks(t, c, in, chat)
	streams(t, c, in, chat)
	if mode == "mode=standalone" {
		replicasDecide(t, c, in, chat)
	}
	// Here nothing fails open: a request that comes as a Kvlane ends is not cut.
	steadily(t, chat, false, func() {
		c.kubectl(t, "", "-n", in, "rollout", "restart", "deployment/kvlane")
		c.ready(t, in, "kvlane", 2)
		r.settled(t)
	})
	if mode == "mode=standalone" {
		proxiesStay(t, c, r, chat)
	}
	r.end(t)
}

// proxiesStay replaces Envoy's pods while Kvlane is down and cannot send them workers: the
// old pods serve until it is back.
func proxiesStay(t *testing.T, c *cluster, r *release, chat string) {
	t.Helper()
	r.put(t, "upgrade") // fails open
	r.settled(t)
	c.kubectl(t, "", "-n", r.in, "scale", "deployment/kvlane", "--replicas=0")
	c.ready(t, r.in, "kvlane", 0)
	r.settled(t)
	r.test(t, false)
	steadily(t, chat, false, func() {
		c.kubectl(t, "", "-n", r.in, "rollout", "restart", "deployment/kvlane-proxy")
		eventually(t, reasonable, "an Envoy that says that it knows no worker", func() error {
			for _, s := range c.node.sandboxes(r.in, map[string]string{"app.kubernetes.io/component": "proxy"}) {
				resp, err := client.Get("http://" + s.ip + ":8081/ready")
				if err != nil {
					continue
				}
				resp.Body.Close()
				if resp.StatusCode == http.StatusServiceUnavailable {
					return nil
				}
			}
			return errors.New("all know some, or do not answer")
		})
		c.kubectl(t, "", "-n", r.in, "scale", "deployment/kvlane", "--replicas=2")
		c.ready(t, r.in, "kvlane", 2)
		c.ready(t, r.in, "kvlane-proxy", 2)
		r.settled(t)
	})
	r.test(t, true)
	followsPicks(t, c, r.in, chat)
}

// service is the address of a Service of type LoadBalancer.
func (c *cluster) service(t *testing.T, in, name string) string {
	t.Helper()
	var s service
	eventually(t, time.Minute, "address of Service "+name, func() error {
		if err := c.client.read(t.Context(), "/api/v1/namespaces/"+in+"/services/"+name, &s); err != nil {
			return err
		}
		if len(s.Status.LoadBalancer.Ingress) == 0 {
			return fmt.Errorf("%s has none", name)
		}
		return nil
	})
	return "http://" + s.Status.LoadBalancer.Ingress[0].IP
}
