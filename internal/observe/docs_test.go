package observe

import (
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

var (
	metricName = regexp.MustCompile(`^[a-z]+(_[a-z]+)*$`)
	metricRow  = regexp.MustCompile("(?m)^\\| `kvlane_([a-z_]+)` \\| ([a-z, ]*) ?\\| (.+) \\|$")
)

// Each metric in the sources has its row in docs/operating.md, with the same help text, and
// each row is a metric. The end-to-end tests compare real pages with the rows.
func TestEveryMetricIsInTheDocs(t *testing.T) {
	page, err := os.ReadFile("../../docs/operating.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string]string{}
	for _, m := range metricRow.FindAllStringSubmatch(string(page), -1) {
		rows[m[1]] = m[3]
	}
	made := map[string]string{}
	for _, dir := range []string{"../../internal", "../../cmd"} {
		err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			ast.Inspect(file, func(n ast.Node) bool {
				if name, help, ok := declared(n); ok {
					made[name] = help
				}
				return true
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if len(made) < 60 {
		t.Fatalf("found only %d metrics in the sources", len(made))
	}
	for _, name := range slices.Sorted(maps.Keys(made)) {
		if rows[name] != made[name] {
			t.Errorf("kvlane_%s: docs/operating.md says %q, its help %q", name, rows[name], made[name])
		}
	}
	for name := range rows {
		if _, ok := made[name]; !ok {
			t.Errorf("docs/operating.md has a row for kvlane_%s, which no source makes", name)
		}
	}
}

// declared reads name and help of a metric where sources have them: in a call of
// counter, histogram or emit, in a row of a table, or in the options of one metric.
func declared(n ast.Node) (name, help string, ok bool) {
	var first []ast.Expr
	switch n := n.(type) {
	case *ast.CallExpr:
		if f, is := n.Fun.(*ast.Ident); !is || !slices.Contains([]string{"counter", "histogram", "emit"}, f.Name) {
			return "", "", false
		}
		first = n.Args
	case *ast.CompositeLit:
		first = n.Elts
		if options, is := n.Type.(*ast.SelectorExpr); is && strings.HasSuffix(options.Sel.Name, "Opts") {
			first = make([]ast.Expr, 2)
			for _, e := range n.Elts {
				pair, is := e.(*ast.KeyValueExpr)
				if !is {
					continue
				}
				switch key := pair.Key.(*ast.Ident); key.Name {
				case "Name":
					first[0] = pair.Value
				case "Help":
					first[1] = pair.Value
				}
			}
		} else if n.Type != nil { // the rows of a table leave it out
			return "", "", false
		}
	}
	if len(first) < 2 {
		return "", "", false
	}
	name, help = literal(first[0]), literal(first[1])
	return name, help, metricName.MatchString(name) && strings.HasSuffix(help, ".")
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
