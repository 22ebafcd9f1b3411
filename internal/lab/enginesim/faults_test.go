package enginesim

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// eventually waits for a condition that other goroutines bring about.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for range 10_000 {
		if ok() {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatalf("never: %s", what)
}

func kinds(batch []any) string {
	var out []string
	for _, ev := range batch[1].([]any) {
		out = append(out, ev.(map[string]any)["type"].(string))
	}
	return strings.Join(out, " ")
}

func TestResetIsAnnouncedLate(t *testing.T) {
	e := start(t, Options{BlockSize: 4, EventsEndpoint: "tcp://127.0.0.1:0"})
	s := subscribe(t, e, 0)
	body := m{"prompt": words("One", 12), "max_tokens": 1}
	post(t, e.URL()+"/v1/completions", body)
	if _, batch := receive(t, s); kinds(batch) != "BlockStored" {
		t.Fatalf("got %s", kinds(batch))
	}
	post(t, e.URL()+"/reset_prefix_cache", "")
	post(t, e.URL()+"/reset_prefix_cache", "")
	if n := e.Stats().Ranks[0].Sequence; n != 1 {
		t.Fatalf("an idle rank announced its reset: %d batches", n)
	}
	if a := post(t, e.URL()+"/v1/completions", body); a.cached() != 0 {
		t.Errorf("cached after a reset: %d", a.cached())
	}
	if _, batch := receive(t, s); kinds(batch) != "AllBlocksCleared AllBlocksCleared BlockStored" {
		t.Fatalf("got %s", kinds(batch))
	}
}

func TestResetOfABusyRank(t *testing.T) {
	e := start(t, Options{Ranks: 2, BlockSize: 4, Time: TimeModel{A: 2 * time.Millisecond, Scale: 1}})
	url := e.URL() + "/v1/completions"
	post(t, url, m{"prompt": words("Idle", 12), "max_tokens": 1}, "X-data-parallel-rank", "1")
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	wg.Go(func() {
		req, _ := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(`{"prompt":"Busy river river river river river","max_tokens":5000}`))
		req.Header.Set("X-Data-Parallel-Rank", "0")
		if res, err := http.DefaultClient.Do(req); err == nil {
			_, _ = io.Copy(io.Discard, res.Body)
			_ = res.Body.Close()
		}
	})
	eventually(t, "running", func() bool { return e.Stats().Ranks[0].Running == 1 })
	if a := post(t, e.URL()+"/reset_prefix_cache", ""); !strings.Contains(string(a.raw), "false") {
		t.Errorf("reset of a busy engine: %s", a.raw)
	}
	if n := e.Stats().Ranks[1].BlocksCached; n != 0 {
		t.Errorf("the idle rank kept %d blocks", n)
	}
	if a := post(t, e.URL()+"/reset_prefix_cache?reset_running_requests=true", ""); !strings.Contains(string(a.raw), "true") {
		t.Errorf("forced reset: %s", a.raw)
	}
	cancel()
	wg.Wait()
	eventually(t, "everything is free after the client left", func() bool {
		st := e.Stats().Ranks[0]
		return st.Running+st.Waiting+st.BlocksUsed == 0 && st.Aborted == 1
	})
}

func TestSGLangFlushAndStart(t *testing.T) {
	e := start(t, Options{Engine: SGLang, BlockSize: 4, EventsEndpoint: "tcp://127.0.0.1:0", ReplayEndpoint: "tcp://127.0.0.1:0"})
	s := subscribe(t, e, 0)
	post(t, e.URL()+"/v1/completions", m{"prompt": words("One", 12), "max_tokens": 6})
	for i, want := range []string{"BlockStored", "BlockStored"} { // the prompt, then everything generated
		if seq, batch := receive(t, s); kinds(batch) != want || int(seq) != i+1 {
			t.Errorf("batch %d: %s", seq, kinds(batch))
		}
	}
	if a := post(t, e.URL()+"/flush_cache", ""); a.status != 200 {
		t.Errorf("flush: %d", a.status)
	}
	if _, batch := receive(t, s); kinds(batch) != "AllBlocksCleared" {
		t.Errorf("got %s", kinds(batch))
	}
	if got := replay(t, e, nil, []byte{0}); len(got) != 5 {
		t.Errorf("%d replies; the first batch is the announcement of the start", len(got))
	}
}

