package decide

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/fleet"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/routing"
)

// pools is a Decider with two prefill workers, whose answers the test sets, and a decode
// worker. Every request is split.
type pools struct {
	*Decider
	t       *testing.T
	list    []workers.Worker
	answers [2]atomic.Pointer[http.HandlerFunc]
	legs    [2]atomic.Int64
	// leg is called for each prefill leg if set before the first; it must be safe for
	// concurrent use.
	leg func(r *http.Request, body []byte)
}

func answer(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, text) }
}

const nixlAnswer = `{"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"e"}}`

func newPoolsOf(t *testing.T, connector string) *pools {
	t.Helper()
	return newPoolsWith(t, connector, "")
}

// newPoolsWith adds further sections of the configuration.
func newPoolsWith(t *testing.T, connector, sections string) *pools {
	t.Helper()
	return newPoolsServing(t, connector, sections, nil)
}

// newPoolsServing also sets the models.
func newPoolsServing(t *testing.T, connector, sections string, models []*fleet.Model) *pools {
	t.Helper()
	if err := leaks(); err != nil {
		t.Error(err)
	}
	rules := "routing: {disagg: {mode: threshold, threshold: 0}}\n"
	if strings.Contains(sections, "routing:") {
		rules = ""
	}
	c, err := config.Parse("kvlane.yaml", []byte(sections+rules+"disagg: {connector: "+connector+", timeout: 30s, attempts: 2, head_start: 1s}\n"))
	if err != nil {
		t.Fatal(err)
	}
	c.Workers.Health.Every = 0 // workers get legs only
	d, err := New(Options{Config: c, Models: models, Metrics: observe.New("test"), Log: zerolog.Nop()})
	if err != nil {
		t.Fatal(err)
	}
	p := &pools{Decider: d, t: t}
	list := []workers.Worker{{Worker: config.Worker{Name: "d", Address: "10.0.0.9:1", Engine: "vllm", Role: "decode", Speed: 1}, Ready: true, Generation: 9}}
	var servers []*httptest.Server
	for i := range p.answers {
		p.answer(i, answer(nixlAnswer))
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			if p.leg != nil {
				p.leg(r, body)
			}
			p.legs[i].Add(1)
			(*p.answers[i].Load())(w, r)
		}))
		servers = append(servers, srv)
		list = append(list, workers.Worker{Worker: config.Worker{Name: fmt.Sprint("p", i), Address: srv.Listener.Addr().String(), Engine: "vllm", Role: "prefill", Speed: 1},
			Ready: true, Generation: uint64(i + 1)})
	}
	d.Fleet().SetWorkers(list)
	p.list = list
	t.Cleanup(func() {
		d.Close()
		for _, s := range servers {
			s.Close()
		}
		if n := d.router.Live(); n != 0 {
			t.Errorf("%d reservations are left", n)
		}
		if err := leaks(); err != nil {
			t.Error(err)
		}
	})
	return p
}

func (p *pools) answer(i int, h http.HandlerFunc) { p.answers[i].Store(&h) }

func (p *pools) both(h http.HandlerFunc) {
	p.answer(0, h)
	p.answer(1, h)
}

func (p *pools) ask(ctx context.Context, id string) extproc.Decision {
	return p.Decide(ctx, &extproc.Request{ID: id, Method: "POST", Path: "/v1/completions", Body: []byte(`{"prompt":"` + strings.Repeat("word ", 400) + `"}`)})
}

// degraded is how many decisions were counted for a reason.
func (p *pools) degraded(reason string) float64 {
	p.t.Helper()
	families, err := p.metrics.Registry.Gather()
	if err != nil {
		p.t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == "kvlane_degraded_total" && m.GetLabel()[0].GetValue() == reason {
				return m.GetCounter().GetValue()
			}
		}
	}
	return 0
}

