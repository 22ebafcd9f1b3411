package routing

import (
	"time"

	"github.com/kvlane/kvlane/kvindex"
)

// Load is what is booked on a target, in tokens and requests. All fields are zero when every request has been released.
type Load struct {
	// Queue is the number of uncached tokens of requests without a first token yet.
	Queue int64 `json:"queue"`
	// Work is the number of uncached tokens of requests that have not ended.
	Work int64 `json:"work"`
	// KV is the number of prompt tokens of requests that have not ended.
	KV int64 `json:"kv"`
	// Active is the number of requests that have not ended.
	Active int64 `json:"active"`
	// Transferring is the number of requests whose KV cache is on its way from here to a decode target, TransferTokens
	// their uncached tokens. They count as load only with Cost.Transfers.
	Transferring   int64 `json:"transferring"`
	TransferTokens int64 `json:"transfer_tokens"`
	// Sequences is Active with each request counted for its Query.Sequences where it decodes.
	Sequences int64 `json:"sequences"`
}

// ReservationID identifies a reservation. 0 is none. Ids are not reused.
type ReservationID uint64

// phase is the progress of a booked request.
type phase uint8

const (
	unused phase = iota
	computing
	transferring
	decoding
)

// reservation is the load that one plan put on its targets.
type reservation struct {
	Decode                kvindex.Slot `json:"decode"`
	Prefill               kvindex.Slot `json:"prefill,omitzero"`
	decodeGen, prefillGen uint32
	// Miss is the number of uncached tokens on the target that computes the prompt: Prefill if there is one, else Decode.
	Miss int64 `json:"miss"`
	// KV is the prompt's tokens.
	KV    int64 `json:"kv"`
	Phase phase `json:"phase"`
	// Since is when the wait of the present phase began. Owed is the number of tokens that the target then had to
	// compute before the first token, this prompt included.
	Since time.Duration `json:"since"`
	Owed  int64         `json:"owed"`
	// Number grows with each booking and each change of the target, see reported.Started.
	Number uint64 `json:"number,omitempty"`
	// Failed is set if the answer was an error of the engine.
	Failed bool `json:"failed,omitempty"`
	// Lookup and Idle are those of the Query.
	Lookup bool `json:"lookup,omitempty"`
	Idle   bool `json:"idle,omitempty"`
	// conversation is the binding that follows the request if it was served elsewhere. Of is the request's tenant and,
	// if it has an id, its conversation.
	conversation Key
	Of           party `json:"of,omitzero"`
	// program is the live conversation that the request is a turn of, with Config.KVTokens.
	program programKey
	// Tenant has as many places as Sequences on Decode, with Query.Share; zero without.
	Tenant    Key   `json:"tenant,omitzero"`
	Sequences int64 `json:"sequences,omitempty"`
	// serial makes the ids of a reused entry differ.
	serial   uint32
	remote   remoteLink
	Forecast forecast `json:"forecast,omitzero"`
}

// ledger holds the reservations in a slab with a free list: booking does not allocate
// once the slab has grown to the number of requests in flight.
type ledger struct {
	slab []reservation
	free []uint32
	live int
	// doubles counts repeated releases.
	doubles uint64
}

func (l *ledger) add(res reservation) ReservationID {
	var i uint32
	if n := len(l.free); n > 0 {
		i, l.free = l.free[n-1], l.free[:n-1]
	} else {
		i = uint32(len(l.slab))
		l.slab = append(l.slab, reservation{serial: 1})
	}
	res.serial = l.slab[i].serial
	l.slab[i] = res
	l.live++
	return ReservationID(uint64(res.serial)<<32 | uint64(i))
}

func (l *ledger) get(id ReservationID) *reservation {
	i := uint32(id)
	if int(i) >= len(l.slab) {
		return nil
	}
	res := &l.slab[i]
	if res.Phase == unused || res.serial != uint32(id>>32) {
		return nil
	}
	return res
}

func (l *ledger) drop(id ReservationID) {
	i := uint32(id)
	l.slab[i] = reservation{serial: l.slab[i].serial + 1}
	l.free = append(l.free, i)
	l.live--
}

// targetOf returns the target of a slot if it is still the one that was booked.
func (r *Router) targetOf(slot kvindex.Slot, gen uint32) *target {
	if t := r.at(slot); t != nil && t.gen == gen {
		return t
	}
	return nil
}

// book puts the reservation's load on its targets. seen reports that its first token will be observed.
func (r *Router) book(now time.Duration, res reservation, seen bool) ReservationID {
	res.Phase = computing
	r.begin(&res, max(now, r.alive)) // the caller may have read the clock before a pause
	res.decodeGen = r.reach(now, res.Decode)
	if res.Prefill != NoSlot {
		res.prefillGen = r.reach(now, res.Prefill)
	}
	r.expect(now, &res, seen)
	r.apply(&res, 1)
	return r.ledger.add(res)
}

// begin records that a reservation waits for a target from now on.
func (r *Router) begin(res *reservation, now time.Duration) {
	r.bookings++
	res.Since, res.Number = now, r.bookings
}

// reach marks a target that gets a request, and returns its generation.
func (r *Router) reach(now time.Duration, slot kvindex.Slot) uint32 {
	t := &r.targets[slot]
	t.warm = true
	t.health.Probe = now + probeEvery
	return t.gen
}

