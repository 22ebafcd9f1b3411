package conv

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/bpe"
)

// same fails if a turn's request differs from a fresh parse of the same body.
func same(t interface {
	Helper()
	Fatalf(format string, args ...any)
}, c *Cache, api body.API, text string,
) {
	t.Helper()
	raw := []byte(text)
	var turn Turn
	err := c.Parse(&turn, api, raw)
	want, wantErr := body.Parse(api, []byte(text))
	if fmt.Sprint(err) != fmt.Sprint(wantErr) {
		t.Fatalf("%s\ngot error %v, want %v", text, err, wantErr)
	}
	if err != nil {
		return
	}
	if turn.Kept() {
		clear(raw) // the cache must not refer to the caller's buffer, which may be reused after the request
	}
	got := *turn.Request
	if got.Elements == nil {
		got.Elements = want.Elements[:0]
	}
	if len(got.Elements) == 0 && len(want.Elements) == 0 {
		got.Elements = want.Elements
	}
	if !reflect.DeepEqual(&got, want) {
		t.Fatalf("%s\ngot  %+v\nwant %+v", text, got, want)
	}
}

func TestParseGivesWhatBodyParseGives(t *testing.T) {
	c := New(1 << 20)
	for _, c := range []*Cache{c, c, c, c, New(0)} {
		for _, text := range []string{`{"model":"a","messages":[{},{}]}`, `{"model":"b"}`, `{"model":`, `[]`} {
			for _, api := range []body.API{body.Chat, body.Completions} {
				same(t, c, api, text)
			}
		}
	}
}

// The result does not depend on the bodies parsed before.
func TestEarlierChatsChangeNothing(t *testing.T) {
	c := New(4 << 20)
	fill := strings.Repeat("what a long day it was; ", 60)
	messages := []string{
		`{"role":"user","content":"` + fill + `"}`, `{"role":"assistant","content":"` + fill + `\"é\" 1"}`, `{"role":"user","content":""}`,
		`"text"`, `[1,"x"]`, `7`, `null`, `{"a":{"b":[{}]}}`, `{"a":1,}`, `{"role":"user","content":"` + fill + "\x01" + `"}`, `{"open":`,
	}
	heads := []string{`{"messages":[`, `{"model":"a","messages":[`, `{"messages":["old"],"model":"b", "messages":[`, `{"tools":[{"messages":[1]}],"messages" : [ `}
	tails := []string{`]}`, `],"model":"c"}`, `],"messages":[{}]}`, `],"max_tokens":1,"tools":[]} `, `]`, `,]}`, ``, `]}x`}
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(3, 8).Draw(t, "messages")
		all := make([]string, 0, n)
		for range n {
			k := rapid.IntRange(0, len(messages)+5).Draw(t, "message")
			all = append(all, messages[max(0, k-6)])
		}
		head, gap := rapid.SampledFrom(heads).Draw(t, "head"), rapid.SampledFrom([]string{",", ", ", "\n,"}).Draw(t, "gap")
		for turn := 1; turn <= n; turn++ {
			if rapid.IntRange(0, 5).Draw(t, "change") == 0 {
				all[rapid.IntRange(0, n-1).Draw(t, "which")] = messages[rapid.IntRange(0, len(messages)-1).Draw(t, "other")]
			}
			same(t, c, body.Chat, head+strings.Join(all[:turn], gap)+rapid.SampledFrom(tails).Draw(t, "tail"))
		}
	})
}

func TestMessagesOfEarlierTurnsAreNotScannedAgain(t *testing.T) {
	c := New(16 << 20)
	text := `{"messages":[`
	for i := range 20 {
		text += fmt.Sprintf(`%s{"role":"user","content":"%d %s"}`, strings.Repeat(",", min(i, 1)), i, strings.Repeat("x", 2000))
		var turn Turn
		if err := c.Parse(&turn, body.Chat, []byte(text+`]}`)); err != nil {
			t.Fatal(err)
		}
		if got := len(turn.elements); i > 3 && got != i {
			t.Errorf("turn %d: got %d known messages, want %d", i, got, i)
		}
	}
}

// A long integer is not forgotten when the message that has it is known.
func TestLongIntegersInConversations(t *testing.T) {
	c := New(16 << 20)
	text := `{"messages":[{"role":"user","content":"` + strings.Repeat("x", 4*block) + `","n":` + strings.Repeat("7", body.LongestInteger+1) + `}`
	for i := range 4 {
		text += `,{"role":"user","content":"` + strings.Repeat("y", 4*block) + `"}`
		var turn Turn
		if err := c.Parse(&turn, body.Chat, []byte(text+`]}`)); err != nil || !turn.LongInteger || turn.Count != i+2 {
			t.Errorf("turn %d: got %v, %d messages, %v, want a long integer and %d messages", i, turn.LongInteger, turn.Count, err, i+2)
		}
	}
}

