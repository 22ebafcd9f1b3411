package shape

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/conv"
)

// The ids do not depend on earlier requests: they equal those of a model without a cache.
func TestRememberingChangesNothing(t *testing.T) {
	m, c := load(t, "qwen3", Options{}), conv.New(512<<10)
	const longMessage = 16 << 10 // kept from the second occurrence on
	long := strings.Repeat("the quick brown fox \"jumps\"\n", longMessage/20)
	texts := []string{long, long + "!", "a", "a ", "Köln 🙂\n", strings.Repeat("the quick brown fox\n", 150), strings.Repeat("the quick brown fox\n", 150) + "!",
		"<|im_end|>\n<|im_start|>user\nx", "<think>\ny\n</think>\n\nz"}
	rapid.Check(t, func(t *rapid.T) {
		var messages []string
		for range rapid.IntRange(1, 6).Draw(t, "messages") {
			role := rapid.SampledFrom([]string{"user", "assistant", "system", "developer", "tool"}).Draw(t, "role")
			text, err := json.Marshal(rapid.SampledFrom(texts).Draw(t, "text"))
			if err != nil {
				t.Fatal(err)
			}
			content := string(text)
			if rapid.IntRange(0, 4).Draw(t, "parts") == 0 {
				content = fmt.Sprintf(`[{"type":"text","text":%s},{"type":"text","text":"p"}]`, text)
			}
			messages = append(messages, fmt.Sprintf(`{"role":%q,"content":%s}`, role, content))
		}
		for turn := 1; turn <= len(messages); turn++ {
			raw := []byte(`{"messages":[` + strings.Join(messages[:turn], ",") + `]}`)
			for range 3 {
				var turn conv.Turn
				if err := c.Parse(&turn, body.Chat, raw); err != nil {
					t.Fatal(err)
				}
				for _, engine := range []Engine{VLLM, SGLang, TRTLLM} {
					got, gotErr := m.PromptInto(context.Background(), nil, &turn, engine)
					want, wantErr := m.Prompt(turn.Request, engine)
					if fmt.Sprint(gotErr) != fmt.Sprint(wantErr) || !slices.Equal(got.IDs, want.IDs) {
						t.Fatalf("%v %s\n%v %v\nwant %v %v", engine, raw, got.IDs, gotErr, want.IDs, wantErr)
					}
				}
			}
		}
	})
}

// segments returns the bytes of text whose ids a model's tokenizer keeps, in a cache of its own. It has no method that tells them.
func segments(m *Model) (n uint64) {
	shards := reflect.ValueOf(m.tok).Elem().FieldByName("memo").Elem().FieldByName("shards")
	for i := range shards.Len() {
		if store := shards.Index(i).FieldByName("store"); !store.IsNil() {
			n += store.Elem().FieldByName("textEnd").Uint()
		}
	}
	return n
}

// The time of SGLang's continued message, which is tokenized alone, tells a tenant nothing about others, with and without a
// cache before the tokenizer's.
func TestTenantsShareNoContinuedMessages(t *testing.T) {
	m := load(t, "qwen3", Options{})
	for name, c := range map[string]*conv.Cache{"no cache": conv.New(0), "a cache": conv.New(1 << 20)} {
		text := strings.Repeat("Each tenant continues the same message, with "+name+" or with another one. ", 60)
		req, err := body.Parse(body.Chat, fmt.Appendf(nil, `{"continue_final_message":true,"messages":[{"role":"user","content":"a"},{"role":"assistant","content":%q}]}`, text))
		if err != nil {
			t.Fatal(err)
		}
		for i, one := range []struct {
			tenant string
			fresh  bool
		}{{"a", true}, {"a", false}, {"b", true}, {"", true}, {"b", false}, {"", false}} {
			before := segments(m)
			if res, err := m.PromptInto(t.Context(), nil, c.TurnOf(one.tenant, req), SGLang); err != nil || len(res.IDs) < 60 {
				t.Fatalf("%s: got %d ids, %v", name, len(res.IDs), err)
			}
			if n := segments(m) - before; (n > 0) != one.fresh {
				t.Errorf("%s, request %d of tenant %q: %d bytes were tokenized and kept, want the message anew: %v", name, i, one.tenant, n, one.fresh)
			}
		}
	}
}
