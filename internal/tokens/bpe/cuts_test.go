package bpe

import (
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// allSplitters returns a splitter of each kind and parameter that Load can choose.
func allSplitters() map[string]splitter {
	all := map[string]splitter{"spaces": spaceSplit{}, "each space": spaceSplit{each: true}}
	for name := range preTokenizers() {
		all[name] = splitterOf(name)
	}
	return all
}

// TestCutsAreSafe: cutting random texts at any place that the cutter reports as safe does not
// change the words.
func TestCutsAreSafe(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	n := 4000
	if os.Getenv("KVLANE_LONG") != "" {
		n = 400000
	}
	for name, p := range allSplitters() {
		c := newCutter(p, false)
		if c == nil {
			t.Fatalf("%s has no cuts", name)
		}
		cuts := 0
		for range n {
			cuts += checkCuts(t, p, c, randomText(r, 1+r.IntN(12)))
			// random text on both sides of a cut
			left, right := randomText(r, r.IntN(5)), randomText(r, r.IntN(5))
			cuts += checkCuts(t, p, c, left+string(rune('a'+r.IntN(26)))+string(rune(r.IntN(128)))+right)
			cuts += checkCuts(t, p, c, left+"\n"+string(rune(r.IntN(128)))+right)
			cuts += checkCuts(t, p, c, left+"中"+"。"+right)
			cuts += checkCuts(t, p, c, left+[]string{"の", "ー", "各", "ж", "ǅ", "ก"}[r.IntN(6)]+[]string{"。", "、", "！", "：", "："}[r.IntN(5)]+right)
			cuts += checkCuts(t, p, c, left+"ж"+" "+right)
		}
		if cuts < n {
			t.Errorf("%.40s: only %d cuts tried", name, cuts)
		}
	}
}

func checkCuts(t *testing.T, p splitter, c *cutter, s string) int {
	t.Helper()
	whole := wordEnds(p, s, 512)
	cuts := 0
	for i := 1; i < len(s); i++ {
		if !utf8.RuneStart(s[i]) || !c.safe(s, i) {
			continue
		}
		cuts++
		got := wordEnds(p, s[:i], 512)
		for _, e := range wordEnds(p, s[i:], 512) {
			got = append(got, e+uint32(i))
		}
		if !slices.Equal(got, whole) {
			t.Fatalf("%T%+v: %q cut at %d: %v, whole %v", p, p, s, i, got, whole)
		}
	}
	return cuts
}

// TestSplitResumes: the words do not depend on the window size.
func TestSplitResumes(t *testing.T) {
	r := rand.New(rand.NewPCG(2, 1))
	for name, p := range allSplitters() {
		for range 1000 {
			s := randomText(r, 1+r.IntN(30))
			if got, want := wordEnds(p, s, 1+r.IntN(3)), wordEnds(p, s, 512); !slices.Equal(got, want) {
				t.Fatalf("%.40s: %q: %v in small windows, %v in one", name, s, got, want)
			}
		}
	}
}

// TestStretchesFollowTheText: a prefix put before a text does not change its cuts, beyond the
// first few.
func TestStretchesFollowTheText(t *testing.T) {
	text := strings.Repeat(samples[0]+samples[1]+samples[2]+samples[5], 1)
	for i := range 20 {
		text += samples[i%10] + strings.Repeat("x", i) + " "
	}
	c := newCutter(wordSplit{digits: 1}, false)
	cuts := func(s string, shift int) map[int]bool {
		all := map[int]bool{}
		for at := 0; at < len(s); {
			at = c.next([]byte(s), s, at)
			all[at-shift] = true
		}
		return all
	}
	plain := cuts(text, 0)
	for _, before := range []string{"A word before. ", samples[3], strings.Repeat("zz ", 100)} {
		same := 0
		for at := range cuts(before+text, len(before)) {
			if plain[at] {
				same++
			}
		}
		if same*2 < len(plain) {
			t.Errorf("%d of %d cuts are the same after %d bytes more", same, len(plain), len(before))
		}
	}
}
