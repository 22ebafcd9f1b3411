package bpe

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

// hostile is what normalization and cuts meet at: marks in and out of order, second halves, jamo,
// characters that decompose for good, what composes with ASCII, and both sides of cuts.
var hostile = strings.Split("a|e|n|é|\u0301|\u0316|\u0323|\u0327|\u0338|\u0345|\u0e38|\u0e48|ก|क|\u093c|\u0958|\u094d|\u0653|ا|أ|\u064b|\u0651|\u1100|\u1161|\u11a8|가|각|\u212b|\u2126|\u0344|\ufb1d|\U0001d15e|\u1e9b|"+
	" |\n|\r\n|=|<|>|'|/|.|中|\u8c48|\uf900|。|，|、|\u3099|か|が|\u09c7|\u09be|ж|й|😀|<|im_end|>|1|\u2000|\u037e|\u1fef", "|")

func hostileText(r *rand.Rand, n int) string {
	var b strings.Builder
	for range n {
		b.WriteString(hostile[r.IntN(len(hostile))])
	}
	return b.String()
}

// whollyNFC normalizes a text without the quick check.
func whollyNFC(s string) string {
	return string((&normalizer{wanted: new(watch)}).appendStretch(nil, s))
}

// TestQuickCheck: what the quick check skips is normalized.
func TestQuickCheck(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 1))
	quick := 0
	for range 100000 {
		s := hostileText(r, r.IntN(8))
		if composeAt(s, 0, new(watch)) == len(s) && !isASCII([]byte(s)) {
			quick++
		}
		if got, want := string((&normalizer{wanted: new(watch)}).appendNFC(nil, s)), whollyNFC(s); got != want {
			t.Fatalf("%+q: got %+q, want %+q", s, got, want)
		}
	}
	if quick < 10000 {
		t.Errorf("got %d texts that the quick check accepts, want at least 10000", quick)
	}
}

// TestQuickCheckOfSecondHalves: one is left alone exactly where it joins nothing, whatever precedes and follows.
func TestQuickCheckOfSecondHalves(t *testing.T) {
	var firsts, seconds []rune
	for c := rune(0x80); c < 0x1f000; c++ {
		if k := runeClass(c); k&clsSecond != 0 {
			seconds = append(seconds, c)
		} else if c%977 == 0 && utf8.ValidRune(c) || k&(clsFirst|clsDecomposes|clsCompose) != 0 && (c < hangulS || c%97 == 0) || k>>classBits != 0 {
			firsts = append(firsts, c)
		}
	}
	quick := 0
	for _, a := range firsts {
		for _, c := range seconds {
			for _, more := range []string{"", "\u0316", "\u094d", "\u0301", "\u09be"} {
				s := string([]rune{a, c}) + more
				if composeAt(s, 0, new(watch)) < len(s) {
					continue
				}
				quick++
				if want := whollyNFC(s); s != want {
					t.Fatalf("%+q: got no place to compose, want one: its normal form is %+q", s, want)
				}
			}
		}
	}
	if quick < 10000 {
		t.Errorf("got %d texts that the quick check accepts, want at least 10000", quick)
	}
	for _, s := range []string{"मेज़ ज़रूरत पढ़ना बड़ा", "কাজ করা", "நாள்", "e\u094d\u0316"} {
		if at := composeAt(s, 0, new(watch)); at != len(s) {
			t.Errorf("%+q: got a place to compose at %d, want none", s, at)
		}
	}
}

// TestTheQuickCheckPassesValidTextOnly: and all valid text that cannot compose.
func TestTheQuickCheckPassesValidTextOnly(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	lead := []byte{0xc0, 0xc2, 0xdf, 0xe0, 0xe2, 0xed, 0xef, 0xf0, 0xf3, 0xf4, 0xf8}
	for range 300_000 {
		b := make([]byte, 1+r.IntN(6))
		for i := range b {
			b[i] = [...]byte{byte(r.IntN(128)), 0x80 | byte(r.IntN(64)), lead[r.IntN(len(lead))]}[r.IntN(3)]
		}
		s := string(b)
		if at := composeAt(s, 0, new(watch)); !utf8.ValidString(s[:at]) {
			t.Fatalf("%q: got %d, want at most the valid part", s, at)
		}
	}
	for c := rune(0x80); c <= unicode.MaxRune; c++ {
		if s := "a" + string(c); utf8.ValidRune(c) && classPages[classIndex[c>>8]][c&0xff].quiet() && composeAt(s, 0, new(watch)) != len(s) {
			t.Fatalf("%U: got a place to compose, want none", c)
		}
	}
}

