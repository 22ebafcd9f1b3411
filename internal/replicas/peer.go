package replicas

import (
	"cmp"
	"iter"
	"maps"
	"slices"
	"time"
	"unique"

	"google.golang.org/protobuf/proto"

	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
	"github.com/kvlane/kvlane/routing"
)

// peer is another replica.
type peer struct {
	id    string
	heard time.Duration
	// gone reports that it was silent or left, so its bookings are dropped. clock is kept, so that only newer
	// conversations are requested if it returns.
	gone bool
	// left is set by its goodbye: later messages are ignored.
	left bool
	// silent is how long it had been silent when it was dropped; 0 if it said goodbye.
	silent time.Duration
	// number is the number of its last broadcast message, 0 if its version does not number them. requested is the id of
	// its last state request.
	number, requested uint64
	// live reports that its state has arrived once. From then on seq is the sequence number of the last
	// change that was applied, and clock the logical time of that change.
	live       bool
	seq, clock uint64
	ledger     map[routing.ReservationID]*copied
	sum        sum
	missing    int // copies that are not applied
	// full reports that it has more bookings than this replica copies; their checksums are not compared then.
	full bool
	// otherSettings reports that its settings differ from this replica's; ahead is how far ahead its wall clock is, if it is.
	otherSettings bool
	ahead         time.Duration

	// request is the number of the outstanding state request, 0 for none. Until the last part
	// has arrived changes are held.
	request  uint64
	asked    time.Duration
	next     uint32 // part
	incoming map[routing.ReservationID]routing.Booking
	order    []routing.ReservationID // of incoming, as they arrived
	// last is the last part of a state that is being installed, nil if none is. steps are the bookings to release, or
	// to copy if they are incoming.
	last     *kvlanev1.ReplicaMessage
	steps    []routing.ReservationID
	held     []*kvlanev1.ReplicaMessage
	heldSize int // in bytes, decoded
}

// entrySize bounds the memory of a decoded entry of a message, which may have only two bytes encoded.
const entrySize = 160

func sizeDecoded(m *kvlanev1.ReplicaMessage) int {
	entries := len(m.GetTargets()) + len(m.GetBooked()) + len(m.GetProgress()) + len(m.GetConversations())
	return proto.Size(m) + entrySize*entries + 8*len(m.GetReleased())
}

// hold keeps a message until the state has arrived. Beyond the bounds it drops all held messages of the replica and
// returns false: the state must be requested again.
func (c *Core) hold(p *peer, m *kvlanev1.ReplicaMessage) bool {
	p.heldSize += sizeDecoded(m)
	all := 0
	for _, q := range c.peers {
		all += q.heldSize
	}
	if len(p.held) >= maxHeld || p.heldSize > maxHeldSize || all > maxAllHeld {
		p.held, p.heldSize = nil, 0
		return false
	}
	p.held = append(p.held, m)
	return true
}

// Receive handles a message of another replica. reply is the subject for the answer to a request.
func (c *Core) Receive(now time.Duration, m *kvlanev1.ReplicaMessage, reply string) {
	if m.GetReplica() == c.id || !c.plausible(now, m) {
		return
	}
	c.stats.Received++
	c.clock = max(c.clock, m.GetClock())
	c.count()
	p := c.peers[m.GetReplica()]
	if m.GetStatePart() != nil {
		c.part(now, p, m)
		return
	}
	if p == nil {
		if m.GetBye() || !c.room() {
			return
		}
		p = &peer{id: m.GetReplica(), gone: true}
		c.peers[p.id] = p
	}
	r := m.GetStateRequest()
	switch {
	case p.left: // subjects are handled concurrently: its request may come after its goodbye
		c.stats.Duplicates++
		return
	case r != nil && reply != "" && r.GetId() > p.requested:
		p.requested = r.GetId()
	case r != nil, p.number != 0 && m.GetNumber() <= p.number:
		c.stats.Duplicates++ // late, or a replay by an attacker
		return
	default:
		p.number = m.GetNumber()
	}
	p.heard = now
	if m.GetBye() {
		if !p.gone {
			c.drop(now, p)
		}
		p.left = true // a process that starts has another id
		return
	}
	if m.GetHello() && !c.greeted {
		c.greeted = true
		c.heartbeat()
	}
	if r != nil {
		c.answer(p, r, reply)
	}
	if p.gone {
		p.gone, p.ledger, c.changed = false, map[routing.ReservationID]*copied{}, now
		c.stats.New++
		c.ask(now, p)
	}
	switch {
	case hasChanges(m):
		c.changes(now, p, m)
	case m.GetSum() != nil && p.request == 0:
		c.compare(now, p, m)
	}
}

// count sets how many bookings may still be copied.
func (c *Core) count() {
	c.free = maxCopies
	for _, p := range c.peers {
		c.free -= len(p.ledger) + len(p.incoming)
	}
}

