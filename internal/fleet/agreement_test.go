package fleet

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/fstest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/models"
	"github.com/kvlane/kvlane/internal/tokens/shape"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
)

// tokenizing is an engine that answers with our ids or with different ones.
type tokenizing struct {
	*httptest.Server

	wrong, down atomic.Bool
	asked       atomic.Int32
	root        atomic.Value // string: of the list of models; there is none without it
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
			if root := e.root.Load(); root != nil {
				_ = json.NewEncoder(w).Encode(map[string]any{"data": []any{
					map[string]any{"id": "adapter", "owned_by": "vllm", "root": "/adapter", "parent": "demo"},
					map[string]any{"id": "demo", "owned_by": "vllm", "root": root, "parent": nil}}})
				return
			}
			http.NotFound(w, r)
			return
		}
		e.asked.Add(1)
		if e.down.Load() {
			http.Error(w, "no", http.StatusServiceUnavailable)
			return
		}
		raw, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
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

// A model that replaces one is compared with the workers that there are, and nothing goes on for the old one.
func TestAReplacedModelIsComparedAnew(t *testing.T) {
	e := startTokenizing(t)
	e.wrong.Store(true)
	c, err := config.Parse("test.yaml", []byte("models: [{name: demo, tokenizer: \"builtin:qwen3\", check: {every: 1, retry: 1h}}]\n"))
	if err != nil {
		t.Fatal(err)
	}
	m, err := qwen()
	if err != nil {
		t.Fatal(err)
	}
	old, next := &Model{Config: c.Models[0], Tokens: m}, &Model{Config: c.Models[0], Tokens: m}
	f := start(t, c, old)
	w := worker("a", 0)
	w.Address, w.Ready = strings.TrimPrefix(e.URL, "http://"), true
	f.SetWorkers([]workers.Worker{w})
	wait := func(m *Model, want shape.State) {
		t.Helper()
		for deadline := time.Now().Add(20 * time.Second); m.agreement.all()["a"].checker.State() != want; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("got state %v, want %v", m.agreement.all()["a"].checker.State(), want)
			}
		}
	}
	wait(old, shape.Differs)
	e.wrong.Store(false)
	f.SetModels([]*Model{next})
	wait(next, shape.Agrees)
	if f.Model("demo") != next || next.Unfit() != nil || len(old.agreement.all()) != 0 {
		t.Errorf("got the model replaced: %v, unfit: %v, %d comparisons of the old one, want none", f.Model("demo") == next, next.Unfit(), len(old.agreement.all()))
	}
	f.SetModels([]*Model{next})
	if len(next.agreement.all()) != 1 {
		t.Error("got no comparison of a model that stays, want it to go on")
	}
	warned := func() (reasons []string) {
		for _, warning := range f.Warnings() {
			reasons = append(reasons, warning.Reason)
		}
		return reasons
	}
	if got := warned(); !slices.Contains(got, "no_events") {
		t.Errorf("a worker without events: got %q, want no_events", got)
	}
	f.SetModels([]*Model{{Config: c.Models[0]}})
	if got := warned(); slices.Contains(got, "no_events") || !slices.Contains(got, "no_tokenizer") {
		t.Errorf("a model that has lost its tokenizer: got %q, want that alone", got)
	}
}

// The series of a model go with it, unless another version of the model takes its place.
func TestSeriesOfRemovedModels(t *testing.T) {
	f := newFleet(t, "")
	f.Metrics.Renders.WithLabelValues("demo", "ok").Inc()
	demo := f.Model("demo").Config
	for _, c := range []struct {
		name string
		want int
	}{{"demo", 1}, {"new", 0}} {
		demo.Name = c.name
		f.SetModels([]*Model{{Config: demo}})
		if got := testutil.CollectAndCount(f.Metrics.Renders); got != c.want {
			t.Errorf("after demo was replaced by %s: got %d series, want %d", c.name, got, c.want)
		}
	}
}

