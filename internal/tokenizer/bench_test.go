package tokenizer

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"
)

// benchSize is the characters of a prompt.
const benchSize = 8000

// benchKinds are the kinds of text, each with prompts of benchSize characters.
func benchKinds(b *testing.B) map[string][]string {
	b.Helper()
	kinds := map[string][]string{}
	if os.Getenv("KVLANE_SHARED") != "" {
		for _, d := range jsonLines[document](b, filepath.Join(sharedData(b), "corpus.jsonl.gz")) {
			if kind := benchKind(d.Name); kind != "" {
				kinds[kind] = append(kinds[kind], prompts(d.Text)...)
			}
		}
		return kinds
	}
	kinds["en"] = prompts(strings.Repeat(samples[0]+"\n", 200))
	kinds["code"] = prompts(strings.Repeat(samples[1]+samples[2], 200))
	kinds["zh"] = prompts(strings.Repeat(samples[5], 600))
	kinds["json"] = prompts(strings.Repeat(samples[3]+samples[4], 200))
	return kinds
}

// benchKind sorts the documents of the large corpus.
func benchKind(name string) string {
	for prefix, kind := range map[string]string{
		"en_": "en", "code_": "code", "lang_zh": "zh", "json_": "json",
	} {
		if strings.HasPrefix(name, prefix) {
			return kind
		}
	}
	return ""
}

// prompts cuts a text into prompts of benchSize characters.
func prompts(s string) []string {
	var out []string
	for utf8.RuneCountInString(s) > benchSize/2 {
		end, n := len(s), 0
		for i := range s {
			if n == benchSize {
				end = i
				break
			}
			n++
		}
		out = append(out, s[:end])
		s = s[end:]
	}
	return out
}

// BenchmarkEncode measures each family and kind of text: cold with all caches
// empty before each pass over the prompts, words with only the words known, and
// warm with everything known.
func BenchmarkEncode(b *testing.B) {
	kinds := benchKinds(b)
	for _, name := range families {
		tok := family(b, name)
		for _, kind := range []string{"en", "code", "zh", "json"} {
			total := 0
			for _, p := range kinds[kind] {
				total += len(p)
			}
			for _, state := range []string{"cold", "words", "warm"} {
				b.Run(fmt.Sprintf("%s/%s/%s", name, kind, state), func(b *testing.B) {
					benchEncode(b, tok, kinds[kind], state)
					b.SetBytes(int64(total))
				})
			}
		}
	}
}

func benchEncode(b *testing.B, tok *Tokenizer, prompts []string, state string) {
	b.Helper()
	var dst []uint32
	w := newWorker(tok)
	cuts := tok.cuts
	if state == "words" {
		tok.cuts = nil
	}
	defer func() { tok.cuts = cuts }()
	pass := func() {
		for _, p := range prompts {
			if err := checkText(p); err != nil {
				b.Fatal(err)
			}
			dst = w.encode(dst[:0], p, 0)
		}
	}
	pass()
	pass()
	b.ReportAllocs()
	for b.Loop() {
		if state == "cold" {
			b.StopTimer()
			w.reset()
			tok.memo.reset()
			b.StartTimer()
		}
		pass()
	}
}

// BenchmarkConversation measures a chat of 81 messages and 61 KB.
func BenchmarkConversation(b *testing.B) {
	tok := family(b, "qwen3")
	chat := conversationText(81, 61_000)
	dst := make([]uint32, 0, 30_000)
	b.Run("again", func(b *testing.B) {
		c := NewCache(tok, 1<<26)
		b.ReportAllocs()
		for b.Loop() {
			var err error
			if dst, _, err = c.Encode(dst[:0], chat, false); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("next turn", func(b *testing.B) {
		c := NewCache(tok, 1<<26)
		if _, _, err := c.Encode(nil, chat, false); err != nil {
			b.Fatal(err)
		}
		n := 0
		b.ReportAllocs()
		for b.Loop() {
			n++
			// Each turn is another continuation of the same conversation.
			s := fmt.Sprintf("%s<|im_start|>user\nAnd %d? %s<|im_end|>\n<|im_start|>assistant\n", chat, n, samples[0])
			var err error
			if dst, _, err = c.Encode(dst[:0], s, false); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("no cache", func(b *testing.B) {
		for b.Loop() {
			var err error
			if dst, err = tok.Encode(dst[:0], chat, false); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkLoad measures loading a tokenizer.
func BenchmarkLoad(b *testing.B) {
	for _, name := range families {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := Load(os.DirFS(filepath.Join("..", "models", name))); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
