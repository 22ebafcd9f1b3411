package e2e

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

// slow makes answers take about tokens times step.
func slow(step time.Duration) func(int, *enginesim.Options) {
	return func(_ int, o *enginesim.Options) {
		o.Time = enginesim.TimeModel{A: step, Scale: 1, Budget: 8192, MaxSeqs: 256}
	}
}

func TestBadInput(t *testing.T) {
	b := newBed(t, shape{maxBodyMB: 2})
	for name, c := range map[string]struct {
		path, body string
		status     int
		message    string
	}{
		"broken JSON":          {"/v1/chat/completions", `{"model": "demo", "messages": [}`, 400, "messages[0]"},
		"empty body":           {"/v1/chat/completions", ``, 400, ""},
		"not an object":        {"/v1/completions", `[1]`, 400, "object"},
		"two values":           {"/v1/completions", `{"model":"demo","prompt":"a"} x`, 400, ""},
		"unknown path":         {"/v1/nothing", `{}`, 404, ""},
		"unknown model":        {"/v1/chat/completions", `{"model":"other","messages":[{"role":"user","content":"x"}]}`, 404, ""},
		"empty messages":       {"/v1/chat/completions", `{"model":"demo","messages":[]}`, 400, ""},
		"no messages":          {"/v1/chat/completions", `{"model":"demo"}`, 400, ""},
		"fewer than no tokens": {"/v1/completions", `{"model":"demo","prompt":"a","max_tokens":-1}`, 400, ""},
		"lone surrogate":       {"/v1/chat/completions", `{"model":"demo","messages":[{"role":"user","content":"\ud800"}]}`, 400, ""},
		"body over the limit":  {"/v1/completions", `{"model":"demo","prompt":"` + strings.Repeat("a ", 3<<19) + `"}`, 413, ""},
		"deeply nested":        {"/v1/chat/completions", strings.Repeat(`{"a":`, 100_000), 400, ""},
		"invalid UTF-8 prompt": {"/v1/completions", "{\"model\":\"demo\",\"prompt\":\"\xff\xfe\"}", 400, ""},
	} {
		r := b.post(c.path, []byte(c.body))
		if r.status != c.status || !strings.Contains(string(r.body), c.message) {
			t.Errorf("%s: status %d, want %d: %.300s", name, r.status, c.status, r.body)
		}
		next := chatBody(message{"user", "after: " + name})
		b.intact(b.post("/v1/chat/completions", next), next)
	}
	b.sound()
	resp, err := b.client.Get("http://" + b.ingress + "/v1/models")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if text, _ := io.ReadAll(resp.Body); resp.StatusCode != http.StatusOK || !bytes.Contains(text, []byte(modelName)) {
		t.Errorf("GET /v1/models: status %d: %s", resp.StatusCode, text)
	}
}

// A model without a tokenizer is routed by load, with the reason reported.
func TestWithoutATokenizerRequestsAreRoutedByLoad(t *testing.T) {
	b := newBed(t, shape{model: "-"})
	used := map[string]bool{}
	for i := range 8 {
		used[b.chat(message{"user", prose(fmt.Sprint(i), 50)}).target] = true
	}
	if len(used) != 4 {
		t.Errorf("used %v", used)
	}
	if n := b.metric("kvlane_degraded_total", `reason="model_unknown"`); n != 8 {
		t.Errorf("%v requests said that the model is unknown", n)
	}
	b.sound()
}

func TestClientsThatLeave(t *testing.T) {
	b := newBed(t, shape{engine: slow(20 * time.Millisecond)})
	// While the body is sent.
	conn, err := net.Dial("tcp", b.ingress)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{\"model\": \"demo\",")
	time.Sleep(50 * time.Millisecond)
	conn.Close()
	// During the answer, streamed and not.
	for _, stream := range []string{"true", "false"} {
		ctx, cancel := context.WithCancel(t.Context())
		body := b.remember([]byte(`{"model":"demo","stream":` + stream + `,"max_tokens":500,"messages":[{"role":"user","content":"` + prose(stream, 50) + `"}]}`))
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+b.ingress+"/v1/chat/completions", bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			if resp, err := b.client.Do(req); err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
		}()
		b.until("the request runs", func() bool { return b.metric("kvlane_active_requests") == 1 })
		cancel()
		<-done
		b.until("the reservation is released", func() bool { return b.metric("kvlane_active_requests") == 0 })
	}
	b.until("the engines aborted", func() bool {
		n := 0
		for _, e := range b.engines {
			for _, r := range e.Stats().Ranks {
				n += r.Running + r.Waiting
			}
		}
		return n == 0
	})
	b.sound()
}

