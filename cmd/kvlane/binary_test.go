package main

import (
	"bufio"
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// largestBinary bounds the size in bytes of the binary that `make build` builds.
const largestBinary = 42_000_000

// TestBinaryStaysSmall builds as `make build` does. If anything looks up methods by a name
// that is not constant (usually text/template), the linker must keep every exported method
// of every type that the program uses; the linker's graph shows the cause.
func TestBinaryStaysSmall(t *testing.T) {
	if _, err := exec.LookPath("make"); err != nil {
		t.Skip("there is no make on this machine, which holds the flags of the build")
	}
	if _, err := os.Stat("../../Makefile"); err != nil { // so that go test's cache depends on this file
		t.Fatal(err)
	}
	dir := t.TempDir()
	// The go command caches a linker's output by the compiled main package and prints it
	// again at every later build of it: hence this test's own build flags.
	const own = "-buildvcs=false -gcflags=github.com/kvlane/kvlane/cmd/kvlane=-dwarf=false"
	out, err := exec.Command("make", "-C", "../..", "build", "BIN="+dir, "VERSION=test", "MORE_LDFLAGS=-dumpdep", "GOFLAGS="+own).CombinedOutput()
	if err != nil {
		t.Fatalf("make build: %v\n%s", err, out[max(0, len(out)-10_000):])
	}
	for _, path := range methodFinders(t, out) {
		t.Errorf("methods are found by name, so that all are kept:\n  %s", strings.Join(path, "\n  calls or uses "))
	}
	info, err := os.Stat(filepath.Join(dir, "kvlane"))
	if err != nil {
		t.Fatal(err)
	}
	if info.Size() > largestBinary {
		t.Errorf("the binary has %d bytes, at most %d are wanted", info.Size(), largestBinary)
	}
}

// methodFinders parses the linker's graph (lines "from <flags> -> to <flags>") and returns,
// for each function that looks up methods by name, a path to it from main.main. Functions
// of reflect are left out: their callers are flagged as well.
func methodFinders(t *testing.T, graph []byte) [][]string {
	t.Helper()
	const flag = " <ReflectMethod>"
	reachedFrom := map[string]string{} // the first edge to a symbol comes from one reached before
	var found []string
	lines := bufio.NewScanner(bytes.NewReader(graph))
	lines.Buffer(nil, len(graph)+1)
	for lines.Scan() {
		from, to, ok := strings.Cut(lines.Text(), " -> ")
		if !ok {
			continue
		}
		from, _, _ = strings.Cut(from, " <")
		name, _, _ := strings.Cut(to, " <")
		if _, known := reachedFrom[name]; !known {
			reachedFrom[name] = from
		}
		if strings.Contains(to, flag) && !strings.HasPrefix(name, "reflect.") && !slices.Contains(found, name) {
			found = append(found, name)
		}
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	if _, ok := reachedFrom["main.run"]; !ok {
		t.Fatalf("the linker's graph is not understood; it begins\n%s", graph[:min(len(graph), 2000)])
	}
	paths := make([][]string, 0, len(found))
	for _, name := range found {
		path := []string{name}
		for name != "main.main" && reachedFrom[name] != "" && len(path) < 100 {
			name = reachedFrom[name]
			path = append(path, name)
		}
		slices.Reverse(path)
		paths = append(paths, path)
	}
	return paths
}

func TestMethodFindersAreNamed(t *testing.T) {
	graph := `# github.com/kvlane/kvlane/cmd/kvlane
_ -> main.main
main.main -> main.run
main.run -> text/template.(*Template).Execute
text/template.(*Template).Execute -> text/template.(*state).evalField <ReflectMethod>
main.run -> text/template.(*state).evalField <ReflectMethod>
text/template.(*state).evalField <ReflectMethod> -> reflect.Value.MethodByName
type:reflect.Value <UsedInIface> -> reflect.(*Value).Method <ReflectMethod>
`
	got := methodFinders(t, []byte(graph))
	want := []string{"main.main", "main.run", "text/template.(*Template).Execute", "text/template.(*state).evalField"}
	if len(got) != 1 || !slices.Equal(got[0], want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
