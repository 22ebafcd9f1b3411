package kvindex

import (
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/cpu"
)

// BenchmarkConfirm follows a prompt's new blocks: credited when the request is sent, confirmed
// by the engine's event, removed block by block from the end.
func BenchmarkConfirm(b *testing.B) {
	const blocks = 1024
	x := mustIndex(b, Config{BlockSize: 16})
	s := mustAdd(b, x, 0, 16)
	seed := x.Hasher().Seed("m", "", "")
	names := make([]EngineHash, blocks)
	contents := make([]uint64, blocks)
	var hashes []Hash
	var speculate, confirm, remove time.Duration
	fill := uint64(0)
	next := func() {
		fill++
		for i := range names {
			names[i], contents[i] = EngineHash(mixName(fill<<16|uint64(i))), mixName(fill<<32|uint64(i))
		}
		hashes = x.Hasher().AppendContents(hashes[:0], seed, contents)
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		next()
		t := cpu.Process()
		x.Speculate(s, hashes, testTime(i))
		t2 := cpu.Process()
		if err := x.ApplyContent(s, &Event{Kind: Stored, Hashes: names}, contents); err != nil {
			b.Fatal(err)
		}
		t3 := cpu.Process()
		for k := range names {
			if err := x.Apply(s, &Event{Kind: Removed, Hashes: names[blocks-1-k : blocks-k]}); err != nil {
				b.Fatal(err)
			}
		}
		speculate, confirm, remove = speculate+t2-t, confirm+t3-t2, remove+cpu.Process()-t3
	}
	for unit, d := range map[string]time.Duration{"speculate-ns/block": speculate, "confirm-ns/block": confirm, "remove-ns/block": remove} {
		b.ReportMetric(float64(d)/float64(b.N)/blocks, unit)
	}
	if x.Stats().HolderBlocks != 0 {
		b.Fatal("blocks are left")
	}
}
