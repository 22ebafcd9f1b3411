package bpe

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/kvlane/kvlane/internal/lab/cpu"
)

// closed returns a closed stop channel.
func closed() chan struct{} {
	stop := make(chan struct{})
	close(stop)
	return stop
}

// longTexts keep a tokenizer busy in each of its loops.
func longTexts() map[string]string {
	r := rand.New(rand.NewPCG(3, 4))
	letters := func(n int, alphabet string) string {
		b := make([]byte, n)
		for i := range b {
			b[i] = alphabet[r.IntN(len(alphabet))]
		}
		return string(b)
	}
	const n = 1 << 19
	return map[string]string{
		"words":      strings.Repeat(letters(2000, "abcdefgh ,.\n"), n/2000),
		"the same":   strings.Repeat("the theft of the cheese, ", n/25),
		"one word":   letters(n, "abcdefghijklmnop"),
		"marks":      strings.Repeat("e\u0301a\u0300", n/6),
		"characters": strings.Repeat("文字あ、", n/12),
		"specials":   strings.Repeat("<|im_end|>", n/10),
		"blanks":     strings.Repeat(" ", n),
	}
}

// manyShapes returns tokenizers of every kind.
func manyShapes(t *testing.T) map[string]*Tokenizer {
	t.Helper()
	all := map[string]*Tokenizer{"qwen3": family(t, "qwen3"), "mistral_7b": family(t, "mistral_7b")}
	for name, text := range map[string]string{"pipeline": shapeFile(jsonOf{
		"normalizer":    jsonOf{"type": "NFC"},
		"pre_tokenizer": jsonOf{"type": "Split", "pattern": jsonOf{"Regex": `\w+|\W`}, "behavior": "Isolated", "invert": false},
	})} {
		tok, err := loadText(text, nil)
		if err != nil {
			t.Fatal(err)
		}
		all[name] = tok
	}
	return all
}

// TestAStopEndsTheWork: when the encoding of half a megabyte is stopped somewhere, nothing is
// encoded after the next check of the stop channel, and no partial result is cached.
func TestAStopEndsTheWork(t *testing.T) {
	for shape, tok := range manyShapes(t) {
		for name, text := range longTexts() {
			want, err := tok.Encode(nil, text, false)
			if err != nil {
				t.Fatal(err)
			}
			for _, later := range []int{0, 1000, 3 * lookEvery} {
				w := newEncoder(tok)
				w.watch = watch{stop: closed(), left: later}
				got, err := w.encode(nil, text, 0)
				if !errors.Is(err, ErrStopped) {
					t.Fatalf("%s, %s: got %d ids, %v, want ErrStopped", shape, name, len(got), err)
				}
				// a byte has at most two ids
				if limit := 2 * (later + lookEvery); len(got) > limit || len(got) > 0 && len(got) >= len(want) {
					t.Errorf("%s, %s: %d of %d ids after a stop at %d bytes", shape, name, len(got), len(want), later)
				}
			}
			for range 3 { // the memo keeps text from its second occurrence on
				again, err := tok.Encode(nil, text, false)
				if err != nil || !slices.Equal(again, want) {
					t.Fatalf("%s, %s: other ids after stops: %v", shape, name, err)
				}
			}
		}
	}
}

// TestAStopEndsALongMerge: a stop ends the merge of a long word early.
func TestAStopEndsALongMerge(t *testing.T) {
	tok := family(t, "qwen3")
	parts := tok.symbols(nil, []byte(longTexts()["one word"]))
	merged := func(stop <-chan struct{}) (ids, left int) {
		w := &merger{parts: slices.Clone(parts)}
		w.rankPairs(tok.merges, 0, len(parts))
		pairs := 0
		ranked := slices.Clone(w.parts)
		out := w.queued(tok.merges, nil, &watch{stop: stop})
		for i := range ranked {
			if ranked[i] == w.parts[i] {
				pairs++
			}
		}
		return len(out), pairs
	}
	ids, _ := merged(nil)
	if ids == 0 {
		t.Fatal("nothing is merged without a stop")
	}
	ids, untouched := merged(closed())
	if ids != 0 || untouched < len(parts)-8*mergesEvery {
		t.Errorf("%d ids; %d of %d symbols are untouched", ids, untouched, len(parts))
	}
}

