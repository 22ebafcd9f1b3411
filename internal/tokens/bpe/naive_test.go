package bpe

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// naive is an independent implementation of the model: words from the splitter, each merged over
// strings, using only the text of tokenizer.json.
type naive struct {
	vocab  map[string]uint32
	ranks  map[[2]string]int
	ignore bool
	nfc    bool
	spaces bool
	raw    []AddedToken
	normal []AddedToken
	words  splitter
}

func newNaive(t testing.TB, name string) *naive {
	t.Helper()
	raw, err := readFile(os.DirFS(filepath.Join("..", "models", name)), "tokenizer.json")
	if err != nil {
		t.Fatal(err)
	}
	var f struct {
		Model struct {
			Vocab  map[string]uint32 `json:"vocab"`
			Merges []json.RawMessage `json:"merges"`
			Ignore bool              `json:"ignore_merges"`
		} `json:"model"`
		Added      []AddedToken `json:"added_tokens"`
		Normalizer *struct {
			Type string `json:"type"`
		} `json:"normalizer"`
	}
	if err := json.Unmarshal(raw, &f); err != nil {
		t.Fatal(err)
	}
	tok := family(t, name)
	n := &naive{
		vocab: f.Model.Vocab, ranks: map[[2]string]int{}, ignore: f.Model.Ignore,
		nfc: f.Normalizer != nil && f.Normalizer.Type == "NFC", spaces: tok.sp != nil, words: tok.splitter,
	}
	if n.spaces {
		n.words = wholeSplit{}
	}
	for rank, m := range f.Model.Merges {
		var pair [2]string
		if json.Unmarshal(m, &pair) != nil {
			var s string
			if err := json.Unmarshal(m, &s); err != nil {
				t.Fatal(err)
			}
			pair[0], pair[1], _ = strings.Cut(s, " ")
		}
		n.ranks[pair] = rank
	}
	for _, a := range f.Added {
		if a.Normalized {
			n.normal = append(n.normal, a)
		} else {
			n.raw = append(n.raw, a)
		}
	}
	return n
}

// cut calls text and token in order for the leftmost, longest matches of the tokens.
func cut(s string, tokens []AddedToken, text func(string), token func(uint32)) {
	from := 0
	for i := 0; i < len(s); {
		best := -1
		for k, a := range tokens {
			if strings.HasPrefix(s[i:], a.Content) && (best < 0 || len(a.Content) > len(tokens[best].Content)) {
				best = k
			}
		}
		if best < 0 {
			i++
			continue
		}
		text(s[from:i])
		token(tokens[best].ID)
		i += len(tokens[best].Content)
		from = i
	}
	text(s[from:])
}

func (n *naive) encode(s string) []uint32 {
	var out []uint32
	token := func(id uint32) { out = append(out, id) }
	cut(s, n.raw, func(s string) {
		if n.nfc {
			s = string((&normalizer{wanted: new(watch)}).appendNFC(nil, s))
		}
		cut(s, n.normal, func(s string) {
			if s == "" {
				return
			}
			if n.spaces {
				s = strings.ReplaceAll(spaceMark+s, " ", spaceMark)
			}
			last := uint32(0)
			for _, e := range wordEnds(n.words, s, 64) {
				out = append(out, n.word(s[last:e])...)
				last = e
			}
		}, token)
	}, token)
	return out
}

func (n *naive) word(w string) []uint32 {
	var parts []string
	if n.spaces {
		for _, r := range w {
			c := string(r)
			if _, ok := n.vocab[c]; ok {
				parts = append(parts, c)
				continue
			}
			for _, b := range []byte(c) {
				parts = append(parts, "<0x"+strings.ToUpper(string("0123456789abcdef"[b>>4])+string("0123456789abcdef"[b&15]))+">")
			}
		}
	} else {
		for _, b := range []byte(w) {
			parts = append(parts, string(byteToRune[b]))
		}
	}
	if id, ok := n.vocab[strings.Join(parts, "")]; ok && n.ignore {
		return []uint32{id}
	}
	for {
		best, at := -1, 0
		for i := 0; i+1 < len(parts); i++ {
			if r, ok := n.ranks[[2]string{parts[i], parts[i+1]}]; ok && (best < 0 || r < best) {
				best, at = r, i
			}
		}
		if best < 0 {
			break
		}
		parts[at] += parts[at+1]
		parts = append(parts[:at+1], parts[at+2:]...)
	}
	ids := make([]uint32, len(parts))
	for i, p := range parts {
		ids[i] = n.vocab[p]
	}
	return ids
}

