package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

// forwards reports whether Envoy lists the worker as an endpoint.
func (b *bed) forwards(address string) bool {
	b.t.Helper()
	resp, err := http.Get("http://" + b.envoyAdmin + "/clusters?format=json")
	if err != nil {
		b.t.Fatal(err)
	}
	defer resp.Body.Close()
	var page struct {
		Clusters []struct {
			Name  string `json:"name"`
			Hosts []struct {
				Address struct {
					Socket struct {
						Address string `json:"address"`
						Port    int    `json:"port_value"`
					} `json:"socket_address"`
				} `json:"address"`
			} `json:"host_statuses"`
		} `json:"cluster_statuses"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&page); err != nil {
		b.t.Fatal(err)
	}
	for _, c := range page.Clusters {
		if c.Name != "model_servers" {
			continue
		}
		for _, h := range c.Hosts {
			if fmt.Sprintf("%s:%d", h.Address.Socket.Address, h.Address.Socket.Port) == address {
				return true
			}
		}
		return false
	}
	b.t.Fatal("Envoy has no cluster model_servers")
	return false
}

// follows waits until Kvlane lists (or does not list) a worker and then until Envoy does,
// and logs the delay. The second wait only fails if the state would last forever: on a busy
// machine a shorter bound means nothing.
func (b *bed) follows(what, worker, address string, there bool) {
	b.t.Helper()
	b.until(what+" in Kvlane's view", func() bool {
		return (b.metric("kvlane_worker_ready", fmt.Sprintf("worker=%q", worker)) == 1) == there
	})
	seen := time.Now()
	b.until(what+" in Envoy's view", func() bool { return b.forwards(address) == there })
	b.t.Logf("%s: in Envoy %d ms after Kvlane's metrics said so", what, time.Since(seen).Milliseconds())
}

// A worker that is added to a watched file, removed, dies or returns also does so in Envoy;
// running answers of a removed one continue.
func TestWorkersComeAndGo(t *testing.T) {
	b := newBed(t, shape{engines: 1, ranks: 1, engine: slow(10 * time.Millisecond)})
	b.stopKvlane(syscall.SIGTERM)
	workers := func(lines ...string) { b.write("workers.yaml", strings.Join(lines, "")) }
	entry := func(line string) string { return strings.Replace(line, "  - {", "- {", 1) }
	one := entry(fmt.Sprintf("  - {name: e0, address: %q, models: [demo]}\n", b.engines[0].Addr()))
	two := entry(b.startEngine(1))
	workers(one, two) // so that the initial state does not count as leaked
	text := b.read("kvlane.yaml")
	b.write("kvlane.yaml", text[:strings.Index(text, "  static:")]+"  file: "+b.file("workers.yaml")+"\n")
	b.startKvlane()
	first, second := b.engines[0].Addr(), b.engines[1].Addr()
	b.follows("the first worker", "e0", first, true)
	b.follows("the second worker", "e1", second, true)
	workers(one)
	b.follows("the second worker's leave", "e1", second, false)
	b.chat(message{"user", "x"})
	workers(one, two)
	b.follows("the second worker's return", "e1", second, true)
	b.until("the newcomer serves", func() bool {
		return strings.HasPrefix(b.chat(message{"user", prose(time.Now().String(), 20)}).target, "e1")
	})
	if err := b.engines[1].SetFaults(enginesim.Faults{Refuse: true}); err != nil {
		t.Fatal(err)
	}
	b.follows("the second worker's death", "e1", second, false)
	if err := b.engines[1].SetFaults(enginesim.Faults{}); err != nil {
		t.Fatal(err)
	}
	b.follows("the second worker's new life", "e1", second, true)

	b.until("nothing runs", func() bool { return b.metric("kvlane_active_requests") == 0 })
	running := make(chan error, 1)
	go func() {
		r, err := b.send("/v1/completions", []byte(`{"model":"demo","stream":true,"max_tokens":150,"prompt":"`+prose("long", 20)+`"}`))
		if err == nil && !bytes.Contains(r.body, []byte("[DONE]")) {
			err = fmt.Errorf("status %d: %s", r.status, r.body)
		}
		running <- err
	}()
	b.until("it runs", func() bool { return b.metric("kvlane_active_requests") > 0 })
	workers("[]\n")
	b.follows("the first worker's leave", "e0", first, false)
	b.follows("the second worker's second leave", "e1", second, false)
	b.until("nobody is left", func() bool {
		r, err := b.send("/v1/completions", []byte(`{"model":"demo","prompt":"x","max_tokens":1}`))
		return err == nil && r.status == http.StatusServiceUnavailable
	})
	if err := <-running; err != nil {
		t.Errorf("the running answer of a removed worker: %v", err)
	}
	workers(one, two)
	b.sound()
}
