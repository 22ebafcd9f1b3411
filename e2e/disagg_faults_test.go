package e2e

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

// forever is longer than any leg may take: requests that wait for it are freed by a change
// of the faults, or cut.
const forever = 600_000

// legFaults are faults of a prefill worker from which Kvlane recovers with another one, and
// the outcome counted for the leg; "" if the outcome varies.
var legFaults = map[string]struct {
	fault   enginesim.Faults
	outcome string
}{
	"refuses":     {enginesim.Faults{Refuse: true}, "unreachable"},
	"answers 500": {enginesim.Faults{FailStatus: 500, FailCount: -1}, "failed"},
	"answers 503": {enginesim.Faults{FailStatus: 503, FailCount: -1}, "unreachable"},
	"dies":        {enginesim.Faults{DieAfterTokens: 1}, ""},
	// Only where decode needs the answer.
	"answers without parameters": {enginesim.Faults{NoTransferParams: true}, "no_parameters"},
}

// faultsBed has pools whose legs may take some seconds, with a head start that allows a
// worker that fails immediately to be replaced.
func faultsBed(t *testing.T, p pair) *bed {
	t.Helper()
	own := p.shape.engine
	p.shape.engine = func(i int, o *enginesim.Options) {
		o.KVLease = 3 * time.Second // for the blocks of a transfer that never happens
		if own != nil {
			own(i, o)
		}
	}
	p.shape.envoy += ", alternates: true"
	return newPools(t, p, ", timeout: 3s, head_start: 500ms")
}

// fault sets faults of some engines; of the prefill engines if none are given.
func (b *bed) fault(f enginesim.Faults, engines ...int) {
	b.t.Helper()
	if len(engines) == 0 {
		engines = []int{0, 1}
	}
	for _, i := range engines {
		if err := b.engines[i].SetFaults(f); err != nil {
			b.t.Fatal(err)
		}
	}
}

// healed clears all faults and waits until all workers are known to be healthy.
func (b *bed) healed() {
	b.t.Helper()
	b.fault(enginesim.Faults{}, 0, 1, 2, 3)
	b.until("all workers are ready", func() bool { return b.metric("kvlane_worker_ready") == float64(len(b.engines)) })
}

// legs counts the prefill legs with an outcome; with any but "ok" for "".
func (b *bed) legs(outcome string) float64 {
	if outcome == "" {
		return b.metric("kvlane_prefill_legs_total") - b.metric("kvlane_prefill_legs_total", `outcome="ok"`)
	}
	return b.metric("kvlane_prefill_legs_total", fmt.Sprintf("outcome=%q", outcome))
}

// long sends a new prompt that is split.
func (b *bed) long(stream bool) *reply {
	b.t.Helper()
	b.asked++
	return b.post("/v1/completions", bodyFor("/v1/completions", fmt.Sprint("long ", b.asked), 200, stream))
}

// holding is a request that waits for engines that do not answer.
type holding struct {
	b      *bed
	cancel context.CancelFunc
	got    chan *reply // one reply; nil if the client left
}

// holdUp sends a request, and returns when its prefill leg, and its decode leg if they run
// concurrently, have reached engines that do not answer.
func (b *bed) holdUp(p *pair) *holding {
	b.t.Helper()
	b.asked++
	ctx, cancel := context.WithCancel(b.t.Context())
	h := &holding{b: b, cancel: cancel, got: make(chan *reply, 1)}
	body := bodyFor("/v1/completions", fmt.Sprint("held ", b.asked), 200, false)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+b.ingress+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		b.t.Fatal(err)
	}
	go func() {
		defer cancel()
		r, err := b.do(req)
		if err != nil {
			r = nil
		}
		h.got <- r
	}()
	b.until("the prefill leg is there", func() bool { return b.open(0, 1) > 0 })
	if p.atOnce {
		b.until("the decode leg is there", func() bool { return b.open(2, 3) > 0 })
	}
	return h
}

// open counts the requests that engines have not answered.
func (b *bed) open(engines ...int) (n int) {
	for _, i := range engines {
		for _, r := range b.engines[i].Stats().Requests {
			if !r.Done {
				n++
			}
		}
	}
	return n
}

