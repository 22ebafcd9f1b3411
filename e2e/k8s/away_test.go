//go:build linux

package k8s

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// warmsUp adds a replica of Kvlane after engines have published many events: when it
// reports ready, it must hold the same state of each engine as the others.
func warmsUp(t *testing.T, c *cluster, in, chat string) {
	for i := range 6 {
		c.ask(t, in, chat, chatBody("demo", essay(fmt.Sprint("warm ", i), 120), false))
	}
	const tries, bound = 3, 10 * time.Second // a replica waits for feeds this long at most
	for try := 1; ; try++ {
		known := map[string]uint64{}
		var before []string
		for pod, next := range c.cursors(t, in) {
			before = append(before, pod)
			for target, n := range next {
				known[target] = max(known[target], n)
			}
		}
		c.kubectl(t, "", "-n", in, "scale", "deployment/kvlane", fmt.Sprint("--replicas=", len(before)+1))
		var reasons []string
		var began time.Time
		var pod string
		eventually(t, reasonable, "a further replica of Kvlane", func() error {
			for _, s := range c.node.pickers(in) {
				if slices.Contains(before, s.ip) {
					continue
				}
				r, err := c.readiness(t, s)
				if err != nil {
					return err
				}
				if began.IsZero() {
					began = time.Now()
				}
				if why := strings.TrimSpace(string(r.body)); r.status != http.StatusOK {
					if !slices.Contains(reasons, why) {
						reasons = append(reasons, why)
					}
					return fmt.Errorf("%s", why)
				}
				pod = s.ip
				return nil
			}
			return fmt.Errorf("no pod")
		})
		took := time.Since(began)
		now := c.cursors(t, in)[pod]
		var late []string
		for target, n := range known {
			if now[target] < n {
				late = append(late, fmt.Sprintf("%s up to %d, others %d", target, now[target], n))
			}
		}
		t.Logf("ready after %s, having said %q", took.Round(time.Millisecond), reasons)
		c.kubectl(t, "", "-n", in, "scale", "deployment/kvlane", fmt.Sprint("--replicas=", len(before)))
		c.ready(t, in, "kvlane", len(before))
		eventually(t, reasonable, "the end of the further replica", func() error { return c.node.leaving(in) })
		switch {
		case len(late) > 0 && took >= bound && try < tries:
			t.Logf("the machine was so slow that it stopped waiting: %q; once more", late)
		case len(late) > 0:
			t.Fatalf("ready after %s, and has read %q", took, late)
		default:
			return
		}
	}
}

// apiServerGone stops the API server under load, as an upgrade of the control plane
// does, and changes the engines when it is back.
func apiServerGone(t *testing.T, c *cluster, in, chat string) {
	steady(t, chat, func() {
		c.stop(t, "kube-apiserver")
		time.Sleep(3 * time.Second)
		c.startAPIServer(t)
		c.kubectl(t, "", "-n", in, "scale", "deployment/llm", "--replicas=3")
		c.ready(t, in, "llm", 3)
	})
	// All replicas follow again: each knows the newcomer.
	eventually(t, reasonable, "the new pod in every replica's index", func() error {
		pods := map[string]bool{}
		for _, s := range c.node.sandboxes(in, map[string]string{"app": "llm"}) {
			pods[s.pod.Metadata.Name] = true
		}
		for picker, next := range c.cursors(t, in) {
			seen := map[string]bool{}
			for target := range next {
				name, _, _ := strings.Cut(target, ":")
				seen[name] = true
			}
			for name := range pods {
				if !seen[name] {
					return fmt.Errorf("%s does not know %s", picker, name)
				}
			}
		}
		return nil
	})
	c.kubectl(t, "", "-n", in, "scale", "deployment/llm", "--replicas=2")
	c.ready(t, in, "llm", 2)
	routed(t, chat)
}

// firstRead calls f before the first byte is read.
type firstRead struct {
	io.Reader
	f    func()
	once sync.Once
}

func (r *firstRead) Read(p []byte) (int, error) {
	r.once.Do(r.f)
	return r.Reader.Read(p)
}

