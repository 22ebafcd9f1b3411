package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/kvlane/kvlane/envoy"
)

// bed is an Envoy and a server under test.
type bed struct {
	dir, ingress, admin string
	server              *exec.Cmd
	envoy               *envoy.Process
	next                atomic.Int64 // numbers the requests: no load repeats prompts
}

// newBed starts both. With useFloor the server is this program, run as the floor.
func newBed(ctx context.Context, o *options, list engines, mode string, useFloor bool) (b *bed, err error) {
	b = &bed{}
	if useFloor {
		b.next.Store(1 << 20) // Kvlane hears of its prompts from the engines and must not know its own from there
	}
	defer func() {
		if err != nil {
			b.close()
		}
	}()
	if b.dir, err = os.MkdirTemp("", "kvb"); err != nil { // a Unix socket's path must be short
		return b, err
	}
	var free [3]string
	for i := range free {
		if free[i], err = freeAddress(ctx); err != nil {
			return b, err
		}
	}
	b.ingress, b.admin = free[0], free[1]
	var workers strings.Builder
	for i, e := range list {
		events := ""
		if e.events != "" {
			events = fmt.Sprintf(", events: {endpoint: %q}", e.events)
		}
		fmt.Fprintf(&workers, "  - {name: e%d, address: %q, models: [%s]%s}\n", i, e.address, modelName, events)
	}
	file := filepath.Join(b.dir, "kvlane.yaml")
	text := fmt.Sprintf(`listen: {address: "unix:%s/k.sock"}
admin: {address: %q}
envoy: {ingress: %q, admin: %q, request_body: %s}
models:
- {name: %s, tokenizer: "builtin:qwen3", check: {disabled: true}}
workers:
  static:
%s`, b.dir, b.admin, b.ingress, free[2], mode, modelName, workers.String())
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return b, err
	}
	boot, err := exec.CommandContext(ctx, o.kvlane, "envoy-config", "--config", file).Output()
	if err != nil {
		return b, fmt.Errorf("kvlane envoy-config: %w", err)
	}
	envoyFile := filepath.Join(b.dir, "envoy.yaml")
	if err := os.WriteFile(envoyFile, boot, 0o600); err != nil {
		return b, err
	}
	if err := b.serve(ctx, o, file, list.addresses(), useFloor); err != nil {
		return b, err
	}
	b.envoy, err = envoy.Run(ctx, o.envoy, b.dir, envoyFile, free[2], 2)
	return b, err
}

func (b *bed) serve(ctx context.Context, o *options, file, addresses string, useFloor bool) error {
	command := []string{o.kvlane, "serve", "--config", file}
	if useFloor {
		self, err := os.Executable()
		if err != nil {
			return err
		}
		command = []string{self, "-floor", filepath.Join(b.dir, "k.sock"), "-targets", addresses}
	}
	log, err := os.Create(filepath.Join(b.dir, "server.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	b.server = exec.Command(command[0], command[1:]...)
	b.server.Stderr = log
	b.server.SysProcAttr = envoy.Child()
	if err := b.server.Start(); err != nil {
		return err
	}
	for range 300 {
		if b.ready(ctx, useFloor) {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
	text, err := os.ReadFile(log.Name())
	return errors.Join(fmt.Errorf("the server is not ready: %s", text), err)
}

func (b *bed) ready(ctx context.Context, useFloor bool) bool {
	if useFloor {
		_, err := os.Stat(filepath.Join(b.dir, "k.sock"))
		return err == nil
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+b.admin+"/readyz", http.NoBody)
	if err != nil {
		return false
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return false
	}
	_ = resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// used returns the CPU time of server and Envoy.
func (b *bed) used() (t [2]time.Duration, err error) {
	for i, pid := range []int{b.server.Process.Pid, b.envoy.PID()} {
		if t[i], err = processorTime(pid); err != nil {
			return t, err
		}
	}
	return t, nil
}

func (b *bed) close() {
	if b.envoy != nil {
		b.envoy.Stop()
	}
	if b.server != nil && b.server.Process != nil {
		_ = b.server.Process.Kill()
		_ = b.server.Wait()
	}
	_ = os.RemoveAll(b.dir)
}

func freeAddress(ctx context.Context) (string, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}