// over waits until no engine works on a request and nothing is booked.
func (b *bed) over() {
	b.t.Helper()
	b.until("no engine works", func() bool { return b.open(0, 1, 2, 3) == 0 })
	b.until("nothing is reserved", func() bool { return b.metric("kvlane_reservations") == 0 })
}

// noDecode checks that no decode engine has received the request.
func (b *bed) noDecode(r *reply) {
	b.t.Helper()
	if s := b.legsOf(r.header.Get("X-Request-Id")); s.decode != nil {
		b.t.Errorf("a decode engine saw %+v", s.decode)
	}
}

// Every protocol, with all failures around a prefill leg. The outcome differs: where the
// legs run one after the other Kvlane recovers from any failure, where they run
// concurrently only from those in the head start, and SGLang's decode engines never compute
// a prompt.
func TestFaultsOfEveryConnector(t *testing.T) {
	for _, p := range pairs() {
		t.Run(p.connector, func(t *testing.T) {
			t.Parallel()
			b := faultsBed(t, p)
			for name, c := range legFaults {
				b.run(name, func() { b.another(&p, c.fault, c.outcome) })
			}
			b.run("all answer 500", func() { b.nobody(&p) })
			b.run("says nothing", func() { b.silent(&p) })
			if p.atOnce {
				b.run("dies beside the decode leg", func() { b.late(&p) })
			}
			b.run("the client is to blame", func() { b.blame(&p) })
			b.run("the client leaves", func() { b.leave(&p) })
			if !p.atOnce {
				b.run("decode dies during the prefill leg", func() { b.deadDecode(&p) })
			}
			if p.connector != "p2p-nccl" { // its leg is bound to one engine
				b.run("decode refuses", func() { b.refusedDecode(&p) })
			}
		})
	}
}

// run is a part of a test that shares its bed with others; it restores the bed afterwards.
func (b *bed) run(name string, f func()) {
	b.t.Helper()
	was := b.t
	was.Run(name, func(t *testing.T) {
		b.t = t
		defer func() { b.t = was }()
		f()
		b.healed()
		b.over()
	})
}

// another: the request is prefilled by the other engine, and the failed leg is counted.
// Health checks may be faster than the request: no leg fails then, and the request is
// tried again.
func (b *bed) another(p *pair, fault enginesim.Faults, outcome string) {
	b.t.Helper()
	needed := !fault.NoTransferParams || p.params
	for range 20 {
		before := b.legs(outcome)
		b.fault(fault, 0)
		r := b.long(false)
		if on := r.header.Get("X-Kvlane-Prefill"); r.status != http.StatusOK || needed && !strings.HasPrefix(on, "e1/") {
			b.t.Fatalf("status %d, prefilled on %q: %s", r.status, on, r.body)
		}
		b.splitWell(r, p)
		b.healed()
		if b.legs(outcome) > before {
			return
		}
		if !needed && strings.HasPrefix(r.header.Get("X-Kvlane-Prefill"), "e0/") {
			return // its answer is not read
		}
	}
	b.t.Errorf("no leg was counted as %q", outcome)
}

// nobody: no prefill engine works, so decode computes the prompt or the request fails.
func (b *bed) nobody(p *pair) {
	b.t.Helper()
	before, degraded := b.legs("failed"), b.metric("kvlane_degraded_total", `reason="prefill_failed"`)
	b.fault(enginesim.Faults{FailStatus: 500, FailCount: -1})
	r := b.long(false)
	if n := b.legs("failed") - before; n != 2 {
		b.t.Errorf("%v legs were counted", n)
	}
	if p.always {
		b.unavailable(r)
		b.noDecode(r)
		return
	}
	s := b.legsOf(r.header.Get("X-Request-Id"))
	if r.status != http.StatusOK || r.header.Get("X-Kvlane-Prefill") != "" || s.decode == nil || s.decode.RemoteTokens != 0 {
		b.t.Errorf("status %d, prefilled on %q, decode leg %+v: %s", r.status, r.header.Get("X-Kvlane-Prefill"), s.decode, r.body)
	}
	if n := b.metric("kvlane_degraded_total", `reason="prefill_failed"`) - degraded; n != 1 {
		b.t.Errorf("%v times degraded", n)
	}
}

