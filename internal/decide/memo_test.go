package decide

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/models"
	"github.com/kvlane/kvlane/internal/tokens/shape"
)

// Hashes that are cached with bodies and conversations equal those of a model without
// caches, whatever was decided before.
func TestKeptHashesAreTheHashes(t *testing.T) {
	d := newDecider(t, 1)
	files, err := models.Open("builtin:qwen3")
	if err != nil {
		t.Fatal(err)
	}
	fresh, err := shape.Load(files, shape.Options{})
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	words := []string{"sea ", "Köln ", "func() {", "\\n\\n", "東京 ", "\\u00e9 ", "12345 ", "  "}
	text := func(n int) string {
		var b strings.Builder
		for range n {
			b.WriteString(words[rng.IntN(len(words))])
		}
		return b.String()
	}
	chats := [][]string{nil}
	more := []string{"", `,"truncate_prompt_tokens":40`, `,"truncate_prompt_tokens":40,"truncation_side":"right"`, `,"continue_final_message":true,"add_generation_prompt":false`}
	for range 250 {
		chat := slices.Clone(chats[rng.IntN(len(chats))])
		switch {
		case len(chat) > 0 && rng.IntN(4) == 0: // the same again, or a prefix of it
			chat = chat[:1+rng.IntN(len(chat))]
		default:
			role := []string{"user", "assistant", "system"}[rng.IntN(3)]
			content := `"` + text(rng.IntN(1200)) + `"`
			if rng.IntN(6) == 0 {
				content = `[{"type":"text","text":"what is this?"},{"type":"image_url","image_url":{"url":"data:,"}}]`
				role = "user"
			}
			chat = append(chat, fmt.Sprintf(`{"role":%q,"content":%s}`, role, content))
		}
		chats = append(chats, chat)
		raw := []byte(`{"model":"demo","messages":[` + strings.Join(chat, ",") + `]` + more[rng.IntN(len(more))] + `}`)
		for range 1 + rng.IntN(3) {
			got := slices.Clone(hashesOf(t, d, raw))
			req, err := body.Parse(body.Chat, raw)
			if err != nil {
				t.Fatal(err)
			}
			res, _ := fresh.Prompt(req, shape.VLLM) // refused ones have no ids here either
			want := d.fleet.Index().Hasher().AppendHashes(nil, d.fleet.Index().Hasher().Seed("demo", "", ""), res.IDs, d.cfg.Index.BlockSize)
			if !slices.Equal(got, want) {
				t.Fatalf("%d hashes, want %d: %s", len(got), len(want), raw)
			}
		}
	}
}