// An engine that does not return ids leaves its worker unchecked: that is said once.
func TestAWorkerThatCannotBeComparedIsSaidOnce(t *testing.T) {
	var asked atomic.Int32
	broken := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		http.NotFound(w, r)
	}))
	defer broken.Close()
	c, err := config.Parse("test.yaml", []byte("models: [{name: demo, tokenizer: \"builtin:qwen3\", check: {retry: 10ms}}]\n"))
	if err != nil {
		t.Fatal(err)
	}
	m, err := qwen()
	if err != nil {
		t.Fatal(err)
	}
	f := start(t, c, &Model{Config: c.Models[0], Tokens: m})
	var log strings.Builder // read after Close
	f.Log = zerolog.New(zerolog.SyncWriter(&log))
	w := worker("a", 0)
	w.Address, w.Ready = strings.TrimPrefix(broken.URL, "http://"), true
	f.SetWorkers([]workers.Worker{w})
	for deadline := time.Now().Add(20 * time.Second); asked.Load() < 3; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("got %d comparisons, want 3", asked.Load())
		}
	}
	f.Close()
	if n := strings.Count(log.String(), "does not return the ids of a prompt"); n != 1 {
		t.Errorf("got it %d times in the log, want once:\n%s", n, log.String())
	}
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
		d.Speculate(m.Slots[0], p.Hashes, p.Tokens, time.Now())
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
	p.Made = s
	for eagle, want := range map[bool]int32{false: 64, true: 48} { // the last block is not used
		s.Config.EAGLE = eagle
		if got := d.AppendOverlaps(nil, &p, &kvindex.Matches{})[0].Speculative; got != want {
			t.Errorf("eagle %v: got %d of 80 tokens, want %d", eagle, got, want)
		}
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

// With tenants a comparison finds nothing of what clients have sent, and leaves nothing that they find: neither the tenant whose
// prompt was compared nor a client without a tenant.
func TestComparisonsAreATenantOfTheirOwn(t *testing.T) {
	for yaml, apart := range map[string]bool{"tenants: {salt_header: x-tenant}\n": true, "": false} {
		e := startTokenizing(t)
		files, err := models.Open("builtin:qwen3")
		if err != nil {
			t.Fatal(err)
		}
		m, err := shape.Load(files, shape.Options{Names: []string{"demo"}}) // the engine's has caches of its own
		if err != nil {
			t.Fatal(err)
		}
		kept := func() (n uint64) { // bytes of text whose ids the tokenizer keeps
			shards := reflect.ValueOf(m).Elem().FieldByName("tok").Elem().FieldByName("memo").Elem().FieldByName("shards")
			for i := range shards.Len() {
				if store := shards.Index(i).FieldByName("store"); !store.IsNil() {
					n += store.Elem().FieldByName("textEnd").Uint()
				}
			}
			return n
		}
		c, err := config.Parse("test.yaml", []byte("models: [{name: demo, tokenizer: \"builtin:qwen3\", check: {every: 1, retry: 1h}}]\n"+yaml))
		if err != nil {
			t.Fatal(err)
		}
		s := &Model{Config: c.Models[0], Tokens: m}
		f := start(t, c, s)
		w := worker("a", 0)
		w.Address, w.Ready = strings.TrimPrefix(e.URL, "http://"), true
		f.SetWorkers([]workers.Worker{w})
		equal := func() float64 {
			return testutil.ToFloat64(f.Metrics.TokenChecks.WithLabelValues("demo", "a", body.Completions.String(), "equal"))
		}
		until := func(n float64) {
			t.Helper()
			for deadline := time.Now().Add(20 * time.Second); equal() < n || s.agreement.all()["a"].checker.State() != shape.Agrees; time.Sleep(time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatalf("got %v equal prompts in state %v, want %v", equal(), s.agreement.all()["a"].checker.State(), n)
				}
			}
		}
		until(1)
		text := ""
		for i := range 80 {
			text += strings.Repeat(string(rune('a'+i%26)), i) + " is a word that comes once, and the text has many like it; "
		}
		request, err := body.Parse(body.Completions, []byte(`{"model":"demo","prompt":"`+text+`"}`))
		if err != nil {
			t.Fatal(err)
		}
		compare := func() {
			n := equal()
			f.Sample(s, f.View().Member("a"), request)
			until(n + 1)
		}
		ask := func(tenant string) func() {
			return func() {
				if _, err := m.PromptInto(t.Context(), nil, f.Cache.TurnOf(tenant, request), shape.VLLM); err != nil {
					t.Fatal(err)
				}
			}
		}
		for _, one := range []struct {
			name  string
			do    func()
			fresh bool
		}{
			{"no tenant", ask(""), true}, {"no tenant, again", ask(""), false}, {"a", ask("a"), true}, {"comparison", compare, apart},
			{"comparison, again", compare, false}, {"a, again", ask("a"), false}, {"b", ask("b"), true},
		} {
			before := kept()
			one.do()
			if n := kept() - before; (n > 0) != one.fresh {
				t.Errorf("%q, %s: %d bytes were tokenized and kept, want the prompt anew: %v", yaml, one.name, n, one.fresh)
			}
		}
	}
}

