package fleet

import (
	"bytes"
	"strings"
	"testing"

	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
)

// Texts that engines choose do not fill the log and the pages; short ones are whole.
func TestTextsOfEnginesAreBounded(t *testing.T) {
	long := strings.Repeat("x", 1<<20)
	down := worker("a", 1)
	down.Ready, down.Reason = false, long // not asked for its models
	f := newFleet(t, "")
	var log bytes.Buffer
	f.Log = zerolog.New(&log)
	f.SetWorkers([]workers.Worker{down})
	m := f.View().members["a"]
	for range 2 { // the second is the same and not logged
		f.doubt(m, "other_models", long)
	}
	(&sink{fleet: f, m: m}).Warn(kvindex.Target{Worker: "a"}, feed.WrongRank, long)
	f.doubt(m, "no_events", "short")
	if n, lines := log.Len(), bytes.Count(log.Bytes(), []byte("\n")); lines != 3 || n > 3*(observe.MaxText+512) {
		t.Errorf("got a log of %d bytes in %d lines, want 3 short ones", n, lines)
	}
	got := map[string]int{}
	for _, w := range f.Warnings() {
		got[w.Worker+" "+w.Reason] = len(w.Text)
	}
	if got["a other_models"] != observe.MaxText || got["a not_ready"] != observe.MaxText || got["a no_events"] != len("short") {
		t.Errorf("got warnings of %v bytes, want %d, %d and %d", got, observe.MaxText, observe.MaxText, len("short"))
	}
	page := observe.NewIndexPage(kvindex.Stats{}, []feed.Status{{LastError: long, Targets: make([]feed.TargetStatus, 1)}}, 0)
	if n := len(page.Feeds[0].LastError); n != observe.MaxText {
		t.Errorf("got an error of %d bytes on /debug/index, want %d", n, observe.MaxText)
	}
}
