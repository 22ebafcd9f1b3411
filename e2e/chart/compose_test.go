package chart

import (
	"encoding/json"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
)

const compose = root + "/docs/examples/compose"

// Docker's own code reads the example with docker-compose.yaml, Prometheus' own code its prometheus.yaml, and Envoy its envoy.yaml.
// What runs is in a test of cmd/kvlane.
func TestComposeFiles(t *testing.T) {
	t.Setenv("KVLANE_IMAGE", "registry.test/kvlane:v1")
	out, err := run(nil, tool("compose"), compose+"/docker-compose.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var project struct {
		Services map[string]struct {
			Image   string
			Volumes []struct{ Type, Source, Target string }
		}
	}
	if err := json.Unmarshal([]byte(out), &project); err != nil {
		t.Fatal(err)
	}
	if image := project.Services["kvlane"].Image; image != "registry.test/kvlane:v1" {
		t.Errorf("got the image %q, want KVLANE_IMAGE", image)
	}
	// Grafana loads the dashboards of the folder that its provider names, and the dashboard finds its data source by type.
	var providers struct{ Providers []object }
	decode(t, compose+"/grafana-dashboards.yaml", &providers)
	folder, mounted := text(providers.Providers[0], "options", "path"), false
	for _, v := range project.Services["grafana"].Volumes {
		mounted = mounted || path.Dir(v.Target) == folder && filepath.Base(v.Source) == "kvlane.json"
	}
	if !mounted {
		t.Errorf("got no dashboard mounted in %s, want the chart's", folder)
	}
	var sources struct{ Datasources []object }
	decode(t, compose+"/grafana-datasource.yaml", &sources)
	dashboard, err := os.ReadFile(chart + "/dashboards/kvlane.json")
	if kind := text(sources.Datasources[0], "type"); err != nil || !strings.Contains(string(dashboard), `"query": "`+kind+`"`) {
		t.Errorf("got a data source of the type %s, %v, want the one that the dashboard's variable asks for", kind, err)
	}
	if _, err := run(nil, tool("compose"), "--prometheus", compose+"/prometheus.yaml"); err != nil {
		t.Error(err)
	}
	if _, err := run(nil, envoy, "--mode", "validate", "--log-level", "error", "--config-path", compose+"/envoy.yaml"); err != nil {
		t.Error(err)
	}
}

// decode reads a YAML file.
func decode(t *testing.T, file string, into any) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(text, into); err != nil {
		t.Fatal(file, err)
	}
}

// Mistakes in these files that are valid YAML are found.
func TestComposeMistakes(t *testing.T) {
	for _, c := range []struct{ file, old, replaced string }{
		{"docker-compose.yaml", "stop_grace_period", "stop_grace_periods"},
		{"docker-compose.yaml", "- socket:/run/kvlane", "- sockets:/run/kvlane"},
		{"docker-compose.yaml", "depends_on: {kvlane:", "depends_on: {kvlanes:"},
		{"docker-compose.yaml", "30s ", "30 seconds "},
		{"prometheus.yaml", "metrics_path", "metric_path"},
		{"prometheus.yaml", "scrape_interval: 5s", "scrape_interval: 5"},
		{"prometheus.yaml", "type: A,", "type: AA,"},
	} {
		from, err := os.ReadFile(filepath.Join(compose, c.file))
		if err != nil || !strings.Contains(string(from), c.old) {
			t.Fatalf("%s: got no %q, %v", c.file, c.old, err)
		}
		args := []string{write(t, c.file, strings.ReplaceAll(string(from), c.old, c.replaced))}
		if c.file == "prometheus.yaml" {
			args = []string{"--prometheus", args[0]}
		}
		if _, err := run(nil, tool("compose"), args...); err == nil {
			t.Errorf("%s with %q: got no error, want one", c.file, c.replaced)
		}
	}
}
