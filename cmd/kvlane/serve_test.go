package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/lab/enginesim"
	"github.com/kvlane/kvlane/internal/tokens/models"
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
	port, err := enginesim.FreePorts(1)
	if err != nil {
		t.Fatal(err)
	}
	admin := fmt.Sprint("127.0.0.1:", port)
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

// simTokenizer returns Qwen3's tokenizer for simulated engines.
func simTokenizer(t *testing.T) *enginesim.Tokenizer {
	t.Helper()
	files, err := models.Open(models.Builtin + "qwen3")
	if err != nil {
		t.Fatal(err)
	}
	tok, err := enginesim.LoadTokenizer(files)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// A feed that breaks is a warning in the log; those that end with Kvlane are not.
func TestAStopWarnsOfNoFeed(t *testing.T) {
	tok := simTokenizer(t)
	list, engines := "workers: {static: [", []*enginesim.Engine{}
	for _, kind := range []enginesim.EngineKind{enginesim.VLLM, enginesim.VLLM, enginesim.TRTLLM} {
		e, err := enginesim.Start(context.Background(), enginesim.Options{Model: "demo", Engine: kind, Tokenizer: tok, EventsEndpoint: "tcp://127.0.0.1:0"})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Close)
		events := e.EventsEndpoint(0)
		if kind == enginesim.TRTLLM {
			events = e.URL() + "/kv_cache_events"
		}
		engines = append(engines, e)
		list += fmt.Sprintf("{name: w%d, engine: %s, address: %q, events: {endpoint: %q}}, ", len(engines), kind, e.Addr(), events)
	}
	var log *logged
	count := func(parts ...string) (n int) {
		for line := range strings.Lines(log.String()) {
			if !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(line, part) }) {
				n++
			}
		}
		return n
	}
	t.Run("serve", func(t *testing.T) {
		log = served(t, "drain: 0s\n"+list+"]}\n").log
		deadline := time.Now().Add(20 * time.Second)
		for count(`"feed changed"`, `"state":"live"`) < 3 && time.Now().Before(deadline) {
			time.Sleep(time.Millisecond)
		}
		engines[0].Close()
		for count(`"warn"`, `"feed changed"`, `"w1"`, `"reason":"disconnected"`) == 0 && time.Now().Before(deadline) {
			time.Sleep(time.Millisecond)
		}
	})
	if n := count(`"warn"`, `"feed changed"`); n != 1 || count(`"stopped"`) != 1 {
		t.Errorf("got %d warnings of feeds, want one of the engine that ended before Kvlane:\n%s", n, log)
	}
}

// A worker that does not answer is a warning of check --live, with its place: the engine may start later.
func TestCheckAsksWorkers(t *testing.T) {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = free.Close()
	dir := t.TempDir()
	list := filepath.Join(dir, "workers.yaml")
	up, sick := other(t, nil), other(t, map[string]string{"/health": ""})
	if err := os.WriteFile(list, fmt.Appendf(nil, "- {name: listed, address: %q}\n", sick), 0o600); err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf("listen: {address: \"unix:%s/s\"}\nadmin: {address: \"127.0.0.1:0\"}\nworkers:\n  health: {timeout: 20s}\n  file: %s\n  static:\n  - {address: %q}\n  - {address: %q}\n", dir, list, up, free.Addr())
	code, out, errs := kvlane(text, "check", "--live", "-")
	for _, want := range []string{
		fmt.Sprintf("warning: standard input:8:15: workers.static[1].address: worker %s is not ready (dial tcp %[1]s: connect: connection refused): start it, or correct its address", free.Addr()),
		"warning: standard input:5:9: workers.file: worker listed is not ready (GET /health: status 404): ",
	} {
		if !strings.Contains(errs, want) {
			t.Errorf("got %s, want %s", errs, want)
		}
	}
	if code != 0 || strings.Contains(errs, up) || !strings.Contains(out, ": valid, 2 warnings; 0 models, 2 static workers") {
		t.Errorf("got code %d, %s%s, want 0 and nothing about %s", code, out, errs, up)
	}
	if code, _, _ := kvlane(text, "check", "--live", "--strict", "-"); code != 1 {
		t.Errorf("--strict: got code %d, want 1", code)
	}
	if code, out, errs := kvlane(text, "check", "-"); code != 0 || errs != "" || !strings.Contains(out, ": valid; ") {
		t.Errorf("without --live: got code %d, %s%s, want no warning", code, out, errs)
	}
	unchecked := strings.Replace(text, "timeout: 20s", "every: 0s", 1)
	if code, out, errs := kvlane(unchecked, "check", "--live", "-"); code != 0 || strings.Contains(errs, "not ready") {
		t.Errorf("without checks: got code %d, %s%s, want no warning of a worker", code, out, errs)
	}
}
