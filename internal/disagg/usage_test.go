package disagg

import (
	"testing"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

func TestUsageOfThePrefillLeg(t *testing.T) {
	both := Usage{Prompt: 200, Cached: 160}
	for name, c := range map[string]struct {
		u         Usage
		was, want string
	}{
		"chat": {both, `{"prompt_tokens": 200, "total_tokens":208,"completion_tokens":8,"prompt_tokens_details":{"cached_tokens":0, "x":1}}`,
			`{"prompt_tokens": 200, "total_tokens":208,"completion_tokens":8,"prompt_tokens_details":{"cached_tokens":160, "x":1}}`},
		"another length": {both, `{"prompt_tokens":201,"total_tokens":208,"completion_tokens":7}`,
			`{"prompt_tokens":200,"total_tokens":207,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":160}}`},
		"details were null":   {both, `{"prompt_tokens":200,"prompt_tokens_details":null}`, `{"prompt_tokens":200,"prompt_tokens_details":{"cached_tokens":160}}`},
		"equal":               {both, `{"prompt_tokens":200,"prompt_tokens_details":{"cached_tokens":160}}`, `{"prompt_tokens":200,"prompt_tokens_details":{"cached_tokens":160}}`},
		"SGLang's own":        {both, `{"id":"a","prompt_tokens":200,"cached_tokens":0}`, `{"id":"a","prompt_tokens":200,"cached_tokens":160}`},
		"without cached":      {both, `{"id":"a","prompt_tokens":200}`, `{"id":"a","prompt_tokens":200}`},
		"responses":           {both, `{"input_tokens":200,"input_tokens_details":{"cached_tokens":3},"total_tokens":9}`, `{"input_tokens":200,"input_tokens_details":{"cached_tokens":160},"total_tokens":9}`},
		"messages":            {both, `{"input_tokens":190,"cache_read_input_tokens":10,"output_tokens":4}`, `{"input_tokens":40,"cache_read_input_tokens":160,"output_tokens":4}`},
		"messages, no cache":  {both, `{"input_tokens":200,"output_tokens":4}`, `{"input_tokens":40,"output_tokens":4,"cache_read_input_tokens":160}`},
		"messages, written":   {both, `{"input_tokens":180,"cache_creation_input_tokens":20}`, `{"input_tokens":20,"cache_creation_input_tokens":20,"cache_read_input_tokens":160}`},
		"messages, equal":     {both, `{"input_tokens":40,"cache_read_input_tokens":160}`, `{"input_tokens":40,"cache_read_input_tokens":160}`},
		"messages, unknown":   {Usage{-1, -1}, `{"input_tokens":40}`, `{"input_tokens":40}`},
		"output alone":        {both, `{"output_tokens":4}`, `{"output_tokens":4}`},
		"nothing is known":    {Usage{-1, -1}, `{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":1}}`, `{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":1}}`},
		"cached is not known": {Usage{200, -1}, `{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":1}}`, `{"prompt_tokens":200,"prompt_tokens_details":{"cached_tokens":1}}`},
		"no number":           {both, `{"prompt_tokens":"many"}`, `{"prompt_tokens":"many"}`},
		"empty":               {both, `{}`, `{}`},
	} {
		if got := string(c.u.Edit([]byte("<"), []byte(c.was))); got != "<"+c.want {
			t.Errorf("%s: got %s, want %s", name, got, c.want)
		}
	}
	for answer, want := range map[string]Usage{
		`{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}}`: {9, 4},
		`{"usage":{"prompt_tokens":9}}`:                                             {9, -1},
		`{"usage":{"input_tokens":9,"cache_read_input_tokens":4}}`:                  {13, 4},
		`{"meta_info":{"prompt_tokens":9,"cached_tokens":4}}`:                       {9, 4},
		`{}`: {-1, -1}, `data`: {-1, -1},
	} {
		if got := (&Answer{[]byte(answer)}).Usage(); *got != want {
			t.Errorf("%s: %+v", answer, *got)
		}
	}
}

// Whatever the usage looks like, the result is JSON if the input was, and a second edit changes
// nothing.
func FuzzUsageEdit(f *testing.F) {
	f.Add([]byte(`{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":1},"total_tokens":9}`), int64(5), int64(3))
	f.Add([]byte(`{"input_tokens":7,"cache_read_input_tokens":1}`), int64(5), int64(3))
	f.Add([]byte(`{"usage":1,"prompt_tokens":null,"prompt_tokens":"7","prompt_tokens_details":[],"input_tokens_details":{"cached_tokens":{}}}`), int64(-1), int64(1)<<50)
	f.Fuzz(func(t *testing.T, usage []byte, whole, cached int64) {
		if body.Valid(usage) != nil || len(usage) == 0 || usage[0] != '{' {
			return
		}
		const limit = 1 << 40
		u := Usage{Prompt: max(min(whole, limit), -1), Cached: max(min(cached, limit), -1)}
		once := u.Edit(nil, usage)
		if err := body.Valid(once); err != nil {
			t.Fatalf("%s became %s: %v", usage, once, err)
		}
		if again := u.Edit(nil, once); string(again) != string(once) {
			t.Fatalf("%s became %s, then %s", usage, once, again)
		}
	})
}
