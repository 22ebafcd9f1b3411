package config

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// A file that disappears is reported once, each time; its content counts again when it is back, even the same or none.
func TestAFileThatDisappears(t *testing.T) {
	file := filepath.Join(t.TempDir(), "k.yaml")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("a")
	w := WatchFile(file, []byte("a"))
	if _, changed, err := w.Changed(); changed || err != nil {
		t.Errorf("the file as it was: got %v, %v, want no change", changed, err)
	}
	for _, text := range []string{"b", "c", "", ""} {
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		for i := range 3 {
			if _, changed, err := w.Changed(); changed || (err != nil) != (i == 0) {
				t.Errorf("read %d without the file: got %v, %v, want one error", i, changed, err)
			}
		}
		write(text)
		at := 1
		if bytes.Equal(w.last, []byte(text)) { // which was read whole before
			at = 0
		}
		for i := range 3 {
			if _, changed, err := w.Changed(); changed != (i == at) || err != nil {
				t.Errorf("read %d of the new file %q: got %v, %v, want it taken at number %d", i, text, changed, err, at)
			}
		}
	}
}

// A long file is refused by all that read files, never cut; one at the bound is read whole.
func TestLongFilesAreRefused(t *testing.T) {
	dir := t.TempDir()
	good, key := certificate(t, dir, time.Hour)
	pem, err := os.ReadFile(good)
	if err != nil {
		t.Fatal(err)
	}
	private, err := os.ReadFile(key)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "long")
	reads := map[string]struct {
		text string
		read func() error
	}{
		"configuration": {"#", func() error { _, _, err := Load(file); return err }},
		"text": {"#", func() error {
			text, err := os.ReadFile(file)
			_, bad := Parse(file, text)
			return errors.Join(err, bad)
		}},
		"workers": {"[]", func() error {
			text, err := os.ReadFile(file)
			_, bad := ParseWorkers(file, text)
			return errors.Join(err, bad)
		}},
		"watched": {"#", func() error { _, _, err := WatchFile(file, nil).Changed(); return err }},
		"file": {"#", func() error {
			if text, err := ReadFile(file); err != nil || len(text) == maxFile {
				return err
			}
			return errors.New("it was cut")
		}},
		"secret":      {"s", func() error { _, err := (&FleetEmbed{SecretFile: file}).Secret(); return err }},
		"certificate": {string(pem), func() error { _, err := KeyPair(file, key); return err }},
		"key":         {string(private), func() error { _, err := KeyPair(good, file); return err }},
		"authorities": {string(pem), func() error { _, err := Authorities(file); return err }},
	}
	for name, c := range reads {
		for _, size := range []int{maxFile, maxFile + 1, 16 << 20} {
			if err := os.WriteFile(file, []byte(c.text+strings.Repeat("\n", size-len(c.text))), 0o600); err != nil {
				t.Fatal(err)
			}
			err := c.read()
			if want := file + " has more than 4194304 bytes"; size <= maxFile && err != nil {
				t.Errorf("%s of %d bytes: got %.200v, want it read", name, size, err)
			} else if size > maxFile && (err == nil || !strings.HasSuffix(strings.Replace(err.Error(), ": has", " has", 1), want)) {
				t.Errorf("%s of %d bytes: got %.200v, want an error %q", name, size, err, want)
			}
		}
	}
}

// What is not a regular file is refused immediately, whatever it is to hold: a FIFO would be waited for, a device has no end.
func TestOnlyRegularFilesAreRead(t *testing.T) {
	dir := t.TempDir()
	good, key := certificate(t, dir, time.Hour)
	fifo, loop := filepath.Join(dir, "fifo"), filepath.Join(dir, "loop")
	if err := errors.Join(syscall.Mkfifo(fifo, 0o600), os.Symlink(loop, loop)); err != nil {
		t.Fatal(err)
	}
	reads := map[string]func(file string) error{
		"configuration": func(file string) error { _, _, err := Load(file); return err },
		"watched":       func(file string) error { _, _, err := WatchFile(file, nil).Changed(); return err },
		"secret":        func(file string) error { _, err := (&FleetEmbed{SecretFile: file}).Secret(); return err },
		"certificate":   func(file string) error { _, err := KeyPair(file, key); return err },
		"key":           func(file string) error { _, err := KeyPair(good, file); return err },
		"authorities":   func(file string) error { _, err := Authorities(file); return err },
		"replaced": func(file string) error {
			return errors.New(strings.Join((&Listen{CertFile: file, KeyFile: file, ClientCA: file}).Outdated(), ""))
		},
	}
	for file, want := range map[string]string{fifo: "not a regular file", dir: "not a regular file", "/dev/zero": "not a regular file", loop: "too many levels"} {
		for name, read := range reads {
			done := make(chan error, 1)
			go func() { done <- read(file) }()
			select {
			case err := <-done:
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("%s %s: got %v, want %q", name, file, err, want)
				}
			case <-time.After(5 * time.Second):
				t.Fatalf("%s %s: still read after 5 s", name, file)
			}
		}
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := w.WriteString("models: []"); errors.Join(err, w.Close()) != nil {
		t.Fatal(err)
	}
	if text, err := ReadFile(fmt.Sprintf("/dev/fd/%d", r.Fd())); err != nil || string(text) != "models: []" {
		t.Errorf("a pipe of the shell: got %q, %v", text, err)
	}
	if _, err := KeyPair(good, key); err != nil {
		t.Errorf("a good pair: %v", err)
	}
	if _, err := Authorities(good); err != nil {
		t.Errorf("a good CA: %v", err)
	}
}