// over is a folder with further files.
type over struct {
	fs.FS

	more fstest.MapFS
}

func (o over) Open(name string) (fs.File, error) {
	if o.more[name] != nil {
		return o.more.Open(name)
	}
	return o.FS.Open(name)
}

// The engine's --model, on which the identifiers of images depend, is asked of the worker.
func TestTheEnginesModelIsLearned(t *testing.T) {
	builtin, err := models.Open("builtin:qwen3")
	if err != nil {
		t.Fatal(err)
	}
	yes := true
	m, err := shape.Load(over{builtin, fstest.MapFS{
		"config.json":              {Data: []byte(`{"architectures":["Qwen2VLForConditionalGeneration"]}`)},
		"preprocessor_config.json": {Data: []byte(`{"image_processor_type":"Qwen2VLImageProcessor"}`)},
	}}, shape.Options{Multimodal: &yes, ChatTemplate: "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}<|image_pad|>{% endif %}{% endfor %}{% endfor %}"})
	if err != nil {
		t.Fatal(err)
	}
	pixels := base64.StdEncoding.EncodeToString([]byte("\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR\x00\x00\x00\x40\x00\x00\x00\x40\x08\x02\x00\x00\x00....."))
	req, err := body.Parse(body.Chat, []byte(`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:;base64,`+pixels+`"}}]}]}`))
	if err != nil {
		t.Fatal(err)
	}
	prompt := func() shape.Result {
		res, err := m.Prompt(req, shape.VLLM)
		if err != nil {
			t.Fatal(err)
		}
		return res
	}
	if res := prompt(); res.Media != nil {
		t.Fatalf("got %v before a worker was asked, want no images", res.Media)
	}
	e := startTokenizing(t)
	e.root.Store("/models/demo")
	c, err := config.Parse("test.yaml", []byte("models: [{name: demo, tokenizer: \"builtin:qwen3\", check: {every: 1, retry: 1h}}]\n"))
	if err != nil {
		t.Fatal(err)
	}
	d := start(t, c, &Model{Config: c.Models[0], Tokens: m})
	w := worker("a", 0)
	w.Address, w.Ready = strings.TrimPrefix(e.URL, "http://"), true
	d.SetWorkers([]workers.Worker{w})
	for deadline := time.Now().Add(20 * time.Second); prompt().Media == nil; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("got no images though the worker tells its model")
		}
	}
	learned := prompt().Media[0]
	m.SetEngineModel("/models/demo")
	if other := prompt().Media[0]; other != learned {
		t.Error("got another identifier than with the root of the base model")
	}
	got, want := Media(prompt().Media), kvindex.Medium{At: 0, Digest: feed.ExtraDigest(0, []byte(prompt().Media[0].Identifier))}
	if len(got) != 1 || got[0] != want {
		t.Errorf("got %v, want %v", got, want)
	}
}

