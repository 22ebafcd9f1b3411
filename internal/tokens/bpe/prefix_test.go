package bpe

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"unsafe"
)

// chatMarks are the start and the end of a message, by family.
var chatMarks = map[string][2]string{
	"qwen3":        {"<|im_start|>user\n", "<|im_end|>\n"},
	"deepseek_v3":  {"<｜User｜>", "<｜end▁of▁sentence｜>"},
	"gptoss":       {"<|start|>user<|message|>", "<|end|>"},
	"mistral_nemo": {"[INST]", "[/INST] x</s>"},
	"mistral_7b":   {"[INST] ", " [/INST] x</s>"},
}

// TestCacheGivesTheIDsOfEncode grows, branches and edits conversations; the ids equal those of
// encoding without a cache.
func TestCacheGivesTheIDsOfEncode(t *testing.T) {
	for _, name := range families {
		t.Run(name, func(t *testing.T) {
			tok := family(t, name)
			r := rand.New(rand.NewPCG(5, 6))
			c := NewCache(tok, 300_000)
			marks := chatMarks[name]
			turn := func() string {
				return marks[0] + randomText(r, r.IntN(200)) + marks[1]
			}
			chats := []string{strings.Repeat(marks[0]+randomText(r, 200)+marks[1], 6)}
			reused := 0
			for range 150 {
				s := chats[r.IntN(len(chats))]
				switch r.IntN(4) {
				case 0, 1:
					s += turn()
				case 2: // another continuation of a prefix, cut anywhere
					s = strings.ToValidUTF8(s[:r.IntN(len(s)+1)], "") + turn()
				case 3:
				}
				special := r.IntN(3) == 0
				chats = append(chats, s)
				got, p, err := c.Encode([]uint32{7}, s, special)
				if err != nil {
					t.Fatal(err)
				}
				want, err := tok.Encode([]uint32{7}, s, special)
				if err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(got, want) {
					t.Fatalf("%d bytes, %d ids reused: differs", len(s), p.Reused)
				}
				checkValues(t, p, got[1:])
				if p.Reused > 0 {
					reused++
				}
				if c.Bytes() > 300_000 {
					t.Fatalf("%d bytes", c.Bytes())
				}
			}
			if reused < 20 {
				t.Errorf("only %d of 150 prompts reused anything", reused)
			}
		})
	}
}

// checkValues stores running sums of the ids as values. Values returns only those of this prompt.
func checkValues(t *testing.T, p Prefix, ids []uint32) {
	t.Helper()
	key := ValuesKey{Seed: 9, Stride: 16}
	var want []uint64
	var sum uint64
	for i, id := range ids {
		sum = sum*31 + uint64(id)
		if (i+1)%key.Stride == 0 {
			want = append(want, sum)
		}
	}
	got := p.Values(nil, key)
	if len(got) > len(want) || !slices.Equal(got, want[:len(got)]) {
		t.Fatalf("values of another prompt: %d of %d", len(got), len(want))
	}
	p.SetValues(key, want)
	again := p.Values(nil, key)
	if !slices.Equal(again, want[:len(again)]) {
		t.Fatal("values changed")
	}
}

// TestCacheCostsOnlyTheNewTurn: the next turn reuses all but the end of the previous prompt.
func TestCacheCostsOnlyTheNewTurn(t *testing.T) {
	tok := family(t, "qwen3")
	c := NewCache(tok, 1<<24)
	chat := conversationText(81, 61_000)
	before, _, err := c.Encode(nil, chat, false)
	if err != nil {
		t.Fatal(err)
	}
	_, p, err := c.Encode(nil, chat+"<|im_start|>user\nAnd then?<|im_end|>\n", false)
	if err != nil {
		t.Fatal(err)
	}
	if p.Reused < len(before)-10 {
		t.Errorf("%d of %d ids reused", p.Reused, len(before))
	}
	if p.Kept <= p.Reused-10 {
		t.Errorf("%d kept, %d reused", p.Kept, p.Reused)
	}
}

