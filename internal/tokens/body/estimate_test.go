package body

import (
	"strings"
	"testing"
)

// Characters are counted, not bytes, in lists of texts too.
func TestEstimates(t *testing.T) {
	text := func(n int) string { return strings.Repeat("x", n) }
	for name, c := range map[string]struct {
		api  API
		body string
		want int64
	}{
		"400 characters":         {Completions, `{"prompt":"` + text(400) + `"}`, 100},
		"floored":                {Completions, `{"prompt":"` + text(403) + `"}`, 100},
		"500 ids":                {Completions, `{"prompt":[` + strings.TrimSuffix(strings.Repeat("1,", 500), ",") + `]}`, 500},
		"two lists of ids":       {Completions, `{"prompt":[[1,2,3],[4]]}`, 4},
		"800 and 1200":           {Chat, `{"messages":[{"role":"system","content":"` + text(800) + `"},{"role":"user","content":"` + text(1200) + `"}]}`, 500},
		"floored once":           {Chat, `{"messages":[{"content":"xx"},{"content":"xx"}]}`, 1},
		"an image is ignored":    {Chat, `{"messages":[{"content":[{"type":"image_url","image_url":{"url":"` + text(4000) + `"}},{"type":"text","text":"` + text(40) + `"}]}]}`, 10},
		"nothing":                {Completions, `{}`, 0},
		"null content":           {Chat, `{"messages":[{"role":"user","content":null}]}`, 0},
		"no content":             {Chat, `{"messages":[{"role":"user"}]}`, 0},
		"300 Chinese characters": {Completions, `{"prompt":"` + strings.Repeat("\u6f22", 300) + `"}`, 75},
		"escaped":                {Completions, `{"prompt":"` + strings.Repeat(`\u6f22`, 300) + `"}`, 75},
		"a list of texts":        {Completions, `{"prompt":["` + text(400) + `","` + text(400) + `"]}`, 200},
		"responses":              {Responses, `{"input":"` + text(400) + `"}`, 100},
		"response items":         {Responses, `{"input":[{"role":"user","content":[{"type":"input_text","text":"` + text(400) + `"}]}]}`, 100},
		"very long":              {Completions, `{"prompt":"` + text(maxEstimated*2) + `"}`, (maxEstimated*2 + 2) / 4},
		"a large image":          {Chat, `{"messages":[{"content":[{"image_url":"` + text(maxEstimated) + `"}]},{"content":[{"text":"` + text(maxEstimated) + `"}]}]}`, (maxEstimated + 40) / 4},
		"empty messages":         {Chat, `{"messages":[]}`, 0},
		"calls of tools":         {Chat, `{"messages":[{"content":[{"image_url":"x"}]},{"role":"assistant","tool_calls":[{"function":{"arguments":"` + text(4000) + `"}}],"reasoning_content":"` + text(400) + `"}]}`, 1108},
		"ids in base64":          {Completions, `{"prompt":"x","prompt_token_ids_b64":"` + text(1600) + `"}`, 300},
		"earlier messages":       {Responses, `{"input":"x","previous_input_messages":["` + text(396) + `"]}`, 100},
		"an object as prompt":    {Completions, `{"prompt":{}}`, 0},
	} {
		r, err := Parse(c.api, []byte(c.body))
		if err != nil {
			t.Fatal(err)
		}
		if got := r.EstimateTokens(); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
	for begin, want := range map[string]int64{"--form": 800, "{": 102400} { // a recording of 20 s has some 1,000 tokens
		if got := Audio.EstimateTokens([]byte(begin + text(400<<10))); got != want {
			t.Errorf("400 KB of %s: got %d tokens, want %d", begin, got, want)
		}
	}
}
