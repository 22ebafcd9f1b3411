package tokenizer

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// TestMergesAgree wants the three ways of merging to give the same.
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
			var got [3][]uint32
			for k := range got {
				w := &merger{parts: tok.symbols(nil, []byte(text))}
				if len(w.parts) == 0 {
					continue
				}
				w.rankPairs(tok.merges)
				got[k] = []func(*merges, []uint32) []uint32{
					func(m *merges, dst []uint32) []uint32 { return flat(m, w.parts, dst) }, w.heaped, w.queued,
				}[k](tok.merges, nil)
			}
			if !slices.Equal(got[0], got[1]) || !slices.Equal(got[0], got[2]) {
				t.Fatalf("%s: %q: flat %v, heaped %v, queued %v", name, text, got[0], got[1], got[2])
			}
		}
	}
}
