package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

// pair is a connector with the engines that speak it.
type pair struct {
	connector string // of Kvlane
	engine    enginesim.EngineKind
	sim       string // of the engines
	ranks     int
	// always: every request is split, because decode engines compute no prompts themselves.
	always bool
	// atOnce: the legs run concurrently.
	atOnce bool
	// params: decode needs the prefill leg's answer.
	params bool
	// worker is a worker's disagg section.
	worker func(e *enginesim.Engine) string
	paths  []string
	rules  string // of routing.disagg; "": split what has 64 uncached tokens
	shape  shape
}

func port(address string) string {
	_, p, _ := net.SplitHostPort(address)
	return p
}

var vllmPaths = []string{"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate"}

func pairs() []pair {
	none := func(*enginesim.Engine) string { return "" }
	boot := func(e *enginesim.Engine) string { return ", disagg: {bootstrap_port: " + port(e.BootstrapAddr()) + "}" }
	two := vllmPaths[:2]
	return []pair{
		{connector: "nixl", params: true, worker: none, paths: vllmPaths},
		{connector: "moriio", params: true, sim: "moriio", worker: none, paths: two},
		{connector: "moriio-write", atOnce: true, sim: "moriio-write", paths: two, worker: func(e *enginesim.Engine) string {
			return fmt.Sprintf(", disagg: {handshake_port: %[1]s, notify_port: %[1]s}", port(e.SideAddr()))
		}},
		{connector: "sharedstorage", sim: "sharedstorage", worker: none, paths: two},
		{connector: "mooncake", atOnce: true, sim: "mooncake", worker: boot, paths: two},
		{connector: "nixl-push", atOnce: true, sim: "nixl-push", paths: two, worker: func(e *enginesim.Engine) string {
			return fmt.Sprintf(", disagg: {engine_id: %s, side_channel_port: %s}", e.EngineID(), port(e.SideAddr()))
		}},
		{connector: "p2p-nccl", sim: "p2p-nccl", paths: two, worker: func(e *enginesim.Engine) string {
			return fmt.Sprintf(", disagg: {zmq: %q}", e.SideAddr())
		}},
		{connector: "lmcache", params: true, sim: "lmcache", paths: two, worker: func(e *enginesim.Engine) string {
			return fmt.Sprintf(", disagg: {receiver_host: 127.0.0.1, receiver_init_ports: [%[1]s], receiver_alloc_ports: [%[1]s]}", port(e.SideAddr()))
		}},
		{connector: "sglang", atOnce: true, engine: enginesim.SGLang, worker: boot, always: true, paths: []string{"/v1/chat/completions", "/v1/completions", "/generate", "/v1/responses"}},
		{connector: "trtllm", params: true, engine: enginesim.TRTLLM, worker: none, paths: two},
		{connector: "trtllm-generation-first", atOnce: true, engine: enginesim.TRTLLM, worker: none, paths: two},
	}
}

// newPools is a bed with two prefill engines, e0 and e1, and two decode engines, e2
// and e3. Prompts of 64 uncached tokens and more are split.
func newPools(t *testing.T, p pair, disagg string) *bed {
	t.Helper()
	s := p.shape
	s.engines = 4
	if s.ranks = p.ranks; s.ranks == 0 {
		s.ranks = 2
	}
	shared := &enginesim.SharedStore{}
	s.engine = func(i int, o *enginesim.Options) {
		o.Engine, o.Connector, o.Role, o.Shared = p.engine, p.sim, enginesim.Decode, shared
		if i < 2 {
			o.Role = enginesim.Prefill
		}
		if p.engine == enginesim.TRTLLM {
			o.EventsEndpoint = ""
		}
		if p.sim == "nixl-push" { // a side channel per rank
			ports, err := enginesim.FreePorts(s.ranks)
			if err != nil {
				t.Fatal(err)
			}
			o.SideAddr = fmt.Sprintf("127.0.0.1:%d", ports)
		}
		if p.shape.engine != nil {
			p.shape.engine(i, o)
		}
	}
	s.workerOf = func(i int, e *enginesim.Engine) string {
		role := "decode"
		if i < 2 {
			role = "prefill"
		}
		kind := string(p.engine)
		if kind == "" {
			kind = "vllm"
		}
		return fmt.Sprintf(", engine: %s, role: %s%s", kind, role, p.worker(e))
	}
	if p.engine != "" {
		s.model += ", engine: " + string(p.engine)
	}
	dir, err := os.MkdirTemp("", "kvp")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	s.envoy += fmt.Sprintf(", prefill: \"unix:%s/p\"", dir)
	rules := p.rules
	if rules == "" {
		rules = "mode: threshold, threshold: 64"
	}
	s.config += fmt.Sprintf("disagg: {connector: %s%s}\nrouting: {disagg: {%s}%s}\n", p.connector, disagg, rules, s.routing)
	s.otherwise = true // legs are edited
	b := newBed(t, s)
	t.Cleanup(b.nothingHeld)
	return b
}

