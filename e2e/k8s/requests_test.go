//go:build linux

package k8s

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"
)

// manifest is a file that users copy.
func manifest(name string) string { return filepath.Join("..", "..", "envoy", "manifests", name) }

// reply is what a client saw.
type reply struct {
	status  int
	target  string
	matched string
	body    []byte
}

var client = &http.Client{Timeout: 60 * time.Second}

func post(ctx context.Context, url string, body []byte, header ...string) (reply, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return reply{}, err
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	return do(req)
}

func do(req *http.Request) (reply, error) {
	resp, err := client.Do(req)
	if err != nil {
		return reply{}, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return reply{resp.StatusCode, resp.Header.Get("X-Kvlane-Target"), resp.Header.Get("X-Kvlane-Matched-Tokens"), text}, err
}

func chatBody(model, text string, stream bool) []byte {
	body, err := json.Marshal(map[string]any{"model": model, "max_tokens": 8, "stream": stream, "messages": []any{map[string]any{"role": "user", "content": text}}})
	if err != nil {
		panic(err)
	}
	return body
}

// essay is a unique text of about that many words.
func essay(name string, words int) string {
	return "Essay " + name + ". " + strings.Repeat("The river carries the boats past the mill to the sea. ", words/11)
}

func cached(t *testing.T, r reply) int {
	t.Helper()
	var answer struct {
		Usage struct {
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
	}
	if err := json.Unmarshal(r.body, &answer); err != nil {
		t.Fatalf("answer %s: %v", r.body, err)
	}
	return answer.Usage.Details.Cached
}

// load sends requests from several clients until stop is called, which returns
// how many were sent and what went wrong. told wants each answer to name its
// target.
func load(ctx context.Context, url string, clients int, told bool) (stop func() (sent int, failures []string)) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	var mu sync.Mutex
	sent, failures := 0, []string(nil)
	for c := range clients {
		wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				r, err := post(context.WithoutCancel(ctx), url, chatBody("demo", essay(fmt.Sprint(c), 60)+fmt.Sprint(i), i%3 == 0))
				time.Sleep(50 * time.Millisecond) // else the load of one test takes the processors of the others
				mu.Lock()
				sent++
				switch {
				case err != nil:
					failures = append(failures, time.Now().Format("15:04:05.000 ")+err.Error())
				case r.status != http.StatusOK || told && r.target == "":
					failures = append(failures, fmt.Sprintf("%s %d %q %.200s", time.Now().Format("15:04:05.000"), r.status, r.target, r.body))
				}
				mu.Unlock()
			}
		})
	}
	return func() (int, []string) {
		cancel()
		wg.Wait()
		return sent, failures
	}
}

// steady plays a change under load and wants not one request to fail.
func steady(t *testing.T, url string, change func()) {
	t.Helper()
	steadily(t, url, true, change)
}

func steadily(t *testing.T, url string, told bool, change func()) {
	t.Helper()
	stop := load(t.Context(), url, 6, told)
	change()
	sent, failures := stop()
	t.Logf("%d requests", sent)
	if len(failures) > 0 {
		t.Errorf("%d of %d requests failed, e.g.\n%s", len(failures), sent, strings.Join(failures[:min(len(failures), 8)], "\n"))
	}
	time.Sleep(3 * time.Second) // engines' reports of this load are read once a second: picks shall not follow them any more
	if sent < 20 {
		t.Errorf("only %d requests in all", sent)
	}
}

// ready waits until a Deployment has that many available pods and no other ones.
func (c *cluster) ready(t *testing.T, namespace, name string, replicas int) {
	t.Helper()
	eventually(t, 90*time.Second, fmt.Sprintf("%d pods of %s", replicas, name), func() error {
		var d struct {
			Metadata struct {
				Generation int `json:"generation"`
			} `json:"metadata"`
			Status struct {
				Replicas, UpdatedReplicas, AvailableReplicas, ObservedGeneration int
			} `json:"status"`
		}
		if err := c.client.read(t.Context(), "/apis/apps/v1/namespaces/"+namespace+"/deployments/"+name, &d); err != nil {
			return err
		}
		if d.Status.ObservedGeneration < d.Metadata.Generation || d.Status.Replicas != replicas || d.Status.AvailableReplicas != replicas || d.Status.UpdatedReplicas != replicas {
			return fmt.Errorf("%+v", d.Status)
		}
		return nil
	})
}

