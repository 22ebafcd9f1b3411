package envoy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/kvlane/kvlane/internal/config"
)

// stopGrace is how long Envoy has to stop after SIGTERM before it is killed.
const stopGrace = 5 * time.Second

// ErrNoBinary is returned by Find if there is no Envoy binary.
var ErrNoBinary = errors.New("no envoy binary: pass --envoy PATH or put envoy on PATH (`make envoy` installs the pinned one)")

// Process is a running Envoy that belongs to this program.
type Process struct {
	cmd   *exec.Cmd
	done  chan struct{}
	admin string
	log   string
}

// Find returns the binary to run: path if given, else the envoy on PATH.
func Find(path string) (string, error) {
	found, err := exec.LookPath(cmp.Or(path, "envoy"))
	if err != nil {
		return "", fmt.Errorf("%w (%w)", ErrNoBinary, err)
	}
	return found, nil
}

// Start writes the bootstrap of c into dir, runs binary with it and waits until it is ready. Envoy's log goes to
// dir/envoy.log. concurrency is the number of worker threads, 0 for one per core.
func Start(ctx context.Context, binary, dir string, c *config.Config, concurrency int) (*Process, error) {
	text, err := Bootstrap(c)
	if err != nil {
		return nil, err
	}
	file := filepath.Join(dir, "envoy.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		return nil, fmt.Errorf("bootstrap: %w", err)
	}
	return Run(ctx, binary, dir, file, c.Envoy.Admin, concurrency)
}

// Run is like Start for an existing bootstrap file; admin is the address of its admin listener.
func Run(ctx context.Context, binary, dir, file, admin string, concurrency int) (*Process, error) {
	p := &Process{admin: admin, log: filepath.Join(dir, "envoy.log"), done: make(chan struct{})}
	log, err := os.Create(p.log)
	if err != nil {
		return nil, fmt.Errorf("envoy's log: %w", err)
	}
	defer log.Close()
	args := []string{"-c", file, "--disable-hot-restart", "-l", "warning"}
	if concurrency > 0 {
		args = append(args, "--concurrency", fmt.Sprint(concurrency))
	}
	p.cmd = exec.Command(binary, args...) //nolint:gosec // the caller chooses the Envoy
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = Child()
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start envoy: %w", err)
	}
	go func() {
		_ = p.cmd.Wait()
		close(p.done)
	}()
	if err := p.waitReady(ctx); err != nil {
		p.Stop()
		return nil, err
	}
	return p, nil
}

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// PID is the process id.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Stop ends the process and waits for it.
func (p *Process) Stop() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(stopGrace):
		_ = p.cmd.Process.Kill()
		<-p.done
	}
}

func (p *Process) waitReady(ctx context.Context) error {
	client := http.Client{Timeout: time.Second}
	defer client.CloseIdleConnections()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+p.admin+"/ready", nil)
		if err != nil {
			return err
		}
		if resp, err := client.Do(req); err == nil {
			_, _ = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("envoy is not ready: %w; its log ends: %s", ctx.Err(), p.logTail())
		case <-p.done:
			return fmt.Errorf("envoy stopped; its log ends: %s", p.logTail())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (p *Process) logTail() string {
	text, _ := os.ReadFile(p.log)
	return string(text[max(0, len(text)-2000):])
}

// CheckFree returns an error that names flag if a TCP address is taken.
func CheckFree(address, flag string) error {
	l, err := net.Listen("tcp", address)
	if err != nil {
		if errors.Is(err, syscall.EADDRINUSE) {
			return fmt.Errorf("%s is taken by another program: choose another one with %s", address, flag)
		}
		return fmt.Errorf("%s: %w (choose another address with %s)", address, err, flag)
	}
	return l.Close()
}
