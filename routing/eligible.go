package routing

import (
	"cmp"
	"math"
	"slices"

	"github.com/kvlane/kvlane/kvindex"
)

// recognise looks up the conversation.
func (d *decision) recognise() {
	table := &d.r.conversations[d.req.leg]
	d.out.key = d.r.config.keyOf(d.q.Conversation)
	d.out.conversation = table.find(d.out.key)
	d.out.firstTurn = d.out.key != (Key{}) && d.out.conversation == none
	d.out.implicit = d.req.policy.Sticky.Implicit && d.req.policy.Sticky.Mode != StickyOff
	if d.req.policy.Sticky.BindingWins && d.pin != nil && !d.pin.Strict && d.out.conversation != none {
		d.ex.sayf("eligible", "pin ignored: the conversation is bound")
		d.pin = nil
	}
}

// limits returns the policy's limits, lower for requests that may be shed.
func (d *decision) limits() Limits {
	l := d.req.policy.Limits
	if d.q.Lookup {
		return Limits{SuspendAfter: l.SuspendAfter}
	}
	if d.q.Priority < 0 {
		l.MaxActive = shed(l.MaxActive, l.ShedAt)
		l.MaxQueue = shed(l.MaxQueue, l.ShedAt)
		l.MaxKVUsage *= l.ShedAt
	}
	return l
}

// shed keeps at least 1: 0 would mean no limit.
func shed(limit int64, at float64) int64 {
	if limit == 0 {
		return 0
	}
	return max(int64(float64(limit)*at), 1)
}

// eligible collects the candidates, in order of worker and rank.
func (d *decision) eligible() {
	r := d.r
	d.out.models = &r.anyModel
	var known *pool
	if d.q.Model != "" {
		if known = r.models[d.q.Model]; known != nil {
			d.out.models = known
		} else if !d.q.Listed && len(r.models) > 0 && r.anyModel.size == 0 {
			d.out.degraded = DegradedModel
			d.ex.sayf("eligible", "no target lists model %q: all may serve it", d.q.Model)
		}
	}
	limits := d.limits()
	d.cands = r.cands[:0]
	d.counts = [NumReasons]int{}
	d.bestOverlap, d.unreported = 0, false
	if d.share = (share{}); d.q.Share > 0 && d.req.leg == mainLeg && d.req.policy.Limits.MaxActive > 0 {
		d.out.tenant = r.config.keyOf(d.q.Tenant)
		d.out.tenant.Lo |= 1 // of requests without a tenant
	}
	for pos, slot := range r.order {
		t := &r.targets[slot]
		// Entries are built in place to save a copy; one that is not eligible is removed again.
		d.cands = append(d.cands, candidate{slot: slot, pos: int32(pos), row: -1, worker: t.worker, speed: t.speed})
		c := &d.cands[len(d.cands)-1]
		d.weigh(c, t)
		reason := d.admit(slot, t, known, c, &limits)
		d.counts[reason]++
		d.ex.row(d, c, reason)
		if d.out.tenant != (Key{}) && (reason == eligible || reason >= ReasonSubset && reason != ReasonSuspended) {
			d.tally(t)
		}
		if reason != eligible {
			d.cands = d.cands[:len(d.cands)-1]
			continue
		}
		d.bestOverlap = max(d.bestOverlap, c.overlap)
		if d.req.policy.Cost.Reported && !t.report.fresh(d.now, r.config.ReportTTL) {
			d.unreported = true
		}
	}
	r.cands = d.cands
	d.out.brings = d.q.PromptTokens - d.bestOverlap
	d.returning, d.oneShot = 0, 0
	if d.q.Conversation != "" {
		d.returning = d.req.policy.Returning * min(max(4*d.out.models.Returning[d.req.leg]-2, 0), 1)
		alone := min(4*d.out.models.Alone[d.req.leg]-2, 1)
		if alone > 0 && d.req.policy.Cost.OneShot < 1 && !slices.ContainsFunc(r.overlaps, func(o Overlap) bool { return o.Speculative > 0 }) {
			d.oneShot = alone
		}
	}
	if d.req.zone != "" {
		d.preferZone()
	}
	d.ex.sayf("eligible", "%d of %d targets", len(d.cands), len(r.order))
	if r.suspects > 0 {
		d.avoidSuspects()
	}
}

// preferZone drops other zones unless that would leave nothing, or only targets at the hard cap.
func (d *decision) preferZone() {
	near := func(c *candidate) bool { return d.r.targets[c.slot].info.Zone == d.req.zone }
	if slices.ContainsFunc(d.cands, func(c candidate) bool { return near(&c) && d.belowCap(&c) }) {
		d.keep("zone", ReasonRole, near)
	}
}

// belowCap reports whether the hard cap leaves room for a request on the target.
func (d *decision) belowCap(c *candidate) bool {
	hard := d.req.policy.Cap.Hard
	return hard == 0 || c.active < hard || d.q.Lookup
}

