package e2e

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

// Load that engines report is used. One decode engine is busy with requests that did not
// pass through Kvlane; the least loaded one is the other.
func TestLeastLoadedUsesWhatEnginesReport(t *testing.T) {
	for _, busy := range []int{2, 3} {
		t.Run(fmt.Sprintf("e%d is busy", busy), func(t *testing.T) {
			t.Parallel()
			b := newPools(t, pair{connector: "nixl", worker: noSettings, ranks: 1,
				rules: "mode: threshold, threshold: 64}, prefill_preset: round-robin, decode_preset: least-loaded, policy: {",
				shape: shape{engine: func(i int, o *enginesim.Options) {
					if i == busy {
						slow(200*time.Millisecond)(i, o)
					}
				}}}, "")
			ctx, cancel := context.WithCancel(t.Context())
			var others sync.WaitGroup
			for i := range 4 {
				others.Go(func() {
					body := strings.Replace(string(bodyFor("/v1/completions", fmt.Sprint("theirs", i), 20, false)), `"max_tokens":8`, `"max_tokens":4096`, 1)
					req, err := http.NewRequestWithContext(ctx, http.MethodPost, b.engines[busy].URL()+"/v1/completions", strings.NewReader(body))
					if err != nil {
						t.Error(err)
						return
					}
					if resp, err := http.DefaultClient.Do(req); err == nil {
						_, _ = new(bytes.Buffer).ReadFrom(resp.Body)
						resp.Body.Close()
					}
				})
			}
			defer others.Wait()
			defer cancel()
			b.until("the engine has what to do", func() bool { return b.engines[busy].Stats().Ranks[0].Running == 4 })
			n := 0
			b.until("six requests in a row, split and not, go to the other", func() bool {
				for i := range 6 {
					n++
					r := b.post("/v1/completions", bodyFor("/v1/completions", fmt.Sprint("ours", n), 20+180*(i%2), false))
					if r.status != http.StatusOK {
						t.Fatalf("status %d: %s", r.status, r.body)
					}
					if !strings.HasPrefix(r.target, fmt.Sprintf("e%d/", 5-busy)) {
						return false
					}
				}
				return true
			})
		})
	}
}

// An error of the decode engine reaches the client unchanged, whether the request was split
// or not, streamed or not; so does a connection that breaks during the answer.
func TestDecodeErrorsReachTheClientSplitOrNot(t *testing.T) {
	b := newPools(t, pair{connector: "nixl", worker: noSettings, shape: shape{engine: func(_ int, o *enginesim.Options) { o.KVLease = 2 * time.Second }}}, "")
	for _, status := range []int{400, 429, 500} {
		b.fault(enginesim.Faults{FailStatus: status, FailCount: -1}, 2, 3)
		bodies := map[string]bool{}
		for _, tokens := range []int{20, 200} {
			for _, stream := range []bool{false, true} {
				r := b.post("/v1/completions", bodyFor("/v1/completions", fmt.Sprint("error", status, tokens, stream), tokens, stream))
				if r.status != status || !bytes.Contains(r.body, []byte("injected failure")) || !strings.HasPrefix(r.header.Get("Content-Type"), "application/json") {
					t.Errorf("%d tokens, stream=%v: status %d: %s", tokens, stream, r.status, r.body)
				}
				if s := b.legsOf(r.header.Get("X-Request-Id")); (s.prefill != nil) != (tokens == 200) {
					t.Errorf("%d tokens: prefill leg %+v", tokens, s.prefill)
				}
				bodies[string(r.body)] = true
			}
		}
		if len(bodies) != 1 {
			t.Errorf("%d: %v", status, bodies)
		}
	}
	b.fault(enginesim.Faults{DieAfterTokens: 3}, 2, 3)
	for _, tokens := range []int{20, 200} {
		r, err := b.send("/v1/completions", bodyFor("/v1/completions", fmt.Sprint("death", tokens), tokens, true))
		if err == nil && (r.status == http.StatusOK || bytes.Contains(r.body, []byte("[DONE]"))) {
			t.Errorf("%d tokens: a dead answer ended well: status %d: %s", tokens, r.status, r.body)
		}
	}
	b.healed()
	b.until("nothing is reserved", func() bool { return b.metric("kvlane_reservations") == 0 })
}