func TestTensorRTEvents(t *testing.T) {
	e := start(t, Options{Engine: TRTLLM, BlockSize: 4, Blocks: 20, Ranks: 2})
	type event struct {
		ID   int `json:"event_id"`
		Rank int `json:"attention_dp_rank"`
		Data struct {
			Type   string        `json:"type"`
			Hashes []json.Number `json:"block_hashes"`
			Blocks []struct {
				Hash   json.Number `json:"block_hash"`
				Tokens []struct {
					ID int `json:"token_id"`
				} `json:"tokens"`
				Salt *string `json:"cache_salt"`
			} `json:"blocks"`
		} `json:"data"`
	}
	drain := func() (out []event) {
		a := post(t, e.URL()+"/kv_cache_events", "")
		if err := json.Unmarshal(a.raw, &out); err != nil {
			t.Fatalf("%v: %s", err, a.raw)
		}
		return out
	}
	if got := drain(); len(got) != 2 || got[0].Data.Type != "created" || got[1].Rank != 1 {
		t.Fatalf("at the start: %+v", got)
	}
	held := map[string]bool{}
	for i := range 12 {
		post(t, e.URL()+"/v1/completions", m{"prompt": words(fmt.Sprint("N", i), 20), "max_tokens": 2, "cache_salt": "s"})
	}
	next := map[int]int{0: 1, 1: 1}
	removed := 0
	for _, ev := range drain() {
		if ev.ID != next[ev.Rank] {
			t.Fatalf("event id %d of rank %d, want %d", ev.ID, ev.Rank, next[ev.Rank])
		}
		next[ev.Rank]++
		for _, b := range ev.Data.Blocks {
			held[string(b.Hash)] = true
			if len(b.Tokens) != 4 || b.Salt == nil {
				t.Errorf("block %+v", b)
			}
		}
		for _, h := range ev.Data.Hashes {
			if !held[string(h)] {
				t.Errorf("removed %s, which is not held", h)
			}
			delete(held, string(h))
			removed++
		}
	}
	if st := e.Stats(); removed == 0 || len(held) != st.Ranks[0].BlocksCached+st.Ranks[1].BlocksCached {
		t.Errorf("%d removed; events say %d held, engine %+v", removed, len(held), st.Ranks)
	}
	if got := drain(); len(got) != 0 {
		t.Errorf("not drained: %+v", got)
	}
	post(t, e.SideURL()+"/sim/reset", "")
	n := 0
	for _, ev := range drain() {
		n += len(ev.Data.Hashes)
	}
	if n != len(held) {
		t.Errorf("a reset removed %d of %d", n, len(held))
	}
}

func TestFaults(t *testing.T) {
	e := start(t, Options{BlockSize: 4, EventsEndpoint: "tcp://127.0.0.1:0", ReplayEndpoint: "tcp://127.0.0.1:0"})
	s := subscribe(t, e, 0)
	n := 0
	send := func() *answer {
		n++
		a, err := tryPost(e.URL()+"/v1/completions", m{"prompt": words(string(rune('A'+n)), 9), "max_tokens": 3})
		if err != nil {
			return &answer{}
		}
		return a
	}
	set := func(f Faults) {
		t.Helper()
		if a := post(t, e.SideURL()+"/sim/faults", f); a.status != 200 {
			t.Fatalf("%d %s", a.status, a.raw)
		}
	}
	want := func(seq byte) {
		t.Helper()
		if got, _ := receive(t, s); got != seq {
			t.Errorf("sequence %d, want %d", got, seq)
		}
	}
	send()
	want(0)
	set(Faults{DropBatches: 1})
	send() // 1 is lost
	send()
	want(2)
	if got := replay(t, e, nil, []byte{0}); len(got) != 4 {
		t.Errorf("a dropped batch is missing from the replay: %d replies", len(got))
	}
	set(Faults{DropBatches: 1, ForgetDropped: true})
	send() // 3 is lost for good
	if got := replay(t, e, nil, []byte{0}); len(got) != 4 {
		t.Errorf("a forgotten batch is in the replay: %d replies", len(got))
	}
	set(Faults{StopEvents: true})
	send()
	set(Faults{WrongBlockSize: 99})
	send()
	seq, batch := receive(t, s)
	if ev := batch[1].([]any)[0].(map[string]any); seq != 4 || ev["block_size"] != int64(99) {
		t.Errorf("sequence %d, block size %v", seq, ev["block_size"])
	}
	set(Faults{EventDelayMS: 5})
	send()
	send()
	want(5)
	want(6)
	set(Faults{FailStatus: 503, FailCount: 1})
	if a := send(); a.status != 503 {
		t.Errorf("status %d", a.status)
	}
	if a := send(); a.status != 200 {
		t.Errorf("status %d after the failure", a.status)
	}
	set(Faults{DieAfterTokens: 2})
	if a := send(); a.status == 200 && len(a.raw) > 0 {
		t.Errorf("the answer came: %s", a.raw)
	}
	set(Faults{CachedTokensLie: 7})
	if a := send(); a.cached() != 7 {
		t.Errorf("cached %d", a.cached())
	}
	set(Faults{Unhealthy: true})
	if res, err := http.Get(e.URL() + "/health"); err != nil || res.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("health: %v %v", res, err)
	} else {
		_ = res.Body.Close()
	}
	set(Faults{Refuse: true})
	eventually(t, "refused", func() bool { return send().status == 0 })
	set(Faults{})
	if a := send(); a.status != 200 {
		t.Errorf("status %d after refusing", a.status)
	}
	if a := post(t, e.SideURL()+"/sim/faults", `{"no_such_fault":1}`); a.status != 400 {
		t.Errorf("unknown fault: %d", a.status)
	}
	e.Restart()
	if st := e.Stats().Ranks[0]; st.Sequence != 0 || st.BlocksCached != 0 {
		t.Errorf("after a restart: %+v", st)
	}
	eventually(t, "connections are cut", func() bool { return e.Subscribers(0) == 0 })
	s2 := subscribe(t, e, 0)
	send()
	if got, _ := receive(t, s2); got != 0 {
		t.Errorf("first sequence after a restart: %d", got)
	}
}

