package routing

import (
	"time"

	"github.com/kvlane/kvlane/kvindex"
)

// request is the input of choose.
type request struct {
	leg    int
	pool   Role
	policy *Policy
	// worker is the number of the worker that must not be chosen, none32 for none.
	worker int32
	// zone is preferred, "" for none.
	zone string
	// whole lets prefill targets serve the complete request.
	whole bool
}

// candidate is an eligible target with the numbers that the stages compare.
type candidate struct {
	slot kvindex.Slot
	// pos is the index in Router.order, row the index in the Explanation.
	pos, row, worker int32
	overlap, miss    int64
	queue, work      int64
	kv, active       int64
	places           int64 // active for Limits.MaxActive: sequences, and what was booked since the report
	speed, cost      float64
	ttft             float64 // seconds, set by meet
	held             int64
}

// choice is the chosen candidate with what commit needs.
type choice struct {
	candidate
	leg    int
	models *pool
	via    Via
	// cursor is the position chosen by a round robin, none32 without one.
	cursor   int32
	rankFree bool
	degraded Degradation

	// turn is as in Booking.Turn; brings is the number of prompt tokens that no eligible target has.
	turn                             uint8
	brings                           int64
	key                              Key
	owner                            Key // Query.Owner
	tenant                           Key // with Query.Share, zero without
	conversation                     uint32
	firstTurn, keepBinding, implicit bool
	held, unmet, anywhere            bool // anywhere: any target that gets capacity will do
}

// decision is one run of the pipeline.
type decision struct {
	r   *Router
	now time.Duration
	q   *Query
	req request
	ex  *Explanation

	pin    *Pin
	cands  []candidate
	counts [NumReasons]int
	// out is the choice, which the stages fill in.
	out choice
	// bestOverlap is the greatest overlap of an eligible target.
	bestOverlap int64
	// unreported is set if a candidate has no fresh report and the policy needs one.
	unreported bool
	softCap    int64
	share      share
	// returning is Policy.Returning's r.
	returning float64
	// oneShot is how much of Cost.OneShot's rule applies, 0 to 1.
	oneShot float64
	// unmet is set if the request is held because no target meets Query.TTFT.
	unmet bool
	// priced is set if the candidates have costs.
	priced bool
	// busiest belongs to the worker whose target was predicted last.
	busiest busiest
}

// choose runs the stages. It changes only the router's scratch memory.
func (r *Router) choose(now time.Duration, q *Query, req request, ex *Explanation) (choice, error) {
	d := decision{r: r, now: now, q: q, req: req, ex: ex, pin: q.Pin}
	d.out.leg, d.out.cursor, d.out.via, d.busiest.worker = req.leg, none32, ViaCost, none32
	d.out.owner = r.config.keyOf(q.Owner)
	d.recognise()
	d.eligible()
	if d.pin != nil && d.req.policy.PinSoft && !d.pin.Strict && !d.some(d.belowCap) {
		ex.sayf("eligible", "pin ignored: none of its targets can serve")
		d.pin = nil
		d.eligible()
	}
	if len(d.cands) == 0 {
		return choice{}, d.refusal()
	}
	if d.crowded() {
		return choice{}, &HeldError{Slot: NoSlot, New: true, Queue: d.out.models.Live, RetryAfter: programIdle}
	}
	if d.exceeds() {
		return choice{}, d.aboveShare()
	}
	if d.pinned() || d.sticky() {
		return d.done()
	}
	if len(d.cands) == 0 {
		return choice{}, d.refusal()
	}
	if d.firstPhase() {
		return d.done()
	}
	if len(d.cands) == 0 || !d.fairShare() {
		return choice{}, d.refusal()
	}
	if err := d.meet(); err != nil {
		return choice{}, err
	}
	if !d.warmUp() && !d.firstTurnStage() {
		d.price(d.cands, &d.req.policy.Cost, d.gate())
		d.least(d.cands)
		ex.sayf("pick", "%s at cost %.0f", r.targets[d.out.slot].name, d.out.cost)
	}
	return d.done()
}

func (d *decision) done() (choice, error) {
	d.ex.price(d.cands, d.priced)
	d.hold()
	return d.out, nil
}

// refusal is the error of a decision without candidates.
func (d *decision) refusal() error {
	busy := 0
	for reason := range NumReasons {
		if reason.busy() {
			busy += d.counts[reason]
		}
	}
	if busy > 0 && d.exceeds() {
		return d.aboveShare()
	}
	if busy > 0 {
		return &CapacityError{Pool: d.req.pool, Counts: d.counts, RetryAfter: d.r.RetryAfter(0)}
	}
	err := &NoTargetError{Pool: d.req.pool, Counts: d.counts}
	for _, slot := range d.q.Exclude {
		if info, ok := d.r.Target(slot); ok {
			err.Excluded = append(err.Excluded, info.String())
		}
	}
	return err
}

// take makes the candidate the choice.
func (d *decision) take(c *candidate, via Via) {
	d.out.candidate = *c
	d.out.via = via
}

// keep leaves only the candidates that f accepts.
func (d *decision) keep(stage string, reason Reason, f func(c *candidate) bool) {
	n := 0
	for i := range d.cands {
		if c := &d.cands[i]; f(c) {
			d.cands[n] = *c
			n++
		} else {
			d.counts[reason]++
			d.ex.drop(c, stage)
		}
	}
	d.cands = d.cands[:n]
}