// nothingHeld checks that no engine holds blocks or runs anything, and that no
// request violated a protocol.
func (b *bed) nothingHeld() {
	b.t.Helper()
	for i, e := range b.engines {
		b.until(fmt.Sprintf("e%d holds nothing", i), func() bool {
			st := e.Stats()
			n := st.Held
			for _, r := range st.Ranks {
				n += r.BlocksUsed + r.Running + r.Waiting
			}
			return n == 0
		})
		for what, n := range e.Stats().Protocol {
			if strings.HasPrefix(what, "violation") && (what != "violation: pull of an unknown request" || !b.legsAreCut) {
				b.t.Errorf("e%d saw %d times: %s", i, n, what)
			}
		}
	}
}

// sides is what the engines saw of a request; a leg that there was not is nil.
type sides struct {
	prefill, decode     *enginesim.RequestRecord
	prefillOn, decodeOn string // targets
}

func (b *bed) legsOf(id string) (s sides) {
	for i, e := range b.engines {
		for _, r := range e.Stats().Requests {
			switch {
			case !strings.Contains(r.RequestID, id):
			case i < 2:
				s.prefill, s.prefillOn = &r, fmt.Sprintf("e%d/%d", i, r.Rank)
			default:
				s.decode, s.decodeOn = &r, fmt.Sprintf("e%d/%d", i, r.Rank)
			}
		}
	}
	return s
}

// bodyFor is a request for a path with about n tokens of prompt.
func bodyFor(path, seed string, n int, stream bool) []byte {
	v := map[string]any{"model": modelName, "stream": stream}
	text := prose(seed, n)
	switch path {
	case "/v1/chat/completions":
		v["messages"], v["max_tokens"] = []message{{"user", text}}, 8
	case "/v1/messages":
		v["messages"], v["max_tokens"] = []message{{"user", text}}, 8
	case "/v1/responses":
		v["input"], v["max_output_tokens"] = text, 8
	case "/inference/v1/generate":
		v["token_ids"], v["sampling_params"] = tokenizer.Encode(text, false), map[string]any{"max_tokens": 8, "min_tokens": 2}
	case "/generate":
		v["text"], v["sampling_params"] = text, map[string]any{"max_new_tokens": 8}
		delete(v, "model")
	default:
		v["prompt"], v["max_tokens"], v["min_tokens"] = text, 8, 3
	}
	if stream && (path == "/v1/chat/completions" || path == "/v1/completions") {
		v["stream_options"] = map[string]bool{"include_usage": true}
	}
	body, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return body
}