// end completes a request's lifecycle.
func end(d *extproc.Decision, status int) {
	if d.Ticket == nil {
		return
	}
	if status != 0 {
		d.Ticket.ResponseHeaders(status, "")
	}
	d.Ticket.End(time.Now())
}

func status(code int) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(code)
		_, _ = io.WriteString(w, `{"error":{"message":"theirs"}}`)
	}
}

// hang answers only when the leg is cancelled.
func hang(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }

func TestASplitRequest(t *testing.T) {
	p := newPoolsOf(t, "nixl")
	d := p.ask(t.Context(), "a")
	defer end(&d, 0)
	if d.Endpoint != "10.0.0.9:1" || !strings.Contains(string(d.Body), `"remote_engine_id":"e"`) || p.legs[0].Load()+p.legs[1].Load() != 1 {
		t.Errorf("%+v", d)
	}
	if e := p.decisions.Find("a"); !strings.HasPrefix(e.Prefill, "p") || e.Target != "d" {
		t.Errorf("prefill on %q, decode on %q", e.Prefill, e.Target)
	}
	// The prompt counts where it is computed.
	d.Ticket.ResponseHeaders(200, d.Endpoint)
	for _, w := range []string{"p0", "p1", "d"} {
		got := testutil.ToFloat64(p.metrics.PromptTokens.WithLabelValues(w, ""))
		if want := w == p.decisions.Find("a").Prefill; (got > 0) != want {
			t.Errorf("got %v prompt tokens of %s, want some: %v", got, w, want)
		}
	}
}

// health is the failures in a row of the prefill workers, and how many of them have answered.
func (p *pools) health() (failures, answered int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	probe, err := p.router.PickRecorded(p.since(p.now()), &routing.Query{ID: "probe", PromptTokens: 1}, nil, nil)
	if err != nil {
		p.t.Fatal(err)
	}
	p.router.Release(p.since(p.now()), probe.Plan.Reservation)
	for _, target := range probe.State.Targets {
		if target.Info.Role == routing.Prefill {
			failures += int(target.Health.Failures)
			if target.Health.Heard > 0 {
				answered++
			}
		}
	}
	return failures, answered
}

// A prefill worker whose answer is final has answered: nothing failed, and no request waits for it.
func TestAFinalPrefillAnswer(t *testing.T) {
	p := newPoolsOf(t, "trtllm")
	p.both(answer(`{"choices":[{"index":0,"text":"x","finish_reason":"stop"}]}`))
	d := p.ask(t.Context(), "a")
	if d.Reject == nil || d.Reject.Status != http.StatusOK {
		t.Fatalf("got %+v, want the prefill worker's answer", d.Reject)
	}
	if failures, answered := p.health(); failures != 0 || answered != 1 {
		t.Errorf("got %d failures and %d workers that answered, want 0 and 1", failures, answered)
	}
}

// If one prefill worker fails the next is tried, if two fail decode computes the prompt; an
// error that is the client's fault is returned to the client.
func TestFailuresOfPrefill(t *testing.T) {
	for name, c := range map[string]struct {
		h      http.HandlerFunc
		reject int
	}{
		"500":           {status(500), 0},
		"503":           {status(503), 0},
		"400":           {status(400), 400},
		"429":           {status(429), 429},
		"no parameters": {answer(`{}`), 0},
		"no JSON":       {answer(`<html>`), 0},
		"cut":           {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPoolsOf(t, "nixl")
			p.both(c.h)
			d := p.ask(t.Context(), "a")
			defer end(&d, 200)
			legs := p.legs[0].Load() + p.legs[1].Load()
			if c.reject != 0 {
				if d.Reject == nil || d.Reject.Status != c.reject || legs != 1 {
					t.Errorf("%+v after %d legs", d.Reject, legs)
				}
				if failures, answered := p.health(); failures != 0 || answered != 1 {
					t.Errorf("got %d failures and %d workers that answered, want 0 and 1", failures, answered)
				}
				return
			}
			e := p.decisions.Find("a")
			if d.Reject != nil || d.Body != nil || legs != 2 || e.Degraded != degradedPrefill || e.Prefill != "" || len(e.PrefillNotes) != 3 {
				t.Errorf("%d legs, %+v, notes %q", legs, d.Reject, e.PrefillNotes)
			}
			if failures, answered := p.health(); failures != 2 || answered != 0 { // of the last attempt too
				t.Errorf("got %d failures and %d workers that answered, want 2 and 0", failures, answered)
			}
		})
	}
}

