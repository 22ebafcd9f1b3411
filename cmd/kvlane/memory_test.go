package main

import (
	"bytes"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// TestFilePagesAreDropped: afterwards fewer pages of mapped files are resident. A page that was written to before its mapping
// became read-only, as the relocations of a program are, keeps what was written.
func TestFilePagesAreDropped(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("only Linux lists the mappings")
	}
	resident := func() (kib int) { // exact, unlike RssFile of the status page
		text, err := os.ReadFile("/proc/self/smaps_rollup")
		if err != nil {
			t.Skip("the kernel does not say what is mapped: ", err)
		}
		for line := range bytes.Lines(text) {
			f := bytes.Fields(line)
			sign := map[string]int{"Rss:": 1, "Anonymous:": -1}[string(f[0])]
			if sign == 0 {
				continue
			}
			n, err := strconv.Atoi(string(f[1]))
			if err != nil {
				t.Fatal(err)
			}
			kib += sign * n
		}
		return kib
	}
	name := filepath.Join(t.TempDir(), "mapped")
	if err := os.WriteFile(name, bytes.Repeat([]byte("x"), 8192), 0o600); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	page, err := unix.Mmap(int(file.Fd()), 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(page) }()
	page[5000] = 'y'
	if err := unix.Mprotect(page, unix.PROT_READ); err != nil {
		t.Fatal(err)
	}
	before := resident()
	dropFilePages()
	if after := resident(); after > before*3/4 {
		t.Errorf("%d KiB of files are resident, %d before, want a quarter less", after, before)
	}
	if page[0] != 'x' || page[5000] != 'y' {
		t.Errorf("the mapped file has %c and %c, want x and y", page[0], page[5000])
	}
}