// textOf is the generated text of an answer, whatever the API and streamed or not.
func textOf(body []byte) string {
	var b strings.Builder
	take := func(raw []byte, chunk bool) {
		var a struct {
			Type    string          `json:"type"`
			Text    string          `json:"text"`
			Delta   json.RawMessage `json:"delta"`
			Content []struct {
				Text string `json:"text"`
			} `json:"content"`
			Output []struct {
				Content []struct {
					Text string `json:"text"`
				} `json:"content"`
			} `json:"output"`
			Choices []struct {
				Text     string   `json:"text"`
				TokenIDs []uint32 `json:"token_ids"`
				Message  struct {
					Content string `json:"content"`
				} `json:"message"`
				Delta struct {
					Content string `json:"content"`
				} `json:"delta"`
			} `json:"choices"`
		}
		_ = json.Unmarshal(raw, &a)
		if chunk && a.Text != "" { // SGLang's own stream repeats the text so far
			b.Reset()
		}
		b.WriteString(a.Text)
		var delta string
		if json.Unmarshal(a.Delta, &delta) == nil {
			b.WriteString(delta)
		}
		var block struct {
			Text string `json:"text"`
		}
		if json.Unmarshal(a.Delta, &block) == nil {
			b.WriteString(block.Text)
		}
		for _, c := range a.Content {
			b.WriteString(c.Text)
		}
		for _, o := range a.Output {
			for _, c := range o.Content {
				b.WriteString(c.Text)
			}
		}
		for _, c := range a.Choices {
			b.WriteString(c.Text + c.Message.Content + c.Delta.Content)
			for _, id := range c.TokenIDs {
				fmt.Fprint(&b, id, " ")
			}
		}
	}
	if bytes.HasPrefix(body, []byte("{")) {
		take(body, false)
		return b.String()
	}
	for line := range strings.SplitSeq(string(body), "\n") {
		if data, ok := strings.CutPrefix(line, "data: "); ok {
			take([]byte(data), true)
		}
	}
	return b.String()
}