// unavailable checks the answer when no engine can compute a prompt.
func (b *bed) unavailable(r *reply) {
	b.t.Helper()
	if r.status != http.StatusServiceUnavailable || !strings.Contains(r.answer.Error.Message, "no worker could compute the prompt") {
		b.t.Errorf("status %d: %s", r.status, r.body)
	}
}

// silent: a leg without an answer ends after disagg.timeout.
func (b *bed) silent(p *pair) {
	b.t.Helper()
	if !p.atOnce {
		b.another(p, enginesim.Faults{AnswerDelayMS: forever}, "timeout")
		return
	}
	before := b.legs("timeout")
	b.fault(enginesim.Faults{AnswerDelayMS: forever})
	b.unavailable(b.long(true))
	if n := b.legs("timeout") - before; n != 1 {
		b.t.Errorf("%v legs were counted", n)
	}
	b.over()
}

// late: the prefill engine dies while decode waits for its blocks; the request ends, and
// decode stops waiting.
func (b *bed) late(p *pair) {
	b.t.Helper()
	b.fault(enginesim.Faults{AnswerDelayMS: forever})
	h := b.holdUp(p)
	b.fault(enginesim.Faults{DieAfterTokens: 1})
	r := <-h.got
	if r == nil {
		b.t.Fatal("no answer")
	}
	b.unavailable(r)
	b.over()
}

// blame: an error caused by the client is returned to the client, and decode gets no
// request.
func (b *bed) blame(p *pair) {
	b.t.Helper()
	none := bytes.Replace(bodyFor("/v1/completions", "no token", 200, false), []byte(`"max_tokens":8`), []byte(`"max_tokens":0`), 1)
	r := b.post("/v1/completions", bytes.Replace(none, []byte(`"min_tokens":3,`), nil, 1))
	if s := b.legsOf(r.header.Get("X-Request-Id")); r.status != http.StatusBadRequest || p.engine == "" && s.prefill != nil {
		b.t.Errorf("no token: status %d, prefill leg %+v: %s", r.status, s.prefill, r.body)
	}
	before := b.legs("refused")
	b.fault(enginesim.Faults{FailStatus: 400, FailCount: -1})
	r = b.long(false)
	if r.status != http.StatusBadRequest || !bytes.Contains(r.body, []byte("injected failure")) {
		b.t.Errorf("status %d: %s", r.status, r.body)
	}
	b.noDecode(r)
	b.fault(enginesim.Faults{FailStatus: 429, FailCount: -1})
	if r = b.long(true); r.status != http.StatusTooManyRequests || r.answer.Error.Type != "prefiller_error" {
		b.t.Errorf("status %d: %s", r.status, r.body)
	}
	b.noDecode(r)
	if n := b.legs("refused") - before; n != 2 {
		b.t.Errorf("%v legs were counted", n)
	}
}

// leave: the client disconnects, and all its legs end.
func (b *bed) leave(p *pair) {
	b.t.Helper()
	before := b.legs("cancelled")
	b.fault(enginesim.Faults{AnswerDelayMS: forever})
	h := b.holdUp(p)
	h.cancel()
	if r := <-h.got; r != nil {
		b.t.Errorf("status %d: %s", r.status, r.body)
	}
	b.over()
	b.until("the leg is counted", func() bool { return b.legs("cancelled") == before+1 })
}

