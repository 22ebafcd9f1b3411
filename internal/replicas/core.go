package replicas

import (
	"cmp"
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/kvlane/kvlane/kvindex"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
	"github.com/kvlane/kvlane/routing"
)

// Times of the protocol.
const (
	// Gather is the longest time that a change waits to be sent together with others.
	Gather = 5 * time.Millisecond
	// unseen is how long other replicas may not know of a booking: Gather plus delivery, p50 6 ms and p99 7 to 16 ms
	// (docs/benchmarks.md).
	unseen = 2 * Gather
	// heartbeatEvery is the interval of heartbeats.
	heartbeatEvery = 500 * time.Millisecond
	// silence is how long a replica may send nothing before it is dropped: long enough for two lost
	// heartbeats. Its bookings end 2 s after its last message, on a busy machine 3 s.
	silence = 1800 * time.Millisecond
	// askAgain is the longest pause between the parts of a state; then it is requested again.
	askAgain = time.Second
	// longestTick is the time between two ticks above which this process is assumed to have been stopped.
	longestTick = 500 * time.Millisecond
	// settled is the time without a new replica or state after which a start is complete.
	settled = 300 * time.Millisecond
	// rememberFor is how long the logical time of a dropped replica is kept. A replica that returns later has to send
	// its whole table of conversations.
	rememberFor = 10 * time.Minute
)

// Bounds of what other replicas can make this one hold.
const (
	maxPeers    = 256
	maxBookings = 1 << 18 // of one replica
	maxCopies   = 1 << 20 // of all replicas, because a process with the secret can invent replicas
	maxHeld     = 4096    // messages held while a state of one replica is on its way
	maxHeldSize = 32 << 20
	maxAllHeld  = 2 * maxHeldSize
	maxBatch    = 4096    // changes to be sent; messages of others have at most twice as many
	maxSteps    = 2048    // bookings of a state that are installed while the lock is held
	maxDrops    = 1 << 15 // copies, above which the other silent replicas are dropped at the next tick
)

// Stats count what a Core has seen.
type Stats struct {
	Sent     uint64 `json:"sent"`
	Received uint64 `json:"received"`
	// Duplicates counts messages that had been received before, Malformed those that could not be parsed, Refused those
	// beyond a bound.
	Duplicates uint64 `json:"duplicates"`
	Malformed  uint64 `json:"malformed"`
	Refused    uint64 `json:"refused"`
	// These count state requests by reason: a new replica, a gap, a checksum that differed although no
	// message was missing, an answer that stopped.
	New     uint64 `json:"new"`
	Gaps    uint64 `json:"gaps"`
	Errors  uint64 `json:"errors"`
	Stopped uint64 `json:"stopped"`
	// Dropped counts replicas that were silent, DroppedBookings their bookings.
	Dropped         uint64 `json:"dropped"`
	DroppedBookings uint64 `json:"dropped_bookings"`
	// Unknown counts bookings and bindings that named a target that is not known here.
	Unknown uint64 `json:"unknown_targets"`
	// Conflicts counts concurrent bindings of one conversation; the earlier one was kept.
	Conflicts uint64 `json:"conflicts"`
	// Overflows counts batches dropped because they grew to maxBatch changes before they were sent.
	Overflows uint64 `json:"overflows"`
}

// Out is a message to send: a request to the replica To, an answer to the subject Reply, or, with
// neither, a message to all. At most one of the two is set.
type Out struct {
	To      string
	Reply   string
	Message *kvlanev1.ReplicaMessage
	// Build, if not nil, yields the messages in place of Message. It is called without the lock, and takes it briefly
	// by locked.
	Build func(locked func(func())) iter.Seq[*kvlanev1.ReplicaMessage]
}

// Core is the protocol of one replica. It implements routing.Sharer. All its methods need
// the lock that guards the router.
type Core struct {
	id     string
	router *routing.Router
	// wake is called when there is something to send within Gather.
	wake func()

	// clock is the logical time, later than all events that this replica knows.
	clock uint64
	// wall is the wall clock at started, since 1970.
	wall time.Duration
	seq  uint64
	// number is that of the last message to all.
	number uint64
	own    map[routing.ReservationID]routing.Booking
	sum    sum
	batch  writer
	out    []Out

	peers    map[string]*peer
	free     int // bookings that may still be copied
	settings uint32
	greeted  bool // a heartbeat is queued since the last Take: it answers further hellos, too
	requests uint64
	legs     [numLegs]*bindings
	retry    bool // a target was added: what named it can be applied now
	saving   saving

	started, ticked, beat time.Duration
	changed               time.Duration // when a replica appeared or its state arrived
	ready                 bool
	stats                 Stats
}

