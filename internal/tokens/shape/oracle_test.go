package shape

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// fakeEngine answers /tokenize like vLLM, with ids of its own choice.
type fakeEngine struct {
	m     *Model
	wrong atomic.Bool // one id differs
	// wrongFor is a function of the bodies for which one id differs; may be nil.
	wrongFor atomic.Pointer[func(raw []byte) bool]

	down  atomic.Bool // answers 500
	slow  atomic.Bool // does not answer
	asked atomic.Int64
}

func (f *fakeEngine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.asked.Add(1)
	raw, _ := io.ReadAll(r.Body)
	if f.slow.Load() {
		<-r.Context().Done()
		return
	}
	if f.down.Load() {
		http.Error(w, "out of order", http.StatusInternalServerError)
		return
	}
	api, _ := body.Detect(r.Method, r.URL.Path)
	req, err := body.Parse(api, raw)
	if err != nil {
		http.Error(w, `{"error":{"message":"bad json"}}`, http.StatusBadRequest)
		return
	}
	res, err := f.m.Prompt(req, VLLM)
	if err != nil {
		http.Error(w, string(body.AppendFailure(nil, api, body.Failure{Message: err.Error()})), http.StatusBadRequest)
		return
	}
	ids := slices.Clone(res.IDs)
	if g := f.wrongFor.Load(); f.wrong.Load() || g != nil && (*g)(raw) {
		ids[len(ids)-1]++
	}
	switch {
	case !strings.HasSuffix(r.URL.Path, "/render"):
		_, _ = fmt.Fprintf(w, `{"count":%d,"max_model_len":1024,"tokens":%s}`, len(ids), body.AppendIDList(nil, ids))
	case api == body.Completions:
		_, _ = fmt.Fprintf(w, `[{"request_id":"x","token_ids":%s}]`, body.AppendIDList(nil, ids))
	default:
		_, _ = fmt.Fprintf(w, `{"request_id":"x","token_ids":%s}`, body.AppendIDList(nil, ids))
	}
}

func startEngine(t *testing.T) (*fakeEngine, *httptest.Server) {
	t.Helper()
	f := &fakeEngine{m: load(t, "qwen3", Options{})}
	s := httptest.NewServer(f)
	t.Cleanup(s.Close)
	return f, s
}

func TestCheckerFollowsTheEngine(t *testing.T) {
	f, s := startEngine(t)
	var seen []State
	c := NewChecker(load(t, "qwen3", Options{}), &Oracle{URL: s.URL, Timeout: 2 * time.Second}, CheckerOptions{
		ModelName: "m", Every: 1, OnState: func(s State, _ *Difference) { seen = append(seen, s) },
	})
	ctx := t.Context()
	if s := c.State(); s != Unchecked || !c.Usable() {
		t.Fatalf("at first: %v", s)
	}
	f.down.Store(true)
	if s := c.Check(ctx); s != Unchecked {
		t.Fatalf("engine down: %v", s)
	}
	f.down.Store(false)
	if s := c.Check(ctx); s != Agrees {
		t.Fatalf("engine up: %v", s)
	}
	f.wrong.Store(true)
	if s := c.Check(ctx); s != Differs || c.Usable() {
		t.Fatalf("engine wrong: %v", s)
	}
	f.down.Store(true) // no answer does not mean agreement
	if s := c.Check(ctx); s != Differs {
		t.Fatalf("engine wrong, then down: %v", s)
	}
	f.down.Store(false)
	f.wrong.Store(false)
	if s := c.Check(ctx); s != Agrees {
		t.Fatalf("engine repaired: %v", s)
	}
	if want := []State{Agrees, Differs, Agrees}; !slices.Equal(seen, want) {
		t.Errorf("told %v, want %v", seen, want)
	}
}

