package decide

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/extproc"
)

// BenchmarkCacheBytes measures what models[].cache_bytes saves: conversations of about
// 8,000 tokens take turns, more of them than a small cache holds. A turn that is evicted
// has to be tokenized again. heap-MB is the live heap afterwards.
func BenchmarkCacheBytes(b *testing.B) {
	text := sources(b)
	at := func(start, n int) string {
		start %= len(text) - n
		return quote(strings.ToValidUTF8(text[start:start+n], ""))
	}
	const turns, first, each = 4, 28 << 10, 1 << 10
	for _, conversations := range []int{32, 128, 512} {
		bodies := make([][]byte, 0, turns*conversations)
		for turn := range turns {
			for c := range conversations {
				var m strings.Builder
				fmt.Fprintf(&m, `{"model":"demo","messages":[{"role":"user","content":%s}`, at(c*50021, first))
				for t := range 2 * turn {
					fmt.Fprintf(&m, `,{"role":%q,"content":%s}`, [...]string{"assistant", "user"}[t%2], at(c*7919+t*104729, each))
				}
				bodies = append(bodies, []byte(m.String()+"]}"))
			}
		}
		for _, mib := range []int{64, 16, 8, 4} {
			b.Run(fmt.Sprintf("conversations=%d/cache=%dMiB", conversations, mib), func(b *testing.B) {
				var used time.Duration
				var heap runtime.MemStats
				for b.Loop() {
					d := newDeciderWith(b, 8, fmt.Sprintf(", cache_bytes: %dMiB", mib))
					for i, body := range bodies {
						begun := processTime()
						decision := d.Decide(context.Background(), &extproc.Request{ID: "r", Method: "POST", Path: "/v1/chat/completions", Body: body})
						if i >= len(bodies)/2 { // both warm
							used += processTime() - begun
						}
						decision.Ticket.ResponseHeaders(200, decision.Endpoint)
						decision.Ticket.End(time.Now())
					}
					runtime.GC()
					runtime.ReadMemStats(&heap)
					runtime.KeepAlive(d)
				}
				b.ReportMetric(float64(used.Microseconds())/float64(b.N*len(bodies)/2), "cpu-µs/turn")
				b.ReportMetric(float64(heap.HeapAlloc)/1e6, "heap-MB")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}