// When a worker is gone its requests go to others immediately; when all are gone the answer
// to the client says so.
func TestWorkersThatAreGone(t *testing.T) {
	b := newBed(t, shape{})
	if err := b.engines[0].SetFaults(enginesim.Faults{Refuse: true}); err != nil {
		t.Fatal(err)
	}
	for i := range 20 {
		if r := b.chat(message{"user", prose(fmt.Sprint(i), 30)}); i > 10 && strings.HasPrefix(r.target, "e0/") {
			b.until("e0 is out", func() bool { return b.metric("kvlane_worker_ready", `worker="e0"`) == 0 })
		}
	}
	if n := b.metric("kvlane_worker_ready", `worker="e0"`); n != 0 {
		t.Error("a worker that refuses connections is still ready")
	}
	if err := b.engines[1].SetFaults(enginesim.Faults{Refuse: true}); err != nil {
		t.Fatal(err)
	}
	b.until("all workers are out", func() bool { return b.metric("kvlane_worker_ready") == 0 })
	r := b.post("/v1/chat/completions", chatBody(message{"user", "x"}))
	if r.status != http.StatusServiceUnavailable || r.answer.Error.Type != "service_unavailable_error" || r.answer.Error.Message != "no worker can serve this request at the moment" {
		t.Errorf("status %d: %s", r.status, r.body)
	}
	for _, e := range b.engines {
		if err := e.SetFaults(enginesim.Faults{}); err != nil {
			t.Fatal(err)
		}
	}
	b.until("they are back", func() bool {
		r, err := b.send("/v1/chat/completions", chatBody(message{"user", "x"}))
		return err == nil && r.status == http.StatusOK
	})
	b.sound()
}

// turnTwice plays a conversation of two turns and returns the second reply.
func turnTwice(b *bed, seed string) *reply {
	b.t.Helper()
	messages := []message{{"system", prose(seed, 100)}, {"user", "Where?"}}
	first := b.chat(messages...)
	return b.chat(append(messages, message{"assistant", first.text()}, message{"user", "When?"})...)
}

// Event batches lost on the wire are fetched again if the engine keeps them; if not, the
// index drops the rank's blocks.
func TestGapsInTheEvents(t *testing.T) {
	for _, replay := range []bool{true, false} {
		t.Run(fmt.Sprintf("replay=%v", replay), func(t *testing.T) {
			b := newBed(t, shape{engines: 1, ranks: 1, replay: replay, config: "routing: {speculate: 0}\n"})
			first := []message{{"user", prose("kept", 200)}}
			b.chat(first...)
			b.until("events arrive", func() bool { return b.metric("kvlane_index_blocks", `tier="device"`) > 10 })
			if err := b.engines[0].SetFaults(enginesim.Faults{DropBatches: 1}); err != nil {
				t.Fatal(err)
			}
			lost := []message{{"user", prose("lost", 200)}}
			b.chat(lost...)
			b.chat(message{"user", prose("after", 200)}) // its batch reveals the gap
			b.until("the gap is seen", func() bool { return b.metric("kvlane_feed_gaps_total") > 0 })
			b.until("the feed is live again", func() bool { return b.metric("kvlane_feed_state", `state="live"`) == 1 })
			if replay {
				b.until("the lost batch was fetched", func() bool {
					r := b.chat(lost...)
					return r.matched > 100 && r.matched == r.answer.Usage.Details.Cached
				})
				b.sound()
				return
			}
			// Not credited, because it may be gone: in fact the engine still has it.
			if r := b.chat(first...); r.matched != 0 || r.answer.Usage.Details.Cached == 0 {
				t.Errorf("after a gap without replay: %d tokens matched, the engine has %d", r.matched, r.answer.Usage.Details.Cached)
			}
			b.until("the rank fills again", func() bool {
				r := b.chat(message{"user", prose("fresh", 200)})
				return r.matched > 0 && r.matched == r.answer.Usage.Details.Cached
			})
			b.sound()
		})
	}
}