// pieces builds a text from what tokenizers treat in special ways: each byte of script takes a part of s, an added token, nearly
// one, a part of a sample, white space, or what stands before again.
func pieces(s string, script []byte, added []AddedToken) string {
	const longest = 1000 // the naive implementation is quadratic
	var b strings.Builder
	take := func(text string, at, n int) string {
		at = max(0, min(at, len(text)))
		for at > 0 && at < len(text) && !utf8.RuneStart(text[at]) {
			at--
		}
		end := min(at+n, len(text))
		for end < len(text) && !utf8.RuneStart(text[end]) {
			end++
		}
		return text[at:end]
	}
	at := 0
	for _, c := range script {
		n := int(c >> 3)
		switch c & 7 {
		case 0, 1:
			part := take(s, at, n+1)
			at += len(part)
			b.WriteString(part)
		case 2:
			b.WriteString(added[n%len(added)].Content)
		case 3:
			token := added[n%len(added)].Content
			b.WriteString(token[:len(token)-1])
		case 4:
			sample := samples[n%len(samples)]
			b.WriteString(take(sample, 7*at%(len(sample)+1), 1+at%40))
			at++
		case 5:
			b.WriteString(take("\n\n \t  \r\n\u00a0\u3000\u2028 ", n%8, 1+n/8))
		case 6:
			b.WriteString(take(b.String(), b.Len()-n, n))
		case 7: // words of one unit are merged in another way
			b.WriteString(strings.Repeat(take(s, at, 1+n%4), 1+8*n))
		}
		if b.Len() > longest {
			return take(b.String(), 0, longest)
		}
	}
	b.WriteString(take(s, at, longest-b.Len()))
	return b.String()
}

// FuzzEncode compares with the naive implementation, through all caches, and with what is made of a text whose beginning is known.
func FuzzEncode(f *testing.F) {
	for i, s := range samples {
		f.Add(s, []byte{byte(i)})
	}
	f.Add("\xff\xfe", []byte{})
	f.Add("\xed\xa0\x80", []byte{0xff})
	f.Add("a\u0301 \u1112\u1161\u11ab's 12345 \u2581", []byte{0x09, 0x12, 0x1b, 0x24, 0x2d, 0x36, 0x3f, 0x0a, 0x33, 0x5e, 0xff, 0x77})
	f.Add("x", []byte{0xff, 0xff, 0xff, 0x02, 0xfe, 0x03, 0xfe, 0x05, 0xfe})
	tested := []string{"qwen3", "mistral_7b"}
	models := map[string]*naive{}
	for _, name := range tested {
		models[name] = newNaive(f, name)
	}
	f.Fuzz(func(t *testing.T, s string, script []byte) {
		for _, name := range tested {
			tok := family(t, name)
			text := pieces(s, script, tok.added)
			got, cuts, err := tok.EncodeAfter(nil, nil, nil, text, Cut{}, false)
			if !utf8.ValidString(text) {
				if err == nil {
					t.Fatalf("%q was accepted", text)
				}
				continue
			}
			if want := models[name].encode(text); err != nil || !slices.Equal(got, want) {
				t.Fatalf("%s: %q: %v, want %v (%v)", name, text, got, want, err)
			}
			if again, err := tok.Encode(make([]uint32, 0, 8), text, false); err != nil || !slices.Equal(again, got) {
				t.Fatalf("%s: %q: %v, then %v (%v)", name, text, got, again, err)
			}
			for _, cut := range cuts { // the text goes on in its own way, and in another
				for _, other := range []string{text, text[:cut.Text] + strings.Repeat(s[:min(len(s), 9)], 2)} {
					want := got
					if other != text {
						if !utf8.ValidString(other) {
							continue
						}
						want = models[name].encode(other)
					}
					rest, _, err := tok.EncodeAfter(nil, slices.Clone(got[:cut.IDs]), nil, other, cut, false)
					if err != nil || !slices.Equal(rest, want) {
						t.Fatalf("%s: %q after %+v: %v, want %v (%v)", name, other, cut, rest, want, err)
					}
				}
			}
		}
	})
}