// apply adds (sign 1) or subtracts (sign -1) the load of a reservation in its present phase.
func (r *Router) apply(res *reservation, sign int64) {
	if t := r.targetOf(res.Decode, res.decodeGen); t != nil {
		d := &t.load
		d.KV += sign * res.KV
		d.Active += sign
		d.Sequences += sign * sequences(res.Sequences)
		if res.Tenant != (Key{}) {
			t.tenants.book(res.Tenant, sign*sequences(res.Sequences))
		}
		if res.Prefill == NoSlot {
			d.Work += sign * res.Miss
			if res.Phase == computing {
				t.enqueue(res, sign)
			}
		}
	}
	t := r.targetOf(res.Prefill, res.prefillGen)
	if t == nil {
		return
	}
	p := &t.load
	switch res.Phase {
	case computing:
		t.enqueue(res, sign)
		p.Work += sign * res.Miss
		p.KV += sign * res.KV
		p.Active += sign
		p.Sequences += sign
	case transferring:
		p.Transferring += sign
		p.TransferTokens += sign * res.Miss
	}
}

func (t *target) enqueue(res *reservation, sign int64) {
	t.load.Queue, t.waiting = t.load.Queue+sign*res.Miss, t.waiting+sign*res.KV
	if res.Number < t.report.Started {
		t.startedTokens += sign * res.Miss
	}
	if sign > 0 {
		t.booked = max(t.booked, res.Since)
	}
}

func (r *Router) enter(id ReservationID, next phase) bool {
	res := r.ledger.get(id)
	if res == nil || res.Phase >= next {
		return false
	}
	r.apply(res, -1)
	res.Phase = next
	r.apply(res, 1)
	if r.shares(res) {
		r.sharer.Progressed(id, uint8(next))
	}
	return true
}

// PrefillDone records that the prefill target of a disaggregated request has computed the prompt. Its KV cache is in
// transfer until FirstToken. It reports whether the prompt was still being computed: with concurrent legs the first
// token may come earlier. In both cases the prefill target is known to work.
func (r *Router) PrefillDone(now time.Duration, id ReservationID) bool {
	res := r.ledger.get(id)
	if res == nil || res.Prefill == NoSlot {
		return false
	}
	computes := res.Phase == computing
	if t := r.targetOf(res.Prefill, res.prefillGen); t != nil {
		r.answered(now, res, t)
		r.worked(t)
	}
	if !computes {
		return false
	}
	r.computed(now, res)
	res.Since, res.Owed = now, res.KV
	return r.enter(id, transferring)
}

// FirstToken records the first token of a request: its prefill no longer queues. It reports whether this was the first
// call for the reservation. It proves nothing about a prefill target (see PrefillDone): with concurrent legs the decode
// engine's headers or error may come before any prefill.
func (r *Router) FirstToken(now time.Duration, id ReservationID) bool {
	if res := r.ledger.get(id); res != nil {
		t := r.waitsFor(res)
		if res.Phase == computing && res.Prefill != NoSlot {
			t = nil
		}
		r.answered(now, res, t)
		if res.Phase < decoding {
			r.learnFirst(now, res)
			r.left(now, res)
		}
	}
	return r.enter(id, decoding)
}

// Release ends a reservation. Call it once for every plan; further calls have no effect, are counted and return false.
func (r *Router) Release(now time.Duration, id ReservationID) bool {
	res := r.ledger.get(id)
	if res == nil {
		r.ledger.doubles++
		return false
	}
	r.ended(now, res)
	r.left(now, res)
	r.withdraw(res)
	r.apply(res, -1)
	r.programs.end(res.program, now)
	r.unlinkRemote(res)
	if r.shares(res) {
		r.sharer.Released(id)
	}
	r.ledger.drop(id)
	return true
}

// left records when a request leaves its targets, or a split one its prefill target; see reported.Foreign.
func (r *Router) left(now time.Duration, res *reservation) {
	for _, t := range []*target{r.targetOf(res.Decode, res.decodeGen), r.targetOf(res.Prefill, res.prefillGen)} {
		if t != nil {
			t.released = now
		}
	}
}

// Rebook moves a reservation and its conversation to the target that served the request
// after a retry of the data plane. It reports whether the reservation and the slot exist.
func (r *Router) Rebook(now time.Duration, id ReservationID, served kvindex.Slot) bool {
	res := r.ledger.get(id)
	to := r.at(served)
	if res == nil || to == nil {
		return false
	}
	if res.Decode == served && res.decodeGen == to.gen {
		return true
	}
	from, here := res.Decode, r.targetOf(res.Decode, res.decodeGen) != nil
	r.change(now, res, func() { res.Decode, res.decodeGen = served, to.gen })
	res.Forecast.learns = false // it is not known since when the target computes it
	c := &r.conversations[mainLeg]
	// If the slot has a new target by now, a binding to it belongs to the new target and does not move.
	if i := c.find(res.conversation); here && i != none && c.entries[i].slot == from {
		c.bind(i, served)
		r.shareUse(mainLeg, i, true)
	}
	r.shareBooking(id)
	return true
}

// change moves the load of res: change sets its new targets or phase. Its time to the first token is predicted again.
func (r *Router) change(now time.Duration, res *reservation, change func()) {
	seen := res.Forecast.learns
	r.left(now, res)
	r.withdraw(res)
	r.apply(res, -1)
	change()
	r.begin(res, now)
	if res.Phase == computing {
		r.expect(now, res, seen)
	}
	r.apply(res, 1)
}

// Live is the number of reservations that have not been released.
func (r *Router) Live() int { return r.ledger.live }

// DoubleReleases is the number of releases without effect. More than 0 means a bug in the caller.
func (r *Router) DoubleReleases() uint64 { return r.ledger.doubles }
