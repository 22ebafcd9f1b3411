package workers

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/internal/config"
)

// times notes when lines of a log are written.
type times struct {
	mu   sync.Mutex
	list []time.Time
}

func (n *times) Write(line []byte) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.list = append(n.list, time.Now())
	return len(line), nil
}

// check fails the test unless the first line came within 2 s of the start, and each other one a minute or little more after the one before.
func (n *times) check(t *testing.T, start time.Time, want int) {
	t.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	last := start.Add(-time.Minute)
	for i, at := range n.list {
		if passed := at.Sub(last); passed < time.Minute || passed > time.Minute+2*time.Second {
			t.Errorf("warning %d came %v after the one before (the first: 1m0s later than the start), want 1m0s to 1m2s", i+1, passed)
		}
		last = at
	}
	if len(n.list) != want {
		t.Errorf("got %d warnings, want %d", len(n.list), want)
	}
}

// A worker that refuses connections is warned of within 2 s, and then once a minute. The clock is that of package synctest.
func TestFailedChecksAreWarnedOfOnceAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		said, start := &times{}, time.Now()
		r := New(Options{Health: config.Health{Every: config.Duration(time.Second), Timeout: config.Duration(time.Second), Failures: 3}, Log: zerolog.New(said), OnChange: func([]Worker) {}})
		r.Static([]config.Worker{{Name: "a", Address: "127.0.0.1:1", Engine: "vllm"}})
		time.Sleep(10*time.Minute + 30*time.Second)
		r.Close()
		said.check(t, start, 11)
	})
}

// So is a source that cannot be read.
func TestUnreadableSourcesAreWarnedOfOnceAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		said, start := &times{}, time.Now()
		r := New(Options{Log: zerolog.New(said), OnChange: func([]Worker) {}})
		for time.Since(start) < 10*time.Minute+30*time.Second {
			r.source("dns", "no address", context.DeadlineExceeded)
			time.Sleep(time.Second)
		}
		r.Close()
		said.check(t, start, 11)
	})
}
