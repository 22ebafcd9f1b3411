package decide

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/workers"
)

// listing is a worker whose engine lists these models; "" for one that does not answer in time.
func listing(t *testing.T, name, list string, models ...string) workers.Worker {
	t.Helper()
	over := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if list == "" {
			<-over
		}
		_, _ = io.WriteString(w, list)
	}))
	t.Cleanup(srv.Close)
	t.Cleanup(func() { close(over) })
	w := worker(name, 0)
	w.Address, w.Models = srv.Listener.Addr().String(), models
	return w
}

// GET /v1/models is answered with the models of all workers, each once, in an order that does not change.
func TestTheListOfModelsIsThatOfAllWorkers(t *testing.T) {
	const (
		demo  = `{"id":"demo","object":"model","created":7,"owned_by":"vllm","root":"/m","parent":null,"max_model_len":64,"permission":[{}]}`
		lora  = `{"id":"lora","object":"model","created":8,"owned_by":"vllm","root":"/l","parent":"demo"}`
		other = `{"id":"a-model","owned_by":"sglang"}`
	)
	list := func(models ...string) string { return `{"object":"list","data":[` + strings.Join(models, ",") + `]}` }
	for name, c := range map[string]struct {
		workers []workers.Worker
		want    string // ids, "" if the request is forwarded
	}{
		"two workers":    {[]workers.Worker{listing(t, "a", list(lora, demo)), listing(t, "b", list(demo, other))}, "a-model demo lora"},
		"a hung worker":  {[]workers.Worker{listing(t, "a", list(demo)), listing(t, "b", "", "demo", "silent")}, "demo silent"},
		"none is known":  {[]workers.Worker{listing(t, "a", `{"detail":"Unauthorized"}`, "demo")}, ""},
		"an empty fleet": {nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, "", c.workers...)
			defer func() {
				if m, err := qwen(); err == nil {
					m.SetMaxModelLen(0) // the model is shared
				}
			}()
			var first string
			for range 2 {
				d := b.Decide(t.Context(), &extproc.Request{ID: "r", Method: "GET", Path: "/v1/models?limit=3", Received: time.Now()})
				if c.want == "" {
					if d.Reject != nil && d.Reject.Status == http.StatusOK || d.Reject == nil && d.Endpoint == "" {
						t.Errorf("got %+v, want the request forwarded", d)
					}
					end(&d, 200)
					continue
				}
				if d.Reject == nil || d.Reject.Status != http.StatusOK {
					t.Fatalf("got %+v, want a list", d)
				}
				var got struct {
					Object string
					Data   []struct {
						ID     string
						Parent *string
					}
				}
				if err := json.Unmarshal(d.Reject.Body, &got); err != nil {
					t.Fatal(err)
				}
				var ids []string
				for _, m := range got.Data {
					ids = append(ids, m.ID)
					if (m.Parent != nil) != (m.ID == "lora") {
						t.Errorf("%s: got parent %v", m.ID, m.Parent)
					}
				}
				if strings.Join(ids, " ") != c.want || got.Object != "list" {
					t.Errorf("got %q, want %q", ids, c.want)
				}
				if first == "" {
					first = string(d.Reject.Body)
				} else if first != string(d.Reject.Body) {
					t.Errorf("got %s, want %s as before", d.Reject.Body, first)
				}
			}
			answered := 0.0
			if c.want != "" {
				answered = 2
			}
			if got := testutil.ToFloat64(b.metrics.Requests.WithLabelValues("models", "answered")); got != answered {
				t.Errorf("got %v requests answered, want %v", got, answered)
			}
			if row := b.decisions.Last(1)[0].Row(); !row.Ended {
				t.Errorf("got %+v in the decision log, want it ended", row)
			}
			if b.loads() != 0 {
				t.Errorf("got a load of %d, want 0", b.loads())
			}
		})
	}
}

// The context length that all engines of a model name is the limit of its prompts, unless the configuration has one.
func TestTheEnginesContextLength(t *testing.T) {
	entry := func(n string) string { return `{"data":[{"id":"demo","max_model_len":` + n + `}]}` }
	for name, c := range map[string]struct {
		lists   []string
		refused bool
	}{
		"all the same": {[]string{entry("64"), entry("64")}, true},
		"large":        {[]string{entry("4096")}, false},
		"they differ":  {[]string{entry("64"), entry("128")}, false},
		"not a number": {[]string{entry(`"64"`)}, false},
		"not named":    {[]string{`{"data":[{"id":"demo"}]}`}, false},
	} {
		t.Run(name, func(t *testing.T) {
			var list []workers.Worker
			for i, text := range c.lists {
				list = append(list, listing(t, string(rune('a'+i)), text))
			}
			b := newBench(t, "", list...)
			defer func() {
				if m, err := qwen(); err == nil {
					m.SetMaxModelLen(0)
				}
			}()
			b.Fleet().List(t.Context())
			_, e := b.ask("/v1/completions", completion(100, ""))
			if got := e.Degraded == degradedRefused; got != c.refused {
				t.Errorf("got degraded %q, want refused: %v", e.Degraded, c.refused)
			}
		})
	}
}