func TestASilentFeedIsNoticed(t *testing.T) {
	b := newBed(t, shape{engines: 1, ranks: 1, engine: func(_ int, o *enginesim.Options) { o.Faults.StopEvents = true }})
	for i := range 20 {
		b.chat(message{"user", prose(fmt.Sprint(i), 100)})
	}
	b.until("the feed is stale", func() bool { return b.metric("kvlane_feed_state", `state="stale"`) == 1 })
	b.sound()
}

func TestAnEngineThatRestarts(t *testing.T) {
	b := newBed(t, shape{engines: 1, ranks: 2, replay: true})
	if r := turnTwice(b, "before"); r.matched == 0 {
		t.Fatal("nothing matched before the restart")
	}
	b.engines[0].Restart()
	b.until("the index forgot", func() bool {
		r := b.chat(message{"system", prose("before", 100)}, message{"user", "Where?"})
		return r.matched == r.answer.Usage.Details.Cached
	})
	if r := turnTwice(b, "again"); r.matched == 0 || r.matched != r.answer.Usage.Details.Cached {
		t.Errorf("after the restart: %d matched, %d cached", r.matched, r.answer.Usage.Details.Cached)
	}
	b.sound()
}

// Old tools use HTTP/1.0, some without a Host.
func TestHTTP10(t *testing.T) {
	b := newBed(t, shape{engines: 1, ranks: 1})
	conn, err := net.Dial("tcp", b.ingress)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	body := b.remember([]byte(`{"model":"demo","prompt":"one two three","max_tokens":2}`))
	fmt.Fprintf(conn, "POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s", len(body), body)
	answer, err := io.ReadAll(conn)
	if err != nil || !bytes.HasPrefix(answer, []byte("HTTP/1.0 200 OK\r\n")) && !bytes.HasPrefix(answer, []byte("HTTP/1.1 200 OK\r\n")) || !bytes.Contains(answer, []byte(`"usage"`)) {
		t.Errorf("%v: %s", err, answer)
	}
	b.sound()
}

func TestFailClosedWithoutHostages(t *testing.T) {
	b := newBed(t, shape{envoy: ", fail_closed: true", engine: slow(5 * time.Millisecond)})
	if r := turnTwice(b, "closed"); r.matched == 0 {
		t.Error("nothing matched")
	}
	b.until("nothing runs", func() bool { return b.metric("kvlane_active_requests") == 0 })
	running := make(chan error, 1)
	go func() {
		r, err := b.send("/v1/chat/completions", []byte(`{"model":"demo","stream":true,"max_tokens":200,"messages":[{"role":"user","content":"x"}]}`))
		if err == nil && !bytes.Contains(r.body, []byte("[DONE]")) {
			err = fmt.Errorf("status %d: %s", r.status, r.body)
		}
		running <- err
	}()
	b.until("it runs", func() bool { return b.metric("kvlane_active_requests") == 1 })
	b.stopKvlane(syscall.SIGKILL)
	if r := b.post("/v1/chat/completions", chatBody(message{"user", "x"})); r.status != http.StatusServiceUnavailable {
		t.Errorf("without a pick: status %d", r.status)
	}
	if err := <-running; err != nil {
		t.Errorf("the running answer: %v", err)
	}
	b.startKvlane()
	b.sound()
}