// If no prefill worker is ready decode computes the prompt, unless its engine cannot.
func TestNoPrefillWorker(t *testing.T) {
	for connector, rejected := range map[string]bool{"nixl": false, "sglang": true} {
		t.Run(connector, func(t *testing.T) {
			p := newPoolsOf(t, connector)
			p.Fleet().SetWorkers([]workers.Worker{
				{Worker: config.Worker{Name: "d", Address: "10.0.0.9:1", Engine: "vllm", Role: "decode", Speed: 1}, Ready: true, Generation: 9},
				{Worker: config.Worker{Name: "p0", Address: "10.0.0.8:1", Engine: "vllm", Role: "prefill", Speed: 1}, Generation: 1},
			})
			d := p.ask(t.Context(), "r")
			if rejected != (d.Reject != nil && d.Reject.Status == http.StatusServiceUnavailable) || rejected != (d.Endpoint == "") {
				t.Errorf("%+v", d)
			}
			if n := p.degraded(degradedNoPrefill); rejected != (n == 0) {
				t.Errorf("counted %v times", n)
			}
			end(&d, 200)
		})
	}
}

func TestAClientThatLeavesCancelsItsPrefillLeg(t *testing.T) {
	for _, connector := range []string{"nixl", "sglang"} {
		t.Run(connector, func(t *testing.T) {
			p := newPoolsOf(t, connector)
			ctx, cancel := context.WithCancel(t.Context())
			p.both(func(w http.ResponseWriter, r *http.Request) {
				cancel()
				hang(w, r)
			})
			d := p.ask(ctx, "a")
			end(&d, 0)
			if n := p.legs[0].Load() + p.legs[1].Load(); n != 1 {
				t.Errorf("%d legs", n)
			}
		})
	}
}

// Concurrent legs: the prefill leg continues while decode runs, and is cancelled if decode
// fails.
func TestAConcurrentPrefill(t *testing.T) {
	p := newPoolsOf(t, "sglang")
	p.Decider.legs.HeadStart = 0
	p.both(hang)
	d := p.ask(t.Context(), "a")
	if !strings.Contains(string(d.Body), `"bootstrap_room":`) {
		t.Errorf("%s", d.Body)
	}
	end(&d, 503) // the cleanup waits for the leg to be cancelled
	// SGLang's decode engines compute nothing by themselves.
	p.Decider.legs.HeadStart = time.Minute
	p.both(status(500))
	if d = p.ask(t.Context(), "b"); d.Reject == nil || d.Reject.Status != 503 {
		t.Errorf("%+v", d)
	}
}

// A leg that fails while decode waits for its blocks ends the request: the blocks would
// never arrive.
func TestAConcurrentPrefillThatFails(t *testing.T) {
	for name, c := range map[string]struct {
		answer http.HandlerFunc
		status int
	}{
		"their fault": {status(500), 503},
		"died":        {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, 503},
		"our fault":   {status(422), 422},
		"out of room": {status(429), 429},
		"went well":   {answer(`{}`), 0},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPoolsOf(t, "sglang")
			p.Decider.legs.HeadStart = time.Millisecond
			decided := make(chan struct{})
			ended := make(chan struct{})
			p.both(func(w http.ResponseWriter, r *http.Request) {
				defer close(ended)
				<-decided
				c.answer(w, r)
			})
			d := p.ask(t.Context(), "r")
			close(decided)
			if c.status == 0 {
				<-ended
				end(&d, 200)
				p.Close()
				select {
				case r := <-d.Abort:
					t.Errorf("%+v", r)
				default:
				}
				return
			}
			if r := <-d.Abort; r.Status != c.status || len(r.Body) == 0 {
				t.Errorf("%+v", r)
			}
			end(&d, 0)
		})
	}
}

