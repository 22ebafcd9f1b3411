package workers

import (
	"bytes"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"github.com/kvlane/kvlane/internal/config"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// engine is an HTTP server whose health a test controls.
type engine struct {
	*httptest.Server

	sick  atomic.Bool
	pages atomic.Int64
}

func newEngine(t *testing.T) *engine {
	e := &engine{}
	e.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case e.sick.Load():
			w.WriteHeader(http.StatusServiceUnavailable)
		case r.URL.Path == "/metrics":
			e.pages.Add(1)
			_, _ = w.Write([]byte(page))
		}
	}))
	t.Cleanup(e.Close)
	return e
}

func (e *engine) address() string { return e.Listener.Addr().String() }

// log collects the lists that a registry announces.
type log struct {
	mu    sync.Mutex
	last  []Worker
	loads map[string][]RankLoad
}

func (l *log) options() Options {
	l.loads = map[string][]RankLoad{}
	return Options{
		Health: config.Health{Every: config.Duration(20 * time.Millisecond), Timeout: config.Duration(time.Second), Failures: 2},
		Scrape: 20 * time.Millisecond,
		Log:    zerolog.Nop(),
		OnChange: func(w []Worker) {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.last = w
		},
		OnLoad: func(w string, _ time.Time, loads []RankLoad) {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.loads[w] = loads
		},
	}
}

func (l *log) until(t *testing.T, what string, ok func([]Worker) bool) []Worker {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		l.mu.Lock()
		last, done := l.last, ok(l.last)
		l.mu.Unlock()
		if done {
			return last
		}
	}
	t.Fatalf("never: %s; last %+v", what, l.last)
	return nil
}

// An address that takes connections and does not answer is reported long before the configured time limit.
func TestTheFirstCheckIsShort(t *testing.T) {
	hung, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer hung.Close()
	l := &log{}
	opts := l.options()
	opts.Health.Timeout = config.Duration(time.Hour)
	r := New(opts)
	defer r.Close()
	r.Static([]config.Worker{{Name: "a", Address: hung.Addr().String(), Engine: "vllm"}})
	l.until(t, "the first check's error", func(w []Worker) bool { return len(w) == 1 && strings.Contains(w[0].Reason, "i/o timeout") })
	if r.Settled() {
		t.Error("settled after the short check, want the one with the configured timeout waited for")
	}
}

func TestAWorkerComesSickensRecoversAndGoes(t *testing.T) {
	e, l := newEngine(t), &log{}
	r := New(l.options())
	defer r.Close()
	r.Static([]config.Worker{{Name: "a", Address: e.address(), Engine: "vllm"}})
	first := l.until(t, "ready", func(w []Worker) bool { return len(w) == 1 && w[0].Ready })
	e.sick.Store(true)
	l.until(t, "sick", func(w []Worker) bool { return len(w) == 1 && !w[0].Ready && strings.Contains(w[0].Reason, "503") })
	e.sick.Store(false)
	again := l.until(t, "well", func(w []Worker) bool { return len(w) == 1 && w[0].Ready })
	if again[0].Generation != first[0].Generation {
		t.Error("a worker that recovered is not a newcomer")
	}
	r.Set("static", []Entry{{Worker: config.Worker{Name: "a", Address: e.address(), Engine: "vllm"}, Draining: true}})
	l.until(t, "draining", func(w []Worker) bool { return len(w) == 1 && w[0].Draining })
	r.Static(nil)
	l.until(t, "gone", func(w []Worker) bool { return len(w) == 0 })
}

// What a worker sends in place of HTTP is quoted in part.
func TestReasonsAreBounded(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer l.Close()
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Read(make([]byte, 1<<10))
			_, _ = conn.Write([]byte(strings.Repeat("x", maxHead/2) + "\r\n"))
			_ = conn.Close()
		}
	})
	told, lines := &log{}, &lockedText{}
	o := told.options()
	o.Log = zerolog.New(lines)
	r := New(o)
	defer r.Close()
	r.Static([]config.Worker{{Name: "a", Address: l.Addr().String(), Engine: "vllm"}})
	w := told.until(t, "checked", func(w []Worker) bool { return len(w) == 1 && strings.Contains(w[0].Reason, "malformed") })
	if n := len(w[0].Reason); n > 1024 {
		t.Errorf("got a reason of %d bytes, want at most 1024", n)
	}
	if text := lines.String(); !strings.Contains(text, "malformed") || len(text) > 2048 {
		t.Errorf("got a log of %d bytes, %.200q, want one short line with the reason", len(text), text)
	}
}

