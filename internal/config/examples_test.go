package config

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The examples in documents and manifests are valid.
func TestExamplesAreValid(t *testing.T) {
	inDocs := regexp.MustCompile("(?s)```yaml\n(.*?)```")
	inManifests := regexp.MustCompile(`(?m)^  kvlane\.yaml: \|\n((?:    .*\n|\n)+)`)
	for pattern, block := range map[string]*regexp.Regexp{
		"../../docs/quickstart.md":            inDocs,
		"../../docs/operating.md":             inDocs,
		"../../docs/disaggregation.md":        inDocs,
		"../../docs/feeds.md":                 inDocs,
		"../../docs/kubernetes.md":            inDocs,
		"../../docs/replicas.md":              inDocs,
		"../../envoy/manifests/*/kvlane.yaml": inManifests,
	} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: got no files, %v", pattern, err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			found := block.FindAllStringSubmatch(string(text), -1)
			if len(found) == 0 {
				t.Errorf("%s: got no example, want some", file)
			}
			for _, m := range found {
				example := m[1]
				if block == inDocs && !strings.HasPrefix(example, "# yaml-language-server: $schema=kvlane.schema.json\n") {
					t.Errorf("%s: got an example that starts with %.30q, want it to name its schema", file, example)
				}
				if block == inManifests {
					example = strings.ReplaceAll("\n"+example, "\n    ", "\n")
				}
				if _, err := Parse(file, []byte(example)); err != nil {
					t.Errorf("%s: got %v, want a valid example", file, err)
				}
			}
		}
	}
}