func TestResultsAreKeptForEqualBodiesOnly(t *testing.T) {
	c := New(1 << 20)
	parse := func(text string) *Turn {
		turn := new(Turn)
		if err := c.Parse(turn, body.Chat, []byte(text)); err != nil {
			t.Fatal(err)
		}
		return turn
	}
	parse(`{"n":1}`).Keep(1, &Prompt{IDs: []uint32{1}})
	if _, ok := parse(`{"n":1}`).Result(1); ok {
		t.Error("got a result for a body seen once, want none")
	}
	parse(`{"n":1}`).Keep(1, &Prompt{IDs: []uint32{2}})
	if p, ok := parse(`{"n":1}`).Result(1); !ok || len(p.IDs) != 1 || p.IDs[0] != 2 {
		t.Errorf("got %v %v, want the result that was kept", p, ok)
	}
	if _, ok := parse(`{"n":1}`).Result(2); ok {
		t.Error("got the result of another space, want none")
	}
	if _, ok := parse(`{"n":2}`).Result(1); ok {
		t.Error("got the result of another body, want none")
	}
}

// The bytes in use are what the entries use, and stay below the limit, when goroutines share and
// evict entries of every kind.
func TestTheCacheIsBounded(t *testing.T) {
	const limit = 512 << 10
	c := New(limit)
	shape := func(_ *[]byte, raw []byte) (v value, keep bool, err error) { return none(), true, nil }
	var all sync.WaitGroup
	for g := range 4 {
		all.Go(func() {
			for i := range 40 {
				text := fmt.Sprintf(`{"id":%d,"messages":[{"n":%d}`, g/2, i)
				for n := range 12 {
					text += fmt.Sprintf(`,{"turn":%d,"text":"%s"}`, n, strings.Repeat("y", 1000))
					for range 2 {
						var turn Turn
						if err := c.Parse(&turn, body.Chat, []byte(text+`]}`)); err != nil || turn.Count != n+2 {
							t.Errorf("turn %d: got %d messages, %v, want %d", n, turn.Count, err, n+2)
							return
						}
						if _, err := turn.Messages(turn.Request, 256, shape); err != nil {
							t.Error(err)
						}
						turn.Keep(256, &Prompt{IDs: make([]uint32, 500)})
						AppendHashes(&turn, nil, 1, make([]uint32, 500), 16, hashSum)
					}
				}
				if n := c.Bytes(); n > limit {
					t.Errorf("got %d bytes, want at most %d", n, limit)
				}
			}
		})
	}
	all.Wait()
	checkAccounts(t, c)
	for k := range messages + 1 {
		if c.kinds[k].bytes == 0 {
			t.Errorf("kind %d: got no entries, want some", k)
		}
	}
}

// What was evicted under a higher limit is not kept for reuse.
func TestALowerLimitFreesWhatWasEvicted(t *testing.T) {
	for limit, kept := range map[int64]bool{512 << 10: true, 32 << 10: false} {
		c := New(512 << 10)
		c.texts.Give(make([]byte, 10<<10))
		c.ids.Give(make([]uint32, 2<<10))
		if limit != 512<<10 {
			c.SetLimit(limit)
		}
		if text, ids := c.texts.Take(10<<10), c.ids.Take(2<<10); (text != nil) != kept || (ids != nil) != kept {
			t.Errorf("limit %d: got %d bytes and %d ids for reuse, want some: %v", limit, cap(text), cap(ids), kept)
		}
	}
}