// GET /v1/models/NAME is answered from the same lists. A name that none has goes to a worker while not all have answered.
func TestOneListedModel(t *testing.T) {
	two := `{"data":[{"id":"org/demo","root":"/m"},{"id":"lora","parent":"org/demo"}]}`
	whole := []workers.Worker{listing(t, "a", two), listing(t, "b", `{"data":[{"id":"other"}]}`)}
	hung := []workers.Worker{listing(t, "a", two), listing(t, "b", "")}
	for name, c := range map[string]struct {
		workers []workers.Worker
		path    string
		status  int // 0 if the request is forwarded
		want    string
	}{
		"one":           {whole, "/v1/models/lora", 200, `"id":"lora"`},
		"another's":     {whole, "/v1/models/other?x=1", 200, `"id":"other"`},
		"a slash":       {whole, "/v1/models/org/demo", 200, `"root":"/m"`},
		"escaped":       {whole, "/x/v1/models/org%2Fdemo", 200, `"root":"/m"`},
		"none's":        {whole, "/v1/models/nope", 404, `"code":"model_not_found"`},
		"a hung worker": {hung, "/v1/models/nope", 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, "", c.workers...)
			d := b.Decide(t.Context(), &extproc.Request{ID: "r", Method: "GET", Path: c.path, Received: time.Now()})
			if c.status == 0 {
				if d.Reject != nil || d.Endpoint == "" {
					t.Errorf("got %+v, want the request forwarded", d)
				}
				end(&d, 200)
				return
			}
			if d.Reject == nil || d.Reject.Status != c.status || !strings.Contains(string(d.Reject.Body), c.want) || strings.Contains(string(d.Reject.Body), `"data"`) {
				t.Errorf("got %+v, want status %d with %s", d.Reject, c.status, c.want)
			}
		})
	}
}

// A request for the list that is forwarded may have a body: it is parsed in a processor's place like any other.
func TestABodyWithTheListOfModelsIsParsedInAPlace(t *testing.T) {
	var armed atomic.Pointer[bench] // the worker is asked before the request too
	asked := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if b := armed.Swap(nil); b != nil {
			for range cap(b.cpu.all) { // the decision holds none while it waits for the list
				b.cpu.all <- struct{}{}
			}
			close(asked)
		}
		w.WriteHeader(http.StatusUnauthorized)
	}))
	defer srv.Close()
	w := worker("a", 0)
	w.Address = srv.Listener.Addr().String()
	b := newBench(t, "limits: {decision_timeout: 0s}\n", w)
	armed.Store(b)
	done := make(chan extproc.Decision, 1)
	go func() {
		done <- b.Decide(t.Context(), &extproc.Request{ID: "r", Method: "GET", Path: "/v1/models", Body: []byte(`{"x":1}`), Received: time.Now()})
	}()
	<-asked
	select {
	case d := <-done:
		t.Fatalf("got %+v while all places are taken, want none", d)
	case <-time.After(100 * time.Millisecond):
	}
	for range cap(b.cpu.all) {
		<-b.cpu.all
	}
	if d := <-done; d.Reject != nil || d.Endpoint == "" {
		t.Errorf("got %+v, want the request forwarded", d)
	} else {
		end(&d, 200)
	}
	b.untouchedByWork()
}

// An adapter that only engines list is found again after its worker was replaced, while the others stayed away: the old list does
// not stand for the new engine.
func TestAnAdapterOfAReplacedWorker(t *testing.T) {
	w := listing(t, "a", `{"data":[{"id":"demo"},{"id":"lora"}]}`, "demo")
	b := newBench(t, "", w)
	replaced, other := w, listing(t, "b", `{"data":[{"id":"demo"}]}`, "demo")
	replaced.Generation = 2
	for _, list := range [][]workers.Worker{{w}, {replaced}, {other}} {
		b.fleet.SetWorkers(nil)
		b.fleet.SetWorkers(list)
		d, _ := b.ask("/v1/completions", strings.Replace(completion(20, ""), "demo", "lora", 1))
		if has := list[0].Address == w.Address; has != (d.Reject == nil) || has && d.Endpoint != w.Address {
			t.Errorf("generation %d of %s: got %q, %+v, want it served: %v", list[0].Generation, list[0].Name, d.Endpoint, d.Reject, has)
		}
		if d.Reject == nil {
			d.Ticket.End(time.Now())
		}
	}
}