// makeGateway makes a Gateway named llm.
func (c *cluster) makeGateway(t *testing.T, in, class string) {
	t.Helper()
	c.applyText(t, "{apiVersion: gateway.networking.k8s.io/v1, kind: Gateway, metadata: {name: llm, namespace: "+in+"}, spec: {gatewayClassName: "+class+", listeners: [{name: http, port: 80, protocol: HTTP}]}}")
}

// gateway is the address of a Gateway once it is programmed.
func (c *cluster) gateway(t *testing.T, namespace, name string) string {
	t.Helper()
	var address string
	eventually(t, time.Minute, "gateway "+name, func() error {
		var g struct {
			Status struct {
				Addresses []struct{ Value string } `json:"addresses"`
			} `json:"status"`
		}
		if err := c.client.read(t.Context(), "/apis/gateway.networking.k8s.io/v1/namespaces/"+namespace+"/gateways/"+name, &g); err != nil {
			return err
		}
		if len(g.Status.Addresses) == 0 || g.Status.Addresses[0].Value == "" {
			return errors.New("no address")
		}
		address = g.Status.Addresses[0].Value
		return nil
	})
	return "http://" + address
}

const ns = "default"

func TestKubernetes(t *testing.T) {
	if missing != "" {
		t.Skip(missing)
	}
	began := time.Now()
	c := newCluster(t)
	c.begin(t, istioPage)
	t.Logf("control planes are up after %s", time.Since(began).Round(100*time.Millisecond))
	// One stops the API server, and the other has replicas find the loss of one within 3 s.
	ok := t.Run("manifests", func(t *testing.T) { manifestsAreValid(t, c) }) &&
		t.Run("istio", func(t *testing.T) { istio(t, c) }) &&
		t.Run("replicas that share", func(t *testing.T) { replicasShare(t, c) })
	if !ok {
		t.FailNow() // what follows takes minutes and would say no more
	}
	concurrent(t, "conformance", func(t *testing.T) { conformance(t, c) })
	concurrent(t, "envoyfilter", func(t *testing.T) { envoyFilter(t, c) })
	concurrent(t, "chart", func(t *testing.T) { chart(t, c) })
	concurrent(t, "prefill and decode", func(t *testing.T) { disaggregatedInAllShapes(t, c) })
	concurrent(t, "docs", func(t *testing.T) { docs(t, c, istioPage, sidecarPage) })
	concurrent(t, "sidecar", func(t *testing.T) { sidecar(t, c) })
	concurrent(t, "one rank a port", func(t *testing.T) { ranksOfPorts(t, c) })
}

// concurrent runs a test concurrently with the others of its kind: it has its own namespaces and mostly waits for pods to drain.
func concurrent(t *testing.T, name string, test func(t *testing.T)) {
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		test(t)
	})
}

// envoyKnows waits until the Envoys of a Gateway have, or have not, a text in
// their configuration of a cluster.
func (c *cluster) envoyKnows(t *testing.T, in, gateway, name, text string, want bool) {
	t.Helper()
	eventually(t, time.Minute, fmt.Sprintf("cluster %s of gateway %s, %q: %v", name, gateway, text, want), func() error {
		pods := c.node.sandboxes(in, map[string]string{"gateway.networking.k8s.io/gateway-name": gateway})
		if len(pods) == 0 {
			return errors.New("no pods")
		}
		for _, s := range pods {
			page := "http://" + s.ip + ":15000/config_dump?resource=dynamic_active_clusters&name_regex=" + url.QueryEscape(regexp.QuoteMeta(name))
			req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, page, http.NoBody)
			if err != nil {
				return err
			}
			r, err := do(req)
			if err != nil {
				return err
			}
			if !strings.Contains(string(r.body), name) || strings.Contains(string(r.body), text) != want {
				return fmt.Errorf("it is %.2000s", r.body)
			}
		}
		return nil
	})
}

// speaksTLS waits until a Gateway's Envoys speak TLS to a picker, or do not.
func (c *cluster) speaksTLS(t *testing.T, in, gateway, picker string, want bool) {
	t.Helper()
	c.envoyKnows(t, in, gateway, "outbound|9002||"+picker+"."+in+".svc.cluster.local", "UpstreamTlsContext", want)
}

// manifestsAreValid has the API server look at everything that is shipped for it.
func manifestsAreValid(t *testing.T, c *cluster) {
	for _, folder := range []string{"istio", "istio-envoyfilter", "sidecar"} {
		files, err := filepath.Glob(manifest(folder + "/*.yaml"))
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %v", folder, err)
		}
		for _, f := range files {
			out := c.kubectl(t, "", "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", f)
			t.Logf("%s: %d objects", filepath.Join(folder, filepath.Base(f)), strings.Count(out, "\n"))
		}
	}
}

