package chart

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	// The sources name metrics in calls and in tables, always without the prefix.
	literal = regexp.MustCompile(`"([a-z]+(?:_[a-z]+)+)"`)
	used    = regexp.MustCompile(`kvlane_[a-z_]+`)
	series  = regexp.MustCompile(`_(bucket|sum|count)$`)
	label   = regexp.MustCompile(`(?:by|on) \(([a-z, ]+)\)`)
)

// metrics are the names in the sources that may be metrics: every metric is among
// them.
func metrics(t *testing.T) []string {
	t.Helper()
	var names []string
	for _, dir := range []string{"internal/telemetry", "internal/decide", "internal/gateway"} {
		err := filepath.WalkDir(filepath.Join(root, dir), func(path string, d os.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			source, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			for _, m := range literal.FindAllStringSubmatch(string(source), -1) {
				names = append(names, "kvlane_"+m[1])
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if len(names) < 30 {
		t.Fatalf("found only the metrics %v", names)
	}
	return names
}

// Expressions of alerts and panels parse, and ask for metrics that exist.
func TestExpressions(t *testing.T) {
	known := metrics(t)
	expressions := map[string]string{}
	for _, o := range monitored(t) {
		for i, rule := range list(o, "spec", "groups", 0, "rules") {
			expressions["alert "+text(o, "spec", "groups", 0, "rules", i, "alert")] = text(rule, "expr")
		}
		if dashboard := text(o, "data", "kvlane.json"); dashboard != "" {
			var d struct {
				Panels []struct {
					Title   string
					Targets []struct{ Expr string }
				}
			}
			if err := json.Unmarshal([]byte(dashboard), &d); err != nil {
				t.Fatal(err)
			}
			for _, p := range d.Panels {
				for i, target := range p.Targets {
					expressions["panel "+p.Title+string(rune('A'+i))] = strings.ReplaceAll(target.Expr, "$__rate_interval", "5m")
				}
			}
		}
	}
	if len(expressions) < 40 {
		t.Fatalf("found only %d expressions", len(expressions))
	}
	var all []string
	for where, e := range expressions {
		all = append(all, e)
		for _, name := range used.FindAllString(e, -1) {
			if !slices.Contains(known, name) && !slices.Contains(known, series.ReplaceAllString(name, "")) {
				t.Errorf("%s: no metric %s", where, name)
			}
		}
	}
	if out, err := run(strings.NewReader(strings.Join(all, "\n")), tool("promql")); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// What a summary says of an alert is a label that its expression keeps.
func TestAlertLabels(t *testing.T) {
	mentioned := regexp.MustCompile(`\$labels\.([a-z]+)`)
	n := 0
	for _, o := range monitored(t) {
		for _, rule := range list(o, "spec", "groups", 0, "rules") {
			n++
			var kept []string
			for _, m := range label.FindAllStringSubmatch(text(rule, "expr"), -1) {
				kept = append(kept, strings.Split(m[1], ", ")...)
			}
			for _, m := range mentioned.FindAllStringSubmatch(text(rule, "annotations", "summary"), -1) {
				if !slices.Contains(kept, m[1]) {
					t.Errorf("%s: its summary has the label %s, its expression keeps %v", text(rule, "alert"), m[1], kept)
				}
			}
			if s := text(rule, "labels", "severity"); s != "warning" && s != "critical" {
				t.Errorf("%s has severity %q", text(rule, "alert"), s)
			}
		}
	}
	if n < 10 {
		t.Errorf("only %d alerts", n)
	}
}

func monitored(t *testing.T) []object {
	t.Helper()
	rendered, err := render("--set", "modelServers.matchLabels.app=models,monitoring.rules.enabled=true,monitoring.dashboard.enabled=true")
	if err != nil {
		t.Fatal(err)
	}
	return parse(t, rendered)
}