// The load of a worker is read when it has become ready, whatever the interval, and not while it is not.
func TestLoadIsReadWhenAWorkerBecomesReady(t *testing.T) {
	e := newEngine(t)
	told := &log{}
	o := told.options()
	o.Scrape = time.Hour
	r := New(o)
	defer r.Close()
	r.Static([]config.Worker{{Name: "a", Address: e.address(), Engine: "vllm"}})
	for _, want := range []int64{1, 2} {
		told.until(t, "load read", func([]Worker) bool { return e.pages.Load() == want })
		e.sick.Store(true)
		told.until(t, "not ready", func(w []Worker) bool { return !w[0].Ready })
		if got := e.pages.Load(); got != want {
			t.Errorf("got %d pages read, want %d", got, want)
		}
		e.sick.Store(false)
	}
}

// What an engine reports about its cache is passed on at most once per warnEvery.
func TestAnAlternatingCacheIsReportedRarely(t *testing.T) {
	n := 0
	address, _, _ := listener(t, func(w http.ResponseWriter, _ *http.Request) {
		n++
		fmt.Fprintf(w, "vllm:cache_config_info{block_size=\"%d\"} 1\n", 16+n%2)
	})
	var got []int
	r := New(Options{Log: zerolog.Nop(), OnLoad: func(string, time.Time, []RankLoad) {}, OnCache: func(_ string, c EngineCache) { got = append(got, c.BlockSize) }})
	defer r.Close()
	p, w := newProber(t), &tracked{worker: Worker{Ready: true, Worker: config.Worker{Name: "a", Address: address, Engine: "vllm"}}}
	for range 10 {
		r.scrape(t.Context(), w, p)
	}
	w.reported = w.reported.Add(-warnEvery)
	r.scrape(t.Context(), w, p) // the same as the first
	r.scrape(t.Context(), w, p)
	if want := []int{17, 16}; !slices.Equal(got, want) {
		t.Errorf("got reports %v, want %v", got, want)
	}
}

// The report has the ranks that the page names, and a page that is not there is a report, too.
func TestReportsHaveRanks(t *testing.T) {
	status := http.StatusOK
	address, _, _ := listener(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		fmt.Fprint(w, "vllm:num_requests_running{engine=\"5\"} 1\nvllm:num_requests_running{engine=\"4\"} 1\nvllm:num_requests_running 1\n")
	})
	p := newProber(t)
	if _, err := p.loads(t.Context(), address, "vllm"); err != nil || p.cache != (EngineCache{FirstRank: 4, Ranks: 2}) {
		t.Errorf("got %+v %v, want two ranks from 4 on", p.cache, err)
	}
	status = http.StatusNotFound
	if _, err := p.loads(t.Context(), address, "vllm"); err == nil || p.cache != (EngineCache{NoLoad: "GET /metrics: status 404"}) {
		t.Errorf("got %+v %v, want why there is no report", p.cache, err)
	}
	kept := p.cache
	if _, err := p.loads(t.Context(), "127.0.0.1:1", "vllm"); err == nil || p.cache != kept {
		t.Errorf("got %+v %v, want the last report and an error: health checks say that the engine is away", p.cache, err)
	}
}

// When Settled returns true the listener has already got the results of the checks.
func TestSettledMeansTold(t *testing.T) {
	e, l := newEngine(t), &log{}
	o := l.options()
	tell, open := o.OnChange, make(chan struct{})
	o.OnChange = func(w []Worker) {
		<-open
		tell(w)
	}
	r := New(o)
	defer r.Close()
	r.Static([]config.Worker{{Name: "a", Address: e.address(), Engine: "vllm"}})
	for ready := false; !ready; time.Sleep(time.Millisecond) {
		w := r.Workers()
		ready = len(w) == 1 && w[0].Ready
		if r.Settled() {
			t.Fatal("settled before anybody was told")
		}
	}
	close(open)
	for !r.Settled() {
		time.Sleep(time.Millisecond)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.last) != 1 || !l.last[0].Ready {
		t.Errorf("settled, and told %+v", l.last)
	}
}

