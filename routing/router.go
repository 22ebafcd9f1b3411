package routing

import (
	"fmt"
	"time"

	"github.com/kvlane/kvlane/kvindex"
)

// Legs of a plan. Each has its own conversations and cursors.
const (
	mainLeg = iota
	prefillLeg
	numLegs
)

const none32 = int32(-1)

// Router chooses targets and books requests on them. It is not safe for concurrent use: keep it under one mutex.
type Router struct {
	config  Config
	targets []target
	// order lists the used slots by worker and rank.
	order    []kvindex.Slot
	roles    [3]int
	anyModel pool
	models   map[string]*pool
	workers  map[string]workerEntry

	conversations [numLegs]conversations
	programs      programs
	ledger        ledger
	remotes       remotes
	queue         *Queue // of those that are held, nil without
	sharer        Sharer // nil for a router that shares nothing
	others        others
	staleReports  uint64
	// judged is when targets were last judged, suspects the number of suspect ones.
	judged   time.Duration
	suspects int
	// judgeNext makes the next pick judge, regardless of judged.
	judgeNext bool
	// alive is the time of the last sign of life, 0 before the first call of Awake.
	alive time.Duration
	// bookings is the Number of the last booking.
	bookings uint64

	// Scratch memory of one decision, reused.
	group                  []kvindex.Slot
	match                  []match
	matchEpoch             uint32
	overlaps               []Overlap
	cands, workerCands     []candidate
	perWorker, freeWorkers []int32
}

// match finds a slot's entry among the overlaps of the decision with this epoch.
type match struct {
	epoch uint32
	at    int32
}

// New returns a router without targets.
func New(config Config) (*Router, error) {
	if err := config.Validate(); err != nil {
		return nil, fmt.Errorf("routing: %w", err)
	}
	r := &Router{config: config, models: map[string]*pool{}, workers: map[string]workerEntry{},
		remotes: remotes{byKey: map[remoteKey]ReservationID{}}}
	for leg := range r.conversations {
		r.conversations[leg] = newConversations(config.MaxConversations, config.MaxPrefixBlocks)
	}
	return r, nil
}

// Config returns the settings.
func (r *Router) Config() Config { return r.config }

// SetConfig replaces the settings for the decisions from now on. MaxConversations, MaxPrefixBlocks, Node and HashSeed
// stay as they are. After an error nothing has changed.
func (r *Router) SetConfig(config Config) error {
	config.MaxConversations, config.MaxPrefixBlocks = r.config.MaxConversations, r.config.MaxPrefixBlocks
	config.Node, config.HashSeed = r.config.Node, r.config.HashSeed
	if err := config.Validate(); err != nil {
		return fmt.Errorf("routing: %w", err)
	}
	r.config = config
	return nil
}

// Pick chooses the targets of a request and books it on them. The overlaps are the
// index's answer for its prompt, each slot at most once; they are not kept. now is the
// time since start and must not go backwards. An Explanation, if not nil, is filled.
//
// Call FirstToken when the answer begins, and Release when the request has ended, successfully or not. Errors are
// *NoTargetError, *CapacityError and *HeldError, perhaps wrapped; after an error nothing is booked.
func (r *Router) Pick(now time.Duration, q *Query, overlaps []Overlap, ex *Explanation) (Plan, error) {
	r.judge(now)
	r.setOverlaps(overlaps)
	ex.begin(q)
	var plan Plan
	var err error
	if r.roles[Prefill]+r.roles[Decode] > 0 && r.disagg(q).Mode != ModeOff {
		plan, err = r.pickPools(now, q, ex)
	} else {
		plan, err = r.pickWhole(now, q, ex)
	}
	r.overlaps = nil
	ex.end(r, plan, err)
	return plan, err
}

// pickWhole is Pick where one target serves the complete request.
func (r *Router) pickWhole(now time.Duration, q *Query, ex *Explanation) (Plan, error) {
	c, err := r.choose(now, q, request{leg: mainLeg, pool: Both, policy: &r.config.Policy, worker: none32}, ex)
	if err != nil {
		return Plan{}, err
	}
	return r.commitLocal(now, q, &c)
}