// edited is a manifest with explain.header and replacements, each of which must have
// something to replace.
func edited(t *testing.T, name string, pairs ...string) string {
	t.Helper()
	text, err := os.ReadFile(manifest(name))
	if err != nil {
		t.Fatal(err)
	}
	// The tests read from the answers which worker was picked.
	s := strings.ReplaceAll(string(text), "  kvlane.yaml: |\n", "  kvlane.yaml: |\n    explain: {header: true}\n")
	for i := 0; i+1 < len(pairs); i += 2 {
		if !strings.Contains(s, pairs[i]) {
			t.Fatalf("%s does not hold %q", name, pairs[i])
		}
		s = strings.ReplaceAll(s, pairs[i], pairs[i+1])
	}
	return s
}

const demoModel = `    - {name: demo, tokenizer: "builtin:qwen3"}`

const image, testImage = "ghcr.io/kvlane/kvlane:0.1.0", "kvlane:test"

// namespace makes a namespace with simulated engines.
func (c *cluster) namespace(t *testing.T, name string) {
	t.Helper()
	c.emptyNamespace(t, name)
	c.apply(t, "-n", name, "-f", manifest("engines/simulated.yaml"))
}

// emptyNamespace makes a namespace that goes with the test.
func (c *cluster) emptyNamespace(t *testing.T, name string) {
	t.Helper()
	c.applyText(t, "{apiVersion: v1, kind: Namespace, metadata: {name: "+name+"}}")
	t.Cleanup(func() {
		_, _ = c.run(context.WithoutCancel(t.Context()), "", "kubectl", "delete", "namespace", name, "--wait=false")
	})
}

// routed waits until requests are answered by Kvlane's choice.
// routed waits until Kvlane decides a request. Envoy Gateway tells Envoy of pods that are not ready yet. Envoy asks a cluster
// that had no traffic for its health once a minute, so that the second check is the first that succeeds.
func routed(t *testing.T, chat string) {
	t.Helper()
	eventually(t, 90*time.Second, "first answer", func() error {
		r, err := post(t.Context(), chat, chatBody("demo", "hello", false))
		if err == nil && (r.status != http.StatusOK || r.target == "") {
			err = fmt.Errorf("%d %q %.300s", r.status, r.target, r.body)
		}
		return err
	})
}

// envoyFilter is Istio's gateway without an InferencePool.
func envoyFilter(t *testing.T, c *cluster) {
	const in = "filter"
	c.namespace(t, in)
	c.kubectl(t, edited(t, "istio-envoyfilter/kvlane.yaml", image, testImage), "apply", "-n", in, "--server-side", "-f", "-")
	c.kubectl(t, edited(t, "istio-envoyfilter/envoyfilter.yaml", "default.svc", in+".svc"), "apply", "-n", in, "--server-side", "-f", "-")
	c.apply(t, "-n", in, "-f", manifest("istio-envoyfilter/gateway.yaml"))
	c.ready(t, in, "llm", 2)
	c.ready(t, in, "kvlane", 2)
	chat := c.gateway(t, in, "llm") + "/v1/chat/completions"
	routed(t, chat)
	followsPicks(t, c, in, chat)
	streams(t, c, in, chat)
	longPrompt(t, chat)
	steersNot(t, c, in, chat)
	replicasDecide(t, c, in, chat)
	replacesKvlane(t, c, in, chat, past)
	failsOpen(t, c, in, chat)
}

// longPrompt sends more than Envoy's usual limit of 1 MiB. The engine itself refuses a
// prompt of that length; a 413 would be the gateway's.
func longPrompt(t *testing.T, chat string) {
	r, err := post(t.Context(), chat, chatBody("demo", strings.Repeat("long ", 3<<20/5), false))
	if err != nil || r.status != http.StatusBadRequest {
		t.Errorf("3 MiB prompt: %d %.200s %v", r.status, r.body, err)
	}
}

