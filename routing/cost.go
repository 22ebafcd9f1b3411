package routing

import (
	"cmp"
	"math"
	"slices"
)

// A prompt of more than shortPrompt tokens counts as repeated if a target holds all but repeated of them: blocks have up to
// 64 tokens, and the last one is seldom full. With more than batch requests above the least loaded target, decoding costs
// too. crowdedAt is the load of the least loaded target, in tokens, at which a miss of a one-shot request costs all of
// Cost.Miss. Where conversations return, up to missPart of a new one's miss counts: computing its prefix again on an idle
// target delays no other request. A resident token costs residentPart of a queued one, because contexts beyond a target's
// memory evict each other.
const shortPrompt, repeated, batch, crowdedAt, missPart, residentPart = 256, 64, 128, 85_000, 0.25, 0.02

// gate reports whether overlaps count: the best overlap must exceed the threshold.
func (d *decision) gate() bool {
	g := &d.req.policy.Gate
	if !g.On {
		return true
	}
	open := float64(d.bestOverlap)/float64(max(d.q.PromptTokens, 1)) > g.Threshold
	d.ex.sayf("gate", "best overlap %d of %d, open %v", d.bestOverlap, d.q.PromptTokens, open)
	return open
}

// price computes the cost of every candidate.
func (d *decision) price(cands []candidate, w *Cost, affinity bool) {
	d.priced = w == &d.req.policy.Cost
	prompt, sum := float64(d.q.PromptTokens), 0.0
	if w.WorkShare > 0 {
		for i := range cands {
			sum += float64(cands[i].work)
		}
	}
	denominator := max(sum, prompt, 1)
	missPrice := w.Miss * (1 - d.returning/2)
	if d.returning > 0 {
		d.ex.sayf("cost", "a miss costs %.1f: %.0f %% of the requests continue a conversation", missPrice, 50*(1+d.returning/d.req.policy.Returning))
	}
	if d.oneShot > 0 && w.OneShot < 1 {
		least := math.Inf(1)
		for i := range cands {
			least = min(least, (w.Queue*float64(cands[i].queue)+w.Active*float64(cands[i].active))/cands[i].speed)
		}
		missPrice *= 1 + d.oneShot*(min(w.OneShot+math.Pow(least/crowdedAt, 4), 2)-1)
		d.ex.sayf("cost", "a miss costs %.1f: few requests continue a conversation, the least load is %.0f tokens", missPrice, least)
	}
	requestPrice, spared, cheap := w.Active+w.ActiveShare*prompt, 0.0, 0.0
	if affinity && w.Repeat < 1 && d.q.PromptTokens > shortPrompt && d.q.PromptTokens-d.bestOverlap <= repeated {
		idlest := slices.MinFunc(cands, func(a, b candidate) int { return cmp.Compare(a.active, b.active) })
		spared, cheap = (1-w.Repeat)*requestPrice, float64(idlest.active+batch)
		d.ex.sayf("cost", "a request costs %.0f: the prompt is computed already", requestPrice-spared)
	}
	for i := range cands {
		c := &cands[i]
		miss := float64(c.miss)
		if !affinity {
			miss = prompt
		}
		queue, active, work := float64(c.queue)+heldPart*d.returning*float64(c.held), float64(c.active), float64(c.work)
		requests := requestPrice*active - spared*min(active, cheap)
		share := w.WorkShare * work * prompt / denominator / c.speed
		if w.Queue > 0 || w.Work > 0 {
			c.cost = (missPrice*miss+w.Queue*queue+w.Work*work)/c.speed + (w.KV+residentPart*d.returning)*float64(c.kv) + requests + share
		} else {
			c.cost = missPrice*miss + w.KV*float64(c.kv) + requests/c.speed + share
		}
	}
}

