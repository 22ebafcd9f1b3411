package kvindex

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/cpu"
)

func BenchmarkAppendHashes(b *testing.B) {
	h := NewHasher(Key{1})
	tokens := make([]uint32, 32768)
	for i := range tokens {
		tokens[i] = uint32(i * 7)
	}
	for _, size := range []int{16, 64} {
		b.Run(fmt.Sprintf("block=%d", size), func(b *testing.B) {
			var dst []Hash
			for b.Loop() {
				dst = h.AppendHashes(dst[:0], 1, tokens, size)
			}
			b.ReportMetric(float64(b.N)*float64(len(dst))/b.Elapsed().Seconds()/1e6, "Mblocks/s")
		})
	}
}

func BenchmarkMatch(b *testing.B) {
	for _, c := range []struct{ depth, holders int }{{78, 1}, {78, 64}, {6250, 8}} {
		b.Run(fmt.Sprintf("depth=%d/holders=%d", c.depth, c.holders), func(b *testing.B) {
			x := mustIndex(b, Config{BlockSize: 16})
			content, names := contents(1, c.depth)
			for i := range c.holders {
				s := mustAdd(b, x, i, 16)
				if err := x.ApplyContent(s, &Event{Kind: Stored, Hashes: names}, content); err != nil {
					b.Fatal(err)
				}
			}
			hashes := x.Hasher().AppendContents(nil, x.Hasher().Seed("m", "", ""), content)
			var m Matches
			b.ReportAllocs()
			for b.Loop() {
				x.Match(hashes, &m)
			}
			if m.Blocks != c.depth {
				b.Fatalf("%d of %d blocks", m.Blocks, c.depth)
			}
		})
	}
}

// BenchmarkMatchOfSingleBlocks: chains whose blocks are segments of their own.
func BenchmarkMatchOfSingleBlocks(b *testing.B) {
	for _, c := range []struct{ blocks, slots int }{{6250, 1}, {2000, 64}, {6250, 128}, {2000, 1024}} {
		b.Run(fmt.Sprintf("blocks=%d/slots=%d", c.blocks, c.slots), func(b *testing.B) {
			x, hashes := single(b, c.blocks, c.slots, true)
			var m Matches
			for b.Loop() {
				x.Match(hashes, &m)
			}
			b.ReportMetric(float64(m.Blocks), "blocks")
		})
	}
}

func BenchmarkApply(b *testing.B) {
	for _, n := range []int{1, 32} {
		b.Run(fmt.Sprintf("store+remove/blocks=%d", n), func(b *testing.B) {
			x := mustIndex(b, Config{BlockSize: 16})
			s := mustAdd(b, x, 0, 16)
			content, names := contents(1, 78) // an index in use is never empty
			if err := x.ApplyContent(s, &Event{Kind: Stored, Hashes: names}, content); err != nil {
				b.Fatal(err)
			}
			tokens := make([]uint32, 16*n)
			e := &Event{Kind: Stored, BlockSize: 16, Tokens: tokens, Hashes: make([]EngineHash, n)}
			r := &Event{Kind: Removed, Hashes: e.Hashes}
			i := uint32(0)
			b.ReportAllocs()
			for b.Loop() {
				i++
				tokens[0] = i
				for k := range e.Hashes {
					e.Hashes[k] = EngineHash(mixName(uint64(i)<<8 | uint64(k)))
				}
				if err := x.Apply(s, e); err != nil {
					b.Fatal(err)
				}
				if err := x.Apply(s, r); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.N)*float64(2*n)/b.Elapsed().Seconds()/1e6, "Mblocks/s")
		})
	}
}

func BenchmarkSpeculate(b *testing.B) {
	const depth = 6250
	x := mustIndex(b, Config{BlockSize: 16})
	s := mustAdd(b, x, 0, 16)
	content, names := contents(1, depth)
	if err := x.ApplyContent(s, &Event{Kind: Stored, Hashes: names[:depth-50]}, content[:depth-50]); err != nil {
		b.Fatal(err)
	}
	seed := x.Hasher().Seed("m", "", "")
	hashes := x.Hasher().AppendContents(nil, seed, content)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		// the last 50 blocks are new each time
		hashes = x.Hasher().AppendContents(hashes[:depth-50], hashes[depth-51]+Hash(i), content[depth-50:])
		x.Speculate(s, hashes, testTime(i))
	}
}

// BenchmarkSnapshot copies 16 targets with 64 shared chains of 78 blocks each and as many
// private ones.
func BenchmarkSnapshot(b *testing.B) {
	x := mustIndex(b, Config{BlockSize: 16})
	for t := range 16 {
		s := mustAdd(b, x, t, 16)
		for c := range 128 {
			if c >= 64 {
				c += 64 * t
			}
			content, names := contents(uint64(c), 78)
			if err := x.ApplyContent(s, &Event{Kind: Stored, Hashes: names}, content); err != nil {
				b.Fatal(err)
			}
		}
	}
	var text bytes.Buffer
	if err := x.Dump(&text, nil); err != nil {
		b.Fatal(err)
	}
	blocks := float64(x.Stats().Blocks)
	perBlock := func(b *testing.B, used time.Duration) {
		b.ReportMetric(float64(used)/float64(b.N)/blocks, "cpu-ns/block")
	}
	b.Run("dump", func(b *testing.B) {
		before := cpu.Process()
		for b.Loop() {
			text.Reset()
			if err := x.Dump(&text, nil); err != nil {
				b.Fatal(err)
			}
		}
		perBlock(b, cpu.Process()-before)
	})
	b.Run("load", func(b *testing.B) {
		before := cpu.Process()
		for b.Loop() {
			if _, err := mustIndex(b, Config{BlockSize: 16}).Load(bytes.NewReader(text.Bytes())); err != nil {
				b.Fatal(err)
			}
		}
		perBlock(b, cpu.Process()-before)
	})
}

// Prompts of pages of one token, which end in a page of their own, are stored and removed from their ends.
func BenchmarkPages(b *testing.B) {
	x := mustIndex(b, Config{BlockSize: 16})
	s := mustAdd(b, x, 0, 1)
	const n = 1000
	names, tokens := make([]EngineHash, n), make([]uint32, n)
	var removed []EngineHash
	next := EngineHash(1)
	for b.Loop() {
		for i := range names {
			names[i], tokens[i] = next, uint32(next)
			next++
		}
		if err := x.Apply(s, &Event{Kind: Stored, Hashes: names, Tokens: tokens, BlockSize: 1}); err != nil {
			b.Fatal(err)
		}
		if next > 100*n {
			removed = removed[:0]
			for i := next - 100*n + n - 1; len(removed) < n; i-- {
				removed = append(removed, i)
			}
			if err := x.Apply(s, &Event{Kind: Removed, Hashes: removed}); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.ReportMetric(float64(b.N)*n/b.Elapsed().Seconds()/1e6, "Mpages/s")
}