// New returns a Core with this replica's id, which differs at each start. The caller makes
// it the router's Sharer before the first request.
func New(id string, router *routing.Router, now time.Duration, wake func()) *Core {
	c := &Core{id: id, router: router, wake: wake, own: map[routing.ReservationID]routing.Booking{}, peers: map[string]*peer{},
		batch: writer{m: &kvlanev1.ReplicaMessage{}}, started: now, ticked: now, beat: now, changed: now}
	for leg := range c.legs {
		c.legs[leg] = newBindings(router.Config().MaxConversations)
	}
	c.Hello()
	return c
}

// tell queues a message, stamped with the current sequence number and clock, to one replica or, with "", to all.
func (c *Core) tell(to string, m *kvlanev1.ReplicaMessage) {
	m.Version, m.Replica, m.Seq, m.Clock = formatVersion, c.id, c.seq, c.clock
	c.out = append(c.out, Out{To: to, Message: m})
}

// Booked implements routing.Sharer.
func (c *Core) Booked(b *routing.Booking) {
	if len(b.Decode.Worker) > maxWorker || len(b.Prefill.Worker) > maxWorker {
		return // others would refuse the message
	}
	if old, ok := c.own[b.ID]; ok {
		c.sum.remove(&old)
		// The booking carries its phase, and receivers apply a message's bookings before its progress.
		c.batch.m.Progress = slices.DeleteFunc(c.batch.m.GetProgress(), func(p *kvlanev1.ReplicaProgress) bool { return p.GetId() == uint64(b.ID) })
	}
	b.Miss, b.KV = min(max(b.Miss, 0), maxTokens), min(max(b.KV, 0), maxTokens)
	c.batch.booked(b)
	c.own[b.ID] = withoutTurn(*b)
	c.sum.add(b)
	c.queued()
}

// Progressed implements routing.Sharer.
func (c *Core) Progressed(id routing.ReservationID, phase uint8) {
	b, ok := c.own[id]
	if !ok {
		return
	}
	c.sum.remove(&b)
	b.Phase = phase
	c.own[id] = b
	c.sum.add(&b)
	c.batch.entries++
	c.batch.m.Progress = append(c.batch.m.Progress, &kvlanev1.ReplicaProgress{Id: uint64(id), Phase: uint32(phase)})
	c.queued()
}

// Released implements routing.Sharer.
func (c *Core) Released(id routing.ReservationID) {
	b, ok := c.own[id]
	if !ok {
		return
	}
	c.sum.remove(&b)
	delete(c.own, id)
	c.batch.entries++
	c.batch.m.Released = append(c.batch.m.Released, uint64(id))
	c.queued()
}

// Used implements routing.Sharer.
func (c *Core) Used(leg int, key routing.Key, tail uint64, turns uint32, target kvindex.Target, bound bool) {
	if len(target.Worker) > maxWorker {
		return
	}
	c.clock++
	t := c.legs[leg]
	b := t.find(key)
	changed := bound
	switch {
	case b == nil:
		b, changed = t.put(binding{key: key, target: target, version: version{0, c.clock, c.id}, used: c.clock}), true
	case bound && b.target != target:
		t.setMissing(b, false)
		b.target, b.version = target, version{min(b.generation+1, maxGeneration), c.clock, c.id}
		t.touch(b, c.clock)
	default:
		t.touch(b, c.clock)
	}
	changed = changed || b.tail != tail
	b.tail, b.turns = tail, max(b.turns, turns)
	c.save(leg, b, changed)
	c.batch.conversation(leg, b)
	c.queued()
}

// Added implements routing.Sharer.
func (c *Core) Added(kvindex.Target) { c.retry = true }

func (c *Core) queued() {
	if c.batch.entries == 1 {
		c.wake()
	}
	if c.batch.entries > maxBatch {
		// Others see the gap in the sequence numbers.
		c.stats.Overflows++
		c.seq++
		c.batch = writer{m: &kvlanev1.ReplicaMessage{}}
	}
}