// If a decode worker refuses connections Envoy uses another one, where the leg can serve it
// and Envoy accepts a list.
func TestAnotherDecodeWorker(t *testing.T) {
	const list = "envoy: {alternates: true}\n"
	for _, c := range []struct {
		connector, sections string
		any                 bool
	}{
		{"nixl", list, true}, {"sglang", list, true}, {"moriio-write", list, false}, {"moriio", list, false},
		{"nixl", "", false}, {"sglang", "", false},
	} {
		t.Run(c.connector+" "+c.sections, func(t *testing.T) {
			p := newPoolsWith(t, c.connector, c.sections)
			p.Fleet().SetWorkers(append(p.list, p.second()))
			d := p.ask(t.Context(), "r")
			if d.Reject != nil || strings.Contains(d.Endpoint, ",") != c.any {
				t.Errorf("%+v", d)
			}
			end(&d, 200)
		})
	}
}

// A request that SGLang's decode engines cannot serve is refused immediately, unless a
// worker does both phases.
func TestAnswersThatCannotBeDisaggregated(t *testing.T) {
	p := newPoolsOf(t, "sglang")
	ask := func() extproc.Decision {
		return p.Decide(t.Context(), &extproc.Request{ID: "r", Method: "POST", Path: "/v1/completions", Body: []byte(`{"prompt":"two answers","n":2}`)})
	}
	if d := ask(); d.Reject == nil || d.Reject.Status != http.StatusBadRequest || !strings.Contains(string(d.Reject.Body), "more than one answer to a prompt") {
		t.Errorf("%+v", d)
	}
	list := []workers.Worker{{Worker: config.Worker{Name: "d", Address: "10.0.0.9:1", Engine: "sglang", Role: "both", Speed: 1}, Ready: true, Generation: 9},
		{Worker: config.Worker{Name: "p0", Address: "10.0.0.8:1", Engine: "sglang", Role: "prefill", Speed: 1}, Ready: true, Generation: 1}}
	p.Fleet().SetWorkers(list)
	d := ask()
	if d.Reject != nil || d.Endpoint != "10.0.0.9:1" || p.legs[0].Load()+p.legs[1].Load() != 0 {
		t.Errorf("%+v", d)
	}
	end(&d, 200)
}

// A request that a leg's edits would make valid is not split: the prefill engine would keep its blocks for a decode leg
// that is refused.
func TestALegDoesNotMakeARequestValid(t *testing.T) {
	served := servedQwen(t)
	defer served.Tokens.SetMaxModelLen(0) // it is shared
	for connector, theirs := range map[string]string{"nixl": nixlAnswer, "moriio": nixlAnswer, "sharedstorage": "{}",
		prefillFirst["lmcache"].connector: prefillFirst["lmcache"].answer} {
		t.Run(connector, func(t *testing.T) {
			p := newPoolsServing(t, connector, "", []*fleet.Model{served})
			served.Tokens.SetMaxModelLen(1000)
			p.both(answer(theirs))
			for fields, split := range map[string]bool{
				`"max_tokens":4,"min_tokens":4`: true, `"stream":true,"stream_options":{"include_usage":true}`: true, `"max_tokens":900`: true,
				`"max_tokens":4,"min_tokens":100`: false, `"max_tokens":"x"`: false, `"stream":"maybe"`: false, `"stream":true,"stream_options":5`: false,
				`"max_tokens":1,"max_tokens":2`: false,
				`"max_tokens":1001`:             false, `"max_tokens":900,"min_tokens":900`: false, // more than fit the context
			} {
				before := p.legs[0].Load() + p.legs[1].Load()
				d := p.Decide(t.Context(), &extproc.Request{ID: fields, Method: "POST", Path: "/v1/completions",
					Body: []byte(`{"model":"demo","prompt":"` + fields[1:4] + strings.Repeat(" word", 400) + `",` + fields + `}`)})
				if legs := p.legs[0].Load() + p.legs[1].Load() - before; d.Reject != nil || d.Endpoint != "10.0.0.9:1" || (legs == 1) != split || legs > 1 {
					t.Errorf("%s: %s: got %d legs, want split %v; %+v", connector, fields, legs, split, d)
				}
				end(&d, 0)
			}
		})
	}
}

