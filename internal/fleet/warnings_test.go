package fleet

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/tokens/shape"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
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
		f.mismatch(m, "other_models", long)
	}
	(&sink{fleet: f, m: m}).Warn(kvindex.Target{Worker: "a"}, feed.WrongRank, long)
	f.mismatch(m, "no_events", "short")
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

// Who sends events that are wrong in each batch does not fill the log.
func TestLinesAboutAFeedAreBounded(t *testing.T) {
	f := newFleet(t, "")
	var log bytes.Buffer
	f.Log = zerolog.New(&log)
	w := worker("a", 1)
	w.Events.Endpoint = config.PushEndpoint
	f.SetWorkers([]workers.Worker{w})
	sink, err := f.feeds.accept(&kvlanev1.Hello{Worker: "a", Engine: "vllm", Rank: new(int32)})
	if err != nil {
		t.Fatal(err)
	}
	for range 5000 {
		sink.State(kvindex.Target{Worker: "a"}, feed.Gap, feed.Lost)
		sink.Clear(kvindex.Target{Worker: "a"}, feed.Lost)
		sink.State(kvindex.Target{Worker: "a"}, feed.Live, feed.CaughtUp)
	}
	for _, text := range []string{"target cleared", "feed changed"} {
		if n := bytes.Count(log.Bytes(), []byte(text)); n == 0 || n > 3*feedLines { // in what may be three periods
			t.Errorf("got %d lines with %q, want some and at most %d", n, text, 3*feedLines)
		}
	}
}

// A name that the engine does not serve is not also one to write an entry for, and a list that is cut is not given as advice.
func TestAWrongNameIsSaidOnce(t *testing.T) {
	for _, c := range []struct {
		served int
		advice string
	}{{8, "write models: [m0, m1, m2, m3, m4, m5, m6, m7]"}, {9, "write what it serves"}} {
		var names []string
		for i := range c.served {
			names = append(names, fmt.Sprintf(`{"id":"m%d"}`, i))
		}
		engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprintf(w, `{"data":[%s]}`, strings.Join(names, ","))
		}))
		w := worker("a", 1)
		w.Address, w.Models = engine.Listener.Addr().String(), []string{"qwen"}
		served := worker("b", 1)
		served.Address, served.Models = w.Address, []string{"m1"}
		f := newFleet(t, "", w, served)
		texts := func() map[string]string {
			out := map[string]string{}
			for _, w := range f.Warnings() {
				out[w.Worker+" "+w.Reason] = w.Text
			}
			return out
		}
		for texts()["a other_models"] == "" { // the test's timeout ends it
			time.Sleep(5 * time.Millisecond)
		}
		got := texts()
		if other := got["a other_models"]; !strings.HasSuffix(other, c.advice) || got["a unknown_model"] != "" || got["b unknown_model"] == "" {
			t.Errorf("%d names: got %q, want one warning of worker a, with %q, and that b's model has no entry", c.served, got, c.advice)
		}
		engine.Close()
	}
}

// Advice for SGLang is given to SGLang only.
func TestAdviceForLoadReports(t *testing.T) {
	for _, engine := range []string{"vllm", "sglang", "trtllm"} {
		w := worker("a", 1)
		w.Ready, w.Engine = false, engine
		f := newFleet(t, "", w)
		f.EngineCache("a", workers.EngineCache{NoLoad: "GET /metrics: status 404"})
		got := ""
		for _, w := range f.Warnings() {
			if w.Reason == "no_load_report" {
				got = w.Text
			}
		}
		if !strings.Contains(got, "status 404") || strings.Contains(got, "--enable-metrics") != (engine == "sglang") {
			t.Errorf("%s: got %q, want why, and an option for SGLang only", engine, got)
		}
	}
}

