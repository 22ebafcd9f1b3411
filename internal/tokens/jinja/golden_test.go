package jinja

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// checkCases renders every case and compares with Python.
func checkCases(t *testing.T, doc *Dict) {
	t.Helper()
	vars, _ := field(t, doc, "vars").AsDict()
	cases, _ := field(t, doc, "cases").AsList()
	if len(cases) == 0 {
		t.Fatal("no cases")
	}
	// Random templates may come upon values that the engine does not operate on; the written ones may not.
	written, _ := field(t, doc, "written").AsInt()
	bad, rendered, unsupported := 0, 0, 0
	for i, c := range cases {
		d, _ := c.AsDict()
		source := textField(t, d, "source")
		out := ""
		tpl, err := Compile(source)
		if err == nil {
			var text []byte
			text, err = tpl.Render(nil, vars, Env{Now: renderedAt})
			out = string(text)
			checkUndeclared(t, source, tpl, field(t, d, "undeclared"))
		}
		if e, ok := errors.AsType[*Error](err); ok && e.Class == Unsupported {
			if unsupported++; int64(i) < written {
				t.Errorf("%s\n got %v, want what Python gives", source, err)
			}
			continue
		}
		want, wantErr := field(t, d, "out"), field(t, d, "err")
		if text, ok := want.AsString(); ok {
			rendered++
			if err != nil || text != out {
				bad++
				t.Errorf("%s\n got %q, %v\nwant %q", source, out, err, text)
			}
			continue
		}
		message, _ := wantErr.AsString()
		class, _, _ := strings.Cut(message, ":")
		if err == nil || !sameError(err.Error(), class, message) {
			bad++
			t.Errorf("%s\n got %q, %v\nwant %s", source, out, err, message)
		}
	}
	if unsupported > len(cases)/20 {
		t.Errorf("got %d of %d cases that are not supported, want a twentieth at most", unsupported, len(cases))
	}
	t.Logf("%d of %d cases differ; %d of them render in Python, %d are not supported", bad, len(cases), rendered, unsupported)
}

// sameError asks for the class, and for the text where clients are shown it.
func sameError(got, class, want string) bool {
	if class == "UndefinedError" || class == "TemplateError" || class == "SecurityError" {
		return got == want
	}
	return strings.HasPrefix(got, class+":")
}

func checkUndeclared(t *testing.T, source string, tpl *Template, want Value) {
	t.Helper()
	items, ok := want.AsList()
	if !ok {
		return
	}
	var names []string
	for _, item := range items {
		s, _ := item.AsString()
		names = append(names, s)
	}
	if got := tpl.UndeclaredVariables(); !slices.Equal(got, names) {
		t.Errorf("%s\nundeclared %q, want %q", source, got, names)
	}
}

// TestFeatures holds what testdata/golden.py wrote for testdata/features.txt.
func TestFeatures(t *testing.T) {
	checkCases(t, readGolden(t, filepath.Join("testdata", "golden.json.gz")))
}

// TestRealTemplates renders the chat templates of open models.
func TestRealTemplates(t *testing.T) {
	doc := readGolden(t, filepath.Join("testdata", "golden.json.gz"))
	base, _ := field(t, doc, "base").AsDict()
	contexts, _ := field(t, doc, "contexts").AsDict()
	results, _ := field(t, doc, "real").AsList()
	bad := 0
	for _, r := range results {
		d, _ := r.AsDict()
		name, ctx := textField(t, d, "template"), textField(t, d, "ctx")
		tpl := compileFile(t, name)
		vars, _ := field(t, contexts, ctx).AsDict()
		out, err := tpl.Render([]byte("before "), merge(base, vars), Env{Now: renderedAt})
		text, found := strings.CutPrefix(string(out), "before ")
		if !found || err != nil && text != "" {
			t.Errorf("%s/%s: what stood in dst is %q", name, ctx, out)
		}
		checkGolden(t, name+"/"+ctx, text, err, d, &bad)
		checkUndeclared(t, name, tpl, field(t, d, "undeclared"))
	}
	t.Logf("%d of %d cases differ", bad, len(results))
}

func compileFile(t testing.TB, name string) *Template {
	t.Helper()
	source, err := os.ReadFile(filepath.Join("testdata", "templates", name))
	if err != nil {
		t.Fatal(err)
	}
	tpl, err := Compile(string(source))
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return tpl
}

// TestAgainstPython compares with cases that `golden.py fuzz` has written.
func TestAgainstPython(t *testing.T) {
	path := os.Getenv("KVLANE_JINJA_CASES")
	if path == "" {
		t.Skip("KVLANE_JINJA_CASES names no file of testdata/golden.py fuzz")
	}
	checkCases(t, readGolden(t, path))
}