// Shadow returns what another policy would choose for a request, without booking it: the target, its uncached tokens of
// the prompt and the tokens queued there. Bindings and loads are those of the Router's own decisions. ok is false if
// the policy would refuse the request, or if it may be split between pools. Call it before Pick.
func (r *Router) Shadow(now time.Duration, q *Query, overlaps []Overlap, policy *Policy) (slot kvindex.Slot, miss, queue int64, ok bool) {
	if r.roles[Prefill]+r.roles[Decode] > 0 && r.disagg(q).Mode != ModeOff {
		return NoSlot, 0, 0, false
	}
	r.setOverlaps(overlaps)
	c, err := r.choose(now, q, request{leg: mainLeg, pool: Both, policy: policy, worker: none32}, nil)
	r.overlaps = nil
	return c.slot, c.miss, c.queue, err == nil
}

// setOverlaps makes the overlaps addressable by slot for one decision.
func (r *Router) setOverlaps(overlaps []Overlap) {
	r.overlaps = overlaps
	r.matchEpoch++
	if r.matchEpoch == 0 {
		clear(r.match)
		r.matchEpoch = 1
	}
	for i := range overlaps {
		if s := overlaps[i].Slot; int(s) < len(r.match) {
			r.match[s] = match{r.matchEpoch, int32(i)}
		}
	}
}

// commit books a choice, and advances cursors and conversations.
func (r *Router) commit(now time.Duration, q *Query, main, prefill *choice) Plan {
	plan := Plan{Decode: main.slot, Prefill: NoSlot, RankFree: main.rankFree, Matched: main.overlap, Miss: main.miss, DecodeMiss: main.miss, Sequences: q.Sequences,
		FirstTurn: main.firstTurn, Via: main.via, Degraded: main.degraded}
	plan.Conversation = r.follow(now, q, main)
	owed := main.queue + main.miss
	if prefill != nil {
		r.follow(now, q, prefill)
		owed = prefill.queue + prefill.miss
		plan.Prefill, plan.Matched, plan.Miss = prefill.slot, prefill.overlap, prefill.miss
	}
	t := &r.targets[plan.Decode]
	t.progress.Share, t.progress.Booking = t.progress.share(now), now // once for both predictions
	plan.PerToken = toDuration(t.perToken(now, q.PromptTokens))
	of := party{Tenant: main.owner}
	if q.Conversation != "" {
		of.Conversation = main.key
	}
	plan.Reservation = r.book(now, reservation{Decode: plan.Decode, Prefill: plan.Prefill, Miss: plan.Miss, KV: q.PromptTokens, Owed: owed,
		Lookup: q.Lookup, Idle: q.Idle, Tenant: main.tenant, Sequences: q.Sequences, conversation: plan.Conversation, Of: of}, !q.Whole)
	res := r.ledger.get(plan.Reservation)
	if r.computes(res).fitOf().Seen >= learnedFrom {
		plan.TTFT = toDuration(res.Forecast.first())
	}
	r.shareBooking(plan.Reservation, main, prefill)
	if r.config.KVTokens > 0 && q.Conversation != "" {
		res.program = programKey{main.key, main.models}
		r.programs.begin(res.program, q.PromptTokens, q.Final)
	}
	return plan
}

// follow advances cursors, binds the conversation and returns its key.
func (r *Router) follow(now time.Duration, q *Query, c *choice) Key {
	if c.cursor != none32 {
		c.models.Cursor[c.leg] = c.cursor + 1
		b := &c.models.Starts[c.leg]
		b.Placed, b.Own = now, r.concurrent(now, b.Placed)
	}
	c.models.Rotation[c.leg]++
	table := &r.conversations[c.leg]
	key := c.key
	if q.Final && q.Conversation != "" {
		if c.conversation != none {
			table.remove(c.conversation)
		}
		return Key{}
	}
	if key == (Key{}) {
		if !c.implicit || len(q.Prefix) == 0 {
			return key
		}
		table.generated++
		key = generatedKey(r.config.Node, table.generated)
	}
	at, bound := c.conversation, false
	switch {
	case at == none:
		at, bound = table.put(key, c.slot), true
	case c.keepBinding:
		table.touch(at)
	default:
		table.touch(at)
		bound = table.entries[at].slot != c.slot
		table.bind(at, c.slot)
	}
	if q.Conversation != "" {
		if len(q.Exclude) == 0 { // a retry is not another turn
			c.turn = table.countTurn(at, q.PromptTokens)
			c.models.count(c.leg, c.turn)
			c.models.Grown[c.leg].count(c.turn, c.brings)
		}
	}
	if c.implicit {
		table.setPath(at, q.Prefix)
	}
	r.shareUse(c.leg, at, bound)
	return key
}
