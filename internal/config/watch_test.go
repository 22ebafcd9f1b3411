package config

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A file that disappears is reported once, each time; its content counts again when it is back.
func TestAFileThatDisappears(t *testing.T) {
	file := filepath.Join(t.TempDir(), "k.yaml")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("a")
	w := WatchFile(file, []byte("a"))
	for round := range 2 {
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		for i := range 3 {
			if _, changed, err := w.Changed(); changed || (err != nil) != (i == 0) {
				t.Errorf("read %d without the file: got %v, %v, want one error", i, changed, err)
			}
		}
		write(fmt.Sprint("b", round))
		for i := range 3 {
			if _, changed, err := w.Changed(); changed != (i == 1) || err != nil {
				t.Errorf("read %d of the new file: got %v, %v, want it taken at the second", i, changed, err)
			}
		}
	}
}

// A long file is refused, neither read whole nor parsed; one at the bound is parsed.
func TestLongFilesAreRefused(t *testing.T) {
	file := filepath.Join(t.TempDir(), "k.yaml")
	for _, size := range []int{maxFile, maxFile + 1, 16 << 20} {
		if err := os.WriteFile(file, []byte("#"+strings.Repeat("x", size-1)), 0o600); err != nil {
			t.Fatal(err)
		}
		const want = "k.yaml: has more than 4194304 bytes"
		_, _, err := Load(file)
		if said := err != nil && strings.HasSuffix(err.Error(), want); said != (size > maxFile) {
			t.Errorf("%d bytes: got %.200v, want an error %q above %d bytes only", size, err, want, maxFile)
		}
		text, err := ReadFile(file)
		if err != nil || len(text) != min(size, maxFile+1) {
			t.Errorf("%d bytes: got %d, %v, want at most %d", size, len(text), err, maxFile+1)
		}
		if _, err := ParseWorkers(file, text); size > maxFile && (err == nil || !strings.HasSuffix(err.Error(), want)) {
			t.Errorf("workers file of %d bytes: got %.200v, want an error %q", size, err, want)
		}
		if read, _, err := WatchFile(file, nil).Changed(); err != nil || len(read) > maxFile+1 {
			t.Errorf("%d bytes: watched %d, %v, want at most %d", size, len(read), err, maxFile+1)
		}
	}
}
