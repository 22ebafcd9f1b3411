package engines

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
)

// vllmPD is a vLLM that hands blocks to another, or takes them: both roles run with the same options. A load that fails is
// computed: NIXL's other policy answers such a request with an error.
var vllmPD = &kind{name: "vllm", block: 32, blocks: 256, reset: "/reset_prefix_cache", tokenize: "/tokenize",
	connector: `{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu","kv_load_failure_policy":"recompute"}`}

// splitFrom is how many uncached tokens make Kvlane split a request.
const splitFrom = 64

// pair is a prefill and a decode engine behind Kvlane and Envoy. Of the bed's own methods those that ask an engine ask the
// decode engine.
type pair struct {
	*bed

	prefill *engine
	relay   *relay // before prefill
	last    *relay // before decode
}

// relay stands before the prefill engine, so that a test can act between its answer and the decode leg.
type relay struct {
	*httptest.Server

	address string
	answers atomic.Int64           // to prefill legs
	then    atomic.Pointer[func()] // called before the next answer is passed on
	sent    atomic.Pointer[[]byte] // the last request's body, but for Kvlane's own questions
}

func newRelay(t *testing.T, to *engine) *relay {
	t.Helper()
	target := &url.URL{Scheme: "http", Host: to.address}
	r := &relay{}
	proxy := httputil.NewSingleHostReverseProxy(target)
	proxy.ModifyResponse = func(resp *http.Response) error {
		if resp.Request.Method != http.MethodPost || !strings.Contains(resp.Request.URL.Path, "completions") {
			return nil
		}
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			return err
		}
		_ = resp.Body.Close()
		resp.Body = io.NopCloser(bytes.NewReader(body))
		r.answers.Add(1)
		if act := r.then.Swap(nil); act != nil {
			(*act)()
		}
		return nil
	}
	r.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Method == http.MethodPost && req.Header.Get("X-Request-Id") != "" {
			body, _ := io.ReadAll(req.Body)
			r.sent.Store(&body)
			req.Body = io.NopCloser(bytes.NewReader(body))
		}
		if req.URL.Path != "/health" { // a dead engine is ready until the relay is closed
			proxy.ServeHTTP(w, req)
		}
	}))
	r.address = r.Listener.Addr().String()
	t.Cleanup(r.Close)
	return r
}

// newPair starts both engines and waits for them.
func newPair(t *testing.T) (prefill, decode *engine) {
	t.Helper()
	prefill, decode = launch(t, vllmPD), launch(t, vllmPD)
	prefill.serves()
	decode.serves()
	return prefill, decode
}

// between puts Kvlane and Envoy in front of the engines; a request with from uncached tokens on decode is split. more goes
// into the section disagg.
func between(t *testing.T, prefill, decode *engine, from int, more string) *pair {
	t.Helper()
	p := &pair{prefill: prefill, relay: newRelay(t, prefill), last: newRelay(t, decode)}
	worker := func(name, role, address string, e *engine) string {
		return fmt.Sprintf(`  - {name: %s, role: %s, engine: vllm, address: "%s", models: [%s],
     events: {endpoint: "tcp://127.0.0.1:%d", replay: "tcp://127.0.0.1:%d"}}
`, name, role, address, modelName, e.events, e.replay)
	}
	// Without speculation what Kvlane matches is what events have told.
	p.bed = newFront(t, decode, worker("prefill", "prefill", p.relay.address, prefill)+worker("decode", "decode", p.last.address, decode),
		fmt.Sprintf(`, prefill: "%s"`, freeAddress(t)),
		fmt.Sprintf("disagg: {connector: nixl%s}\nrouting: {speculate: 0, disagg: {mode: threshold, threshold: %d}}\n", more, from))
	return p
}

