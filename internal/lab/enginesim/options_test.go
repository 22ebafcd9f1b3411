package enginesim

import (
	"context"
	"flag"
	"io"
	"math"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"
)

func TestFlags(t *testing.T) {
	var o Options
	f := flag.NewFlagSet("engine-sim", flag.ContinueOnError)
	o.BindFlags(f)
	err := f.Parse(strings.Fields("-engine sglang -ranks 2 -listen 127.0.0.1:0 -events tcp://127.0.0.1:0 -lora a,b -role prefill -time-model d70 -step-base 1ms -time-scale 0"))
	if err != nil {
		t.Fatal(err)
	}
	o.Tokenizer = qwenTokenizer(t)
	e, err := Start(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	if e.opts.Engine != SGLang || len(e.opts.LoRA) != 2 || e.opts.Connector != "bootstrap" || e.BootstrapAddr() == "" || e.EventsEndpoint(1) == e.EventsEndpoint(0) {
		t.Errorf("%+v", e.opts)
	}
}

func TestBadOptions(t *testing.T) {
	for name, o := range map[string]Options{
		"engine":      {Engine: "other"},
		"role":        {Role: "other"},
		"connector":   {Connector: "other"},
		"hash":        {HashAlgo: "md5"},
		"blocks":      {Blocks: 1},
		"length":      {Blocks: 4, MaxModelLen: 1000},
		"endpoint":    {EventsEndpoint: "udp://x"},
		"port":        {EventsEndpoint: "tcp://127.0.0.1:x"},
		"replay":      {EventsEndpoint: "tcp://127.0.0.1:0", ReplayEndpoint: "tcp://nowhere"},
		"listen":      {Listen: "256.0.0.1:1"},
		"listen rank": {Listen: "x", PortPerRank: true},
	} {
		o.Tokenizer = qwenTokenizer(t)
		if e, err := Start(context.Background(), o); err == nil {
			e.Close()
			t.Errorf("%s: started", name)
		}
	}
	if _, err := Start(context.Background(), Options{}); err == nil {
		t.Error("started without a tokenizer")
	}
	if _, err := Start(context.Background(), Options{TokenizerFS: os.DirFS(t.TempDir())}); err == nil {
		t.Error("started with an empty tokenizer folder")
	}
}

// TestNumbersOutOfBounds: each is refused with the flag, the bounds and what was given, before anything is allocated.
func TestNumbersOutOfBounds(t *testing.T) {
	for _, arg := range []string{"-ranks=0", "-ranks=70000", "-ranks=-1", "-ranks=x", "-block-size=0", "-block-size=100000000", "-blocks=1", "-blocks=1000000000",
		"-start-rank=-1", "-replay-steps=0", "-step-tokens=0", "-max-seqs=0", "-output-tokens=0"} {
		var o Options
		f := flag.NewFlagSet("engine-sim", flag.ContinueOnError)
		f.SetOutput(io.Discard)
		o.BindFlags(f)
		err := f.Parse([]string{arg})
		name, value, _ := strings.Cut(arg, "=")
		if err == nil || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), value) || !strings.Contains(err.Error(), "want a number from ") {
			t.Errorf("%s: %v", arg, err)
		}
	}
	for name, o := range map[string]Options{
		"70000 ranks: want 1 to 256":                {Ranks: 70000},
		"max model len -5: want a number":           {MaxModelLen: -5},
		"the times of a step":                       {Time: TimeModel{P: -time.Second}},
		"time scale -1: want 0 to":                  {Time: TimeModel{Scale: -1}},
		"time scale NaN: want 0 to":                 {Time: TimeModel{Scale: math.NaN()}},
		"time scale +Inf: want 0 to":                {Time: TimeModel{Scale: math.Inf(1)}},
		"kv lease -1s: want a time":                 {KVLease: -time.Second},
		"block size -1: want 1 to 65536":            {BlockSize: -1},
		"4194304 blocks on each of 256 ranks: want": {Ranks: 256, Blocks: maxBlocks},
	} {
		o.Tokenizer = qwenTokenizer(t)
		if e, err := Start(context.Background(), o); err == nil {
			e.Close()
			t.Errorf("%s: started", name)
		} else if !strings.Contains(err.Error(), name) {
			t.Errorf("%v, want %s", err, name)
		}
	}
	stopped, cancel := context.WithCancel(context.Background())
	cancel()
	if e, err := Start(stopped, Options{Tokenizer: qwenTokenizer(t)}); err == nil {
		e.Close()
		t.Error("started after its end")
	}
}

