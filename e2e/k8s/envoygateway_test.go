//go:build linux

package k8s

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

const egNamespace = "envoy-gateway-system"

// envoyGateway starts Envoy Gateway with its resource definitions and
// certificates. It wants them in /certs, so it gets a file system of its own.
func (c *cluster) envoyGateway(t *testing.T) {
	t.Helper()
	program, err := filepath.EvalSymlinks(filepath.Join(c.bin, "envoy-gateway"))
	if err != nil {
		t.Fatal(err)
	}
	_, version, _ := strings.Cut(filepath.Base(program), "envoy-gateway-")
	cache, err := exec.Command("go", "env", "GOMODCACHE").Output()
	if err != nil {
		t.Fatal(err)
	}
	c.apply(t, "-f", filepath.Join(moduleDir(t, "conformance", "sigs.k8s.io/gateway-api"), "config/crd/standard"),
		"-f", filepath.Join(strings.TrimSpace(string(cache)), "github.com/envoyproxy/gateway@"+version, "charts/gateway-helm/charts/crds/crds/generated"))
	c.applyText(t, "{apiVersion: v1, kind: Namespace, metadata: {name: "+egNamespace+"}}")
	env := append(os.Environ(), "ENVOY_GATEWAY_NAMESPACE="+egNamespace, "KUBECONFIG="+c.kubeconfig)
	certs := exec.Command(program, "certgen", "--disable-topology-injector")
	certs.Env = env
	if out, err := certs.CombinedOutput(); err != nil {
		t.Fatalf("certgen: %v\n%s", err, out)
	}
	root, err := overlay(filepath.Join(c.dir, "envoy-gateway.layers"))
	if err != nil {
		t.Fatal(err)
	}
	var secret struct {
		Data map[string][]byte `json:"data"`
	}
	if err := c.client.read(t.Context(), "/api/v1/namespaces/"+egNamespace+"/secrets/envoy-gateway", &secret); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(root, "certs"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range secret.Data {
		if err := os.WriteFile(filepath.Join(root, "certs", name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	config, err := filepath.Abs("testdata/envoy-gateway.yaml")
	if err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(c.dir, "envoy-gateway.log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "server", "--config-path", config)
	cmd.Env, cmd.Stdout, cmd.Stderr, cmd.Dir = env, log, log, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { _ = cmd.Wait() }()
}

// settled is what Envoy needs when a policy or a patch changed clusters: it keeps the
// old ones until it has endpoints for the new ones, or has waited 15 s for them, and
// then ends its streams to the old.
const settled = 16 * time.Second

func TestEnvoyGateway(t *testing.T) {
	if missing != "" {
		t.Skip(missing)
	}
	c := newCluster(t)
	c.envoyGateway(t)
	c.begin(t, gatewayPage)
	for _, f := range []string{"gateway.yaml", "route.yaml", "kvlane.yaml", "policies.yaml", "full-duplex.yaml", "same-replica.yaml"} {
		c.kubectl(t, "", "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", manifest("envoy-gateway/"+f))
	}
	c.apply(t, "-f", manifest("engines/simulated.yaml"), "-f", manifest("envoy-gateway/gateway.yaml"), "-f", manifest("envoy-gateway/route.yaml"), "-f", manifest("envoy-gateway/policies.yaml"))
	c.applyText(t, edited(t, "envoy-gateway/kvlane.yaml", image, testImage, demoModel, demoModel+`
    - {name: slow, check: {renderer: "`+slowRenderer(t)+`", timeout: 30s}}`))
	c.ready(t, ns, "llm", 2)
	c.ready(t, ns, "kvlane", 2)
	chat := c.gateway(t, ns, "llm") + "/v1/chat/completions"
	routed(t, chat)
	accepted(t, c, ns)
	t.Run("buffered", func(t *testing.T) { behindEnvoyGateway(t, c, ns, chat) })
	t.Run("17 s hold", func(t *testing.T) {
		began := time.Now()
		r, err := post(t.Context(), chat, chatBody("slow", "hold me", false))
		if took := time.Since(began); err != nil || r.status != http.StatusOK || r.target != "" || took < 2*time.Second {
			t.Errorf("with the messageTimeout of the manifest: %d %q %v after %s, want an answer without Kvlane after 2 s", r.status, r.target, err, took)
		}
		c.applyText(t, edited(t, "envoy-gateway/policies.yaml", "messageTimeout: 2s", "messageTimeout: 300s"))
		eventually(t, time.Minute, "the other messageTimeout", func() error {
			r, err := post(t.Context(), chat, chatBody("slow", "hold me", false))
			if err == nil && r.target == "" {
				err = fmt.Errorf("%d without Kvlane", r.status)
			}
			return err
		})
		holds(t, chat)
		c.apply(t, "-f", manifest("envoy-gateway/policies.yaml"))
		time.Sleep(settled)
		routed(t, chat)
	})
	t.Run("first token and end are seen", func(t *testing.T) { phases(t, c, chat) })
	t.Run("with two replicas first tokens are seen or counted as missed", func(t *testing.T) { c.firstTokens(t, ns, chat, 16) })
	t.Run("with a patch all first tokens are seen", func(t *testing.T) {
		c.apply(t, "-f", manifest("envoy-gateway/same-replica.yaml"))
		programmed(t, c, "kvlane-same-replica")
		eventually(t, time.Minute, "the patch in Envoy", func() error {
			if missed := c.firstTokens(t, ns, chat, 16); missed > 0 {
				return fmt.Errorf("%v first tokens missed", missed)
			}
			return nil
		})
		replicasDecide(t, c, ns, chat)
		c.kubectl(t, "", "delete", "-f", manifest("envoy-gateway/same-replica.yaml"))
		time.Sleep(settled)
		routed(t, chat)
	})
	t.Run("Kvlane refuses the pieces of answers", func(t *testing.T) { overrides(t, c, chat) })
	t.Run("engines are replaced under load", func(t *testing.T) { replaces(t, c, "llm", chat) })
	t.Run("Kvlane is replaced under load", func(t *testing.T) { replacesKvlane(t, c, ns, chat, past) })
	t.Run("scale up and down under load", func(t *testing.T) { scalesEngines(t, c, chat) })
	t.Run("a further Kvlane is warm when it is ready", func(t *testing.T) { warmsUp(t, c, ns, chat) })
	echo := c.echoBehindEnvoyGateway(t)
	t.Run("3 MiB body", func(t *testing.T) { bigBody(t, echo) })
	t.Run("Expect: 100-continue", func(t *testing.T) { expectation(t, echo, true) })
	t.Run("full duplex", func(t *testing.T) {
		c.apply(t, "-f", manifest("envoy-gateway/full-duplex.yaml"))
		time.Sleep(settled)
		routed(t, chat)
		accepted(t, c, ns)
		behindEnvoyGateway(t, c, ns, chat)
		t.Run("17 s hold", func(t *testing.T) { holds(t, chat) })
		t.Run("Kvlane is replaced under load", func(t *testing.T) { replacesKvlane(t, c, ns, chat, through) })
		c.apply(t, "-n", echoNamespace, "-f", manifest("envoy-gateway/full-duplex.yaml"))
		accepted(t, c, echoNamespace)
		time.Sleep(3 * time.Second)
		t.Run("3 MiB body", func(t *testing.T) { bigBody(t, echo) })
		t.Run("Expect: 100-continue", func(t *testing.T) { expectation(t, echo, true) })
		t.Run("without Kvlane", func(t *testing.T) { closesWithoutKvlane(t, c, echo) })
	})
	t.Run("without Kvlane", func(t *testing.T) {
		c.apply(t, "-f", manifest("envoy-gateway/policies.yaml"))
		routed(t, chat)
		failsOpen(t, c, ns, chat)
	})
	t.Run("chart", func(t *testing.T) { chartBehindEnvoyGateway(t, c) })
	t.Run("one rank a port", func(t *testing.T) { chartRanks(t, c) })
	t.Run("prefill and decode", func(t *testing.T) {
		disaggregated(t, c, "disagg", "envoy-gateway", "provider.name=envoy-gateway")
	})
	t.Run("docs", func(t *testing.T) { docs(t, c, gatewayPage) })
}

// chartBehindEnvoyGateway installs the chart for Envoy Gateway, in both body modes.
func chartBehindEnvoyGateway(t *testing.T, c *cluster) {
	r := &release{c: c, in: "chart", values: append(slowModel(t), "provider.name=envoy-gateway", "stallTimeout=300s")}
	c.namespace(t, r.in)
	c.makeGateway(t, r.in, "envoy-gateway")
	r.put(t, "install")
	c.ready(t, r.in, "llm", 2)
	chat := c.gateway(t, r.in, "llm") + "/v1/chat/completions"
	for _, mode := range []string{"Buffered", "FullDuplexStreamed"} {
		if mode != "Buffered" {
			r.put(t, "upgrade", "provider.envoyGateway.failOpen=false", "provider.envoyGateway.requestBody="+mode)
			time.Sleep(settled)
		}
		routed(t, chat)
		accepted(t, c, r.in)
		held := meanwhile(func() { holds(t, chat) })
		behindEnvoyGateway(t, c, r.in, chat)
		held()
		if mode == "Buffered" {
			finish := c.long(t, r.in, chat)
			steadily(t, chat, false, func() { r.upgradeAndBack(t, "replicas=3", "config.log.level=debug") })
			finish()
			c.nothingBooked(t, r.in)
			failsOpen(t, c, r.in, chat)
			r.revive(t)
		} else {
			replacesKvlane(t, c, r.in, chat, through)
		}
	}
	r.end(t)
}

const echoNamespace = "echo"

// echoBehindEnvoyGateway returns the address of a second gateway, of servers that echo
// their requests.
func (c *cluster) echoBehindEnvoyGateway(t *testing.T) string {
	t.Helper()
	c.applyText(t, "{apiVersion: v1, kind: Namespace, metadata: {name: "+echoNamespace+"}}")
	c.kubectl(t, `{apiVersion: apps/v1, kind: Deployment, metadata: {name: echo}, spec: {replicas: 2, selector: {matchLabels: {app: llm}}, template: {metadata: {labels: {app: llm}},
spec: {terminationGracePeriodSeconds: 1, containers: [{name: echo, image: "echo-basic:1", env: [{name: HTTP_PORT, value: "8000"}]}]}}}}`, "apply", "-n", echoNamespace, "--server-side", "-f", "-")
	c.kubectl(t, edited(t, "envoy-gateway/kvlane.yaml", image, testImage), "apply", "-n", echoNamespace, "--server-side", "-f", "-")
	c.apply(t, "-n", echoNamespace, "-f", manifest("envoy-gateway/gateway.yaml"), "-f", manifest("envoy-gateway/route.yaml"), "-f", manifest("envoy-gateway/policies.yaml"))
	c.ready(t, echoNamespace, "echo", 2)
	c.ready(t, echoNamespace, "kvlane", 2)
	url := c.gateway(t, echoNamespace, "llm") + "/v1/echo"
	accepted(t, c, echoNamespace)
	eventually(t, reasonable, "an answer", func() error {
		r, err := post(t.Context(), url, []byte("{}"))
		if err == nil && (r.status != http.StatusOK || r.target == "") {
			err = fmt.Errorf("%d %q %.300s", r.status, r.target, r.body)
		}
		return err
	})
	return url
}

// closesWithoutKvlane takes Kvlane away where both bodies are full duplex: first its
// pods refuse, then there is none. Nothing fails open.
func closesWithoutKvlane(t *testing.T, c *cluster, url string) {
	for _, s := range c.node.sandboxes(echoNamespace, map[string]string{"app": "kvlane"}) {
		s.freeze()
		s.kill()
	}
	fails := func(what string) {
		for _, method := range []string{http.MethodPost, http.MethodGet} {
			var body io.Reader = http.NoBody
			if method == http.MethodPost {
				body = strings.NewReader("{}")
			}
			req, err := http.NewRequestWithContext(t.Context(), method, url, body)
			if err != nil {
				t.Fatal(err)
			}
			if r, err := do(req); err != nil || r.status != http.StatusInternalServerError {
				t.Errorf("%s picker, %s: %d %v", what, method, r.status, err)
			}
		}
	}
	fails("refusing")
	c.kubectl(t, "", "-n", echoNamespace, "scale", "deployment/kvlane", "--replicas=0")
	c.ready(t, echoNamespace, "kvlane", 0)
	eventually(t, reasonable, "the end of Kvlane's pods", func() error { return c.node.leaving(echoNamespace) })
	fails("absent")
	c.kubectl(t, "", "-n", echoNamespace, "scale", "deployment/kvlane", "--replicas=2")
	c.ready(t, echoNamespace, "kvlane", 2)
	eventually(t, reasonable, "an answer with Kvlane back", func() error {
		r, err := post(t.Context(), url, []byte("{}"))
		if err == nil && (r.status != http.StatusOK || r.target == "") {
			err = fmt.Errorf("%d %q %.300s", r.status, r.target, r.body)
		}
		return err
	})
}

func behindEnvoyGateway(t *testing.T, c *cluster, in, chat string) {
	followsPicks(t, c, in, chat)
	streams(t, c, in, chat)
	longPrompt(t, chat)
	steersNot(t, c, in, chat)
}

// accepted wants every policy accepted by Envoy Gateway.
func accepted(t *testing.T, c *cluster, in string) {
	t.Helper()
	for _, kind := range []string{"envoyextensionpolicies", "backendtrafficpolicies", "clienttrafficpolicies"} {
		eventually(t, 20*time.Second, kind, func() error {
			var p struct {
				Status struct {
					Ancestors []struct {
						Conditions []struct{ Type, Status, Message string }
					}
				}
			}
			if err := c.client.read(t.Context(), "/apis/gateway.envoyproxy.io/v1alpha1/namespaces/"+in+"/"+kind+"/kvlane", &p); err != nil {
				return err
			}
			for _, a := range p.Status.Ancestors {
				for _, condition := range a.Conditions {
					if condition.Type == "Accepted" && condition.Status == "True" {
						return nil
					}
				}
			}
			return fmt.Errorf("not accepted: %+v", p.Status)
		})
	}
}

// programmed waits until Envoy Gateway has put a patch into Envoy's configuration.
func programmed(t *testing.T, c *cluster, patch string) {
	t.Helper()
	eventually(t, time.Minute, "patch "+patch, func() error {
		var p struct {
			Status struct {
				Ancestors []struct {
					Conditions []struct{ Type, Status, Message string }
				}
			}
		}
		if err := c.client.read(t.Context(), "/apis/gateway.envoyproxy.io/v1alpha1/namespaces/"+ns+"/envoypatchpolicies/"+patch, &p); err != nil {
			return err
		}
		for _, a := range p.Status.Ancestors {
			for _, condition := range a.Conditions {
				if condition.Type == "Programmed" && condition.Status == "True" {
					return nil
				}
			}
		}
		return fmt.Errorf("%+v", p.Status)
	})
}

// phases checks Kvlane's own records: it has seen the first piece of each answer, and no
// booking is left at the end.
func phases(t *testing.T, c *cluster, chat string) {
	// With several replicas the observing stream may come to another one than the
	// request did, which then does not know it.
	c.kubectl(t, "", "scale", "deployment/kvlane", "--replicas=1")
	c.ready(t, ns, "kvlane", 1)
	defer func() {
		c.kubectl(t, "", "scale", "deployment/kvlane", "--replicas=2")
		c.ready(t, ns, "kvlane", 2)
	}()
	eventually(t, time.Minute, "one Kvlane only", func() error {
		var slices struct {
			Items []struct{ Endpoints []any }
		}
		n := 0
		if err := c.client.read(t.Context(), "/apis/discovery.k8s.io/v1/namespaces/"+ns+"/endpointslices?labelSelector=kubernetes.io/service-name%3Dkvlane", &slices); err != nil {
			return err
		}
		for _, s := range slices.Items {
			n += len(s.Endpoints)
		}
		if n != 1 {
			return fmt.Errorf("%d endpoints", n)
		}
		return nil
	})
	before := c.metric(t, ns, "kvlane_first_token_seconds_count")
	for i := range 4 {
		if r, err := post(t.Context(), chat, chatBody("demo", essay(fmt.Sprint("phases ", i), 30), true)); err != nil || r.status != http.StatusOK {
			t.Fatalf("%d %v", r.status, err)
		}
	}
	eventually(t, time.Minute, "four first tokens", func() error {
		if n := c.metric(t, ns, "kvlane_first_token_seconds_count") - before; n < 4 {
			return fmt.Errorf("%v", n)
		}
		return nil
	})
	c.nothingBooked(t, ns)
}

// firstTokens sends streamed requests where Kvlane has two replicas, and returns how
// many first tokens came to another replica than the one that decided the request.
// The others were seen in time, or on a busy machine after the answer's end. All
// reservations end with the answers.
func (c *cluster) firstTokens(t *testing.T, in, chat string, sent int) (missed float64) {
	t.Helper()
	names := []string{"kvlane_first_token_seconds_count", `kvlane_extproc_failures_total{kind="late_first_token"}`, `kvlane_extproc_failures_total{kind="unknown_request"}`}
	count := func() (all []float64) {
		for _, name := range names {
			all = append(all, c.metric(t, in, name))
		}
		return all
	}
	before := count()
	for i := range sent {
		if r, err := post(t.Context(), chat, chatBody("demo", essay(fmt.Sprint("first token ", i), 30), true)); err != nil || r.status != http.StatusOK {
			t.Fatalf("%d %v", r.status, err)
		}
	}
	eventually(t, reasonable, "each observation in an account", func() error {
		now, sum := count(), 0.0
		for i := range now {
			now[i] -= before[i]
			sum += now[i]
		}
		if missed = now[2]; sum < float64(sent) {
			return fmt.Errorf("%v seen, late and missed", now)
		}
		t.Logf("of %d first tokens %v were seen, %v late, %v missed", sent, now[0], now[1], now[2])
		return nil
	})
	c.nothingBooked(t, in)
	return missed
}

// replicasDecide wants the requests to a gateway shared between the replicas, and
// their first tokens seen where they were decided. Of two replicas that do not agree
// half would be missed; on a busy machine one may come when its request is over, of
// which nothing is kept without an access log.
func replicasDecide(t *testing.T, c *cluster, in, chat string) {
	t.Helper()
	before := c.decided(t, in)
	const requests, late = 32, 4
	if missed := c.firstTokens(t, in, chat, requests); missed > late {
		t.Errorf("%v of %d first tokens came to another replica than the request", missed, requests)
	}
	everyReplica(t, c, in, before)
}

// everyReplica fails the test for each replica that has made no decision since before.
func everyReplica(t *testing.T, c *cluster, in string, before map[string]float64) {
	t.Helper()
	after := c.decided(t, in)
	if len(after) < 2 {
		t.Fatalf("replicas %v", after)
	}
	for pod, n := range after {
		if n == before[pod] {
			t.Errorf("%s decided nothing", pod)
		}
	}
}

// nothingBooked waits until no replica holds a reservation.
func (c *cluster) nothingBooked(t *testing.T, in string) {
	t.Helper()
	eventually(t, time.Minute, "the end of all reservations", func() error {
		if n := c.metric(t, in, "kvlane_reservations"); n != 0 {
			return fmt.Errorf("%v", n)
		}
		return nil
	})
}

// decided is how many requests each of Kvlane's pods in a namespace decided.
func (c *cluster) decided(t *testing.T, in string) map[string]float64 {
	t.Helper()
	all := map[string]float64{}
	for _, s := range c.node.pickers(in) {
		all[s.pod.Metadata.Name] = s.metric(t, "kvlane_requests_total")
	}
	return all
}

// metric sums a metric over all of Kvlane's pods in a namespace.
func (c *cluster) metric(t *testing.T, in, name string) float64 {
	t.Helper()
	sum := 0.0
	for _, s := range c.node.pickers(in) {
		sum += s.metric(t, name)
	}
	return sum
}

// metric sums a metric of a pod of Kvlane over its labels.
func (s *sandbox) metric(t *testing.T, name string) (sum float64) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+s.ip+":9090/metrics", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	r, err := do(req)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(r.body)) {
		if rest, ok := strings.CutPrefix(line, name); ok && (rest[0] == '{' || rest[0] == ' ') {
			var v float64
			if _, err := fmt.Sscan(rest[strings.LastIndexByte(rest, ' ')+1:], &v); err != nil {
				t.Fatal(err)
			}
			sum += v
		}
	}
	return sum
}