// TestPD starts two stock engines once and plays every story on them.
func TestPD(t *testing.T) {
	prefill, decode := newPair(t)
	decode.dependsOnContext()
	threshold, always := between(t, prefill, decode, splitFrom, ""), between(t, prefill, decode, 0, "")
	tells := between(t, prefill, decode, splitFrom, ", usage: prefill")
	handing, k := *decode, *decode.kind
	k.options, handing.kind = ", hand_ids: true", &k
	hands := between(t, prefill, &handing, splitFrom, "")
	for _, story := range []struct {
		name string
		tell func(*pair)
		on   *pair
	}{
		{"chat and completions, streamed and not", (*pair).everyForm, threshold},
		{"decode holds a part", (*pair).parts, threshold},
		{"salts", (*pair).salted, threshold},
		{"below and at the threshold", (*pair).edge, threshold},
		{"several answers are not split", (*pair).several, threshold},
		{"requests that do not read the cache are not split", (*pair).unreadAreWhole, threshold},
		{"ids in the place of text", (*pair).handsIDs, hands},
		{"shorter than a block", (*pair).tiny, always},
		{"usage of the prefill leg", (*pair).prefillUsage, tells},
		{"the prefill engine dies between the legs", (*pair).diesBetween, threshold},
		{"and stays away", (*pair).gone, threshold},
	} {
		t.Run(story.name, func(t *testing.T) {
			p := story.on
			whole := p.t
			p.t, p.prefill.t = t, t
			defer func() { p.t, p.prefill.t = whole, whole }()
			story.tell(p)
			p.atRest()
		})
	}
}

// dependsOnContext wants other texts after contexts that end alike: else a comparison of texts would not notice wrong blocks.
func (e *engine) dependsOnContext() {
	e.t.Helper()
	const length, end = 150, 8
	texts, alike := map[string]int{}, spread("the end", end)
	for n := range 8 {
		ids := append(spread(strings.Repeat("c", n+1), length-end), alike...)
		status, raw := e.ask(http.MethodPost, "/v1/completions", encode(completion(ids)))
		if status != http.StatusOK {
			e.t.Fatalf("completion: got %d %s, want 200", status, raw)
		}
		var got told
		got.read(e.t, raw)
		if first, ok := texts[got.text]; ok || got.text == "" {
			e.t.Fatalf("contexts %d and %d that end in the same %d tokens: got %q for both, want different texts", first, n, end, got.text)
		}
		texts[got.text] = n
	}
	e.t.Logf("texts after %d contexts that end alike: %q", len(texts), slices.Sorted(maps.Keys(texts)))
}

// told is what came back through Envoy, and what the decode engine counted meanwhile.
type told struct {
	text             string
	split            bool
	matched, onOther int // tokens that Kvlane expected on decode and on prefill
	prompt, cached   int // usage
	external         int // tokens that decode counts as transferred
	legs             int // prefill legs that the prefill engine has answered
}

// post is send for an answer with decode's own usage.
func (p *pair) post(what, path string, body m) told {
	p.t.Helper()
	got := p.send(what, path, body)
	if got.matched != got.cached {
		p.t.Errorf("%s: %d tokens expected on decode, its usage tells %d", what, got.matched, got.cached)
	}
	return got
}

// send sends a request and wants 200 and the text that one engine makes of it.
func (p *pair) send(what, path string, body m) told {
	p.t.Helper()
	p.settle()
	before, legs := p.external(), p.relay.answers.Load()
	resp, err := p.client.Post("http://"+p.ingress+path, "application/json", bytes.NewReader(encode(body)))
	if err != nil {
		p.t.Fatal(err)
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		p.t.Fatal(err)
	}
	if resp.StatusCode != http.StatusOK {
		p.t.Fatalf("%s: %d %s", what, resp.StatusCode, raw)
	}
	got := told{split: resp.Header.Get("X-Kvlane-Prefill") != "", matched: number(p.t, resp.Header.Get("X-Kvlane-Matched-Tokens"))}
	if got.split {
		got.onOther = number(p.t, resp.Header.Get("X-Kvlane-Prefill-Matched-Tokens"))
	}
	got.read(p.t, raw)
	got.external, got.legs = int(p.external()-before), int(p.relay.answers.Load()-legs)
	p.t.Logf("%-40s %4d prompt tokens, %-5s %4d on decode (usage: %4d), %4d on prefill, %4d transferred", what, got.prompt,
		map[bool]string{true: "split", false: "whole"}[got.split], got.matched, got.cached, got.onOther, got.external)
	if want := p.alone(path, body); got.text != want {
		p.t.Errorf("%s: text %q, one engine says %q", what, got.text, want)
	}
	return got
}

