package routing

import (
	"time"

	"github.com/kvlane/kvlane/kvindex"
)

// Sharer receives this router's own changes, for other replicas. Its methods are called by the router's methods and
// must not call the router.
type Sharer interface {
	// Booked is called for a new booking, and again with the same id if it moved to another
	// target. Booking.Replica is not set.
	Booked(b *Booking)
	// Progressed is called when a booking enters a phase of Booking.Phase.
	Progressed(id ReservationID, phase uint8)
	// Released is called once for each booking that Booked was called for.
	Released(id ReservationID)
	// Used is called when a request uses a conversation, which is then bound to the target; bound reports that the
	// binding is new. tail is the hash of the last block of the prompt, by which others recognise the conversation
	// without an id; 0 for none. turns is the number of its turns that count for the share of returning conversations.
	Used(leg int, key Key, tail uint64, turns uint32, target kvindex.Target, bound bool)
	// Added is called for a new target: bookings and conversations that name it can now be copied.
	Added(target kvindex.Target)
}

// Share makes the router call s for its own changes from now on; nil stops it.
func (r *Router) Share(s Sharer) { r.sharer = s }

// others holds what a router knows about the replicas that it shares with.
type others struct {
	Place    int           `json:"place"`
	Replicas int           `json:"replicas"`
	Delay    time.Duration `json:"delay"`
}

// Among tells the router how many replicas share, itself included, its own place among them from 0 on, and the time within
// which they do not see each other's decisions.
func (r *Router) Among(place, replicas int, delay time.Duration) {
	r.others = others{place, replicas, delay}
}

// concurrent reports whether other replicas may not know yet of a decision made at then.
func (r *Router) concurrent(now, then time.Duration) bool {
	return r.others.Replicas > 1 && now-then < r.others.Delay
}

// shareBooking reports a booking that was made, by choices for its legs, or moved.
func (r *Router) shareBooking(id ReservationID, choices ...*choice) {
	if res := r.ledger.get(id); res == nil || !r.shares(res) {
		return
	}
	if b, ok := r.Booking(id); ok {
		for leg, c := range choices {
			if c == nil || c.models != r.poolAt(c.slot) { // others derive the pool from the target, so it must be the same
				continue
			}
			if b.Turn[leg] = c.turn; c.cursor != none32 {
				b.InTurn |= 1 << leg
			}
		}
		r.sharer.Booked(&b)
	}
}

// shares reports whether a booking is sent to other replicas.
func (r *Router) shares(res *reservation) bool {
	return r.sharer != nil && res.remote.key.replica == "" && !res.Lookup
}

// shareUse reports the use of a conversation.
func (r *Router) shareUse(leg int, at uint32, bound bool) {
	if r.sharer == nil {
		return
	}
	table := &r.conversations[leg]
	if e := &table.entries[at]; e.slot != NoSlot {
		tail := uint64(0)
		if e.path != none {
			tail = table.steps[e.path].hash
		}
		r.sharer.Used(leg, e.key, tail, e.turns, r.targets[e.slot].info.Target, bound)
	}
}

// RemotePhase moves a copy of another replica's booking to a phase of Booking.Phase.
func (r *Router) RemotePhase(now time.Duration, replica string, id ReservationID, to uint8) bool {
	local := r.remotes.byKey[remoteKey{replica, id}]
	if phase(to) == transferring {
		return r.PrefillDone(now, local)
	}
	return phase(to) == decoding && r.FirstToken(now, local)
}

// RemoteForget ends a copy of another replica's booking without judging its target, because its real end is not known.
func (r *Router) RemoteForget(now time.Duration, replica string, id ReservationID) bool {
	local := r.remotes.byKey[remoteKey{replica, id}]
	if res := r.ledger.get(local); res != nil {
		res.Failed = true
		return r.Release(now, local)
	}
	return false
}

// BindRemote binds a conversation as another replica did and makes it the most recently
// used one. tail and turns are those of Sharer.Used. It returns false if the target is unknown here.
func (r *Router) BindRemote(leg int, key Key, tail uint64, turns uint32, target kvindex.Target) bool {
	slot := r.slotOf(target)
	if slot == NoSlot || key == (Key{}) || leg < 0 || leg >= numLegs {
		return false
	}
	table := &r.conversations[leg]
	at := table.find(key)
	if at == none {
		at = table.put(key, slot)
	} else {
		table.touch(at)
		table.bind(at, slot)
	}
	e := &table.entries[at]
	e.turns = max(e.turns, min(turns, countedTurns))
	if tail != 0 && (e.path == none || table.steps[e.path].hash != tail) {
		// A later turn begins with all blocks up to the tail, so the tail alone identifies it.
		table.setPath(at, []uint64{tail})
	}
	return true
}

// BoundTo is the number of conversations bound to a target.
func (r *Router) BoundTo(slot kvindex.Slot) (n int64) {
	for leg := range r.conversations {
		if c := &r.conversations[leg]; int(slot) < len(c.bound) {
			n += c.bound[slot]
		}
	}
	return n
}

// Bound returns the target that a conversation is bound to.
func (r *Router) Bound(leg int, key Key) (kvindex.Target, bool) {
	at := r.conversations[leg].find(key)
	if at == none || r.conversations[leg].entries[at].slot == NoSlot {
		return kvindex.Target{}, false
	}
	return r.targets[r.conversations[leg].entries[at].slot].info.Target, true
}
