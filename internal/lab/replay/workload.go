package replay

import (
	"math"
	"math/rand/v2"
)

// Request is one request of a workload.
type Request struct {
	// At is the arrival in seconds since the start.
	At float64
	// Conversation is its id, "" if it has none.
	Conversation string
	// Prompt and Output are lengths in tokens.
	Prompt, Output int
	// Blocks name the prompt's full blocks; a name stands for the whole prefix up to its block.
	Blocks []uint64
	// Answer names the full blocks of prompt and output together that come after Blocks, up to the last
	// one that a later request repeats.
	Answer []uint64
	// WarmUp requests are not measured.
	WarmUp bool
	// Burst numbers requests that arrive together with a new prefix of BurstPrefix tokens; 0 for all others.
	Burst       int
	BurstPrefix int

	// Tenant numbers those that share the fleet; 0 for none.
	Tenant int

	// script continues a closed loop after this request, turn a session of a family.
	script *script
	turn   *turn
}

// Workload generates requests. Generate is called once per run and seed.
type Workload struct {
	Name string
	// BlockSize is the number of tokens of a block.
	BlockSize int
	Generate  func(seed uint64) []Request
	// Follow returns a client's next requests after one has ended; nil for open loops.
	Follow func(done *Request, ended float64) []Request
	// PrefillOnly ends requests with their first token: decoding happens elsewhere and
	// takes DecodePerToken seconds per token of the client's time.
	PrefillOnly    bool
	DecodePerToken float64
}

// chain extends a prefix by n blocks of one source.
func chain(blocks []uint64, source uint64, n int) []uint64 {
	h := uint64(0x51_7C_C1_B7_27_22_0A_95)
	if len(blocks) > 0 {
		h = blocks[len(blocks)-1]
	}
	for range n {
		h = scramble(h ^ scramble(source))
		blocks = append(blocks, h)
	}
	return blocks
}

func scramble(x uint64) uint64 {
	x += 0x9E3779B97F4A7C15
	x = (x ^ x>>30) * 0xBF58476D1CE4E5B9
	x = (x ^ x>>27) * 0x94D049BB133111EB
	return x ^ x>>31
}

// lognormal draws with the given mean (not median).
func lognormal(rng *rand.Rand, mean, sigma float64) int {
	return max(1, int(math.Round(mean*math.Exp(sigma*rng.NormFloat64()-sigma*sigma/2))))
}
