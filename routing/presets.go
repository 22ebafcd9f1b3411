package routing

import (
	"maps"
	"slices"

	"github.com/kvlane/kvlane/kvindex"
)

// DefaultPreset is the name of the default policy.
const DefaultPreset = "kv-aware"

// tierCredits is the value of a held token by tier: reading it back over PCIe, from disk or over a network is cheaper
// than computing it, but not free.
var tierCredits = [kvindex.NumTiers]float64{kvindex.Device: 1, kvindex.Host: 0.9, kvindex.Disk: 0.5, kvindex.External: 0.5}

// neutral has every stage off, costs nothing and breaks ties at random.
func neutral() Policy {
	cost := Cost{Tiers: tierCredits, Speculative: 1, Repeat: 1, OneShot: 1}
	return Policy{
		Level:      Flat,
		Sticky:     Sticky{Mode: StickyOff, MatchThreshold: 0.75},
		FirstTurn:  FirstTurn{Placement: PlaceByCost, Slack: 8192, MaxOverlap: 0.5},
		Gate:       Gate{Threshold: 0.1},
		Cap:        Cap{Multiplier: 2},
		Cost:       cost,
		WorkerCost: cost,
		Pick:       Pick{Then: ThenNothing, Ties: TiesRandom, Seed: SeedRequest},
		Limits:     Limits{ShedAt: 0.8},
	}
}

// from returns a changed copy of another policy. Each call makes a new one, because callers change theirs.
func from(base func() Policy, change func(p *Policy)) func() Policy {
	return func() Policy {
		p := base()
		change(&p)
		return p
	}
}

// kvAware is the default. docs/replay.md compares it with the other presets.
var kvAware = from(neutral, func(p *Policy) {
	p.FirstTurn = FirstTurn{Placement: PlaceNear, Slack: 8192, MaxOverlap: 0.5, WithoutID: true}
	p.Cost.Miss, p.Cost.Queue, p.Cost.Active, p.Cost.Repeat, p.Cost.OneShot = 6, 1, 1000, 0.25, 0.25
	p.Pick.Then = ThenQueue
	p.Returning = 1
})

// trt ignores small overlaps, caps requests at a fair share and adds the share of work to the miss.
var trt = from(neutral, func(p *Policy) {
	p.Gate.On = true
	p.Cap.FairShare, p.Cap.Hard = true, 256
	p.Cost.Miss, p.Cost.WorkShare = 1, 1
	p.Pick.Then = ThenWork
	p.PinOverflow = true
})

// leastTokens also places the new conversations of session.
var leastTokens = from(neutral, func(p *Policy) {
	p.Cost.Queue, p.Cost.KV = 1, 0.05
})

// presets are the named policies.
var presets = map[string]func() Policy{
	DefaultPreset: kvAware,
	"round-robin": from(neutral, func(p *Policy) { p.Pick.Ties = TiesCursor }),
	"random":      neutral,
	// It uses the engines' own numbers and takes the first minimum; round robin while one is missing.
	"least-loaded": from(neutral, func(p *Policy) {
		p.Cost.Active, p.Cost.Reported = 1, true
		p.Pick.Ties = TiesLowest
	}),
	// It counts the requests that this router has in flight; ties rotate.
	"load-balancing": from(neutral, func(p *Policy) {
		p.Cost.Active = 1
		p.Pick.Ties = TiesRotate
	}),
	// The same by prompt tokens in flight.
	"load-balancing-tokens": from(neutral, func(p *Policy) {
		p.Cost.KV = 1
		p.Pick.Ties = TiesRotate
	}),
	"least-tokens": leastTokens,
	// Longest match, ties to the fewest requests.
	"greedy": from(neutral, func(p *Policy) {
		p.Cost.Miss = 1
		p.Pick.Then = ThenActive
	}),
	// The request's own waiting time.
	"min-wait": from(neutral, func(p *Policy) {
		p.Cost.Miss, p.Cost.Queue = 1, 1
		p.Pick.Then = ThenQueue
	}),
	// Prefill to compute and resident tokens.
	"compute-and-resident": from(neutral, func(p *Policy) { p.Cost.Miss, p.Cost.Queue, p.Cost.KV = 1, 1, 1 }),
	// It scores matched blocks minus a price for each request. The next preset scores the matched share of the prompt.
	"kv-cache-aware": from(neutral, func(p *Policy) {
		p.Cost.Miss, p.Cost.Active = 1, 0.25*32
		p.Pick.Ties = TiesRotate
	}),
	"kv-cache-aware-share": from(neutral, func(p *Policy) {
		p.Cost.Miss, p.Cost.ActiveShare = 1, 1.0/64
		p.Pick.Ties = TiesRotate
	}),
	"kv-aware-trt": trt,
	// It ignores the cache and compares tokens, then requests.
	"rank-balancing": from(neutral, func(p *Policy) {
		p.Cap.FairShare, p.Cap.Multiplier, p.Cap.Hard = true, 1, 256
		p.Cost.KV = 1
		p.Pick.Then, p.Pick.Ties = ThenActive, TiesLowest
		p.PinOverflow = true
	}),
	"first-turn-round-robin": from(trt, func(p *Policy) { p.FirstTurn.Placement, p.FirstTurn.MaxOverlap = PlaceRoundRobin, 1 }),
	"conversation": from(neutral, func(p *Policy) {
		p.Sticky = Sticky{Mode: StickyWorker, Implicit: true, MatchThreshold: 0.75}
		p.Cost.KV = 1
		p.Pick.Ties = TiesRotate
	}),
	"conversation-rank": from(neutral, func(p *Policy) {
		p.Sticky = Sticky{Mode: StickyTarget, HardCap: true, BindingWins: true, MatchThreshold: 0.75}
		p.FirstTurn = FirstTurn{Placement: PlaceRoundRobin, MaxOverlap: 1, WithoutID: true, Unbound: true}
		p.Cap.FairShare, p.Cap.Hard = true, 256
		p.PinOverflow = true
	}),
	"session": from(leastTokens, func(p *Policy) { p.Sticky.Mode = StickyTarget }),
	// It is a consistent hash of the conversation id; replicas agree without sharing.
	"session-hash": from(neutral, func(p *Policy) { p.Pick.Seed = SeedConversation }),
	// It chooses the worker by the union of its ranks, then the rank by trt's rule.
	"two-phase": from(trt, func(p *Policy) {
		p.Level = TwoPhase
		p.WorkerCost.Miss, p.WorkerCost.Active = 1, 0.25*32
		p.Pick.Ties = TiesRotate
	}),
	"worker-only": from(kvAware, func(p *Policy) {
		p.Level = WorkerOnly
		p.FirstTurn.Placement = PlaceByCost
		p.WorkerCost = p.Cost
	}),
	// For decode pools: free memory counts most, and transferring a token costs half as much as computing it.
	"decode": from(neutral, func(p *Policy) {
		p.Cost.Miss, p.Cost.Queue, p.Cost.KV = 0.5, 1, 1
		p.Limits.MaxKVUsage = 0.95
	}),
}

// Preset returns a policy by name, and whether there is one. The caller owns it.
func Preset(name string) (Policy, bool) {
	if f := presets[name]; f != nil {
		return f(), true
	}
	return Policy{}, false
}

// Presets returns the names of all presets in alphabetical order.
func Presets() []string { return slices.Sorted(maps.Keys(presets)) }
