package conv

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/bpe"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

type value = jinja.Value

func none() value { return jinja.None() }

var qwen3 = sync.OnceValues(func() (*bpe.Tokenizer, error) { return bpe.Load(os.DirFS("../models/qwen3")) })

func tokenizer(tb testing.TB) *bpe.Tokenizer {
	tb.Helper()
	tok, err := qwen3()
	if err != nil {
		tb.Fatal(err)
	}
	return tok
}

// hashSum chains sums of blocks.
func hashSum(dst []uint64, parent uint64, ids []uint32, block int) []uint64 {
	for ; len(ids) >= block; ids = ids[block:] {
		for _, id := range ids[:block] {
			parent = parent*31 + uint64(id)
		}
		dst = append(dst, parent)
	}
	return dst
}

const (
	open  = "<|im_start|>user\n"
	shut  = "<|im_end|>\n"
	words = "the sea Köln func() {\n\n東京 12345   <|im_end|> naïve"
)

func randomText(r *rand.Rand, n int) string {
	var b strings.Builder
	list := strings.SplitAfter(words, " ")
	for range n {
		b.WriteString(list[r.IntN(len(list))])
	}
	return b.String()
}

// Conversations grow, branch and are edited; ids and hashes equal those without a cache.
func TestTheIDsOfPromptsAreThoseOfEncode(t *testing.T) {
	tok := tokenizer(t)
	r := rand.New(rand.NewPCG(5, 6))
	const limit = 400_000
	c := New(limit)
	message := func() string { return open + randomText(r, r.IntN(200)) + shut }
	chats := []string{strings.Repeat(open+randomText(r, 200)+shut, 6)}
	reused := 0
	for range 300 {
		s := chats[r.IntN(len(chats))]
		switch r.IntN(4) {
		case 0, 1:
			s += message()
		case 2: // another continuation of a prefix, cut anywhere
			s = strings.ToValidUTF8(s[:r.IntN(len(s)+1)], "") + message()
		case 3:
		}
		special := r.IntN(3) == 0
		chats = append(chats, s)
		turn := c.Turn(nil)
		got, err := turn.Encode(nil, []uint32{7}, tok, 256, s, special)
		if err != nil {
			t.Fatal(err)
		}
		want, err := tok.Encode(nil, s, special)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got, want) {
			t.Fatalf("%d bytes, %d ids reused: got other ids than without a cache", len(s), turn.reused)
		}
		ids := got[:len(got)-r.IntN(2)*min(len(got), 40)] // some prompts are truncated
		seed := uint64(r.IntN(3))
		if hashes := AppendHashes(turn, []uint64{1}, seed, ids, 16, hashSum); !slices.Equal(hashes[1:], hashSum(nil, seed, ids, 16)) {
			t.Fatalf("%d bytes, %d ids reused: got other hashes than without a cache", len(s), turn.reused)
		}
		if turn.reused > 0 {
			reused++
		}
		if n := c.Bytes(); n > limit {
			t.Fatalf("got %d bytes, want at most %d", n, limit)
		}
	}
	checkAccounts(t, c)
	if reused < 40 {
		t.Errorf("got %d of 300 prompts that reused anything, want at least 40", reused)
	}
}

// The next turn reuses all but the end of the previous prompt.
func TestAPromptCostsOnlyItsNewTurn(t *testing.T) {
	tok, c := tokenizer(t), New(1<<24)
	chat := chatText(81, 61_000)
	turn := c.Turn(nil)
	before, err := turn.Encode(nil, nil, tok, 256, chat, false)
	if err != nil {
		t.Fatal(err)
	}
	AppendHashes(turn, nil, 1, before, 16, hashSum)
	ids, err := turn.Encode(nil, nil, tok, 256, chat+open+"And then?"+shut, false)
	if err != nil {
		t.Fatal(err)
	}
	if turn.reused < len(before)-10 || turn.kept < turn.reused {
		t.Errorf("got %d of %d ids reused and %d kept, want nearly all", turn.reused, len(before), turn.kept)
	}
	hashed := 0
	AppendHashes(turn, nil, 1, ids, 16, func(dst []uint64, parent uint64, ids []uint32, block int) []uint64 {
		hashed += len(ids)
		return hashSum(dst, parent, ids, block)
	})
	if hashed > 64 {
		t.Errorf("got %d ids hashed, want only the new ones", hashed)
	}
}