// whole starts an engine that computes whole requests, as a reference.
func whole(t *testing.T, kind enginesim.EngineKind) *enginesim.Engine {
	t.Helper()
	e, err := enginesim.Start(context.Background(), enginesim.Options{Engine: kind, Model: modelName, Tokenizer: tokenizer, Listen: "127.0.0.1:0", BlockSize: 16, Blocks: 16384})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

func askDirectly(t *testing.T, e *enginesim.Engine, path string, body []byte) string {
	t.Helper()
	resp, err := http.Post(e.URL()+path, "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var out bytes.Buffer
	if _, err := out.ReadFrom(resp.Body); err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("one engine: status %d: %s", resp.StatusCode, out.Bytes())
	}
	return textOf(out.Bytes())
}

// Every protocol, every API that it serves, streamed and not: the blocks are
// transferred, the text equals that of a single engine, ranks and ids are right on both
// sides, and blocks that decode holds are not prefilled again.
func TestEveryConnector(t *testing.T) {
	for _, p := range pairs() {
		t.Run(p.connector, func(t *testing.T) {
			b := newPools(t, p, "")
			alone := whole(t, p.engine)
			splits := 0
			for _, path := range p.paths {
				for _, stream := range []bool{false, true} {
					seed := fmt.Sprint(p.connector, path, stream)
					body := bodyFor(path, seed, 150, stream)
					r := b.post(path, body)
					if r.status != http.StatusOK {
						t.Fatalf("%s stream=%v: status %d: %s", path, stream, r.status, r.body)
					}
					if want := askDirectly(t, alone, path, body); want == "" || textOf(r.body) != want {
						t.Errorf("%s stream=%v: text %q, one engine says %q", path, stream, textOf(r.body), want)
					}
					b.splitWell(r, &p)
					splits++
				}
			}
			// One token is split by the same rule: decode is spared the prompt.
			one := bytes.Replace(bytes.Replace(bodyFor("/v1/completions", p.connector+" one", 150, false), []byte(`"max_tokens":8`), []byte(`"max_tokens":1`), 1), []byte(`"min_tokens":3,`), nil, 1)
			r := b.post("/v1/completions", one)
			if want := askDirectly(t, alone, "/v1/completions", one); r.status != http.StatusOK || want == "" || textOf(r.body) != want {
				t.Errorf("one token: status %d, text %q, one engine says %q", r.status, textOf(r.body), want)
			}
			b.splitWell(r, &p)
			splits++
			b.until("the legs are counted", func() bool { return b.metric("kvlane_prefill_legs_total", `outcome="ok"`) == float64(splits) })
			// P2P-NCCL changes the request id: Envoy's reports with the new id must still
			// be attributed.
			if n := b.metric("kvlane_extproc_failures_total"); n != 0 {
				t.Errorf("%v failures of the protocol", n)
			}
			// The same prompt again: decode, which took the blocks over, holds it.
			if p.connector == "nixl" {
				again := b.post(p.paths[0], bodyFor(p.paths[0], fmt.Sprint(p.connector, p.paths[0], false), 150, false))
				if again.header.Get("X-Kvlane-Prefill") != "" || again.matched < 128 || again.matched != again.answer.Usage.Details.Cached {
					t.Errorf("again: prefill %q, %d tokens matched, %d cached", again.header.Get("X-Kvlane-Prefill"), again.matched, again.answer.Usage.Details.Cached)
				}
			}
			if p.always {
				return
			}
			// A short prompt is computed where it decodes.
			body := bodyFor("/v1/completions", "short", 20, false)
			r = b.post("/v1/completions", body)
			if s := b.legsOf(r.header.Get("X-Request-Id")); s.prefill != nil || r.header.Get("X-Kvlane-Prefill") != "" || r.status != http.StatusOK {
				t.Errorf("a short prompt had a prefill leg: status %d: %s", r.status, r.body)
			}
			b.intact(r, body)
		})
	}
}

// splitWell checks both legs of an answered request.
func (b *bed) splitWell(r *reply, p *pair) {
	b.t.Helper()
	id := r.header.Get("X-Request-Id")
	s := b.legsOf(id)
	prefill, decode, prefillOn, decodeOn := s.prefill, s.decode, s.prefillOn, s.decodeOn
	if prefill == nil || decode == nil {
		b.t.Fatalf("%s: prefill leg %+v, decode leg %+v", id, prefill, decode)
	}
	if decode.RemoteTokens < 100 || decode.Leg != "decode" || prefill.Leg != "prefill" || prefill.RequestID != decode.RequestID {
		b.t.Errorf("prefill leg %+v\ndecode leg %+v", prefill, decode)
	}
	if p.engine == "" && prefill.Path == "/v1/responses" { // vLLM does not read a rank there
		return
	}
	if on := r.header.Get("X-Kvlane-Prefill"); on != prefillOn || r.target != decodeOn {
		b.t.Errorf("decided for %s and %s, served by %s and %s", on, r.target, prefillOn, decodeOn)
	}
	if !prefill.Pinned || !decode.Pinned {
		b.t.Errorf("ranks were not named: prefill %v, decode %v", prefill.Pinned, decode.Pinned)
	}
	for name := range prefill.Headers {
		if strings.HasPrefix(name, "x-kvlane-") || name == "x-gateway-destination-endpoint" {
			b.t.Errorf("header %s reached the prefill engine", name)
		}
	}
}

func noSettings(*enginesim.Engine) string { return "" }

// The second turn of a conversation is prefilled where the first was, and only what
// is new.
func TestPrefillFollowsTheCache(t *testing.T) {
	b := newPools(t, pair{connector: "nixl", worker: noSettings}, "")
	for n := range 3 {
		messages := []message{{"user", prose(fmt.Sprint("turn", n), 300)}}
		first := b.chat(messages...)
		messages = append(messages, message{"assistant", first.text()}, message{"user", prose(fmt.Sprint("more", n), 200)})
		second := b.chat(messages...)
		where := first.header.Get("X-Kvlane-Prefill")
		if where == "" || second.header.Get("X-Kvlane-Prefill") != where {
			t.Errorf("first turn prefilled on %q, second on %q", where, second.header.Get("X-Kvlane-Prefill"))
		}
		prefill := b.legsOf(second.header.Get("X-Request-Id")).prefill
		if prefill == nil || prefill.CachedTokens < 256 || second.header.Get("X-Kvlane-Prefill-Matched-Tokens") != fmt.Sprint(prefill.CachedTokens) {
			t.Errorf("predicted %s tokens on the prefill side, the engine had %+v", second.header.Get("X-Kvlane-Prefill-Matched-Tokens"), prefill)
		}
	}
}

// Requests that a transfer cannot serve are computed by one engine.
func TestRequestsThatCannotBeSplit(t *testing.T) {
	b := newPools(t, pair{connector: "nixl", worker: noSettings}, "")
	for name, body := range map[string]string{
		"two answers":  `{"model":"demo","max_tokens":4,"n":2,"prompt":"` + prose("n", 150) + `"}`,
		"two prompts":  `{"model":"demo","max_tokens":4,"prompt":["` + prose("a", 150) + `","` + prose("b", 150) + `"]}`,
		"best of many": `{"model":"demo","max_tokens":4,"best_of":3,"prompt":"` + prose("best", 150) + `"}`,
	} {
		r := b.post("/v1/completions", []byte(body))
		if prefill := b.legsOf(r.header.Get("X-Request-Id")).prefill; r.status != http.StatusOK || prefill != nil {
			t.Errorf("%s: status %d, prefill leg %+v", name, r.status, prefill)
		}
	}
}

// A request that is refused is refused by the decode engine, before any engine has computed its prompt: a prefill
// engine would keep its blocks.
func TestRefusedRequestsLeaveNothingOnPrefillWorkers(t *testing.T) {
	b := newPools(t, pair{connector: "nixl", worker: noSettings, shape: shape{engine: func(_ int, o *enginesim.Options) { o.KVLease = time.Hour }}}, "")
	for _, fields := range []string{`"max_tokens":4,"min_tokens":100`, `"max_tokens":"x"`, `"max_tokens":-1`, `"stream":"maybe"`, `"stream":true,"stream_options":5`} {
		r := b.post("/v1/completions", []byte(`{"model":"demo",`+fields+`,"prompt":"`+prose(fields[1:7], 150)+`"}`))
		if prefill := b.legsOf(r.header.Get("X-Request-Id")).prefill; r.status != http.StatusBadRequest || prefill != nil || r.header.Get("X-Kvlane-Prefill") != "" {
			t.Errorf("%s: got status %d, prefill leg %+v", fields, r.status, prefill)
		}
	}
	// Requests whose headers leave no room for Kvlane's are refused before a leg is sent, or served without one.
	answers := map[int]int{}
	for _, n := range []int{70, 82, 83, 84, 85, 86, 87, 88, 89, 90, 91, 92, 93} {
		var headers []string
		for i := range n {
			headers = append(headers, fmt.Sprint("x-h", i), "1")
		}
		r := b.post("/v1/completions", bodyFor("/v1/completions", fmt.Sprint("headers", n), 150, false), headers...)
		prefill := b.legsOf(r.header.Get("X-Request-Id")).prefill
		if answers[r.status]++; r.status != http.StatusOK && (prefill != nil || r.header.Get("X-Kvlane-Prefill") != "") || n == 70 && prefill == nil {
			t.Errorf("%d headers: got status %d and prefill leg %v", n, r.status, prefill != nil)
		}
	}
	if answers[http.StatusOK] < 4 || answers[http.StatusRequestHeaderFieldsTooLarge] < 2 {
		t.Errorf("got answers %v, want some of 200 and of 431", answers)
	}
	for i, e := range b.engines {
		if n := e.Stats().Held; n != 0 {
			t.Errorf("e%d holds the blocks of %d requests", i, n)
		}
	}
}

// A client that names a host to fetch from is served like any other.
func TestAClientThatNamesAPrefillWorker(t *testing.T) {
	b := newPools(t, pair{connector: "nixl", worker: noSettings}, "")
	for _, tokens := range []int{200, 20} {
		body := bodyFor("/v1/completions", fmt.Sprint("theirs", tokens), tokens, false)
		const theirs = `"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_host":"127.0.0.1","remote_port":9,"remote_engine_id":"x","remote_request_id":"x","remote_num_tokens":9,"remote_block_ids":[[1]]},`
		r := b.post("/v1/completions", append([]byte("{"+theirs), body[1:]...))
		s := b.legsOf(r.header.Get("X-Request-Id"))
		if r.status != http.StatusOK || s.decode == nil || (s.prefill != nil) != (tokens == 200) || (s.decode.RemoteTokens > 0) != (tokens == 200) {
			t.Errorf("%d tokens: status %d, legs %+v %+v: %s", tokens, r.status, s.prefill, s.decode, r.body)
		}
	}
}

// While Kvlane is down the least busy worker serves, and prefill workers are only a
// fallback.
func TestWithoutKvlanePrefillWorkersAreSpared(t *testing.T) {
	b := newPools(t, pair{connector: "nixl", worker: noSettings}, "")
	b.stopKvlane(syscall.SIGKILL)
	for i := range 12 {
		if r := b.post("/v1/completions", bodyFor("/v1/completions", fmt.Sprint("alone", i), 20, false)); r.status != http.StatusOK {
			t.Errorf("status %d: %s", r.status, r.body)
		}
	}
	for i, e := range b.engines {
		if n := len(e.Stats().Requests); i < 2 && n != 0 || i >= 2 && n == 0 {
			t.Errorf("e%d saw %d requests", i, n)
		}
	}
	b.startKvlane()
}

// A decode engine that refuses the decode leg: Envoy takes the next decode engine,
// never a prefill engine.
func TestADecodeEngineThatRefusesTheDecodeLeg(t *testing.T) {
	b := newPools(t, pair{connector: "nixl", worker: noSettings, shape: shape{envoy: ", alternates: true"}}, "")
	for i := range 6 {
		if err := b.engines[2].SetFaults(enginesim.Faults{Refuse: true}); err != nil {
			t.Fatal(err)
		}
		r := b.chat(message{"user", prose(fmt.Sprint("refused", i), 200)})
		s := b.legsOf(r.header.Get("X-Request-Id"))
		if s.decode == nil || !strings.HasPrefix(s.decodeOn, "e3/") || s.decode.RemoteTokens < 100 {
			t.Errorf("decode leg on %q: %+v", s.decodeOn, s.decode)
		}
		if err := b.engines[2].SetFaults(enginesim.Faults{}); err != nil {
			t.Fatal(err)
		}
		b.until("e2 is back", func() bool { return b.metric("kvlane_worker_ready", `worker="e2"`) == 1 })
	}
}

// TensorRT-LLM: an answer that ended with its first token is the context server's.
func TestAContextAnswerThatIsFinal(t *testing.T) {
	b := newPools(t, pair{connector: "trtllm", engine: enginesim.TRTLLM, worker: noSettings, shape: shape{engine: func(_ int, o *enginesim.Options) {
		o.Faults.ContextEnds = true
	}}}, "")
	for _, stream := range []bool{false, true} {
		r := b.post("/v1/chat/completions", bodyFor("/v1/chat/completions", fmt.Sprint("final", stream), 200, stream))
		if r.status != http.StatusOK || textOf(r.body) == "" || bytes.Contains(r.body, []byte("disaggregated_params")) {
			t.Errorf("status %d: %s", r.status, r.body)
		}
		if stream != bytes.HasSuffix(r.body, []byte("data: [DONE]\n\n")) {
			t.Errorf("stream=%v: %s", stream, r.body)
		}
	}
	for _, e := range b.engines[2:] {
		if n := len(e.Stats().Requests); n != 0 {
			t.Errorf("a generation server saw %d requests", n)
		}
	}
}

// TensorRT-LLM's usage is the context server's, and the conversation's id is on both legs;
// a request that is not split has no label.
func TestTensorRTLabels(t *testing.T) {
	b := newPools(t, pair{connector: "trtllm", engine: enginesim.TRTLLM, worker: noSettings}, "")
	body := bodyFor("/v1/chat/completions", "label", 200, false)
	b.post("/v1/chat/completions", body, "x-session-id", "c1")
	r := b.post("/v1/chat/completions", []byte(strings.Replace(string(body), `"stream":false`, `"stream":false,"top_k":1`, 1)), "x-session-id", "c1")
	if r.status != http.StatusOK || r.answer.Usage.Prompt < 200 {
		t.Errorf("status %d: %s", r.status, r.body)
	}
	short := []byte(`{"model":"demo","prompt":"a b","max_tokens":2,"disaggregated_params":{"request_type":"context_only","conversation_id":"c"}}`)
	if r := b.post("/v1/completions", short); r.status != http.StatusOK {
		t.Errorf("a stale label: status %d: %s", r.status, r.body)
	}
}

// Without a prefill listener legs go directly to the worker.
func TestLegsThatGoDirectly(t *testing.T) {
	b := newBed(t, shape{engines: 2, otherwise: true, engine: func(i int, o *enginesim.Options) {
		o.Role = []enginesim.Role{enginesim.Prefill, enginesim.Decode}[i]
	}, workerOf: func(i int, _ *enginesim.Engine) string { return ", role: " + []string{"prefill", "decode"}[i] },
		config: "disagg: {connector: nixl}\nrouting: {disagg: {mode: threshold, threshold: 64}}\n"})
	r := b.chat(message{"user", prose("direct", 200)})
	if !strings.HasPrefix(r.header.Get("X-Kvlane-Prefill"), "e0/") || !strings.HasPrefix(r.target, "e1/") {
		t.Errorf("prefill %q, decode %q", r.header.Get("X-Kvlane-Prefill"), r.target)
	}
	if n := b.metric("kvlane_prefill_legs_total", `outcome="ok"`); n != 1 {
		t.Errorf("%v legs", n)
	}
	b.nothingHeld()
}

// besideDecode is llm-d's setup: a sidecar for each decode engine. The list is complete
// when the bed is ready.
func besideDecode(t *testing.T) (pair, *[]*sidecar) {
	t.Helper()
	list := &[]*sidecar{}
	var prefill []string
	return pair{connector: "sidecar", ranks: 1, worker: noSettings, shape: shape{addressOf: func(i int, e *enginesim.Engine) string {
		if i < 2 {
			prefill = append(prefill, e.Addr())
			return e.Addr()
		}
		s, err := startSidecar(e.Addr(), prefill...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(s.Close)
		*list = append(*list, s)
		return s.Addr()
	}}}, list
}

// llm-d's sidecars run the legs: Kvlane names the prefill worker, and clients cannot.
func TestTheSidecarRunsTheLegs(t *testing.T) {
	p, sidecars := besideDecode(t)
	b := newPools(t, p, "")
	count := func(what string) (n int) {
		for _, s := range *sidecars {
			n += s.Counts()[what]
		}
		return n
	}
	alone := whole(t, "")
	splits := 0
	for _, path := range []string{"/v1/chat/completions", "/v1/completions", "/v1/responses"} {
		for _, stream := range []bool{false, true} {
			body := bodyFor(path, fmt.Sprint("side", path, stream), 200, stream)
			r := b.post(path, body)
			if want := askDirectly(t, alone, path, body); textOf(r.body) != want {
				t.Errorf("%s stream=%v: status %d, text %q, one engine says %q", path, stream, r.status, textOf(r.body), want)
			}
			s := b.legsOf(r.header.Get("X-Request-Id"))
			if s.prefill == nil || s.decode == nil || s.decode.RemoteTokens < 100 || s.prefillOn != r.header.Get("X-Kvlane-Prefill") || s.decodeOn != r.target {
				t.Errorf("%s stream=%v: prefill %q, decode %q: %+v", path, stream, r.header.Get("X-Kvlane-Prefill"), r.target, s)
			}
			splits++
		}
	}
	r := b.post("/v1/completions", bodyFor("/v1/completions", "steer", 20, false), "x-prefiller-host-port", "10.0.0.1:80")
	if s := b.legsOf(r.header.Get("X-Request-Id")); r.status != http.StatusOK || s.prefill != nil {
		t.Errorf("a client named a prefill worker: status %d, %+v", r.status, s.prefill)
	}
	if n := count("split"); n != splits {
		t.Errorf("%d requests were split", n)
	}
	for _, s := range *sidecars {
		for what := range s.Counts() {
			if strings.HasPrefix(what, "violation") {
				t.Error(what)
			}
		}
	}
}
