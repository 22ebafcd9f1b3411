package kvindex

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/cpu"
)

// BenchmarkFree stores chains and removes them in random order, each block by block from one of
// its ends, or half from one end and half from the other.
func BenchmarkFree(b *testing.B) {
	const chains = 1000
	for _, depth := range []int{24, 78} {
		for _, order := range []string{"last first", "first first", "both ends"} {
			b.Run(fmt.Sprintf("depth=%d/%s", depth, order), func(b *testing.B) {
				x := mustIndex(b, Config{BlockSize: 16})
				s := mustAdd(b, x, 0, 16)
				var store, remove time.Duration
				rng := rand.New(rand.NewPCG(1, 2))
				for round := 0; b.Loop(); round++ {
					var all [][]EngineHash
					var c [][]uint64
					for i := range chains {
						content, names := contents(uint64(round*chains+i), depth)
						c, all = append(c, content), append(all, names)
					}
					start := cpu.Process()
					for i := range all {
						if err := x.ApplyContent(s, &Event{Kind: Stored, Hashes: all[i]}, c[i]); err != nil {
							b.Fatal(err)
						}
					}
					store += cpu.Process() - start
					rng.Shuffle(chains, func(i, k int) { all[i], all[k] = all[k], all[i] })
					for _, names := range all {
						switch order {
						case "last first":
							slices.Reverse(names)
						case "both ends":
							slices.Reverse(names[depth/2:])
						}
					}
					start = cpu.Process()
					for _, names := range all {
						for i := range names {
							if err := x.Apply(s, &Event{Kind: Removed, Hashes: names[i : i+1]}); err != nil {
								b.Fatal(err)
							}
						}
					}
					remove += cpu.Process() - start
				}
				if st := x.Stats(); st.HolderBlocks != 0 || st.UnknownRemoved != 0 {
					b.Fatalf("got %d blocks left and %d unknown removals, want none", st.HolderBlocks, st.UnknownRemoved)
				}
				b.ReportMetric(float64(store.Nanoseconds())/float64(b.N*chains*depth), "store-ns/block")
				b.ReportMetric(float64(remove.Nanoseconds())/float64(b.N*chains*depth), "remove-ns/block")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}