// expects sends a body with "Expect: 100-continue" and reports whether the client got 100
// Continue before it sent the body. Otherwise it sends the body after two seconds, and may
// get it later.
func expects(ctx context.Context, url string) (bool, error) {
	var told, toldFirst atomic.Bool
	body := &firstRead{Reader: bytes.NewReader(bytes.Repeat([]byte("x"), 2<<20)), f: func() { toldFirst.Store(told.Load()) }}
	req, err := http.NewRequestWithContext(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{Got100Continue: func() { told.Store(true) }}), http.MethodPost, url, body)
	if err != nil {
		return false, err
	}
	req.ContentLength = 2 << 20
	req.Header.Set("Expect", "100-continue")
	transport := &http.Transport{ExpectContinueTimeout: 2 * time.Second}
	defer transport.CloseIdleConnections()
	resp, err := (&http.Client{Transport: transport, Timeout: time.Minute}).Do(req)
	if err != nil {
		return false, err
	}
	defer resp.Body.Close()
	var got struct {
		Bytes int `json:"bytes"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&got); err != nil {
		return false, err
	}
	if resp.StatusCode != http.StatusOK || got.Bytes != 2<<20 {
		return false, fmt.Errorf("status %d, %d bytes arrived", resp.StatusCode, got.Bytes)
	}
	return toldFirst.Load(), nil
}

// expectation waits until clients get 100 Continue, or do not.
func expectation(t *testing.T, url string, want bool) {
	t.Helper()
	eventually(t, reasonable, fmt.Sprintf("100-continue: %v", want), func() error {
		told, err := expects(t.Context(), url)
		if err == nil && told != want {
			err = fmt.Errorf("told: %v", told)
		}
		return err
	})
}

// hangs stops all replicas of Kvlane for 8 s. Istio asks them full duplex, where Envoy has no timeout of its own: requests
// that they hold fail, but none waits for the end, and later ones continue without Kvlane.
func hangs(t *testing.T, c *cluster, in, chat string) {
	const stopped, bound = 8 * time.Second, 6 * time.Second
	c.envoyKnows(t, in, "llm", "outbound|9002||kvlane."+in+".svc.cluster.local", `"service_name": "readiness"`, true)
	tell := func(s syscall.Signal) {
		for _, pod := range c.node.pickers(in) {
			for _, p := range pod.procs {
				if err := p.Process.Signal(s); err != nil {
					t.Error(err)
				}
			}
		}
	}
	tell(syscall.SIGSTOP)
	began, last := time.Now(), 0
	for time.Since(began) < stopped {
		sent := time.Now()
		r, err := post(t.Context(), chat, chatBody("demo", "hello", false))
		if took := time.Since(sent); took > bound {
			t.Errorf("a request took %s (%d, %v), want less than %s while Kvlane is stopped for %s", took, r.status, err, bound, stopped)
		}
		last = r.status
		time.Sleep(50 * time.Millisecond)
	}
	tell(syscall.SIGCONT)
	if last != http.StatusOK {
		t.Errorf("the last request before Kvlane continued got %d, want 200 without it", last)
	}
	routed(t, chat)
}

// proxied100 is what ENABLE_100_CONTINUE_HEADERS=true, istiod's default, does to a
// gateway's listeners.
const proxied100 = `{apiVersion: networking.istio.io/v1alpha3, kind: EnvoyFilter, metadata: {name: proxied-100}, spec: {workloadSelector: {labels: {gateway.networking.k8s.io/gateway-name: llm}},
configPatches: [{applyTo: NETWORK_FILTER, match: {context: GATEWAY, listener: {filterChain: {filter: {name: envoy.filters.network.http_connection_manager}}}},
patch: {operation: MERGE, value: {typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager, proxy_100_continue: true}}}}]}}`

// continues plays the caveat of the page for Istio, with istiod's setting and
// without.
func continues(t *testing.T, c *cluster, url string) {
	expectation(t, url, true)
	c.applyText(t, proxied100)
	expectation(t, url, false)
	c.kubectl(t, "", "delete", "envoyfilter/proxied-100")
	expectation(t, url, true)
}
