package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"
)

// `make bench` puts the real Envoy before Kvlane and before the floor: both get requests, and answer them.
func TestTheLoadBenchRuns(t *testing.T) {
	bench := filepath.Join(t.TempDir(), "bench")
	build := exec.Command("go", "build", "-o", bench, "../internal/lab/bench")
	build.Env = append(os.Environ(), "CGO_ENABLED=0") // as `make build` has it: with cgo most packages would be compiled once more
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	out, err := exec.CommandContext(t.Context(), bench, "-kvlane", kvlaneBinary, "-envoy", envoyBinary, "-length", "100ms", "-only", "prose and code, 2k").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, server := range []string{"BUFFERED +floor", "BUFFERED +kvlane", "FULL_DUPLEX_STREAMED +floor", "FULL_DUPLEX_STREAMED +kvlane"} {
		if !regexp.MustCompile(`(?m)^2k tokens +prose and code +` + server + ` +[1-9]\d*( +[0-9.]+){3}$`).Match(out) { // and no ERRORS
			t.Errorf("no load of the %s:\n%s", server, out)
		}
	}
}