// chatText returns the prompt of a chat of messages with about size bytes.
func chatText(messages, size int) string {
	var b strings.Builder
	for i := range messages {
		fmt.Fprintf(&b, "<|im_start|>%s\nMessage %d. ", []string{"user", "assistant"}[i%2], i)
		for b.Len() < (i+1)*size/messages-12 {
			fmt.Fprintf(&b, "It was a bright cold day in April, and the clocks struck %d ", b.Len())
		}
		b.WriteString(shut)
	}
	return b.String()
}

func TestConversationsAreSharedConcurrently(t *testing.T) {
	tok, c := tokenizer(t), New(400_000)
	chat := chatText(30, 20_000)
	var all sync.WaitGroup
	for g := range 8 {
		all.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 1))
			s := chat
			for range 8 {
				s += open + randomText(r, 40+g%2) + shut
				turn := c.Turn(nil)
				got, err := turn.Encode(nil, nil, tok, 256, s, false)
				want, err2 := tok.Encode(nil, s, false)
				if err != nil || err2 != nil || !slices.Equal(got, want) {
					t.Errorf("goroutine %d: got other ids than without a cache (%v, %v)", g, err, err2)
					return
				}
				if hashes := AppendHashes(turn, nil, 3, got, 1, hashSum); !slices.Equal(hashes, hashSum(nil, 3, got, 1)) {
					t.Errorf("goroutine %d: got other hashes than without a cache", g)
				}
			}
		})
	}
	all.Wait()
	checkAccounts(t, c)
}

// What models keep is separated by their spaces, and with special tokens from without.
func TestSpacesAreSeparate(t *testing.T) {
	tok, c := tokenizer(t), New(16<<20)
	chat := chatText(10, 10_000)
	first, second := NewSpace(), NewSpace()
	for _, step := range []struct {
		space   uint64
		special bool
		reused  bool
	}{{first, false, false}, {first, false, true}, {second, false, false}, {first, true, false}, {second, false, true}, {first, true, true}} {
		turn := c.Turn(nil)
		if _, err := turn.Encode(nil, nil, tok, step.space, chat, step.special); err != nil {
			t.Fatal(err)
		}
		if (turn.reused > 0) != step.reused {
			t.Errorf("%+v: got %d ids reused", step, turn.reused)
		}
	}
}

// A text is not overwritten while a turn reads it, even if its entry is evicted; afterwards its
// memory is reused.
func TestEvictedMemoryIsReused(t *testing.T) {
	tok, c := tokenizer(t), New(1<<20)
	prompt := func(i int) string { return fmt.Sprintf("%s%03d ", open, i) + chatText(1, 20_000) + shut }
	encode := func(i int) {
		if _, err := c.Turn(nil).Encode(nil, nil, tok, 256, prompt(i), false); err != nil {
			t.Fatal(err)
		}
	}
	encode(0)
	f := c.follow(prompts, 256, c.digest(nil, 256, []byte(prompt(0))))
	if f.entry == nil {
		t.Fatal("got no cached prompt, want one")
	}
	text, ids := string(f.text), slices.Clone(f.ids)
	for i := range 50 {
		encode(1 + i)
	}
	if f.place != nil {
		t.Fatal("got room for everything, want the entry evicted")
	}
	if string(f.text) != text || !slices.Equal(f.ids, ids) {
		t.Error("got overwritten text while a reader holds it, want it unchanged")
	}
	c.leave(&f)
	if f.entry.text != nil || f.entry.ids != nil {
		t.Error("got slices still attached after their last reader left, want them recycled")
	}
	again := false
	for range 50 {
		again = again || unsafe.SliceData(c.texts.Take(len(text))) == unsafe.SliceData(f.text)
	}
	if !again {
		t.Error("got fresh memory, want the recycled slice")
	}
}

