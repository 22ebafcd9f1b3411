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

// TestKnownWordsKeepTheBestPath compares texts whose words are kept with the same texts taken as one word each, for models in
// which rounding often decides, with sums that SentencePiece starts anew. Half of the models have no space, or join it to a word.
func TestKnownWordsKeepTheBestPath(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 10))
	kept := 0
	for n := range 24 {
		m := &spmModel{pieces: []spmPiece{{text: "<unk>", kind: pieceUnknown}}, fallback: n%3 == 0}
		seen := map[string]bool{}
		add := func(text string) {
			if !seen[text] {
				seen[text] = true
				m.pieces = append(m.pieces, spmPiece{text: text, score: -10 - float32(r.IntN(9))/10 - r.Float32()*float32(n%3%2), kind: pieceNormal})
			}
		}
		if n/2%4 != 1 {
			add(spaceMark)
		}
		if n/2%4 == 3 {
			add("a" + spaceMark + "b")
		}
		for range 60 {
			var b strings.Builder
			b.WriteString([]string{"", spaceMark}[r.IntN(2)])
			for range 1 + r.IntN(4) {
				b.WriteByte("aabcd"[r.IntN(5)])
			}
			add(b.String())
		}
		made := func() *Tokenizer {
			tok, err := m.tokenizer(Config{})
			if n%2 == 0 { // sums of 64 bits, of scores that these do not have exactly
				var rows []string
				for _, p := range m.pieces {
					rows = append(rows, fmt.Sprintf("[%q,%.4f]", p.text, p.score))
				}
				tok, err = parse([]byte(`{"normalizer":{"type":"Replace","pattern":{"String":" "},"content":"▁"},"model":{"type":"Unigram","unk_id":0,"vocab":[`+
					strings.Join(rows, ",")+`]}}`), Config{})
			}
			if err != nil {
				t.Fatal(err)
			}
			return tok
		}
		tok, whole := made(), made()
		if _, apart := tok.unigram.words.(spaceSplit); apart != (n/2%2 == 0) {
			t.Fatalf("model %d is cut at spaces: %v", n, apart)
		}
		whole.unigram.words = wholeSplit{}
		words := make([]string, 1000)
		for i := range words {
			var b strings.Builder
			for range 1 + r.IntN(12) {
				b.WriteString([]string{"a", "a", "b", "c", "d", "é"}[max(r.IntN(5), r.IntN(60)-54)])
			}
			words[i] = b.String()
		}
		for range 6 {
			text := make([]string, r.IntN(6000))
			for i := range text {
				text[i] = words[r.IntN(len(words))]
			}
			s := strings.Join(text, " ")
			got, err := tok.Encode(nil, s, false)
			want, e := whole.Encode(nil, s, false)
			if err != nil || e != nil {
				t.Fatal(err, e)
			}
			if !slices.Equal(got, want) {
				t.Fatalf("model %d, %d bytes: got %d ids, want %d others", n, len(s), len(got), len(want))
			}
		}
		for i := range tok.encoders.free[0].front {
			if tok.encoders.free[0].front[i][0].key != [2]uint64{} {
				kept++
			}
		}
	}
	if t.Logf("%d words kept", kept); kept < 1000 {
		t.Error("too few")
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
		trie, err := newByteTrie(v)
		if err != nil {
			t.Fatal(err)
		}
		find := func(token string) uint32 {
			node := uint32(trieRoot)
			for _, b := range []byte(token) {
				if node = trie.child(node, b); trie[node].key == 0 {
					return 0
				}
			}
			return trie[node].token
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
	f.Add([]byte{12, 0, 0, 0, 0, 4, 0, 0, 'e', 1, 0, 0, 1, 0, 0, 128, 'e', 0}, "e\u0301 e")
	f.Fuzz(func(t *testing.T, raw []byte, text string) {
		if m, err := newCharsmap(raw); err == nil && utf8.ValidString(text) {
			m.normalize(&encoder{}, text)
		}
	})
}
