package decide

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/fleet"

	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/steering"
	"github.com/kvlane/kvlane/internal/tokens/models"
	"github.com/kvlane/kvlane/internal/tokens/shape"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

func TestMain(m *testing.M) {
	code := m.Run()
	if err := leaks(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// leaks returns the goroutines that do not end. Those of closed connections may take longer to end on a busy machine than one
// call of goleak waits, less than half a second.
func leaks() (err error) {
	for range 20 {
		if err = goleak.Find(); err == nil {
			break
		}
	}
	return err
}

// bench is a Decider with workers and without sockets.
type bench struct {
	*Decider

	t         testing.TB
	endpoints []string
	suspects  []string
	n         int
}

// Decide waits as long as the request does.
func (b *bench) Decide(ctx context.Context, r *extproc.Request) extproc.Decision {
	return extproc.Await(ctx, b.Decider.Decide(ctx, r))
}

func newBench(t testing.TB, yaml string, list ...workers.Worker) *bench {
	t.Helper()
	c, err := config.Parse("test.yaml", []byte("models: [{name: demo, aliases: [alias], adapters: [sql], tokenizer: \"builtin:qwen3\", check: {disabled: true}}]\n"+yaml))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(yaml, "decision_timeout") {
		c.Limits.DecisionTimeout = 0 // a slow machine changes nothing
	}
	if c.Index.Key == "" && c.Index.KeyFile == "" {
		c.Index.Key = "test" // ties break the same way in each run
	}
	m, err := qwen()
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{t: t}
	b.Decider, err = New(Options{
		Config: c, Models: []*fleet.Model{{Config: c.Models[0], Tokens: m}}, Metrics: observe.New("test"), Log: zerolog.Nop(),
		OnEndpoints: func(serve, prefill []string) { b.endpoints = append(serve, prefill...) },
		OnSuspect:   func(w string) { b.suspects = append(b.suspects, w) },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	b.Fleet().SetWorkers(list)
	return b
}

// qwen loads the tokenizer once for all tests.
var qwen = sync.OnceValues(func() (*shape.Model, error) {
	files, err := models.Open("builtin:qwen3")
	if err != nil {
		return nil, err
	}
	takes := true // images, as far as these tests are concerned
	return shape.Load(files, shape.Options{Names: []string{"demo", "alias"}, Multimodal: &takes})
})

// servedQwen is a model that is served with a tokenizer and not checked.
func servedQwen(t testing.TB) *fleet.Model {
	t.Helper()
	m, err := qwen()
	if err != nil {
		t.Fatal(err)
	}
	served := &fleet.Model{Config: config.Model{Name: "demo"}, Tokens: m}
	served.Config.Check.Disabled = true
	return served
}

func worker(name string, ranks int) workers.Worker {
	return workers.Worker{Ready: true, Generation: 1, Worker: config.Worker{
		Name: name, Address: fmt.Sprintf("10.0.0.%d:8000", name[0]), Engine: "vllm", Role: "both", Ranks: ranks, RankBy: "header", Speed: 1, Models: []string{"demo"},
	}}
}

func (b *bench) request(path, body string, headers ...string) *extproc.Request {
	b.n++
	r := &extproc.Request{ID: fmt.Sprintf("r%d", b.n), Method: "POST", Path: path, Body: []byte(body), Received: time.Now()}
	for i := 0; i+1 < len(headers); i += 2 {
		r.Headers = append(r.Headers, extproc.Header{Name: headers[i], Value: headers[i+1]})
	}
	return r
}

// ask decides and also returns the entry of the decision log.
func (b *bench) ask(path, body string, headers ...string) (extproc.Decision, *observe.Entry) {
	b.t.Helper()
	r := b.request(path, body, headers...)
	d := b.Decide(context.Background(), r)
	e := b.decisions.Find(r.ID)
	if tk, ok := d.Ticket.(*ticket); ok && e == nil { // requests under load have taken its place in the log
		e = tk.entry
	}
	if e == nil {
		b.t.Fatal("not in the decision log")
	}
	return d, e
}

// The APIs that rank and classify are routed by their prompt where it is known, else by load; none counts as unknown.
func TestFurtherAPIs(t *testing.T) {
	prompt := strings.Repeat("sea ", 100)
	for path, c := range map[string]struct {
		api, body, degraded string
		matched             bool
	}{
		"/classify":           {"classify", `{"model":"demo","input":"` + prompt + `"}`, "", true},
		"/v1/classify":        {"classify", `{"model":"demo","messages":[{"role":"user","content":"` + prompt + `"}]}`, "", true},
		"/pooling?x":          {"pooling", `{"model":"demo","task":"embed","input":["` + prompt + `"]}`, "", true},
		"/pooling":            {"pooling", `{"model":"demo","input":"` + prompt + `"}`, "", false},
		"/score":              {"score", `{"model":"demo","text_1":"a","text_2":"` + prompt + `"}`, degradedTokens, false},
		"/v1/rerank":          {"rerank", `{"model":"demo","query":"a","documents":["` + prompt + `"]}`, degradedTokens, false},
		"/v1/audio/speech":    {"audio", `{"model":"demo","input":"` + prompt + `"}`, "", false},
		"/v1/audio/unheardof": {"unknown", `{"input":"x"}`, "", false},
	} {
		b := newBench(t, "", worker("a", 0))
		b.ask(path, c.body)
		active := b.loads()
		d, e := b.ask(path, c.body)
		if d.Endpoint == "" || e.API != c.api || e.Degraded != c.degraded || (e.Matched > 0) != c.matched {
			t.Errorf("%s: got API %s, degraded %q, %d tokens matched, want %s, %q and any: %v", path, e.API, e.Degraded, e.Matched, c.api, c.degraded, c.matched)
		}
		if c.api != "unknown" && active < 90 {
			t.Errorf("%s: got a load of %d, want that of its text", path, active)
		}
	}
}

// A batch loads its target by what it has to compute for all of its prompts, and is matched by all of them: not by what they
// share with each other, and by what a target holds of any.
func TestABatchIsMatchedWhole(t *testing.T) {
	b := newBench(t, "", worker("a", 0))
	text := func(word string) string { return `"` + strings.Repeat(word+" ", 200) + `"` }
	ask := func(more string, prompts ...string) *observe.Entry {
		d, e := b.ask("/v1/completions", `{"model":"demo","prompt":[`+strings.Join(prompts, ",")+`]`+more+`}`)
		end(&d, 200)
		return e
	}
	whole := ask("", text("sea")).PromptTokens
	held := (whole - 1) / 16 * 16
	for name, c := range map[string]struct {
		prompts       []string
		matched, miss int64
	}{
		"nothing known":     {[]string{text("one"), text("two")}, 0, 2 * whole},
		"the first known":   {[]string{text("sea"), text("three")}, held, 2*whole - held},
		"the last known":    {[]string{text("four"), text("five"), text("sea")}, held, 3*whole - held},
		"a short first":     {[]string{`"x"`, text("sea")}, held, whole - held + 1},
		"alike and known":   {[]string{text("sea"), text("sea"), text("sea")}, held, 3 * (whole - held)},
		"alike, not known":  {[]string{text("six"), text("six"), text("six")}, 0, 3*whole - 2*held},
		"as the first":      {[]string{text("seven"), text("eight"), text("seven")}, 0, 3*whole - held},
		"as the one before": {[]string{text("nine"), text("ten"), text("ten")}, 0, 3*whole - held},
	} {
		if e := ask("", c.prompts...); e.Matched != c.matched || e.Miss != c.miss {
			t.Errorf("%s: got %d tokens matched and %d to compute, want %d and %d", name, e.Matched, e.Miss, c.matched, c.miss)
		}
	}
	if e := ask(`,"prompt_logprobs":0`, text("sea"), text("sea")); e.Matched != 0 || e.Miss != 2*whole {
		t.Errorf("without the cache: got %d tokens matched and %d to compute, want all %d computed", e.Matched, e.Miss, 2*whole)
	}
	if n := b.loads(); n != 0 {
		t.Errorf("got a load of %d after the batches, want none", n)
	}
}

// A batch goes where its second prompt is, which its first says nothing about.
func TestABatchFollowsItsSecondPrompt(t *testing.T) {
	b := newBench(t, "", worker("a", 2), worker("b", 2))
	for range 3 {
		b.ask("/v1/completions", completion(40, ""))
	}
	_, first := b.ask("/v1/completions", completion(800, ""))
	_, batch := b.ask("/v1/completions", `{"model":"demo","prompt":["x","`+strings.Repeat("sea ", 800)+`"]}`)
	if batch.Target != first.Target || batch.Matched < 780 {
		t.Errorf("the prompt is on %s, the batch went to %s with %d tokens", first.Target, batch.Target, batch.Matched)
	}
}

// Of a batch that the engine refused no credit is left, and what a batch sent to a target is credited there.
func TestCreditOfABatch(t *testing.T) {
	b := newBench(t, "", worker("a", 0))
	text := func(word string) string { return `"` + strings.Repeat(word+" ", 200) + `"` }
	refused, _ := b.ask("/v1/completions", `{"model":"demo","prompt":[`+text("sea")+","+text("air")+`]}`)
	end(&refused, 400)
	if _, e := b.ask("/v1/completions", `{"model":"demo","prompt":`+text("air")+`}`); e.Matched != 0 {
		t.Errorf("got %d tokens of a refused batch, want none", e.Matched)
	}
	taken, _ := b.ask("/v1/completions", `{"model":"demo","prompt":[`+text("sea")+","+text("fire")+`]}`)
	end(&taken, 200)
	if _, e := b.ask("/v1/completions", `{"model":"demo","prompt":`+text("fire")+`}`); e.Matched < 190 {
		t.Errorf("got %d tokens of the batch's second prompt, want nearly 200", e.Matched)
	}
}

// A batch is matched by 64 prompts and 1 MiB. What is beyond counts by its length.
func TestBoundsOfABatch(t *testing.T) {
	b := newBench(t, "", worker("a", 0))
	prompt := `"` + strings.Repeat("sea ", 100) + `"`
	_, one := b.ask("/v1/completions", `{"model":"demo","prompt":[`+prompt+`]}`)
	_, many := b.ask("/v1/completions", `{"model":"demo","prompt":[`+strings.Repeat(prompt+",", 199)+prompt+`]}`)
	if all := 199 * one.PromptTokens; many.PromptTokens < all*9/10 || many.Matched != (one.PromptTokens-1)/16*16 {
		t.Errorf("got %d tokens, %d matched, want about %d, and those of one prompt matched", many.PromptTokens, many.Matched, all)
	}
	long := `"` + strings.Repeat("air ", 150_000) + `"`
	_, e := b.ask("/v1/completions", `{"model":"demo","prompt":[`+long+","+long+","+prompt+`]}`)
	if e.Matched != 0 || e.PromptTokens < 290_000 {
		t.Errorf("got %d tokens, %d matched, want about 300,000, and the last prompt not matched", e.PromptTokens, e.Matched)
	}
}

func completion(words int, more string) string {
	return `{"model":"demo","prompt":"` + strings.Repeat("sea ", words) + `"` + more + `}`
}

func (b *bench) loads() (active int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.router.Targets(func(_ kvindex.Slot, _ *routing.TargetInfo, l routing.Load) bool {
		active += l.Active + l.Queue
		return true
	})
	return active
}

func TestADecisionIsBookedFollowedAndReleased(t *testing.T) {
	b := newBench(t, "explain: {header: true}\n", worker("a", 2), worker("b", 2))
	d, e := b.ask("/v1/completions", completion(100, ""))
	if d.Reject != nil || d.Endpoint == "" || d.Ticket == nil || e.PromptTokens != 101 && e.PromptTokens != 100 {
		t.Fatalf("%+v, entry %+v", d, e)
	}
	if len(d.Set) != 1 || d.Set[0].Name != steering.Rank {
		t.Errorf("headers %v", d.Set)
	}
	if b.loads() == 0 {
		t.Error("nothing booked")
	}
	h := d.Ticket.ResponseHeaders(200, d.Endpoint)
	if len(h) != 2 || h[0].Value != e.Target {
		t.Errorf("response headers %v", h)
	}
	d.Ticket.End(time.Now())
	if b.loads() != 0 || b.router.Live() != 0 {
		t.Error("load left after the end")
	}
	if !strings.Contains(e.Text(), "answered 200") || e.Explanation == nil {
		t.Errorf("journal: %s", e.Text())
	}
}

func TestASecondRequestFollowsWhatWasSentBefore(t *testing.T) {
	b := newBench(t, "", worker("a", 2), worker("b", 2))
	for range 3 {
		b.ask("/v1/completions", completion(40, ""))
	}
	_, first := b.ask("/v1/completions", completion(800, ""))
	_, second := b.ask("/v1/completions", completion(800, ""))
	if second.Target != first.Target || second.Matched < 780 {
		t.Errorf("first on %s, second on %s with %d tokens", first.Target, second.Target, second.Matched)
	}
	_, salted := b.ask("/v1/completions", completion(800, `,"cache_salt":"s"`))
	_, adapter := b.ask("/v1/completions", strings.Replace(completion(800, ""), "demo", "sql", 1))
	_, alias := b.ask("/v1/completions", strings.Replace(completion(800, ""), "demo", "alias", 1))
	if salted.Matched != 0 || adapter.Matched != 0 || alias.Matched < 780 {
		t.Errorf("matched: salted %d, adapter %d, alias %d", salted.Matched, adapter.Matched, alias.Matched)
	}
}

// TestBodiesThatAreNotRead: a body that an engine may accept is routed by load, with the
// reason; one that no engine accepts is refused.
func TestBodiesThatAreNotRead(t *testing.T) {
	b := newBench(t, "", worker("a", 0))
	deep := `{"model":"demo","prompt":"x","y":` + strings.Repeat("[", 600) + strings.Repeat("]", 600) + `}`
	for body, want := range map[string]string{
		deep:                          "it is nested deeper than 512 at byte 544",
		"{\x00\"\x00a\x00\"\x00:\x00": "it seems to be UTF-16 or UTF-32",
	} {
		d, e := b.ask("/v1/completions", body)
		if d.Reject != nil || d.Endpoint == "" || e.Degraded != degradedBody || e.Refusal != want {
			t.Errorf("%.20q: %+v, %q %q", body, d.Reject, e.Degraded, e.Refusal)
		}
		d.Ticket.End(time.Now())
		for trust, refused := range map[bool]bool{false: true, true: false} {
			apart := newBench(t, fmt.Sprintf("disagg: {connector: nixl, trust_client_params: %v}", trust), worker("a", 0))
			if d, _ := apart.ask("/v1/completions", body); (d.Reject != nil) != refused || refused && (d.Reject.Status != 400 || !strings.Contains(string(d.Reject.Body), want)) {
				t.Errorf("%.20q, trusted %v: %+v", body, trust, d.Reject)
			}
		}
	}
	for _, body := range []string{"\xef\xbb\xbf" + completion(100, ""), completion(100, `,"y":NaN`), completion(100, `,"x":[-Infinity]`)} {
		d, e := b.ask("/v1/completions", body)
		if d.Reject != nil || e.Degraded != "" || e.PromptTokens < 100 {
			t.Errorf("%.20q: %+v, %q, %d tokens", body, d.Reject, e.Degraded, e.PromptTokens)
		}
		d.Ticket.End(time.Now())
	}
	d, _ := b.ask("/v1/completions", "\x1f\x8b\x08", "content-encoding", "gzip")
	if d.Reject == nil || d.Reject.Status != 415 || !strings.Contains(string(d.Reject.Body), "content-encoding: gzip") || !strings.Contains(string(d.Reject.Body), "invalid_request_error") {
		t.Errorf("compressed: %+v", d.Reject)
	}
	d, _ = b.ask("/v1/completions", completion(10, ""), "content-encoding", "identity")
	if d.Reject != nil {
		t.Errorf("identity: %+v", d.Reject)
	}
}

func TestAnswersOfItsOwn(t *testing.T) {
	b := newBench(t, "routing: {policy: {limits: {max_active: 1}}}\n", worker("a", 0))
	if d, _ := b.ask("/v1/chat/completions", `{"messages": [}`); d.Reject == nil || d.Reject.Status != 400 {
		t.Errorf("broken JSON: %+v", d)
	}
	if d, _ := b.ask("/v1/messages", `{`); d.Reject == nil || !strings.Contains(string(d.Reject.Body), `"type":"error"`) {
		t.Errorf("Anthropic's shape: %+v", d.Reject)
	}
	first, _ := b.ask("/v1/completions", completion(10, ""))
	d, _ := b.ask("/v1/completions", completion(10, ""))
	if d.Reject == nil || d.Reject.Status != 429 || len(d.Reject.Headers) != 1 || d.Reject.Headers[0].Name != "retry-after" {
		t.Errorf("full: %+v", d.Reject)
	}
	first.Ticket.End(time.Now())
	if d, _ := b.ask("/v1/completions", completion(10, "")); d.Reject != nil {
		t.Errorf("room again: %+v", d.Reject)
	}
	r := b.request("/v1/completions", completion(10, ""))
	r.HasSubset = true
	if d := b.Decide(context.Background(), r); d.Reject == nil || d.Reject.Status != 503 {
		t.Errorf("empty subset: %+v", d)
	}
}

// Clients are told what they can do; counts and worker names are for the decision log.
func TestRefusalsAreInPlainWords(t *testing.T) {
	b := newBench(t, "routing: {trust_overrides: true, policy: {limits: {max_active: 1}}}\n", worker("aaaa", 0))
	first, _ := b.ask("/v1/completions", completion(10, ""))
	for name, c := range map[string]struct {
		exclude, message, detail string
	}{
		"busy":     {"", "all workers that could serve this request are busy; try again in 1 s", "capacity exhausted in pool both: 1 busy_requests"},
		"excluded": {"aaaa", "no worker can serve this request at the moment", "1 excluded (aaaa)"},
	} {
		d, e := b.ask("/v1/completions", completion(10, ""), "x-kvlane-exclude", c.exclude)
		if d.Reject == nil || !strings.Contains(string(d.Reject.Body), `"message":"`+c.message+`"`) {
			t.Errorf("%s: the client is told %s", name, d.Reject.Body)
		}
		if !strings.Contains(e.Refusal, c.detail) {
			t.Errorf("%s: the journal has %q", name, e.Refusal)
		}
	}
	first.Ticket.End(time.Now())
}

// A prompt that an engine only builds, counts or refuses holds no others back, and is expected in no cache.
func TestWhatIsNotComputedIsNoLoad(t *testing.T) {
	b := newBench(t, "", worker("a", 1))
	long := strings.Repeat("sea ", 5000)
	for _, c := range []struct {
		path, body string
		least      int64 // and most
		most       int64
	}{
		{"/tokenize", `{"model":"demo","prompt":"` + long + `"}`, 0, 0},
		{"/v1/messages/count_tokens", `{"model":"demo","messages":[{"role":"user","content":"` + long + `"}]}`, 0, 0},
		{"/v1/completions/render", `{"model":"demo","prompt":"` + long + `"}`, 0, 0},
		{"/v1/chat/completions", `{"model":"demo","messages":[{"role":7,"content":"` + long + `"}]}`, 1, refusedTokens},
		{"/v1/completions", `{"model":"demo","prompt":"` + long + `"}`, 5000, 5001},
		{"/rerank", `{"model":"demo","query":"a","documents":["b"],"pad":"` + long + `"}`, 0, 10},
		{"/rerank", `{"model":"demo","query":"a","documents":["b","` + long + `"]}`, 5000, 5010},
		{"/detokenize", `{"model":"demo","tokens":[1],"pad":"` + strings.Repeat(long, 10) + `"}`, 0, 8192},
	} {
		d, e := b.ask(c.path, c.body)
		if load := b.ledger().Targets[0].Load.Queue; load < c.least || load > c.most || e.Matched != 0 || d.Reject != nil {
			t.Errorf("%s: got a load of %d and %d tokens matched, want %d to %d, and none", c.path, load, e.Matched, c.least, c.most)
		}
		end(&d, 200)
	}
}

func TestMissingKnowledgeNeverFailsARequest(t *testing.T) {
	b := newBench(t, "", worker("a", 2))
	for name, c := range map[string]struct{ path, body, degraded string }{
		"unknown model":   {"/v1/completions", `{"model":"other","prompt":"x"}`, degradedModel},
		"refused":         {"/v1/chat/completions", `{"model":"demo","messages":[]}`, degradedRefused},
		"short":           {"/v1/completions", `{"model":"demo","prompt":"x"}`, degradedShortPrompt},
		"an image":        {"/v1/chat/completions", `{"model":"demo","messages":[{"role":"user","content":[{"type":"text","text":"` + strings.Repeat("sea ", 50) + `"},{"type":"image_url","image_url":{"url":"x"}}]}]}`, degradedFront},
		"not ours at all": {"/v1/files", "\x00\x01", ""},
	} {
		w := worker("a", 2)
		w.Models = nil // serves every model
		b.Fleet().SetWorkers([]workers.Worker{w})
		d, e := b.ask(c.path, c.body)
		if d.Reject != nil || d.Endpoint == "" || e.Degraded != c.degraded {
			t.Errorf("%s: reject %+v, endpoint %q, degraded %q (%s)", name, d.Reject, d.Endpoint, e.Degraded, e.Refusal)
		}
	}
	r := b.request("/v1/completions", "")
	r.Partial = true
	if d := b.Decide(context.Background(), r); d.Endpoint == "" || b.decisions.Find(r.ID).Degraded != degradedPartial {
		t.Errorf("body not seen: %+v", d)
	}
}

func TestOverridesNeedTrust(t *testing.T) {
	for _, trusted := range []bool{false, true} {
		b := newBench(t, fmt.Sprintf("routing: {trust_overrides: %v}\n", trusted), worker("a", 2), worker("b", 2))
		pinned := 0
		for range 8 {
			if _, e := b.ask("/v1/completions", completion(5, ""), pinHeader, "b/1"); e.Target == "b/1" {
				pinned++
			}
		}
		if (pinned == 8) != trusted {
			t.Errorf("trusted %v: %d of 8 pinned", trusted, pinned)
		}
		excluded := 0
		for range 8 {
			if _, e := b.ask("/v1/completions", completion(5, ""), excludeHeader, "a, b/0"); e.Target == "b/1" {
				excluded++
			}
		}
		if (excluded == 8) != trusted {
			t.Errorf("trusted %v: %d of 8 excluded", trusted, excluded)
		}
	}
}

// The priority of a request is that of the objective that it names, where configuration trusts the name: of the configuration,
// else of those that are watched. An unknown one leaves the priority that the request's model has.
func TestObjectivesHavePriorities(t *testing.T) {
	for _, trust := range []string{"{}", "{trust_objectives: true, objectives: {batch: -1}}", "{trust_overrides: true, objectives: {batch: -1}}"} {
		b := newBench(t, "routing: "+trust+"\nflow: {max_requests: 8, bands: [{priority: 2, models: [demo]}]}\n", worker("a", 0))
		query := func(headers ...string) routing.Query {
			w := &work{job: &job{d: b.Decider, s: newScratch(), r: b.request("/", "", headers...)}, in: &input{name: "demo"}, tokens: &tokens{}}
			w.job.query(w)
			return w.query
		}
		check := func(name string, want int) {
			t.Helper()
			if trust == "{}" {
				want = 2 // that of the model
			}
			for _, header := range []string{objectiveHeader, oldObjectiveHeader} {
				if got := query(header, name).Priority; got != want {
					t.Errorf("routing %s, %s: %s: got priority %d, want %d", trust, header, name, got, want)
				}
			}
		}
		check("gold", 2)
		b.SetObjectives(map[string]int{"gold": 5, "batch": 7, "none": 0})
		check(" gold ", 5)
		check("batch", -1)
		check("none", 0)
		check("unknown", 2)
		b.SetObjectives(map[string]int{})
		check("gold", 2)
		if q, want := query(pinHeader, "a"), strings.Contains(trust, "overrides"); (q.Pin != nil) != want {
			t.Errorf("routing %s: got pin %v, want one: %v", trust, q.Pin, want)
		}
	}
}

func TestConversationIDs(t *testing.T) {
	b := newBench(t, "")
	for _, c := range []struct {
		body, want string
		headers    []string
	}{
		{`{}`, "", nil},
		{`{}`, "h", []string{"x-correlation-id", "h"}},
		{`{}`, "second", []string{"x-correlation-id", "second", "x-session-id", "  "}},
		{`{}`, "first", []string{"x-correlation-id", "second", "x-session-id", "first"}},
		{`{"session_id":" body "}`, "body", []string{"x-session-id", "header"}},
		{`{}`, "s/sub", []string{"x-claude-code-session-id", "s", "x-claude-code-agent-id", "sub"}},
		{`{}`, "s", []string{"x-claude-code-session-id", "s", "x-claude-code-agent-id", " "}},
		// A subagent of a subagent: each is a conversation of its own, whichever is its parent.
		{`{}`, "s/subsub", []string{"x-claude-code-session-id", "s", "x-claude-code-agent-id", "subsub", "x-claude-code-parent-agent-id", "sub", "x-dynamo-parent-session-id", "sub"}},
		{`{"nvext":{"agent_context":{"session_id":"t2","parent_session_id":"t1","parent_trajectory_id":"t1"}}}`, "t2", nil},
		{`{}`, "s", []string{"x-session-id", "s", "x-claude-code-agent-id", "sub"}},
		{`{"prompt_cache_key":"root"}`, "thread", []string{"thread-id", "thread", "session-id", "root"}},
		{`{"prompt_cache_key":"root"}`, "root", nil},
		{`{"metadata":{"session_id":"run"}}`, "run", nil},
		{`{"metadata":{"user_id":"user_1_account_2_session_3-4"}}`, "3-4", nil},
		{`{"metadata":{"user_id":"{\"device_id\":\"d\",\"session_id\":\"s5\"}"}}`, "s5", nil},
		{`{"metadata":{"user_id":"someone"}}`, "", nil},
		{`{"metadata":{"user_id":"user_1_session_3"}}`, "h", []string{"x-correlation-id", "h"}},
	} {
		d, e := b.ask("/v1/completions", c.body, c.headers...)
		if e.Conversation != c.want || d.Reject == nil {
			t.Errorf("%s %v: %q, want %q", c.body, c.headers, e.Conversation, c.want)
		}
	}
	b = newBench(t, "routing: {conversation_headers: [X-Chat, X-User]}\n")
	if _, e := b.ask("/v1/completions", `{}`, "x-session-id", "not asked for", "x-user", "u", "x-chat", "mine"); e.Conversation != "mine" {
		t.Errorf("configured headers: %q", e.Conversation)
	}
}

// The session headers of the agents that people run are known without configuration.
func TestSessionHeadersOfAgents(t *testing.T) {
	b := newBench(t, "")
	for agent, header := range map[string]string{
		"Dynamo": "x-dynamo-session-id", "many": "x-session-id", "Claude Code": "x-claude-code-session-id", "Codex": "thread-id",
		"Codex, all threads": "session-id", "an older Codex": "session_id", "opencode": "x-opencode-session-id", "opencode's other": "x-opencode-session",
		"LiteLLM": "x-litellm-session-id", "a proxy": "x-correlation-id", "a router": "x-session-affinity", "a load tool": "x-multi-turn-session-id",
	} {
		if _, e := b.ask("/v1/completions", `{}`, header, "s1"); e.Conversation != "s1" {
			t.Errorf("%s, %s: got conversation %q, want s1", agent, header, e.Conversation)
		}
	}
}

// The last request of a conversation ends its binding; an id that comes back counts as new.
func TestTheFinalRequestEndsTheConversation(t *testing.T) {
	b := newBench(t, "", worker("a", 0), worker("b", 0))
	bound := func(body string, headers ...string) bool {
		d, _ := b.ask("/v1/completions", body, append(headers, "x-session-id", "1")...)
		d.Ticket.End(time.Now())
		plan, err := b.router.Pick(b.since(time.Now()), &routing.Query{Conversation: "1", PromptTokens: 10}, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		b.router.Release(b.since(time.Now()), plan.Reservation)
		return !plan.FirstTurn
	}
	for _, c := range []struct {
		body    string
		headers []string
	}{
		{completion(10, ""), []string{"x-dynamo-session-final", "true"}},
		{completion(10, `,"nvext":{"agent_context":{"session_final":true}}`), nil},
	} {
		if !bound(completion(10, "")) || !bound(completion(10, ""), "x-dynamo-session-final", "false") {
			t.Error("got no binding, want one before the end")
		}
		if bound(c.body, c.headers...) {
			t.Errorf("%s %v: got a binding, want none after the last request", c.body, c.headers)
		}
	}
}

func TestARequestThatMovedIsBookedWhereItIs(t *testing.T) {
	b := newBench(t, "", worker("a", 0), worker("b", 2))
	d, e := b.ask("/v1/completions", completion(10, ""), "x-session-id", "1")
	other := "10.0.0.98:8000"
	if d.Endpoint == other {
		other = "10.0.0.97:8000"
	}
	d.Ticket.ResponseHeaders(200, other)
	if !strings.HasPrefix(e.Target, map[string]string{"10.0.0.98:8000": "b/", "10.0.0.97:8000": "a"}[other]) || len(b.suspects) != 1 {
		t.Errorf("target %s, suspects %v", e.Target, b.suspects)
	}
	d.Ticket.End(time.Now())
	d, _ = b.ask("/v1/completions", completion(10, ""))
	d.Ticket.ResponseHeaders(503, "10.9.9.9:1") // an address of no worker
	d.Ticket.End(time.Now())
	if b.loads() != 0 {
		t.Error("load left")
	}
}

// Envoy's access log tells of answers that the engine breaks off: five in a row make its target suspect, and a whole one
// ends that. Clients that leave, and what was counted by its status, do not count.
func TestBrokenAnswersMakeATargetSuspect(t *testing.T) {
	for _, c := range []struct {
		name    string
		status  int
		flags   []string
		suspect string
	}{
		{"cut", 200, []string{"upstream_connection_termination"}, "failures"},
		{"reset", 200, []string{"upstream_remote_reset"}, "failures"},
		{"the client left", 200, []string{"downstream_connection_termination"}, ""},
		{"whole", 200, nil, ""},
		{"an error of Envoy's own", 503, []string{"upstream_connection_termination"}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t, "routing: {trust_overrides: true}", worker("a", 0), worker("b", 0), worker("c", 0))
			answer := func(target string, o extproc.Outcome) (suspect string) {
				d, _ := b.ask("/v1/completions", completion(10, ""), pinHeader, target)
				ticket := d.Ticket.(*ticket)
				ticket.ResponseHeaders(200, ticket.endpoint.Address)
				ticket.End(time.Now())
				ticket.Outcome(o)
				b.ask("/v1/completions", completion(10, ""), pinHeader, "c") // targets are judged at a pick
				return b.suspicion(ticket.slot)
			}
			suspect := ""
			for range 5 {
				answer("b", extproc.Outcome{Status: 200})
				suspect = answer("a", extproc.Outcome{Status: c.status, Flags: c.flags})
				answer("a", extproc.Outcome{Status: 503, Flags: []string{"upstream_connection_termination"}})
				answer("a", extproc.Outcome{Status: 200, Flags: []string{"downstream_connection_termination"}})
			}
			if suspect != c.suspect || (len(b.suspects) > 0) != (c.suspect != "") {
				t.Errorf("got suspicion %q, checks of %v, want %q", suspect, b.suspects, c.suspect)
			}
			if got := answer("a", extproc.Outcome{Status: 200}); got != "" {
				t.Errorf("after a whole answer: got suspicion %q, want none", got)
			}
		})
	}
}

func TestWorkersThatChange(t *testing.T) {
	a, bb := worker("a", 2), worker("b", 0)
	b := newBench(t, "", a, bb)
	if fmt.Sprint(b.endpoints) != "[10.0.0.97:8000 10.0.0.97:8000 10.0.0.98:8000]" {
		t.Errorf("endpoints %v", b.endpoints)
	}
	for range 4 {
		b.ask("/v1/completions", completion(300, ""))
	}
	// Draining: no new picks, and no endpoint.
	a.Draining = true
	b.Fleet().SetWorkers([]workers.Worker{a, bb})
	if _, e := b.ask("/v1/completions", completion(300, "")); e.Target != "b" || len(b.endpoints) != 1 {
		t.Errorf("target %s, endpoints %v", e.Target, b.endpoints)
	}
	// Another process behind the same name inherits nothing, even at the old one's address.
	a.Draining = false
	bb.Ready = false
	unseen := strings.Replace(completion(800, ""), "sea", "map", 1)
	for _, generation := range []uint64{1, 2} {
		a.Generation = generation
		b.Fleet().SetWorkers([]workers.Worker{a, bb})
		d, e := b.ask("/v1/completions", unseen)
		if !strings.HasPrefix(e.Target, "a/") || e.Matched != 0 {
			t.Errorf("generation %d: target %s with %d tokens matched", generation, e.Target, e.Matched)
		}
		d.Ticket.ResponseHeaders(200, d.Endpoint)
		if _, again := b.ask("/v1/completions", unseen); again.Target != e.Target || again.Matched == 0 {
			t.Errorf("generation %d: the same prompt on %s with %d tokens matched, want %s", generation, again.Target, again.Matched, e.Target)
		}
	}
	b.Fleet().SetWorkers(nil)
	if d, _ := b.ask("/v1/completions", completion(300, "")); d.Reject == nil || d.Reject.Status != 503 {
		t.Errorf("nobody left: %+v", d)
	}
	if n := len(b.fleet.Index().Stats().Targets); n != 0 {
		t.Errorf("%d targets left in the index", n)
	}
}

func TestAPortOfItsOwn(t *testing.T) {
	w := worker("a", 3)
	w.RankBy, w.StartRank = "port", 4
	b := newBench(t, "", w)
	seen := map[string]string{}
	for range 6 {
		d, e := b.ask("/v1/completions", completion(5, ""))
		if len(d.Set) != 0 {
			t.Errorf("headers set %v", d.Set)
		}
		seen[e.Target] = d.Endpoint
	}
	if fmt.Sprint(seen) != "map[a/4:10.0.0.97:8000 a/5:10.0.0.97:8001 a/6:10.0.0.97:8002]" {
		t.Errorf("%v", seen)
	}
	w.RankBy = "header"
	b = newBench(t, "", w)
	for range 6 {
		d, e := b.ask("/v1/completions", completion(5, ""))
		if want := map[string]string{"a/4": "0", "a/5": "1", "a/6": "2"}[e.Target]; d.Set[0].Value != want {
			t.Errorf("%s: local rank %s, want %s", e.Target, d.Set[0].Value, want)
		}
	}
}

func TestIDsAreHandedOn(t *testing.T) {
	b := newBench(t, "disagg: {trust_client_params: true}\n", worker("a", 0))
	body := `{"model":"demo","messages":[{"role":"user","content":"Hi"}],"kv_transfer_params":{"x":1.0}}`
	if d, _ := b.ask("/v1/chat/completions", body); d.Body != nil {
		t.Errorf("not asked for: %s", d.Body)
	}
	b.fleet.Model("demo").Config.HandIDs = new(true)
	const ids = `"prompt_token_ids":[151644,872,198,13048,151645,198,151644,77091,198]`
	want := strings.Replace(body, `{"x":1.0}`, `{"x":1.0,`+ids+`}`, 1)
	if d, _ := b.ask("/v1/chat/completions", body); string(d.Body) != want {
		t.Errorf("got  %s\nwant %s", d.Body, want)
	}
	if d, _ := b.ask("/v1/completions", `{"model":"demo","prompt":"Hi","max_tokens":1}`); string(d.Body) != `{"model":"demo","prompt":[13048],"max_tokens":1}` {
		t.Errorf("got %s, want the ids in the place of the prompt", d.Body)
	}
	if d, _ := b.ask("/v1/completions", `{"model":"demo","prompt":"Hi","echo":true}`); d.Body != nil {
		t.Errorf("got %s, want no ids where the answer contains the prompt", d.Body)
	}
	b.fleet.Model("demo").Config.Check.Disabled = false // now only workers that were asked
	if d, _ := b.ask("/v1/chat/completions", body); d.Body != nil {
		t.Errorf("got %s, want no ids for a worker that was not asked", d.Body)
	}
	long := `{"model":"demo","messages":[{"role":"user","content":"` + strings.Repeat("Hi ", 5000) + `"}]}`
	for _, asked := range []bool{true, false} {
		b.fleet.Model("demo").Config.HandIDs, b.fleet.Model("demo").Config.Check.Disabled = nil, !asked
		if d, _ := b.ask("/v1/chat/completions", long); d.Body != nil {
			t.Errorf("asked %v: got ids by default for a worker that was not found to take them", asked)
		}
	}
}

// Envoy answers 413 if the edited body is longer than it may be.
func TestIDsThatMakeABodyTooLongAreNotHandedOn(t *testing.T) {
	b := newBench(t, "limits: {max_body: 4KiB}\n", worker("a", 0))
	b.fleet.Model("demo").Config.HandIDs = new(true)
	for n, want := range map[int]bool{100: true, 1000: false} {
		d, _ := b.ask("/v1/chat/completions", `{"model":"demo","messages":[{"role":"user","content":"`+strings.Repeat("Hi ", n)+`"}]}`)
		if got := d.Body != nil; got != want || d.Reject != nil {
			t.Errorf("%d words: got ids handed on %v, want %v", n, got, want)
		}
	}
}

func TestLoadThatKvlaneDidNotSendIsSeen(t *testing.T) {
	b := newBench(t, "", worker("a", 0), worker("b", 0))
	b.Fleet().Load("a", time.Now(), []workers.RankLoad{{Rank: -1, Running: 50, Waiting: 20, KVUsage: 0.9}})
	b.Fleet().Load("nobody", time.Now(), []workers.RankLoad{{Rank: -1, Running: 50}})
	for range 6 {
		if _, e := b.ask("/v1/completions", completion(5, "")); e.Target != "b" {
			t.Errorf("went to %s", e.Target)
		}
	}
}

func TestDebugPages(t *testing.T) {
	b := newBench(t, "", worker("a", 2))
	srv := httptest.NewServer(b.Pages().Handler())
	defer srv.Close()
	get := func(method, path string, header ...string) (int, string) {
		t.Helper()
		req, err := http.NewRequest(method, srv.URL+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		if len(header) == 2 {
			req.Header.Set(header[0], header[1])
		}
		resp, err := srv.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var text strings.Builder
		if _, err := fmt.Fprint(&text, readAll(t, resp)); err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, text.String()
	}
	if status, _ := get("POST", "/debug/record?n=1"); status != 200 {
		t.Error("record", status)
	}
	_, e := b.ask("/v1/completions", completion(100, ""), "x-session-id", "s")
	b.ask("/v1/completions", completion(100, ""))
	if status, text := get("GET", "/debug/decisions?n=1"); status != 200 || !strings.Contains(text, `"r2"`) || strings.Contains(text, `"r1"`) {
		t.Errorf("decisions: %d %s", status, text)
	}
	if status, text := get("GET", "/debug/decisions/r1", "Accept", "text/plain"); status != 200 || !strings.Contains(text, "=> "+e.Target) {
		t.Errorf("decision: %d %s", status, text)
	}
	status, text := get("GET", "/debug/decisions/r1/export")
	var d routing.Decision
	if err := json.Unmarshal([]byte(text), &d); err != nil || status != 200 {
		t.Fatal(status, err, text)
	}
	plan, _, err := d.Rerun()
	if err != nil || plan != d.Plan {
		t.Errorf("made again: %+v %v, recorded %+v", plan, err, d.Plan)
	}
	for path, want := range map[string]int{
		"/debug/decisions/r2/export": 404, "/debug/decisions/nobody": 404, "/debug/decisions?n=x": 400,
		"/debug/index": 200, "/debug/workers": 200,
	} {
		if status, text := get("GET", path); status != want {
			t.Errorf("%s: %d %s", path, status, text)
		}
	}
}

func readAll(t *testing.T, resp *http.Response) string {
	t.Helper()
	var b strings.Builder
	buf := make([]byte, 4096)
	for {
		n, err := resp.Body.Read(buf)
		b.Write(buf[:n])
		if err != nil {
			return b.String()
		}
	}
}

func TestAnExtraKeySeparatesCaches(t *testing.T) {
	b := newBench(t, "", worker("a", 0))
	b.ask("/v1/completions", completion(800, ""))
	if _, e := b.ask("/v1/completions", completion(800, `,"extra_key":"tenant"`)); e.Matched != 0 {
		t.Errorf("%d tokens of a request without it matched", e.Matched)
	}
	if _, e := b.ask("/v1/completions", completion(800, `,"extra_key":null`)); e.Matched == 0 {
		t.Error("null is no key")
	}
}

// Queries may hold API keys: the decision log does not keep them.
func TestNoQueryInTheDecisionLog(t *testing.T) {
	b := newBench(t, "", worker("a", 0))
	d, e := b.ask("/v1/completions?api_key=secret", completion(9, ""))
	defer end(&d, 200)
	if got, want := e.Path, "/v1/completions"; got != want {
		t.Errorf("path %q, want %q", got, want)
	}
}
