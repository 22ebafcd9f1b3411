package bpe

import (
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"unicode/utf8"
)

// TestWindows: the words found in windows equal those found one by one, on texts that cover what
// patterns distinguish.
func TestWindows(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 1))
	alphabets := []string{
		"aB'sTdrevlm ", "ab' \n\t./", " \n\r\tx,", "12a, \n", "aBcD'S/\n", "a \x01\x7f,1\n", "aé中\u3000 '.\n1s",
		"the quick Brown FOX's 12345 {\"key\": [1, 2]}\n\t\t// don't\r\n",
	}
	n := 3000
	if os.Getenv("KVLANE_LONG") != "" {
		n = 1000000
	}
	for name, p := range allSplitters() {
		for range n {
			letters := []rune(alphabets[r.IntN(len(alphabets))])
			text := make([]rune, r.IntN(200))
			for i := range text {
				text[i] = letters[r.IntN(len(letters))]
			}
			s := string(text)
			if got, want := wordEnds(p, s, 512), wordEnds(p, s, 1); !slices.Equal(got, want) {
				t.Fatalf("%.40s: %q: %v in windows, %v one by one", name, s, got, want)
			}
		}
	}
}

// TestShortTokens: the table contains each token of up to shortSize bytes, and nothing else.
func TestShortTokens(t *testing.T) {
	for _, name := range families {
		tok := family(t, name)
		crowded := 0
		for id := range tok.vocab.has {
			b := tok.vocab.bytes(uint32(id))
			if len(b) == 0 || len(b) > shortSize {
				continue
			}
			_, whole, _ := tok.vocab.find(b)
			got, ok, sure := tok.short.find(shortKey(tail(b), len(b)))
			switch {
			case !sure:
				crowded++
			case ok != (whole || tok.ignoreMerges) || ok && got != uint32(id):
				t.Fatalf("%s: token %d, %q: %d, %t", name, id, b, got, ok)
			}
		}
		if crowded > tok.vocab.count/50 {
			t.Errorf("%s: the table has no room for %d tokens", name, crowded)
		}
		r := rand.New(rand.NewPCG(6, 1))
		for range 20000 {
			b := []byte("0123456")[:1+r.IntN(shortSize)]
			for i := range b {
				b[i] = "aeis \x00\xe4"[r.IntN(7)]
			}
			want, whole, known := tok.vocab.find(b)
			if got, ok, sure := tok.short.find(shortKey(tail(b), len(b))); sure && (ok != (known && (whole || tok.ignoreMerges)) || ok && got != want) {
				t.Fatalf("%s: %q: %d, %t, want %d, %t", name, b, got, ok, want, known)
			}
		}
	}
}

// TestPartsAreSafe merges texts whole and cut into parts, with equal results.
func TestPartsAreSafe(t *testing.T) {
	r := rand.New(rand.NewPCG(8, 1))
	for _, name := range families {
		tok := family(t, name)
		parts := 0
		for range 3000 {
			word := []byte(randomText(r, 1+r.IntN(12)))
			if r.IntN(2) == 0 {
				word = []byte(wideWord(r, 1+r.IntN(20)))
			}
			if len(word) == 0 {
				continue
			}
			whole := merge(tok, word)
			ends := make([]uint32, 4+r.IntN(100))
			var got []uint32
			for at := 0; at < len(word); {
				var n, next int
				if tok.sp != nil {
					n, next = tok.parter.split(string(word), at, ends)
				} else {
					n, next = tok.adjacency.cutNonASCII(word, at, len(word), ends)
				}
				parts += n
				for _, e := range ends[:n] {
					got = append(got, merge(tok, word[at:e])...)
					at = int(e)
				}
				if at != next {
					t.Fatalf("%s: %q: parts end at %d, the next begins at %d", name, word, at, next)
				}
			}
			if !slices.Equal(got, whole) {
				t.Fatalf("%s: %q: %v in parts, %v whole", name, word, got, whole)
			}
		}
		if parts < 6000 {
			t.Errorf("%s: %d parts only", name, parts)
		}
	}
}

func merge(tok *Tokenizer, word []byte) []uint32 {
	w := &merger{parts: tok.symbols(nil, word)}
	return w.run(tok.merges, nil, new(watch))
}

// wideWord returns n non-ASCII characters, most of them frequent ones of one script.
func wideWord(r *rand.Rand, n int) string {
	scripts := [][2]rune{{0x4e00, 0x5200}, {0x430, 0x450}, {0x3040, 0x3100}, {0xac00, 0xad00}, {0x600, 0x650}, {0xe00, 0xe50}, {0x1f300, 0x1f400}, {0xe0, 0xff}}
	script := scripts[r.IntN(len(scripts))]
	word := make([]rune, n)
	for i := range word {
		if r.IntN(10) == 0 {
			script = scripts[r.IntN(len(scripts))]
		}
		word[i] = script[0] + r.Int32N(script[1]-script[0])
	}
	return string(word)
}

// TestWideClassAt: the class and the length of every code point are those of the tables, also at
// the end of a text.
func TestWideClassAt(t *testing.T) {
	for r := rune(0x80); r <= utf8.MaxRune; r++ {
		if !utf8.ValidRune(r) {
			continue
		}
		for _, s := range []string{string(r), string(r) + "\u00e9a"} {
			if c, n := wideClassAt(s, 0); c != runeClass(r) || n != utf8.RuneLen(r) {
				t.Fatalf("%U: got class %x and %d bytes, want %x and %d", r, c, n, runeClass(r), utf8.RuneLen(r))
			}
		}
	}
}