// sidecar is Envoy and Kvlane in one pod.
func sidecar(t *testing.T, c *cluster) {
	const in = "sidecar"
	c.namespace(t, in)
	c.kubectl(t, edited(t, "sidecar/kvlane.yaml", image, testImage, "docker.io/envoyproxy/envoy:distroless-v1.40.0", "envoy:test"), "apply", "-n", in, "--server-side", "-f", "-")
	c.ready(t, in, "llm", 2)
	c.ready(t, in, "kvlane", 2)
	pods := c.node.sandboxes(in, map[string]string{"app": "kvlane"})
	if len(pods) != 2 {
		t.Fatalf("%d pods", len(pods))
	}
	// What the Service would choose among.
	chat := "http://" + pods[0].ip + ":8080/v1/chat/completions"
	routed(t, chat)
	followsPicks(t, c, in, chat)
	streams(t, c, in, chat)
	longPrompt(t, chat)
	steersNot(t, c, in, chat)
}

// kvlaneYAML is Istio's manifest with the configuration of the test.
func kvlaneYAML(t *testing.T, slow string) string {
	t.Helper()
	return edited(t, "istio/kvlane.yaml", image, testImage, "kubernetes: {pools: [llm]}", "kubernetes: {pools: [llm, echo]}",
		demoModel, demoModel+`
    - {name: slow, check: {renderer: "`+slow+`", timeout: 30s}}
    log: {decisions: true}`)
}

func istio(t *testing.T, c *cluster) {
	slow := slowRenderer(t)
	c.apply(t, "-f", manifest("engines/simulated.yaml"), "-f", manifest("istio/pool.yaml"), "-f", manifest("istio/gateway.yaml"), "-f", manifest("istio/route.yaml"), "-f", "testdata/more.yaml")
	c.applyText(t, kvlaneYAML(t, slow))
	c.ready(t, ns, "llm", 2)
	c.ready(t, ns, "kvlane", 2)
	url := c.gateway(t, ns, "llm")
	chat := url + "/v1/chat/completions"
	routed(t, chat)
	t.Run("requests follow picks and ranks", func(t *testing.T) { followsPicks(t, c, ns, chat) })
	t.Run("SSE", func(t *testing.T) { streams(t, c, ns, chat) })
	t.Run("clients do not steer", func(t *testing.T) { steersNot(t, c, ns, chat) })
	t.Run("SSE that is kept back is noticed", func(t *testing.T) { buffered(t, c, ns, chat) })
	t.Run("3 MiB body", func(t *testing.T) { bigBody(t, url+"/echo") })
	t.Run("Expect: 100-continue", func(t *testing.T) { continues(t, c, url+"/echo") })
	t.Run("17 s hold", func(t *testing.T) { holds(t, chat) })
	t.Run("another pool's request is refused", func(t *testing.T) {
		r, err := post(t.Context(), url+"/stranger", []byte(`{}`))
		if err != nil || r.status != http.StatusServiceUnavailable || !strings.Contains(string(r.body), "does not serve the pool") {
			t.Errorf("%d %s %v", r.status, r.body, err)
		}
	})
	t.Run("weighted pools are noticed", func(t *testing.T) { weightedPools(t, c, url) })
	t.Run("scale up and down under load", func(t *testing.T) { scalesEngines(t, c, chat) })
	t.Run("engines are replaced under load", func(t *testing.T) { replaces(t, c, "llm", chat) })
	t.Run("a pod leaves the pool and comes back under load", func(t *testing.T) { relabels(t, c, chat) })
	t.Run("Kvlane is replaced under load", func(t *testing.T) { replacesKvlane(t, c, ns, chat, through) })
	t.Run("a further Kvlane is warm when it is ready", func(t *testing.T) { warmsUp(t, c, ns, chat) })
	t.Run("the API server is away under load", func(t *testing.T) { apiServerGone(t, c, ns, chat) })
	t.Run("TLS to the picker", func(t *testing.T) {
		c.apply(t, "-f", manifest("istio/destinationrule.yaml"))
		c.speaksTLS(t, ns, "llm", "kvlane", true)
		followsPicks(t, c, ns, chat)
		c.kubectl(t, "", "delete", "-f", manifest("istio/destinationrule.yaml"), "--timeout=20s")
		c.speaksTLS(t, ns, "llm", "kvlane", false)
	})
	t.Run("refusing and absent pickers", func(t *testing.T) { pickerGone(t, c, url) })
}

// cursors is how far each of Kvlane's pods in a namespace has read the events of
// each target.
func (c *cluster) cursors(t *testing.T, in string) (all map[string]map[string]uint64) {
	t.Helper()
	all = map[string]map[string]uint64{}
	for _, s := range c.node.pickers(in) {
		var page struct {
			Feeds []struct {
				Target string
				Cursor struct{ Next uint64 }
			}
		}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+s.ip+":9090/debug/index", http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		r, err := do(req)
		if err == nil {
			err = json.Unmarshal(r.body, &page)
		}
		if err != nil {
			continue // it comes or goes
		}
		next := map[string]uint64{}
		for _, f := range page.Feeds {
			next[f.Target] = f.Cursor.Next
		}
		all[s.ip] = next
	}
	return all
}