// alone is the text that the decode engine makes of a request all by itself: another salt, so nothing is cached.
func (p *pair) alone(path string, body m) string {
	p.t.Helper()
	body = maps.Clone(body)
	body["cache_salt"] = fmt.Sprint("alone ", body["cache_salt"])
	status, raw := p.ask(http.MethodPost, path, encode(body))
	if status != http.StatusOK {
		p.t.Fatalf("one engine: %d %s", status, raw)
	}
	var got told
	got.read(p.t, raw)
	return got.text
}

// read takes text and usage out of an answer, streamed or not.
func (a *told) read(t *testing.T, raw []byte) {
	t.Helper()
	pieces := []string{string(raw)}
	if !bytes.HasPrefix(raw, []byte("{")) {
		pieces = pieces[:0]
		for line := range strings.SplitSeq(string(raw), "\n") {
			if data, ok := strings.CutPrefix(line, "data: "); ok && data != "[DONE]" {
				pieces = append(pieces, data)
			}
		}
	}
	type said struct {
		Content string `json:"content"`
	}
	for _, piece := range pieces {
		var got struct {
			Choices []struct {
				Text           string `json:"text"`
				Message, Delta said
			} `json:"choices"`
			Usage tokenCounts `json:"usage"`
		}
		if err := json.Unmarshal([]byte(piece), &got); err != nil {
			t.Fatalf("%v\n%s", err, raw)
		}
		for _, c := range got.Choices {
			a.text += c.Text + c.Message.Content + c.Delta.Content
		}
		a.prompt, a.cached = max(a.prompt, got.Usage.Prompt), max(a.cached, got.Usage.Details.Cached)
	}
}

// splits is post for a request that must be split: the tokens that decode did not have have come from the prefill engine.
func (p *pair) splits(what, path string, body m) told {
	p.t.Helper()
	got := p.post(what, path, body)
	if !got.split || got.legs != 1 || got.external != got.prompt-got.cached {
		p.t.Errorf("%s: %+v", what, got)
	}
	return got
}

// stays is post for a request that decode must compute.
func (p *pair) stays(what, path string, body m) told {
	p.t.Helper()
	got := p.post(what, path, body)
	if got.split || got.legs != 0 || got.external != 0 {
		p.t.Errorf("%s: %+v", what, got)
	}
	return got
}

// external is how many prompt tokens the decode engine took over from another.
func (p *pair) external() float64 {
	return p.counted(`vllm:prompt_tokens_by_source_total`, `source="external_kv_transfer"`)
}

// counted sums an engine's samples of a metric that have a label.
func (e *engine) counted(name, label string) float64 {
	e.t.Helper()
	status, answer := e.ask(http.MethodGet, "/metrics", nil)
	lines := regexp.MustCompile(`(?m)^`+regexp.QuoteMeta(name)+`\{([^}]*)\} (\S+)`).FindAllStringSubmatch(string(answer), -1)
	if status != http.StatusOK || len(lines) == 0 {
		e.t.Fatalf("metrics: status %d, no %s", status, name)
	}
	sum := 0.0
	for _, l := range lines {
		if !strings.Contains(l[1], label) {
			continue
		}
		v, err := strconv.ParseFloat(l[2], 64)
		if err != nil {
			e.t.Fatal(err)
		}
		sum += v
	}
	return sum
}

// atRest wants nothing booked by Kvlane, nothing running and no block held by an engine that lives.
func (p *pair) atRest() {
	p.t.Helper()
	p.until("nothing is reserved", func() bool { return p.metric("kvlane_reservations") == 0 })
	for name, e := range map[string]*engine{"prefill": p.prefill, "decode": p.engine} {
		select {
		case <-e.exited:
			continue
		default:
		}
		p.until(name+" holds nothing", func() bool {
			return e.counted("vllm:num_requests_running", "") == 0 && e.counted("vllm:num_requests_waiting", "") == 0 &&
				e.counted("vllm:kv_cache_usage_perc", "") == 0
		})
	}
}

func with(body m, more ...any) m {
	body = maps.Clone(body)
	for i := 0; i+1 < len(more); i += 2 {
		body[more[i].(string)] = more[i+1] //nolint:forcetypeassert // pairs of key and value
	}
	return body
}

