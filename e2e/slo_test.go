package e2e

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

// First tokens come when they are predicted, as Envoy sees them, and a target that no engine meets
// is refused. The engines are slow, so that the machine's own delays matter little; the bound is
// looser than what an idle machine gives.
func TestFirstTokensArePredicted(t *testing.T) {
	const requests = 160
	engine := func(_ int, o *enginesim.Options) {
		o.Time = enginesim.TimeModel{A: 10 * time.Millisecond, P: 500 * time.Microsecond, B: 300 * time.Microsecond, Budget: 2048, MaxSeqs: 64, Scale: 1}
	}
	b := newBed(t, shape{ranks: 1, envoy: ", first_token: true", config: "slo: {unmet: refuse}\n", engine: engine})
	rng := rand.New(rand.NewPCG(1, 1))
	body := func(seed string) []byte {
		return fmt.Appendf(nil, `{"model":"demo","stream":true,"max_tokens":%d,"ignore_eos":true,"prompt":%q}`, 5+rng.IntN(20), prose(seed, 100+rng.IntN(900)))
	}
	var all sync.WaitGroup
	for i := range requests {
		text := body(fmt.Sprint("predicted", i))
		all.Go(func() {
			if r, err := b.send("/v1/completions", text, "x-slo-ttft-ms", "60000"); err != nil || r.status != http.StatusOK {
				t.Errorf("got %v (%v), want 200", r, err)
			}
		})
		time.Sleep(time.Duration(rng.ExpFloat64() * float64(250*time.Millisecond)))
	}
	all.Wait()
	const name = "kvlane_first_token_prediction_ratio"
	within := b.metric(name+"_bucket", `le="1.25"`) - b.metric(name+"_bucket", `le="0.83"`)
	compared := b.metric(name + "_count")
	t.Logf("%.0f of %.0f first tokens within 20 %% of the prediction; mean of observed over predicted %.2f", within, compared, b.metric(name+"_sum")/compared)
	if compared < requests/2 || within < 0.8*compared {
		t.Errorf("got %.0f of %.0f first tokens within 20 %% of the prediction, want at least 80 %% of at least %d", within, compared, requests/2)
	}
	if met := b.metric("kvlane_first_token_targets_total", `result="met"`); met != requests {
		t.Errorf("got %.0f requests that met a target of a minute, want %d", met, requests)
	}
	r := b.post("/v1/completions", body("soon"), "x-slo-ttft-ms", "2")
	if r.status != http.StatusTooManyRequests || r.header.Get("Retry-After") == "" {
		t.Errorf("got %d %s for a target of 2 ms, want 429 with Retry-After", r.status, r.body)
	}
}