// flush moves the gathered changes to the messages to send.
func (c *Core) flush() {
	if c.batch.entries == 0 {
		return
	}
	c.seq++
	c.tell("", c.batch.m)
	c.batch = writer{m: &kvlanev1.ReplicaMessage{}}
}

// heartbeat sends the sum of the ledger.
func (c *Core) heartbeat() {
	c.flush() // the sum belongs to the last sequence number
	c.tell("", &kvlanev1.ReplicaMessage{Sum: &kvlanev1.ReplicaSum{Bookings: c.sum.count, Hash: c.sum.hash}, Settings: c.settings})
}

// Take returns the messages to send, gathered changes included, in order.
func (c *Core) Take() []Out {
	c.flush()
	out := c.out
	c.out, c.greeted = nil, false
	for i := range out {
		if out[i].Build == nil && out[i].To == "" {
			c.number++
			out[i].Message.Number = c.number
		}
	}
	c.stats.Sent += uint64(len(out))
	return out
}

// Tick does what is due. Call it every 100 ms.
func (c *Core) Tick(now time.Duration) {
	if pause := now - c.ticked; pause > longestTick {
		// This process was stopped and received nothing: the others were not silent.
		for _, p := range c.peers {
			p.heard = min(p.heard+pause, now)
		}
	}
	c.ticked = now
	place, replicas, most := 0, 1, c.stats.DroppedBookings+maxDrops
	for _, p := range c.peersInOrder() {
		switch {
		case p.gone && now-p.heard > rememberFor:
			delete(c.peers, p.id)
		case p.gone:
		case now-p.heard > silence && c.stats.DroppedBookings < most:
			c.stats.Dropped++
			c.drop(now, p)
			p.silent = now - p.heard
		case p.request != 0 && now-p.asked > askAgain:
			c.stats.Stopped++
			c.ask(now, p)
		}
		if p.live {
			if replicas++; p.id < c.id {
				place++
			}
		}
	}
	c.router.Among(place, replicas, unseen)
	if now-c.beat >= heartbeatEvery {
		c.beat = now
		c.heartbeat()
	}
	c.Continue(now)
	if c.retry {
		c.retry = false
		c.applyMissing(now)
	}
	c.router.ExpireRemote(now)
}

// peersInOrder makes the order of messages independent of the map's.
func (c *Core) peersInOrder() []*peer {
	return slices.SortedFunc(maps.Values(c.peers), func(a, b *peer) int { return cmp.Compare(a.id, b.id) })
}

// Ready reports whether this replica has the states of all replicas that it knows, and no other one has appeared for
// the time settled. Once true it stays true until Reachable is called.
func (c *Core) Ready(now time.Duration) bool {
	if c.ready {
		return true
	}
	for _, p := range c.peers {
		if !p.gone && !p.live {
			return false
		}
	}
	c.ready = now-c.changed >= settled
	return c.ready
}

// Reachable restarts the wait of Ready. Call it when a connection to the others exists: they can answer only now.
func (c *Core) Reachable(now time.Duration) { c.changed, c.ready = now, false }

// Hello asks the others for a heartbeat, so that they become known here.
func (c *Core) Hello() { c.tell("", &kvlanev1.ReplicaMessage{Hello: true}) }

// Bye tells the others to drop this replica now.
func (c *Core) Bye() {
	c.flush()
	c.tell("", &kvlanev1.ReplicaMessage{Bye: true})
}

// State returns what a debug page shows.
func (c *Core) State(now time.Duration) State {
	s := State{Replica: c.id, Seq: c.seq, Bookings: c.sum.count, Stats: c.stats, Peers: []PeerState{}, Synced: c.Ready(now)}
	for _, t := range c.legs {
		s.Conversations += len(t.byKey)
	}
	for _, p := range c.peersInOrder() {
		if p.gone {
			s.gone = append(s.gone, PeerState{ID: p.id, Silent: p.silent.Seconds()})
			continue
		}
		synced := p.live && p.request == 0
		s.Synced = s.Synced && synced
		if !p.live {
			continue // without a state its messages may be a replay of those of a replica that has ended
		}
		s.Peers = append(s.Peers, PeerState{ID: p.id, Synced: synced, Seq: p.seq, Bookings: p.sum.count, Unknown: p.missing, Silent: (now - p.heard).Seconds(),
			OtherSettings: p.otherSettings, Ahead: p.ahead.Seconds()})
	}
	return s
}