// everyForm: afterwards the same prompt is decode's own, as its events have told.
func (p *pair) everyForm() {
	for _, form := range []struct {
		path string
		body func(seed string) m
	}{
		{"/v1/chat/completions", func(s string) m { return chat(user(prose(s, 120))) }},
		{"/v1/completions", func(s string) m { return completion(prose(s, 150)) }},
	} {
		for _, streamed := range []bool{false, true} {
			body, what := form.body(fmt.Sprint("form", form.path, streamed)), form.path
			if streamed {
				body, what = with(body, "stream", true, "stream_options", m{"include_usage": true}), what+", streamed"
			}
			first := p.splits(what, form.path, body)
			again := p.stays("the same again", form.path, body)
			if whole := (first.prompt - 1) / p.block * p.block; again.matched != whole {
				p.t.Errorf("decode was credited %d tokens of the %d in whole blocks that it took over", again.matched, whole)
			}
		}
	}
}

// parts: only what decode lacks moves.
func (p *pair) parts() {
	text := prose("part", 150)
	first := p.splits("a text", "/v1/completions", completion(text))
	longer := p.splits("the text and more", "/v1/completions", completion(text+" "+prose("more", 120)))
	if longer.cached == 0 || longer.external >= longer.prompt-first.prompt/2 {
		p.t.Errorf("decode held a part: %+v", longer)
	}
	if longer.onOther == 0 {
		p.t.Error("the prefill engine was not known to hold the text")
	}
	// Three turns of a conversation.
	messages := []m{system(rules), user(prose("turn", 60))}
	for turn := range 3 {
		got := p.splits(fmt.Sprintf("conversation, turn %d", turn+1), "/v1/chat/completions", chat(messages...))
		if turn > 0 && (got.cached == 0 || got.onOther == 0) {
			p.t.Errorf("turn %d: %+v", turn+1, got)
		}
		messages = append(messages, assistant(got.text), user(prose(fmt.Sprint("turn", turn), 100)))
	}
}

func (p *pair) salted() {
	text := prose("salted pair", 120)
	p.splits("salt a", "/v1/completions", completion(text, "cache_salt", "a"))
	if got := p.splits("salt b", "/v1/completions", completion(text, "cache_salt", "b")); got.onOther != 0 {
		p.t.Error("salts share a cache")
	}
	if got := p.stays("salt a again", "/v1/completions", completion(text, "cache_salt", "a")); got.cached == 0 {
		p.t.Error("decode was not credited with the salted blocks")
	}
	if got := p.splits("no salt", "/v1/completions", completion(text)); got.onOther != 0 {
		p.t.Error("a request without a salt found a tenant's blocks")
	}
}

func (p *pair) edge() {
	ids := spread("edge", 4*splitFrom)
	p.stays("one token less", "/v1/completions", completion(ids[:splitFrom-1]))
	p.splits("the threshold", "/v1/completions", completion(ids[splitFrom:2*splitFrom]))
	// Decode holds two blocks of it: what counts is what it lacks.
	p.stays("the threshold and more, in part held", "/v1/completions", completion(ids[splitFrom:3*splitFrom-1]))
}

// several: a transfer has one consumer. vLLM wants another temperature for two answers, so there is no text to compare.
func (p *pair) several() {
	legs := p.relay.answers.Load()
	resp, err := p.client.Post("http://"+p.ingress+"/v1/completions", "application/json",
		bytes.NewReader(encode(completion(prose("several", 120), "n", 2, "temperature", 1))))
	if err != nil {
		p.t.Fatal(err)
	}
	defer resp.Body.Close()
	if split := resp.Header.Get("X-Kvlane-Prefill"); resp.StatusCode != http.StatusOK || split != "" || p.relay.answers.Load() != legs {
		p.t.Errorf("status %d, prefilled on %q", resp.StatusCode, split)
	}
}

// unreadAreWhole: decode would load nothing for them, and matches nothing.
func (p *pair) unreadAreWhole() {
	for i, more := range [][]any{{"prompt_logprobs", 0}, {"echo", true, "logprobs", 1}} {
		plain := completion(prose(fmt.Sprint("whole", i), 150))
		p.splits("without them", "/v1/completions", with(plain, "cache_salt", "other"))
		for _, what := range []string{fmt.Sprintf("with %v", more), "the same again"} {
			if got := p.stays(what, "/v1/completions", with(plain, more...)); got.matched != 0 {
				p.t.Errorf("%s: got %d tokens matched, want 0", what, got.matched)
			}
		}
		if got := p.stays("without them, held", "/v1/completions", plain); got.matched == 0 {
			p.t.Error("got nothing matched of a prompt that decode has computed")
		}
	}
}

