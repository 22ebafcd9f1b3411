package observe

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the reference page")

var metricName = regexp.MustCompile(`^[a-z]+(_[a-z]+)*$`)

// metric is a row of the page.
type metric struct{ kind, labels, help string }

const metricsIntro = `<!-- Written by 'make generate' from the sources. -->

# Metrics

Every metric of ` + "`GET /metrics`" + ` on the admin port. Go's (` + "`go_*`" + `) and the process's (` + "`process_*`" + `) are
exported too. [What to look at](../operating.md#what-to-look-at) explains the most important ones. ` + "`rank`" + ` is empty
where the engine has none; all series of a worker are removed with it.

| metric | type | labels | meaning |
|---|---|---|---|
`

// The page has each metric of the sources with its type, labels and help. The end-to-end
// tests compare real pages with it.
func TestReferenceOfMetrics(t *testing.T) {
	made := map[string]metric{}
	for _, dir := range []string{"../../internal", "../../cmd"} {
		err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			for _, d := range file.Decls {
				declared(d, made)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if len(made) < 60 {
		t.Fatalf("found only %d metrics in the sources", len(made))
	}
	var page strings.Builder
	page.WriteString(metricsIntro)
	for _, name := range slices.Sorted(maps.Keys(made)) {
		m := made[name]
		fmt.Fprintf(&page, "| `kvlane_%s` | %s | %s | %s |\n", name, m.kind, m.labels, m.help)
	}
	const file = "../../docs/reference/metrics.md"
	if *update {
		if err := os.WriteFile(file, []byte(page.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != page.String() {
		t.Errorf("docs/reference/metrics.md is not current: run 'make generate' (%v)", err)
	}
}

// declared adds the metrics that a declaration makes: in calls of counter, histogram or
// emit, in rows of a table that a call of emit goes through, or in the options of a metric.
func declared(d ast.Decl, made map[string]metric) {
	var table []string // metrics of the table whose emit call is yet to come
	ast.Inspect(d, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CallExpr:
			if len(n.Args) == 2 { // options of a vector, and its labels
				options, given := n.Args[0].(*ast.CompositeLit)
				names, listed := n.Args[1].(*ast.CompositeLit)
				if given && listed {
					var labels []string
					for _, e := range names.Elts {
						labels = append(labels, literal(e))
					}
					optionsOf(options, labels, made)
					return false
				}
			}
			f, ok := n.Fun.(*ast.Ident)
			if !ok || !slices.Contains([]string{"counter", "histogram", "emit"}, f.Name) || len(n.Args) < 2 {
				return true
			}
			name, skip := literal(n.Args[0]), map[string]int{"counter": 2, "histogram": 3, "emit": 3}[f.Name]
			var labels []string
			for i, e := range n.Args[min(skip, len(n.Args)):] {
				if f.Name != "emit" || i%2 == 0 { // emit has the values between the names
					labels = append(labels, labelsOf(e)...)
				}
			}
			if name == "" {
				for _, name := range table {
					m := made[name]
					m.labels = strings.Join(labels, ", ")
					made[name] = m
				}
				table = nil
				return true
			}
			m := metric{kindOf(name), strings.Join(labels, ", "), literal(n.Args[1])}
			if f.Name == "histogram" {
				m.kind = "histogram"
			}
			add(made, name, m)
		case *ast.CompositeLit:
			options, ok := n.Type.(*ast.SelectorExpr)
			switch {
			case n.Type == nil && len(n.Elts) >= 2:
				if name := literal(n.Elts[0]); add(made, name, metric{kindOf(name), "", literal(n.Elts[1])}) {
					table = append(table, name)
				}
			case ok && strings.HasSuffix(options.Sel.Name, "Opts"):
				optionsOf(n, nil, made)
			}
		}
		return true
	})
}

// optionsOf adds the metric of a literal of options.
func optionsOf(n *ast.CompositeLit, labels []string, made map[string]metric) {
	var name, help string
	for _, e := range n.Elts {
		pair, ok := e.(*ast.KeyValueExpr)
		if !ok {
			continue
		}
		switch pair.Key.(*ast.Ident).Name {
		case "Name":
			name = literal(pair.Value)
		case "Help":
			help = literal(pair.Value)
		case "ConstLabels":
			for _, l := range pair.Value.(*ast.CompositeLit).Elts {
				labels = append(labels, literal(l.(*ast.KeyValueExpr).Key))
			}
		}
	}
	add(made, name, metric{kindOf(name), strings.Join(labels, ", "), help})
}

func add(made map[string]metric, name string, m metric) bool {
	ok := metricName.MatchString(name) && strings.HasSuffix(m.help, ".")
	if ok {
		made[name] = m
	}
	return ok
}

func kindOf(name string) string {
	if strings.HasSuffix(name, "_total") {
		return "counter"
	}
	return "gauge"
}

// labelsOf returns the labels that an argument names: itself, or the variable labels, which
// stands for a target's, perhaps with more appended.
func labelsOf(e ast.Expr) (out []string) {
	switch e := e.(type) {
	case *ast.Ident:
		if e.Name == "labels" {
			return []string{"worker", "rank"}
		}
	case *ast.CallExpr:
		for i, a := range e.Args {
			if i < 2 { // append(labels, name, value)
				out = append(out, labelsOf(a)...)
			}
		}
	case *ast.BasicLit:
		if l := literal(e); l != "" {
			return []string{l}
		}
	}
	return out
}

func literal(e ast.Expr) string {
	l, ok := e.(*ast.BasicLit)
	if !ok || l.Kind != token.STRING {
		return ""
	}
	s, err := strconv.Unquote(l.Value)
	if err != nil {
		return ""
	}
	return s
}

// Metrics that pages, alerts and the dashboard name are there. The others of that form are reasons, which the sources have.
func TestMetricsInPages(t *testing.T) {
	reference, err := os.ReadFile("../../docs/reference/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	var sources strings.Builder
	for _, pattern := range []string{"../../extproc/*.go", "../*/*.go", "../tokens/shape/*.go", "../../cmd/kvlane/*.go"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if text, err := os.ReadFile(file); err == nil && !strings.HasSuffix(file, "_test.go") {
				sources.Write(text)
			}
		}
	}
	known := func(name string) bool {
		for _, suffix := range []string{"", "_bucket", "_sum", "_count"} {
			plain, ok := strings.CutSuffix(name, suffix)
			row := "`" + plain + "` |"
			if suffix != "" {
				row += " histogram"
			}
			if ok && strings.Contains(string(reference), row) {
				return true
			}
		}
		family := strings.HasSuffix(name, "_") && strings.Contains(string(reference), "`"+name) // kvlane_index_*
		return family || strings.Contains(sources.String(), `"`+name+`"`)
	}
	names, seen := regexp.MustCompile(`\bkvlane_[a-z_]+`), 0
	for _, pattern := range []string{"../../README.md", "../../docs/*.md", "../../charts/kvlane/README.md", "../../charts/kvlane/templates/*.yaml", "../../charts/kvlane/dashboards/*"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatal(pattern, err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range names.FindAllString(string(text), -1) {
				if seen++; !known(name) {
					t.Errorf("%s names %s, which is no metric", file, name)
				}
			}
		}
	}
	if seen < 150 {
		t.Errorf("got %d names in all pages, want those of metrics", seen)
	}
	for name, want := range map[string]bool{
		"kvlane_picks_total": true, "kvlane_picks": false, "kvlane_decision_seconds_bucket": true, "kvlane_picks_total_sum": false,
		"kvlane_index_": true, "kvlane_indexes_": false, "kvlane_queue_full": true, "kvlane_queue_empty": false,
	} {
		if known(name) != want {
			t.Errorf("known(%s): got %v", name, !want)
		}
	}
}
