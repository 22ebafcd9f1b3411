package bpe

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestStretchesAreKept counts what the memo holds after encoding a text once, twice and three times: while it has room all
// that came, later what comes again. The ids are the same each time.
func TestStretchesAreKept(t *testing.T) {
	tok, err := Load(os.DirFS(filepath.Join("..", "models", "mistral_7b")))
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Repeat("The light of the sun is made of rays. ", 100)
	for i := range 40 {
		text += strings.Repeat(string(rune('a'+i%26)), i) + " is another word of the text, and no line is like the one before it;\n"
	}
	var want []uint32
	for _, full := range []bool{false, true} {
		room := uint64(memoText)
		if full {
			room = 0
		}
		for i := range tok.memo.shards {
			tok.memo.shards[i].store, tok.memo.shards[i].once = newStore(memoSlots, memoText, memoIDs), new([memoOnce]uint32)
			tok.memo.shards[i].store.textEnd = memoText - room
		}
		var held [3]uint64
		for round := range held {
			ids, err := tok.Encode(nil, text, false)
			if err != nil {
				t.Fatal(err)
			}
			if want == nil {
				want = ids
			} else if !slices.Equal(ids, want) {
				t.Errorf("full %v, round %d: %v, want %v", full, round, ids, want)
			}
			for i := range tok.memo.shards {
				held[round] += tok.memo.shards[i].store.textEnd + room - memoText
			}
		}
		// Stretches that repeat within the text are kept in the first round in any case.
		if full == (held[0] > held[1]/2) || held[1] < 2000 || held[2] != held[1] {
			t.Errorf("full %v: the memo holds %v bytes more after one, two and three times %d bytes", full, held, len(text))
		}
	}
}

// What the text of one space leaves in the caches, no other space finds: the time that a text takes does not tell it.
func TestSpacesShareNoCaches(t *testing.T) {
	for _, name := range families {
		tok := family(t, name)
		memo := func() (n uint64) {
			for i := range tok.memo.shards {
				if st := tok.memo.shards[i].store; st != nil {
					n += st.textEnd
				}
			}
			return n
		}
		words := func() (n uint64) {
			for _, enc := range tok.encoders.free {
				n += enc.long.textEnd
			}
			return n
		}
		text := strings.Repeat("No two "+name+" are alike, and each of them says so. ", 20)
		for i := range 30 {
			text += strings.Repeat(string(rune('a'+i%26)), i) + " is a word that comes once; " + name + strings.Repeat("xqzj", 10+i) + " is a long one.\n"
		}
		want, err := tok.Encode(nil, text, false)
		if err != nil {
			t.Fatal(err)
		}
		for _, space := range []uint64{rand.Uint64(), rand.Uint64()} {
			var first [2]uint64 // in the first two rounds: a full memo keeps some segments the second time only
			for round := range 3 {
				segments, long := memo(), words()
				ids, _, err := tok.EncodeAfter(nil, nil, nil, text, Cut{Space: space}, false)
				if err != nil || !slices.Equal(ids, want) {
					t.Fatalf("%s: got other ids than without a space, or %v", name, err)
				}
				got := [2]uint64{memo() - segments, words() - long}
				for i, what := range []string{"segments", "long words"} {
					if round < 2 {
						first[i] += got[i]
					}
					if round == 0 && got[i] == 0 || round == 2 && got[i] > first[i]/4 { // chance may have evicted some
						t.Errorf("%s, space %x, time %d: got %d bytes of %s computed, before %d", name, space, round, got[i], what, first[i])
					}
				}
			}
		}
		segments, long := memo(), words()
		if _, err := tok.Encode(nil, text, false); err != nil || memo()-segments+words()-long > uint64(len(text)/4) { // chance may have evicted some
			t.Errorf("%s: without a space: got %d bytes of segments and %d of long words computed again, or %v", name, memo()-segments, words()-long, err)
		}
	}
}

// The same for the words of a pipeline.
func TestSpacesShareNoWordsOfPipelines(t *testing.T) {
	literal := &literalBPE{t: family(t, "qwen3"), unk: 1}
	enc := newEncoder(literal.t)
	for i, fresh := range []bool{true, false, true, false} {
		enc.space = uint64(i/2) * 0x1234567890abcdef
		before := enc.long.textEnd
		literal.word(enc, nil, "averylongwordindeed")
		if got := enc.long.textEnd > before; got != fresh {
			t.Errorf("time %d: the word was computed: %v, want %v", i, got, fresh)
		}
	}
}

// TestWordCaches: words of all sizes with few and many ids, whole and as parts, in the middle and at the end of a text, and
// at each capacity of the result, have the ids that merging yields, new and known.
func TestWordCaches(t *testing.T) {
	letters := []rune("etaosinxqz \x00\n7é中😀")
	for _, name := range families {
		tok := family(t, name)
		enc, r := newEncoder(tok), rand.New(rand.NewPCG(12, 1))
		for range 4000 {
			word := ""
			for n := 1 + r.IntN(maxWord+8); len(word) < n; {
				word += string(letters[r.IntN(1+r.IntN(len(letters)))])
			}
			want := enc.merged(nil, []byte(word), 0, len(word), true)
			mixed := word + strings.Repeat("\x00", r.IntN(3)) + word[:r.IntN(len(word))*r.IntN(2)] // one that begins alike
			enc.lookup(nil, []byte(mixed), 0, []uint32{uint32(len(mixed))}, true)
			for _, text := range []string{word, word + mixed + strings.Repeat("x", 40), mixed} {
				for range 2 {
					got := enc.lookup(make([]uint32, 0, r.IntN(10)), []byte(text), 0, []uint32{uint32(len(word))}, r.IntN(2) == 0)
					if !slices.Equal(got, want) {
						t.Fatalf("%s: %q in %q: %v, want %v", name, word, text, got, want)
					}
				}
			}
		}
	}
}
