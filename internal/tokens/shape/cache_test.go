package shape

import (
	"context"
	"encoding/json"
	"fmt"
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
