package chart

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The examples of autoscalers fit strict schemas, and ask for metrics that exist.
func TestScalingExamples(t *testing.T) {
	t.Parallel()
	known, values := metrics(t), words(t)
	values["Qwen/Qwen3-8B"] = true
	files, err := filepath.Glob(chart + "/examples/scaling/*.yaml")
	if err != nil || len(files) != 2 {
		t.Fatalf("got %v, %v, want 2 files", files, err)
	}
	var queries []string
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		objects := parse(t, string(content))
		conform(t, string(content), len(objects))
		for _, o := range objects {
			for _, trigger := range list(o, "spec", "triggers") {
				queries = append(queries, text(trigger, "metadata", "query"))
			}
			for _, metric := range list(o, "spec", "metrics") {
				queries = append(queries, text(metric, "external", "metric", "name"))
			}
		}
	}
	if len(queries) != 4 {
		t.Errorf("got %d queries, want 4", len(queries))
	}
	for _, q := range queries {
		checkSeries(t, "scaling", q, known, values)
	}
	if out, err := run(strings.NewReader(strings.Join(queries, "\n")), tool("promql")); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
