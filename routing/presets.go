package routing

import (
	"maps"
	"slices"

	"github.com/kvlane/kvlane/kvindex"
)

// DefaultPreset is the name of the default policy.
const DefaultPreset = "kv-aware"

// tierCredits is the value of a held token by tier: reading it back over PCIe, from
// disk or over a network is cheaper than computing it, and not free.
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

// kvAware is the default. docs/replay.md compares it with the other presets.
func kvAware() Policy {
	p := neutral()
	p.FirstTurn = FirstTurn{Placement: PlaceNear, Slack: 8192, MaxOverlap: 0.5, WithoutID: true}
	p.Cost.Miss, p.Cost.Queue, p.Cost.Active, p.Cost.Repeat, p.Cost.OneShot = 6, 1, 1000, 0.25, 0.25
	p.Pick.Then = ThenQueue
	p.Returning = 1
	return p
}

// trt gates small overlaps, caps requests at a fair share and adds the share of work to the miss.
func trt() Policy {
	p := neutral()
	p.Gate.On = true
	p.Cap.FairShare, p.Cap.Hard = true, 256
	p.Cost.Miss, p.Cost.WorkShare = 1, 1
	p.Pick.Then = ThenWork
	p.PinOverflow = true
	return p
}

// leastTokens is also session's placement of new conversations.
func leastTokens() Policy {
	p := neutral()
	p.Cost.Queue, p.Cost.KV = 1, 0.05
	return p
}

// presets are the named policies. Each is made anew: callers change theirs.
var presets = map[string]func() Policy{
	DefaultPreset: kvAware,
	"round-robin": func() Policy {
		p := neutral()
		p.Pick.Ties = TiesCursor
		return p
	},
	"random": neutral,
	// The engines' own numbers, first minimum; round robin while one is missing.
	"least-loaded": func() Policy {
		p := neutral()
		p.Cost.Active, p.Cost.Reported = 1, true
		p.Pick.Ties = TiesLowest
		return p
	},
	// Requests that this router has in flight; ties rotate.
	"load-balancing": func() Policy {
		p := neutral()
		p.Cost.Active = 1
		p.Pick.Ties = TiesRotate
		return p
	},
	// The same by prompt tokens in flight.
	"load-balancing-tokens": func() Policy {
		p := neutral()
		p.Cost.KV = 1
		p.Pick.Ties = TiesRotate
		return p
	},
	"least-tokens": leastTokens,
	// Longest match, ties to the fewest requests.
	"greedy": func() Policy {
		p := neutral()
		p.Cost.Miss = 1
		p.Pick.Then = ThenActive
		return p
	},
	// The request's own waiting time.
	"min-wait": func() Policy {
		p := neutral()
		p.Cost.Miss, p.Cost.Queue = 1, 1
		p.Pick.Then = ThenQueue
		return p
	},
	// Prefill to compute and resident tokens.
	"compute-and-resident": func() Policy {
		p := neutral()
		p.Cost.Miss, p.Cost.Queue, p.Cost.KV = 1, 1, 1
		return p
	},
	// A score of matched blocks less a price for each request. The next preset scores the matched share of the prompt.
	"kv-cache-aware": func() Policy {
		p := neutral()
		p.Cost.Miss, p.Cost.Active = 1, 0.25*32
		p.Pick.Ties = TiesRotate
		return p
	},
	"kv-cache-aware-share": func() Policy {
		p := neutral()
		p.Cost.Miss, p.Cost.ActiveShare = 1, 1.0/64
		p.Pick.Ties = TiesRotate
		return p
	},
	"kv-aware-trt": trt,
	// Without cache knowledge: tokens, then requests.
	"rank-balancing": func() Policy {
		p := neutral()
		p.Cap.FairShare, p.Cap.Multiplier, p.Cap.Hard = true, 1, 256
		p.Cost.KV = 1
		p.Pick.Then, p.Pick.Ties = ThenActive, TiesLowest
		p.PinOverflow = true
		return p
	},
	"first-turn-round-robin": func() Policy {
		p := trt()
		p.FirstTurn.Placement, p.FirstTurn.MaxOverlap = PlaceRoundRobin, 1
		return p
	},
	"conversation": func() Policy {
		p := neutral()
		p.Sticky = Sticky{Mode: StickyWorker, Implicit: true, MatchThreshold: 0.75}
		p.Cost.KV = 1
		p.Pick.Ties = TiesRotate
		return p
	},
	"conversation-rank": func() Policy {
		p := neutral()
		p.Sticky = Sticky{Mode: StickyTarget, HardCap: true, BindingWins: true, MatchThreshold: 0.75}
		p.FirstTurn = FirstTurn{Placement: PlaceRoundRobin, MaxOverlap: 1, WithoutID: true, Unbound: true}
		p.Cap.FairShare, p.Cap.Hard = true, 256
		p.PinOverflow = true
		return p
	},
	"session": func() Policy {
		p := leastTokens()
		p.Sticky.Mode = StickyTarget
		return p
	},
	// A consistent hash of the conversation id; replicas agree without sharing.
	"session-hash": func() Policy {
		p := neutral()
		p.Pick.Seed = SeedConversation
		return p
	},
	// Worker by the union of its ranks, then the rank by trt's rule.
	"two-phase": func() Policy {
		p := trt()
		p.Level = TwoPhase
		p.WorkerCost.Miss, p.WorkerCost.Active = 1, 0.25*32
		p.Pick.Ties = TiesRotate
		return p
	},
	"worker-only": func() Policy {
		p := kvAware()
		p.Level = WorkerOnly
		p.FirstTurn.Placement = PlaceByCost
		p.WorkerCost = p.Cost
		return p
	},
	// For decode pools: free memory counts most; a token that has to be transferred costs half of one that is computed.
	"decode": func() Policy {
		p := neutral()
		p.Cost.Miss, p.Cost.Queue, p.Cost.KV = 0.5, 1, 1
		p.Limits.MaxKVUsage = 0.95
		return p
	},
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
