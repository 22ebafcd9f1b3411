package bpe

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// naiveUnigram divides text into the tokens with the highest sum of scores, by all paths to each
// place. It has no unknown neighbours to join and no bytes to spell.
func naiveUnigram(scores map[string]float64, text string) []string {
	type path struct {
		sum  float64
		last string
		ok   bool
	}
	best := make([]path, len(text)+1)
	best[0].ok = true
	lowest := 0.0
	for _, s := range scores {
		lowest = min(lowest, s)
	}
	for i := range len(text) {
		if !best[i].ok || !utf8.RuneStart(text[i]) {
			continue
		}
		_, size := utf8.DecodeRuneInString(text[i:])
		for n := 1; i+n <= len(text); n++ {
			score, ok := scores[text[i:i+n]]
			if _, known := scores[text[i:i+size]]; !known && n == size {
				score, ok = lowest-unkPenalty, true
			}
			if sum := best[i].sum + score; ok && (!best[i+n].ok || sum > best[i+n].sum) {
				best[i+n] = path{sum, text[i : i+n], true}
			}
		}
	}
	var out []string
	for at := len(text); at > 0; at -= len(best[at].last) {
		out = append(out, best[at].last)
	}
	slices.Reverse(out)
	return out
}

// randomUnigram is a model of the letters a to d with equal sums in abundance, and é.
func randomUnigram(t testing.TB, r *rand.Rand) (*Tokenizer, map[string]float64) {
	t.Helper()
	scores := map[string]float64{"é": -3}
	for len(scores) < 40 {
		var b strings.Builder
		for range 1 + r.IntN(5) {
			b.WriteByte("aabcd"[r.IntN(5)])
		}
		scores[b.String()] = -float64(1+r.IntN(30)) / 10
	}
	rows := []string{`["<unk>",0]`}
	for token, score := range scores {
		rows = append(rows, fmt.Sprintf("[%q,%v]", token, score))
	}
	tok, err := parse([]byte(`{"model":{"type":"Unigram","unk_id":0,"vocab":[`+strings.Join(rows, ",")+`]}}`), Config{})
	if err != nil {
		t.Fatal(err)
	}
	return tok, scores
}

func checkUnigram(t *testing.T, tok *Tokenizer, scores map[string]float64, text string) {
	t.Helper()
	ids, err := tok.Encode(nil, text, false)
	if err != nil {
		t.Fatal(err)
	}
	var got, want []string
	for _, id := range ids {
		token, _ := tok.Token(id)
		got = append(got, token)
	}
	for _, token := range naiveUnigram(scores, text) {
		if _, ok := scores[token]; !ok {
			token = "<unk>"
		}
		if n := len(want); n == 0 || token != "<unk>" || want[n-1] != token {
			want = append(want, token)
		}
	}
	if !slices.Equal(got, want) {
		t.Fatalf("%q: got %q, want %q", text, got, want)
	}
}

// TestUnigramIsTheBestPath compares with the naive implementation.
func TestUnigramIsTheBestPath(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for range 30 {
		tok, scores := randomUnigram(t, r)
		for range 100 {
			var b strings.Builder
			for range r.IntN(80) {
				b.WriteString([]string{"a", "a", "a", "b", "c", "d", "é", "ü", "𝔞"}[r.IntN(9)])
			}
			checkUnigram(t, tok, scores, b.String())
		}
	}
}

// TestByteTrieHasItsTokensOnly walks all tokens of random vocabularies, and texts that are not tokens.
func TestByteTrieHasItsTokensOnly(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	for _, alphabet := range []int{2, 20, 256} {
		list, ids, scores := &tokenList{}, map[string]uint32{}, []float64{}
		random := func() string {
			b := make([]byte, 1+r.IntN(9))
			for i := range b {
				b[i] = byte(r.IntN(alphabet) * 255 / (alphabet - 1))
			}
			return string(b)
		}
		for range 3000 {
			if token := random(); ids[token] == 0 {
				if err := list.add([]byte(token), uint32(len(scores))); err != nil {
					t.Fatal(err)
				}
				scores = append(scores, -float64(len(scores)))
				ids[token] = uint32(len(scores)) // id+1
			}
		}
		v, err := list.vocab()
		if err != nil {
			t.Fatal(err)
		}
		trie, err := newByteTrie(v, scores)
		if err != nil {
			t.Fatal(err)
		}
		find := func(token string) uint32 {
			node := uint32(0)
			for i := range len(token) {
				next := trie.units[node].base ^ uint32(token[i])
				if trie.units[next].parent != node {
					return 0
				}
				node = next
			}
			if id := trie.units[node].token; id == 0 || trie.units[node].score == scores[id-1] {
				return id
			}
			return noNode
		}
		for token, id := range ids {
			if got := find(token); got != id {
				t.Fatalf("alphabet of %d, token %q: got %d, want %d", alphabet, token, got, id)
			}
		}
		for range 3000 {
			if text := random(); find(text) != ids[text] {
				t.Fatalf("alphabet of %d, text %q: got %d, want %d", alphabet, text, find(text), ids[text])
			}
		}
	}
}

func FuzzUnigram(f *testing.F) {
	for _, s := range []string{"", "aabacad", "aüéüb", "<unk>", strings.Repeat("a", 200)} {
		f.Add(uint64(1), s)
	}
	f.Fuzz(func(t *testing.T, seed uint64, text string) {
		if len(text) > 500 || !utf8.ValidString(text) || strings.Contains(text, "<unk>") {
			return
		}
		tok, scores := randomUnigram(t, rand.New(rand.NewPCG(seed, 1)))
		checkUnigram(t, tok, scores, text)
	})
}

// TestUnigramTakesBoundedMemory tokenizes a text that is one word.
func TestUnigramTakesBoundedMemory(t *testing.T) {
	tok, err := Load(os.DirFS(filepath.Join("testdata", "foreign", "unigram_bytes")))
	if err != nil {
		t.Fatal(err)
	}
	const size, most = 4 << 20, 24
	text := strings.Repeat("a", size)
	var ids []uint32
	n := allocated(func() { ids, err = tok.Encode(nil, text, false) })
	if err != nil || len(ids) == 0 {
		t.Fatalf("got %d ids, %v", len(ids), err)
	}
	t.Logf("%d ids, %.1f bytes allocated for each byte", len(ids), float64(n)/size)
	if n > most*size {
		t.Errorf("got %d bytes allocated for %d, want at most %d", n, size, most*size)
	}
}

// FuzzCharsmap: a damaged charsmap is refused or changes text, and never reads outside of itself.
func FuzzCharsmap(f *testing.F) {
	f.Add([]byte{8, 0, 0, 0, 0, 4, 0, 0, 'a', 1, 0, 0, 'x', 0}, "abc")
	f.Add([]byte{4, 0, 0, 0, 255, 255, 255, 255}, "é̂\r\n")
	f.Fuzz(func(t *testing.T, raw []byte, text string) {
		if m, err := newCharsmap(raw); err == nil && utf8.ValidString(text) {
			m.normalize(&encoder{}, text)
		}
	})
}