// Where the prompt's length is not known, or the decode leg might exceed limits.max_body, decode may refuse it.
func TestALegIsNotSentWhereItsLengthIsUnknown(t *testing.T) {
	ask := func(p *pools, path, rest string, split bool) {
		t.Helper()
		before := p.legs[0].Load() + p.legs[1].Load()
		d := p.Decide(t.Context(), &extproc.Request{ID: "r", Method: "POST", Path: path, Body: []byte(`{"model":"demo",` + rest + `}`)})
		if legs := p.legs[0].Load() + p.legs[1].Load() - before; d.Reject != nil || d.Endpoint != "10.0.0.9:1" || legs == 1 != split {
			t.Errorf("%.200s: got %d legs, want split %v; %+v", rest, legs, split, d)
		}
		if e := p.decisions.Last(1)[0]; split != (len(e.PrefillNotes) == 0) || !split && (!strings.HasPrefix(e.PrefillNotes[0], "not split: ") || !strings.Contains(e.Text(), e.PrefillNotes[0])) {
			t.Errorf("%.200s: got the notes %q, want why it was not split, if it was not", rest, e.PrefillNotes)
		}
		end(&d, 0)
	}
	prompt := func(words int) string { return `"prompt":"` + strings.Repeat(" word", words) + `"` }
	t.Run("no tokenizer", func(t *testing.T) {
		p := newPoolsServing(t, "nixl", "limits: {max_body: 64KiB}\n", nil)
		p.both(answer(nixlAnswer))
		ask(p, "/v1/completions", prompt(400), true)
		ask(p, "/v1/completions", prompt(400)+`,"min_tokens":1`, true)
		ask(p, "/v1/completions", prompt(400)+`,"min_tokens":2,"max_tokens":4`, false)
		ask(p, "/v1/completions", prompt(8000), true)   // 40 kB
		ask(p, "/v1/completions", prompt(12300), false) // 61.5 kB, and about 1 byte for each token
	})
	t.Run("no time", func(t *testing.T) {
		served := servedQwen(t)
		defer served.Tokens.SetMaxModelLen(0) // it is shared
		p := newPoolsServing(t, "nixl", soon, []*fleet.Model{served})
		served.Tokens.SetMaxModelLen(1000)
		p.both(answer(nixlAnswer))
		for range cap(p.cpu.all) {
			p.cpu.all <- struct{}{}
			defer func() { <-p.cpu.all }()
		}
		ask(p, "/v1/completions", prompt(400)+`,"max_tokens":1000`, true)
		ask(p, "/v1/completions", prompt(400)+`,"max_tokens":1001`, false)
		if e := p.decisions.Last(1)[0]; !strings.Contains(e.Refusal, "limits.decision_timeout") {
			t.Errorf("got %+v, want a deadline that ended the tokenizer", e)
		}
	})
}

