package chart

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
)

const (
	root  = "../.."
	chart = root + "/charts/kvlane"
	// The chart is rendered for this Kubernetes; a Helm from source claims 1.20.
	kubeVersion = "1.36.3"
)

// tools is the folder that build.sh fills; kvlane and envoy are binaries.
var tools, kvlane, envoy = os.Getenv("KVLANE_CHART_TOOLS"), os.Getenv("KVLANE"), os.Getenv("ENVOY")

func TestMain(m *testing.M) {
	if tools == "" || kvlane == "" || envoy == "" {
		fmt.Println("skipped: needs Helm and more, which `make test-chart` builds (KVLANE_CHART_TOOLS, KVLANE or ENVOY is not set)")
		os.Exit(0)
	}
	code := m.Run()
	if schemaFolder != "" {
		_ = os.RemoveAll(schemaFolder)
	}
	os.Exit(code)
}

// run returns the standard output of a command; an error holds its standard error.
func run(in io.Reader, name string, args ...string) (string, error) {
	cmd := exec.Command(name, args...)
	var out, bad bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, &out, &bad
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s %s: %w\n%s%s", filepath.Base(name), strings.Join(args, " "), err, out.String(), bad.String())
	}
	return out.String(), nil
}

func tool(name string) string { return filepath.Join(tools, "bin", name) }

// made matches what is random in a rendering.
var made = regexp.MustCompile(`(?m)^  (secret|key): [A-Za-z0-9+/=]{64}$`)

// render is `helm template` of the release "kvlane" in namespace "llm", with secrets that are
// always the same.
func render(args ...string) (string, error) {
	out, err := run(nil, tool("helm"), append([]string{"template", "kvlane", chart, "--namespace", "llm", "--kube-version", kubeVersion}, args...)...)
	return made.ReplaceAllString(out, "  $1: c2VjcmV0"), err
}

// object is a rendered Kubernetes object.
type object map[string]any

// parse reads a stream of objects.
func parse(t *testing.T, text string) []object {
	t.Helper()
	var all []object
	for docs := yaml.NewDecoder(strings.NewReader(text)); ; {
		var o object
		switch err := docs.Decode(&o); {
		case errors.Is(err, io.EOF):
			return all
		case err != nil:
			t.Fatalf("%v in\n%s", err, text)
		case o != nil:
			all = append(all, o)
		}
	}
}

// at walks down maps by key and lists by index; nil if there is nothing.
func at(v any, path ...any) any {
	for _, step := range path {
		switch key := step.(type) {
		case string:
			switch m := v.(type) {
			case object:
				v = m[key]
			case map[string]any:
				v = m[key]
			default:
				return nil
			}
		case int:
			list, ok := v.([]any)
			if !ok || key >= len(list) {
				return nil
			}
			v = list[key]
		}
	}
	return v
}

func list(v any, path ...any) []any {
	l, _ := at(v, path...).([]any)
	return l
}

func text(v any, path ...any) string {
	s, _ := at(v, path...).(string)
	return s
}

func number(v any, path ...any) int {
	switch n := at(v, path...).(type) {
	case uint64:
		return int(n)
	case int64:
		return int(n)
	}
	return 0
}

func (o object) String() string { return text(o, "kind") + " " + text(o, "metadata", "name") }

func examples(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob(chart + "/examples/*.yaml")
	if err != nil || len(files) < 5 {
		t.Fatalf("examples: %v, %v", files, err)
	}
	return files
}

func write(t *testing.T, name, content string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}
