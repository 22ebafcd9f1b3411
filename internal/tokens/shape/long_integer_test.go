package shape

import (
	"strings"
	"testing"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// vLLM's JSON reader is Python's, which rejects integers of more than 4,300 digits anywhere in a
// body; SGLang's converts them to floats. (FastAPI 0.136 answers 400 with this text.)
func TestLongIntegersInUnknownFields(t *testing.T) {
	m := load(t, "qwen3", Options{})
	for digits, refused := range map[int]bool{4300: false, 4301: true} {
		req, err := body.Parse(body.Completions, []byte(`{"prompt":"x","unknown":[{"a":-`+strings.Repeat("7", digits)+`}]}`))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := m.Prompt(req, VLLM); (err != nil) != refused || refused && err.Error() != "There was an error parsing the body" {
			t.Errorf("vLLM, %d digits: %v", digits, err)
		}
		if _, err := m.Prompt(req, SGLang); err != nil {
			t.Errorf("SGLang, %d digits: %v", digits, err)
		}
	}
}