func TestARefusedConnectionCountsAtOnce(t *testing.T) {
	e, l := newEngine(t), &log{}
	o := l.options()
	o.Health.Every = config.Duration(time.Hour) // only Suspect triggers a check
	o.Health.Failures = 100
	r := New(o)
	defer r.Close()
	r.Static([]config.Worker{{Name: "a", Address: e.address(), Engine: "vllm"}})
	l.until(t, "ready", func(w []Worker) bool { return len(w) == 1 && w[0].Ready })
	e.Close()
	r.Suspect("a")
	r.Suspect("unknown")
	l.until(t, "down", func(w []Worker) bool { return len(w) == 1 && !w[0].Ready })
}

func TestANewProcessBehindAnOldAddressInheritsNothing(t *testing.T) {
	e, l := newEngine(t), &log{}
	r := New(l.options())
	defer r.Close()
	w := config.Worker{Name: "a", Address: e.address(), Engine: "vllm"}
	r.Set("pods", []Entry{{Worker: w, Identity: "uid-1"}})
	first := l.until(t, "ready", func(w []Worker) bool { return len(w) == 1 && w[0].Ready })
	r.Set("pods", []Entry{{Worker: w, Identity: "uid-2"}})
	l.until(t, "a new generation", func(w []Worker) bool { return len(w) == 1 && w[0].Ready && w[0].Generation > first[0].Generation })
}

func TestTheFirstSourceOwnsAName(t *testing.T) {
	e, l := newEngine(t), &log{}
	r := New(l.options())
	defer r.Close()
	r.Set("b", []Entry{{Worker: config.Worker{Name: "x", Address: "127.0.0.1:1", Engine: "vllm"}}})
	r.Set("a", []Entry{{Worker: config.Worker{Name: "x", Address: e.address(), Engine: "vllm"}}})
	l.until(t, "the one of source a", func(w []Worker) bool { return len(w) == 1 && w[0].Address == e.address() && w[0].Ready })
}

func TestTheWorkersFileIsFollowedAndABadOneIsNotTaken(t *testing.T) {
	e, l := newEngine(t), &log{}
	file := filepath.Join(t.TempDir(), "workers.yaml")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r := New(l.options())
	defer r.Close()
	if err := r.File(file); err == nil {
		t.Fatal("a missing file is accepted")
	}
	write("- {name: a, address: \"" + e.address() + "\"}\n")
	if err := r.File(file); err != nil {
		t.Fatal(err)
	}
	l.until(t, "a", func(w []Worker) bool { return len(w) == 1 && w[0].Name == "a" })
	write("- {name: a, addrss: x}\n")
	time.Sleep(2 * filePoll)
	l.until(t, "a still", func(w []Worker) bool { return len(w) == 1 && w[0].Name == "a" })
	write("- {name: b, address: \"" + e.address() + "\"}\n")
	l.until(t, "b", func(w []Worker) bool { return len(w) == 1 && w[0].Name == "b" })
}

// A file that is truncated, empty or gone does not empty the fleet; an explicit empty list
// does.
func TestAWorkersFileThatIsNotWhole(t *testing.T) {
	e, l := newEngine(t), &log{}
	file := filepath.Join(t.TempDir(), "workers.yaml")
	var lines lockedText
	o := l.options()
	o.Log = zerolog.New(&lines)
	r := New(o)
	defer r.Close()
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	told := func(what string) {
		t.Helper()
		for deadline := time.Now().Add(20 * time.Second); !strings.Contains(lines.String(), what); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("never told: %s\n%s", what, lines.String())
			}
		}
		if n := len(r.Workers()); n != 2 {
			t.Errorf("%s: %d workers", what, n)
		}
		lines.Reset()
	}
	r.Static([]config.Worker{{Name: "a", Address: e.address(), Engine: "vllm"}})
	entry := func(name string) string { return "- {name: " + name + ", address: \"127.0.0.1:1\"}\n" }
	write(entry("a") + strings.Replace(entry("b"), ":1", ":2", 1))
	if err := r.File(file); err != nil {
		t.Fatal(err)
	}
	told("worker left out: another source has its name")
	for _, w := range r.Workers() {
		if w.Name == "a" && w.Address != e.address() {
			t.Errorf("a name of the configuration belongs to %s", w.Address)
		}
	}
	write("")
	told("has no list of workers; an empty one is written []")
	write("# nobody yet\n")
	told("has no list of workers; an empty one is written []")
	write(strings.TrimSuffix(entry("b"), "\"}\n"))
	told("workers file rejected: the old list stays")
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	told("workers file not read: the old list stays")
	stuck := func(want string) {
		t.Helper()
		for deadline := time.Now().Add(20 * time.Second); want == "" && len(r.Stuck()) > 0 || !strings.Contains(strings.Join(r.Stuck(), ""), want); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("got %q, want %q alone", r.Stuck(), want)
			}
		}
	}
	stuck("workers file not read: the old list stays: open " + file)
	good := entry("a") + strings.Replace(entry("b"), ":1", ":2", 1)
	write(good)
	stuck("")
	lines.Reset()
	write(good + strings.Repeat("#", 4<<20)) // too long
	told("workers file not read: the old list stays")
	stuck(file + " has more than 4194304 bytes")
	write(good) // as before
	stuck("")
	write("[]\n")
	l.until(t, "only the configuration's", func(w []Worker) bool { return len(w) == 1 && w[0].Name == "a" })
	if text := lines.String(); !strings.Contains(text, "workers file read") || !strings.Contains(text, "worker removed") {
		t.Errorf("told:\n%s", text)
	}
}

