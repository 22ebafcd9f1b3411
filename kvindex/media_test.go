package kvindex

import (
	"errors"
	"slices"
	"testing"
)

// Targets with blocks of any size hold the same prompt, and no other medium or place of one.
func TestMediaMatchWhateverTheBlockSize(t *testing.T) {
	const block, length = 16, 192
	tokens := make([]uint32, length)
	media := []Medium{{At: 20, Digest: 1}, {At: 40, Digest: 2}, {At: 41, Digest: 1}, {At: 130, Digest: 3}}
	for _, size := range []int{1, 4, 16, 32, 64} {
		x, err := New(Config{BlockSize: block, MaxBytes: 1 << 24})
		if err != nil {
			t.Fatal(err)
		}
		s, err := x.Add(Target{Worker: "w"}, "m", size)
		if err != nil {
			t.Fatal(err)
		}
		for from := 0; from < length; from += 64 { // one event for each part
			e := &Event{Kind: Stored, BlockSize: size, Tokens: tokens[from : from+64]}
			for at := from; at < from+64; at += size {
				e.Hashes = append(e.Hashes, EngineHash(at+1))
			}
			if e.HasParent = from > 0; e.HasParent {
				e.Parent = EngineHash(from - size + 1)
			}
			for _, m := range media {
				if m.At >= from && m.At < from+64 {
					e.Media = append(e.Media, Medium{At: m.At - from, Digest: m.Digest})
				}
			}
			if err := x.Apply(s, e); err != nil {
				t.Fatalf("blocks of %d: %v", size, err)
			}
		}
		matched := func(media []Medium) int {
			var got Matches
			h := x.Hasher()
			x.Match(h.AppendHashesExtra(nil, h.Seed("m", "", ""), tokens, block, nil, media), &got)
			if len(got.Holders) == 0 {
				return 0
			}
			return int(got.Holders[0].Blocks[Device])
		}
		if got := matched(media); got != length/block {
			t.Errorf("blocks of %d: got %d blocks matched, want all %d", size, got, length/block)
		}
		for i, m := range media {
			other, shifted := slices.Clone(media), slices.Clone(media)
			other[i].Digest += 7
			shifted[i].At++
			shifted = slices.SortedFunc(slices.Values(shifted), func(a, b Medium) int { return a.At - b.At })
			for _, prompt := range [][]Medium{other, shifted, slices.Delete(slices.Clone(media), i, i+1)} {
				whole := max(size, block) // an engine's block is held as a whole
				if got, want := matched(prompt), m.At/whole*whole/block; got != want {
					t.Errorf("blocks of %d, media %v: got %d blocks matched, want %d", size, prompt, got, want)
				}
			}
		}
	}
}

func TestMediaOutsideTheTokensAreRefused(t *testing.T) {
	x, err := New(Config{BlockSize: 4, MaxBytes: 1 << 24})
	if err != nil {
		t.Fatal(err)
	}
	s, err := x.Add(Target{Worker: "w"}, "m", 4)
	if err != nil {
		t.Fatal(err)
	}
	for _, media := range [][]Medium{{{At: 8}}, {{At: -1}}, {{At: 3}, {At: 2}}} {
		e := &Event{Kind: Stored, BlockSize: 4, Hashes: []EngineHash{1, 2}, Tokens: make([]uint32, 8), Media: media}
		if err := x.Apply(s, e); !errors.Is(err, ErrExtra) {
			t.Errorf("%v: got %v, want ErrExtra", media, err)
		}
	}
}
