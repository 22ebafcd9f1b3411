package bpe

import (
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// TestMergesAgree: all merge implementations give the same ids.
func TestMergesAgree(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 7))
	for _, name := range families {
		tok := family(t, name)
		for round := range 300 {
			text := randomText(r, 1+r.IntN(60))
			switch round % 3 {
			case 0:
				text = strings.Repeat(pool[r.IntN(len(pool))], 1+r.IntN(100))
			case 1:
				text = strings.Repeat(randomText(r, 2), 1+r.IntN(30))
			}
			if text == "" {
				continue
			}
			heaped := func(w *merger, m *merges, dst []uint32, _ *watch) []uint32 { return w.heaped(m, dst) }
			ways := [3]func(*merger, *merges, []uint32, *watch) []uint32{(*merger).run, heaped, (*merger).queued}
			var got [3][]uint32
			for k, way := range ways {
				w := &merger{parts: tok.symbols(nil, []byte(text))}
				if k > 0 {
					w.rankPairs(tok.merges, 0, len(w.parts))
				}
				got[k] = way(w, tok.merges, nil, new(watch))
			}
			if word := []byte(text); isASCII(word) && len(word) <= smallLimit {
				var small smallMerge
				if ids := small.ascii(tok, word, nil); !slices.Equal(ids, got[0]) {
					t.Fatalf("%s: %q: %v by its bytes, %v by its symbols", name, text, ids, got[0])
				}
			}
			if !slices.Equal(got[0], got[1]) || !slices.Equal(got[0], got[2]) {
				t.Fatalf("%s: %q: %v, heaped %v, queued %v", name, text, got[0], got[1], got[2])
			}
		}
	}
}

// TestPairsListedTwice: a pair has its later rank, whichever table that rank belongs to, and
// every other pair keeps its own.
func TestPairsListedTwice(t *testing.T) {
	const far = maxNear + 2
	pairs, result := make([][2]uint32, far+1), make([]uint32, far+1)
	for i := range pairs {
		pairs[i], result[i] = noPair, uint32(i&maxID)
	}
	for i := range uint32(1000) {
		pairs[i] = [2]uint32{i, i + 1}
	}
	pairs[1000] = [2]uint32{5, 6}
	pairs[far] = [2]uint32{7, 8}
	m, err := newMerges(pairs, nil, result)
	if err != nil {
		t.Fatal(err)
	}
	for i := range uint32(1000) {
		want := i
		switch i {
		case 5:
			want = 1000
		case 7:
			want = far
		}
		if got := m.rank(i, i+1); got != want {
			t.Errorf("%d, %d: rank %d, want %d", i, i+1, got, want)
		}
		if got := m.rank(i+1, i); got != noRank {
			t.Errorf("%d, %d: rank %d, want none", i+1, i, got)
		}
	}
}

// TestPairsThatMeetAreRefused: the product is known, so a file can choose pairs whose places in the table are the same. Random
// pairs may fill it.
func TestPairsThatMeetAreRefused(t *testing.T) {
	const n = 1<<20*4/5 + 1<<nearBits - 100 // as full as a table gets
	inverse := uint64(1)
	for range 6 { // Newton's iteration
		inverse *= 2 - pairMul*inverse
	}
	r := rand.New(rand.NewPCG(1, 2))
	chosen := func(n int, product func(i int) uint64) (pairs [][2]uint32) {
		for i := range n {
			key := product(i) * inverse & pairMask
			pairs = append(pairs, [2]uint32{uint32(key >> packedID), uint32(key & maxID)})
		}
		return pairs
	}
	consecutive := func(i int) uint64 { return 1<<39 + uint64(i) }
	random := func(int) uint64 { return r.Uint64() }
	for name, c := range map[string]struct {
		pairs   [][2]uint32
		refused bool
	}{
		"random":                 {chosen(n, random), false},
		"few that meet":          {append(chosen(maxProbe/2, consecutive), chosen(1<<14, random)...), false},
		"many that meet":         {chosen(100_000, consecutive), true},
		"the last of them again": {append(chosen(maxProbe, consecutive), slices.Repeat(chosen(maxProbe, consecutive)[maxProbe-1:], 100_000)...), false},
	} {
		result := make([]uint32, len(c.pairs))
		m, err := newMerges(c.pairs, nil, result)
		if errors.Is(err, ErrUnsupported) != c.refused {
			t.Errorf("%s: got %v, want refused %v", name, err, c.refused)
		}
		if !c.refused && name == "random" && len(m.slots) != 1<<20 {
			t.Errorf("%s: got %d slots, want a table that is four fifths full", name, len(m.slots))
		}
		if m != nil && m.rank(c.pairs[0][0], c.pairs[0][1]) == noRank {
			t.Errorf("%s: a pair is gone", name)
		}
	}
}