// conversationText returns a Qwen chat of messages with about size bytes.
func conversationText(messages, size int) string {
	var b strings.Builder
	for i := range messages {
		role := []string{"user", "assistant"}[i%2]
		fmt.Fprintf(&b, "<|im_start|>%s\nMessage %d. ", role, i)
		for b.Len() < (i+1)*size/messages-12 {
			b.WriteString(samples[0][:60])
			fmt.Fprintf(&b, " %d ", b.Len())
		}
		b.WriteString("<|im_end|>\n")
	}
	return b.String()
}

// TestCacheConcurrently shares conversations between goroutines.
func TestCacheConcurrently(t *testing.T) {
	tok := family(t, "qwen3")
	c := NewCache(tok, 400_000)
	chat := conversationText(30, 20_000)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 1))
			s := chat
			for range 8 {
				s += "<|im_start|>user\n" + randomText(r, 40+g%2) + "<|im_end|>\n"
				got, p, err := c.Encode(nil, s, false)
				want, err2 := tok.Encode(nil, s, false)
				if err != nil || err2 != nil || !slices.Equal(got, want) {
					t.Errorf("goroutine %d: wrong ids (%v, %v)", g, err, err2)
					return
				}
				p.SetValues(ValuesKey{Stride: 1}, make([]uint64, len(got)))
				p.Values(nil, ValuesKey{Stride: 1})
			}
		})
	}
	wg.Wait()
}

// A conversation's text is not overwritten while a call of Encode reads it, even if it is
// evicted; afterwards its memory is reused.
func TestDroppedConversationsServeAgain(t *testing.T) {
	tok := family(t, "qwen3")
	c := NewCache(tok, 1<<20)
	prompt := func(i int) string {
		return fmt.Sprintf("<|im_start|>user\n%03d ", i) + conversationText(1, 20_000) + "<|im_end|>\n"
	}
	encode := func(i int) {
		if _, _, err := c.Encode(nil, prompt(i), false); err != nil {
			t.Fatal(err)
		}
	}
	encode(0)
	e, known, _ := c.find(c.digest(nil, prompt(0), false))
	if e == nil {
		t.Fatal("got no cached conversation, want one")
	}
	text, ids := string(known.text), slices.Clone(known.ids)
	for i := range 50 {
		encode(1 + i)
	}
	if e.place != nil {
		t.Fatal("the cache has room for everything: nothing is tested")
	}
	if string(known.text) != text || !slices.Equal(known.ids, ids) {
		t.Error("got overwritten text while a reader holds it, want it unchanged")
	}
	c.leave(e)
	if e.text != nil || e.ids != nil {
		t.Error("got slices still attached after their last reader left, want them recycled")
	}
	again := false
	for range 50 {
		again = again || unsafe.SliceData(c.texts.Take(len(text))) == unsafe.SliceData(known.text)
	}
	if !again {
		t.Error("got fresh memory, want the recycled slice")
	}
}

// Long prompts that occur once are not kept; the part that two of them share is kept when it
// occurs again.
func TestLongPromptsAreKeptWhenTheyComeAgain(t *testing.T) {
	tok := family(t, "qwen3")
	c := NewCache(tok, 16<<20)
	marks := chatMarks["qwen3"]
	shared := marks[0] + strings.Repeat("all of them begin so. ", freshText/20) + marks[1]
	for i, kept := range []bool{false, true, true} {
		text := shared + marks[0] + fmt.Sprint(i) + strings.Repeat(" and each goes on", freshText/16) + marks[1]
		got, p, err := c.Encode(nil, text, false)
		if err != nil {
			t.Fatal(err)
		}
		want, err := tok.Encode(nil, text, false)
		if err != nil || !slices.Equal(got, want) {
			t.Fatalf("prompt %d differs, %v", i, err)
		}
		if (c.Bytes() > 0) != kept || (p.Reused > 0) != (i == 2) || c.Bytes() > 10*len(shared) {
			t.Errorf("prompt %d: %d bytes kept, %d ids reused", i, c.Bytes(), p.Reused)
		}
	}
}
