package chart

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
)

// ownFiles are Kvlane's configuration and Envoy's bootstrap in what the chart renders.
func ownFiles(t *testing.T, rendered string) (config map[string]any, bootstrap string) {
	t.Helper()
	for _, o := range parse(t, rendered) {
		if file := text(o, "data", "kvlane.yaml"); file != "" {
			if err := yaml.Unmarshal([]byte(file), &config); err != nil {
				t.Fatal(err)
			}
		}
		bootstrap += text(o, "data", "envoy.yaml")
	}
	return config, bootstrap
}

// alone gives a configuration of the chart the secrets of a fleet and an address for it here,
// without other pods.
func alone(t *testing.T, config map[string]any) {
	t.Helper()
	embedded, ok := at(config, "fleet", "embedded").(map[string]any)
	if !ok {
		t.Fatalf("the chart's pods share nothing: %v", config["fleet"])
	}
	secret := write(t, "secret", "made up for a test")
	embedded["listen"], embedded["routes"], embedded["secret_file"] = free(t), []any{free(t)}, secret
	config["index"].(map[string]any)["key_file"] = secret
}

func get(t *testing.T, url string) int {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	return resp.StatusCode
}

// In mode standalone Envoy resolves the name of Kvlane's Service and gets its
// endpoints from there. Here an address stands for the name and the engine is a
// simulated one; everything else in both files is the chart's.
func TestStandaloneRuns(t *testing.T) {
	t.Parallel()
	ingress, ready, extProc, health, admin, engine, scraped := free(t), free(t), free(t), free(t), free(t), free(t), free(t)
	rendered, err := render("--values", chart+"/examples/standalone.yaml", "--set", fmt.Sprintf("proxy.port=%s,proxy.readinessPort=%s,extProcPort=%s,grpcHealthPort=%s,metricsPort=%s,monitoring.envoy.enabled=true,monitoring.envoy.port=%s",
		port(ingress), port(ready), port(extProc), port(health), port(admin), port(scraped)))
	if err != nil {
		t.Fatal(err)
	}
	config, bootstrap := ownFiles(t, rendered)
	config["workers"] = map[string]any{"static": []any{map[string]any{"address": engine}}}
	config["listen"] = map[string]any{"address": extProc, "health": health}
	config["admin"] = map[string]any{"address": admin}
	alone(t, config)
	stripped, err := yaml.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	for old, with := range map[string]string{
		"kvlane-extproc.llm.svc.cluster.local": "127.0.0.1",
		`"0.0.0.0"`:                            `"127.0.0.1"`,
		"port_value: 9901":                     "port_value: " + port(free(t)),
	} {
		if !strings.Contains(bootstrap, old) {
			t.Fatalf("the bootstrap has no %s", old)
		}
		bootstrap = strings.ReplaceAll(bootstrap, old, with)
	}
	launch(t, kvlane, "engine-sim", "--listen", engine, "--events", "", "--model", "Qwen/Qwen3-8B")
	launch(t, envoy, "--disable-hot-restart", "--concurrency", "1", "--log-level", "error", "--config-path", write(t, "envoy.yaml", bootstrap))
	// Without Kvlane there are no endpoints, and an Envoy without them is not ready.
	for range 600 {
		if isReady := probe(ready); isReady == http.StatusServiceUnavailable {
			break
		} else if isReady != 0 {
			t.Fatalf("an Envoy without endpoints says %d", isReady)
		}
		time.Sleep(200 * time.Millisecond)
	}
	if isReady := probe(ready); isReady != http.StatusServiceUnavailable {
		t.Fatalf("an Envoy without endpoints says %d", isReady)
	}
	launch(t, kvlane, "serve", "--config", write(t, "kvlane.yaml", string(stripped)))

	body := `{"model": "Qwen/Qwen3-8B", "messages": [{"role": "user", "content": "Say nothing."}]}`
	var status int
	var answer string
	for range 600 {
		if status, answer = post("http://"+ingress+"/v1/chat/completions", body); status == http.StatusOK {
			break
		}
		time.Sleep(200 * time.Millisecond)
	}
	if status != http.StatusOK || !strings.Contains(answer, `"choices"`) {
		t.Fatalf("status %d: %s", status, answer)
	}
	for range 600 {
		if probe(ready) == http.StatusOK {
			break
		}
		time.Sleep(200 * time.Millisecond)
	}
	if isReady := probe(ready); isReady != http.StatusOK {
		t.Errorf("an Envoy that serves says %d", isReady)
	}
	// Of Envoy's admin page its metrics are served, and nothing else. What `helm test` asks is answered.
	for path, want := range map[string]int{"/stats/prometheus": 200, "/stats/prometheus?usedonly": 200, "/": 404, "/config_dump": 404, "/stats": 404, "/stats/prometheus/../": 404} {
		if got := get(t, "http://"+scraped+path); got != want {
			t.Errorf("Envoy's metrics: GET %s: got status %d, want %d", path, got, want)
		}
	}
	if got, _ := post("http://"+scraped+"/stats/prometheus", ""); got != http.StatusNotFound {
		t.Errorf("Envoy's metrics: POST: got status %d, want 404", got)
	}
	for _, url := range []string{"http://" + admin + "/readyz", "http://" + ingress + "/v1/models"} {
		if _, err := run(nil, kvlane, "healthcheck", "--url", url); err != nil {
			t.Error(err)
		}
	}
	// The example fails closed: without a pick there would have been no answer.
	page, err := http.Get("http://" + admin + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer page.Body.Close()
	metrics, err := io.ReadAll(page.Body)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(metrics), `outcome="routed"`) {
		t.Error("Kvlane has routed nothing")
	}
}

// probe is the status that the kubelet gets of Envoy, 0 for none.
func probe(address string) int {
	resp, err := http.Get("http://" + address + "/ready")
	if err != nil {
		return 0
	}
	defer resp.Body.Close()
	return resp.StatusCode
}

func post(url, body string) (status int, answer string) {
	resp, err := http.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err.Error()
	}
	return resp.StatusCode, string(text)
}

func port(address string) string { return address[strings.LastIndexByte(address, ':')+1:] }

// launch runs a program until the test ends and shows its log if that failed.
func launch(t *testing.T, name string, args ...string) {
	t.Helper()
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(name, args...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		_ = log.Close()
		if content, err := os.ReadFile(log.Name()); err == nil && t.Failed() {
			t.Logf("%s %s ended with:\n%s", filepath.Base(name), args[0], content[max(0, len(content)-2000):])
		}
	})
}
