package fleet

import (
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/tokens/shape"
	"github.com/kvlane/kvlane/internal/workers"
)

// What an engine lists is read once: neither a further worker's list nor a client's question goes through
// the lists of all workers again.
func TestTheCostOfLists(t *testing.T) {
	tokens, err := qwen()
	if err != nil {
		t.Fatal(err)
	}
	defer tokens.SetMaxModelLen(0) // it is shared
	var entries []string
	for i := range 50 {
		entries = append(entries, fmt.Sprintf(`{"id":"m%d","root":"/m","max_model_len":64}`, i))
	}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"data":[{"id":"demo","root":"/demo","max_model_len":64},`+strings.Join(entries, ",")+`]}`)
	}))
	defer srv.Close()
	cost := func(n int) (ask, show float64) {
		c, err := config.Parse("test.yaml", []byte("models: [{name: demo, aliases: [alias]}]\n"))
		if err != nil {
			t.Fatal(err)
		}
		f := start(t, c, &Model{Config: c.Models[0], Tokens: tokens})
		var list []workers.Worker
		for i := range n {
			w := worker("a", 1)
			w.Name, w.Address = fmt.Sprint("w", i), srv.Listener.Addr().String()
			list = append(list, w)
		}
		f.SetWorkers(list)
		shown := f.Listed(t.Context())
		if len(shown.Models) != 51 || !shown.Whole {
			t.Fatalf("got %d models, whole %v, want 51 of all workers", len(shown.Models), shown.Whole)
		}
		f.listing.Wait() // the checks of the workers' models
		m := f.View().members["w0"]
		ask = math.Inf(1)
		for range 5 { // other goroutines' allocations count, too
			ask = min(ask, testing.AllocsPerRun(10, func() {
				if _, err := f.askFor(t.Context(), m); err != nil {
					t.Fatal(err)
				}
			}))
		}
		f.Listed(t.Context())
		return ask, testing.AllocsPerRun(10, func() { f.Listed(t.Context()) })
	}
	ask, show := cost(10)
	ask4, show4 := cost(40)
	if ask4 > 2*ask || show4 > show+5 || show > 20 {
		t.Errorf("got %v allocations for a list and %v for a question with 10 workers, %v and %v with 40: want about the same", ask, show, ask4, show4)
	}
}

// One engine's list does not make the answers to clients large, which all later decisions wait for.
func TestTheListOfModelsIsBounded(t *testing.T) {
	long := strings.Repeat("<", 1000)
	for name, c := range map[string]struct {
		id, root string
		n        int
		want     bool
		rooted   bool
	}{
		"a few":                  {"m%d", "/m", 3, true, true},
		"long fields":            {"m%d", long, 1000, true, false},
		"long names and nothing": {"m%d" + long, "/m", 1000, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			var entries []string
			for i := range c.n {
				entries = append(entries, fmt.Sprintf(`{"id":"`+c.id+`","root":%q}`, i, c.root))
			}
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				_, _ = io.WriteString(w, `{"data":[`+strings.Join(entries, ",")+`]}`)
			}))
			defer srv.Close()
			cfg := config.Default()
			f := start(t, &cfg)
			w := worker("a", 1)
			w.Address = srv.Listener.Addr().String()
			f.SetWorkers([]workers.Worker{w})
			shown := f.Listed(t.Context())
			if len(shown.Models) != c.n || !shown.Whole || (shown.JSON != nil) != c.want || len(shown.JSON) > maxList {
				t.Fatalf("got %d models, whole %v, %d bytes, want %d models, at most 1 MiB, none %v", len(shown.Models), shown.Whole, len(shown.JSON), c.n, !c.want)
			}
			if c.want && (!strings.Contains(string(shown.JSON), `"id":"m2"`) || strings.Contains(string(shown.JSON), `"root"`) != c.rooted) {
				t.Errorf("got %.200s, want the names, and the fields %v", shown.JSON, c.rooted)
			}
		})
	}
}

// What ends an SGLang is looked for where a worker with SGLang may serve the request, not where another model has one.
func TestWhichModelBoundsTheIDsOfAnSGLang(t *testing.T) {
	tokens, err := qwen()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		engine         shape.Engine // of model b
		listed         []string     // by the worker, an SGLang
		a, b, unlisted string
	}{
		{shape.VLLM, []string{"b"}, "", "b", "a"},
		{shape.VLLM, []string{"alias"}, "", "b", "a"},
		{shape.VLLM, nil, "a", "b", "a"},
		{shape.SGLang, []string{"other"}, "", "b", "b"},
	} {
		cfg := config.Default()
		a := &Model{Config: config.Model{Name: "a"}, Engine: shape.VLLM, Tokens: tokens}
		b := &Model{Config: config.Model{Name: "b", Aliases: []string{"alias"}}, Engine: c.engine, Tokens: tokens}
		f := start(t, &cfg, a, b)
		w := worker("w", 1)
		w.Engine, w.Models = "sglang", c.listed
		f.SetWorkers([]workers.Worker{w})
		name := func(m *Model) string {
			if m == nil {
				return ""
			}
			return m.Config.Name
		}
		if got := [3]string{name(f.SGLang(a)), name(f.SGLang(b)), name(f.SGLang(nil))}; got != [3]string{c.a, c.b, c.unlisted} {
			t.Errorf("%v, worker of %v: got %q, want %q", c.engine, c.listed, got, [3]string{c.a, c.b, c.unlisted})
		}
	}
}