// TestAStopEndsTheWaitForAHugeWord: a stop ends the wait for the lock and for an encoder.
func TestAStopEndsTheWaitForAHugeWord(t *testing.T) {
	tok := family(t, "qwen3")
	text := longTexts()["one word"]
	huge <- struct{}{}
	stop, done := make(chan struct{}), make(chan error, 1)
	go func() {
		_, err := tok.EncodeUntil(stop, nil, text, false)
		done <- err
	}()
	close(stop)
	if err := <-done; !errors.Is(err, ErrStopped) {
		t.Errorf("got %v, want ErrStopped", err)
	}
	huge.give()
	for range cap(tok.encoders.tickets) {
		tok.encoders.tickets <- struct{}{}
	}
	for range cap(tok.encoders.tickets) {
		if _, err := tok.EncodeUntil(closed(), nil, text, false); !errors.Is(err, ErrStopped) {
			t.Errorf("got %v, want ErrStopped", err)
		}
	}
	for range cap(tok.encoders.tickets) {
		<-tok.encoders.tickets
	}
	if ids, err := tok.EncodeUntil(make(chan struct{}), nil, text, false); err != nil || len(ids) == 0 {
		t.Errorf("a text that is wanted: %d ids, %v", len(ids), err)
	}
}

// TestAStopEndsAClusterOfMarks: a stop ends the search for the end of a grapheme cluster, and the
// replacement of its characters.
func TestAStopEndsAClusterOfMarks(t *testing.T) {
	rules, err := newCharsmap([]byte{8, 0, 0, 0, 0, 4, 0, 0, 'a', 1, 0, 0, 'x', 0})
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Repeat("\u0301", 1<<20)
	enc := &encoder{watch: watch{stop: closed(), left: 1000}}
	rules.normalize(enc, text)
	if over := -enc.watch.left; !enc.watch.stopped || over > lookEvery {
		t.Errorf("got %d bytes read after the stop, want at most %d", over, lookEvery)
	}
	enc.watch = watch{stop: closed(), left: 2*len(text) + 1000}
	if rules.normalize(enc, text); !enc.watch.stopped {
		t.Error("got all characters replaced after the stop, want an end")
	}
	enc.watch = watch{stop: make(chan struct{})}
	if got := rules.normalize(enc, text); got != text || enc.watch.stopped {
		t.Errorf("got %d bytes, want the %d of the text", len(got), len(text))
	}
}

// TestAStopEndsEveryPass: each pass over a text looks at the stop channel at least every lookEvery bytes: of a text of many
// times that, whose end differs, it does not reach the end. seen reports whether a pass did.
func TestAStopEndsEveryPass(t *testing.T) {
	const many = 2 * lookEvery
	removed := component{Behavior: "Removed"}
	pattern := func(text string, regex bool) component {
		c := removed
		if regex {
			c.Pattern.Regex = &text
		} else {
			c.Pattern.String = &text
		}
		return c
	}
	normal := func(kind string, c component, reached string) func(*encoder, string) bool {
		stage, err := normalizeStages[kind](c)
		if err != nil {
			t.Fatal(err)
		}
		return func(enc *encoder, s string) bool {
			enc.match.allow(len(s))
			return strings.HasSuffix(stage(enc, s), reached)
		}
	}
	parts := func(kind string, c component, last string) func(*encoder, string) bool {
		stage, err := splitStages[kind](c)
		if err != nil {
			t.Fatal(err)
		}
		return func(enc *encoder, s string) (seen bool) {
			enc.match.allow(len(s))
			stage(enc, piece{text: s}, func(p piece) {
				enc.watch.over(len(p.text))
				seen = seen || p.text == last
			})
			return seen
		}
	}
	charsmap := []byte{8, 0, 0, 0, 0, 4, 0, 0, 'a', 1, 0, 0, 'x', 0}
	spm, err := (&spmModel{charsmap: charsmap}).normalizer(nil)
	if err != nil {
		t.Fatal(err)
	}
	rules, err := newCharsmap(charsmap)
	if err != nil {
		t.Fatal(err)
	}
	added := newAddedSet([]AddedToken{{Content: "<end>"}, {Content: "#"}}, []string{"<end>", "#"})
	added.setFinal(nil)
	one := newAddedSet([]AddedToken{{Content: "<end>"}}, []string{"<end>"})
	one.setFinal(nil)
	find := func(set *addedSet) func(*encoder, string) bool {
		return func(enc *encoder, s string) bool {
			_, ok := (&search{set: set, s: s, wanted: &enc.watch}).next()
			return ok
		}
	}
	literal := &literalBPE{t: family(t, "qwen3"), unk: 1}
	for name, c := range map[string]struct {
		text string
		seen func(*encoder, string) bool
	}{
		"added tokens":         {strings.Repeat("< ", many) + "<end>", find(added)},
		"one added token":      {strings.Repeat("< ", many) + "<end>", find(one)},
		"NFC's check":          {strings.Repeat("a", many) + "e\u0301", func(enc *encoder, s string) bool { return composeAt(s, 0, &enc.watch) < len(s) }},
		"NFC's check, wide":    {strings.Repeat("文", many) + "e\u0301", func(enc *encoder, s string) bool { return composeAt(s, 0, &enc.watch) < len(s) }},
		"NFC":                  {strings.Repeat("e\u0301", many) + "a\u0301", normal("NFC", removed, "á")},
		"NFC of marks":         {"e" + strings.Repeat("\u0301", many) + "z", normal("NFC", removed, "z")},
		"NFKC":                 {strings.Repeat("文", many) + "①", normal("NFKC", removed, "1")},
		"Replace":              {strings.Repeat("ab", many), normal("Replace", pattern("b", false), "a")},
		"Replace by pattern":   {strings.Repeat("a", many) + "bz", normal("Replace", pattern("b", true), "az")},
		"Split":                {strings.Repeat("ab", many) + "z", parts("Split", pattern("[ab]", true), "z")},
		"Split, no match":      {strings.Repeat("a", many) + "bz", parts("Split", pattern("b", true), "z")},
		"Digits":               {strings.Repeat("a", many) + "1z", parts("Digits", removed, "z")},
		"WhitespaceSplit":      {strings.Repeat(" ", many) + "z", parts("WhitespaceSplit", removed, "z")},
		"WhitespaceSplit, one": {strings.Repeat("a", many) + " z", parts("WhitespaceSplit", removed, "z")},
		"ByteLevel":            {strings.Repeat(" a", many) + "!", parts("ByteLevel", removed, "!")},
		"SentencePiece":        {strings.Repeat("文", many) + "z", func(enc *encoder, s string) bool { return strings.HasSuffix(spm.normalize(enc, s), "z") }},
		"SentencePiece, ASCII": {strings.Repeat("a", many) + "z", func(enc *encoder, s string) bool { return strings.HasSuffix(spm.normalize(enc, s), "z") }},
		"charsmap":             {strings.Repeat("b", many), func(enc *encoder, s string) bool { rules.normalize(enc, s); return !enc.watch.stopped }},
		"U+2581":               {strings.Repeat(spaceMark, many), func(enc *encoder, s string) bool { return strings.HasSuffix(enc.unmarked(s), " ") }},
		"joined words":         {strings.Repeat("a ", many) + "z", func(enc *encoder, s string) bool { return strings.HasSuffix(enc.joinedWords(s), "z") }},
		"symbols":              {strings.Repeat("a", many), func(enc *encoder, s string) bool { return len(literal.symbols(nil, s, &enc.watch)) == len(s) }},
	} {
		if !c.seen(&encoder{watch: watch{stop: make(chan struct{})}}, c.text) {
			t.Errorf("%s: got no end without a stop, want one", name)
		}
		enc := &encoder{watch: watch{stop: closed(), left: 1000}}
		if c.seen(enc, c.text) || !enc.watch.stopped {
			t.Errorf("%s: got the end of %d bytes after a stop, want none", name, len(c.text))
		}
	}
}

