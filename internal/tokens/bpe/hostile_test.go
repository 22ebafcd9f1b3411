package bpe

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// allocated returns the bytes that f allocates, garbage included: an upper bound of its peak
// memory.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// TestOneHugeWordTakesBoundedMemory tokenizes texts without a split.
func TestOneHugeWordTakesBoundedMemory(t *testing.T) {
	const size, most = 10 << 20, 48
	r := rand.New(rand.NewPCG(3, 3))
	letters := make([]byte, size)
	for i := range letters {
		letters[i] = byte('a' + r.IntN(26))
	}
	tok := family(t, "qwen3")
	for name, text := range map[string]string{"random letters": string(letters), "one letter": strings.Repeat("a", size)} {
		var ids []uint32
		var err error
		n := allocated(func() { ids, err = tok.Encode(nil, text, false) })
		if err != nil || len(ids) == 0 {
			t.Fatalf("%s: %d ids, %v", name, len(ids), err)
		}
		t.Logf("%s: %d ids, %.1f bytes allocated for each byte", name, len(ids), float64(n)/size)
		if n > most*size {
			t.Errorf("%s: %d bytes allocated for %d", name, n, size)
		}
	}
}

// TestANormalizerThatMultipliesIsEnded: each of twenty replacements makes a text ten times as long.
func TestANormalizerThatMultipliesIsEnded(t *testing.T) {
	one := `{"type":"Replace","pattern":{"String":"a"},"content":"aaaaaaaaaa"}`
	for name, normalizer := range map[string]string{
		"replacements": `{"type":"Sequence","normalizers":[` + strings.Repeat(one+",", 19) + one + `]}`,
		"prefixes":     `{"type":"Sequence","normalizers":[{"type":"Prepend","prepend":"` + strings.Repeat("a", 2<<20) + `"},` + one + `]}`,
	} {
		tok, err := loadText(tiny(`"normalizer":null`, `"normalizer":`+normalizer), nil)
		if err != nil {
			t.Fatal(err)
		}
		n := allocated(func() { _, err = tok.Encode(nil, "a", false) })
		if !errors.Is(err, ErrLimit) || n > 100<<20 {
			t.Errorf("%s: got %v and %d bytes allocated, want ErrLimit and at most 100 MiB", name, err, n)
		}
	}
}

// TestATemplateAddsFewTokens: pieces that repeat a list of ids multiply it.
func TestATemplateAddsFewTokens(t *testing.T) {
	with := func(pieces, ids int) string {
		return tiny(`"post_processor":null`, `"post_processor":{"type":"TemplateProcessing","single":[{"Sequence":{"id":"A","type_id":0}}`+
			strings.Repeat(`,{"SpecialToken":{"id":"<x>","type_id":0}}`, pieces)+`],"pair":[],"special_tokens":{"<x>":{"id":"<x>","ids":[0`+strings.Repeat(",0", ids-1)+`],"tokens":[]}}}`)
	}
	for _, c := range []struct {
		pieces, ids int
		ok          bool
	}{{1, 1, true}, {2, maxAdded / 2, true}, {1, maxAdded + 1, false}, {3, maxAdded / 2, false}, {10_000, 10_000, false}} {
		text := with(c.pieces, c.ids)
		var err error
		n := allocated(func() { _, err = loadText(text, nil) })
		if (err == nil) != c.ok || n > 100<<20 {
			t.Errorf("%d pieces of %d ids: got %v and %d bytes allocated, want it loaded: %v, at most 100 MiB", c.pieces, c.ids, err, n, c.ok)
		}
	}
}

// nested is a Unigram tokenizer of n pieces, each of which begins with all shorter ones.
func nested(n int) string {
	var list strings.Builder
	list.WriteString(`["<unk>",0.0]`)
	for i := range n {
		fmt.Fprintf(&list, `,["%s",-1.0]`, strings.Repeat("a", i+1))
	}
	return `{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,"pre_tokenizer":null,"post_processor":null,"decoder":null,` +
		`"model":{"type":"Unigram","unk_id":0,"byte_fallback":false,"vocab":[` + list.String() + `]}}`
}

// TestAStopEndsNestedPieces: each character of a text is the beginning of a thousand pieces, and counts as their bytes.
func TestAStopEndsNestedPieces(t *testing.T) {
	tok, err := loadText(nested(1000), nil)
	if err != nil {
		t.Fatal(err)
	}
	w := newEncoder(tok)
	w.watch = watch{stop: closed(), left: lookEvery}
	if ids := tok.unigram.viterbi(w, nil, []byte(strings.Repeat("a", 1<<18))); len(ids) > 0 || !w.watch.stopped {
		t.Fatalf("got %d ids, want none after a stop", len(ids))
	}
	seen := 0
	for at, step := range w.steps {
		if step != 0 {
			seen = at
		}
	}
	if most := lookEvery/1000 + 1001; seen == 0 || seen > most {
		t.Errorf("got as far as byte %d, want at most %d", seen, most)
	}
}

