package engines

import (
	"encoding/json"
	"slices"
	"strconv"
	"testing"
)

// TestVLLMWindows shows which blocks vLLM keeps for layers with a sliding window, on a model with windows of 64 tokens: by
// default only the last window of a prompt, and of a beginning that a second prompt shared. With an interval of one block it
// keeps all, and serves what Kvlane predicts.
func TestVLLMWindows(t *testing.T) {
	for _, c := range []struct {
		name            string
		further         []string
		next, branch    int // cached tokens of the next turn, and of a prompt that branches
		nextTurn, later int // Kvlane's prediction for them
	}{
		{"the default", []string{}, 192, 0, 288, 96},
		{"an interval of a block", []string{"--prefix-cache-retention-interval", strconv.Itoa(vllm.block)}, 288, 96, 288, 96},
	} {
		t.Run(c.name, func(t *testing.T) {
			k := *vllm
			k.model, k.further, k.blocks = "hybrid", c.further, 256
			b := newBed(t, &k)
			prompt := spread("windows", 200)
			status, answer := b.ask("POST", "/v1/completions", encode(completion(prompt, "max_tokens", 100, "ignore_eos", true, "return_token_ids", true)))
			var got struct {
				Choices []struct {
					IDs []int `json:"token_ids"`
				} `json:"choices"`
			}
			if err := json.Unmarshal(answer, &got); err != nil || status != 200 || len(got.Choices) != 1 || len(got.Choices[0].IDs) != 100 {
				t.Fatalf("got %d %s, %v, want 100 tokens", status, answer, err)
			}
			other := spread("other words", 150)
			for _, step := range []struct {
				name              string
				prompt            []int
				predicted, cached int
			}{
				{"the next turn", slices.Concat(prompt, got.Choices[0].IDs, other[:50]), c.nextTurn, c.next},
				{"the same again", slices.Concat(prompt, got.Choices[0].IDs, other[:50]), 320, 320},
				{"a branch", slices.Concat(prompt[:100], other), c.later, c.branch},
				{"another at the same place", slices.Concat(prompt[:100], other[20:]), 96, 96},
			} {
				b.settle()
				a := b.post("/v1/completions", completion(step.prompt))
				t.Logf("%-26s %3d prompt tokens, %3d predicted, %3d cached by the engine", step.name, a.prompt, a.matched, a.cached)
				if a.matched != step.predicted || a.cached != step.cached {
					t.Errorf("%s: got %d predicted and %d cached, want %d and %d", step.name, a.matched, a.cached, step.predicted, step.cached)
				}
			}
		})
	}
}
