package routing

import (
	"slices"

	"github.com/kvlane/kvlane/kvindex"
)

// sticky sends a known conversation home. It returns true if that decided; else the
// candidates may be fewer (the ranks of the home worker).
func (d *decision) sticky() bool {
	mode := d.policy.Sticky.Mode
	if mode == StickyOff || len(d.cands) == 0 {
		return false
	}
	table := &d.r.conversations[d.leg()]
	via := ViaSticky
	if d.key == (Key{}) && d.policy.Sticky.Implicit {
		via = ViaImplicit
		d.matchPrefix(table)
	}
	if d.conversation == none {
		if d.ex != nil {
			d.ex.verdictf("sticky", "new conversation")
		}
		return false
	}
	home := table.entries[d.conversation].slot
	if home == NoSlot {
		return false
	}
	c := d.at(home)
	hard := d.policy.Cap.Hard
	switch {
	case c == nil && d.aside(home), c != nil && d.policy.Sticky.HardCap && hard > 0 && c.active >= hard:
		d.keepBinding = true
		if d.ex != nil {
			d.ex.verdictf("sticky", "home %s is full: overflow", d.r.targets[home].info.Target)
		}
		return false
	case mode == StickyWorker:
		return d.stickyWorker(home, via)
	case c == nil:
		if d.ex != nil {
			d.ex.verdictf("sticky", "home %s is gone: bound anew", d.r.targets[home].info.Target)
		}
		return false
	}
	d.take(c, via)
	if d.ex != nil {
		d.ex.verdictf("sticky", "home %s", d.r.targets[home].info.Target)
	}
	return true
}

// stickyWorker leaves the ranks of the home worker.
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
		if d.ex != nil {
			d.ex.verdictf("sticky", "home %s is gone: bound anew", name)
		}
		return false
	case 1:
		d.take(last, via)
		if d.ex != nil {
			d.ex.verdictf("sticky", "home %s", name)
		}
		return true
	}
	d.keep("sticky", ReasonPin, func(c *candidate) bool { return c.worker == worker })
	if d.ex != nil {
		d.ex.verdictf("sticky", "home %s, %d ranks", name, here)
	}
	d.price(d.cands, &d.policy.Cost, d.gate())
	d.least(d.cands)
	d.via = via
	return true
}

// matchPrefix finds the conversation of a request without an id.
func (d *decision) matchPrefix(table *conversations) {
	n := len(d.q.Prefix)
	least := 1
	for least <= n && float64(least)/float64(n) < d.policy.Sticky.MatchThreshold {
		least++
	}
	at, depth := table.deepest(d.q.Prefix, least, func(s kvindex.Slot) bool {
		reason := d.reasonAt(s)
		return reason == eligible || reason.busy()
	})
	if at != none {
		d.conversation, d.key = at, table.entries[at].key
	}
	if d.ex != nil {
		d.ex.verdictf("sticky", "no id: %d of %d blocks match, %d needed", depth, n, least)
	}
}

// at returns the candidate with this slot.
func (d *decision) at(slot kvindex.Slot) *candidate {
	for i := range d.cands {
		if d.cands[i].slot == slot {
			return &d.cands[i]
		}
	}
	return nil
}

// aside reports whether a home that is not a candidate is only busy or suspect.
func (d *decision) aside(home kvindex.Slot) bool {
	reason, t := d.reasonAt(home), &d.r.targets[home]
	return reason.busy() || reason == eligible && t.health.Suspect != "" && (d.policy.Sticky.Mode == StickyTarget ||
		!slices.ContainsFunc(d.cands, func(c candidate) bool { return c.worker == t.worker }))
}

// reasonAt tells whether a target is eligible. One that is only busy keeps its
// conversations.
func (d *decision) reasonAt(slot kvindex.Slot) Reason {
	t := &d.r.targets[slot]
	c := candidate{slot: slot}
	d.weigh(&c, t)
	limits := d.limits()
	return d.admit(slot, t, d.r.models[d.q.Model], &c, &limits)
}