// handsIDs: requests that are not split reach decode with ids, whose answers are those to the text. Those that are split are
// sent as they came.
func (p *pair) handsIDs() {
	handed := func() bool {
		body := *p.last.sent.Load()
		return bytes.Contains(body, []byte(`"prompt_token_ids":[`)) || bytes.Contains(body, []byte(`"prompt":[`))
	}
	n := 0
	for _, form := range []struct {
		path string
		body func(seed string, words int) m
	}{
		{"/v1/chat/completions", func(s string, words int) m { return chat(user(prose(s, words))) }},
		{"/v1/completions", func(s string, words int) m { return completion(prose(s, words)) }},
	} {
		p.until("decode was asked whether it takes ids", func() bool {
			n++
			p.stays("asks", form.path, form.body(fmt.Sprint("asks", n), 20))
			return handed()
		})
		for i := range 4 {
			short, long := form.body(fmt.Sprint("short", i), 20+i), form.body(fmt.Sprint("long", i), 150+i)
			if p.stays("short", form.path, short); !handed() {
				p.t.Error("a short prompt went as text")
			}
			if p.splits("long", form.path, long); handed() {
				p.t.Error("a prompt that was split went with ids")
			}
			if got := p.stays("long, held", form.path, long); !handed() || got.cached == 0 {
				p.t.Errorf("a prompt that decode holds: got ids %v, %+v", handed(), got)
			}
		}
	}
}

func (p *pair) tiny() {
	p.splits("12 tokens", "/v1/completions", completion(spread("tiny", 12)))
	p.splits("one block", "/v1/completions", completion(spread("block", p.block)))
	p.splits("one block and a token", "/v1/completions", completion(spread("and one", p.block+1)))
}

// prefillUsage: the client gets the number of tokens cached at prefill, which decode does
// not know.
func (p *pair) prefillUsage() {
	for _, streamed := range []bool{false, true} {
		body, what := completion(prose(fmt.Sprint("usage", streamed), 150)), "known to prefill"
		if streamed {
			body, what = with(body, "stream", true, "stream_options", m{"include_usage": true}), what+", streamed"
		}
		if status, answer := p.prefill.ask(http.MethodPost, "/v1/completions", encode(body)); status != http.StatusOK {
			p.t.Fatalf("%d %s", status, answer)
		}
		got := p.send(what, "/v1/completions", body)
		if !got.split || got.matched != 0 || got.cached != got.onOther || got.cached < 4*p.block || got.external != got.prompt {
			p.t.Errorf("%+v", got)
		}
	}
}

// diesBetween: the prefill engine has answered, and is gone before decode fetches.
func (p *pair) diesBetween() {
	die := func() { p.prefill.kill() }
	p.relay.then.Store(&die)
	got := p.post("prefill dies", "/v1/completions", completion(prose("dies", 150)))
	if !got.split || got.external != 0 {
		p.t.Errorf("%+v", got)
	}
}

// gone: the prefill engine refuses connections; requests do not wait for it.
func (p *pair) gone() {
	p.relay.Close()
	p.stays("its leg is refused", "/v1/completions", completion(prose("gone", 150)))
	// On a busy machine health checks may notice first.
	failed, without := p.metric(`kvlane_degraded_total{reason="prefill_failed"}`), p.metric(`kvlane_degraded_total{reason="no_prefill_target"}`)
	if failed+without != 1 {
		p.t.Errorf("got %v decisions without their leg and %v without a target for it, want 1 of either", failed, without)
	}
	p.until("the prefill engine is known to be gone", func() bool { return p.metric(`kvlane_worker_ready{role="prefill",worker="prefill"}`) == 0 })
	p.stays("no leg is tried", "/v1/chat/completions", chat(user(prose("later", 120))))
	if n := p.metric(`kvlane_degraded_total{reason="no_prefill_target"}`); n != without+1 {
		p.t.Errorf("got %v decisions without a target for their leg, want %v", n, without+1)
	}
}
