package replay

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Outputs that cannot be written are reported before anything runs.
func TestOutputsAreCheckedBeforeTheRun(t *testing.T) {
	dir := t.TempDir()
	there, locked, fresh := filepath.Join(dir, "there.json"), filepath.Join(dir, "locked.json"), filepath.Join(dir, "fresh.json")
	for path, mode := range map[string]os.FileMode{there: 0o600, locked: 0o400} {
		if err := os.WriteFile(path, []byte("before"), mode); err != nil {
			t.Fatal(err)
		}
	}
	cases := map[string][]string{
		"--json " + dir + ": is a folder, not a file":           {"--json", dir},
		"--report " + dir + ": is a folder, not a file":         {"--report", dir, "--json", there},
		filepath.Join(dir, "no") + ": no such folder":           {"--report", filepath.Join(dir, "no", "x.html")},
		"--json: stat " + there + "/x: not a directory":         {"--json", there + "/x"},
		"--json and --report name the same file, " + there:      {"--json", there, "--report", there},
		"--json and --report are not written with --acceptance": {"--json", fresh, "--acceptance"},
	}
	if os.Geteuid() != 0 { // root may write everything
		cases["--json: open "+locked+": permission denied"] = []string{"--json", locked}
	}
	for want, args := range cases {
		err := Command(append([]string{"--format", "generated", "--seeds", "1"}, args...), io.Discard, failOnProgress{t})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %q", args, err, want)
		}
	}
	// Writable outputs stay unchanged until there is something to write.
	for _, path := range []string{"", there, fresh, os.DevNull} {
		if err := checkOutput("json", path); err != nil {
			t.Errorf("%q: %v", path, err)
		}
	}
	if text, err := os.ReadFile(there); err != nil || string(text) != "before" {
		t.Errorf("%q, %v", text, err)
	}
	if _, err := os.Stat(fresh); err == nil {
		t.Error("an empty file is left behind")
	}
}

// failOnProgress fails the test if a run has begun.
type failOnProgress struct{ t *testing.T }

func (f failOnProgress) Write(p []byte) (int, error) {
	f.t.Errorf("it ran: %s", p)
	return len(p), nil
}
