package replay

import (
	"fmt"
	"math/rand/v2"
	"slices"
)

// Skew describes clients that each run conversations back to back against a shared
// system prompt.
type Skew struct {
	Clients            int
	StartOver          float64 // seconds over which the clients start
	Shared             int     // tokens of the system prompt
	FirstMean, FirstSD float64 // first user text
	TurnMean, TurnSD   float64 // later user texts
	OutputMean         float64
	MinTurns, MaxTurns int
	Think              float64 // mean of the pause, exponential
	Requests           int
}

// script is one client's state.
type script struct {
	skew   *Skew
	rng    *rand.Rand
	client int
	number int
	turns  int
	shared *int // requests left to all clients
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
	s.text = k.Shared + lognormal(s.rng, k.FirstMean, k.FirstSD)
}

// next is the client's next request.
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
	return Request{At: at, Conversation: fmt.Sprintf("c%d-%d", s.client, s.number), Prompt: s.text,
		Output: lognormal(s.rng, s.skew.OutputMean, 0.8), Blocks: slices.Clip(s.blocks), script: s}, true
}

func (k Skew) workload(name string, fleet Fleet) Workload {
	return Workload{Name: name, BlockSize: skewBlock, Fleet: fleet, PrefillOnly: true, DecodePerToken: 0.025,
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
		Follow: func(done *Request, ended float64) (Request, bool) {
			s := done.script
			if s == nil {
				return Request{}, false
			}
			pause := 0.0
			if k.Think > 0 {
				pause = s.rng.ExpFloat64() * k.Think
			}
			s.text += done.Output + lognormal(s.rng, k.TurnMean, k.TurnSD)
			return s.next(ended + pause)
		}}
}

// ConversationSkew is 96 long conversations that share a system prompt which one rank
// holds first: plain affinity funnels births to that rank.
func ConversationSkew() Workload {
	e := ExpertRank(1_500_000)
	e.PerToken = 320e-6
	return Skew{Clients: 96, StartOver: 60, Shared: 2048, FirstMean: 3000, FirstSD: 0.8, TurnMean: 1200, TurnSD: 1, OutputMean: 200,
		MinTurns: 36, MaxTurns: 54, Requests: 4300}.workload("conversation skew", Fleet{Workers: 1, Ranks: 8, Coupled: true, Engine: e})
}

// StarvedRanks is 24 clients with short conversations and pauses: without a gate and
// random ties some ranks get nothing.
func StarvedRanks() Workload {
	return Skew{Clients: 24, StartOver: 30, Shared: 512, FirstMean: 8000, FirstSD: 0.6, TurnMean: 900, TurnSD: 1, OutputMean: 400,
		MinTurns: 5, MaxTurns: 25, Think: 1, Requests: 4560}.workload("starved ranks", Fleet{Workers: 1, Ranks: 8, Coupled: true, Engine: ExpertRank(1_000_000)})
}

// OneShot describes questions behind system prompts, without later turns: Tenants
// prompts of System tokens, own texts of Own mean tokens, an open loop for 300 s.
type OneShot struct {
	Tenants, System int
	Own, Output     float64
	PerSecond       float64
	Capacity        int
}

// Workload generates the questions.
func (o OneShot) Workload(name string) Workload {
	return Workload{Name: name, BlockSize: skewBlock, Fleet: Fleet{Workers: 8, Ranks: 1, Engine: Dense70B(o.Capacity)},
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

// Siblings is bursts of 64 requests that share a prefix nobody has yet, every 30 s
// for 600 s, over unrelated requests that use the given part of the fleet's prefill.
func Siblings(background float64) Workload {
	const size, prefix, own = 64, 30_000, 500
	fleet := Fleet{Workers: 8, Ranks: 1, Engine: Dense70B(3_000_000)}
	rate := background * float64(fleet.Workers) / fleet.Engine.PerToken / 6000
	return Workload{Name: "siblings", BlockSize: skewBlock, Fleet: fleet, Generate: func(seed uint64) []Request {
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
