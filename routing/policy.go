package routing

import (
	"math"
	"strconv"
	"time"

	"github.com/kvlane/kvlane/kvindex"
)

// Policy holds the settings of all stages. Start from a Preset: a zero field does not mean its default.
type Policy struct {
	// Level is the unit that is chosen first.
	Level Level `json:"level" yaml:"level"`
	// Sticky sends the turns of a conversation to one target.
	Sticky Sticky `json:"sticky" yaml:"sticky"`
	// WarmUp sends unpinned requests to targets that have had no request yet, in order.
	WarmUp bool `json:"warm_up" yaml:"warm_up"`
	// FirstTurn places new conversations.
	FirstTurn FirstTurn `json:"first_turn" yaml:"first_turn"`
	// Gate ignores small overlaps.
	Gate Gate `json:"gate" yaml:"gate"`
	// Cap bounds the requests of a target.
	Cap Cap `json:"cap" yaml:"cap"`
	// Cost is what the pick minimises.
	Cost Cost `json:"cost" yaml:"cost"`
	// WorkerCost is the cost of the first phase when Level is not flat. A worker's load is the sum over its ranks, its
	// overlap that of the best rank.
	WorkerCost Cost `json:"worker_cost" yaml:"worker_cost"`
	// Pick breaks ties.
	Pick Pick `json:"pick" yaml:"pick"`
	// Limits drop busy targets.
	Limits Limits `json:"limits" yaml:"limits"`
	// Returning is how strongly the rule follows s, the observed share of requests that continue a known conversation. The
	// strength is r = Returning * (4s - 2), kept within 0 and Returning: 0 up to two turns per conversation, and greatest
	// from four on. A miss costs 1 - r/2 of Cost.Miss. In the FirstTurn stage misses and Slack count 1 - r, MaxOverlap is
	// at least 2r, and r is first multiplied by 4*computes/shares if that is below 1: computes is the tokens that a
	// conversation is expected to compute, shares those of its first prompt that a target has cached. 0 to 1.
	Returning float64 `json:"returning" yaml:"returning"`
	// PinOverflow ignores a pin whose target is full.
	PinOverflow bool `json:"pin_overflow" yaml:"pin_overflow"`
	// PinSoft ignores a pin whose targets are all full or not eligible.
	PinSoft bool `json:"pin_soft" yaml:"pin_soft"`
}

// Level is the unit that is chosen first.
type Level string

const (
	// Flat compares all targets with each other.
	Flat Level = "flat"
	// TwoPhase chooses a worker and then one of its ranks.
	TwoPhase Level = "two-phase"
	// WorkerOnly chooses a worker; the engine chooses the rank.
	WorkerOnly Level = "worker"
)

// Sticky is the stage that keeps conversations on their targets.
type Sticky struct {
	// Mode is off, target (worker and rank) or worker (its ranks compete).
	Mode StickyMode `json:"mode" yaml:"mode"`
	// HardCap sends a turn elsewhere while the conversation's target has Cap.Hard requests; the binding stays. Without
	// it a conversation always follows its binding.
	HardCap bool `json:"hard_cap" yaml:"hard_cap"`
	// BindingWins makes a conversation's binding override a pin.
	BindingWins bool `json:"binding_wins" yaml:"binding_wins"`
	// Implicit recognises conversations without an id by their prefix.
	Implicit bool `json:"implicit" yaml:"implicit"`
	// MatchThreshold is the share of the prompt's blocks that must match at least; 0 to 1.
	MatchThreshold float64 `json:"match_threshold" yaml:"match_threshold"`
}

// StickyMode is what a conversation is bound to.
type StickyMode string

const (
	StickyOff    StickyMode = "off"
	StickyTarget StickyMode = "target"
	StickyWorker StickyMode = "worker"
)

// FirstTurn is the stage that places new conversations.
type FirstTurn struct {
	// Placement is off, near, round_robin, least_queued or least_tokens.
	Placement Placement `json:"placement" yaml:"placement"`
	// Slack is for near: targets take turns if their miss + queue + cost.active * requests exceeds the least by at most
	// this many tokens, or by the prompt's length if that is less. The default is one engine step (the chunk budget).
	// 0 to 65536.
	Slack int64 `json:"slack" yaml:"slack"`
	// MaxOverlap skips the stage for prompts of which a target holds a larger share; 1 never skips it. 0 to 1.
	MaxOverlap float64 `json:"max_overlap" yaml:"max_overlap"`
	// WithoutID treats a request without a conversation id as a new conversation (if MaxOverlap allows).
	WithoutID bool `json:"without_id" yaml:"without_id"`
	// Unbound extends the stage to every request that the sticky stage did not place:
	// later turns that overflow, requests without an id.
	Unbound bool `json:"unbound" yaml:"unbound"`
}

// Placement is where new conversations go.
type Placement string