// ask sends a request, and returns when all replicas have read the events of the engine
// that answered and its load is no longer booked, so that only its cache distinguishes
// workers.
func (c *cluster) ask(t *testing.T, in, chat string, body []byte) reply {
	t.Helper()
	before := c.cursors(t, in)
	r, err := post(t.Context(), chat, body)
	if err != nil || r.status != http.StatusOK {
		t.Fatalf("%d %s %v", r.status, r.body, err)
	}
	eventually(t, time.Minute, "events of "+r.target, func() error {
		now := c.cursors(t, in)
		positions := map[uint64]bool{}
		for pod, next := range now {
			positions[next[r.target]] = true
			if next[r.target] <= before[pod][r.target] {
				return fmt.Errorf("%s has read up to %d", pod, next[r.target])
			}
		}
		if len(positions) != 1 {
			return fmt.Errorf("pods have read up to %v", positions)
		}
		return nil
	})
	c.nothingBooked(t, in)
	return r
}

// decisions are the last ones of each of Kvlane's pods, for people.
func (c *cluster) decisions(t *testing.T, in string) string {
	t.Helper()
	var b strings.Builder
	for _, s := range c.node.pickers(in) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+s.ip+":9090/debug/decisions?n=2", http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		if r, err := do(req); err == nil {
			fmt.Fprintf(&b, "%s: %.6000s\n", s.pod.Metadata.Name, r.body)
		}
	}
	return b.String()
}

// weightedPools sends requests to a rule with two pools. istiod has the last one's
// picker asked for both, so that half of its picks cannot be followed: Kvlane
// counts them.
func weightedPools(t *testing.T, c *cluster, url string) {
	c.applyText(t, `{apiVersion: gateway.networking.k8s.io/v1, kind: HTTPRoute, metadata: {name: weighted, namespace: `+ns+`}, spec: {parentRefs: [{name: llm}], rules: [{
matches: [{path: {type: PathPrefix, value: /weighted}}], backendRefs: [{group: inference.networking.k8s.io, kind: InferencePool, name: llm, weight: 1},
{group: inference.networking.k8s.io, kind: InferencePool, name: echo, weight: 1}]}]}}`)
	before := c.metric(t, ns, "kvlane_moved_total")
	eventually(t, time.Minute, "picks that were not followed", func() error {
		r, err := post(t.Context(), url+"/weighted", []byte(`{}`))
		if err != nil {
			return err
		}
		if n := c.metric(t, ns, "kvlane_moved_total") - before; n == 0 {
			return fmt.Errorf("none; the last answer is %d by %q", r.status, r.target)
		}
		return nil
	})
	c.kubectl(t, "", "delete", "httproute/weighted")
}

// followsPicks plays conversations of two turns: the second turn goes to the worker and
// rank of the first, and the engine reports the prompt as cached.
func followsPicks(t *testing.T, c *cluster, in, chat string) {
	t.Helper()
	targets := map[string]bool{}
	for n := range 8 {
		text := essay(fmt.Sprintf("%s %s %d", t.Name(), time.Now().Format(time.StampNano), n), 200)
		first := c.ask(t, in, chat, chatBody("demo", text, false))
		second, err := post(t.Context(), chat, chatBody("demo", text+" And then?", false))
		if err != nil || second.status != http.StatusOK {
			t.Fatalf("%d %s %v", second.status, second.body, err)
		}
		if second.target != first.target || !strings.Contains(second.target, "/") {
			t.Errorf("first turn at %q, second at %q with %s tokens from the cache\n%s", first.target, second.target, second.matched, c.decisions(t, in))
		}
		if got := fmt.Sprint(cached(t, second)); got != second.matched || got == "0" {
			t.Errorf("%s: %s tokens predicted as cached, the engine says %s", second.target, second.matched, got)
		}
		targets[second.target] = true
	}
	if len(targets) < 3 {
		t.Errorf("eight conversations went to %v only", targets)
	}
}