// A lower limit evicts, a higher one lets more in; no cache stays none.
func TestTheLimitChanges(t *testing.T) {
	c := New(512 << 10)
	fill := func() int64 {
		for i := range 1000 {
			var turn Turn
			text := fmt.Sprintf(`{"id":%d,"messages":[{"text":"%d%s"}]}`, i/2, i/2, strings.Repeat("y", 1000)) // what comes twice is kept
			if err := c.Parse(&turn, body.Chat, []byte(text)); err != nil {
				t.Fatal(err)
			}
			if _, err := turn.Messages(turn.Request, 256, func(*[]byte, []byte) (value, bool, error) { return none(), true, nil }); err != nil {
				t.Fatal(err)
			}
			turn.Keep(256, &Prompt{IDs: make([]uint32, 500)})
			AppendHashes(&turn, nil, 1, make([]uint32, 500), 16, hashSum)
		}
		checkAccounts(t, c)
		return c.Bytes()
	}
	first := fill()
	c.SetLimit(256 << 10)
	checkAccounts(t, c)
	if n := c.Bytes(); n > 256<<10 || n == 0 {
		t.Errorf("got %d bytes, want some, at most the new limit", n)
	}
	c.SetLimit(2 << 20)
	if n := fill(); n <= first {
		t.Errorf("got %d bytes, want more than the %d of the lower limit", n, first)
	}
	c.SetLimit(0)
	(*Cache)(nil).SetLimit(1 << 20)
	if n := fill(); n <= first {
		t.Errorf("got %d bytes after a limit of 0, want it without effect", n)
	}
}

// checkAccounts compares the counted bytes and the table with the entries. Nothing else may use c.
func checkAccounts(t *testing.T, c *Cache) {
	t.Helper()
	total := int64(0)
	live := map[*entry]bool{}
	for k := range c.kinds {
		sum := int64(0)
		for p := c.kinds[k].recent.Front(); p != nil; p = p.Next() {
			e, _ := p.Value.(*entry)
			live[e] = true
			sum += e.memory()
			if e.readers != 0 {
				t.Errorf("got %d readers of an entry, want 0", e.readers)
			}
		}
		if total += sum; sum != c.kinds[k].bytes || sum > c.limit.Load()*shares[k]/16 {
			t.Errorf("kind %d: got %d bytes counted, want the %d of its entries, at most %d", k, c.kinds[k].bytes, sum, c.limit.Load()*shares[k]/16)
		}
	}
	if total != c.bytes || total > c.limit.Load() {
		t.Errorf("got %d bytes counted, want %d, at most %d", c.bytes, total, c.limit.Load())
	}
	for _, e := range c.entries {
		if !live[e] {
			t.Error("got an evicted entry in the table, want it removed")
		}
	}
}

// A tenant that measures time does not learn what others have sent: what was computed for them is computed again.
func TestTenantsShareNoResults(t *testing.T) {
	tok := tokenizer(t)
	c := New(16 << 20)
	text := strings.Repeat(open+"How do you do, my friend?"+shut, 400)
	raw := fmt.Appendf(nil, `{"messages":[{"role":"user","content":"%s"},{"role":"user","content":"hi"}]}`, strings.Repeat("x ", longMessage))
	ask := func(tenant string) (found [4]bool) {
		turn := &Turn{Tenant: tenant}
		if err := c.Parse(turn, body.Chat, raw); err != nil {
			t.Fatal(err)
		}
		found[0] = turn.whole != nil
		shaped := 0
		if _, err := turn.Messages(turn.Request, 256, func(*[]byte, []byte) (value, bool, error) { shaped++; return none(), true, nil }); err != nil {
			t.Fatal(err)
		}
		found[1] = shaped == 0
		for i, turn := range []*Turn{turn, turn.Part(turn.Request)} {
			if _, err := turn.Encode(nil, nil, tok, 256, text, false); err != nil {
				t.Fatal(err)
			}
			found[2+i] = turn.reused > 0
		}
		return found
	}
	for range 3 {
		ask("a")
	}
	if got := ask("a"); got != [4]bool{true, true, true, true} {
		t.Errorf("the same tenant: got body, messages, prompt, part of a batch %v, want all found", got)
	}
	for _, other := range []string{"b", ""} {
		if got := ask(other); got != [4]bool{3: true} { // its own prompt of the line before
			t.Errorf("tenant %q: got body, messages, prompt, part of a batch %v, want none of another's found", other, got)
		}
	}
	parsed := c.Turn(nil)
	if parsed.space != 0 {
		t.Errorf("got space %d without a tenant, want 0", parsed.space)
	}
	turn := &Turn{Tenant: "a"}
	if err := c.Parse(turn, body.Chat, raw); err != nil {
		t.Fatal(err)
	}
	if turn.Tenant = ""; c.Parse(turn, body.Chat, raw) != nil || turn.space != 0 {
		t.Errorf("got space %d of the tenant before, want 0", turn.space)
	}
}

// spaceSpy records the spaces of the tokenizer's caches that texts are tokenized in.
type spaceSpy struct {
	*bpe.Tokenizer

	seen *[]uint64
}

func (s spaceSpy) EncodeAfter(stop <-chan struct{}, dst []uint32, cuts []bpe.Cut, text string, from bpe.Cut, addSpecial bool) ([]uint32, []bpe.Cut, error) {
	*s.seen = append(*s.seen, from.Space)
	return s.Tokenizer.EncodeAfter(stop, dst, cuts, text, from, addSpecial)
}

