package chart

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
)

// In mode sidecar Envoy and Kvlane share a folder with sockets; with a connector one of
// them is Envoy's listener for prefill legs. Here two simulated engines prefill and two
// decode, and addresses stand for pods; everything else in both files is the chart's.
func TestSidecarRunsPrefillAndDecode(t *testing.T) {
	t.Parallel()
	ingress, health, admin, envoyAdmin := free(t), free(t), free(t), free(t)
	rendered, err := render("--values", chart+"/examples/sidecar.yaml", "--set", fmt.Sprintf("proxy.port=%s,grpcHealthPort=%s,metricsPort=%s", port(ingress), port(health), port(admin)),
		"--set", "config.explain.header=true,config.routing.disagg.mode=threshold,config.routing.disagg.threshold=64")
	if err != nil {
		t.Fatal(err)
	}
	config, bootstrap := ownFiles(t, rendered)
	sockets, err := os.MkdirTemp("", "kvc") // a Unix socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(sockets) })
	var workers []any
	engines := map[string]string{} // side listeners by name
	for _, name := range []string{"prefill-0", "prefill-1", "decode-0", "decode-1"} {
		role, _, _ := strings.Cut(name, "-")
		address, side := free(t), free(t)
		launch(t, kvlane, "engine-sim", "--listen", address, "--side-listen", side, "--events", "", "--model", "Qwen/Qwen3-8B", "--role", role)
		workers = append(workers, map[string]any{"name": name, "address": address, "role": role})
		engines[name] = side
	}
	config["workers"] = map[string]any{"static": workers}
	config["models"] = []any{map[string]any{"name": "Qwen/Qwen3-8B"}}
	config["admin"] = map[string]any{"address": admin}
	alone(t, config)
	stripped, err := yaml.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	file := strings.ReplaceAll(string(stripped), "/run/kvlane/", sockets+"/")
	if !strings.Contains(file, sockets+"/prefill.sock") || !strings.Contains(file, sockets+"/kvlane.sock") {
		t.Fatalf("the sockets are not in\n%s", file)
	}
	for old, with := range map[string]string{
		"/run/kvlane/":     sockets + "/",
		`"0.0.0.0"`:        `"127.0.0.1"`,
		"port_value: 9901": "port_value: " + port(envoyAdmin),
	} {
		if !strings.Contains(bootstrap, old) {
			t.Fatalf("the bootstrap has no %s", old)
		}
		bootstrap = strings.ReplaceAll(bootstrap, old, with)
	}
	launch(t, kvlane, "serve", "--config", write(t, "kvlane.yaml", file))
	launch(t, envoy, "--disable-hot-restart", "--concurrency", "1", "--log-level", "error", "--config-path", write(t, "envoy.yaml", bootstrap))

	// ask returns which worker served a prompt of that many words, "" if none did.
	ask := func(n, words int) (status int, target, prefill, answer string) {
		body, err := json.Marshal(map[string]any{"model": "Qwen/Qwen3-8B", "prompt": fmt.Sprint("number ", n, strings.Repeat(" and so on", words/3)), "max_tokens": 4})
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.Post("http://"+ingress+"/v1/completions", "application/json", strings.NewReader(string(body)))
		if err != nil {
			return 0, "", "", err.Error()
		}
		defer resp.Body.Close()
		all, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, resp.Header.Get("X-Kvlane-Target"), resp.Header.Get("X-Kvlane-Prefill"), string(all)
	}
	page := func(address, path string) string {
		resp, err := http.Get("http://" + address + path)
		if err != nil {
			return err.Error()
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	for n := 0; ; n++ {
		metrics := page(admin, "/metrics")
		ready := 0
		for line := range strings.Lines(metrics) {
			if strings.HasPrefix(line, "kvlane_worker_ready{") && strings.HasSuffix(line, " 1\n") {
				ready++
			}
		}
		if status, target, _, _ := ask(-n, 3); ready == len(workers) && status == http.StatusOK && target != "" {
			break
		}
		if n == 600 {
			t.Fatalf("never ready: %s", metrics)
		}
		time.Sleep(200 * time.Millisecond)
	}
	const split = 8
	on := map[string]int{}
	for n := range split {
		status, target, prefill, answer := ask(n, 300)
		if status != http.StatusOK || !strings.HasPrefix(target, "decode-") || !strings.HasPrefix(prefill, "prefill-") {
			t.Fatalf("status %d, prefilled on %q, decoded on %q: %s", status, prefill, target, answer)
		}
		on[prefill]++
	}
	legs := 0
	for name, side := range engines {
		var stats struct {
			Requests []struct {
				Leg    string `json:"leg"`
				Remote int    `json:"remote_tokens"`
			} `json:"requests"`
			Protocol map[string]int `json:"protocol"`
		}
		if err := json.Unmarshal([]byte(page(side, "/sim/stats")), &stats); err != nil {
			t.Fatal(err)
		}
		for _, r := range stats.Requests {
			role, _, _ := strings.Cut(name, "-")
			if r.Leg != "" && r.Leg != role || r.Leg == "" && role == "prefill" || r.Leg == "decode" && r.Remote < 200 {
				t.Errorf("%s saw %+v", name, r)
			}
			if r.Leg != "" {
				legs++
			}
		}
		for what := range stats.Protocol {
			if strings.HasPrefix(what, "violation") {
				t.Errorf("%s saw: %s", name, what)
			}
		}
	}
	if legs != 2*split || len(on) != 2 {
		t.Errorf("%d legs, prefilled on %v", legs, on)
	}
	// The legs went through Envoy's listener.
	count := page(envoyAdmin, "/stats?filter=^http.prefill.downstream_rq_2xx")
	if want := fmt.Sprintf("http.prefill.downstream_rq_2xx: %d\n", split); count != want {
		t.Errorf("%s, want %s", count, want)
	}
}
