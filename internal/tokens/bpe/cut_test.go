package bpe

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// chatMarks are the start and the end of a message, by family.
var chatMarks = map[string][2]string{
	"qwen3":        {"<|im_start|>user\n", "<|im_end|>\n"},
	"deepseek_v3":  {"<｜User｜>", "<｜end▁of▁sentence｜>"},
	"gptoss":       {"<|start|>user<|message|>", "<|end|>"},
	"mistral_nemo": {"[INST]", "[/INST] x</s>"},
	"mistral_7b":   {"[INST] ", " [/INST] x</s>"},
}

// TestEncodeAfterACut continues texts differently after each of their cuts: the ids before the cut
// and those that EncodeAfter appends are the ids of the whole text.
func TestEncodeAfterACut(t *testing.T) {
	for _, name := range families {
		t.Run(name, func(t *testing.T) {
			tok := family(t, name)
			r := rand.New(rand.NewPCG(5, 6))
			marks := chatMarks[name]
			turn := func() string { return marks[0] + randomText(r, r.IntN(200)) + marks[1] }
			checked := 0
			for range 30 {
				text := turn() + turn() + turn() + turn()
				special := r.IntN(3) == 0
				ids, cuts, err := tok.EncodeAfter(nil, []uint32{7}, nil, text, Cut{}, special)
				if err != nil {
					t.Fatal(err)
				}
				for _, cut := range cuts {
					next := text[:cut.Text] + []string{"", " ", "\n", turn(), randomText(r, 20)}[r.IntN(5)]
					got, _, err := tok.EncodeAfter(nil, slices.Clone(ids[:1+cut.IDs]), nil, next, cut, special)
					if err != nil {
						t.Fatal(err)
					}
					want, err := tok.Encode([]uint32{7}, next, special)
					if err != nil {
						t.Fatal(err)
					}
					if !slices.Equal(got, want) {
						t.Fatalf("%q after %+v: got other ids than those of the whole text", next, cut)
					}
					checked++
				}
			}
			if checked < 30 {
				t.Errorf("got %d cuts in 30 chats of four messages, want at least 30", checked)
			}
		})
	}
}