// firstPhase chooses a worker. It returns true if that decided; otherwise it keeps only the ranks of the chosen worker.
func (d *decision) firstPhase() bool {
	if d.req.policy.Level == Flat {
		return false
	}
	if hard := d.req.policy.Cap.Hard; hard > 0 && !d.req.policy.Cap.Overflow {
		// A worker whose ranks are all full must not win.
		d.keep("cap", ReasonCap, func(c *candidate) bool { return c.active < hard })
		if len(d.cands) == 0 {
			return false
		}
	}
	places := d.r.perWorker // of a worker among workers, plus one
	clear(places)
	workers, cursor := d.r.workerCands[:0], d.out.models.Cursor[d.req.leg]
	for i := range d.cands {
		c := d.cands[i]
		if places[c.worker] == 0 {
			c.row = -1
			workers = append(workers, c)
			places[c.worker] = int32(len(workers))
			continue
		}
		w := &workers[places[c.worker]-1]
		if w.pos < cursor && cursor <= c.pos {
			w.pos = c.pos // a round robin goes on with this rank
		}
		if c.overlap > w.overlap {
			w.overlap, w.miss = c.overlap, c.miss
		}
		w.queue += c.queue
		w.work += c.work
		w.kv += c.kv
		w.active += c.active
	}
	d.r.workerCands = workers
	d.price(workers, &d.req.policy.WorkerCost, true)
	d.least(workers)
	d.ex.sayf("worker", "%s at cost %.0f", d.r.targets[d.out.slot].info.Worker, d.out.cost)
	d.keep("worker", ReasonPin, func(c *candidate) bool { return c.worker == d.out.worker })
	d.findBestOverlap()
	if d.req.policy.Level == TwoPhase {
		return false
	}
	best := slices.MinFunc(d.cands, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(a.active, b.active), cmp.Compare(a.queue, b.queue))
	})
	d.take(&best, ViaCost)
	d.out.rankFree = true
	return true
}

// then is the second key of a candidate.
func (c *candidate) then(by Then) float64 {
	switch by {
	case ThenQueue:
		return float64(c.queue) + 0.01*float64(c.kv)
	case ThenWork:
		return float64(c.work) / c.speed
	case ThenActive:
		return float64(c.active) / c.speed
	default:
		return 0
	}
}

// least takes the candidate of least cost.
func (d *decision) least(cands []candidate) {
	p := &d.req.policy.Pick
	if d.unreported {
		d.out.degraded = DegradedNoReport
		d.ex.sayf("pick", "round robin: a target has no fresh report")
		d.take(d.nextInTurn(cands, func(*candidate) bool { return true }), ViaCost)
		return
	}
	cost, then := math.Inf(1), math.Inf(1)
	tied := 0
	for i := range cands {
		c := &cands[i]
		if c.cost > cost {
			continue
		}
		if t := c.then(p.Then); c.cost < cost || t < then {
			cost, then = c.cost, t
			tied = 1
		} else if t == then {
			tied++
		}
	}
	isTied := func(c *candidate) bool { return c.cost == cost && c.then(p.Then) == then }
	d.take(d.breakTie(cands, tied, isTied), ViaCost)
}

// breakTie chooses among the tied candidates.
func (d *decision) breakTie(cands []candidate, tied int, isTied func(*candidate) bool) *candidate {
	if d.req.policy.Pick.Ties == TiesCursor {
		return d.nextInTurn(cands, isTied)
	}
	skip := 0
	if d.req.policy.Pick.Ties == TiesRotate {
		skip = int(d.out.models.Rotation[d.req.leg] % uint32(tied))
	}
	seed := d.seed()
	var best *candidate
	var bestKey uint64
	for i := range cands {
		c := &cands[i]
		if !isTied(c) {
			continue
		}
		if d.req.policy.Pick.Ties == TiesRandom {
			if key := mix(seed ^ d.r.targets[c.slot].key); best == nil || key > bestKey {
				best, bestKey = c, key
			}
			continue
		}
		if skip == 0 {
			return c
		}
		skip--
	}
	return best
}

func (d *decision) seed() uint64 {
	if d.req.policy.Pick.Seed == SeedConversation && d.q.Conversation != "" {
		return hashString(1, d.q.Conversation) ^ d.r.config.HashSeed
	}
	return hashString(2, d.q.ID) ^ d.r.config.HashSeed
}