// deadDecode: the decode target goes away while the prefill leg runs, and another one
// replaces it.
func (b *bed) deadDecode(p *pair) {
	b.t.Helper()
	for range 5 {
		b.fault(enginesim.Faults{AnswerDelayMS: forever})
		h := b.holdUp(p)
		dead := 2
		if b.metric("kvlane_active_requests", `worker="e3"`) > 0 {
			dead = 3
		}
		timeouts := b.legs("timeout")
		b.fault(enginesim.Faults{Refuse: true}, dead)
		b.until("it is known to be dead", func() bool { return b.metric("kvlane_worker_ready", fmt.Sprintf(`worker="e%d"`, dead)) == 0 })
		b.fault(enginesim.Faults{})
		r := <-h.got
		if r == nil || r.status != http.StatusOK {
			b.t.Fatalf("%+v", r)
		}
		s := b.legsOf(r.header.Get("X-Request-Id"))
		if strings.HasPrefix(r.target, fmt.Sprintf("e%d/", dead)) || s.decode == nil || s.decodeOn != r.target {
			b.t.Errorf("e%d is dead; decided for %s, decoded on %s", dead, r.target, s.decodeOn)
		}
		b.healed()
		if b.legs("timeout") > timeouts {
			continue // a slow machine: the leg was given up before the checks noticed
		}
		if s.decode.RemoteTokens < 100 || s.prefill == nil || r.header.Get("X-Kvlane-Prefill") == "" && !p.params && p.connector != "sharedstorage" {
			b.t.Errorf("prefill leg %+v\ndecode leg %+v", s.prefill, s.decode)
		}
		return
	}
	b.t.Error("each leg was given up first")
}

// TestDeadDecodePool: while no decode engine can be reached, a prefill engine answers requests whole with
// routing.disagg.fallback; without it Kvlane answers 503.
func TestDeadDecodePool(t *testing.T) {
	for rules, want := range map[string]int{"fallback: true, mode: threshold, threshold: 64": http.StatusOK, "mode: threshold, threshold: 64": http.StatusServiceUnavailable} {
		t.Run(fmt.Sprint(want), func(t *testing.T) {
			both := func(_ int, o *enginesim.Options) { o.Role = enginesim.Both } // as kv_both: a prefill engine can decode
			b := newPools(t, pair{connector: "nixl", params: true, worker: func(*enginesim.Engine) string { return "" }, rules: rules, shape: shape{engine: both}}, "")
			if r := b.long(false); r.status != http.StatusOK || !strings.HasPrefix(r.target, "e2/") && !strings.HasPrefix(r.target, "e3/") {
				t.Fatalf("got status %d from %s, want an answer of a decode engine", r.status, r.target)
			}
			b.fault(enginesim.Faults{Refuse: true}, 2, 3)
			b.until("both are known to be dead", func() bool { return b.metric("kvlane_worker_ready") == 2 })
			r := b.long(false)
			whole := (strings.HasPrefix(r.target, "e0/") || strings.HasPrefix(r.target, "e1/")) && r.header.Get("X-Kvlane-Prefill") == "" && len(r.answer.Choices) == 1
			if r.status != want || whole != (want == http.StatusOK) || !whole && !strings.Contains(r.answer.Error.Message, "no worker") {
				t.Errorf("got status %d from %q, prefilled on %q: %s, want %d", r.status, r.target, r.header.Get("X-Kvlane-Prefill"), r.body, want)
			}
			b.healed()
		})
	}
}

// refusedDecode: the decode engine refuses its leg. Envoy uses the other decode engine,
// never a prefill engine. With LMCache the blocks are at the first engine, so the other
// computes the prompt.
func (b *bed) refusedDecode(p *pair) {
	b.t.Helper()
	picks := func() float64 { return b.metric("kvlane_picks_total", `worker="e2"`) }
	for range 20 {
		before := picks()
		b.fault(enginesim.Faults{Refuse: true}, 2)
		r := b.long(false)
		s := b.legsOf(r.header.Get("X-Request-Id"))
		if r.status == http.StatusServiceUnavailable && s.decode == nil && picks() > before {
			// Envoy sent it on an idle connection to the engine before it saw that the engine had closed it. What an
			// engine may have received is not repeated elsewhere.
			b.healed()
			continue
		}
		if r.status != http.StatusOK || !strings.HasPrefix(s.decodeOn, "e3/") || s.decode.RemoteTokens < 100 && p.connector != "lmcache" {
			b.t.Fatalf("status %d, decode leg on %q: %+v: %s", r.status, s.decodeOn, s.decode, r.body)
		}
		b.healed()
		if picks() > before {
			return
		}
	}
	b.t.Error("no request was decided for the engine that refuses")
}

