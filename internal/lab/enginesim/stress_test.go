package enginesim

import (
	"context"
	"encoding/json"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// Many requests over few blocks, some of whose clients leave, with a reset in between: nothing stays behind, and every
// answer that came is the right one.
func TestNothingStaysBehind(t *testing.T) {
	for _, engine := range []EngineKind{VLLM, SGLang} {
		e := start(t, Options{Engine: engine, Ranks: 2, BlockSize: 4, Blocks: 60, MaxModelLen: 200, EventsEndpoint: "tcp://127.0.0.1:0",
			Time: TimeModel{A: 100 * time.Microsecond, Budget: 32, MaxSeqs: 6, Scale: 1}})
		var wg sync.WaitGroup
		work := make(chan int)
		var mu sync.Mutex
		texts := map[string]string{}
		for range 16 {
			wg.Go(func() {
				for i := range work {
					r := rand.New(rand.NewPCG(7, uint64(i)))
					ctx, cancel := context.WithCancel(context.Background())
					if i%3 == 0 {
						time.AfterFunc(time.Duration(r.IntN(3000))*time.Microsecond, cancel)
					}
					raw, _ := json.Marshal(m{"prompt": words([]string{"Alpha", "Beta", "Gamma"}[i%3], 10+r.IntN(4)*20), "max_tokens": 1 + r.IntN(3)*10, "n": 1 + i%2})
					req, _ := http.NewRequestWithContext(ctx, http.MethodPost, e.URL()+"/v1/completions", strings.NewReader(string(raw)))
					if res, err := http.DefaultClient.Do(req); err == nil {
						answer, err := io.ReadAll(res.Body)
						_ = res.Body.Close()
						var body struct {
							Choices []json.RawMessage `json:"choices"`
						}
						if err == nil && json.Unmarshal(answer, &body) == nil && len(body.Choices) > 0 {
							mu.Lock()
							if old, ok := texts[string(raw)]; ok && old != string(body.Choices[0]) {
								t.Errorf("two answers to one request: %s, %s", old, body.Choices[0])
							}
							texts[string(raw)] = string(body.Choices[0])
							mu.Unlock()
						}
					}
					cancel()
				}
			})
		}
		for i := range 300 {
			if i == 150 {
				post(t, e.URL()+map[EngineKind]string{VLLM: "/reset_prefix_cache?reset_running_requests=true", SGLang: "/flush_cache"}[engine], "")
			}
			work <- i
		}
		close(work)
		wg.Wait()
		for i := range e.ranks {
			eventually(t, "an idle rank", func() bool {
				st := e.Stats().Ranks[i]
				return st.Running+st.Waiting+st.BlocksUsed == 0 && st.Requests == st.Finished+st.Aborted
			})
		}
		if len(texts) < 10 {
			t.Errorf("only %d answers", len(texts))
		}
	}
}

// A client can be gone before its request is queued: the abort comes first then, and the sequence must not run.
func TestAbortBeforeSubmit(t *testing.T) {
	e := start(t, Options{Engine: SGLang, BlockSize: 4, Blocks: 60, MaxModelLen: 200})
	r := e.ranks[0]
	gone := &sequence{prompt: 4, ids: []int32{1, 2, 3, 4}, maxTokens: 3, out: make(chan token, 4)}
	r.abort(gone)
	r.submit(gone)
	post(t, e.URL()+"/v1/completions", `{"prompt": "Alpha beta", "max_tokens": 5}`)
	for tok := range gone.out {
		if tok.finish != "abort" {
			t.Errorf("an aborted sequence made token %+v", tok)
		}
	}
	if st := e.Stats().Ranks[0]; st.Requests != st.Finished+st.Aborted || st.Running+st.Waiting != 0 {
		t.Errorf("stats %+v", st)
	}
}