// weigh fills in the target's overlap and load.
func (d *decision) weigh(c *candidate, t *target) {
	r, cost := d.r, &d.req.policy.Cost
	if m := r.match[c.slot]; m.epoch == r.matchEpoch {
		o := &r.overlaps[m.at]
		held := float64(o.Tokens[0]) * cost.Tiers[0]
		if o.Tokens[1]|o.Tokens[2]|o.Tokens[3]|o.Speculative != 0 {
			held += float64(o.Speculative) * cost.Speculative
			for tier := 1; tier < kvindex.NumTiers; tier++ {
				held += float64(o.Tokens[tier]) * cost.Tiers[tier]
			}
		}
		c.overlap = int64(held)
	}
	c.miss = max(d.q.PromptTokens-c.overlap, 0)
	c.held = r.held(c.slot)
	l := &t.load
	c.queue, c.work, c.kv, c.active, c.places = l.Queue, l.Work, l.KV, l.Active, l.Sequences
	if cost.Transfers {
		c.active += l.Transferring
		c.places += l.Transferring
		c.work += l.TransferTokens
	}
	if !t.report.fresh(d.now, r.config.ReportTTL) {
		return
	}
	if cost.Reported {
		c.active = t.report.Running + t.report.Waiting
		c.places = max(c.places, c.active)
		return
	}
	c.active += t.report.Foreign
	c.places += t.report.Foreign
	c.queue += t.report.ForeignTokens
	c.work += t.report.ForeignTokens
}

// admit returns why a target is not eligible. Permanent reasons come before temporary ones.
func (d *decision) admit(slot kvindex.Slot, t *target, models *pool, c *candidate, limits *Limits) Reason {
	switch role := t.role; {
	case d.req.pool == Prefill && role == Decode, d.req.pool != Prefill && role == Prefill && !d.req.whole, t.worker == d.req.worker:
		return ReasonRole
	}
	if models != nil && !models.slots.Has(slot) && !d.r.anyModel.slots.Has(slot) {
		return ReasonModel
	}
	if models == nil && d.q.Model != "" && (d.q.Listed || d.r.anyModel.size > 0) && !d.r.anyModel.slots.Has(slot) {
		return ReasonModel
	}
	switch {
	case t.state != eligible:
		return t.state
	case d.q.Subset != nil && d.req.pool != Prefill && !d.q.Subset.Has(slot):
		return ReasonSubset
	case len(d.q.Exclude) > 0 && slices.Contains(d.q.Exclude, slot):
		return ReasonExcluded
	case d.pin != nil && d.req.pool != Prefill && !d.pin.matches(t.info.Target):
		return ReasonPin
	case t.suspended(d.now, limits.SuspendAfter):
		return ReasonSuspended
	case limits.MaxActive > 0 && c.places >= limits.MaxActive:
		return ReasonBusyActive
	case limits.MaxQueue > 0 && c.queue >= limits.MaxQueue:
		return ReasonBusyQueue
	case limits.MaxKVUsage > 0 && t.report.KVUsage >= limits.MaxKVUsage && t.report.fresh(d.now, d.r.config.ReportTTL):
		return ReasonBusyKV
	}
	return eligible
}

// pinned takes the pinned target if it has capacity. If it is full, the request is refused,
// or the pin is ignored with Policy.PinOverflow.
func (d *decision) pinned() bool {
	if d.pin == nil || d.req.pool == Prefill || len(d.cands) != 1 {
		return false
	}
	c := &d.cands[0]
	if d.belowCap(c) {
		d.take(c, ViaPin)
		d.ex.sayf("eligible", "pinned to %s", d.r.targets[c.slot].name)
		return true
	}
	if !d.req.policy.PinOverflow || d.pin.Strict {
		d.keep("cap", ReasonCap, func(*candidate) bool { return false })
		return false
	}
	d.ex.sayf("eligible", "pin ignored: %s is full", d.r.targets[c.slot].name)
	d.pin = nil
	d.eligible()
	return false
}

// fairShare drops targets at the cap. It returns false if none is left.
func (d *decision) fairShare() bool {
	p := &d.req.policy.Cap
	if d.q.Lookup {
		return true
	}
	d.softCap = math.MaxInt64
	if p.FairShare {
		total, busiest := int64(1), int64(0) // this request counts
		for i := range d.cands {
			total += d.cands[i].active
			busiest = max(busiest, d.cands[i].active)
		}
		d.softCap = fairShareCap(p.Multiplier, total, int64(len(d.cands)), busiest)
	}
	if p.Hard > 0 {
		d.softCap = min(d.softCap, p.Hard)
	}
	if d.softCap == math.MaxInt64 {
		return true
	}
	if p.Overflow && !d.some(func(c *candidate) bool { return c.active < d.softCap }) {
		// Only the least loaded targets remain; the cost decides between them.
		least := slices.MinFunc(d.cands, func(a, b candidate) int { return cmp.Compare(a.active, b.active) })
		d.softCap = least.active + 1
		d.ex.sayf("cap", "all targets are at the cap: the least loaded serve")
	}
	d.keep("cap", ReasonCap, func(c *candidate) bool { return c.active < d.softCap })
	d.ex.sayf("cap", "%d requests: %d targets below", d.softCap, len(d.cands))
	if d.counts[ReasonCap] > 0 {
		d.findBestOverlap()
	}
	return len(d.cands) > 0
}

// findBestOverlap sets bestOverlap after candidates were dropped.
func (d *decision) findBestOverlap() {
	d.bestOverlap = 0
	for i := range d.cands {
		d.bestOverlap = max(d.bestOverlap, d.cands[i].overlap)
	}
}

// fairShareCap rounds up twice: a fair share of 1 with multiplier 1.5 is 2. The cap is never below the busiest target.
func fairShareCap(multiplier float64, total, targets, busiest int64) int64 {
	return max(int64(math.Ceil(multiplier*float64(ceilDiv(total, targets)))), busiest)
}
