package routing

import (
	"slices"
	"time"

	"github.com/kvlane/kvlane/kvindex"
)

// Booking is a reservation as replicas exchange it. Slots differ between replicas, so targets are sent by name.
type Booking struct {
	// Replica and ID identify the booking at the replica that made it.
	Replica string        `json:"replica"`
	ID      ReservationID `json:"id"`
	// Decode and Prefill are the targets; Prefill.Worker is "" if there is none.
	Decode  kvindex.Target `json:"decode"`
	Prefill kvindex.Target `json:"prefill"`
	Miss    int64          `json:"miss"`
	KV      int64          `json:"kv"`
	// Sequences is that of the Query.
	Sequences int64 `json:"sequences,omitempty"`
	// Phase is 1 while the prompt is computed (0 means the same), 2 while its KV cache is
	// transferred, 3 from the first token on.
	Phase uint8 `json:"phase,omitempty"`
	// Turn is, for the legs Decode and Prefill, 1 for the first turn of a conversation and 2 for a later one; 0 for a
	// turn that does not count for the share of returning conversations.
	Turn [numLegs]uint8 `json:"turn,omitzero"`
	// InTurn has bit 0 if a round robin chose Decode, and bit 1 for Prefill.
	InTurn uint8 `json:"in_turn,omitempty"`
}

// remoteKey finds the local copy of another replica's booking.
type remoteKey struct {
	replica string
	id      ReservationID
}

// remoteLink holds the fields of a reservation that only copies have.
type remoteLink struct {
	key     remoteKey
	expires time.Duration
}

// remotes holds the copies of other replicas' bookings. A copy whose release was lost expires. All have the same TTL,
// so fifo is in order of expiry; it may include copies that have ended.
type remotes struct {
	byKey map[remoteKey]ReservationID
	fifo  []ReservationID
}

// Booking returns a reservation for ApplyRemote of other replicas; the caller sets Replica.
func (r *Router) Booking(id ReservationID) (Booking, bool) {
	res := r.ledger.get(id)
	if res == nil || r.targetOf(res.Decode, res.decodeGen) == nil {
		return Booking{}, false
	}
	b := Booking{ID: id, Decode: r.targets[res.Decode].info.Target, Miss: res.Miss, KV: res.KV, Sequences: res.Sequences, Phase: uint8(res.Phase)}
	if r.targetOf(res.Prefill, res.prefillGen) != nil {
		b.Prefill = r.targets[res.Prefill].info.Target
	}
	return b, true
}

// ApplyRemote copies a booking of another replica. It returns false if the decode
// target is unknown here or the booking was applied before.
func (r *Router) ApplyRemote(now time.Duration, b Booking) bool {
	r.ExpireRemote(now)
	key := remoteKey{b.Replica, b.ID}
	decode := r.slotOf(b.Decode)
	if _, ok := r.remotes.byKey[key]; ok || decode == NoSlot {
		return false
	}
	prefill, computes := r.slotOf(b.Prefill), decode
	if prefill != NoSlot {
		computes = prefill
	}
	id := r.book(now, reservation{Decode: decode, Prefill: prefill, Miss: max(b.Miss, 0), KV: max(b.KV, 0), Sequences: b.Sequences,
		Owed:   r.targets[computes].load.Queue + max(b.Miss, 0),
		remote: remoteLink{key: key, expires: now + r.config.RemoteTTL}}, false)
	for leg, slot := range [numLegs]kvindex.Slot{decode, prefill} {
		p := r.poolAt(slot)
		if p == nil {
			continue
		}
		if p.count(leg, b.Turn[leg]); b.InTurn>>leg&1 != 0 {
			starts := &p.Starts[leg]
			starts.Heard = now
			if !starts.Own || !r.concurrent(now, starts.Placed) {
				p.Cursor[leg] = r.targets[slot].pos + 1
			}
		}
	}
	r.remotes.byKey[key] = id
	if r.remotes.fifo = append(r.remotes.fifo, id); len(r.remotes.fifo) > 2*len(r.remotes.byKey)+1024 {
		// Entries of ended requests are removed anywhere in the list, because the oldest request may run for long.
		r.remotes.fifo = slices.DeleteFunc(r.remotes.fifo, func(id ReservationID) bool { return r.ledger.get(id) == nil })
	}
	if p := phase(b.Phase); p == decoding || p == transferring && prefill != NoSlot {
		r.withdraw(r.ledger.get(id)) // the prompt is computed
		r.enter(id, p)
	}
	return true
}

// poolAt returns the pool of the one model that a target serves, nil if it serves several.
func (r *Router) poolAt(slot kvindex.Slot) *pool {
	if slot == NoSlot || len(r.targets[slot].info.Models) > 1 {
		return nil
	}
	return r.poolOf(r.targets[slot].model())
}

// RemoteRelease is Release for a copy of another replica's booking. Unknown ones are ignored.
func (r *Router) RemoteRelease(now time.Duration, replica string, id ReservationID) bool {
	local, ok := r.remotes.byKey[remoteKey{replica, id}]
	return ok && r.Release(now, local)
}

// ExpireRemote ends the copies that are older than RemoteTTL and returns their number. ApplyRemote does so too; also
// call it periodically, in case no replica sends any more.
func (r *Router) ExpireRemote(now time.Duration) int {
	n, i := 0, 0
	for ; i < len(r.remotes.fifo); i++ {
		res := r.ledger.get(r.remotes.fifo[i])
		if res == nil {
			continue
		}
		if res.remote.expires > now {
			break
		}
		if r.Release(now, r.remotes.fifo[i]) {
			n++
		}
	}
	r.remotes.fifo = r.remotes.fifo[i:]
	return n
}

func (r *Router) unlinkRemote(res *reservation) {
	if res.remote.key.replica != "" {
		delete(r.remotes.byKey, res.remote.key)
	}
}
