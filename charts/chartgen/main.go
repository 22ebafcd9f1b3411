// Command chartgen generates the parts of the chart that repeat other files: README.md and
// values.schema.json from values.yaml and the schema of kvlane.yaml, and Envoy's bootstrap
// from the template that `kvlane envoy-config` uses.
package main

import (
	"fmt"
	"os"
	"path/filepath"
)

//go:generate go generate ../../internal/config
//go:generate go run . -- ../..

func main() {
	root := os.Args[len(os.Args)-1]
	if err := run(root); err != nil {
		fmt.Fprintln(os.Stderr, "chartgen:", err)
		os.Exit(1)
	}
}

// run reads and writes under the project's root folder.
func run(root string) error {
	chart := filepath.Join(root, "charts", "kvlane")
	text, err := os.ReadFile(filepath.Join(chart, "values.yaml"))
	if err != nil {
		return err
	}
	values, err := parseValues(text)
	if err != nil {
		return err
	}
	config, err := os.ReadFile(filepath.Join(root, "internal", "config", "schema.json"))
	if err != nil {
		return err
	}
	schema, err := valuesSchema(values, config)
	if err != nil {
		return err
	}
	bootstrap, err := os.ReadFile(filepath.Join(root, "envoy", "bootstrap.yaml.tmpl"))
	if err != nil {
		return err
	}
	helper, err := bootstrapHelper(string(bootstrap))
	if err != nil {
		return err
	}
	for name, content := range map[string][]byte{
		"README.md":                readme(values),
		"values.schema.json":       schema,
		"templates/_bootstrap.tpl": helper,
	} {
		if err := os.WriteFile(filepath.Join(chart, name), content, 0o644); err != nil {
			return err
		}
	}
	return nil
}
