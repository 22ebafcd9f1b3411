package k8s

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

const (
	binVar   = "KVLANE_K8S_BIN"    // folder with the tools
	insideOf = "KVLANE_K8S_INSIDE" // set in the process that runs the tests: the folder for logs and pods
)

// missing says why the tests cannot run here, "" if they can.
var missing string

func TestMain(m *testing.M) {
	switch {
	case os.Getenv(binVar) == "":
		missing = "needs etcd, an API server, istiod and more, which `make test-k8s` builds (" + binVar + " is not set)"
	case os.Getenv("ENVOY") == "":
		missing = "needs an Envoy (ENVOY is not set)"
	case os.Geteuid() != 0:
		missing = "needs root, to make namespaces"
	case os.Getenv(insideOf) == "":
		os.Exit(reexec())
	default:
		if err := enter(); err != nil {
			fmt.Fprintln(os.Stderr, "namespace:", err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// reexec runs this program again in namespaces of its own.
func reexec() int {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	dir, err := os.MkdirTemp("", "kvlane-k8s-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	cmd.Env = append(os.Environ(), insideOf+"="+dir)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS | unix.CLONE_NEWPID}
	if err := cmd.Start(); err != nil {
		fmt.Fprintln(os.Stderr, "namespaces:", err)
		return 1
	}
	ends := make(chan os.Signal, 1)
	signal.Notify(ends, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-ends
		_ = cmd.Process.Kill() // the first process of a PID namespace takes all others with it
	}()
	err = cmd.Wait()
	var exit *exec.ExitError
	switch {
	case err == nil:
		_ = os.RemoveAll(dir) // what was mounted in it went with the namespace
		return 0
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
