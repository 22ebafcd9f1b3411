// Package chartgen makes the parts of the chart that repeat other files: README.md and values.schema.json from values.yaml and
// the schema of kvlane.yaml, and Envoy's bootstrap from the template that `kvlane envoy-config` uses.
package chartgen

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"testing"
)

var update = flag.Bool("update", false, "write the generated files of the chart")

// TestGenerated compares the files of the chart with what they are made of. With -update it writes them.
func TestGenerated(t *testing.T) {
	const root, chart = "../..", "../kvlane"
	read := func(name string) []byte {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	values, err := parseValues(read(filepath.Join(chart, "values.yaml")))
	if err != nil {
		t.Fatal(err)
	}
	schema, err := valuesSchema(values, read(filepath.Join(root, "internal/config/schema.json")))
	if err != nil {
		t.Fatal(err)
	}
	helper, err := bootstrapHelper(string(read(filepath.Join(root, "envoy/bootstrap.yaml.tmpl"))))
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string][]byte{"README.md": readme(values), "values.schema.json": schema, "templates/_bootstrap.tpl": helper} {
		name = filepath.Join(chart, name)
		if *update {
			if err := os.WriteFile(name, want, 0o644); err != nil {
				t.Fatal(err)
			}
		} else if !bytes.Equal(read(name), want) {
			t.Errorf("%s is not current: run `make generate`", name)
		}
	}
}
