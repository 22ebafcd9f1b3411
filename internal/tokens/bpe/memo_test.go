package bpe

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestStretchesAreKeptWhenTheyComeAgain counts what the memo holds after encoding a text once,
// twice and three times; the ids are the same each time.
func TestStretchesAreKeptWhenTheyComeAgain(t *testing.T) {
	tok, err := Load(os.DirFS(filepath.Join("..", "models", "mistral_7b")))
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Repeat("The light of the sun is made of rays. ", 100)
	for i := range 40 {
		text += strings.Repeat(string(rune('a'+i%26)), i) + " is another word of the text, and no line is like the one before it;\n"
	}
	kept := func() (bytes uint64) {
		for i := range tok.memo.shards {
			if s := tok.memo.shards[i].store; s != nil {
				bytes += s.textEnd
			}
		}
		return bytes
	}
	var want []uint32
	var held [3]uint64
	for round := range held {
		ids, err := tok.Encode(nil, text, false)
		if err != nil {
			t.Fatal(err)
		}
		if round == 0 {
			want = ids
		} else if !slices.Equal(ids, want) {
			t.Errorf("round %d: %v, want %v", round, ids, want)
		}
		held[round] = kept()
	}
	// Stretches that repeat within the text are kept in the first round.
	if held[0] > held[1]/2 || held[1] < 2000 || held[2] != held[1] {
		t.Errorf("the memo holds %v bytes after one, two and three times %d bytes", held, len(text))
	}
}
