package decide

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/workers"
)

// BenchmarkFromPrefillAnswerToDecision measures Kvlane's part of the time between the two
// legs of a request of 8,000 tokens: from the prefill engine's answer, over a loopback
// connection, to the decision with the decode leg's body.
func BenchmarkFromPrefillAnswerToDecision(b *testing.B) {
	var answered atomic.Int64
	start := time.Now()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		answered.Store(int64(time.Since(start)))
		_, _ = io.WriteString(w, nixlAnswer)
	}))
	b.Cleanup(srv.Close)
	of := func(name, address, role string, generation uint64) workers.Worker {
		return workers.Worker{Ready: true, Generation: generation,
			Worker: config.Worker{Name: name, Address: address, Engine: "vllm", Role: role, Speed: 1, Models: []string{"demo"}}}
	}
	bench := newBench(b, "disagg: {connector: nixl}\nrouting: {disagg: {mode: threshold, threshold: 0}}\n",
		of("p", srv.Listener.Addr().String(), "prefill", 1), of("d", "10.0.0.9:1", "decode", 2), of("e", "10.0.0.8:1", "decode", 3))
	text := strings.Repeat("the harbour lay quiet under a pale sky while gulls turned above empty boats ", 550)
	gaps := make([]time.Duration, 0, 4096)
	for i := 0; b.Loop(); i++ {
		d, e := bench.ask("/v1/completions", fmt.Sprintf(`{"model":"demo","prompt":"%snumber %d","max_tokens":2}`, text, i))
		gap := time.Since(start) - time.Duration(answered.Load())
		if d.Body == nil || e.Prefill != "p" {
			b.Fatalf("not split: %+v", e)
		}
		if len(gaps) < cap(gaps) {
			gaps = append(gaps, gap)
		}
		end(&d, http.StatusOK)
	}
	slices.Sort(gaps)
	b.ReportMetric(float64(gaps[len(gaps)/2].Microseconds()), "us-p50")
	b.ReportMetric(float64(gaps[len(gaps)*9/10].Microseconds()), "us-p90")
}