// bigBody sends 3 MiB and compares hashes.
func bigBody(t *testing.T, url string) {
	body := make([]byte, 3<<20)
	for i := range body {
		body[i] = 'a' + byte(rand.N(26))
	}
	sum := sha256.Sum256(body)
	for range 3 {
		r, err := post(t.Context(), url, body)
		if err != nil || r.status != http.StatusOK {
			t.Fatalf("%d %.300s %v", r.status, r.body, err)
		}
		var got struct {
			SHA256 string              `json:"sha256"`
			Bytes  int                 `json:"bytes"`
			Header map[string][]string `json:"headers"`
		}
		if err := json.Unmarshal(r.body, &got); err != nil {
			t.Fatal(err)
		}
		if got.Bytes != len(body) || got.SHA256 != hex.EncodeToString(sum[:]) {
			t.Errorf("%d bytes arrived, hash %s", got.Bytes, got.SHA256)
		}
		if !strings.HasPrefix(r.target, "echo-") {
			t.Errorf("served by %q", r.target)
		}
	}
}

// slowRenderer makes token ids after 17 s, so that the picker holds a request for
// longer than the 10 s that gateways set as timeout of the gRPC service.
func slowRenderer(t *testing.T) string {
	srv := &http.Server{Addr: hostIP + ":8900", Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-time.After(17 * time.Second):
		case <-r.Context().Done():
		}
		w.WriteHeader(http.StatusNotFound)
	})}
	go func() { _ = srv.ListenAndServe() }()
	t.Cleanup(func() { _ = srv.Close() })
	return "http://" + srv.Addr
}

func holds(t *testing.T, chat string) {
	began := time.Now()
	r, err := post(t.Context(), chat, chatBody("slow", "hold me", false))
	held := time.Since(began)
	if err != nil || r.status != http.StatusOK || r.target == "" {
		t.Errorf("%d %q %s %v", r.status, r.target, r.body, err)
	}
	if held < 17*time.Second {
		t.Errorf("held for %s only: the test did not test", held)
	}
}

// relabels takes a pod out of the pool and puts it back.
func relabels(t *testing.T, c *cluster, chat string) {
	s := c.node.sandboxes(ns, map[string]string{"app": "llm"})
	if len(s) != 2 {
		t.Fatalf("%d engines", len(s))
	}
	name := s[0].pod.Metadata.Name
	steady(t, chat, func() {
		for _, label := range []string{"app=out", "app=llm"} {
			// The Deployment must not make another pod in the meantime.
			c.kubectl(t, "", "scale", "deployment/llm", "--replicas=2")
			c.kubectl(t, "", "label", "pod/"+name, "--overwrite", label)
			time.Sleep(1500 * time.Millisecond)
		}
	})
	c.ready(t, ns, "llm", 2)
}

// pickerGone kills both pickers: at first the pods are listed and refuse, then there are
// none.
func pickerGone(t *testing.T, c *cluster, url string) {
	pickers := c.node.sandboxes(ns, map[string]string{"app": "kvlane"})
	if len(pickers) != 2 {
		t.Fatalf("%d pickers", len(pickers))
	}
	for _, s := range pickers {
		s.freeze()
		s.kill()
	}
	// Both pools are FailOpen. With bodies sent to the picker, Envoy does not fail open
	// once it has begun to send: the documented half of the promise.
	r, err := post(t.Context(), url+"/echo", []byte(`{}`))
	if err != nil || r.status != http.StatusInternalServerError {
		t.Errorf("refusing picker, POST: %d %v", r.status, err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+"/echo", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	if r, err := do(req); err != nil || r.status != http.StatusOK {
		t.Errorf("refusing picker, GET: %d %v", r.status, err)
	}
	r, err = post(t.Context(), url+"/stranger", []byte(`{}`))
	if err != nil || r.status != http.StatusInternalServerError {
		t.Errorf("refusing picker, FailClose: %d %v", r.status, err)
	}
	c.kubectl(t, "", "scale", "deployment/kvlane", "--replicas=0")
	eventually(t, 30*time.Second, "fail open without a picker", func() error {
		r, err := post(t.Context(), url+"/echo", bytes.Repeat([]byte("x"), 3<<20))
		if err != nil || r.status != http.StatusOK {
			return fmt.Errorf("%d %w", r.status, err)
		}
		return nil
	})
	neverByHeader(t, c, url+"/echo")
	if r, err := post(t.Context(), url+"/stranger", []byte(`{}`)); err != nil || r.status/100 != 5 {
		t.Errorf("absent picker, FailClose: %d %v", r.status, err)
	}
	c.kubectl(t, "", "scale", "deployment/kvlane", "--replicas=2")
	c.ready(t, ns, "kvlane", 2)
	routed(t, url+"/v1/chat/completions")
}
