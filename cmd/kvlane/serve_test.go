package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/internal/config"
)

// logged collects the lines of a log.
type logged struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// started starts a service on addresses of its own and returns the URL of its admin port. more is the rest of its configuration, and
// may have the other keys of admin and listen. The service ends with the test.
func started(t *testing.T, more string) (s *service, admin string, log *logged) {
	t.Helper()
	if !strings.Contains(more, "admin: {") {
		more = "admin: {address: \"127.0.0.1:0\"}\n" + more
	}
	if !strings.Contains(more, "listen: {") {
		more = fmt.Sprintf("listen: {address: \"unix:%s/s\"}\n%s", t.TempDir(), more)
	}
	c, err := config.Parse("k.yaml", []byte(more))
	if err != nil {
		t.Fatal(err)
	}
	log = &logged{}
	if s, err = startService(t.Context(), c, zerolog.New(log), nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.close)
	return s, "http://" + s.admin.Addr().String(), log
}

// serving is `kvlane serve` with a file that write replaces.
type serving struct {
	file, admin string
	log         *logged
	write       func(more string)
}

// served starts a serving, which ends with the test. more is the text of its file without addresses.
func served(t *testing.T, more string) serving {
	t.Helper()
	return servedUntil(t, more, `"serving"`)
}

// servedUntil is served, but returns once the log has a text.
func servedUntil(t *testing.T, more, text string) serving {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	admin := l.Addr().String()
	_ = l.Close()
	dir := t.TempDir()
	file := filepath.Join(dir, "k.yaml")
	write := func(more string) {
		t.Helper()
		if err := os.WriteFile(file, fmt.Appendf(nil, "listen: {address: \"unix:%s/s\"}\nadmin: {address: %q}\n%s", dir, admin, more), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(more)
	ctx, stop := context.WithCancel(t.Context())
	log := &logged{}
	done := make(chan int)
	go func() {
		done <- run(ctx, streams{in: strings.NewReader(""), out: &bytes.Buffer{}, err: log}, []string{"serve", "--config", file})
	}()
	t.Cleanup(func() {
		stop()
		if code := <-done; code != 0 {
			t.Errorf("got exit code %d, want 0; log:\n%s", code, log)
		}
	})
	for !strings.Contains(log.String(), text) {
		time.Sleep(time.Millisecond)
	}
	return serving{file, admin, log, write}
}

// What `kvlane check` warns of is in the log of a Kvlane that was started without it, and again when its file changes.
func TestServeWarnsAsCheckDoes(t *testing.T) {
	s := served(t, "explain: {header: true}\nindex: {max_bytes: 1000000GiB}\n")
	for _, want := range []string{"k.yaml:3:19: explain.header: tells every client", "k.yaml:4:20: index.max_bytes: 1073741824000000 bytes are more", "workers: there are none"} {
		if !strings.Contains(s.log.String(), want) {
			t.Errorf("got the log %s, want %q", s.log, want)
		}
	}
	s.write("explain: {header: true, keep: 7}\nindex: {max_bytes: 1000000GiB}\n")
	deadline := time.Now().Add(time.Minute)
	for strings.Count(s.log.String(), "explain.header: tells") < 2 && time.Now().Before(deadline) {
		time.Sleep(time.Millisecond)
	}
	if strings.Count(s.log.String(), "explain.header: tells") < 2 {
		t.Errorf("got the log %s, want the warning for the changed file, too", s.log)
	}
	file := filepath.Join(t.TempDir(), "k.yaml")
	if err := os.WriteFile(file, []byte("explain: {header: true}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	k := kubernetesFlags(flags("serve"))
	k.pool, k.namespace = "pool", "ns"
	if _, warnings, err := k.load(file); err != nil || len(warnings) != 1 || warnings[0].Path != "explain.header" {
		t.Errorf("got %v, %v, want one warning: --pool-name names workers", warnings, err)
	}
}