// The ranks that an engine has are compared with those of the configuration, except where they cannot be known.
func TestRanksAreCompared(t *testing.T) {
	for _, c := range []struct {
		ranks, start int
		by, engine   string
		first, has   int // what the engine says
		want         string
	}{
		{ranks: 2, has: 2}, {ranks: 1, has: 1}, {has: 1}, {ranks: 2, start: 4, first: 4, has: 2},
		{ranks: 2}, // no ranks are named
		{ranks: 4, by: "port", has: 1},
		{by: "none", has: 2},
		{ranks: 2, engine: "trtllm", has: 1},
		{has: 2, want: "write ranks: 2"},
		{ranks: 2, by: "none", has: 4, want: "write ranks: 4"},
		{ranks: 2, has: 1, want: "write ranks: 1"},
		{ranks: 2, first: 2, has: 2, want: "write start_rank: 2"},
	} {
		w := worker("a", c.ranks)
		w.Ready = false // not asked for its models
		w.StartRank, w.RankBy, w.Engine = c.start, cmp.Or(c.by, "header"), cmp.Or(c.engine, "vllm")
		f := newFleet(t, "", w)
		f.EngineCache("a", workers.EngineCache{FirstRank: c.first, Ranks: c.has})
		got := ""
		for _, w := range f.Warnings() {
			if w.Reason == "other_ranks" {
				got = w.Text
			}
		}
		if !strings.HasSuffix(got, c.want) || (got == "") != (c.want == "") {
			t.Errorf("%+v: got %q", c, got)
		}
		f.EngineCache("a", workers.EngineCache{FirstRank: w.StartRank, Ranks: max(w.Ranks, 1)})
		for _, w := range f.Warnings() {
			if w.Reason == "other_ranks" {
				t.Errorf("%+v: got %q after the engine has the ranks, want nothing", c, w.Text)
			}
		}
	}
}

// Whether a tokenizer could be compared is told of each model on each worker: of the model whose ids the engine does not return,
// and only until it does.
func TestTokensNotComparedAreOfAModelAndAWorker(t *testing.T) {
	good, refuses := startTokenizing(t), atomic.Bool{}
	half := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		raw, err := io.ReadAll(r.Body)
		if r.Body = io.NopCloser(bytes.NewReader(raw)); err == nil && refuses.Load() && bytes.Contains(raw, []byte(`"other"`)) {
			http.NotFound(w, r)
			return
		}
		good.Config.Handler.ServeHTTP(w, r)
	}))
	defer half.Close()
	refuses.Store(true)
	c, err := config.Parse("test.yaml", []byte(`models:
- {name: demo, tokenizer: "builtin:qwen3", check: {retry: 10ms}}
- {name: other, tokenizer: "builtin:qwen3", check: {retry: 10ms}}
`))
	if err != nil {
		t.Fatal(err)
	}
	m, err := qwen()
	if err != nil {
		t.Fatal(err)
	}
	f := start(t, c, &Model{Config: c.Models[0], Tokens: m}, &Model{Config: c.Models[1], Tokens: m})
	a, b := worker("a", 0), worker("b", 0)
	a.Address, a.Models = half.Listener.Addr().String(), []string{"demo", "other"}
	b.Address, b.Models = good.Listener.Addr().String(), a.Models
	f.SetWorkers([]workers.Worker{a, b})
	compared := func() (n int) {
		for _, name := range a.Models {
			for _, check := range f.Model(name).agreement.all() {
				if check.checker.State() == shape.Agrees {
					n++
				}
			}
		}
		return n
	}
	texts := func() (list []string) {
		for _, w := range f.Warnings() {
			if w.Reason == "tokens_not_compared" {
				list = append(list, w.String())
			}
		}
		return list
	}
	for compared() < 3 || len(texts()) == 0 { // the test's timeout ends it
		time.Sleep(time.Millisecond)
	}
	if got, want := texts(), "worker a: whether the tokenizer of model other is its own is not known"; len(got) != 1 || !strings.HasPrefix(got[0], want) {
		t.Errorf("got %q, want one, %q", got, want)
	}
	refuses.Store(false)
	for compared() < 4 {
		time.Sleep(time.Millisecond)
	}
	if got := texts(); len(got) > 0 {
		t.Errorf("got %q of an engine that returns ids now, want none", got)
	}
}

// An engine may serve a thousand names; a page shows a few of each worker.
func TestModelsOfAWorkerOnThePagesAreBounded(t *testing.T) {
	w := worker("a", 1)
	w.Models = nil
	for i := range 25 {
		w.Models = append(w.Models, fmt.Sprint("m", i))
	}
	f := newFleet(t, "", w, worker("b", 1))
	rows := f.Workers()
	if a, b := rows[0], rows[1]; len(a.Models) != observe.MaxShown || a.More != 5 || len(b.Models) != 1 || b.More != 0 {
		t.Errorf("got %d models and %d more, and %d and %d, want 20 and 5, 1 and 0", len(a.Models), a.More, len(b.Models), b.More)
	}
}
