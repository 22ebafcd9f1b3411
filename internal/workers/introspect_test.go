package workers

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/lab/enginesim"
	"github.com/kvlane/kvlane/internal/tokens/models"
)

func TestEnginesSayWhatTheyAre(t *testing.T) {
	files, err := models.Open(models.Builtin + "qwen3")
	if err != nil {
		t.Fatal(err)
	}
	tok, err := enginesim.LoadTokenizer(files)
	if err != nil {
		t.Fatal(err)
	}
	a := NewAsker(5 * time.Second)
	defer a.Close()
	for _, c := range []struct {
		opts enginesim.Options
		want Facts
	}{
		{enginesim.Options{Engine: enginesim.VLLM, Ranks: 2, StartRank: 4, EventsEndpoint: "tcp://127.0.0.1:0", EventsTopic: "kv"}, Facts{Engine: "vllm", Ranks: 2, StartRank: 4}},
		{enginesim.Options{Engine: enginesim.SGLang, Ranks: 2, BlockSize: 32, EventsEndpoint: "tcp://127.0.0.1:0", ReplayEndpoint: "tcp://127.0.0.1:0"}, Facts{Engine: "sglang", Ranks: 2, BlockSize: 32}},
		{enginesim.Options{Engine: enginesim.TRTLLM, BlockSize: 64}, Facts{Engine: "trtllm", BlockSize: 64}},
	} {
		t.Run(string(c.opts.Engine), func(t *testing.T) {
			c.opts.Tokenizer, c.opts.Model = tok, "m"
			e, err := enginesim.Start(t.Context(), c.opts)
			if err != nil {
				t.Fatal(err)
			}
			defer e.Close()
			got, err := a.Ask(t.Context(), e.Addr())
			if err != nil {
				t.Fatal(err)
			}
			c.want.Models = []string{"m"}
			if c.opts.Engine == enginesim.SGLang {
				if got.BootstrapPort == 0 {
					t.Error("no bootstrap port")
				}
				c.want.BootstrapPort = got.BootstrapPort // a free port
			}
			if c.opts.EventsEndpoint != "" {
				c.want.Events = config.Events{Endpoint: e.EventsEndpoint(0), Replay: e.ReplayEndpoint(0), Topic: c.opts.EventsTopic}
			}
			if !reflect.DeepEqual(got, c.want) {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
		})
	}
}

// SGLang says at one of two pages whether it caches prefixes; the older one is asked for of no other engine.
func TestSGLangSaysWhetherItCaches(t *testing.T) {
	const info = `{"page_size": 64, "dp_size": 2, "disable_radix_cache": true}`
	for _, c := range []struct {
		page, owner string
		want        Facts
	}{
		{"/server_info", "sglang", Facts{Engine: "sglang", Ranks: 2, BlockSize: 64, NoPrefixCache: true}},
		{"/get_server_info", "sglang", Facts{Engine: "sglang", Ranks: 2, BlockSize: 64, NoPrefixCache: true}},
		{"/get_server_info", "vllm", Facts{Engine: "vllm"}},
	} {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/v1/models":
				fmt.Fprintf(w, `{"data": [{"id": "m", "owned_by": %q}]}`, c.owner)
			case c.page:
				fmt.Fprint(w, info)
			default:
				http.NotFound(w, r)
			}
		}))
		defer s.Close()
		a := NewAsker(5 * time.Second)
		defer a.Close()
		c.want.Models = []string{"m"}
		if got, err := a.Ask(t.Context(), s.Listener.Addr().String()); err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s of %s: got %+v, %v, want %+v", c.page, c.owner, got, err, c.want)
		}
	}
}

func TestWhatIsNoEngineTellsNothing(t *testing.T) {
	answer := `{"path": "/", "headers": {"a": ["b"]}, "pod": "echo"}`
	status := http.StatusOK
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		_, _ = w.Write([]byte(answer))
	}))
	defer s.Close()
	a := NewAsker(5 * time.Second)
	defer a.Close()
	address := s.Listener.Addr().String()
	for _, answer = range []string{answer, "[]", "{}", "hello", `{"0": {}}`, `{"data": [{}]}`} {
		if f, err := a.Ask(t.Context(), address); err != nil || !reflect.DeepEqual(f, Facts{}) {
			t.Errorf("%s: %+v %v", answer, f, err)
		}
	}
	status = http.StatusNotFound
	if _, err := a.Ask(t.Context(), address); err != nil {
		t.Error(err)
	}
	status = http.StatusServiceUnavailable
	if _, err := a.Ask(t.Context(), address); err == nil {
		t.Error("an engine that is not up yet has told everything")
	}
}

// Of an engine's list a bounded part is kept, whatever it has many of.
func TestAListOfModelsIsBounded(t *testing.T) {
	long := strings.Repeat("n", maxListed+1)
	for item, want := range map[string]int{`{"id":"m"}`: maxModels, `{"id":"` + long + `"}`: 0, `{"id":"` + long[1:] + `","root":"` + long + `"}`: maxModels} {
		body := []byte(`{"data":[` + strings.Repeat(item+",", maxFacts/len(item)-1) + item + `]}`)
		var facts Facts
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		list, err := listOf(body)
		runtime.ReadMemStats(&after)
		if err != nil || readModels(&facts, body, "") != nil || len(list) != want || len(facts.Models) != want || cap(list) > 2*maxModels {
			t.Errorf("%.20s: got %d models, room for %d, %v, want %d", item, len(list), cap(list), err, want)
		}
		if n := after.TotalAlloc - before.TotalAlloc; n > 6*maxFacts {
			t.Errorf("%.20s: got %d bytes allocated for a list of %d", item, n, len(body))
		}
	}
}