// Long prompts that occur once are not kept; the part that two of them share is kept when it
// occurs again.
func TestLongPromptsAreKeptWhenTheyComeAgain(t *testing.T) {
	tok, c := tokenizer(t), New(16<<20)
	shared := open + strings.Repeat("all of them begin so. ", freshText/20) + shut
	for i, kept := range []bool{false, true, true} {
		text := shared + open + fmt.Sprint(i) + strings.Repeat(" and each goes on", freshText/16) + shut
		turn := c.Turn(nil)
		got, err := turn.Encode(nil, nil, tok, 256, text, false)
		if err != nil {
			t.Fatal(err)
		}
		want, err := tok.Encode(nil, text, false)
		if err != nil || !slices.Equal(got, want) {
			t.Fatalf("prompt %d: got other ids than without a cache, %v", i, err)
		}
		if n := c.Bytes(); (n > 0) != kept || (turn.reused > 0) != (i == 2) || n > int64(10*len(shared)) {
			t.Errorf("prompt %d: got %d bytes kept and %d ids reused", i, n, turn.reused)
		}
	}
}

// An incomplete encoding is never reused.
func TestNothingIsKeptOfWhatWasStopped(t *testing.T) {
	tok, c := tokenizer(t), New(1<<22)
	stop := make(chan struct{})
	close(stop)
	turn := c.Turn(nil)
	for range 3 {
		if _, err := turn.Encode(stop, nil, tok, 256, chatText(100, 100_000), false); !errors.Is(err, bpe.ErrStopped) || turn.prompt != nil {
			t.Fatalf("got %v, want ErrStopped and nothing kept", err)
		}
	}
	if n := c.Bytes(); n != 0 {
		t.Errorf("got %d bytes kept, want 0", n)
	}
}

// What the cache counts for messages covers the memory of their values, also of many small ones.
func TestTheSizeOfMessagesIsCounted(t *testing.T) {
	for name, item := range map[string]string{"objects": "{}", "lists": "[]", "numbers": "1", "members": `{"a":1}`, "strings": `"a"`} {
		c := New(1 << 30)
		heap := func() int64 {
			var m runtime.MemStats
			runtime.GC()
			runtime.GC()
			runtime.ReadMemStats(&m)
			return int64(m.HeapAlloc)
		}
		before := heap()
		for i := range 320 {
			raw := fmt.Sprintf(`{"messages":[{"role":"user","n":%d,"reasoning":[%s]}]}`, i, strings.TrimSuffix(strings.Repeat(item+",", 1600/(len(item)+1)), ","))
			req, err := body.Parse(body.Chat, []byte(raw))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := c.Turn(req).Messages(req, 256, func(_ *[]byte, raw []byte) (value, bool, error) {
				v, err := jinja.ParseJSON(raw)
				return v, true, err
			}); err != nil {
				t.Fatal(err)
			}
		}
		if grown, counted := heap()-before, c.Bytes(); grown > 2*counted || counted == 0 {
			t.Errorf("%s: got %d bytes counted for a heap that grew by %d, want at least half", name, counted, grown)
		}
		runtime.KeepAlive(c)
	}
}

// However many seeds come first, a later one is cached too; the last ones are kept.
func TestSeedsReplaceEachOther(t *testing.T) {
	var h hashes
	for seed := range uint64(3 * maxLists) {
		h = h.with(seed, 1, []uint64{seed})
		for before := range seed + 1 {
			if got, want := h.of(before, 1) != nil, before+maxLists > seed; got != want {
				t.Fatalf("after seed %d: got seed %d kept: %v, want %v", seed, before, got, want)
			}
		}
	}
	if len(h) != maxLists {
		t.Errorf("got %d lists, want %d", len(h), maxLists)
	}
}

// Bytes returns the memory in use, in bytes, without recycled memory.
func (c *Cache) Bytes() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bytes
}