// TestManyAnswers: room for all answers is made at once, so their number and length are bounded, and a client that goes ends them.
func TestManyAnswers(t *testing.T) {
	e := start(t, Options{Time: TimeModel{B: time.Hour, Scale: 1}})
	for body, want := range map[string]string{
		`{"prompt":"a b","n":1000000000}`:                             "n must be at most 16384, got 1000000000",
		`{"prompt":"a b","n":0}`:                                      "n must be at least 1, got 0",
		`{"prompt":"a b","n":16384,"max_tokens":60000}`:               "takes 1048576 tokens in one request",
		`{"prompt":["a","b","c"],"n":100,"max_tokens":10000}`:         "takes 1048576 tokens in one request",
		`{"prompt":"a","n":9223372036854775807,"max_tokens":1000000}`: "n must be at most 16384",
	} {
		res, err := http.Post(e.URL()+"/v1/completions", "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(res.Body)
		if err != nil || res.Body.Close() != nil || res.StatusCode != http.StatusBadRequest || !strings.Contains(string(text), want) {
			t.Errorf("%s: %d %s %v, want %s", body, res.StatusCode, text, err, want)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.URL()+"/v1/completions", strings.NewReader(`{"prompt":"a b","n":1000,"max_tokens":100,"stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		res, err := http.DefaultClient.Do(req)
		if err == nil {
			_, err = io.Copy(io.Discard, res.Body)
			_ = res.Body.Close()
		}
		ended <- err
	}()
	for waiting, running := 0, 0; waiting+running < 1000; waiting, running = e.ranks[0].depth() {
		time.Sleep(time.Millisecond)
	}
	cancel()
	if err := <-ended; err == nil {
		t.Error("an answer within an hour's step")
	}
	for waiting, running := 1, 1; waiting+running > 0; waiting, running = e.ranks[0].depth() {
		time.Sleep(time.Millisecond)
	}
}

// An engine that is told to connect finds a subscriber that binds, also one that comes late.
func TestEventsConnect(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	_ = l.Close()
	e := start(t, Options{EventsEndpoint: "tcp://" + addr, EventsConnect: true, BlockSize: 4})
	time.Sleep(5 * time.Millisecond)
	if l, err = net.Listen("tcp", addr); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	z, err := zmtpHandshake(c, "SUB")
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	if err := z.send(0, []byte{1}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "subscribed", func() bool { return e.Subscribers(0) == 1 })
	post(t, e.URL()+"/v1/completions", m{"prompt": words("One", 12), "max_tokens": 1})
	frames, err := z.message()
	if err != nil || len(frames) != 3 {
		t.Fatalf("%v %d frames", err, len(frames))
	}
	// The command form of a subscription can be taken back.
	if err := z.send(zmtpCommand, []byte("\x06CANCEL")); err != nil {
		t.Fatal(err)
	}
	eventually(t, "unsubscribed", func() bool { return e.Subscribers(0) == 0 })
	if err := z.send(zmtpCommand, []byte("\x09SUBSCRIBE")); err != nil {
		t.Fatal(err)
	}
	eventually(t, "subscribed again", func() bool { return e.Subscribers(0) == 1 })
}

func TestAdaptersSaltsAndReports(t *testing.T) {
	e := start(t, Options{BlockSize: 4, LoRA: []string{"alpha", "beta"}, EventsEndpoint: "tcp://127.0.0.1:0"})
	s := subscribe(t, e, 0)
	url := e.URL() + "/v1/completions"
	stored := func() map[string]any {
		t.Helper()
		_, batch := receive(t, s)
		return batch[1].([]any)[0].(map[string]any)
	}
	prompt := words("One", 9)
	post(t, url, m{"model": "beta", "prompt": prompt, "max_tokens": 1, "cache_salt": "t"})
	ev := stored()
	keys := ev["extra_keys"].([]any)
	if ev["lora_name"] != "beta" || ev["lora_id"] != int64(2) || len(keys[0].([]any)) != 2 || len(keys[1].([]any)) != 1 {
		t.Errorf("%v", ev)
	}
	for _, body := range []m{{"model": "alpha", "cache_salt": "t"}, {"model": "beta"}, {"model": "demo"}} {
		body["prompt"], body["max_tokens"] = prompt, 1
		if a := post(t, url, body); a.status != 200 || a.cached() != 0 {
			t.Errorf("%v shares blocks: %s", body, a.raw)
		}
		stored()
	}
	if a := post(t, url, m{"prompt": prompt, "max_tokens": 1, "session_id": "s", "vllm_xargs": m{"kv_cache_report_mode": "full"}}); a.cached() != 8 {
		t.Errorf("cached %d", a.cached())
	}
	if ev := stored(); len(ev["block_hashes"].([]any)) != 2 || ev["session_id"] != "s" {
		t.Errorf("full report: %v", ev)
	}
}

// A prompt of 100k tokens is one of the end-to-end cases.
func TestLongPrompt(t *testing.T) {
	e := start(t, Options{Blocks: 8192})
	var b strings.Builder
	for i := range 100_000 {
		b.WriteString([]string{" river", " stone", " of", " water", " 7", "\n", " Köln"}[i*i%7])
	}
	began := time.Now()
	a := post(t, e.URL()+"/v1/completions", m{"prompt": b.String(), "max_tokens": 2})
	t.Logf("%d tokens in %v", a.body.Usage.Prompt, time.Since(began))
	if a.status != 200 || a.body.Usage.Prompt < 90_000 {
		t.Fatalf("%d %.200s", a.status, a.raw)
	}
	if a := post(t, e.URL()+"/v1/completions", m{"prompt": b.String(), "max_tokens": 2}); a.cached() < 90_000 {
		t.Errorf("cached %d", a.cached())
	}
}