// lockedText is a log that a test reads while it is written.
type lockedText struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lockedText) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lockedText) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func (l *lockedText) Reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text.Reset()
}

func TestDNSFillsInTheAddress(t *testing.T) {
	l := &log{}
	r := New(l.options())
	defer r.Close()
	r.DNS(config.DNS{Name: "localhost", Port: 8123, Every: config.Duration(time.Second),
		Worker: config.Worker{Engine: "vllm", Events: config.Events{Endpoint: "tcp://$ip:5557"}, Disagg: config.WorkerDisagg{ZMQ: "$ip:14579"}}})
	got := l.until(t, "resolved", func(w []Worker) bool { return len(w) > 0 })
	for _, w := range got {
		if w.Address == "127.0.0.1:8123" && w.Events.Endpoint == "tcp://127.0.0.1:5557" && w.Disagg.ZMQ == "127.0.0.1:14579" {
			return
		}
	}
	t.Errorf("workers %+v", got)
}

func TestLoadsAreRead(t *testing.T) {
	e, l := newEngine(t), &log{}
	r := New(l.options())
	defer r.Close()
	r.Static([]config.Worker{{Name: "a", Address: e.address(), Engine: "vllm"}})
	for range 3 { // one after the other
		l.until(t, "a report", func([]Worker) bool { return l.loads["a"] != nil })
		l.mu.Lock()
		if !reflect.DeepEqual(l.loads["a"], parseLoads([]byte(page), "vllm")) {
			t.Errorf("loads %+v", l.loads["a"])
		}
		delete(l.loads, "a")
		l.mu.Unlock()
	}
}

const page = `# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting{engine="0",model_name="m"} 7.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 5.0
vllm:num_requests_waiting{engine="1",model_name="m"} 1
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
`