// TestPassesWithoutAStopAreShort: the passes that do not look at the stop channel take, on 32 MiB, less than 250 ms of
// processor time each (twice as much is accepted, for a busy machine). They are measured on a quarter, and the best of
// some runs counts.
func TestPassesWithoutAStopAreShort(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector takes most of the time")
	}
	const size, most = 8 << 20, 2 * 250 * time.Millisecond / 4
	word, wide := strings.Repeat("abcdefgh", size/8), strings.Repeat("文字", size/6)
	qwen, mistral := family(t, "qwen3"), family(t, "mistral_7b")
	parts := make([]uint64, 0, size)
	letters := &unigram{unk: maxID}
	steps := make([]uint32, size+1)
	for i := range steps {
		steps[i] = 1<<packedID | 7
	}
	ids := make([]uint32, 0, size)
	follower := &encoder{paths: make([]openPath, 8)}
	for name, pass := range map[string]func(){
		"UTF-8":               func() { utf8.ValidString(word) },
		"UTF-8, wide":         func() { utf8.ValidString(wide) },
		"cuts of the memo":    func() { qwen.cuts.next(bytesOf(word), word, 0) },
		"symbols":             func() { qwen.symbols(parts, bytesOf(word)) },
		"symbols, wide":       func() { qwen.symbols(parts, bytesOf(wide)) },
		"SentencePiece":       func() { mistral.symbols(parts, bytesOf(word)) },
		"SentencePiece, wide": func() { mistral.symbols(parts, bytesOf(wide)) },
		"Unigram": func() {
			steps[size] = 1<<packedID | 7 // the others are the same afterwards
			letters.follow(follower, ids, bytesOf(word), steps)
		},
	} {
		best := time.Hour
		for range 5 {
			best = min(best, threadTime(pass))
		}
		t.Logf("%s: %v for 32 MiB", name, 4*best)
		if best > most {
			t.Errorf("%s: got %v of processor time for 32 MiB, want at most 500 ms", name, 4*best)
		}
	}
}

// threadTime is the processor time that f takes.
func threadTime(f func()) time.Duration {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	began := cpu.Thread()
	f()
	return cpu.Thread() - began
}
