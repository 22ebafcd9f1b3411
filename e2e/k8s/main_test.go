//go:build linux

package k8s

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const (
	binVar   = "KVLANE_K8S_BIN"    // folder with the tools
	tryVar   = "KVLANE_K8S_TRY"    // only try whether this machine can run the tests: no tools are needed
	insideOf = "KVLANE_K8S_INSIDE" // set in the process that runs the tests: the folder for logs and pods
)

// missing is why the tests cannot run here, "" if they can.
var missing string

func TestMain(m *testing.M) {
	switch {
	case os.Getenv(insideOf) != "":
		if err := enter(); err != nil {
			fmt.Fprintln(os.Stderr, "cannot make a network of its own:", err)
			os.Exit(1)
		}
	case os.Getenv(tryVar) != "":
		os.Exit(reexec())
	case os.Getenv(binVar) == "":
		missing = "needs etcd, an API server, istiod and more, which `make test-k8s` builds (" + binVar + " is not set)"
	case os.Getenv("ENVOY") == "":
		missing = "needs an Envoy (ENVOY is not set)"
	default:
		os.Exit(reexec())
	}
	os.Exit(m.Run())
}

// reexec runs this program again in namespaces of its own, which end with it,
// however it ends.
func reexec() int {
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "needs root, to make namespaces: run it with sudo")
		return 1
	}
	for _, tool := range []string{"ip", "curl"} {
		if _, err := exec.LookPath(tool); err != nil {
			fmt.Fprintln(os.Stderr, "needs the program", tool, "(Debian: iproute2, curl)")
			return 1
		}
	}
	dir, err := os.MkdirTemp("", "kvlane-k8s-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	ends := make(chan os.Signal, 1)
	signal.Notify(ends, os.Interrupt, syscall.SIGTERM, syscall.SIGQUIT)
	// A killed process cannot clean up: then the kernel does it.
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(syscall.SIGTERM), 0, 0, 0); err != nil {
		fmt.Fprintln(os.Stderr, "prctl:", err)
		return 1
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), insideOf+"="+dir)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	// Its own process group, so that it does not get ^C.
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS | unix.CLONE_NEWPID, Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := cmd.Start(); err != nil {
		fmt.Fprintln(os.Stderr, "needs network, mount and PID namespaces, which this machine does not give:", err)
		_ = os.RemoveAll(dir)
		return 1
	}
	var interrupted atomic.Bool
	go func() {
		<-ends
		interrupted.Store(true)
		_ = cmd.Process.Kill() // the first process of a PID namespace takes all others with it
	}()
	err = cmd.Wait()
	var exit *exec.ExitError
	switch {
	case err == nil || os.Getenv(tryVar) != "":
		_ = os.RemoveAll(dir) // what was mounted in it went with the namespace
	case interrupted.Load():
		_ = os.RemoveAll(dir)
		fmt.Fprintln(os.Stderr, "interrupted: all processes of the test have ended")
	default:
		fmt.Fprintln(os.Stderr, "logs are in", dir)
	}
	switch {
	case err == nil:
		return 0
	case interrupted.Load():
		return 130
	case errors.As(err, &exit) && exit.ExitCode() > 0:
		return exit.ExitCode()
	}
	fmt.Fprintln(os.Stderr, "test process:", err)
	return 1
}

// enter makes the fresh namespaces usable.
func enter() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	if err := unix.Mount("tmpfs", "/run", "tmpfs", 0, ""); err != nil {
		return fmt.Errorf("mount /run: %w", err)
	}
	if err := os.MkdirAll("/run/netns", 0o755); err != nil {
		return err
	}
	for _, f := range []string{"/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv4/ip_nonlocal_bind"} {
		if err := os.WriteFile(f, []byte("1"), 0o600); err != nil {
			return err
		}
	}
	if err := ip("link set lo up"); err != nil {
		return err
	}
	return ip("addr add " + hostIP + "/32 dev lo")
}

// TestMachine tries all that a pod needs of the machine, in a second and without
// the tools, which take minutes to build.
func TestMachine(t *testing.T) {
	dir := os.Getenv(insideOf)
	if dir == "" {
		t.Skip("able.sh asks for it (" + tryVar + " is not set)")
	}
	n := &node{}
	var err error
	if n.host, err = unix.Open("/proc/self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
		t.Fatal(err)
	}
	s := &sandbox{n: n, ip: "10.77.1.1", ns: "try"}
	if err := s.network(); err != nil {
		t.Fatalf("a network for a pod: %v", err)
	}
	l, err := s.listen("80")
	if err != nil {
		t.Fatalf("a port of a pod: %v", err)
	}
	defer l.Close()
	conn, err := net.DialTimeout("tcp", s.ip+":80", 10*time.Second)
	if err != nil {
		t.Fatalf("the way to a pod: %v", err)
	}
	conn.Close()
	root, err := overlay(filepath.Join(dir, "layers"))
	if err != nil {
		t.Fatalf("a file system for a pod: %v", err)
	}
	cmd := exec.Command("/bin/sh", "-c", "echo > /written")
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("a program in it: %v %s", err, out)
	}
	if _, err := os.Stat("/written"); err == nil {
		t.Fatal("what a pod writes shows on the machine")
	}
}