const (
	PlaceByCost      Placement = "off"
	PlaceNear        Placement = "near"
	PlaceRoundRobin  Placement = "round_robin"
	PlaceLeastQueued Placement = "least_queued"
	PlaceLeastTokens Placement = "least_tokens"
)

// Gate is the stage that ignores overlaps when the best one is small.
type Gate struct {
	On bool `json:"on" yaml:"on"`
	// Threshold is the share of the prompt that the best eligible overlap must exceed; 0 to 1.
	Threshold float64 `json:"threshold" yaml:"threshold"`
}

// Cap is the stage that bounds the requests of a target.
type Cap struct {
	// FairShare drops targets at min(max(ceil(Multiplier*ceil(total/targets)), busiest), Hard) requests.
	FairShare bool `json:"fair_share" yaml:"fair_share"`
	// Multiplier is at least 1.
	Multiplier float64 `json:"multiplier" yaml:"multiplier"`
	// Hard is the most requests that one target may have, 0 for no bound.
	Hard int64 `json:"hard" yaml:"hard"`
	// Overflow chooses the target with the fewest requests if all are at the cap, instead of refusing the request.
	Overflow bool `json:"overflow" yaml:"overflow"`
}

// Cost is a sum of terms in tokens. miss is the request's uncached tokens, queue, work, kv and active are the target's
// Load, and L is the prompt's length:
//
//	Miss*miss + Queue*queue + Work*work + KV*kv + (Active + ActiveShare*L)*active
//	  + WorkShare*L*work/max(sum of work, L)
//
// miss, queue and work are divided by the target's speed. Without Queue and Work the sum is a score of cached tokens,
// not a time. Then requests are divided by the speed instead of the miss: otherwise a slow target would get nothing
// until the others are full.
type Cost struct {
	// Miss is the overlap weight: the price of a token that must be computed, in queued
	// tokens. 4 to 12 is a plateau where few conversations return; 1 collapses near capacity. 0 to 100.
	Miss float64 `json:"miss" yaml:"miss"`
	// OneShot is the share of Miss that counts where no request continues a conversation and a target is idle:
	// computing a prompt again there delays no other request. Where all targets are busy it does, so the share grows by
	// (load / 85,000)^4 up to 2, with load the tokens of Queue and Active on the least loaded target. The rule is off
	// while up to half of the requests with an id begin a conversation, and fully on from three quarters;
	// FirstTurn.MaxOverlap is reduced to the same extent. It is also off while a target computes a part of the prompt
	// for another request, as that is cached soon. 1 is off. 0 to 1.
	OneShot float64 `json:"one_shot" yaml:"one_shot"`
	// Queue is the price of a token queued before this request. 0 to 100.
	Queue float64 `json:"queue" yaml:"queue"`
	// Work is the price of a token of requests that have not ended. 0 to 100.
	Work float64 `json:"work" yaml:"work"`
	// KV is the price of a resident prompt token. 0 to 100.
	KV float64 `json:"kv" yaml:"kv"`
	// Active is the price of a request that has not ended, in tokens. 0 to 1e6.
	Active float64 `json:"active" yaml:"active"`
	// ActiveShare is the price of such a request as a share of the prompt. 0 to 10.
	ActiveShare float64 `json:"active_share" yaml:"active_share"`
	// Repeat is the share of Active and ActiveShare that counts for a prompt that is already computed: a target has all
	// but 64 of its tokens, as for samples of one prompt. Such a request adds decoding only. A target's requests beyond
	// those of the least loaded one plus 128 count in full. 0 to 1.
	Repeat float64 `json:"repeat" yaml:"repeat"`
	// WorkShare is the price of the target's share of all work, in prompts. 0 to 100.
	WorkShare float64 `json:"work_share" yaml:"work_share"`
	// Transfers counts requests whose KV cache is in transfer from here.
	Transfers bool `json:"transfers" yaml:"transfers"`
	// Reported counts requests by the engines' reports alone (running + waiting). While a candidate has no fresh
	// report, the choice is by round robin.
	Reported bool `json:"reported" yaml:"reported"`
	// Tiers is the value of a token held in each tier, relative to one on the device; 0 to 1.
	Tiers [kvindex.NumTiers]float64 `json:"tiers" yaml:"tiers"`
	// Speculative is the value of a speculative token. 0 to 1.
	Speculative float64 `json:"speculative" yaml:"speculative"`
}

// Pick is the last stage: the least cost wins.
type Pick struct {
	// Then breaks ties in cost by queue (with 1 % of the resident tokens), work, active or nothing; the lower value wins.
	Then Then `json:"then" yaml:"then"`
	// Ties chooses among the targets that Then leaves equal.
	Ties Ties `json:"ties" yaml:"ties"`
	// Seed selects the seed of random ties: request, or conversation, which makes the choice a consistent hash (a
	// request without a conversation uses its id).
	Seed Seed `json:"seed" yaml:"seed"`
}