// With llm-d's sidecar, failed legs are the sidecar's responsibility. Kvlane must stop
// naming a dead prefill worker soon, and leave nothing booked.
func TestFaultsBehindTheSidecar(t *testing.T) {
	p, _ := besideDecode(t)
	b := faultsBed(t, p)
	split := func() {
		r := b.long(false)
		if s := b.legsOf(r.header.Get("X-Request-Id")); r.status != http.StatusOK || s.prefill == nil || s.decode == nil || s.decode.RemoteTokens < 100 {
			b.t.Errorf("status %d, legs %+v: %s", r.status, s, r.body)
		}
	}
	b.run("refuses", func() {
		b.fault(enginesim.Faults{Refuse: true}, 0)
		if r := b.long(false); r.status != http.StatusOK && r.status != http.StatusBadGateway {
			b.t.Errorf("status %d: %s", r.status, r.body)
		}
		b.until("it is known to be dead", func() bool { return b.metric("kvlane_worker_ready", `worker="e0"`) == 0 })
		for range 4 {
			split()
		}
	})
	b.run("all refuse", func() {
		b.fault(enginesim.Faults{Refuse: true})
		b.until("they are known to be dead", func() bool { return b.metric("kvlane_worker_ready") == 2 })
		r := b.long(false)
		if s := b.legsOf(r.header.Get("X-Request-Id")); r.status != http.StatusOK || s.prefill != nil {
			b.t.Errorf("status %d, prefill leg %+v: %s", r.status, s.prefill, r.body)
		}
	})
	b.run("answers without parameters", func() {
		b.fault(enginesim.Faults{NoTransferParams: true})
		r := b.long(false)
		if s := b.legsOf(r.header.Get("X-Request-Id")); r.status != http.StatusOK || s.decode == nil || s.decode.RemoteTokens != 0 {
			b.t.Errorf("status %d, decode leg %+v: %s", r.status, s.decode, r.body)
		}
	})
	b.run("the client is to blame", func() {
		b.fault(enginesim.Faults{FailStatus: 400, FailCount: -1})
		r := b.long(true)
		if r.status != http.StatusBadRequest || !bytes.Contains(r.body, []byte("injected failure")) {
			b.t.Errorf("status %d: %s", r.status, r.body)
		}
		b.noDecode(r)
	})
	b.run("dies", func() {
		b.fault(enginesim.Faults{DieAfterTokens: 1})
		if r := b.long(false); r.status != http.StatusBadGateway {
			b.t.Errorf("status %d: %s", r.status, r.body)
		}
	})
	b.run("the client leaves", func() {
		b.fault(enginesim.Faults{AnswerDelayMS: forever})
		h := b.holdUp(&p)
		h.cancel()
		if r := <-h.got; r != nil {
			b.t.Errorf("status %d: %s", r.status, r.body)
		}
		b.over()
	})
	b.run("decode refuses", func() {
		b.fault(enginesim.Faults{Refuse: true}, 2)
		if r := b.long(false); r.status != http.StatusOK && r.status != http.StatusBadGateway {
			b.t.Errorf("status %d: %s", r.status, r.body)
		}
	})
	split()
}

// Some legs are bound to one decode engine: another one would wait for blocks that were
// sent elsewhere. With fail_closed Envoy sends such a leg to no other engine.
func TestALegThatIsForOneDecodeEngineAlone(t *testing.T) {
	for _, p := range pairs() {
		if p.connector != "p2p-nccl" && p.connector != "moriio-write" {
			continue
		}
		t.Run(p.connector, func(t *testing.T) {
			t.Parallel()
			p.shape.envoy = ", fail_closed: true"
			b := faultsBed(t, p)
			refused := false
			for range 20 {
				b.fault(enginesim.Faults{Refuse: true}, 2)
				r := b.long(false)
				b.healed()
				s := b.legsOf(r.header.Get("X-Request-Id"))
				switch {
				case r.status == http.StatusOK && strings.HasPrefix(s.decodeOn, "e3/") && s.decode.RemoteTokens >= 100:
					continue // it was bound to the other from the beginning
				case r.status == http.StatusServiceUnavailable && s.decode == nil && r.answer.Error.Message != "":
					refused = true
				default:
					t.Fatalf("status %d, decode leg on %q: %+v: %s", r.status, s.decodeOn, s.decode, r.body)
				}
				break
			}
			if !refused {
				t.Error("no leg was for the engine that refuses")
			}
			b.over()
		})
	}
}