// room reports whether there is room for another replica. If the table is full, the one that has
// been gone for longest makes room.
func (c *Core) room() bool {
	if len(c.peers) < maxPeers {
		return true
	}
	var oldest *peer
	for _, p := range c.peers {
		if p.gone && (oldest == nil || p.heard < oldest.heard) {
			oldest = p
		}
	}
	if oldest == nil {
		c.stats.Refused++
		return false
	}
	delete(c.peers, oldest.id)
	return true
}

// latest is the greatest logical time that is accepted from another replica.
func (c *Core) latest(now time.Duration) uint64 {
	return firstBound + uint64((c.wall+now-c.started).Milliseconds())<<boundShift
}

// plausible reports whether a message may advance the clock as far as it does, and counts implausible ones.
func (c *Core) plausible(now time.Duration, m *kvlanev1.ReplicaMessage) bool {
	if m.GetClock() <= c.latest(now) {
		return true
	}
	c.stats.Malformed++
	return false
}

func hasChanges(m *kvlanev1.ReplicaMessage) bool { return numChanges(m) > 0 }

func numChanges(m *kvlanev1.ReplicaMessage) int {
	return len(m.GetBooked()) + len(m.GetProgress()) + len(m.GetReleased()) + len(m.GetConversations())
}

func (c *Core) changes(now time.Duration, p *peer, m *kvlanev1.ReplicaMessage) {
	if p.request == 0 {
		c.next(now, p, m)
	} else if !c.hold(p, m) {
		c.ask(now, p)
	}
}

// next applies changes if they continue the sequence, and requests the state if not.
func (c *Core) next(now time.Duration, p *peer, m *kvlanev1.ReplicaMessage) {
	switch {
	case m.GetSeq() <= p.seq:
		c.stats.Duplicates++
	case m.GetSeq() == p.seq+1:
		c.apply(now, p, m)
	default:
		c.stats.Gaps++
		c.hold(p, m)
		c.ask(now, p)
	}
}

// compare finds changes that were lost before a heartbeat, and ledgers and settings that differ.
func (c *Core) compare(now time.Duration, p *peer, m *kvlanev1.ReplicaMessage) {
	p.otherSettings = m.GetSettings() != 0 && c.settings != 0 && m.GetSettings() != c.settings
	switch {
	case m.GetSeq() < p.seq:
		c.stats.Duplicates++
	case m.GetSeq() > p.seq:
		c.stats.Gaps++
		c.ask(now, p)
	case !p.full && p.sum != (sum{m.GetSum().GetBookings(), m.GetSum().GetHash()}):
		c.stats.Errors++
		c.ask(now, p)
	}
}

// ask requests the state of a replica.
func (c *Core) ask(now time.Duration, p *peer) {
	c.requests++
	p.request, p.asked, p.next, p.incoming = c.requests, now, 0, map[routing.ReservationID]routing.Booking{}
	p.order, p.steps, p.last = nil, nil, nil
	c.tell(p.id, &kvlanev1.ReplicaMessage{StateRequest: &kvlanev1.ReplicaStateRequest{Id: p.request, Since: p.clock}})
	c.wake()
}

// answer sends the state. A later request of the same replica ends this answer.
func (c *Core) answer(p *peer, r *kvlanev1.ReplicaStateRequest, reply string) {
	id, since := r.GetId(), r.GetSince()
	c.out = append(c.out, Out{Reply: reply, Build: func(locked func(func())) iter.Seq[*kvlanev1.ReplicaMessage] {
		return func(yield func(*kvlanev1.ReplicaMessage) bool) {
			var seq, clock uint64
			var own []routing.Booking
			wanted := true
			locked(func() {
				if wanted = p.requested == id; wanted {
					c.flush() // the state contains the changes gathered so far
					c.wake()
					seq, clock = c.seq, c.clock
					own = slices.Collect(maps.Values(c.own))
				}
			})
			if !wanted {
				return
			}
			var uses [numLegs][]use
			if !r.GetNoConversations() {
				for leg, t := range c.legs {
					uses[leg] = t.usedBetween(since, clock, locked)
				}
			}
			slices.SortFunc(own, byID)
			n := len(own) + len(uses[0]) + len(uses[1])
			count := max(1, (n+partSize-1)/partSize)
			for part := range count {
				w := writer{m: &kvlanev1.ReplicaMessage{
					Version: formatVersion, Replica: c.id, Seq: seq, Clock: clock,
					StatePart: &kvlanev1.ReplicaStatePart{Id: id, Part: uint32(part), Parts: uint32(count)},
				}}
				locked(func() {
					wanted = p.requested == id
					c.writePart(&w, own, uses, part*partSize, min((part+1)*partSize, n))
				})
				if !wanted || !yield(w.m) {
					return
				}
			}
		}
	}})
	c.wake()
}