// A topic is kept and sent to the engine as the subscription, and endpoints are kept: long ones count as no answer.
func TestSourcesOfEventsAreBounded(t *testing.T) {
	said := `{"0":{"enable_kv_cache_events":true,"endpoint":"tcp://%s:5557","replay_endpoint":"tcp://%s:5558","topic":"%s"}}`
	var answer string
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/kv_event_sources" {
			http.NotFound(w, r)
			return
		}
		_, _ = w.Write([]byte(answer))
	}))
	defer s.Close()
	a := NewAsker(5 * time.Second)
	defer a.Close()
	long := strings.Repeat("t", maxListed+1)
	for text, known := range map[string]bool{
		fmt.Sprintf(said, "*", "*", long[1:]): true, fmt.Sprintf(said, "*", "*", long): false, fmt.Sprintf(said, long, "*", "kv"): false, fmt.Sprintf(said, "*", long, "kv"): false,
	} {
		answer = text
		f, err := a.Ask(t.Context(), s.Listener.Addr().String())
		if err != nil || (f.Events.Endpoint != "") != known || (f.Engine != "") != known {
			t.Errorf("%.90s: got %.90q, %v, want known %v", answer, f.Events.Endpoint, err, known)
		}
	}
}

func TestAnEngineSendsUsNowhere(t *testing.T) {
	var reached atomic.Int32
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached.Add(1) }))
	defer elsewhere.Close()
	s := httptest.NewServer(http.RedirectHandler(elsewhere.URL, http.StatusTemporaryRedirect))
	defer s.Close()
	a := NewAsker(5 * time.Second)
	defer a.Close()
	address := s.Listener.Addr().String()
	if f, err := a.Ask(t.Context(), address); err != nil || !reflect.DeepEqual(f, Facts{}) {
		t.Errorf("%+v %v", f, err)
	}
	p := &prober{timeout: 5 * time.Second}
	defer p.close()
	if err := p.health(t.Context(), address); err == nil {
		t.Error("an engine is healthy because another one is")
	}
	if _, err := p.loads(t.Context(), address, "vllm"); err == nil {
		t.Error("an engine's load is another one's")
	}
	if n := reached.Load(); n != 0 {
		t.Errorf("%d questions were asked elsewhere", n)
	}
}

func TestEndpointsAreMadeReachable(t *testing.T) {
	for from, want := range map[string]string{
		"tcp://*:5557": "tcp://10.0.0.1:5557", "tcp://0.0.0.0:5557": "tcp://10.0.0.1:5557", "tcp://[::]:5557": "tcp://10.0.0.1:5557",
		"tcp://127.0.0.1:1": "tcp://10.0.0.1:1", "tcp://localhost:1": "tcp://10.0.0.1:1", "tcp://10.9.9.9:1": "tcp://10.9.9.9:1",
		"ipc:///tmp/x": "", "inproc://y": "", "tcp://*": "", "": "", "tcp://[": "",
	} {
		if got := reach(from, "10.0.0.1"); got != want {
			t.Errorf("%s: %q, want %q", from, got, want)
		}
	}
}

func FuzzFacts(f *testing.F) {
	for _, s := range []string{
		`{"data":[{"id":"m","owned_by":"vllm"}]}`, `{"0":{"enable_kv_cache_events":true,"endpoint":"tcp://*:5557","replay_endpoint":null,"topic":""}}`,
		`{"page_size":16,"dp_size":2,"kv_events":{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":5557}}`, `{"tokens_per_block":32}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, read := range []func(*Facts, []byte, string) error{readModels, readEventSources, readServerInfo} {
			var facts Facts
			if read(&facts, body, "10.0.0.1") != nil {
				continue
			}
			if facts.Ranks < 0 || facts.StartRank < 0 || facts.BlockSize < 0 || facts.BootstrapPort < 0 {
				t.Errorf("%+v of %q", facts, body)
			}
			if e := facts.Events.Endpoint; e != "" && !strings.HasPrefix(e, "tcp://") {
				t.Errorf("endpoint %q", e)
			}
		}
	})
}

func TestASourceCanHoldAWorkerForNotReady(t *testing.T) {
	e, l := newEngine(t), &log{}
	r := New(l.options())
	defer r.Close()
	w := config.Worker{Name: "a", Address: e.address(), Engine: "vllm"}
	r.Set("pods", []Entry{{Worker: w, Unready: "pod not ready"}})
	l.until(t, "not ready by its source", func(w []Worker) bool {
		return len(w) == 1 && !w[0].Ready && w[0].Reason == "pod not ready" && r.Settled()
	})
	r.Set("pods", []Entry{{Worker: w}})
	l.until(t, "ready at its word", func(w []Worker) bool { return len(w) == 1 && w[0].Ready })
	e.sick.Store(true)
	l.until(t, "sick", func(w []Worker) bool { return len(w) == 1 && !w[0].Ready && strings.Contains(w[0].Reason, "503") })
}
