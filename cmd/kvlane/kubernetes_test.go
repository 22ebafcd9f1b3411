package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/routing"
)

// A request that the gate refuses counts in kvlane_requests_total too: alerts use shares of
// it.
func TestRefusedPoolsAreCountedAsRequests(t *testing.T) {
	m := observe.New("test")
	d := (&kubernetes{}).gate(nil, m).Decide(t.Context(), &extproc.Request{Method: "POST", Path: "/v1/chat/completions"})
	if d.Reject == nil || d.Reject.Status != 503 {
		t.Fatalf("without a pool: %+v", d)
	}
	if n := testutil.ToFloat64(m.Rejected.WithLabelValues("503", "kvlane_other_pool")); n != 1 {
		t.Errorf("rejected %v", n)
	}
	if n := testutil.ToFloat64(m.Requests.WithLabelValues("chat", "rejected")); n != 1 {
		t.Errorf("requests rejected %v", n)
	}
}

// pools is an API server that has InferencePools by name, and no pods. Changes appear in
// lists only: its watches end immediately.
type pools struct {
	mu         sync.Mutex
	known      string // "" for none
	objectives string // the items of their list
}

// ServeHTTP implements http.Handler.
func (p *pools) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	if r.URL.Query().Get("watch") == "true" {
		if r.URL.Query().Get("sendInitialEvents") == "true" {
			w.WriteHeader(http.StatusUnprocessableEntity)
			fmt.Fprint(w, `{"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": "Invalid", "code": 422}`)
		} else {
			fmt.Fprint(w, `{"type": "ERROR", "object": {"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": "Expired", "code": 410}}`)
		}
		return
	}
	if strings.HasSuffix(r.URL.Path, "/pods") {
		fmt.Fprint(w, `{"apiVersion": "v1", "kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": []}`)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if strings.HasSuffix(r.URL.Path, "/inferenceobjectives") {
		fmt.Fprintf(w, `{"apiVersion": "llm-d.ai/v1alpha2", "kind": "InferenceObjectiveList", "metadata": {"resourceVersion": "1"}, "items": [%s]}`, p.objectives)
		return
	}
	items := ""
	if p.known != "" && r.URL.Query().Get("fieldSelector") == "metadata.name="+p.known {
		items = fmt.Sprintf(`{"metadata": {"name": %q, "namespace": "ns"}, "spec": {"selector": {"matchLabels": {"app": "x"}}, "targetPorts": [{"number": 8000}]}}`, p.known)
	}
	fmt.Fprintf(w, `{"apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePoolList", "metadata": {"resourceVersion": "1"}, "items": [%s]}`, items)
}

