package config

import (
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	inDocs      = regexp.MustCompile("(?m)^( *)```ya?ml\n((?:.*\n)*?) *```")
	inManifests = regexp.MustCompile(`(?m)^(  )kvlane\.yaml: \|\n((?:    .*\n|\n)+)`)
	topLevel    = regexp.MustCompile(`(?m)^"?([A-Za-z_.]+)"?:`)
)

// whole reports whether a text is a Kvlane configuration: all its keys are.
func whole(text string) bool {
	var known []string
	fields(reflect.ValueOf(Default()), func(f reflect.StructField, _ reflect.Value) bool {
		known = append(known, f.Tag.Get("yaml"))
		return true
	})
	keys := topLevel.FindAllStringSubmatch(text, -1)
	return len(keys) > 0 && !slices.ContainsFunc(keys, func(key []string) bool { return !slices.Contains(known, key[1]) })
}

// configurations returns the texts of a file that are whole configurations.
func configurations(file, text string) (out []string) {
	var blocks [][]string
	switch filepath.Ext(file) {
	case ".md":
		blocks = inDocs.FindAllStringSubmatch(text, -1)
	case ".yaml", ".yml":
		blocks = append(inManifests.FindAllStringSubmatch(text, -1), []string{"", "", text})
		for i := range len(blocks) - 1 {
			blocks[i][1] += "  "
		}
	}
	for _, b := range blocks {
		if block := strings.ReplaceAll("\n"+b[2], "\n"+b[1], "\n")[1:]; whole(block) {
			out = append(out, block)
		}
	}
	return out
}

// Every configuration in documents, manifests and examples is valid and names its schema in its first line, for editors. Files
// for tests are not examples.
func TestExamplesAreValid(t *testing.T) {
	found := map[string]int{}
	err := filepath.WalkDir("../..", func(file string, e fs.DirEntry, err error) error {
		if name := e.Name(); err == nil && e.IsDir() && (name == "testdata" || name == "out" || len(name) > 2 && name[0] == '.') {
			return filepath.SkipDir
		}
		if err != nil || e.IsDir() {
			return err
		}
		if ext := filepath.Ext(file); ext != ".md" && ext != ".yaml" && ext != ".yml" {
			return nil
		}
		text, err := os.ReadFile(file)
		for _, example := range configurations(file, string(text)) {
			found[strings.Split(filepath.ToSlash(file), "/")[2]]++
			first, _, _ := strings.Cut(example, "\n")
			if schema, ok := strings.CutPrefix(first, "# yaml-language-server: $schema="); !ok || schema != "kvlane.schema.json" && !strings.HasSuffix(schema, "/internal/config/schema.json") {
				t.Errorf("%s: got an example that starts with %q, want it to name its schema", file, first)
			}
			if _, err := Parse(file, []byte(example)); err != nil {
				t.Errorf("%s: got %v, want a valid example", file, err)
			}
		}
		return err
	})
	if err != nil || found["docs"] < 14 || found["envoy"] < 4 {
		t.Errorf("got examples in %v, %v, want those of docs and manifests", found, err)
	}
}

func TestConfigurationsAreFound(t *testing.T) {
	const line, text = "# yaml-language-server: $schema=kvlane.schema.json\n", "models:\n- name: m\n\nworkers: {}\n"
	for name, c := range map[string]struct{ file, text, want string }{
		"a block":           {"a.md", "x\n```yaml\n" + text + "```\n```yaml\nkind: x\n```\n", text},
		"an indented block": {"a.md", "- x\n  ```yaml\n  drain: 1s\n  listen:\n    health: x\n  ```\n", "drain: 1s\nlisten:\n  health: x\n"},
		"another's block":   {"a.md", "```yaml\nmodels: []\ntitle: x\n```\n", ""},
		"a manifest":        {"a.yaml", "kind: ConfigMap\ndata:\n  kvlane.yaml: |\n    drain: 1s\n\n    listen:\n      health: x\n  other: 1\n", "drain: 1s\n\nlisten:\n  health: x\n"},
		"a file":            {"a.yml", line + text, line + text},
		"quoted keys":       {"a.yaml", "\"models\": []\n", "\"models\": []\n"},
	} {
		if got := strings.Join(configurations(c.file, c.text), "---\n"); got != c.want {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
	}
}
