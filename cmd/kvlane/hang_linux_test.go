package main

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// leased opens a file with a lease: a reader that opens it waits until it is closed, for 45 s at most.
func leased(t *testing.T, file string) *os.File {
	t.Helper()
	f, err := os.OpenFile(file, os.O_RDWR|os.O_CREATE, 0o600)
	if err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	}
	if errors.Is(err, unix.EINVAL) {
		t.Skip("the file system has no leases")
	}
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// A configuration on a disk that hangs cannot be read; Kvlane ends nevertheless when it is told to.
func TestServeEndsWhileItsFileHangs(t *testing.T) {
	var lease *os.File
	t.Cleanup(func() { _ = lease.Close() }) // after serve has ended
	s := served(t, "")
	lease = leased(t, s.file+".next")
	if _, err := lease.WriteString("log: {level: warn}\n"); errors.Join(err, os.Rename(s.file+".next", s.file)) != nil {
		t.Fatal(err)
	}
	until(t, "http://"+s.admin+"/healthz", func(int, string) (waits bool) {
		kind, err := unix.FcntlInt(lease.Fd(), unix.F_GETLEASE, 0)
		return err == nil && kind != unix.F_WRLCK
	})
}
