package bpe

import (
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
	m := newMerges(pairs, nil, result)
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
