package fleet

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/shape"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/kvindex"
)

// tokenizing is an engine that answers with our ids or with different ones.
type tokenizing struct {
	*httptest.Server

	wrong, down atomic.Bool
	asked       atomic.Int32
}

func startTokenizing(t *testing.T) *tokenizing {
	t.Helper()
	m, err := qwen()
	if err != nil {
		t.Fatal(err)
	}
	e := &tokenizing{}
	e.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet { // its models
			http.NotFound(w, r)
			return
		}
		e.asked.Add(1)
		if e.down.Load() {
			http.Error(w, "no", http.StatusServiceUnavailable)
			return
		}
		raw := make([]byte, r.ContentLength)
		_, _ = r.Body.Read(raw)
		req, err := body.Parse(body.Tokenize, raw)
		if err != nil {
			t.Error(err)
			return
		}
		res, err := m.Prompt(req, shape.VLLM)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		ids := append([]uint32{}, res.IDs...)
		if e.wrong.Load() {
			ids[0]++
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"tokens": ids})
	}))
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		e.Close()
	})
	return e
}

// Workers are judged individually; a model is routed by load only if all of its workers
// differ.
func TestWorkersThatDiffer(t *testing.T) {
	a, b := startTokenizing(t), startTokenizing(t)
	b.wrong.Store(true)
	c, err := config.Parse("test.yaml", []byte("models: [{name: demo, tokenizer: \"builtin:qwen3\", check: {every: 1, retry: 1h}}]\n"))
	if err != nil {
		t.Fatal(err)
	}
	m, err := qwen()
	if err != nil {
		t.Fatal(err)
	}
	s := &Model{Config: c.Models[0], Tokens: m}
	d := start(t, c, s)
	list := func(readyA, readyB bool) []workers.Worker {
		wa, wb := worker("a", 0), worker("b", 0)
		wa.Address, wb.Address = strings.TrimPrefix(a.URL, "http://"), strings.TrimPrefix(b.URL, "http://")
		wa.Ready, wb.Ready = readyA, readyB
		return []workers.Worker{wa, wb}
	}
	until := func(what string, ok func() bool) {
		t.Helper()
		for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("never: %s", what)
			}
		}
	}
	state := func(worker string) shape.State {
		if c := s.agreement.all()[worker]; c != nil {
			return c.checker.State()
		}
		return shape.Unchecked
	}
	d.SetWorkers(list(true, true))
	until("both are compared", func() bool { return state("a") == shape.Agrees && state("b") == shape.Differs })
	if s.Unfit() != nil || !s.agreement.differs("b") || s.agreement.differs("a") {
		t.Error("one worker that differs counts for others")
	}
	ids := make([]uint32, 80)
	p := Prompt{Hashes: d.index.Hasher().AppendHashes(nil, d.index.Hasher().Seed("demo", "", ""), ids, 16), Tokens: len(ids), Made: s}
	for _, m := range d.View().members {
		d.Speculate(m.Slots[0], p.Hashes, time.Now())
	}
	holders := func(made *Model) (names []string) {
		p.Made = made
		for _, o := range d.AppendOverlaps(nil, &p, &kvindex.Matches{}) {
			names = append(names, d.View().Endpoint(o.Slot).Name)
		}
		slices.Sort(names)
		return names
	}
	if got := holders(s); !slices.Equal(got, []string{"a"}) {
		t.Errorf("overlaps of our ids: got %q, want only a, whose tokenizer agrees", got)
	}
	if got := holders(nil); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("overlaps of a renderer's ids: got %q, want both workers", got)
	}
	a.wrong.Store(true)
	d.SetWorkers(list(false, true))
	d.SetWorkers(list(true, true))
	until("a is asked when it is back", func() bool { return state("a") == shape.Differs })
	if s.Unfit() == nil {
		t.Error("the model is used though all differ")
	}
	a.wrong.Store(false)
	d.recheck("a")
	until("a is asked again", func() bool { return state("a") == shape.Agrees })
	// An unanswered sample is repeated with the next check.
	a.down.Store(true)
	asked := a.asked.Load()
	request, err := body.Parse(body.Completions, []byte(`{"model":"demo","prompt":"one two three"}`))
	if err != nil {
		t.Fatal(err)
	}
	for range 50 {
		d.Sample(s, d.View().Member("a"), request)
	}
	until("a was asked in service", func() bool { return a.asked.Load() > asked && state("a") == shape.Unchecked })
	a.down.Store(false)
	d.recheck("a")
	until("a agrees", func() bool { return state("a") == shape.Agrees })
	d.SetWorkers(list(true, true)[1:])
	if len(s.agreement.all()) != 1 || s.Unfit() == nil {
		t.Error("a worker that is gone still counts")
	}
}
