package routing

import (
	"cmp"
	"fmt"
	"math"
	"time"

	"github.com/kvlane/kvlane/kvindex"
)

// With Config.Hold a request is not sent to wait in an engine's queue, where its place is fixed: Pick refuses it while
// its best target is saturated. The caller keeps it in a Queue and calls Pick again when the target has capacity, with
// the overlaps of that moment. Engines compute 8,192 tokens a step by default: one step in the queue keeps them busy.
const (
	// fullKV is the KV usage at which a target with waiting requests is saturated, if two consecutive reports show it;
	// at roomKV it no longer is.
	fullKV = 0.95
	roomKV = 0.90
	// holdFactor is how many times longer a request is held than computing it elsewhere takes, because the cache that
	// it would leave serves later turns too.
	holdFactor = 4
	// heldPart is the share of the tokens held for a target that counts as queued there where conversations return,
	// because later turns will follow there. A greater part would make conversations leave their caches, and a request
	// with few uncached tokens passes most of what is held anyway.
	heldPart = 1.0 / 32
	// onItsWay is how long a request may take from the decision to the engine's queue.
	onItsWay = 250 * time.Millisecond
)

// UseQueue makes the waiters of a queue count as load of the targets that they are held for.
func (r *Router) UseQueue(q *Queue) { r.queue = q }

// held is the number of tokens of the waiters that are held for a target.
func (r *Router) held(slot kvindex.Slot) int64 {
	if r.queue == nil || int(slot) >= len(r.queue.held) {
		return 0
	}
	return r.queue.held[slot]
}

// HeldError means that the best target of a request is saturated, and that waiting for it costs less than another target.
type HeldError struct {
	// Slot is the target, Target its name. With NoSlot any target that gets capacity will do, and Target reads so.
	Slot   kvindex.Slot
	Target string
	Above  bool   // its tenant has its share of the places, see Query.Share
	Tenant string // of the request, if Above
	New    bool   // the programs that have begun fill the memory of all, see Config.KVTokens; Queue is their tokens
	// Queue is the number of uncached tokens queued there.
	Queue int64
	// Unmet is set if no target meets Query.TTFT, see UnmetQueue.
	Unmet bool
	// RetryAfter estimates when the target has capacity, 1 s to 30 s.
	RetryAfter time.Duration
}

// Error names the target and its queue.
func (e *HeldError) Error() string {
	if e.New {
		return fmt.Sprintf("held: the conversations that have begun use %d tokens of KV cache; retry after %s", e.Queue, e.RetryAfter)
	}
	if e.Above {
		return fmt.Sprintf("held: its tenant has its share of the places; retry after %s", e.RetryAfter)
	}
	return fmt.Sprintf("held: %s has %d tokens queued; retry after %s", e.Target, e.Queue, e.RetryAfter)
}

// Lane is the lane in which a request that got the error waits. class is its Class, unless it is the lane of a Slot.
func (e *HeldError) Lane(class string) Lane {
	if e.Slot != NoSlot {
		class = ""
	}
	if e.Above {
		class += "\x00" + e.Tenant
	}
	return Lane{Class: class, Slot: e.Slot, Unmet: e.Unmet, New: e.New, Above: e.Above}
}

func (d *decision) aboveShare() error {
	return &HeldError{Slot: NoSlot, Above: true, Tenant: d.q.Tenant, RetryAfter: d.r.RetryAfter(0)}
}

func (r *Router) heldError(c *choice) error {
	e := &HeldError{Slot: c.slot, Target: r.targets[c.slot].name, Queue: c.queue, Unmet: c.unmet, RetryAfter: r.RetryAfter(0)}
	if c.anywhere && !c.unmet {
		e.Slot, e.Target = NoSlot, "no target has capacity: "+e.Target
	}
	return e
}

// commitLocal books a choice that needs no prefill target.
func (r *Router) commitLocal(now time.Duration, q *Query, c *choice) (Plan, error) {
	if c.held {
		return Plan{}, r.heldError(c)
	}
	return r.commit(now, q, c, nil), nil
}