// Each prompt adds some forty bytes to both legs, so a batch of empty prompts would become many times as large as its body.
func TestBatchesForSGLangAreBounded(t *testing.T) {
	p := newPoolsOf(t, "sglang")
	ask := func(n int) extproc.Decision {
		return p.Decide(t.Context(), &extproc.Request{ID: "r", Method: "POST", Path: "/v1/completions",
			Body: []byte(`{"prompt":[` + strings.Repeat(`"",`, n-1) + `"x"]}`)})
	}
	if d := ask(4097); d.Reject == nil || d.Reject.Status != http.StatusBadRequest || !strings.Contains(string(d.Reject.Body), "more than 4096 prompts") {
		t.Errorf("4097 prompts: got %+v, want 400", d)
	}
	d := ask(4096)
	if d.Reject != nil || p.legs[0].Load()+p.legs[1].Load() == 0 {
		t.Errorf("4096 prompts: got %+v, want them split", d)
	}
	end(&d, 200)
}

// prefillFirst are connectors whose prefill leg comes first, with their engines' answers to
// it.
var prefillFirst = map[string]struct{ connector, answer string }{
	"nixl":          {"nixl", nixlAnswer},
	"moriio":        {"moriio", nixlAnswer},
	"sharedstorage": {"sharedstorage", `{}`},
	"lmcache":       {"lmcache, workers: {receiver_host: h, receiver_init_ports: [1], receiver_alloc_ports: [2]}", `{"choices":[{"text":"a"}],"kv_transfer_params":{"first_tok":7}}`},
}

// askIDs sends token ids, which lmcache requires.
func (p *pools) askIDs(ctx context.Context, id string) extproc.Decision {
	return p.Decide(ctx, &extproc.Request{ID: id, Method: "POST", Path: "/v1/completions", Body: []byte(`{"model":"demo","prompt":[` + strings.Repeat("1,", 400) + `1]}`)})
}

// second is another decode worker, at 10.0.0.10:1.
func (p *pools) second() workers.Worker {
	w := p.list[0]
	w.Name, w.Address, w.Generation = "d2", "10.0.0.10:1", 10
	return w
}

// A decode worker that leaves while the prefill leg runs is replaced. Where the prefill
// answer is bound to that worker, the leg is sent again.
func TestTheDecodeWorkerGoesAwayDuringAPrefillLeg(t *testing.T) {
	for connector, legs := range map[string]int64{"nixl": 1, "sharedstorage": 1, "moriio": 2, "lmcache": 2} {
		t.Run(connector, func(t *testing.T) {
			c := prefillFirst[connector]
			served := servedQwen(t)
			p := newPoolsServing(t, c.connector, "", []*fleet.Model{served})
			var once sync.Once
			p.both(func(w http.ResponseWriter, r *http.Request) {
				once.Do(func() { p.Fleet().SetWorkers(append(p.list[1:], p.second())) })
				answer(c.answer)(w, r)
			})
			d := p.askIDs(t.Context(), "r")
			if d.Reject != nil || d.Endpoint != "10.0.0.10:1" || (d.Body != nil) != (c.answer == nixlAnswer) {
				t.Errorf("%+v", d)
			}
			if n := p.legs[0].Load() + p.legs[1].Load(); n != legs {
				t.Errorf("%d legs, want %d", n, legs)
			}
			if n := p.router.Live(); n != 1 {
				t.Errorf("%d reservations", n)
			}
			end(&d, 200)
		})
	}
}

// A request that is planned again does not wait for capacity: a prefill worker holds its
// blocks in the meantime.
func TestARequestThatIsPlannedAnewDoesNotWait(t *testing.T) {
	p := newPoolsWith(t, "nixl", "routing: {wait: {max_requests: 8, timeout: 4m}, disagg: {mode: threshold, threshold: 0, decode: {limits: {max_active: 1}}}}\n")
	p.Fleet().SetWorkers(append(p.list, p.second()))
	running := p.ask(t.Context(), "a")
	defer end(&running, 200)
	left := p.list[0]
	if running.Endpoint != left.Address {
		left = p.second()
	}
	p.both(func(w http.ResponseWriter, r *http.Request) {
		p.Fleet().SetWorkers(append(p.list[1:], left)) // but that worker is full
		answer(nixlAnswer)(w, r)
	})
	d := p.ask(t.Context(), "b")
	if d.Reject == nil || d.Reject.Status != http.StatusTooManyRequests {
		t.Errorf("%+v", d)
	}
	if e := p.decisions.Find("b"); e.Waited != 0 {
		t.Errorf("waited %s", e.Waited)
	}
}

