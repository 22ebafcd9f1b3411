package e2e

import (
	"encoding/json"
	"flag"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/enginesim"
)

var soak = flag.Duration("soak", 0, "let TestSoak run for this long, e.g. 1h")

// TestSoak runs mixed traffic at the capacity of the machine and fails if anything grows:
// split and unsplit prompts, short and long, streamed or not, clients that leave, and
// engines that evict all the time.
func TestSoak(t *testing.T) {
	if *soak == 0 {
		t.Skip("runs with -soak only: make soak")
	}
	const clients, samples = 12, 60
	var nixl pair
	for _, p := range pairs() {
		if p.connector == "nixl" {
			nixl = p
		}
	}
	nixl.rules = "mode: threshold, threshold: 64"
	// The tables of the router are small, so that they are full early.
	nixl.shape = shape{replay: true, stall: "5s", routing: ", max_conversations: 2000, max_prefix_blocks: 20000", engine: func(_ int, o *enginesim.Options) {
		o.Blocks, o.MaxModelLen = 1200, 16_000
		o.Time = enginesim.TimeModel{A: 500 * time.Microsecond, Scale: 1, Budget: 8192, MaxSeqs: 256}
	}}
	b := faultsBed(t, nixl)
	pid := b.kvlane.Process.Pid
	open := descriptors(t, pid)
	l := b.load(clients / 2)
	l.more(1, true)
	begin := time.Now()
	done := make(chan struct{})
	var others sync.WaitGroup
	unique := func(c int, each func(n int, text string) error) {
		others.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-done:
					return
				default:
				}
				tokens := 20 + n*37%900
				if n%50 == 49 {
					tokens = 8000
				}
				if err := each(n, prose(fmt.Sprint("unique ", c, " ", n), tokens)); err != nil {
					t.Errorf("client %d, request %d: %v", c, n, err)
					return
				}
			}
		})
	}
	for c := range clients / 3 {
		unique(c, func(n int, text string) error {
			body, err := json.Marshal(map[string]any{"model": modelName, "stream": n%2 == 0, "max_tokens": 8, "prompt": text})
			if err != nil {
				return err
			}
			r, _, err := exchange(l.http, "http://"+b.ingress+"/v1/completions", body)
			if err == nil && r.status != http.StatusOK {
				err = fmt.Errorf("status %d: %.200s", r.status, r.body)
			}
			return err
		})
	}
	for c := range clients / 6 {
		unique(clients+c, func(n int, _ string) error {
			return b.depart(&l.prompts[n%len(l.prompts)], 1, time.Duration(n%4)*5*time.Millisecond, n%3 == 0)
		})
	}
	var series [len(soakSeries)][]float64
	for i := range samples {
		time.Sleep(*soak / samples)
		heap := float64(b.envoyHeap()) / (1 << 20)
		now := [len(soakSeries)]float64{float64(resident(t, pid)) / (1 << 20), b.metric("go_memstats_heap_inuse_bytes") / (1 << 20),
			b.metric("go_goroutines"), float64(descriptors(t, pid)), b.metric("kvlane_reservations"), b.metric("kvlane_index_bytes") / (1 << 20),
			heap, float64(resident(t, b.envoy.PID())) / (1 << 20), float64(descriptors(t, b.envoy.PID()))}
		for k, v := range now {
			series[k] = append(series[k], v)
		}
		if i%(samples/12) == 0 {
			t.Logf("%6s %s: %.0f", time.Since(begin).Round(time.Second), soakNames(), now)
		}
	}
	close(done)
	others.Wait()
	o := l.end()
	blocks := b.metric("kvlane_index_stored_blocks_total")
	legs := b.metric("kvlane_prefill_legs_total")
	t.Logf("%s: %.0f requests decided, %.0f prefill legs, %.0f blocks stored by events; of %d compared answers %d were wrong; failed %v; longest stall %v",
		time.Since(begin).Round(time.Second), b.metric("kvlane_requests_total"), legs, blocks, o.Served, o.Wrong, o.Failed, o.Stall)
	if o.Wrong > 0 || o.failed() > 0 {
		t.Errorf("got %d wrong answers and failures %v, want none", o.Wrong, o.Failed)
	}
	for k, s := range soakSeries {
		mean, growth := trend(series[k][samples/3:])
		t.Logf("%-28s mean %8.1f, grew by %6.1f over the last two thirds", s.name, mean, growth)
		if most := mean*0.05 + s.slack; growth > most {
			t.Errorf("%s: got a growth of %.1f over the last two thirds, want at most %.1f", s.name, growth, most)
		}
	}
	b.quiet()
	if n := descriptors(t, pid); n > open+16 {
		t.Errorf("got %d descriptors at the end, want about %d", n, open)
	}
}

// soakSeries are the figures that must not grow, with the growth that is noise in any case.
var soakSeries = [...]struct {
	name  string
	slack float64
}{
	{"Kvlane's memory MiB", 4}, {"its heap MiB", 4}, {"goroutines", 20}, {"descriptors", 4}, {"reservations", 6}, {"index MiB", 1},
	{"Envoy's heap MiB", 2}, {"its memory MiB", 4}, {"its descriptors", 10},
}

func soakNames() (names []string) {
	for _, s := range soakSeries {
		names = append(names, s.name)
	}
	return names
}

// trend returns the mean of a series, and how much its line of least squares rises from the
// first to the last sample.
func trend(v []float64) (mean, growth float64) {
	n := float64(len(v))
	for _, y := range v {
		mean += y / n
	}
	var xy, xx float64
	for i, y := range v {
		x := float64(i) - (n-1)/2
		xy += x * (y - mean)
		xx += x * x
	}
	return mean, xy / xx * (n - 1)
}

func TestTrend(t *testing.T) {
	if mean, growth := trend([]float64{5, 7, 5, 7, 5}); mean != 5.8 || growth > 0.01 {
		t.Errorf("got mean %v, growth %v of a flat series, want 5.8, 0", mean, growth)
	}
	if _, growth := trend([]float64{1, 2, 3, 4, 5}); growth < 3.99 || growth > 4.01 {
		t.Errorf("got growth %v, want 4", growth)
	}
}