// writePart writes the entries [from, to) of the bookings followed by the conversations. It leaves out conversations
// that were used since the list was made, because that change follows.
func (c *Core) writePart(w *writer, own []routing.Booking, uses [numLegs][]use, from, to int) {
	for i := from; i < to; i++ {
		if i < len(own) {
			w.booked(&own[i])
			continue
		}
		leg, at := 0, i-len(own)
		if at >= len(uses[0]) {
			leg, at = 1, at-len(uses[0])
		}
		if b, u := &c.legs[leg].slab[uses[leg][at].at], uses[leg][at]; b.used == u.time {
			w.conversation(leg, b)
		}
	}
}

// part handles a part of a requested state. If parts are missing or out of order, the request fails and is repeated.
func (c *Core) part(now time.Duration, p *peer, m *kvlanev1.ReplicaMessage) {
	s := m.GetStatePart()
	if p == nil || p.request == 0 || s.GetId() != p.request || s.GetPart() < p.next || p.last != nil {
		c.stats.Duplicates++
		return
	}
	p.heard = now
	if s.GetPart() > p.next {
		c.stats.Stopped++
		c.ask(now, p)
		return
	}
	p.asked = now
	p.next++
	for _, b := range m.GetBooked() {
		if len(p.incoming) < maxBookings && c.free > 0 {
			c.free--
			id := routing.ReservationID(b.GetId())
			if _, known := p.incoming[id]; !known {
				p.order = append(p.order, id)
			}
			p.incoming[id] = bookingOf(m, b)
		}
	}
	for _, v := range m.GetConversations() {
		c.join(m, v)
	}
	if s.GetPart()+1 == s.GetParts() {
		c.install(now, p, m)
	}
}

// install begins to replace the copies of a replica's bookings by its state.
func (c *Core) install(now time.Duration, p *peer, m *kvlanev1.ReplicaMessage) {
	for id := range p.ledger {
		if _, ok := p.incoming[id]; !ok {
			p.steps = append(p.steps, id)
		}
	}
	p.steps, p.last = append(p.steps, p.order...), m
	p.full = len(p.incoming) >= maxBookings || c.free <= 0
	c.proceed(now, p)
}

// Continue installs a further part of a state that has arrived, so that the lock is released between the calls. It
// reports whether there is more to do. Tick calls it, too.
func (c *Core) Continue(now time.Duration) (more bool) {
	for _, p := range c.peersInOrder() {
		if p.last != nil {
			c.count()
			c.proceed(now, p)
			return true
		}
	}
	return false
}

// proceed installs up to maxSteps bookings of a state. After all of them it applies the changes that were held, one
// message at least.
func (c *Core) proceed(now time.Duration, p *peer) {
	p.asked = now
	n := min(len(p.steps), maxSteps)
	for _, id := range p.steps[:n] {
		b, ok := p.incoming[id]
		if !ok {
			c.release(now, p, id, true)
			continue
		}
		delete(p.incoming, id)
		c.free = max(c.free, 0) + 1
		c.book(now, p, b)
	}
	if p.steps = p.steps[n:]; len(p.steps) > 0 {
		return
	}
	if p.incoming != nil {
		p.incoming, p.order = nil, nil
		p.live, p.seq, p.clock, c.changed = true, p.last.GetSeq(), p.last.GetClock(), now
		slices.SortStableFunc(p.held, func(a, b *kvlanev1.ReplicaMessage) int { return cmp.Compare(a.GetSeq(), b.GetSeq()) })
	}
	for len(p.held) > 0 {
		if n >= maxSteps {
			return
		}
		m := p.held[0]
		p.held, p.heldSize, n = p.held[1:], p.heldSize-sizeDecoded(m), n+numChanges(m)
		if c.next(now, p, m); p.last == nil {
			return // the state was asked for again
		}
	}
	p.request, p.last, p.held = 0, nil, nil
}

func byID(a, b routing.Booking) int { return cmp.Compare(a.ID, b.ID) }

// apply applies the next changes of a replica.
func (c *Core) apply(now time.Duration, p *peer, m *kvlanev1.ReplicaMessage) {
	p.seq, p.clock = m.GetSeq(), m.GetClock()
	for _, b := range m.GetBooked() {
		c.book(now, p, bookingOf(m, b))
	}
	for _, g := range m.GetProgress() {
		c.progress(now, p, routing.ReservationID(g.GetId()), uint8(min(g.GetPhase(), phaseDecoding)))
	}
	for _, id := range m.GetReleased() {
		c.release(now, p, routing.ReservationID(id), false)
	}
	for _, v := range m.GetConversations() {
		if c.join(m, v) {
			// The sender's binding lost: send it the one that wins.
			leg := int(v.GetLeg())
			c.batch.conversation(leg, c.legs[leg].find(routing.Key{Hi: v.GetHi(), Lo: v.GetLo()}))
			c.queued()
		}
	}
}