func TestLoadPagesOfEveryEngine(t *testing.T) {
	for _, c := range []struct {
		name, engine, page string
		want               []RankLoad
	}{
		{"vllm", "vllm", page, []RankLoad{{0, 3, 7, 0.25}, {1, 0, 1, 0.5}}},
		{"one rank without a label", "vllm", "vllm:num_requests_running 2\n", []RankLoad{{-1, 2, 0, 0}}},
		{"sglang", "sglang", `sglang:num_running_reqs{model_name="m",dp_rank="1",tp_rank="0"} 4
sglang:num_queue_reqs{model_name="m",dp_rank="1",tp_rank="0"} 2
sglang:token_usage{model_name="m",dp_rank="1",tp_rank="0"} 0.75`, []RankLoad{{1, 4, 2, 0.75}}},
		{"trtllm", "trtllm", "trtllm_num_requests_waiting 1 1700000000\n", []RankLoad{{-1, 0, 1, 0}}},
		{"a label that ends alike", "vllm", `vllm:num_requests_running{my_engine="3"} 1` + "\n", []RankLoad{{-1, 1, 0, 0}}},
		{"a label that ends like the rank's", "vllm", `vllm:num_requests_running{model_name="engine=",engine="2"} 1` + "\n", []RankLoad{{2, 1, 0, 0}}},
		{"no number of requests", "vllm", "vllm:num_requests_running +Inf\nvllm:num_requests_waiting 1e300\n", nil},
		{"a brace and a quote in a label", "vllm", `vllm:num_requests_running{model_name="a}\"b",engine="2"} 1` + "\n", []RankLoad{{2, 1, 0, 0}}},
		{"garbage", "vllm", "vllm:num_requests_running{engine=\"0\" 3\nvllm:num_requests_running x\nvllm:num_requests_running", nil},
		{"unknown engine", "other", page, nil},
	} {
		if got := parseLoads([]byte(c.page), c.engine); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
}

// An engine that names more ranks than a worker may have costs no more than a long page, and the ranks that fit are all read.
func TestRanksOfAPageAreBounded(t *testing.T) {
	named := func(n int) []byte {
		var b bytes.Buffer
		for i := range n {
			fmt.Fprintf(&b, "vllm:num_requests_running{engine=\"%d\"} 2\n", i)
		}
		for i := range n {
			fmt.Fprintf(&b, "vllm:num_requests_waiting{engine=\"%d\"} 3\n", i)
		}
		return b.Bytes()
	}
	for _, n := range []int{maxRanks, maxRanks + 1, 5 * maxRanks} {
		loads := parseLoads(named(n), "vllm")
		if len(loads) != maxRanks {
			t.Errorf("%d ranks: got %d, want %d", n, len(loads), maxRanks)
		}
		for i, l := range loads {
			if want := (RankLoad{int32(i), 2, 3, 0}); l != want {
				t.Fatalf("%d ranks: got %+v, want %+v", n, l, want)
			}
		}
	}
}

func FuzzParseLoads(f *testing.F) {
	for _, engine := range []string{"vllm", "sglang", "trtllm"} {
		f.Add([]byte(page), engine, "", uint8(3), uint32(2))
		f.Add([]byte("vllm:num_requests_running{} "), engine, ",engine=", uint8(0), uint32(1<<31))
		f.Add([]byte("vllm:num_requests_running +Inf\nvllm:num_requests_waiting 1e300\nvllm:kv_cache_usage_perc NaN\n"), engine, "}\\\n", uint8(255), uint32(0))
	}
	f.Fuzz(func(t *testing.T, p []byte, engine, label string, rank uint8, value uint32) {
		loads := parseLoads(p, engine)
		for _, l := range loads {
			if !(l.Running >= 0 && l.Waiting >= 0 && l.KVUsage >= 0) || l.Running > 1<<53 || l.Waiting > 1<<53 || l.Rank < -1 {
				t.Errorf("got %+v, want counts that fit into an integer", l)
			}
		}
		if len(loads) > 1+bytes.Count(p, []byte{'\n'}) {
			t.Errorf("got %d ranks of %d lines", len(loads), 1+bytes.Count(p, []byte{'\n'}))
		}
		// A page as the Prometheus client writes it, whatever a label holds.
		names, known := engineSeries[engine]
		value %= maxGauge
		escaped := strings.NewReplacer("\\", "\\\\", "\"", "\\\"", "\n", "\\n").Replace(label)
		line := fmt.Sprintf("%s{a_name=\"%s\",%s=\"%d\",z=\"%s\"} %d\n", names.waiting, escaped, names.rank, rank, escaped, value)
		if !known {
			return
		}
		if got, want := parseLoads([]byte("# HELP x\n"+line), engine), (RankLoad{Rank: int32(rank), Waiting: float64(value)}); !slices.Equal(got, []RankLoad{want}) {
			t.Errorf("%q: got %+v, want %+v", line, got, want)
		}
	})
}

// Workers of one slot have their turns together, whenever each of them was added; those of another slot do not.
func TestTurnsOfASlotAreTogether(t *testing.T) {
	const every = time.Second
	for _, now := range []time.Duration{0, 299 * time.Millisecond, 300 * time.Millisecond, 301 * time.Millisecond, time.Hour + 1} {
		for slot, phase := range map[int64]time.Duration{0: 0, 3: 300 * time.Millisecond, 9: 900 * time.Millisecond} {
			turns := newTurns(every, slot)
			turns.Stop()
			if wait := turns.until(now); wait <= 0 || wait > every || (now+wait)%every != phase {
				t.Errorf("slot %d at %s: the next turn is after %s, want at %s of a second", slot, now, wait, phase)
			}
		}
	}
}
