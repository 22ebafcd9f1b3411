package e2e

import (
	"bytes"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// output is a process's output, readable while the process runs.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// children are the processes that a process has started.
func children(t *testing.T, pid int) (list []int) {
	t.Helper()
	files, err := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/task/*/children")
	if err != nil || len(files) == 0 {
		t.Skip("this kernel does not tell a process's children (/proc/PID/task/TID/children)")
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			continue // a thread that has ended
		}
		for word := range strings.FieldsSeq(string(text)) {
			child, err := strconv.Atoi(word)
			if err != nil {
				t.Fatal(err)
			}
			list = append(list, child)
		}
	}
	return list
}

// Ctrl-C ends all processes that the demonstration has started, and frees its ports.
func TestCtrlCEndsTheDemonstration(t *testing.T) {
	for _, pd := range []bool{false, true} {
		t.Run("--pd="+strconv.FormatBool(pd), func(t *testing.T) {
			ingress, admin, proxy := freeAddress(t), freeAddress(t), freeAddress(t)
			cmd := exec.Command(kvlaneBinary, "demo", "--envoy", envoyBinary, "--ingress", ingress, "--admin", admin, "--envoy-admin", proxy, "--pd="+strconv.FormatBool(pd))
			var out output
			cmd.Stdout, cmd.Stderr = &out, &out
			cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			exited := make(chan error, 1)
			go func() { exited <- cmd.Wait() }()
			t.Cleanup(func() { _ = cmd.Process.Kill() })
			b := &bed{t: t}
			b.until("the demonstration stands", func() bool { return strings.Contains(out.String(), "until Ctrl-C stops everything") })
			if !strings.Contains(out.String(), "curl -is http://"+ingress+"/v1/chat/completions") {
				t.Errorf("no request to try: %s", out.String())
			}
			resp, err := http.Post("http://"+ingress+"/v1/completions", "application/json", strings.NewReader(`{"model":"demo","prompt":"x","max_tokens":2}`))
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != http.StatusOK || resp.Header.Get("X-Kvlane-Target") == "" {
				t.Errorf("status %d, target %q", resp.StatusCode, resp.Header.Get("X-Kvlane-Target"))
			}
			http.DefaultClient.CloseIdleConnections()
			started := children(t, cmd.Process.Pid)
			if len(started) == 0 {
				t.Fatal("the demonstration has no child: where is Envoy?")
			}
			if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
				t.Fatal(err)
			}
			select {
			case err := <-exited:
				if err != nil {
					t.Errorf("Ctrl-C: %v", err)
				}
			case <-time.After(time.Minute):
				t.Fatal("Ctrl-C does not end the demonstration")
			}
			if !strings.Contains(out.String(), "stopping") {
				t.Errorf("it says nothing: %s", out.String())
			}
			for _, pid := range started {
				b.until("process "+strconv.Itoa(pid)+" is gone", func() bool { return syscall.Kill(pid, 0) == syscall.ESRCH })
			}
			for _, address := range []string{ingress, admin, proxy} {
				b.until(address+" is free", func() bool {
					l, err := net.Listen("tcp", address)
					if err != nil {
						return false
					}
					return l.Close() == nil
				})
			}
		})
	}
}

// The error for a port in use names the flag that chooses another one.
func TestATakenPortOfTheDemonstrationNamesItsFlag(t *testing.T) {
	for _, flag := range []string{"--ingress", "--admin", "--envoy-admin"} {
		taken, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		args := []string{"demo", "--envoy", envoyBinary}
		for _, f := range []string{"--ingress", "--admin", "--envoy-admin"} {
			address := freeAddress(t)
			if f == flag {
				address = taken.Addr().String()
			}
			args = append(args, f, address)
		}
		out, err := exec.Command(kvlaneBinary, args...).CombinedOutput()
		if err == nil || !strings.Contains(string(out), taken.Addr().String()+" is taken by another program: choose another one with "+flag) {
			t.Errorf("%s: %v: %s", flag, err, out)
		}
		taken.Close()
	}
}