// The tokenizer's own caches are separate as well: with and without a cache here, for short and long texts, and for
// those that are not looked up here.
func TestTenantsHaveTheirOwnSpace(t *testing.T) {
	for _, c := range []*Cache{New(1 << 20), New(0)} {
		var turn Turn
		of := map[string]uint64{}
		for _, tenant := range []string{"a", "b", "", "a"} {
			turn.Tenant = tenant
			if err := c.Parse(&turn, body.Completions, []byte(`{"prompt":"a"}`)); err != nil {
				t.Fatal(err)
			}
			tok := spaceSpy{tokenizer(t), new([]uint64)}
			for _, text := range []string{"short", strings.Repeat("long ", block)} {
				want, err := tok.Encode(nil, text, false)
				if err != nil {
					t.Fatal(err)
				}
				for _, turn := range []*Turn{&turn, turn.Part(turn.Request), c.TurnOf(tenant, turn.Request)} {
					if got, err := turn.Encode(nil, nil, tok, 256, text, false); err != nil || !slices.Equal(got, want) {
						t.Errorf("tenant %q: got other ids than without a tenant, or %v", tenant, err)
					}
					if got, err := turn.EncodeAlone(nil, nil, tok, text, false); err != nil || !slices.Equal(got, want) {
						t.Errorf("tenant %q, alone: got other ids than without a tenant, or %v", tenant, err)
					}
				}
			}
			space := (*tok.seen)[0]
			if got := slices.Compact(*tok.seen); len(got) != 1 || (space == 0) != (tenant == "") {
				t.Errorf("tenant %q: got spaces %x, want one, which is 0 without a tenant only", tenant, got)
			}
			if before, ok := of[tenant]; ok && before != space {
				t.Errorf("tenant %q: got space %x, want %x as before", tenant, space, before)
			}
			of[tenant] = space
			turn.Reset()
			if turn.Tenant != "" || turn.space != 0 {
				t.Errorf("after Reset: got tenant %q in space %x, want none", turn.Tenant, turn.space)
			}
		}
		if of["a"] == of["b"] {
			t.Errorf("got space %x for two tenants", of["a"])
		}
	}
}

// The same for chats that begin alike.
func TestTenantsShareNoChats(t *testing.T) {
	c := New(16 << 20)
	for i, one := range []struct {
		tenant string
		shares bool
	}{{"a", false}, {"a", true}, {"b", false}, {"b", true}, {"", false}, {"", true}, {"a", true}} {
		turn := &Turn{Tenant: one.tenant}
		raw := fmt.Appendf(nil, `{"messages":[{"role":"user","content":"%s"},{"role":"user","content":"%d"}]}`, strings.Repeat("long text ", 1000), i)
		if err := c.Parse(turn, body.Chat, raw); err != nil {
			t.Fatal(err)
		}
		if shared := len(turn.elements) > 0; shared != one.shares {
			t.Errorf("request %d of tenant %q: got messages of an earlier chat: %v, want %v", i, one.tenant, shared, one.shares)
		}
	}
}

func TestLongMessagesAreKeptWhenTheyComeAgain(t *testing.T) {
	c := New(16 << 20)
	req, err := body.Parse(body.Chat, fmt.Appendf(nil, `{"messages":[{"content":"%s"}]}`, strings.Repeat("x ", longMessage)))
	if err != nil {
		t.Fatal(err)
	}
	turn := c.Turn(req)
	for i, want := range []int{1, 1, 0} {
		calls := 0
		if _, err := turn.Messages(req, 256, func(texts *[]byte, _ []byte) (value, bool, error) {
			if kept := i == 1; kept != (texts == nil) {
				t.Errorf("time %d: got memory that is reused: %v, want %v", i, texts != nil, !kept)
			}
			calls++
			return none(), true, nil
		}); err != nil {
			t.Fatal(err)
		}
		if calls != want {
			t.Errorf("time %d: got %d messages shaped, want %d", i, calls, want)
		}
	}
	for _, n := range []int{maxTexts, maxTexts + 1} {
		turn.texts = make([]byte, n)
		if turn.Reset(); len(turn.texts) != 0 || (cap(turn.texts) == 0) != (n > maxTexts) {
			t.Errorf("got %d of %d bytes after a message of %d, want 0, and room up to %d", len(turn.texts), cap(turn.texts), n, maxTexts)
		}
	}
}
