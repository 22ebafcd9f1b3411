package replay

import (
	"fmt"
	"math/rand/v2"
	"slices"
)

// Skew describes clients that each run conversations back to back against a shared system prompt.
type Skew struct {
	Clients int `yaml:"clients"`
	// StartOver is the time in seconds over which the clients start.
	StartOver float64 `yaml:"start_over"`
	// Shared is the length of the system prompt in tokens.
	Shared int `yaml:"shared"`
	// First and Turn are the lengths in tokens of a conversation's first and later user
	// texts, Output that of the answers: means and sigmas of lognormal distributions.
	FirstMean  float64 `yaml:"first_mean"`
	FirstSigma float64 `yaml:"first_sigma"`
	TurnMean   float64 `yaml:"turn_mean"`
	TurnSigma  float64 `yaml:"turn_sigma"`
	OutputMean float64 `yaml:"output_mean"`
	MinTurns   int     `yaml:"min_turns"`
	MaxTurns   int     `yaml:"max_turns"`
	// Think is the mean of the exponential pause between turns in seconds.
	Think    float64 `yaml:"think"`
	Requests int     `yaml:"requests"`
	// Decode lets the engines decode, too; otherwise an answer takes 25 ms a token elsewhere.
	Decode bool `yaml:"decode"`
}

// script is one client's state.
type script struct {
	skew   *Skew
	rng    *rand.Rand
	client int
	number int
	turns  int
	shared *int // requests left, shared by all clients
	text   int
	blocks []uint64
	source uint64
}

const skewBlock, maxPrompt = 64, 120_000

// begin starts the client's next conversation.
func (s *script) begin() {
	k := s.skew
	s.number++
	s.turns = k.MinTurns + s.rng.IntN(k.MaxTurns-k.MinTurns+1)
	s.source = uint64(s.client)<<20 | uint64(s.number)
	s.blocks = chain(nil, 0, k.Shared/skewBlock)
	s.text = k.Shared + lognormal(s.rng, k.FirstMean, k.FirstSigma)
}

// next returns the client's next request.
func (s *script) next(at float64) (Request, bool) {
	if *s.shared == 0 {
		return Request{}, false
	}
	*s.shared--
	if s.turns == 0 || s.text > maxPrompt {
		s.begin()
	}
	s.turns--
	s.blocks = chain(s.blocks, s.source, s.text/skewBlock-len(s.blocks))
	output, n := lognormal(s.rng, s.skew.OutputMean, 0.8), len(s.blocks)
	return Request{At: at, Conversation: fmt.Sprintf("c%d-%d", s.client, s.number), Prompt: s.text, Output: output,
		Blocks: slices.Clip(s.blocks), Answer: chain(slices.Clip(s.blocks), s.source, (s.text+output)/skewBlock-n)[n:], script: s}, true
}

// Workload generates the conversations. A request with only the shared prompt warms one rank first.
func (k Skew) Workload(name string) Workload {
	return Workload{Name: name, BlockSize: skewBlock, PrefillOnly: !k.Decode, DecodePerToken: 0.025,
		Generate: func(seed uint64) []Request {
			left := k.Requests
			out := []Request{{Prompt: k.Shared, Output: 1, Blocks: chain(nil, 0, k.Shared/skewBlock), WarmUp: true}}
			for c := range k.Clients {
				s := &script{skew: &k, rng: rand.New(rand.NewPCG(seed, uint64(c))), client: c, shared: &left}
				if r, ok := s.next(5 + k.StartOver*float64(c)/float64(k.Clients)); ok {
					out = append(out, r)
				}
			}
			return out
		},
		Follow: func(done *Request, ended float64) []Request {
			s := done.script
			if s == nil {
				return nil
			}
			pause := 0.0
			if k.Think > 0 {
				pause = s.rng.ExpFloat64() * k.Think
			}
			s.text += done.Output + lognormal(s.rng, k.TurnMean, k.TurnSigma)
			if r, ok := s.next(ended + pause); ok {
				return []Request{r}
			}
			return nil
		}}
}

// OneShot describes questions without later turns, which arrive for 300 s whatever the answers. Each follows one of
// Tenants system prompts of System tokens, and has Own tokens in the mean.
type OneShot struct {
	Tenants   int     `yaml:"tenants"`
	System    int     `yaml:"system"`
	Own       float64 `yaml:"own"`
	Output    float64 `yaml:"output"`
	PerSecond float64 `yaml:"per_second"`
}

// Workload generates the questions.
func (o OneShot) Workload(name string) Workload {
	return Workload{Name: name, BlockSize: skewBlock,
		Generate: func(seed uint64) []Request {
			rng := rand.New(rand.NewPCG(seed, 0x74656E))
			var out []Request
			for at := rng.ExpFloat64() / o.PerSecond; at < 300; at += rng.ExpFloat64() / o.PerSecond {
				n := len(out)
				blocks := chain(nil, uint64(rng.IntN(o.Tenants)), o.System/skewBlock)
				text := o.System + lognormal(rng, o.Own, 0.5)
				out = append(out, Request{At: at, Conversation: fmt.Sprintf("q%d", n), Prompt: text, Output: lognormal(rng, o.Output, 0.5),
					Blocks: chain(blocks, uint64(n)+1<<32, text/skewBlock-len(blocks))})
			}
			return out
		}}
}

// Siblings generates bursts of 64 requests that share a new prefix, every 30 s for 600 s,
// over unrelated requests that use the given fraction of the fleet's prefill capacity.
func Siblings(name string, background float64, fleet *Fleet) Workload {
	const size, prefix, own = 64, 30_000, 500
	rate := background * float64(fleet.Workers*fleet.Ranks) / fleet.Engine.PerToken / 6000
	return Workload{Name: name, BlockSize: skewBlock, Generate: func(seed uint64) []Request {
		rng := rand.New(rand.NewPCG(seed, 0x736962))
		var out []Request
		for at := rng.ExpFloat64() / rate; at < 600; at += rng.ExpFloat64() / rate {
			text := lognormal(rng, 6000, 1)
			out = append(out, Request{At: at, Conversation: fmt.Sprintf("b%d", len(out)), Prompt: text, Output: lognormal(rng, 250, 0.5),
				Blocks: chain(nil, uint64(len(out))+1<<32, text/skewBlock)})
		}
		for burst := 1; burst < 20; burst++ {
			shared := chain(nil, uint64(burst)+1<<40, prefix/skewBlock)
			for n := range size {
				id := fmt.Sprintf("s%d-%d", burst, n)
				blocks := append([]uint64(nil), shared...)
				out = append(out, Request{At: 30*float64(burst) + 0.1*rng.Float64(), Conversation: id, Prompt: prefix + own,
					Output: lognormal(rng, 250, 0.5), Burst: burst, BurstPrefix: prefix,
					Blocks: chain(blocks, uint64(burst*size+n)+1<<41, (prefix+own)/skewBlock-len(blocks))})
			}
		}
		return out
	}}
}