// Then is the second key of the pick.
type Then string

const (
	ThenQueue   Then = "queue"
	ThenWork    Then = "work"
	ThenActive  Then = "active"
	ThenNothing Then = "nothing"
)

// Ties is the last key of the pick.
type Ties string

const (
	// TiesRandom draws by the seed: uniform, and the same in all replicas with equal Config.HashSeed.
	TiesRandom Ties = "random"
	// TiesLowest takes the first target in order of worker and rank.
	TiesLowest Ties = "lowest"
	// TiesRotate takes tied[n mod len(tied)], n counting picks.
	TiesRotate Ties = "rotate"
	// TiesCursor takes the next one after the last taken, in order.
	TiesCursor Ties = "cursor"
)

// Seed is the source of random ties.
type Seed string

const (
	SeedRequest      Seed = "request"
	SeedConversation Seed = "conversation"
)

// Limits drop busy targets before anything else. 0 is no limit.
type Limits struct {
	// MaxActive bounds the sequences of a target, those booked here and those that its engine reports. A request counts
	// for each of its answers (n, best_of), but needs one free place only.
	MaxActive int64 `json:"max_active" yaml:"max_active"`
	// MaxQueue bounds the queued prefill tokens of a target.
	MaxQueue int64 `json:"max_queue" yaml:"max_queue"`
	// MaxKVUsage is the reported share of the KV cache in use, 0 to 1.
	MaxKVUsage float64 `json:"max_kv_usage" yaml:"max_kv_usage"`
	// ShedAt is the share of the limits at which requests of negative priority are refused; above 0, up to 1.
	ShedAt float64 `json:"shed_at" yaml:"shed_at"`
	// SuspendAfter drops targets whose reports stopped that long ago. Their index entries stay.
	SuspendAfter time.Duration `json:"suspend_after" yaml:"suspend_after"`
}

// check checks every setting; prefix is the policy's own path with a dot.
func (p *Policy) check(prefix string, ps *problems) {
	huge := float64(math.MaxInt32)
	oneOf(ps, prefix+"level", p.Level, Flat, TwoPhase, WorkerOnly)
	oneOf(ps, prefix+"sticky.mode", p.Sticky.Mode, StickyOff, StickyTarget, StickyWorker)
	oneOf(ps, prefix+"first_turn.placement", p.FirstTurn.Placement, PlaceByCost, PlaceNear, PlaceRoundRobin, PlaceLeastQueued, PlaceLeastTokens)
	oneOf(ps, prefix+"pick.then", p.Pick.Then, ThenQueue, ThenWork, ThenActive, ThenNothing)
	oneOf(ps, prefix+"pick.ties", p.Pick.Ties, TiesRandom, TiesLowest, TiesRotate, TiesCursor)
	oneOf(ps, prefix+"pick.seed", p.Pick.Seed, SeedRequest, SeedConversation)
	ps.within(prefix, []bound{
		{"sticky.match_threshold", p.Sticky.MatchThreshold, 0, 1},
		{"first_turn.slack", float64(p.FirstTurn.Slack), 0, 65536},
		{"first_turn.max_overlap", p.FirstTurn.MaxOverlap, 0, 1},
		{"gate.threshold", p.Gate.Threshold, 0, 1},
		{"returning", p.Returning, 0, 1},
		{"cap.multiplier", p.Cap.Multiplier, 1, 1e6},
		{"cap.hard", float64(p.Cap.Hard), 0, huge},
		{"limits.max_active", float64(p.Limits.MaxActive), 0, huge},
		{"limits.max_queue", float64(p.Limits.MaxQueue), 0, math.MaxInt64},
		{"limits.max_kv_usage", p.Limits.MaxKVUsage, 0, 1},
		{"limits.shed_at", p.Limits.ShedAt, 0.01, 1},
	})
	ps.span(prefix+"limits.suspend_after", p.Limits.SuspendAfter, 0, math.MaxInt64)
	p.Cost.check(prefix+"cost.", ps)
	p.WorkerCost.check(prefix+"worker_cost.", ps)
}

func (c *Cost) check(prefix string, ps *problems) {
	ps.within(prefix, []bound{
		{"miss", c.Miss, 0, 100},
		{"queue", c.Queue, 0, 100},
		{"work", c.Work, 0, 100},
		{"kv", c.KV, 0, 100},
		{"active", c.Active, 0, 1e6},
		{"repeat", c.Repeat, 0, 1},
		{"one_shot", c.OneShot, 0, 1},
		{"active_share", c.ActiveShare, 0, 10},
		{"work_share", c.WorkShare, 0, 100},
		{"speculative", c.Speculative, 0, 1},
	})
	for i, credit := range c.Tiers {
		ps.within(prefix, []bound{{"tiers[" + strconv.Itoa(i) + "]", credit, 0, 1}})
	}
}
