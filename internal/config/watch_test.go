package config

import (
	"fmt"
	"os"
	"path/filepath"
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