// One slot: requests wait in order, metrics tell, and ranks that are coupled step together.
func TestQueueAndMetrics(t *testing.T) {
	e := start(t, Options{Ranks: 2, CoupledRanks: true, BlockSize: 4, Time: TimeModel{A: time.Millisecond, MaxSeqs: 1, Scale: 1}})
	var wg sync.WaitGroup
	for i := range 3 {
		wg.Go(func() {
			_, _ = tryPost(e.URL()+"/v1/completions", m{"prompt": words(fmt.Sprint("Q", i), 9), "max_tokens": 30}, "X-data-parallel-rank", "0")
		})
	}
	eventually(t, "one runs, two wait", func() bool { st := e.Stats().Ranks[0]; return st.Running == 1 && st.Waiting == 2 })
	res, err := http.Get(e.URL() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	text, _ := io.ReadAll(res.Body)
	_ = res.Body.Close()
	for _, want := range []string{`vllm:num_requests_running{engine="0",model_name="demo"} 1`, `vllm:num_requests_running{engine="1",model_name="demo"} 0`,
		`vllm:cache_config_info{engine="1",model_name="demo",block_size="4",num_gpu_blocks="4096"`} {
		if !strings.Contains(string(text), want) {
			t.Errorf("metrics lack %s", want)
		}
	}
	wg.Wait()
	if st := e.Stats().Ranks[0]; st.Finished != 3 || st.BlocksUsed != 0 {
		t.Errorf("%+v", st)
	}
}

func TestPortPerRank(t *testing.T) {
	e := start(t, Options{Ranks: 2, PortPerRank: true, StartRank: 4, EventsEndpoint: "tcp://127.0.0.1:0"})
	if e.AddrOf(0) == e.AddrOf(1) {
		t.Fatal("one port for two ranks")
	}
	post(t, "http://"+e.AddrOf(1)+"/v1/completions", m{"prompt": "hi", "max_tokens": 1}, "X-data-parallel-rank", "0")
	st := e.Stats()
	if st.Ranks[1].Requests != 1 || st.Ranks[1].Rank != 5 {
		t.Errorf("%+v", st.Ranks)
	}
	res, err := http.Get("http://" + e.AddrOf(1) + "/kv_event_sources")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	var sources map[string]struct {
		Endpoint string `json:"endpoint"`
	}
	if err := json.NewDecoder(res.Body).Decode(&sources); err != nil || sources["5"].Endpoint != e.EventsEndpoint(1) {
		t.Errorf("%v %+v", err, sources)
	}
}

func TestTimeModel(t *testing.T) {
	for _, row := range []struct {
		l    load
		want time.Duration
	}{
		{load{}, 10 * time.Millisecond},
		{load{prefill: 8192, quadratic: 8192 * 4096}, 10*time.Millisecond + 8192*50*time.Microsecond + 8192*4096*1300*time.Nanosecond/1000},
		{load{decoding: 10, resident: 100_000}, 10*time.Millisecond + 300*time.Microsecond + 100_000*35*time.Nanosecond},
	} {
		if got := D70.step(row.l); got-row.want > 1 || row.want-got > 1 {
			t.Errorf("%+v: %v, want %v", row.l, got, row.want)
		}
	}
}

// An answer that is held sends what it has, and the rest when the faults change.
func TestHeldAnswer(t *testing.T) {
	e := start(t, Options{BlockSize: 4, Faults: Faults{HoldAfterTokens: 2}})
	resp, err := http.Post(e.URL()+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"Held","max_tokens":4,"stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	event := func() string {
		for lines.Scan() {
			if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
				return data
			}
		}
		t.Fatalf("the answer ended: %v", lines.Err())
		return ""
	}
	event()
	event()
	eventually(t, "the engine to be done with all tokens", func() bool { return e.Stats().Ranks[0].Running == 0 })
	if r := e.Stats().Requests; len(r) != 1 || r[0].Done {
		t.Fatalf("requests are %+v", r)
	}
	if err := e.SetFaults(Faults{}); err != nil {
		t.Fatal(err)
	}
	event()
	event()
	if last := event(); last != "[DONE]" {
		t.Errorf("the fifth event is %s", last)
	}
}

// A client that goes ends a held answer.
func TestHeldAnswerOfAClientThatGoes(t *testing.T) {
	e := start(t, Options{BlockSize: 4, Faults: Faults{HoldAfterTokens: 1}})
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.URL()+"/v1/completions", strings.NewReader(`{"prompt":"Held","max_tokens":4,"stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	cancel()
	eventually(t, "the end of the request", func() bool { r := e.Stats().Requests; return len(r) == 1 && r[0].Done && r[0].Status == 499 })
}