// page requests a page.
func page(t *testing.T, url string) (status int, body string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

// until polls a page until it is as wanted.
func until(t *testing.T, url string, want func(status int, body string) bool) (status int, body string) {
	t.Helper()
	for deadline := time.Now().Add(4 * time.Minute); ; time.Sleep(5 * time.Millisecond) {
		if status, body = page(t, url); want(status, body) {
			return status, body
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s stays %d: %s", url, status, body)
		}
	}
}

// accessTo starts an API server and returns a kubeconfig for it.
func accessTo(t *testing.T, api http.Handler) string {
	t.Helper()
	server := httptest.NewServer(api)
	t.Cleanup(server.Close)
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(file, fmt.Appendf(nil, `{"apiVersion": "v1", "kind": "Config", "current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "k"}}], "clusters": [{"name": "k", "cluster": {"server": %q}}]}`, server.URL), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// The priority of an InferenceObjective in the cluster is that of a decision for a request that names it, if names are trusted.
func TestPrioritiesOfTheClusterReachDecisions(t *testing.T) {
	api := &pools{objectives: `{"metadata": {"name": "batch", "namespace": "ns"}, "spec": {"priority": -3, "poolRef": {"name": "llm"}}}`}
	for _, trusted := range []bool{true, false} {
		t.Run(fmt.Sprint("trusted ", trusted), func(t *testing.T) { // one at a time: the logger of client-go is the process's
			s, admin, _ := started(t, fmt.Sprintf(`routing: {trust_objectives: %v}
workers:
  health: {every: 0}
  static: [{name: a, address: "127.0.0.1:9"}]
  kubernetes: {selector: {app: x}, ports: [8000], namespace: ns, kubeconfig: %q, never_ask: true, objectives: [llm-d.ai]}
`, trusted, accessTo(t, api)))
			until(t, admin+"/metrics", func(_ int, body string) bool { return strings.Contains(body, "\nkvlane_objectives 1\n") })
			until(t, admin+"/readyz", func(status int, _ string) bool { return status == http.StatusOK })
			resp, err := http.Post(admin+"/debug/record?n=9", "", nil)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			for id, want := range map[string]int{"batch": -3, "unknown": 0} {
				d := s.decider.Decide(t.Context(), &extproc.Request{ID: id, Method: "POST", Path: "/v1/completions", Received: time.Now(),
					Headers: []extproc.Header{{Name: "x-llm-d-inference-objective", Value: id}}, Body: []byte(`{"model": "m", "prompt": "Hello"}`)})
				if d.Reject != nil {
					t.Fatalf("%s: refused: %+v", id, d.Reject)
				}
				if !trusted {
					want = 0
				}
				var recorded routing.Decision
				_, text := page(t, admin+"/debug/decisions/"+id+"/export")
				if err := json.Unmarshal([]byte(text), &recorded); err != nil || recorded.Query.ID != id || recorded.Query.Priority != want {
					t.Errorf("trusted %v, %s: got %v, %s, want priority %d", trusted, id, err, text, want)
				}
			}
		})
	}
}

// A pool that is misspelt, or was deleted, does not stop new replicas from serving the
// others; without any existing pool there is nothing to serve.
func TestReadyWithThePoolsThatExist(t *testing.T) {
	api := &pools{}
	s, admin, _ := started(t, fmt.Sprintf("workers: {kubernetes: {pools: [llm, ghost], namespace: ns, kubeconfig: %q, never_ask: true}}\n", accessTo(t, api)))
	status, _ := until(t, admin+"/readyz", func(_ int, body string) bool { return strings.Contains(body, "there is no InferencePool ns/llm") })
	if status != http.StatusServiceUnavailable {
		t.Errorf("without any pool: status %d", status)
	}
	api.mu.Lock()
	api.known = "llm"
	api.mu.Unlock()
	_, body := until(t, admin+"/readyz", func(status int, _ string) bool { return status == http.StatusOK })
	if want := "ok\nwarning: there is no InferencePool ns/ghost: requests for it are answered 503\n"; !strings.HasPrefix(body, want) {
		t.Errorf("%q, want %q", body, want)
	}
	_, metrics := page(t, admin+"/metrics")
	for _, want := range []string{`kvlane_pool_exists{pool="ns/llm"} 1`, `kvlane_pool_exists{pool="ns/ghost"} 0`} {
		if !strings.Contains(metrics, want) {
			t.Errorf("no %s", want)
		}
	}
	// Requests of the missing pool are refused, as before.
	if d := s.kube.gate(s.decider, observe.New("test")).Decide(t.Context(), &extproc.Request{Method: "POST", Path: "/v1/chat/completions"}); d.Reject == nil || d.Reject.Status != 503 {
		t.Errorf("a request for no pool that is known: %+v", d)
	}
}

// The command lines of the charts of GAIE and llm-d start Kvlane.
func TestFlagsOfOtherEndpointPickers(t *testing.T) {
	for text, want := range map[string]struct {
		listen, health, admin, pool, cert string
		selector                          string
		ports                             []int
		ignored                           int
	}{
		"--pool-name p --pool-namespace ns --pool-group inference.networking.k8s.io --zap-encoder json --grpc-port 9002 --grpc-health-port 9003 --metrics-port 9090 --v 3 --secure-serving=false --tracing=false --ha-enable-leader-election --kv-cache-usage-percentage-metric vllm:kv_cache_usage_perc": {
			":9002", ":9003", ":9090", "p", "", "", nil, 7},
		"--pool-name p --pool-namespace ns --pool-group inference.networking.x-k8s.io --grpc-port 9002 --grpc-health-port 9003 --metrics-port 9090 --secure-serving --model-server-metrics-scheme https --model-server-metrics-https-insecure-skip-verify --cert-path /var/run/kserve/tls": {
			":9002", ":9003", ":9090", "p", "/var/run/kserve/tls/tls.crt", "", nil, 4},
		"--pool-name p --cache-info-metric m --model-server-metrics-path /m --model-server-metrics-port 1 --refresh-prometheus-metrics-interval 5s --enable-grpc-stream-metrics=true --disable-endpoint-subset-filter --emit-endpoint-scores --enable-plugin-state-debug --engine-label-key k --grpc-max-recv-msg-size 1 --grpc-max-send-msg-size 1 --drain-timeout 1s --zap-devel --zap-stacktrace-level error --zap-time-encoding iso8601 --metrics-port 9090": {
			":9002", "", ":9090", "p", "", "", nil, 15},
		"--pool-name p --allow-experimental-plugins --tls-min-version VersionTLS13 --tls-cipher-suites TLS_AES_128_GCM_SHA256 --metrics-cert-dir /c --metrics-client-ca-file /ca": {
			":9002", "", "127.0.0.1:9090", "p", "", "", nil, 4},
		"--endpoint-selector app=a,tier=b --endpoint-target-ports 8000,8001 --cert-path /etc/tls --enable-cert-reload --health-checking --bind 10.0.0.1 --metrics-port 9091": {
			"unix:/run/kvlane/kvlane.sock", "", "10.0.0.1:9091", "", "/etc/tls/tls.crt", "app=a,tier=b", []int{8000, 8001}, 2},
		"--endpoint-selector=app~in~(a,b),tier!=c,!draft --endpoint-target-ports 8000": {
			":9002", "", "127.0.0.1:9090", "", "", "app in (a,b),tier!=c,!draft", []int{8000}, 0},
	} {
		f := flags("serve")
		k := kubernetesFlags(f)
		args := strings.Fields(text)
		for i := range args {
			args[i] = strings.ReplaceAll(args[i], "~", " ")
		}
		if err := f.Parse(args); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		c, _, err := k.load("")
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		if want.pool == "" && k.port == 9002 { // the default without a file
			want.listen = net.JoinHostPort(k.bind, "9002")
		}
		s := c.Workers.Kubernetes
		if c.Listen.Address != want.listen || c.Listen.Health != want.health || c.Admin.Address != want.admin || strings.Join(s.Pools, "") != want.pool || c.Listen.CertFile != want.cert || (c.Listen.MinTLS == "VersionTLS13") != strings.Contains(text, "VersionTLS13") ||
			len(s.Selector) > 0 || s.LabelSelector != want.selector || !slices.Equal(s.Ports, want.ports) || len(k.ignored) != want.ignored {
			t.Errorf("%s: got %+v, %+v, %+v, ignored %q, want %+v", text, c.Listen, c.Admin, s, k.ignored, want)
		}
	}
}
