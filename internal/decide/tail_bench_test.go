package decide

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/kvindex"
)

// storm applies events to an index, chains of depth blocks stored and then removed block by
// block, as engines do, at perSecond blocks together. It pauses while quiet is set.
func storm(tb testing.TB, x *kvindex.Index, targets, perSecond int, quiet *atomic.Bool) (applied *atomic.Int64) {
	const depth, kept = 32, 64
	applied = new(atomic.Int64)
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	tb.Cleanup(func() { cancel(); wg.Wait() })
	for slot := range targets {
		wg.Go(func() {
			tokens := make([]uint32, depth*x.BlockSize())
			names := make([]kvindex.EngineHash, depth)
			stored := kvindex.Event{Kind: kvindex.Stored, BlockSize: x.BlockSize(), Tokens: tokens, Hashes: names}
			chain := func(n int) {
				for i := range names {
					names[i] = kvindex.EngineHash(uint64(n*depth+i+1) * 0x9e3779b97f4a7c15)
				}
			}
			tick := time.NewTicker(time.Second * time.Duration(2*depth*targets) / time.Duration(perSecond))
			defer tick.Stop()
			for n := 0; ctx.Err() == nil; <-tick.C {
				if quiet.Load() {
					continue
				}
				n++
				tokens[0], tokens[1] = uint32(n), uint32(slot)
				chain(n)
				err := x.Apply(kvindex.Slot(slot), &stored)
				if n > kept {
					chain(n - kept)
					for i := depth - 1; i >= 0 && err == nil; i-- {
						err = x.Apply(kvindex.Slot(slot), &kvindex.Event{Kind: kvindex.Removed, Hashes: names[i : i+1]})
					}
				}
				if err != nil {
					tb.Error(err)
					return
				}
				applied.Add(2 * depth)
			}
		})
	}
	return applied
}

// BenchmarkTail measures the time of single decisions that arrive at a steady rate, in turns
// without events and with 200,000 blocks per second of them; and the same of their part in the
// index alone: lookup and credit for 125 blocks, of which 25 are new. The 99th percentiles are
// medians over the turns, because a machine in use stalls now and then.
func BenchmarkTail(b *testing.B) {
	const targets, perSecond, turns, round, workers = 8, 200_000, 8, 64, 8
	for _, c := range []struct {
		name         string
		tokens, rate int
	}{{"index", 0, 2000}, {"2k", 2000, 500}, {"58k", 58000, 100}} {
		b.Run(c.name, func(b *testing.B) {
			d := newDecider(b, targets)
			do := decisions(b, d, prompts(b, c.tokens*38/10, round))
			if c.tokens == 0 {
				do = indexParts(d.fleet.Index(), targets)
			}
			for i := range round {
				do(i)
			}
			var quiet atomic.Bool
			quiet.Store(true)
			applied := storm(b, d.fleet.Index(), targets, perSecond, &quiet)
			var p50, p99 [2][]time.Duration
			var loud time.Duration
			b.ResetTimer()
			at := round
			for turn := range 2 * turns {
				quiet.Store(turn%2 == 0)
				began := time.Now()
				var wg sync.WaitGroup
				took := make([]time.Duration, max(b.N/turns, 1))
				next := make(chan int, len(took))
				for range workers {
					wg.Go(func() {
						for i := range next {
							took[i] = do(at + i)
						}
					})
				}
				for i := range took {
					next <- i
					time.Sleep(time.Until(began.Add(time.Duration(i+1) * time.Second / time.Duration(c.rate))))
				}
				close(next)
				wg.Wait()
				at += len(took)
				slices.Sort(took)
				p50[turn%2] = append(p50[turn%2], took[len(took)/2])
				p99[turn%2] = append(p99[turn%2], took[len(took)*99/100])
				if turn%2 == 1 {
					loud += time.Since(began)
				}
			}
			b.StopTimer()
			median := func(t []time.Duration) float64 {
				slices.Sort(t)
				return float64(t[len(t)/2].Nanoseconds()) / 1000
			}
			b.ReportMetric(median(p50[0]), "quiet-p50-µs")
			b.ReportMetric(median(p50[1]), "events-p50-µs")
			b.ReportMetric(median(p99[0]), "quiet-p99-µs")
			b.ReportMetric(median(p99[1]), "events-p99-µs")
			b.ReportMetric(median(p99[1])/median(p99[0]), "p99-ratio")
			b.ReportMetric(float64(applied.Load())/loud.Seconds()/1000, "kblocks/s")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// decisions returns a function that makes the decision number i and returns its time.
func decisions(b *testing.B, d *Decider, bodies [][]byte) func(i int) time.Duration {
	return func(i int) time.Duration {
		body := bytes.Clone(bodies[i%len(bodies)])
		copy(body[bytes.Index(body, []byte(numberMark[:4]))+4:], fmt.Sprintf("%08d", i))
		start := time.Now()
		decision := d.Decide(context.Background(), &extproc.Request{ID: "r", Method: "POST", Path: "/v1/chat/completions", Body: body})
		took := time.Since(start)
		if decision.Ticket == nil {
			b.Error(decision.Reject)
			return took
		}
		decision.Ticket.ResponseHeaders(200, decision.Endpoint)
		decision.Ticket.End(time.Now())
		return took
	}
}

// indexParts is decisions for what a decision does in the index.
func indexParts(x *kvindex.Index, targets int) func(i int) time.Duration {
	const known, fresh = 100, 25
	contents := make([]uint64, known+fresh)
	return func(i int) time.Duration {
		contents := slices.Clone(contents)
		contents[known] = uint64(i)
		hashes := x.Hasher().AppendContents(nil, x.Hasher().Seed("demo", "", ""), contents)
		var m kvindex.Matches
		start := time.Now()
		x.Expire(start)
		x.Match(hashes, &m)
		x.Speculate(kvindex.Slot(i%targets), hashes, start)
		return time.Since(start)
	}
}