func Test200ConcurrentStreams(t *testing.T) {
	b := newBed(t, shape{engine: slow(2 * time.Millisecond)})
	var wg sync.WaitGroup
	var bad atomic.Int64
	for i := range 200 {
		wg.Go(func() {
			r, err := b.send("/v1/chat/completions", []byte(`{"model":"demo","stream":true,"max_tokens":20,"messages":[{"role":"user","content":"`+prose(fmt.Sprint(i), 200)+`"}]}`))
			if err != nil || r.status != http.StatusOK || !bytes.Contains(r.body, []byte("[DONE]")) {
				bad.Add(1)
			}
		})
	}
	wg.Wait()
	if bad.Load() > 0 {
		t.Errorf("%d of 200 failed", bad.Load())
	}
	// The load is even over the targets.
	least, most := 1e9, 0.0
	for _, w := range []string{"e0", "e1"} {
		for _, r := range []string{"0", "1"} {
			n := b.metric("kvlane_picks_total", `worker="`+w+`"`, `rank="`+r+`"`)
			least, most = min(least, n), max(most, n)
		}
	}
	if most > 1.5*least {
		t.Errorf("picks between %v and %v a target", least, most)
	}
	b.sound()
}

// A changed configuration is taken under load, with models that come and go: no request is lost, and the next explanation
// shows the new weight.
func TestReloadUnderLoad(t *testing.T) {
	b := newBed(t, shape{ranks: 1, config: "routing: {policy: {cost: {miss: 5}}}\n"})
	stop := make(chan struct{})
	var load sync.WaitGroup
	var sent atomic.Int64
	load.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				b.chat(message{"user", prose("load", 50)})
				sent.Add(1)
			}
		}
	})
	text := b.read("kvlane.yaml")
	const model, more = "models:\n- {name: " + modelName + ",", "models:\n- {name: more, tokenizer: \"builtin:qwen3\"}\n- {name: " + modelName + ","
	without := regexp.MustCompile(`(?m)^- \{name: `+modelName+`,.*\n`).ReplaceAllString(strings.Replace(text, model, more, 1), "")
	for i, next := range []string{
		strings.Replace(text, "miss: 5", "miss: 7", 1),
		strings.Replace(text, model, more, 1),
		without,
		strings.Replace(text, "miss: 5", "miss: 9", 1), // and the first model alone again
	} {
		if err := os.WriteFile(b.file("kvlane.yaml"), []byte(next), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := b.kvlane.Process.Signal(syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		b.until("the configuration is taken", func() bool { return b.metric("kvlane_config_generation") == float64(i+2) })
		before := sent.Load()
		b.until("requests go on", func() bool { return sent.Load() > before+3 })
	}
	close(stop)
	load.Wait()
	if got, want := b.metric("kvlane_requests_total", `outcome="routed"`), float64(sent.Load()); got != want {
		t.Errorf("got %v routed requests, want all %v", got, want)
	}
	resp, err := http.Get("http://" + b.admin + "/debug/config")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if shown, err := io.ReadAll(resp.Body); err != nil || !strings.Contains(string(shown), "miss: 9.0") {
		t.Errorf("got %s, %v, want the new weight", shown, err)
	}
	b.sound()
}

// Trailers end a body without an end-of-stream mark on any data message.
func TestClientTrailers(t *testing.T) {
	for _, mode := range []string{"BUFFERED", "FULL_DUPLEX_STREAMED"} {
		t.Run(mode, func(t *testing.T) {
			b := newBed(t, shape{envoy: ", request_body: " + mode})
			var plain http.Protocols
			plain.SetUnencryptedHTTP2(true)
			h2 := &http.Client{Transport: &http.Transport{Protocols: &plain}}
			defer h2.CloseIdleConnections()
			body := b.remember(chatBody(message{"user", prose("trailers", 5000)}))
			req, err := http.NewRequest(http.MethodPost, "http://"+b.ingress+"/v1/chat/completions", io.NopCloser(bytes.NewReader(body)))
			if err != nil {
				t.Fatal(err)
			}
			req.ContentLength = -1
			req.Trailer = http.Header{"X-Checksum": {"1"}}
			resp, err := h2.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			text, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if resp.StatusCode != http.StatusOK || resp.Header.Get("X-Kvlane-Target") == "" {
				t.Fatalf("status %d: %s", resp.StatusCode, text)
			}
			b.intact(&reply{header: resp.Header}, body)
			b.sound()
		})
	}
}