// All legs of a request share one deadline, early enough that Envoy still gets the answer.
func TestPrefillEndsBeforeEnvoyTimesOut(t *testing.T) {
	for _, c := range []struct{ message, want time.Duration }{{0, 0}, {time.Second, 900 * time.Millisecond}, {5 * time.Minute, 5*time.Minute - 5*time.Second}} {
		if got := legBudget(c.message); got != c.want {
			t.Errorf("%s: %s, want %s", c.message, got, c.want)
		}
	}
	for connector, rejected := range map[string]bool{"nixl": false, "moriio": false, "sglang": true} {
		t.Run(connector, func(t *testing.T) {
			p := newPoolsOf(t, connector)
			var late atomic.Int64
			p.now = func() time.Time { return time.Now().Add(time.Duration(late.Load())) }
			p.both(func(w http.ResponseWriter, r *http.Request) {
				late.Store(int64(p.Decider.legs.Budget))
				status(500)(w, r)
			})
			d := p.ask(t.Context(), "r")
			if n := p.legs[0].Load() + p.legs[1].Load(); n != 1 {
				t.Errorf("%d legs", n)
			}
			if rejected != (d.Reject != nil) || !rejected && p.decisions.Find("r").Degraded != degradedPrefill {
				t.Errorf("%+v", d)
			}
			end(&d, 200)
		})
	}
	t.Run("a leg", func(t *testing.T) {
		p := newPoolsOf(t, "nixl")
		p.Decider.legs.Timeout, p.Decider.legs.Budget = time.Hour, 50*time.Millisecond
		p.both(hang)
		d := p.ask(t.Context(), "r")
		if d.Reject != nil || p.decisions.Find("r").Degraded != degradedPrefill {
			t.Errorf("%+v", d)
		}
		end(&d, 200)
	})
	t.Run("planned anew", func(t *testing.T) {
		p := newPoolsOf(t, "moriio")
		var late atomic.Int64
		p.now = func() time.Time { return time.Now().Add(time.Duration(late.Load())) }
		p.both(func(w http.ResponseWriter, r *http.Request) {
			late.Store(int64(p.Decider.legs.Budget))
			p.Fleet().SetWorkers(append(p.list[1:], p.second()))
			answer(nixlAnswer)(w, r)
		})
		d := p.ask(t.Context(), "r")
		if n := p.legs[0].Load() + p.legs[1].Load(); n != 1 || d.Reject != nil || d.Endpoint != "10.0.0.10:1" {
			t.Errorf("%d legs, %+v", n, d)
		}
		end(&d, 200)
	})
}

// Many concurrent requests, some of which fail, leave nothing booked and do not race.
func TestManySplitRequests(t *testing.T) {
	for _, connector := range []string{"nixl", "sglang"} {
		t.Run(connector, func(t *testing.T) {
			p := newPoolsOf(t, connector)
			p.Decider.legs.HeadStart = time.Millisecond
			var n atomic.Int64
			p.answer(0, func(w http.ResponseWriter, r *http.Request) {
				switch n.Add(1) % 4 {
				case 0:
					status(500)(w, r)
				case 1:
					panic(http.ErrAbortHandler)
				default:
					answer(nixlAnswer)(w, r)
				}
			})
			var wg sync.WaitGroup
			for i := range 8 {
				wg.Go(func() {
					for k := range 20 {
						ctx, cancel := context.WithCancel(t.Context())
						if k%5 == 0 {
							time.AfterFunc(time.Millisecond, cancel)
						}
						d := p.ask(ctx, fmt.Sprint(i, "-", k))
						end(&d, []int{200, 503, 0}[k%3])
						cancel()
					}
				})
			}
			wg.Wait()
		})
	}
}

