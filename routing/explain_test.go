package routing

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"math"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// Each call of sayf has as many arguments as verbs, and only verbs that it knows: go vet does not look at it.
func TestCallsOfSayf(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	verb, calls := regexp.MustCompile(`%(%|[sqdv]|\.[0-9]f|)`), 0
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			if f, ok := call.Fun.(*ast.SelectorExpr); !ok || f.Sel.Name != "sayf" || call.Ellipsis.IsValid() {
				return true
			}
			format, err := strconv.Unquote(call.Args[1].(*ast.BasicLit).Value)
			if err != nil {
				t.Fatal(err)
			}
			verbs := 0
			for _, v := range verb.FindAllStringSubmatch(format, -1) {
				if v[1] == "" {
					t.Errorf("%s: %q has a verb that sayf does not know", name, format)
				} else if v[1] != "%" {
					verbs++
				}
			}
			if calls++; verbs != len(call.Args)-2 {
				t.Errorf("%s: %q has %d verbs and %d arguments", name, format, verbs, len(call.Args)-2)
			}
			return true
		})
	}
	if calls < 20 {
		t.Errorf("got %d calls, want more", calls)
	}
}

// Lines of an Explanation are formatted as by package fmt.
func TestLinesAreFormatted(t *testing.T) {
	var e Explanation
	for _, c := range []struct {
		format string
		args   []any
	}{
		{"", nil},
		{"no argument, 100 %%", nil},
		{"%s by %s", []any{"w0/1", "50 %s"}},
		{"model %q: all", []any{"a\"b\n\xff\u00e9"}},
		{"%d of %d", []any{-3, int64(math.MaxInt64)}},
		{"%.0f, %.1f and %.2f %% of it", []any{0.5, 1.25, -1e9 / 3}},
		{"%.0f %.2f", []any{math.Inf(1), math.NaN()}},
		{"open %v, %v", []any{true, false}},
	} {
		e.sayf("stage", c.format, c.args...)
		if got, want := e.Verdicts[len(e.Verdicts)-1].Text, fmt.Sprintf(c.format, c.args...); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// A time that is not predicted is not shown as one of zero.
func TestExplanationOfWhatIsNotPredicted(t *testing.T) {
	e := Explanation{Candidates: []Candidate{{Target: "a", TTFT: 1.5}, {Target: "b", PerToken: 0.01}, {Target: "c"}, {Target: "d", TTFT: 2, PerToken: 0.02}}}
	var got []string
	for line := range strings.Lines(e.String()) {
		if f := strings.Fields(line); len(f) > 11 {
			got = append(got, strings.Join(append(f[:1], f[10:12]...), " "))
		}
	}
	if want := []string{"a 1.50s -", "b - 10.0ms", "c - -", "d 2.00s 20.0ms"}; !slices.Equal(got, want) && !slices.Equal(got[1:], want) {
		t.Errorf("got %q, want %q in\n%s", got, want, e.String())
	}
}
