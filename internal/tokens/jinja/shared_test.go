package jinja

import (
	"compress/gzip"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// renderedAt is the time that strftime_now reported when the goldens were made.
var renderedAt = time.Date(2026, 11, 20, 20, 0, 0, 0, time.UTC)

func readGolden(t testing.TB, path string) *Dict {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	data, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	v, err := ParseJSON(data)
	if err != nil {
		t.Fatal(err)
	}
	d, _ := v.AsDict()
	return d
}

func field(t testing.TB, d *Dict, name string) Value {
	t.Helper()
	v, ok := d.Get(name)
	if !ok {
		t.Fatalf("no field %q", name)
	}
	return v
}

func textField(t testing.TB, d *Dict, name string) string {
	t.Helper()
	s, ok := field(t, d, name).AsString()
	if !ok {
		t.Fatalf("field %q: got another kind, want a str", name)
	}
	return s
}

// merge is {**a, **b}.
func merge(a, b *Dict) *Dict {
	c := a.Clone()
	b.Range(func(k, v Value) bool {
		s, _ := k.AsString()
		c.Set(s, v)
		return true
	})
	return c
}

// TestSharedGoldens renders a larger set of real templates, which is not part of the repository,
// if it is available.
func TestSharedGoldens(t *testing.T) {
	root := os.Getenv("KVLANE_SHARED")
	if root == "" {
		t.Skip("KVLANE_SHARED names no folder with data/templates")
	}
	dir := filepath.Join(root, "data", "templates")
	doc := readGolden(t, filepath.Join(dir, "golden_jinja2_3.1.6.json.gz"))
	base, _ := field(t, doc, "base").AsDict()
	contexts, _ := field(t, doc, "ctxs").AsDict()
	results, _ := field(t, doc, "results").AsList()
	compiled := map[string]*Template{}
	missing := map[string]bool{}
	bad := 0
	for _, r := range results {
		d, _ := r.AsDict()
		name, ctx := textField(t, d, "template"), textField(t, d, "ctx")
		tpl := compiled[name]
		if tpl == nil {
			source, err := os.ReadFile(filepath.Join(dir, name+".jinja"))
			if os.IsNotExist(err) {
				missing[name] = true
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			if tpl, err = Compile(string(source)); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			compiled[name] = tpl
		}
		vars, _ := field(t, contexts, ctx).AsDict()
		out, err := tpl.Render(nil, merge(base, vars), Env{Now: renderedAt})
		checkGolden(t, name+"/"+ctx, string(out), err, d, &bad)
	}
	t.Logf("%d of %d cases differ, templates without a file: %v", bad, len(results), missing)
}

// checkGolden compares with Python's text or error.
func checkGolden(t testing.TB, name, out string, err error, want *Dict, bad *int) {
	t.Helper()
	if text, ok := field(t, want, "out").AsString(); ok {
		if err != nil || out != text {
			*bad++
			t.Errorf("%s:\n got %q, %v\nwant %q", name, out, err, text)
		}
		return
	}
	wantErr := textField(t, want, "err")
	if class := "RecursionError"; strings.HasPrefix(wantErr, class) {
		wantErr = class + ": maximum recursion depth exceeded"
	}
	if err == nil || err.Error() != wantErr {
		*bad++
		t.Errorf("%s:\n got %q, %v\nwant error %s", name, out, err, wantErr)
	}
}