// TestNestedPiecesLoadInTime: a Unigram vocabulary in which each piece begins with all shorter ones.
func TestNestedPiecesLoadInTime(t *testing.T) {
	if raceDetector {
		t.Skip("measures time")
	}
	load := func(n int) time.Duration {
		text := nested(n)
		fastest := time.Hour
		for range 3 {
			var tok *Tokenizer
			var err error
			fastest = min(fastest, threadTime(func() { tok, err = loadText(text, nil) }))
			if err != nil {
				t.Fatal(err)
			}
			if ids, err := tok.Encode(nil, strings.Repeat("a", n), false); err != nil || len(ids) != 1 {
				t.Fatalf("got %d ids, %v, want the longest token", len(ids), err)
			}
		}
		return fastest
	}
	short, long := load(200), load(1600) // the file has 64 times the bytes
	t.Logf("200 pieces in %v, 1,600 in %v", short, long)
	if long > 128*short {
		t.Errorf("200 nested pieces load in %v, 1,600 in %v, want at most 128 times that", short, long)
	}
}

// TestManyAddedTokensLoadInLinearTime: multimodal models have tens of thousands, and a file may have more.
func TestManyAddedTokensLoadInLinearTime(t *testing.T) {
	if raceDetector {
		t.Skip("measures time")
	}
	load := func(n, rounds int, special bool) time.Duration {
		var list strings.Builder
		for i := range n {
			fmt.Fprintf(&list, `,{"id":%d,"content":"<t%d>","special":%v}`, 300+i, i, special)
		}
		text := tinyByteLevel(`"added_tokens":[]`, `"added_tokens":[`+list.String()[1:]+`]`)
		fastest := time.Hour
		for range rounds {
			var tok *Tokenizer
			var err error
			fastest = min(fastest, threadTime(func() { tok, err = loadText(text, nil) }))
			if err != nil || len(tok.AddedTokens()) != n {
				t.Fatalf("got %v, want %d added tokens", err, n)
			}
		}
		return fastest
	}
	for _, special := range []bool{false, true} {
		few, many := load(10_000, 3, special), load(160_000, 1, special)
		t.Logf("special %v: 10,000 in %v, 160,000 in %v", special, few, many)
		if many > 128*few {
			t.Errorf("special %v: 160,000 added tokens took %v, 10,000 %v: want about 16 times", special, many, few)
		}
	}
}

// TestEveryCodePointComesBack encodes all of Unicode, a few code points at a time, and decodes
// the ids, with a byte-level and a SentencePiece tokenizer.
func TestEveryCodePointComesBack(t *testing.T) {
	bytesOfRune := map[rune]byte{}
	for b, r := range byteToRune {
		bytesOfRune[r] = byte(b)
	}
	for name, read := range map[string]func(dst []byte, token string) []byte{
		"gptoss": func(dst []byte, token string) []byte {
			for _, r := range token {
				dst = append(dst, bytesOfRune[r])
			}
			return dst
		},
		"mistral_7b": func(dst []byte, token string) []byte {
			if len(token) == 6 && strings.HasPrefix(token, "<0x") {
				const digits = "0123456789ABCDEF"
				return append(dst, byte(strings.IndexByte(digits, token[3])<<4|strings.IndexByte(digits, token[4])))
			}
			return append(dst, strings.ReplaceAll(token, "\u2581", " ")...)
		},
	} {
		tok := family(t, name)
		var ids []uint32
		var got []byte
		bad := 0
		for r := rune(0); r <= utf8.MaxRune && bad < 10; r += 4 {
			text := "x"
			for k := range rune(4) {
				if utf8.ValidRune(r + k) {
					text += string(r + k)
				}
			}
			var err error
			if ids, err = tok.Encode(ids[:0], text, false); err != nil {
				t.Fatalf("%s, %U: %v", name, r, err)
			}
			got = got[:0]
			for _, id := range ids {
				token, ok := tok.Token(id)
				if !ok {
					t.Fatalf("%s, %U: no token %d", name, r, id)
				}
				got = read(got, token)
			}
			want := text
			if name == "mistral_7b" { // writes spaces as U+2581, and one before the text
				want = " " + strings.ReplaceAll(text, "\u2581", " ")
			}
			if string(got) != want {
				t.Errorf("%s, %U: %q came back as %q", name, r, want, got)
				bad++
			}
		}
	}
}
