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
			start := time.Now()
			tok, err := loadText(text, nil)
			fastest = min(fastest, time.Since(start))
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