// book copies a booking of another replica, or updates the copy.
func (c *Core) book(now time.Duration, p *peer, told routing.Booking) {
	b := withoutTurn(told)
	if old, ok := p.ledger[b.ID]; ok {
		if old.Booking == b {
			return
		}
		if old.Decode == b.Decode && old.Prefill == b.Prefill && old.Miss == b.Miss && old.KV == b.KV && old.Phase < b.Phase {
			c.progress(now, p, b.ID, b.Phase)
			return
		}
		c.release(now, p, b.ID, true)
	}
	if len(p.ledger) >= maxBookings || c.free <= 0 {
		c.stats.Refused++
		p.full = true
		return
	}
	c.free--
	entry := &copied{Booking: b, applied: c.router.ApplyRemote(now, told)}
	if !entry.applied {
		p.missing++
		c.stats.Unknown++
	}
	p.ledger[b.ID] = entry
	p.sum.add(&b)
}

func (c *Core) progress(now time.Duration, p *peer, id routing.ReservationID, phase uint8) {
	e := p.ledger[id]
	if e == nil || e.Phase >= phase {
		return
	}
	p.sum.remove(&e.Booking)
	e.Phase = phase
	p.sum.add(&e.Booking)
	c.router.RemotePhase(now, p.id, id, phase)
}

// release ends a copy. forget is set if the time at which the booking ended is not known.
func (c *Core) release(now time.Duration, p *peer, id routing.ReservationID, forget bool) {
	e := p.ledger[id]
	if e == nil {
		return
	}
	p.sum.remove(&e.Booking)
	delete(p.ledger, id)
	switch {
	case !e.applied:
		p.missing--
	case forget:
		c.router.RemoteForget(now, p.id, id)
	default:
		c.router.RemoteRelease(now, p.id, id)
	}
}

// drop ends all bookings of a replica.
func (c *Core) drop(now time.Duration, p *peer) {
	c.stats.DroppedBookings += uint64(len(p.ledger))
	for _, id := range slices.Sorted(maps.Keys(p.ledger)) {
		c.router.RemoteRelease(now, p.id, id)
	}
	*p = peer{id: p.id, heard: p.heard, gone: true, clock: p.clock, number: p.number, requested: p.requested}
}

// join merges a binding of another replica. It reports whether this replica's own binding wins.
func (c *Core) join(m *kvlanev1.ReplicaMessage, v *kvlanev1.ReplicaConversation) (wins bool) {
	t := c.legs[v.GetLeg()]
	key := routing.Key{Hi: v.GetHi(), Lo: v.GetLo()}
	got := version{v.GetGeneration(), v.GetTime(), unique.Make(v.GetOrigin()).Value()}
	c.clock = max(c.clock, v.GetTime()) + 1
	b := t.find(key)
	later := laterFields(v)
	if b != nil && b.generation == got.generation && b.version != got {
		c.stats.Conflicts++
	}
	changed := b == nil || b.tail != v.GetTail() || b.later != later
	switch {
	case b == nil:
		b = t.put(binding{key: key, target: targetOf(m, v.GetTarget()), version: got, used: c.clock})
	case got.before(b.version):
		t.setMissing(b, false)
		b.target, b.version, changed = targetOf(m, v.GetTarget()), got, true
		t.touch(b, c.clock)
	case b.before(got):
		t.touch(b, c.clock)
		return true
	default:
		t.touch(b, c.clock)
	}
	b.tail, b.turns, b.later = v.GetTail(), max(b.turns, turnsOf(v)), later
	if c.saving.all {
		c.save(int(v.GetLeg()), b, changed)
	}
	if !c.router.BindRemote(int(v.GetLeg()), key, b.tail, b.turns, b.target) {
		c.stats.Unknown++
		t.setMissing(b, true)
	}
	return false
}

// applyMissing applies bookings and bindings whose target was unknown when they arrived, if it is known now.
func (c *Core) applyMissing(now time.Duration) {
	for _, p := range c.peersInOrder() {
		if p.missing == 0 {
			continue
		}
		for _, e := range p.ledger {
			if !e.applied && c.router.ApplyRemote(now, e.Booking) {
				e.applied = true
				p.missing--
			}
		}
	}
	for leg, t := range c.legs {
		if t.missing == 0 {
			continue
		}
		for i := range t.slab {
			if b := &t.slab[i]; b.missing && c.router.BindRemote(leg, b.key, b.tail, b.turns, b.target) {
				t.setMissing(b, false)
			}
		}
	}
}
