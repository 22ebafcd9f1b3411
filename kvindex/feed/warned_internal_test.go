package feed

import (
	"errors"
	"io"
	"net"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed/zmtp"
)

// warnings is a Sink that notes when it is warned.
type warnings struct {
	mu   sync.Mutex
	list []time.Time
}

func (*warnings) Apply(kvindex.Target, *kvindex.Event) error { return nil }
func (*warnings) Clear(kvindex.Target, Reason)               {}
func (*warnings) State(kvindex.Target, State, Reason)        {}
func (w *warnings) Warn(_ kvindex.Target, why Reason, _ string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if why == Unreachable {
		w.list = append(w.list, time.Now())
	}
}

// An engine that refuses connections is warned of within 2 s, and then once a minute. The clock is that of package synctest.
func TestFailedConnectionsAreWarnedOfOnceAMinute(t *testing.T) {
	for name, src := range map[string]Source{
		"ZMQ":  {Worker: "a", Rank: kvindex.NoRank, Engine: VLLM, BlockSize: 16, Endpoint: "tcp://127.0.0.1:1"},
		"HTTP": {Worker: "a", Rank: kvindex.NoRank, Engine: TRTLLM, BlockSize: 32, PollURL: "http://127.0.0.1:1/kv_cache_events"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, start := &warnings{}, time.Now()
				f, err := Start(t.Context(), src, w)
				if err != nil {
					t.Fatal(err)
				}
				time.Sleep(10 * time.Minute)
				f.Close()
				if failed := f.Status().Errors; failed < 100 {
					t.Errorf("got %d failed connections in 10 minutes, want hundreds", failed)
				}
				last := start.Add(-time.Minute)
				for i, at := range w.list {
					// Between attempts there are ReconnectMax and its jitter.
					if passed := at.Sub(last); passed < time.Minute || i == 0 && passed > time.Minute+2*time.Second || passed > time.Minute+10*time.Second {
						t.Errorf("warning %d came %v after the one before (the first: 1m0s later than the start), want 1m0s or little more", i+1, passed)
					}
					last = at
				}
				if n := len(w.list); n < 8 || n > 10 {
					t.Errorf("got %d warnings in 10 minutes, want 8 to 10", n)
				}
			})
		})
	}
}

// An engine whose connections fail immediately, by a batch that is too large, is connected to each 2.5 to 5 s after a while. The
// clock is that of package synctest.
func TestConnectionsThatFailEarlyArePaced(t *testing.T) {
	large := rawEngine(t, func(c net.Conn) { _, _ = c.Write(batchFrame(0, 2<<10)) })
	synctest.Test(t, func(t *testing.T) {
		src := Source{Worker: "a", Rank: kvindex.NoRank, Engine: VLLM, BlockSize: 16, Endpoint: large, Conn: zmtp.Options{MaxMessage: 1 << 10}}
		f, err := Start(t.Context(), src, &warnings{})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Minute)
		f.Close()
		if n := f.Status().Connects; n < 120 || n > 250 {
			t.Errorf("got %d connections in 10 minutes, want 120 to 250", n)
		}
	})
}

// An engine that connects to the feed sets the pace: each connection is read immediately, whatever the pauses between connections that
// the feed makes itself. It replaces the one before, so that only one is read and held, and what fails is told once a minute.
func TestEnginesThatConnectSetThePace(t *testing.T) {
	path, w := t.TempDir()+"/s", &warnings{}
	src := Source{Worker: "a", Rank: kvindex.NoRank, Engine: VLLM, BlockSize: 16, Endpoint: "ipc://" + path, Bind: true, ReconnectMin: time.Hour, ReconnectMax: time.Hour}
	f, err := Start(t.Context(), src, w)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var last net.Conn
	before := runtime.NumGoroutine()
	for n := range uint64(100) {
		c, err := (&net.Dialer{}).DialContext(t.Context(), "unix", path)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		frame := batchFrame(n, 90)
		if n%2 == 1 {
			frame = []byte("\xff garbage") // ends the connection
		}
		if _, err := c.Write(slices.Concat(pubHello, frame)); err != nil {
			t.Fatal(err)
		}
		for f.Status().Connects <= n || n%2 == 0 && f.Status().Counts.Applied <= n/2 {
			time.Sleep(time.Millisecond)
		}
		if last != nil {
			_ = last.SetReadDeadline(time.Now().Add(10 * time.Second))
			if _, err := io.Copy(io.Discard, last); err != nil && !errors.Is(err, syscall.ECONNRESET) {
				t.Fatalf("connection %d: %v, want the one before closed", n, err)
			}
		}
		last = c
		if more := runtime.NumGoroutine() - before; more > 20 {
			t.Fatalf("connection %d: got %d more goroutines", n, more)
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.list) > 1 {
		t.Errorf("got %d warnings, want one a minute", len(w.list))
	}
}
