package main

import (
	"bytes"
	"context"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write what is compared")

// TestTheSidecarsBootstrapIsCurrent compares the bootstrap in the sidecar's manifest with
// the one generated from the configuration in the same manifest.
func TestTheSidecarsBootstrapIsCurrent(t *testing.T) {
	const file, before, after = "../../envoy/manifests/sidecar/kvlane.yaml", "  kvlane.yaml: |\n", "  envoy.yaml: |\n"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, ok := strings.Cut(string(text), before)
	configuration, bootstrap, ok2 := strings.Cut(rest, after)
	if !ok || !ok2 {
		t.Fatal("the manifest does not hold the two files in this order")
	}
	yaml := filepath.Join(t.TempDir(), "kvlane.yaml")
	if err := os.WriteFile(yaml, []byte(strings.ReplaceAll("\n"+configuration, "\n    ", "\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if code := run(context.Background(), streams{in: strings.NewReader(""), out: &out, err: os.Stderr}, []string{"envoy-config", "--config", yaml}); code != 0 {
		t.Fatalf("envoy-config ends with %d", code)
	}
	want := "    " + strings.ReplaceAll(strings.TrimRight(out.String(), "\n"), "\n", "\n    ") + "\n"
	if bootstrap == want {
		return
	}
	if !*update {
		t.Fatalf("%s is not current: run `go test ./cmd/kvlane -run Sidecar -update` and commit", file)
	}
	if err := os.WriteFile(file, []byte(head+before+configuration+after+want), 0o600); err != nil {
		t.Fatal(err)
	}
}