// TestRawCutsAreSafe: both sides of a cut of text that is not normalized have the normal form and
// the words that the whole text has.
func TestRawCutsAreSafe(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 2))
	for name, p := range allSplitters() {
		c := newCutter(p, true)
		cuts, changed := 0, 0
		for range 20000 {
			s := hostileText(r, 1+r.IntN(8))
			for i := 1; i < len(s); i++ {
				if !utf8.RuneStart(s[i]) || !c.safe(s, i) {
					continue
				}
				cuts++
				a, b, whole := whollyNFC(s[:i]), whollyNFC(s[i:]), whollyNFC(s)
				if a+b != whole {
					t.Fatalf("%.40s: %+q cut at %d: got %+q and %+q, want %+q", name, s, i, a, b, whole)
				}
				if whole != s {
					changed++
				}
				got := wordEnds(p, a, 512)
				for _, e := range wordEnds(p, b, 512) {
					got = append(got, e+uint32(len(a)))
				}
				if want := wordEnds(p, whole, 512); !slices.Equal(got, want) {
					t.Fatalf("%.40s: %+q cut at %d: got words %v, want %v", name, s, i, got, want)
				}
			}
		}
		if cuts < 300 || changed < 100 {
			t.Errorf("%.40s: got %d cuts, %d of them in text that NFC changes, want 300 and 100", name, cuts, changed)
		}
	}
}

// TestMemoTakesRawText compares the ids through the memo, which is asked with text that is not
// normalized, with those of the same tokenizer that normalizes the whole text and has no memo.
func TestMemoTakesRawText(t *testing.T) {
	load := func() *Tokenizer {
		tok, err := Load(os.DirFS(filepath.Join("..", "models", "qwen3")))
		if err != nil {
			t.Fatal(err)
		}
		return tok
	}
	tok, plain := load(), load()
	if !tok.lazy || tok.cuts == nil {
		t.Fatal("got a tokenizer that normalizes whole texts, want one that does not")
	}
	plain.lazy, plain.cuts = false, nil
	r := rand.New(rand.NewPCG(9, 3))
	pieces := make([]string, 60)
	for i := range pieces {
		pieces[i] = hostileText(r, 30+r.IntN(200))
		if r.IntN(3) == 0 {
			pieces[i] = randomText(r, 40)
		}
		pieces[i] += []string{"word ", "word\n", "word.", "सत ", "中。", "e\u0301 ", "x=\u0338"}[r.IntN(7)]
	}
	for range 300 {
		var s string
		for range 1 + r.IntN(12) {
			s += pieces[r.IntN(len(pieces))]
		}
		want, err := plain.Encode(nil, s, false)
		if err != nil {
			t.Fatal(err)
		}
		got, err := tok.Encode(nil, s, false)
		if err != nil || !slices.Equal(got, want) {
			t.Fatalf("%+q: got %v, want %v (%v)", s, got, want, err)
		}
		at := r.IntN(len(s) + 1)
		broken := s[:at] + []string{"\xff", "\xe3", "\xe3\x80", "\x80", "\xed\xa0\x80", "\xf5\x80\x80\x80", "\xe0\x9f\xbf", "\xc1\xbf", "\xcc", "\xe1\x80"}[r.IntN(10)] + s[at:]
		if _, err := tok.Encode(nil, broken, false); errors.Is(err, ErrText) == utf8.ValidString(broken) {
			t.Fatalf("%q: got the error %v for text that is not valid UTF-8", broken, err)
		}
	}
	held := 0
	for i := range tok.memo.shards {
		if s := tok.memo.shards[i].store; s != nil {
			held += int(s.textEnd)
		}
	}
	if held < 1000 {
		t.Errorf("got %d bytes in the memo, want at least 1000", held)
	}
}
