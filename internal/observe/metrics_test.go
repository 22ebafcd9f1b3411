package observe

import (
	"bytes"
	"encoding/json"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvlane/kvlane/kvindex"
)

func TestMetricsAreExported(t *testing.T) {
	m := New("v1")
	m.Picks.WithLabelValues("a", Rank(0), "decode").Inc()
	m.Picks.WithLabelValues("a", Rank(kvindex.NoRank), "decode").Inc()
	m.Observe(StageTotal, 30*time.Microsecond)
	m.Collect(func(emit Emit) {
		emit("active_requests", "Requests on a target.", 2, "worker", "a", "rank", "0")
	})
	problems, err := testutil.GatherAndLint(m.Registry)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	want := `
# HELP kvlane_active_requests Requests on a target.
# TYPE kvlane_active_requests gauge
kvlane_active_requests{rank="0",worker="a"} 2
# HELP kvlane_picks_total Requests sent to a target.
# TYPE kvlane_picks_total counter
kvlane_picks_total{leg="decode",rank="",worker="a"} 1
kvlane_picks_total{leg="decode",rank="0",worker="a"} 1
`
	if err := testutil.GatherAndCompare(m.Registry, strings.NewReader(want), "kvlane_picks_total", "kvlane_active_requests"); err != nil {
		t.Error(err)
	}
	if n, err := testutil.GatherAndCount(m.Registry, "kvlane_decision_seconds"); err != nil || n != int(numStages) {
		t.Errorf("%d stages, %v", n, err)
	}
}

func TestForgottenWorkersAndModelsLeaveNoSeries(t *testing.T) {
	m := New("v1")
	long := strings.Repeat("long", MaxText)
	for _, model := range []string{"a", "b", long} {
		a := m.Answer(&Entry{}, model)
		a.End(time.Now())
		m.Renders.WithLabelValues(model, "ok").Inc()
		m.TokenChecks.WithLabelValues(model, "c", "chat", "agrees").Inc()
	}
	for _, w := range []string{"a", "b", "d", "e"} {
		m.Picks.WithLabelValues(w, "0", "decode").Inc()
		m.PromptTokens.WithLabelValues(w, "0").Inc()
		m.MatchedTokens.WithLabelValues(w, "0", "event").Inc()
		for _, v := range []*prometheus.CounterVec{m.Moved, m.Predicted, m.Observed} {
			v.WithLabelValues(w).Inc()
		}
		for _, v := range []*prometheus.CounterVec{m.Responses, m.Checks, m.Legs} {
			v.WithLabelValues(w, "x").Inc()
		}
		m.FirstToken.WithLabelValues(w).Observe(1)
	}
	m.ForgetWorker("a")
	m.ForgetWorkers(func(worker string) bool { return worker == "d" || worker == "e" })
	m.ForgetModel("a")
	m.ForgetModel(long)
	families, err := m.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	left := map[string]int{}
	for _, f := range families {
		for _, s := range f.GetMetric() {
			for _, l := range s.GetLabel() {
				if l.GetName() == "worker" || l.GetName() == "model" {
					left[l.GetName()+" "+l.GetValue()]++
				}
			}
		}
	}
	if want := map[string]int{"worker b": 10, "worker c": 1, "model b": 12}; !maps.Equal(left, want) {
		t.Errorf("got series %v, want %v", left, want)
	}
	if a := m.Answer(&Entry{}, "a"); a.series == nil || len(m.answers.byModel) != 2 {
		t.Errorf("got %d models, want b, and a anew", len(m.answers.byModel))
	}
}

func TestLogLines(t *testing.T) {
	var out bytes.Buffer
	l, err := Logger(&out, "info")
	if err != nil {
		t.Fatal(err)
	}
	l.Debug().Msg("no")
	l.Info().Str("request", "r1").Msg("decided")
	var line map[string]any
	if err := json.Unmarshal(out.Bytes(), &line); err != nil {
		t.Fatal(err, out.String())
	}
	if line["request"] != "r1" || line["message"] != "decided" || line["time"] == nil {
		t.Error(line)
	}
	if _, err := Logger(&out, "loud"); err == nil {
		t.Error("level accepted")
	}
}
