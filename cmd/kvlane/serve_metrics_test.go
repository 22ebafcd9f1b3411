package main

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/observe"
)

func TestProtocolMetricsKnowEveryModeAndKind(t *testing.T) {
	t.Parallel()
	m := observe.New("test")
	hooks := protocolMetrics(m)
	hooks.Answered(extproc.ModeBuffered, time.Millisecond)
	if n, err := testutil.GatherAndCount(m.Registry, "kvlane_extproc_answer_seconds"); err != nil || n != 1 {
		t.Errorf("%d answer times, %v: want that of the mode that came", n, err)
	}
	for mode := range extproc.NumModes {
		hooks.Opened(mode)
		hooks.Opened(mode)
		hooks.Closed(mode)
		hooks.Answered(mode, time.Millisecond)
		if got := testutil.ToFloat64(m.ExtProcStreams.WithLabelValues(mode.String())); got != 1 {
			t.Errorf("%v: %v streams open", mode, got)
		}
	}
	for kind := extproc.KindRequestHeaders; kind < extproc.NumKinds; kind++ {
		hooks.Message(kind)
		if got := testutil.ToFloat64(m.ExtProcMessages.WithLabelValues(kind.String())); got != 1 {
			t.Errorf("%v: %v messages", kind, got)
		}
	}
	if n, err := testutil.GatherAndCount(m.Registry, "kvlane_extproc_answer_seconds"); err != nil || n != int(extproc.NumModes) {
		t.Errorf("%d answer times, %v", n, err)
	}
}
