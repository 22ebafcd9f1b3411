package models

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Of a model's folder only regular files are opened: a FIFO would be waited for, a device has no end.
func TestOnlyRegularFilesAreOpened(t *testing.T) {
	dir := t.TempDir()
	name := func(file string) string { return filepath.Join(dir, file) }
	if err := errors.Join(syscall.Mkfifo(name("fifo.json"), 0o600), os.Symlink("/dev/zero", name("device.json")),
		os.WriteFile(name("good.json"), []byte("{}"), 0o600), os.Symlink(name("good.json"), name("link.json"))); err != nil {
		t.Fatal(err)
	}
	files, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	for file, good := range map[string]bool{"fifo.json": false, "device.json": false, "good.json": true, "link.json": true} {
		done := make(chan error, 1)
		go func() {
			f, err := files.Open(file)
			if err == nil {
				err = f.Close()
			}
			done <- err
		}()
		select {
		case err := <-done:
			if (err == nil) != good || err != nil && !strings.Contains(err.Error(), "not a regular file") {
				t.Errorf("%s: got %v, want it opened: %v", file, err, good)
			}
		case <-time.After(5 * time.Second):
			t.Fatalf("%s: still waits after 5 s", file)
		}
	}
	if list, err := fs.Glob(files, "*.json"); err != nil || len(list) != 4 {
		t.Errorf("got %q, %v, want 4 names", list, err)
	}
}
