package shape

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// The ids do not depend on earlier requests: they equal those of a model without a cache.
func TestRememberingChangesNothing(t *testing.T) {
	remembers := load(t, "qwen3", Options{CacheBytes: 256 << 10})
	fresh := load(t, "qwen3", Options{CacheBytes: -1})
	bodies := body.NewMemo(256 << 10)
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
				req, err := bodies.Parse(body.Chat, raw)
				if err != nil {
					t.Fatal(err)
				}
				for _, engine := range []Engine{VLLM, SGLang, TRTLLM} {
					got, gotErr := remembers.Prompt(req, engine)
					want, wantErr := fresh.Prompt(req, engine)
					if fmt.Sprint(gotErr) != fmt.Sprint(wantErr) || !slices.Equal(got.IDs, want.IDs) {
						t.Fatalf("%v %s\n%v %v\nwant %v %v", engine, raw, got.IDs, gotErr, want.IDs, wantErr)
					}
				}
			}
		}
	})
}

func TestMessageMemoIsBounded(t *testing.T) {
	const limit = 64 << 10
	m := load(t, "qwen3", Options{CacheBytes: 4 * limit})
	for i := range 500 {
		raw := fmt.Appendf(nil, `{"messages":[{"role":"user","content":"%d %s"}]}`, i, bytes.Repeat([]byte("x"), i))
		req, err := body.Parse(body.Chat, raw)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := m.Prompt(req, VLLM); err != nil {
			t.Fatal(err)
		}
		if c := m.memo.messages; c.bytes > limit || len(c.entries) != c.recent.Len() {
			t.Fatalf("%d bytes in %d entries", c.bytes, len(c.entries))
		}
	}
	if len(m.memo.messages.entries) == 0 {
		t.Error("nothing was kept")
	}
}

func TestALongMessageIsKeptWhenItComesAgain(t *testing.T) {
	m := load(t, "qwen3", Options{})
	raw := fmt.Appendf(nil, `{"messages":[{"role":"user","content":"%s"}]}`, bytes.Repeat([]byte("x "), longMessage))
	for want := range 2 {
		if got := len(m.memo.messages.entries); got != 0 {
			t.Fatalf("%d messages kept before it came twice", got)
		}
		req, err := body.Parse(body.Chat, raw)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := m.Prompt(req, VLLM); err != nil {
			t.Fatal(want, err)
		}
	}
	if len(m.memo.messages.entries) != 1 {
		t.Error("not kept")
	}
}
