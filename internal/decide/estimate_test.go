package decide

import (
	"strings"
	"testing"

	"github.com/kvlane/kvlane/internal/prompt"
)

// Row 3.3, with the defects of the reference avoided: lists of texts count their
// characters, and characters are not bytes.
func TestEstimates(t *testing.T) {
	text := func(n int) string { return strings.Repeat("x", n) }
	for name, c := range map[string]struct {
		api  prompt.API
		body string
		want int64
	}{
		"400 characters":         {prompt.Completions, `{"prompt":"` + text(400) + `"}`, 100},
		"floored":                {prompt.Completions, `{"prompt":"` + text(403) + `"}`, 100},
		"500 ids":                {prompt.Completions, `{"prompt":[` + strings.TrimSuffix(strings.Repeat("1,", 500), ",") + `]}`, 500},
		"two lists of ids":       {prompt.Completions, `{"prompt":[[1,2,3],[4]]}`, 4},
		"800 and 1200":           {prompt.Chat, `{"messages":[{"role":"system","content":"` + text(800) + `"},{"role":"user","content":"` + text(1200) + `"}]}`, 500},
		"floored once":           {prompt.Chat, `{"messages":[{"content":"xx"},{"content":"xx"}]}`, 1},
		"an image is ignored":    {prompt.Chat, `{"messages":[{"content":[{"type":"image_url","image_url":{"url":"` + text(4000) + `"}},{"type":"text","text":"` + text(40) + `"}]}]}`, 10},
		"nothing":                {prompt.Completions, `{}`, 0},
		"null content":           {prompt.Chat, `{"messages":[{"role":"user","content":null}]}`, 0},
		"no content":             {prompt.Chat, `{"messages":[{"role":"user"}]}`, 0},
		"300 Chinese characters": {prompt.Completions, `{"prompt":"` + strings.Repeat("\u6f22", 300) + `"}`, 75},
		"escaped":                {prompt.Completions, `{"prompt":"` + strings.Repeat(`\u6f22`, 300) + `"}`, 75},
		"a list of texts":        {prompt.Completions, `{"prompt":["` + text(400) + `","` + text(400) + `"]}`, 200},
		"responses":              {prompt.Responses, `{"input":"` + text(400) + `"}`, 100},
		"response items":         {prompt.Responses, `{"input":[{"role":"user","content":[{"type":"input_text","text":"` + text(400) + `"}]}]}`, 100},
		"very long":              {prompt.Completions, `{"prompt":"` + text(maxEstimated*2) + `"}`, (maxEstimated*2 + 2) / 4},
		"empty messages":         {prompt.Chat, `{"messages":[]}`, 0},
		"an object as prompt":    {prompt.Completions, `{"prompt":{}}`, 0},
	} {
		r, err := prompt.Parse(c.api, []byte(c.body))
		if err != nil {
			t.Fatal(err)
		}
		if got := estimateTokens(r); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
}
