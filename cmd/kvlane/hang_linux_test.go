package main

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// A configuration on a disk that hangs cannot be read; Kvlane ends nevertheless when it is told to. A lease on the file lets who
// opens it wait, for 45 s at most.
func TestServeEndsWhileItsFileHangs(t *testing.T) {
	var lease *os.File
	t.Cleanup(func() { _ = lease.Close() }) // after serve has ended
	s := served(t, "")
	err := os.WriteFile(s.file+".next", []byte("log: {level: warn}\n"), 0o600)
	if err == nil {
		lease, err = os.OpenFile(s.file+".next", os.O_RDWR, 0)
	}
	if err == nil {
		_, err = unix.FcntlInt(lease.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	}
	if errors.Is(err, unix.EINVAL) {
		t.Skip("the file system has no leases")
	}
	if err == nil {
		err = os.Rename(s.file+".next", s.file)
	}
	if err != nil {
		t.Fatal(err)
	}
	until(t, "http://"+s.admin+"/healthz", func(int, string) (waits bool) {
		kind, err := unix.FcntlInt(lease.Fd(), unix.F_GETLEASE, 0)
		return err == nil && kind != unix.F_WRLCK
	})
}
