package truth

import (
	"bytes"
	"compress/gzip"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var (
	recordings = filepath.Join("..", "..", "..", "e2e", "engines", "recordings")
	models     = filepath.Join("..", "..", "tokens", "models")
)

// The project's own recordings of real engines, and others in the folder that KVLANE_SHARED
// names: there is no difference. KVLANE_RECORDINGS names a folder to compare instead.
func TestRecordings(t *testing.T) {
	folders := []string{recordings}
	own := os.Getenv("KVLANE_RECORDINGS")
	if shared := os.Getenv("KVLANE_SHARED"); own != "" {
		folders = []string{own}
	} else if shared != "" {
		folders = append(folders, filepath.Join(shared, "data", "engine-truth"))
	}
	for _, folder := range folders {
		var out strings.Builder
		differ, err := run(&out, folder, models, "")
		t.Log("\n" + out.String())
		if err != nil || differ {
			t.Errorf("%s: differ %v, %v, want false and no error", folder, differ, err)
		}
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		if last := lines[len(lines)-1]; own == "" && (!strings.HasPrefix(last, "totals: ") || strings.Contains(last, "(0 right") || strings.Contains(last, "(0 answers")) {
			t.Errorf("%s: the last line is %q, want totals of some answers", folder, last)
		}
	}
}

// A folder without recordings, and a file that cannot be read, are errors.
func TestNothingToCompareIsAnError(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "README.md"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := run(&strings.Builder{}, dir, models, ""); err == nil || !strings.Contains(err.Error(), "no recordings") {
		t.Errorf("an empty folder: got %v, want an error", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "x.jsonl.gz"), []byte("no file of gzip"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := run(&strings.Builder{}, dir, models, ""); err == nil || !strings.Contains(err.Error(), "x.jsonl.gz: gzip") {
		t.Errorf("a broken file: got %v, want an error of gzip that names the file", err)
	}
}

// packed compresses a recording.
func packed(t *testing.T, text string) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	if _, err := z.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}
