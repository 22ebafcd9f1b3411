package routing

import (
	"cmp"
	"math"
	"slices"
	"sort"
)

// warmUp takes the first target that never got a request.
func (d *decision) warmUp() bool {
	if !d.req.policy.WarmUp || d.pin != nil {
		return false
	}
	for i := range d.cands {
		if !d.r.targets[d.cands[i].slot].warm {
			d.take(&d.cands[i], ViaWarmUp)
			d.ex.sayf("warm_up", "%s has not served yet", d.r.targets[d.out.slot].name)
			return true
		}
	}
	return false
}

// firstTurnStage places new conversations.
func (d *decision) firstTurnStage() bool {
	f := &d.req.policy.FirstTurn
	isNew := d.out.firstTurn || (f.WithoutID && d.out.key == (Key{})) || f.Unbound
	if f.Placement == PlaceByCost || !isNew {
		return false
	}
	// A conversation with many turns to come binds far more load to its target than its first miss. So new ones follow
	// load: otherwise all that share a prefix would share a target. This holds if a conversation computes at least a
	// quarter of what it shares, unlike questions about a long document.
	returning := 0.0
	if g := &d.out.models.Grown[d.req.leg]; d.out.firstTurn {
		computes := float64(d.out.brings) + g.Tokens/max(g.Firsts, 1)
		returning = d.returning * min(4*computes/float64(max(d.bestOverlap, 1)), 1)
	}
	if most := max(f.MaxOverlap*(1-d.oneShot*(1-d.req.policy.Cost.OneShot)), 2*returning); float64(d.bestOverlap) > most*float64(d.q.PromptTokens) && most < 1 {
		d.ex.sayf("first_turn", "off: %d of %d tokens cached", d.bestOverlap, d.q.PromptTokens)
		return false
	}
	d.out.via = ViaFirstTurn
	var best candidate
	switch f.Placement {
	case PlaceLeastQueued:
		best = slices.MinFunc(d.cands, func(a, b candidate) int { return cmp.Compare(a.active, b.active) })
	case PlaceLeastTokens:
		best = slices.MinFunc(d.cands, func(a, b candidate) int { return cmp.Compare(a.work, b.work) })
	case PlaceRoundRobin:
		best = *d.nextInTurn(d.cands, func(*candidate) bool { return true })
	default:
		load, least := math.Inf(1), math.Inf(1)
		for i := range d.cands {
			load = min(load, d.wait(&d.cands[i], 1))
		}
		returns := returning * (1 - missPart*min(load/8192, 1))
		for i := range d.cands {
			least = min(least, d.wait(&d.cands[i], returns))
		}
		least += float64(min(f.Slack, d.q.PromptTokens)) * (1 - returning)
		if b := &d.out.models.Starts[d.req.leg]; d.r.concurrent(d.now, b.Placed) && d.r.concurrent(d.now, b.Heard) {
			// All replicas see the same least loaded targets and are about to fill them. With more than three other
			// replicas the allowance would outweigh queued tokens, and new conversations would skip idle targets.
			least += float64(min(d.r.others.Replicas-1, 3)) * d.req.policy.Cost.Active
		}
		room := func(c *candidate) bool { return !d.r.saturated(d.now, &d.r.targets[c.slot]) }
		low := func(c *candidate) bool { return d.wait(c, returns) <= least }
		near := func(c *candidate) bool { return low(c) && room(c) }
		if d.r.config.Hold > 0 && !d.some(near) {
			near, d.out.anywhere = low, returning == 0 && !d.some(room)
		}
		best = *d.nextInTurn(d.part(near), near)
	}
	d.take(&best, ViaFirstTurn)
	d.ex.sayf("first_turn", "%s by %s", d.r.targets[d.out.slot].name, string(f.Placement))
	return true
}

func (d *decision) some(f func(c *candidate) bool) bool {
	return slices.ContainsFunc(d.cands, func(c candidate) bool { return f(&c) })
}

// part returns the candidates for a new conversation. While other replicas place new ones too and less than half of the targets
// are near, all would choose the same few. Each then chooses from its own part of the targets, if a near one is in it.
func (d *decision) part(near func(c *candidate) bool) []candidate {
	o, n := &d.r.others, len(d.cands)
	if b := &d.out.models.Starts[d.req.leg]; b.Own || !d.r.concurrent(d.now, b.Heard) {
		return d.cands
	}
	from, to := o.Place*n/o.Replicas, (o.Place+1)*n/o.Replicas
	all, here := 0, 0
	for i := range d.cands {
		if near(&d.cands[i]) {
			all++
			if from <= i && i < to {
				here++
			}
		}
	}
	if here == 0 || 2*all > n {
		return d.cands
	}
	return d.cands[from:to]
}

// wait is the prefill that the request would wait for on a target, its own included, plus the price of the requests
// there. Without this price a target that starts answers and never ends them would look idle.
func (d *decision) wait(c *candidate, returning float64) float64 {
	return (float64(c.miss)*(1-returning)+float64(c.queue)+heldPart*returning*float64(c.held))/c.speed + d.req.policy.Cost.Active*float64(c.active)
}

// nextInTurn returns the first accepted candidate at or after the cursor, cyclically; one must be accepted. commit
// moves the cursor behind it. Where new conversations begin within the delay of sharing, each replica continues
// elsewhere.
func (d *decision) nextInTurn(cands []candidate, f func(c *candidate) bool) *candidate {
	p, n := d.out.models, len(cands)
	at := sort.Search(n, func(i int) bool { return cands[i].pos >= p.Cursor[d.req.leg] })
	if b := &p.Starts[d.req.leg]; !b.Own && d.r.concurrent(d.now, b.Placed) {
		at += d.r.others.Place * n / d.r.others.Replicas
	}
	last := at + n - 1
	for at < last && !f(&cands[at%n]) {
		at++
	}
	d.out.cursor = cands[at%n].pos
	return &cands[at%n]
}