// queued is the number of uncached tokens queued on a target, without those that its engine has started on. Load that
// only engines know of counts if two consecutive reports show it and the last one is fresh.
func (r *Router) queued(now time.Duration, t *target) int64 {
	if t.report.fresh(now, r.config.ReportTTL) {
		return t.load.Queue - t.startedTokens + min(t.report.ForeignTokens, t.report.Before)
	}
	return t.load.Queue - t.startedTokens
}

// Saturated reports whether requests are held rather than sent to a target. Unknown slots are not saturated.
func (r *Router) Saturated(now time.Duration, slot kvindex.Slot) bool {
	t := r.at(slot)
	return t != nil && r.saturated(now, t)
}

func (r *Router) saturated(now time.Duration, t *target) bool {
	return r.config.Hold > 0 && (r.queued(now, t) > r.config.Hold || t.report.Full && t.report.fresh(now, r.config.ReportTTL))
}

// Idle is the number of ready targets that compute prompts and have no request.
func (r *Router) Idle(now time.Duration) (n int) {
	for _, slot := range r.order {
		t := &r.targets[slot]
		if t.state == eligible && t.role != Decode && t.load.Active == 0 && (t.report.Foreign == 0 || !t.report.fresh(now, r.config.ReportTTL)) {
			n++
		}
	}
	return n
}

// Saturation is how full the ready targets of a model are in the mean, 0 to 1. A target counts by its scarcest
// resource: queued tokens relative to limit, or requests, queued tokens or KV cache relative to the policy's limits.
// work is the number of their uncached tokens, and rate how many they compute per second.
func (r *Router) Saturation(now time.Duration, model string, limit int64) (saturation float64, work int64, rate float64) {
	n := 0.0
	for _, slot := range r.order {
		t := &r.targets[slot]
		if t.state != eligible || len(t.info.Models) > 0 && (r.models[model] == nil || !r.models[model].slots.Has(slot)) {
			continue
		}
		n++
		work += t.load.Queue - t.startedTokens
		rate += r.config.PrefillRate * t.speed
		queued, l, none := float64(r.queued(now, t)), &r.config.Policy.Limits, math.Inf(1)
		full := max(queued/float64(max(limit, 1)), queued/cmp.Or(float64(l.MaxQueue), none), float64(t.load.Sequences)/cmp.Or(float64(l.MaxActive), none))
		if t.report.fresh(now, r.config.ReportTTL) {
			full = max(full, t.report.KVUsage/cmp.Or(l.MaxKVUsage, none))
		}
		if r.saturated(now, t) {
			full = 1
		}
		saturation += min(full, 1)
	}
	return saturation / max(n, 1), work, rate
}

// hold marks the choice as held if its target is saturated, unless another target is idle and the request has waited
// holdFactor times as long as computing the additional misses there takes. A target that is not saturated but busy is
// not used: under overload that would give up caches, and with them throughput.
func (d *decision) hold() {
	r := d.r
	if t := &r.targets[d.out.slot]; d.unmet && t.progress.Due > d.now {
		d.out.held, d.out.unmet = true, true
		return
	}
	if r.config.Hold <= 0 || d.q.Waited < 0 || !r.saturated(d.now, &r.targets[d.out.slot]) {
		return
	}
	d.out.held = true
	if d.out.via == ViaPin {
		return
	}
	var best *candidate
	for i := range d.cands {
		if c := &d.cands[i]; c.active == 0 && c.queue == 0 && (best == nil || d.wait(c, 0) < d.wait(best, 0)) {
			best = c
		}
	}
	name := r.targets[d.out.slot].name
	if best == nil || d.q.Waited.Seconds()*r.config.PrefillRate < holdFactor*float64(best.miss-d.out.miss) {
		d.ex.sayf("hold", "%s has %d tokens queued", name, d.out.queue)
		return
	}
	d.ex.sayf("hold", "%s has %d tokens queued: %s is taken instead", name, d.out.queue, r.targets[best.slot].name)
	d.out.held, d.out.keepBinding = false, d.out.conversation != none
	d.take(best, d.out.via)
}