// By default the ids of prompts of 256 tokens or more go to a worker of vLLM or SGLang that was found to answer with them as
// without, and to no other.
func TestWorkersThatGetIDsByDefault(t *testing.T) {
	m, err := qwen()
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		engine         shape.Engine
		ignores, wrong bool // the field for ids; the tokenizer is another one
		off            string
		want           bool
	}{
		"vLLM":                              {engine: shape.VLLM, want: true},
		"SGLang":                            {engine: shape.SGLang, want: true},
		"an SGLang without the field":       {engine: shape.SGLang, ignores: true},
		"an SGLang of another tokenizer":    {engine: shape.SGLang, wrong: true},
		"an SGLang that may not be asked":   {engine: shape.SGLang, off: ", check: {disabled: true}"},
		"an SGLang, and hand_ids is false":  {engine: shape.SGLang, off: ", hand_ids: false"},
		"TensorRT-LLM, which takes no ids":  {engine: shape.TRTLLM},
		"a vLLM of another tokenizer":       {engine: shape.VLLM, wrong: true},
		"a vLLM that ignores prompt_tokens": {engine: shape.VLLM, ignores: true},
	} {
		t.Run(name, func(t *testing.T) {
			var asked atomic.Int32
			engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				raw, err := io.ReadAll(r.Body)
				if err != nil {
					t.Error(err)
				}
				api := body.Tokenize
				if strings.HasSuffix(r.URL.Path, "/chat/completions") {
					api = body.Chat
				} else if !strings.HasSuffix(r.URL.Path, "/tokenize") {
					http.NotFound(w, r)
					return
				}
				if asked.Add(1); c.ignores {
					raw = bytes.ReplaceAll(bytes.ReplaceAll(raw, []byte(`"input_ids"`), []byte(`"x"`)), []byte(`"prompt_token_ids"`), []byte(`"x"`))
				}
				req, err := body.Parse(api, raw)
				if err != nil {
					t.Error(err)
					return
				}
				res, err := m.Prompt(req, c.engine)
				if err != nil {
					http.Error(w, err.Error(), http.StatusBadRequest)
					return
				}
				ids := slices.Clone(res.IDs)
				if c.wrong {
					ids[0]++
				}
				_ = json.NewEncoder(w).Encode(map[string]any{"tokens": ids, "choices": []string{"a"}, "usage": map[string]int{"prompt_tokens": len(ids)}})
			}))
			t.Cleanup(engine.Close)
			cfg, err := config.Parse("test.yaml", []byte(`models: [{name: demo, engine: `+c.engine.String()+`, tokenizer: "builtin:qwen3"`+c.off+"}]\n"))
			if err != nil {
				t.Fatal(err)
			}
			model := &Model{Config: cfg.Models[0], Tokens: m, Engine: c.engine}
			f := start(t, cfg, model)
			w := worker("a", 0)
			w.Address, w.Engine = strings.TrimPrefix(engine.URL, "http://"), c.engine.String()
			f.SetWorkers([]workers.Worker{w})
			takes := func(n int) bool { return model.TakesIDs(f.View().Member("a"), body.Chat, n) }
			asks := int32(0) // seven prompts to compare, and three questions whether it takes ids
			if c.wrong {
				asks = 1
			} else if c.ignores || c.want {
				asks = 10
			}
			for deadline := time.Now().Add(20 * time.Second); c.want && !takes(worthIDs) || asked.Load() < asks; time.Sleep(time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatalf("got %d questions, ids handed on %v, want %d at least, %v", asked.Load(), takes(worthIDs), asks, c.want)
				}
				_ = takes(worthIDs) // makes Kvlane ask
			}
			for range 20 {
				if got, fewer := takes(worthIDs), takes(worthIDs-1); got != c.want || fewer {
					t.Fatalf("got ids of 256 tokens handed on: %v, want %v; of 255: %v, want none", got, c.want, fewer)
				}
				time.Sleep(time.Millisecond)
			}
		})
	}
}
