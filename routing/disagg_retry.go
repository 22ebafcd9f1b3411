package routing

import (
	"errors"
	"fmt"
	"time"
)

// errNotComputing means that a reservation has no prefill that could be moved.
var errNotComputing = errors.New("the reservation has no prefill in progress")

// MovePrefill books the prefill of a disaggregated request on another target after a failure (PrefillFailed); list the
// targets that failed in Query.Exclude. The decode target and its cursors stay. Pass the overlaps that Pick got. After
// an error the reservation is unchanged. Use only Prefill, Matched and Miss of the plan.
func (r *Router) MovePrefill(now time.Duration, id ReservationID, q *Query, overlaps []Overlap, ex *Explanation) (Plan, error) {
	res := r.ledger.get(id)
	if res == nil || res.Prefill == NoSlot || res.Phase != computing || r.targetOf(res.Decode, res.decodeGen) == nil {
		return Plan{}, errNotComputing
	}
	r.judge(now)
	r.setOverlaps(overlaps)
	ex.begin(q)
	decode := &r.targets[res.Decode]
	cfg := r.disagg(q)
	req := request{leg: prefillLeg, pool: Prefill, policy: &cfg.Prefill, worker: decode.worker}
	if cfg.SameZone {
		req.zone = decode.info.Zone
	}
	c, err := r.choose(now, q, req, ex)
	r.overlaps = nil
	if err != nil {
		ex.end(r, Plan{}, err)
		return Plan{}, fmt.Errorf("disaggregate: %w", err)
	}
	r.change(now, res, func() {
		res.Prefill, res.prefillGen, res.Miss = c.slot, r.reach(now, c.slot), c.miss
		res.Owed = c.queue + c.miss
	})
	r.follow(now, q, &c)
	r.shareBooking(id)
	plan := Plan{Decode: res.Decode, Prefill: c.slot, Reservation: id, Matched: c.overlap, Miss: c.miss, Via: c.via, Degraded: c.degraded}
	ex.end(r, plan, nil)
	return plan, nil
}

// ComputeLocally lets the decode target of a disaggregated reservation compute the prompt. miss is the number of
// uncached tokens there (Plan.DecodeMiss). It returns false if the request is not disaggregated or had its first token.
func (r *Router) ComputeLocally(now time.Duration, id ReservationID, miss int64) bool {
	res := r.ledger.get(id)
	if res == nil || res.Prefill == NoSlot || res.Phase == decoding {
		return false
	}
	r.change(now, res, func() {
		res.Prefill, res.prefillGen, res.Miss, res.Phase = NoSlot, 0, max(miss, 0), computing
		if t := r.targetOf(res.Decode, res.decodeGen); t != nil {
			res.Owed = t.load.Queue + res.Miss
		}
	})
	r.shareBooking(id)
	return true
}