func TestCheckerSamplesInService(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	f, s := startEngine(t)
	differences := make(chan *Difference, 100)
	c := NewChecker(load(t, "qwen3", Options{}), &Oracle{URL: s.URL}, CheckerOptions{
		Every: 10, OnState: func(_ State, d *Difference) { differences <- d },
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); c.Run(ctx) }()
	if d := <-differences; d != nil {
		t.Fatalf("start: %v", d)
	}
	before := f.asked.Load()
	f.wrong.Store(true)
	req, err := body.Parse(body.Chat, []byte(`{"messages":[{"role":"user","content":"x"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	for range 10 {
		c.Offer(req)
	}
	d := <-differences
	if d == nil || d.Theirs != d.Ours+1 || !strings.Contains(d.String(), "line") {
		t.Errorf("difference: %v", d)
	}
	if n := f.asked.Load() - before; n != 1+1 {
		t.Errorf("got %d questions for ten requests, want one of them and a built-in one", n)
	}
	f.wrong.Store(false)
	if s := c.Check(ctx); s != Agrees {
		t.Errorf("after the repair: %v", s)
	}
	if d := <-differences; d != nil {
		t.Errorf("after the repair: %v", d)
	}
	cancel()
	<-done
	http.DefaultClient.CloseIdleConnections()
	s.Close()
}

// A client that knows a prompt whose ids differ from the engine's ends nothing by it: the built-in requests and the other
// prompts decide. An engine for which half of the prompts differ is distrusted until other prompts agree.
func TestOnePromptCondemnsNoEngine(t *testing.T) {
	f, s := startEngine(t)
	hostile := func(raw []byte) bool { return bytes.Contains(raw, []byte("hostile")) }
	f.wrongFor.Store(&hostile)
	var seen []State
	c := NewChecker(load(t, "qwen3", Options{}), &Oracle{URL: s.URL}, CheckerOptions{ModelName: "m", Every: 1000,
		OnState: func(s State, _ *Difference) { seen = append(seen, s) }})
	c.Check(t.Context())
	offered := func(format string, numbers ...int) (n int) {
		t.Helper()
		for _, i := range numbers {
			if compared(t, c, fmt.Sprintf(format, i)) {
				n++
			}
		}
		return n
	}
	upTo := func(n int) (out []int) {
		for i := range n {
			out = append(out, i)
		}
		return out
	}
	expect := func(when string, state State, takes bool) {
		t.Helper()
		c.taken.Store(1 << body.Chat) // the engine is not asked
		if c.State() != state || c.TakesIDs(body.Chat) != takes {
			t.Fatalf("%s: got %v, ids taken %v, want %v, %v", when, c.State(), c.TakesIDs(body.Chat), state, takes)
		}
	}
	offered("fine %d", upTo(999)...)
	expect("at first", Agrees, true)
	if n := offered("hostile %d", 1); n != 1 {
		t.Fatalf("got %d comparisons, want the thousandth request", n)
	}
	expect("after a prompt that differs", Agrees, false)
	asked := f.asked.Load()
	if n := offered("hostile %[1]d", 1, 1, 1, 1, 1, 1, 1, 1, 1, 1); n != 10 || f.asked.Load() != asked+10 {
		t.Errorf("got %d comparisons and %d questions of the next requests, want 10 and no built-in ones", n, f.asked.Load()-asked)
	}
	expect("one prompt again and again", Agrees, false)
	offered("hostile %d", 2, 3, 4, 5, 6, 7)
	expect("seven prompts", Agrees, false)
	offered("more %d", upTo(16000)...)
	expect("sixteen others since", Agrees, false)

	offered("hostile %d", upTo(1008)...)
	expect("half of the prompts", Differs, false)
	if n := offered("late %d", upTo(3000)...); n > maxRecent {
		t.Errorf("got %d comparisons while the state is known, want at most %d", n, maxRecent)
	}
	asked = f.asked.Load()
	if c.Check(t.Context()); f.asked.Load()-asked != int64(len(builtIn("m"))) {
		t.Errorf("got %d questions of a check, want the built-in ones", f.asked.Load()-asked)
	}
	offered("hostile %d", upTo(9)...)
	expect("as before after a check", Differs, false)
	c.Check(t.Context())
	offered("good %d", upTo(8)...)
	expect("eight agree", Differs, false)
	offered("good %d", 8)
	expect("more than half agree", Agrees, false)
	if want := []State{Agrees, Differs, Agrees}; !slices.Equal(seen, want) {
		t.Errorf("told %v, want %v", seen, want)
	}
	f.wrong.Store(true)
	offered("any %d", upTo(2000)...)
	expect("the built-in requests differ", Differs, false)
	f.wrong.Store(false)
	c.Check(t.Context())
	expect("they agree again", Agrees, true)
}

func TestOracleAsksOnlyWhatCanBeAnswered(t *testing.T) {
	for _, c := range []struct {
		engine Engine
		api    body.API
		body   string
	}{
		{TRTLLM, body.Chat, `{"messages":[{}]}`},
		{VLLM, body.Completions, `{"prompt":[1,2]}`},
		{VLLM, body.Completions, `{"prompt":["a","b"]}`},
		{SGLang, body.Responses, `{"input":"a"}`},
		{SGLang, body.Generate, `{"text":"a"}`},
	} {
		req, err := body.Parse(c.api, []byte(c.body))
		if err != nil {
			t.Fatal(err)
		}
		o := &Oracle{Engine: c.engine, URL: "http://127.0.0.1:1"}
		if _, _, err := o.IDs(t.Context(), req); !errors.Is(err, ErrNoOracle) {
			t.Errorf("%v %s: got %v, want ErrNoOracle", c.engine, c.body, err)
		}
	}
}

// An engine that is compared sends neither prompts to other hosts nor pages into the log.
func TestAnEngineSendsPromptsNowhere(t *testing.T) {
	var elsewhere atomic.Int32
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { elsewhere.Add(1) }))
	defer other.Close()
	answers := []http.Handler{
		http.RedirectHandler(other.URL, http.StatusTemporaryRedirect),
		http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusBadRequest)
			_, _ = io.WriteString(w, `{"message":"`+strings.Repeat("x", 1<<20)+`"}`)
		}),
	}
	req, err := body.Parse(body.Completions, []byte(`{"prompt":"secret"}`))
	if err != nil {
		t.Fatal(err)
	}
	for i, answer := range answers {
		s := httptest.NewServer(answer)
		_, _, err := (&Oracle{Engine: VLLM, URL: s.URL}).IDs(t.Context(), req)
		s.Close()
		if err == nil || len(err.Error()) > 1000 {
			t.Errorf("answer %d: got %.1000v, want a short error", i, err)
		}
	}
	if n := elsewhere.Load(); n != 0 {
		t.Errorf("got %d prompts at another host, want none", n)
	}
	if transport, ok := toEngine.Transport.(*http.Transport); !ok || transport.Proxy != nil {
		t.Error("got a proxy, such as that of HTTP_PROXY, want none")
	}
}

func TestRemoteRenders(t *testing.T) {
	f, s := startEngine(t)
	r := NewRemote(s.URL+"/", 2*time.Second, func(error) {})
	for raw, api := range map[string]body.API{`{"messages":[{"role":"user","content":"x"}]}`: body.Chat, `{"prompt":"a b c"}`: body.Completions} {
		req, err := body.Parse(api, []byte(raw))
		if err != nil {
			t.Fatal(err)
		}
		want, err := f.m.Prompt(req, VLLM)
		if err != nil {
			t.Fatal(err)
		}
		got, err := r.Prompt(t.Context(), req)
		if err != nil || !slices.Equal(got.IDs, want.IDs) || got.Prompts != 1 {
			t.Errorf("%s: %v %v, want %v", raw, got, err, want.IDs)
		}
	}
	req, err := body.Parse(body.Chat, []byte(`{"messages":[{"role":"user","content":5}]}`))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Prompt(t.Context(), req); err == nil {
		t.Error("got no error, want a refusal")
	} else if refusal, ok := errors.AsType[*Refusal](err); !ok || refusal.Status != 400 {
		t.Errorf("refusal: %v", err)
	}
}

// Each call may hold an answer of 16 MiB and what is read from it, so they take turns, those of all models of a renderer together.
func TestCallsOfARendererAreBounded(t *testing.T) {
	var running, most atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		n := running.Add(1)
		defer running.Add(-1)
		for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
		}
		time.Sleep(20 * time.Millisecond)
		_, _ = io.WriteString(w, `{"token_ids":[1,2,3]}`)
	}))
	defer s.Close()
	req, err := body.Parse(body.Completions, []byte(`{"prompt":"a"}`))
	if err != nil {
		t.Fatal(err)
	}
	remotes := []*Remote{NewRemote(s.URL, 0, func(error) {}), NewRemote(s.URL+"/", time.Minute, func(error) {})} // of two models
	if other := NewRemote("http://127.0.0.1:1", 0, func(error) {}); other.calls == remotes[0].calls {
		t.Error("got the turns of another renderer")
	}
	var all sync.WaitGroup
	for i := range 4 * maxCalls {
		all.Go(func() {
			if res, err := remotes[i%2].Prompt(t.Context(), req); err != nil || len(res.IDs) != 3 {
				t.Errorf("%v %v", res, err)
			}
		})
	}
	all.Wait()
	if got := most.Load(); got < 2 || got > maxCalls {
		t.Errorf("got %d calls at a time, want 2 to %d", got, maxCalls)
	}
}

// While a renderer hangs, those that wait for their turn end with the breaker that opens, not each after a timeout of its own.
func TestWaitingCallsEndWithARendererThatHangs(t *testing.T) {
	f, s := startEngine(t)
	f.slow.Store(true)
	req, err := body.Parse(body.Completions, []byte(`{"prompt":"a"}`))
	if err != nil {
		t.Fatal(err)
	}
	r := NewRemote(s.URL, 2*time.Second, func(error) {})
	var all sync.WaitGroup
	for range 8 * maxCalls {
		all.Go(func() {
			if _, err := r.Prompt(t.Context(), req); err == nil {
				t.Error("got no error")
			}
		})
	}
	all.Wait()
	if n := f.asked.Load(); n > 2*maxCalls {
		t.Errorf("got %d calls, want those that ran when the breaker opened", n)
	}
}

// A call that waited for others has little time left. That it gets no answer does not count against a renderer that is only busy.
func TestLateCallsDoNotOpenTheBreaker(t *testing.T) {
	f, s := startEngine(t)
	f.slow.Store(true)
	req, err := body.Parse(body.Completions, []byte(`{"prompt":"a"}`))
	if err != nil {
		t.Fatal(err)
	}
	for _, waits := range []bool{true, false} {
		r := NewRemote(s.URL, 400*time.Millisecond, func(error) {})
		var released sync.WaitGroup
		if waits {
			for range maxCalls {
				r.calls <- struct{}{}
			}
			released.Go(func() {
				time.Sleep(300 * time.Millisecond)
				<-r.calls
			})
		}
		if _, err := r.Prompt(t.Context(), req); err == nil {
			t.Error("got no error of a renderer that hangs")
		}
		released.Wait()
		if (r.failed == 0) != waits {
			t.Errorf("waited for a turn: %v: got %d failures", waits, r.failed)
		}
	}
}

func TestRemoteBreaker(t *testing.T) {
	f, s := startEngine(t)
	var outcomes []error
	r := NewRemote(s.URL, 20*time.Millisecond, func(err error) { outcomes = append(outcomes, err) })
	req, err := body.Parse(body.Completions, []byte(`{"prompt":"a"}`))
	if err != nil {
		t.Fatal(err)
	}
	call := func() error { _, err := r.Prompt(t.Context(), req); return err }
	f.down.Store(true)
	for range 2 * breakerFailures { // prompts that it fails on, which a client may know
		if err := call(); err == nil || errors.Is(err, ErrBreakerOpen) {
			t.Fatalf("an error that is answered: %v", err)
		}
	}
	f.down.Store(false)
	outcomes = nil
	f.slow.Store(true)
	for i := range breakerFailures {
		if err := call(); err == nil || errors.Is(err, ErrBreakerOpen) {
			t.Fatalf("call %d: %v", i, err)
		}
	}
	if err := call(); !errors.Is(err, ErrBreakerOpen) {
		t.Fatalf("call of an open breaker: %v", err)
	}
	r.until = time.Now() // the pause is over
	if err := call(); err == nil || errors.Is(err, ErrBreakerOpen) {
		t.Fatalf("trial: %v", err)
	}
	if err := call(); !errors.Is(err, ErrBreakerOpen) {
		t.Fatalf("after a failed trial: %v", err)
	}
	f.slow.Store(false)
	r.until = time.Now() // the pause is over
	r.timeout = 2 * time.Second
	if err := call(); err != nil {
		t.Fatalf("second trial: %v", err)
	}
	if err := call(); err != nil || len(outcomes) != breakerFailures+5 {
		t.Fatalf("closed again: %v, %d outcomes", err, len(outcomes))
	}
}

func TestTokensCheck(t *testing.T) {
	f, s := startEngine(t)
	m := load(t, "qwen3", Options{})
	for _, wrong := range []bool{false, true} {
		f.wrong.Store(wrong)
		var out strings.Builder
		differ, err := TokensCheck(t.Context(), &out, m, &Oracle{URL: s.URL}, "m")
		if err != nil || (differ > 0) != wrong || strings.Contains(out.String(), "token ") != wrong {
			t.Errorf("wrong=%v: %d, %v\n%s", wrong, differ, err, &out)
		}
	}
	f.down.Store(true)
	if _, err := TokensCheck(t.Context(), io.Discard, m, &Oracle{URL: s.URL}, "m"); err == nil {
		t.Error("no error from an engine that is down")
	}
	if _, err := TokensCheck(t.Context(), io.Discard, m, &Oracle{URL: s.URL, Engine: TRTLLM}, "m"); !errors.Is(err, ErrNoOracle) {
		t.Errorf("an engine without the endpoint: %v", err)
	}
}

func FuzzEngineAnswer(f *testing.F) {
	for _, s := range []string{`{"token_ids":[1,2]}`, `[{"token_ids":[1]},{"token_ids":[]}]`, `{"tokens":[1]}`, `{"error":{"message":"x"}}`, `[]`, `5`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, answer []byte) {
		_ = messageOf(answer)
		if body.Valid(answer) != nil {
			return
		}
		if ids, n, err := renderedIDs(answer); err == nil && (n < 1 || len(ids) > len(answer)) {
			t.Fatalf("%q: %d ids of %d prompts", answer, len(ids), n)
		}
	})
}

// TestRenderedAPIsAreCompared: messages and responses are compared with vLLM's render endpoints
// as a whole; without these endpoints nothing is reported.
func TestRenderedAPIsAreCompared(t *testing.T) {
	f, s := startEngine(t)
	for path, raw := range map[string]string{
		"/v1/messages":  `{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"Hi"}]}`,
		"/v1/responses": `{"model":"m","input":"Hi","instructions":"Be brief."}`,
	} {
		api, _ := body.Detect(http.MethodPost, path)
		var told []string
		c := NewChecker(load(t, "qwen3", Options{}), &Oracle{URL: s.URL}, CheckerOptions{OnCheck: func(api body.API, d *Difference, err error) {
			told = append(told, fmt.Sprint(api, d != nil, err))
		}})
		question := append([]byte{byte(api)}, raw...)
		if d, err := c.ask(t.Context(), question); d != nil || err != nil {
			t.Errorf("%s: got %v, %v, want no difference", path, d, err)
		}
		f.wrong.Store(true)
		if d, err := c.ask(t.Context(), question); d == nil || err != nil {
			t.Errorf("%s, another id: %v, %v", path, d, err)
		}
		f.wrong.Store(false)
		if want := []string{api.String() + " false <nil>", api.String() + " true <nil>"}; !slices.Equal(told, want) {
			t.Errorf("%s: told %q", path, told)
		}
		asked := f.asked.Load()
		image := append([]byte{byte(body.Messages)}, `{"model":"m","max_tokens":5,"messages":[{"role":"user","content":[{"type":"image","source":{}}]}]}`...)
		if _, err := c.ask(t.Context(), image); !errors.Is(err, errNotComparable) || f.asked.Load() != asked {
			t.Errorf("an image: %v, asked %d times", err, f.asked.Load()-asked)
		}
		for _, status := range []int{http.StatusForbidden, http.StatusNotFound} {
			none := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "{}", status) }))
			c := NewChecker(load(t, "qwen3", Options{}), &Oracle{URL: none.URL}, CheckerOptions{})
			if _, err := c.ask(t.Context(), question); !errors.Is(err, errNotComparable) {
				t.Errorf("%s, status %d: %v", path, status, err)
			}
			none.Close()
		}
		if _, err := NewChecker(load(t, "qwen3", Options{}), &Oracle{Engine: SGLang, URL: s.URL}, CheckerOptions{}).ask(t.Context(), question); !errors.Is(err, errNotComparable) {
			t.Errorf("%s of SGLang: %v", path, err)
		}
	}
}

// TestLargestSample: bodies beyond CheckerOptions.MaxBody are not copied.
func TestLargestSample(t *testing.T) {
	raw := `{"prompt":"` + strings.Repeat("x", 100) + `"}`
	for most, want := range map[int]int{len(raw): 1, len(raw) - 1: 0, 0: 1} {
		c := NewChecker(load(t, "qwen3", Options{}), &Oracle{}, CheckerOptions{Every: 1, MaxBody: most})
		req, err := body.Parse(body.Completions, []byte(raw))
		if err != nil {
			t.Fatal(err)
		}
		if c.Offer(req); len(c.samples) != want {
			t.Errorf("%d bytes of at most %d: %d samples", len(raw), most, len(c.samples))
		}
	}
}
