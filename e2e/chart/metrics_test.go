package chart

import (
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

var (
	// A row of docs/reference/metrics.md, which is generated from the sources.
	row     = regexp.MustCompile("(?m)^\\| `(kvlane_[a-z_]+)` \\| [a-z]+ \\| ([a-z, ]*) ?\\| .+ \\|$")
	used    = regexp.MustCompile(`(kvlane_[a-z_]+)(?:\{([^}]*)\})?`)
	matcher = regexp.MustCompile(`([a-z_]+)(=~|!~|!=|=)"([^"]*)"`)
	series  = regexp.MustCompile(`_(bucket|sum|count)$`)
	label   = regexp.MustCompile(`(?:by|on) \(([a-z, ]+)\)`)
)

// targetLabels are those that Prometheus gives to all series of a target.
var targetLabels = []string{"namespace", "job", "pod", "le"}

// metrics are the labels of each metric.
func metrics(t *testing.T) map[string][]string {
	t.Helper()
	page, err := os.ReadFile(filepath.Join(root, "docs/reference/metrics.md"))
	if err != nil {
		t.Fatal(err)
	}
	known := map[string][]string{}
	for _, m := range row.FindAllStringSubmatch(string(page), -1) {
		known[m[1]] = strings.Split(strings.TrimSpace(m[2]), ", ")
	}
	if len(known) < 60 {
		t.Fatalf("found only %d metrics", len(known))
	}
	return known
}

// words are the string literals of the sources that make metrics: what a label that
// is not a name of something can be.
func words(t *testing.T) map[string]bool {
	t.Helper()
	all := map[string]bool{}
	for _, dir := range []string{"internal", "extproc", "kvindex", "cmd"} {
		err := filepath.WalkDir(filepath.Join(root, dir), func(path string, _ os.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			ast.Inspect(file, func(n ast.Node) bool {
				if l, ok := n.(*ast.BasicLit); ok && l.Kind == token.STRING {
					if s, err := strconv.Unquote(l.Value); err == nil {
						all[s] = true
					}
				}
				return true
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// checkSeries: the metrics of an expression exist, with the labels that it selects
// by, and the values are ones that a label can have.
func checkSeries(t *testing.T, where, expression string, known map[string][]string, values map[string]bool) {
	t.Helper()
	kept := slices.Clone(targetLabels)
	for _, m := range used.FindAllStringSubmatch(expression, -1) {
		labels, ok := known[m[1]]
		if !ok {
			labels, ok = known[series.ReplaceAllString(m[1], "")]
		}
		if !ok {
			t.Errorf("%s: no metric %s", where, m[1])
		}
		kept = append(kept, labels...)
		for _, by := range matcher.FindAllStringSubmatch(m[2], -1) {
			switch {
			case slices.Contains(targetLabels, by[1]):
				continue
			case !slices.Contains(labels, by[1]):
				t.Errorf("%s: %s has no label %s", where, m[1], by[1])
			}
			for value := range strings.SplitSeq(by[3], "|") {
				if !values[value] && !strings.HasPrefix(value, "$") {
					t.Errorf("%s: %s of %s is never %q", where, by[1], m[1], value)
				}
			}
		}
	}
	for _, m := range label.FindAllStringSubmatch(expression, -1) {
		for name := range strings.SplitSeq(m[1], ", ") {
			if !slices.Contains(kept, name) && !strings.HasPrefix(name, "envoy_") { // Envoy has labels of its own
				t.Errorf("%s: keeps the label %s, which no metric of it has", where, name)
			}
		}
	}
}

// Expressions of alerts and panels parse, and ask for metrics and labels that exist.
func TestExpressions(t *testing.T) {
	t.Parallel()
	known, values := metrics(t), words(t)
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
	rendered, err := render(shaped("keda")...)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range parse(t, rendered) {
		for i, trigger := range list(o, "spec", "triggers") {
			expressions["trigger "+string(rune('A'+i))] = text(trigger, "metadata", "query")
		}
	}
	values["m"] = true // the model of this shape
	if expressions["trigger B"] == "" || len(expressions) < 42 {
		t.Fatalf("found only %d expressions, want two of the autoscaler among them", len(expressions))
	}
	var all []string
	for where, e := range expressions {
		all = append(all, e)
		checkSeries(t, where, e, known, values)
	}
	if out, err := run(strings.NewReader(strings.Join(all, "\n")), tool("promql")); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// Labels that an alert's summary uses must be kept by its expression.
func TestAlertLabels(t *testing.T) {
	t.Parallel()
	mentioned := regexp.MustCompile(`\$labels\.([a-z]+)`)
	content, err := os.ReadFile(filepath.Join(root, "docs", "troubleshooting.md"))
	if err != nil {
		t.Fatal(err)
	}
	page, n := string(content), 0
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
			if got, want := text(rule, "annotations", "runbook_url"), "/docs/troubleshooting.md#"+strings.ToLower(text(rule, "alert")); !strings.HasSuffix(got, want) {
				t.Errorf("%s: got the runbook %q, want …%s", text(rule, "alert"), got, want)
			}
			if !strings.Contains(page, "\n### "+text(rule, "alert")+"\n") {
				t.Errorf("%s: docs/troubleshooting.md has no section of this name", text(rule, "alert"))
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
	rendered, err := render("--set", "modelServers.matchLabels.app=models,monitoring.rules.enabled=true,monitoring.prometheus.enabled=true,monitoring.dashboard.enabled=true")
	if err != nil {
		t.Fatal(err)
	}
	return parse(t, rendered)
}