// Two models in one process, whose pools have different shapes: each has its own rule under
// all of its names; a setting that no model has is the general one.
func TestAModelsOwnRule(t *testing.T) {
	p := newPoolsWith(t, "nixl", "models: [{name: remote, aliases: [far], disagg: {threshold: 0}}, {name: local, disagg: {mode: off}}]\nrouting: {disagg: {mode: threshold, threshold: 100000}}\n")
	for name, split := range map[string]bool{"remote": true, "far": true, "local": false, "unlisted": false} {
		before := p.legs[0].Load() + p.legs[1].Load()
		d := p.Decide(t.Context(), &extproc.Request{ID: name, Method: "POST", Path: "/v1/completions",
			Body: []byte(`{"model":"` + name + `","prompt":"` + strings.Repeat("word ", 400) + `"}`)})
		if d.Reject != nil || (p.legs[0].Load()+p.legs[1].Load() > before) != split {
			t.Errorf("%s: %+v, want split %v", name, d, split)
		}
		end(&d, http.StatusOK)
	}
}

// LMCache's prefill leg carries our ids. A worker whose tokenizer differs gets none of
// them: the next prefill worker is tried, and decode computes if there is no other.
func TestIDsThatAWorkerDoesNotShare(t *testing.T) {
	s := servedQwen(t)
	p := newPoolsServing(t, prefillFirst["lmcache"].connector, "", []*fleet.Model{s})
	p.both(answer(prefillFirst["lmcache"].answer))
	for name, c := range map[string]struct {
		differ []string
		legs   int64
	}{
		"none":      {nil, 1},
		"a prefill": {[]string{"p0"}, 1},
		"both":      {[]string{"p0", "p1"}, 0},
		"decode":    {[]string{"d"}, 0},
	} {
		s.SetDiffering(c.differ...)
		for i := range 2 { // each prefill worker is tried first in one of them
			before := p.legs[0].Load() + p.legs[1].Load()
			text := fmt.Sprint(name, i) + strings.Repeat(" word", 400)
			got := p.Decide(t.Context(), &extproc.Request{ID: text[:9], Method: "POST", Path: "/v1/completions", Body: []byte(`{"model":"demo","prompt":"` + text + `"}`)})
			if got.Reject != nil || p.legs[0].Load()+p.legs[1].Load()-before != c.legs {
				t.Errorf("%s: %d legs, want %d; %+v", name, p.legs[0].Load()+p.legs[1].Load()-before, c.legs, got.Reject)
			}
			end(&got, http.StatusOK)
		}
	}
}

// With routing.disagg.fallback a prefill worker serves requests whole while no decode worker can.
func TestPrefillWorkersServeWhileNoDecodeWorkerCan(t *testing.T) {
	for name, c := range map[string]struct {
		rule         string
		ready, whole bool
		status       int
	}{
		"decode is dead":          {"fallback: true, ", false, true, 0},
		"decode is dead, default": {"", false, false, 503},
		"decode is alive":         {"fallback: true, ", true, false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPoolsWith(t, "nixl", "routing: {disagg: {"+c.rule+"mode: threshold, threshold: 0}}\n")
			p.list[0].Ready = c.ready
			p.Fleet().SetWorkers(p.list)
			d := p.ask(t.Context(), "a")
			defer end(&d, 200)
			status := 0
			if d.Reject != nil {
				status = d.Reject.Status
			}
			if status != c.status {
				t.Fatalf("got status %d, want %d", status, c.status)
			}
			e := p.decisions.Find("a")
			whole := strings.HasPrefix(e.Target, "p") && e.Prefill == "" && e.Degraded == string(routing.DegradedNoDecode) && p.legs[0].Load()+p.legs[1].Load() == 0
			if whole != c.whole {
				t.Errorf("got target %q, prefill %q, degraded %q, want served whole by a prefill worker: %v", e.Target, e.Prefill, e.Degraded, c.whole)
			}
		})
	}
}
