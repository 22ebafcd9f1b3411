package bpe

import (
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
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
