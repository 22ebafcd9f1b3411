package routing

import (
	"slices"

	"github.com/kvlane/kvlane/kvindex"
)

// sticky sends a known conversation to the target that it is bound to, its home. It returns true if that decided;
// otherwise it may have dropped candidates (all but the ranks of the home worker).
func (d *decision) sticky() bool {
	mode := d.req.policy.Sticky.Mode
	if mode == StickyOff || len(d.cands) == 0 {
		return false
	}
	table := &d.r.conversations[d.req.leg]
	via := ViaSticky
	if d.out.key == (Key{}) && d.req.policy.Sticky.Implicit {
		via = ViaImplicit
		d.matchPrefix(table)
	}
	if d.out.conversation == none {
		d.ex.sayf("sticky", "new conversation")
		return false
	}
	home := table.entries[d.out.conversation].slot
	if home == NoSlot {
		return false
	}
	c := d.at(home)
	hard := d.req.policy.Cap.Hard
	switch {
	case c == nil && d.aside(home), c != nil && d.req.policy.Sticky.HardCap && hard > 0 && c.active >= hard:
		d.out.keepBinding = true
		d.ex.sayf("sticky", "home %s is full: overflow", d.r.targets[home].name)
		return false
	case mode == StickyWorker:
		return d.stickyWorker(home, via)
	case c == nil:
		d.ex.sayf("sticky", "home %s is gone: bound anew", d.r.targets[home].name)
		return false
	}
	d.take(c, via)
	d.ex.sayf("sticky", "home %s", d.r.targets[home].name)
	return true
}

// stickyWorker keeps only the ranks of the home worker.
func (d *decision) stickyWorker(home kvindex.Slot, via Via) bool {
	worker, here := d.r.targets[home].worker, 0
	var last *candidate
	for i := range d.cands {
		if d.cands[i].worker == worker {
			last = &d.cands[i]
			here++
		}
	}
	name := d.r.targets[home].info.Worker
	switch here {
	case 0:
		d.ex.sayf("sticky", "home %s is gone: bound anew", name)
		return false
	case 1:
		d.take(last, via)
		d.ex.sayf("sticky", "home %s", name)
		return true
	}
	d.keep("sticky", ReasonPin, func(c *candidate) bool { return c.worker == worker })
	d.ex.sayf("sticky", "home %s, %d ranks", name, here)
	d.price(d.cands, &d.req.policy.Cost, d.gate())
	d.least(d.cands)
	d.out.via = via
	return true
}

// matchPrefix finds the conversation of a request without an id by its prefix.
func (d *decision) matchPrefix(table *conversations) {
	n := len(d.q.Prefix)
	least := 1
	for least <= n && float64(least)/float64(n) < d.req.policy.Sticky.MatchThreshold {
		least++
	}
	at, depth := table.deepest(d.q.Prefix, least, func(s kvindex.Slot) bool {
		reason := d.reasonAt(s)
		return reason == eligible || reason.busy()
	})
	if at != none {
		d.out.conversation, d.out.key = at, table.entries[at].key
	}
	d.ex.sayf("sticky", "no id: %d of %d blocks match, %d needed", depth, n, least)
}

// at returns the candidate of a slot, nil if there is none.
func (d *decision) at(slot kvindex.Slot) *candidate {
	if i := slices.IndexFunc(d.cands, func(c candidate) bool { return c.slot == slot }); i >= 0 {
		return &d.cands[i]
	}
	return nil
}

// aside reports whether a conversation's home, which is not a candidate, is only busy or suspect: the binding stays.
func (d *decision) aside(home kvindex.Slot) bool {
	reason, t := d.reasonAt(home), &d.r.targets[home]
	return reason.busy() || reason == eligible && t.health.avoided(d.now, party{d.out.owner, d.out.key}) && (d.req.policy.Sticky.Mode == StickyTarget ||
		!slices.ContainsFunc(d.cands, func(c candidate) bool { return c.worker == t.worker }))
}

// reasonAt returns why a target is not eligible. A busy target keeps its conversations.
func (d *decision) reasonAt(slot kvindex.Slot) Reason {
	t := &d.r.targets[slot]
	c := candidate{slot: slot}
	d.weigh(&c, t)
	limits := d.limits()
	return d.admit(slot, t, d.r.models[d.q.Model], &c, &limits)
}
