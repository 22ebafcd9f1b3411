package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/routing"
)

// A process whose decisions wait for a lock that is never released still answers health checks, which must say so. One
// that decides slowly is alive.
func TestLivenessEndsWithALockThatIsNeverReleased(t *testing.T) {
	_, decider, metrics := newDecider(t, nil)
	s := &service{decider: decider, server: extproc.NewServer(extproc.Options{}, decider), log: zerolog.Nop()}
	admin := httptest.NewServer(s.adminMux("", metrics))
	defer admin.Close()
	s.wg.Go(func() { s.watchLocks(t.Context(), 200*time.Millisecond) })
	t.Cleanup(s.wg.Wait)
	for range 40 {
		decider.Update(func(*routing.Router, time.Duration) { time.Sleep(15 * time.Millisecond) })
		if status, body := page(t, admin.URL+"/healthz"); status != http.StatusOK {
			t.Fatalf("while decisions are slow: got %d %q, want 200", status, body)
		}
	}
	released := make(chan struct{})
	release := sync.OnceFunc(func() { close(released) })
	defer release()
	s.wg.Go(func() { decider.Update(func(*routing.Router, time.Duration) { <-released }) })
	status, body := until(t, admin.URL+"/healthz", func(status int, _ string) bool { return status != http.StatusOK })
	if status != http.StatusServiceUnavailable || !strings.Contains(body, "waited for a lock") {
		t.Errorf("with the router's lock held: got %d %q, want 503", status, body)
	}
	if why := s.notReady(); !strings.Contains(why, "waited for a lock") {
		t.Errorf("readiness with the router's lock held: got %q", why)
	}
	release()
	until(t, admin.URL+"/healthz", func(status int, _ string) bool { return status == http.StatusOK })
}

// A replica whose index lacks what the engines hold would send conversations to the wrong
// workers: it is not ready until the feeds have caught up.
func TestReadinessWaitsForFeeds(t *testing.T) {
	speak := make(chan struct{})
	var polls atomic.Int32
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-speak:
			if polls.Add(1) == 1 {
				fmt.Fprint(w, `[{"event_id": 0, "data": {"type": "removed", "block_hashes": [1]}}]`)
			} else {
				fmt.Fprint(w, "[]")
			}
		case <-r.Context().Done():
		}
	}))
	defer engine.Close()
	c, decider, metrics := newDecider(t, fmt.Appendf(nil, `workers:
  static: [{name: w, address: %q, engine: trtllm, events: {endpoint: %q}}]
  health: {every: 0}
  scrape: 0
`, engine.Listener.Addr(), engine.URL+"/kv_cache_events"))
	registry := workers.New(workers.Options{Health: c.Workers.Health, Log: zerolog.Nop(), OnChange: decider.Fleet().SetWorkers})
	defer registry.Close()
	registry.Static(c.Workers.Static)
	// It starts an hour from now, so that the bound of the wait is not reached even on a
	// slow machine.
	s := &service{decider: decider, registry: registry, started: time.Now().Add(time.Hour)}
	s.config.Store(c)
	s.warm.Store(true)
	s.open.Store(true)
	admin := httptest.NewServer(s.adminMux("", metrics))
	defer admin.Close()
	status, body := until(t, admin.URL+"/readyz", func(_ int, body string) bool { return !strings.HasPrefix(body, "workers are being checked\n") })
	if status != http.StatusServiceUnavailable || !strings.Contains(body, "events of w are stale") {
		t.Errorf("before the engine spoke: %d %s", status, body)
	}
	close(speak)
	until(t, admin.URL+"/readyz", func(status int, _ string) bool { return status == http.StatusOK })
	if why := decider.Fleet().Syncing(); why != "" {
		t.Errorf("ready while %s", why)
	}
}
