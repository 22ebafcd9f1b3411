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

// FuzzEncode compares with the naive implementation, through all caches.
func FuzzEncode(f *testing.F) {
	for _, s := range samples {
		f.Add(s)
	}
	f.Add("\xff\xfe")
	f.Add("\xed\xa0\x80")
	tested := []string{"qwen3", "mistral_7b"}
	models := map[string]*naive{}
	for _, name := range tested {
		models[name] = newNaive(f, name)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if len(s) > 2000 {
			return
		}
		for _, name := range tested {
			got, err := family(t, name).Encode(nil, s, false)
			if !utf8.ValidString(s) {
				if err == nil {
					t.Fatalf("%q was accepted", s)
				}
				continue
			}
			if want := models[name].encode(s); err != nil || !slices.Equal(got, want) {
				t.Fatalf("%s: %q: %v, want %v (%v)", name, s, got, want, err)
			}
		}
	})
}
