package simulate

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
	"github.com/kvlane/kvlane/routing"
)

// How engines hand over their batches.
const (
	replayed = iota // over a subscription, and again on request
	once            // over a subscription only
	polled          // kept until they are fetched
)

// world is engines, replicas of Kvlane, the network between them, and clients.
type world struct {
	// rng belongs to the operation that runs.
	rng     *rand.Rand
	now     time.Duration
	trace   *strings.Builder
	reached map[string]int

	// The scenario.
	feeds            int
	buffer, capacity int // of an engine, in batches and blocks
	depth, kinds     int // of prompts
	oneFamily        bool
	offload          bool
	reports          bool
	maxBytes         int64
	rules            routing.Config
	queueMax         int
	patience         time.Duration
	machine          feed.MachineConfig

	hasher   *kvindex.Hasher
	blocks   []block
	children map[[2]int]int
	batches  []*batch
	engines  []*engine
	replicas []*replica
	requests []*request
	arrived  uint64
	born     int // replicas so far
}

func (w *world) reach(what string) { w.reached[what]++ }

func (w *world) sayf(format string, args ...any) {
	if w.trace != nil {
		fmt.Fprintf(w.trace, "  %8.3fs  "+format+"\n", append([]any{w.now.Seconds()}, args...)...)
	}
}

func newWorld(seed uint64, trace *strings.Builder, reached map[string]int) *world {
	rng := rngOf(seed, 2)
	w := &world{rng: rng, trace: trace, reached: reached, hasher: kvindex.NewHasher(kvindex.Key{7}), children: map[[2]int]int{}}
	w.feeds = []int{replayed, replayed, replayed, once, polled}[rng.IntN(5)]
	w.buffer, w.capacity, w.depth, w.kinds = 3+rng.IntN(30), 4+rng.IntN(24), 2+rng.IntN(7), 1+rng.IntN(3)
	w.oneFamily, w.offload, w.reports = rng.IntN(2) == 0, rng.IntN(2) == 0, rng.IntN(4) == 0
	if rng.IntN(6) == 0 {
		w.maxBytes = 2000 + rng.Int64N(6000)
	}
	w.machine = feed.MachineConfig{Replay: w.feeds == replayed, Polled: w.feeds == polled, Attempts: 1 + rng.IntN(3), SilentAfter: 2 + rng.IntN(4),
		MaxPending: []int{0, 200, 400}[rng.IntN(3)]}
	w.queueMax, w.patience = rng.IntN(5), time.Duration(2+rng.IntN(20))*time.Second

	w.rules = routing.DefaultConfig()
	presets := routing.Presets()
	name := presets[rng.IntN(len(presets))]
	if rng.IntN(4) == 0 {
		name = "session"
	}
	w.rules.Policy, _ = routing.Preset(name)
	w.rules.RemoteTTL, w.rules.ReportTTL = 20*time.Second, time.Second
	w.rules.MaxConversations = 2 + rng.IntN(20)
	w.rules.Policy.Limits.MaxActive = []int64{0, 1, 2, 4}[rng.IntN(4)]
	if rng.IntN(4) == 0 {
		w.rules.Policy.Limits.MaxQueue = 20
	}
	if w.rules.Policy.Sticky.Mode == routing.StickyTarget {
		w.rules.Policy.Cap.Hard, w.rules.Policy.Sticky.HardCap = int64(rng.IntN(4)), rng.IntN(2) == 0
	}
	pools := rng.IntN(4) == 0
	w.rules.Disagg.Mode = routing.ModeOff
	if pools {
		w.rules.Disagg.Mode = []routing.DisaggMode{routing.ModeThreshold, routing.ModeConditional, routing.ModeCost}[rng.IntN(3)]
		w.rules.Disagg.Threshold, w.rules.Disagg.LocalBelow, w.rules.Disagg.TransferFixed = int64(rng.IntN(20)), 4, 1
		w.rules.Disagg.Decode.Limits.MaxActive = w.rules.Policy.Limits.MaxActive
	}
	for number := range 1 + rng.IntN(5) {
		e := &engine{w: w, number: number, target: kvindex.Target{Worker: fmt.Sprint("w", number/2), Rank: int32(number % 2)}}
		w.engines = append(w.engines, e)
	}
	roles := make([]routing.Role, len(w.engines))
	if pools {
		for i := range roles {
			roles[i] = []routing.Role{routing.Both, routing.Prefill, routing.Decode}[(i/2+rng.IntN(2))%3]
			if i%2 == 1 {
				roles[i] = roles[i-1]
			}
		}
	}
	w.sayf("scenario: preset %s, limit %d requests, queue %d, %d engines, roles %v, %s, feeds %d, replay buffer %d, cache %d blocks, index %d bytes",
		name, w.rules.Policy.Limits.MaxActive, w.queueMax, len(w.engines), roles, w.rules.Disagg.Mode, w.feeds, w.buffer, w.capacity, w.maxBytes)
	for range 1 + rng.IntN(3) {
		w.start(nil, roles)
	}
	return w
}

// replica is one process of Kvlane.
type replica struct {
	w       *world
	name    string
	roles   []routing.Role
	router  *routing.Router
	index   *kvindex.Index
	queue   routing.Queue
	targets []*target // by engine, nil while not known
	inbox   []message

	// The naive models.
	bookings []*booking
	waiting  []*waiter // in the order in which they should be served
	homes    []home    // of conversations, least recently used first
	saved    *saved
	doubles  uint64
}

// saved is a snapshot of a replica's index.
type saved struct {
	data    []byte
	cursors map[kvindex.Target]feed.Cursor
	targets map[kvindex.Target]*target
}

// start starts a replica, from a snapshot unless it is nil.
func (w *world) start(from *saved, roles []routing.Role) *replica {
	w.born++
	r := &replica{w: w, name: fmt.Sprint("r", w.born), roles: roles, queue: routing.Queue{Bounds: routing.Bounds{Requests: w.queueMax}}, targets: make([]*target, len(w.engines))}
	rules := w.rules
	rules.Node = uint64(w.born)
	var err error
	if r.router, err = routing.New(rules); err != nil {
		panic(err)
	}
	if r.index, err = kvindex.New(kvindex.Config{BlockSize: blockSize, Key: kvindex.Key{7}, MaxBytes: w.maxBytes}); err != nil {
		panic(err)
	}
	if from != nil {
		if _, err := r.index.Load(bytes.NewReader(from.data)); err != nil {
			failf("a snapshot can be loaded", "%v", err)
		}
		for name := range from.targets {
			if from.cursors[name].Next == 0 || w.feeds != replayed {
				for _, t := range r.index.Stats().Targets {
					if t.Target == name {
						r.index.Drop(t.Slot)
					}
				}
			}
		}
		w.reach("warm start")
	}
	w.replicas = append(w.replicas, r)
	for i := range w.engines {
		// Replicas number their slots differently.
		r.add(w.engines[(i+w.born)%len(w.engines)], from)
	}
	return r
}

func (r *replica) bounded() bool { return r.w.maxBytes > 0 }

func (r *replica) clock() time.Time { return time.Unix(1000, 0).Add(r.w.now) }

// add makes an engine known to a replica.
func (r *replica) add(e *engine, from *saved) {
	slot, err := r.index.Add(e.target, "m", blockSize)
	if err != nil {
		failf("a target can be added", "%v", err)
	}
	x := &target{r: r, e: e, slot: slot, claims: map[int]claim{}, lasts: map[int]*batch{}}
	cfg := r.w.machine
	if from != nil && r.w.feeds == replayed {
		if c, ok := from.cursors[e.target]; ok && c.Next > 0 {
			cfg.Resume = &c
			old := from.targets[e.target]
			// A feed that had not seen its engine's restart may have applied batches of both.
			x.known, x.last, x.lasts, x.restarted = old.known, old.last, maps.Clone(old.lasts), old.restarted
			for i := range x.known {
				x.known[i] = slices.Clone(x.known[i])
			}
		}
	}
	x.machine = feed.NewMachine(cfg)
	r.targets[e.number] = x
	r.router.SetTarget(slot, r.info(e, true))
	x.connect()
}

func (r *replica) info(e *engine, ready bool) routing.TargetInfo {
	return routing.TargetInfo{Target: e.target, Role: r.roles[e.number], Ready: ready, Address: fmt.Sprintf("10.0.0.%d:80", e.number)}
}

// remove is what the fleet does with a worker that has left.
func (r *replica) remove(x *target) {
	x.removed = true
	r.router.RemoveTarget(x.slot)
	r.index.Drop(x.slot)
	r.targets[x.e.number] = nil
	r.homes = slices.DeleteFunc(r.homes, func(h home) bool { return h.at == x })
}

// save copies the index with the feeds' positions.
func (r *replica) save() {
	s := &saved{cursors: map[kvindex.Target]feed.Cursor{}, targets: map[kvindex.Target]*target{}}
	for _, x := range r.targets {
		if x != nil {
			c := *x
			c.lasts = maps.Clone(x.lasts)
			for i := range c.known {
				c.known[i] = slices.Clone(x.known[i])
			}
			s.cursors[x.e.target], s.targets[x.e.target] = x.machine.Cursor(), &c
		}
	}
	var b bytes.Buffer
	if err := r.index.Dump(&b, nil); err != nil {
		failf("the index can be dumped", "%v", err)
	}
	s.data, r.saved = b.Bytes(), s

	// A copy answers as the original does, but for credit that no event has confirmed.
	again, err := kvindex.New(kvindex.Config{BlockSize: blockSize, Key: kvindex.Key{7}, MaxBytes: r.w.maxBytes})
	if err == nil {
		_, err = again.Load(bytes.NewReader(s.data))
	}
	if err != nil {
		failf("a snapshot can be loaded", "%v", err)
	}
	var a, c kvindex.Matches
	for n := range r.w.blocks {
		r.index.Match(r.w.blocks[n].hashes, &a)
		again.Match(r.w.blocks[n].hashes, &c)
		have := map[kvindex.Slot][kvindex.NumTiers]uint32{}
		for _, m := range c.Holders {
			have[m.Slot] = m.Blocks
		}
		for _, m := range a.Holders {
			if have[m.Slot] != m.Blocks && !r.bounded() {
				failf("a snapshot is what was saved", "%s, slot %d of prompt %v: got %v after loading, want %v", r.name, m.Slot, r.w.blocks[n].path, have[m.Slot], m.Blocks)
			}
			delete(have, m.Slot)
		}
		for slot, m := range have {
			if m != ([kvindex.NumTiers]uint32{}) {
				failf("a snapshot is what was saved", "%s, slot %d of prompt %v: got %v after loading, want nothing", r.name, slot, r.w.blocks[n].path, m)
			}
		}
	}
}

// stop is the end of a process: its clients' requests end with it, and other replicas learn it later or never.
func (r *replica) stop(said bool) {
	r.w.replicas = slices.DeleteFunc(r.w.replicas, func(o *replica) bool { return o == r })
	r.w.requests = slices.DeleteFunc(r.w.requests, func(q *request) bool { return q.r == r })
	for _, o := range r.w.replicas {
		if said {
			o.inbox = append(o.inbox, message{kind: left, booking: routing.Booking{Replica: r.name}})
		}
	}
}

// booking is a reservation in the naive ledger. remote is the key of a copy, empty for the replica's own.
type booking struct {
	id              routing.ReservationID
	decode, prefill *target
	miss, kv        int64
	sequences       int64
	phase           int // 0 computing, 1 transferring, 2 decoding
	conversation    string
	remote          routing.Booking
	expires         time.Duration
}

// loads is the sum of all bookings by target.
func (r *replica) loads() map[*target]routing.Load {
	sum := map[*target]routing.Load{}
	for _, b := range r.bookings {
		d := sum[b.decode]
		d.KV += b.kv
		d.Active++
		d.Sequences += max(b.sequences, 1)
		if b.prefill == nil {
			d.Work += b.miss
			if b.phase == 0 {
				d.Queue += b.miss
			}
		}
		sum[b.decode] = d
		if b.prefill == nil {
			continue
		}
		p := sum[b.prefill]
		switch b.phase {
		case 0:
			p.Queue += b.miss
			p.Work += b.miss
			p.KV += b.kv
			p.Active++
			p.Sequences++
		case 1:
			p.Transferring++
			p.TransferTokens += b.miss
		}
		sum[b.prefill] = p
	}
	return sum
}

// message is what one replica tells another.
type message struct {
	kind    int
	booking routing.Booking
}

const (
	booked = iota
	first
	released
	left
)

func (r *replica) tell(kind int, b routing.Booking) {
	b.Replica = r.name
	for _, o := range r.w.replicas {
		if o != r {
			o.inbox = append(o.inbox, message{kind, b})
		}
	}
}

func (r *replica) engineOf(t kvindex.Target) *target {
	for _, x := range r.targets {
		if x != nil && x.e.target == t {
			return x
		}
	}
	return nil
}

func (r *replica) copyOf(of routing.Booking) int {
	return slices.IndexFunc(r.bookings, func(b *booking) bool {
		return b.remote.Replica == of.Replica && b.remote.ID == of.ID && of.Replica != ""
	})
}

// receive handles the oldest message of another replica.
func (r *replica) receive() {
	m := r.inbox[0]
	r.inbox = r.inbox[1:]
	at := r.copyOf(m.booking)
	switch m.kind {
	case booked:
		r.expire()
		b := &booking{decode: r.engineOf(m.booking.Decode), miss: m.booking.Miss, kv: m.booking.KV, sequences: m.booking.Sequences, remote: m.booking, expires: r.w.now + r.w.rules.RemoteTTL}
		if m.booking.Prefill.Worker != "" {
			b.prefill = r.engineOf(m.booking.Prefill)
		}
		want := b.decode != nil && r.copyOf(m.booking) < 0
		if got := r.router.ApplyRemote(r.w.now, m.booking); got != want {
			failf("a remote booking counts once", "got %v, want %v", got, want)
		}
		if want {
			r.w.reach("remote booking")
			r.bookings = append(r.bookings, b)
			if r.router.ApplyRemote(r.w.now, m.booking) {
				failf("a remote booking counts once", "got true for a second copy, want false")
			}
		}
	case first:
		want := at >= 0 && r.bookings[at].phase < 2
		if got := r.router.RemotePhase(r.w.now, m.booking.Replica, m.booking.ID, 3); got != want {
			failf("remote first tokens count once", "got %v, want %v", got, want)
		}
		if want {
			r.bookings[at].phase = 2
		}
	case released:
		if got := r.router.RemoteRelease(r.w.now, m.booking.Replica, m.booking.ID); got != (at >= 0) {
			failf("a remote booking is released once", "got %v, want %v", got, at >= 0)
		}
		if at >= 0 {
			r.bookings = slices.Delete(r.bookings, at, at+1)
		}
	case left:
		r.bookings = slices.DeleteFunc(r.bookings, func(b *booking) bool {
			dropped := b.remote.Replica == m.booking.Replica
			if dropped && !r.router.RemoteRelease(r.w.now, b.remote.Replica, b.remote.ID) {
				failf("a replica that left has its bookings dropped", "got none for %d", b.remote.ID)
			}
			return dropped
		})
		r.w.reach("replica dropped")
	}
	r.place()
}

// expire ends what has lived too long.
func (r *replica) expire() {
	n := len(r.bookings)
	r.bookings = slices.DeleteFunc(r.bookings, func(b *booking) bool { return b.remote.Replica != "" && b.expires <= r.w.now })
	if got := r.router.ExpireRemote(r.w.now); got != n-len(r.bookings) {
		failf("remote bookings expire", "%s: got %d expired, want %d", r.name, got, n-len(r.bookings))
	}
	if n > len(r.bookings) {
		r.w.reach("remote booking expired")
	}
	r.index.Expire(r.clock())
	for _, x := range r.targets {
		if x == nil {
			continue
		}
		for n, c := range x.claims {
			if c.expires <= r.clock().UnixNano() {
				delete(x.claims, n)
			}
		}
	}
}

// request is a client's request, from when it was placed.
type request struct {
	id   uint64
	r    *replica
	last int // block of its prompt
	q    routing.Query
	plan routing.Plan
	b    *booking
	// sent is the credit for the prompt, and at the target that has it.
	sent kvindex.Credit
	at   *target
}

// waiter is a request in the queue.
type waiter struct {
	routing.Waiter
	req *request
}

// arrive is a new request.
func (w *world) arrive() {
	r := w.replicas[w.rng.IntN(len(w.replicas))]
	w.arrived++
	q := &request{id: w.arrived, r: r, last: w.prompt()}
	q.q = routing.Query{ID: fmt.Sprint("q", q.id), Model: "m", Sequences: int64(q.id % 3), PromptTokens: int64(len(w.blocks[q.last].path)*blockSize + 1 + w.rng.IntN(3))}
	if w.rng.IntN(3) > 0 {
		q.q.Conversation = fmt.Sprint("c", w.rng.IntN(8))
	} else {
		for _, h := range w.blocks[q.last].hashes {
			q.q.Prefix = append(q.q.Prefix, uint64(h))
		}
	}
	switch w.rng.IntN(12) {
	case 0:
		q.q.Priority = w.rng.IntN(3) - 1
	case 1:
		if x := r.anyTarget(); x != nil {
			q.q.Exclude = []kvindex.Slot{x.slot}
		}
	case 2:
		q.q.Conversation = "" // a pin may move it
		q.q.Pin = &routing.Pin{Worker: w.engines[w.rng.IntN(len(w.engines))].target.Worker, Rank: kvindex.NoRank}
	case 3:
		q.q.Local = true
	}
	r.place()
	err := r.pick(q)
	if err == nil {
		w.sayf("%s: request %d of %v in %q goes to %s", r.name, q.id, w.blocks[q.last].path, q.q.Conversation, q.b.decode.e.target)
		return
	}
	if !isFull(err) {
		w.reach("refused")
		return
	}
	r.wait(q)
}

// lane is the waiter's, as in decide, but that none shares its restrictions.
func (q *request) lane() routing.Lane {
	if q.q.Pin == nil && q.q.Subset == nil && len(q.q.Exclude) == 0 {
		return routing.Lane{Class: "m", Slot: routing.NoSlot}
	}
	return routing.Lane{Class: q.q.ID, Slot: routing.NoSlot}
}

func isFull(err error) bool {
	_, full := errors.AsType[*routing.CapacityError](err)
	return full
}

func (r *replica) anyTarget() *target {
	start := r.w.rng.IntN(len(r.targets))
	for i := range r.targets {
		if x := r.targets[(start+i)%len(r.targets)]; x != nil {
			return x
		}
	}
	return nil
}

// wait puts a request into the queue; the naive queue keeps the same order in its own way.
func (r *replica) wait(q *request) {
	n := &waiter{routing.Waiter{ID: q.id, Lane: q.lane(), Priority: q.q.Priority, Since: r.w.now, Deadline: r.w.now + r.w.patience}, q}
	shed, ok := r.queue.Push(n.Waiter)
	wantOK := len(r.waiting) < r.w.queueMax
	var victim *waiter
	if !wantOK && len(r.waiting) > 0 {
		if victim = r.waiting[len(r.waiting)-1]; victim.Priority < n.Priority {
			wantOK = true
		} else {
			victim = nil
		}
	}
	if ok != wantOK || len(shed) > 0 != (victim != nil) || victim != nil && shed[0].ID != victim.ID {
		failf("the queue keeps its order", "got accepted %v, shed %v, want accepted %v, shed %v", ok, shed, wantOK, victim)
	}
	if victim != nil {
		r.w.reach("waiter shed")
		r.waiting = r.waiting[:len(r.waiting)-1]
	}
	if ok {
		r.w.reach("waiter")
		r.w.sayf("%s: request %d waits", r.name, q.id)
		r.waiting = append(r.waiting, n)
		slices.SortStableFunc(r.waiting, func(a, b *waiter) int { return b.Priority - a.Priority })
	}
}

// place places waiters as decide does.
func (r *replica) place() {
	var stays []*waiter
	next, blocked := 0, map[routing.Lane]bool{}
	// skip passes those who are not to be offered a place.
	skip := func() {
		for next < len(r.waiting) && blocked[r.waiting[next].Lane] {
			stays = append(stays, r.waiting[next])
			next++
		}
	}
	r.queue.Serve(math.MaxInt, func(routing.Lane) bool { return true }, func(got *routing.Waiter) routing.Outcome {
		if skip(); next == len(r.waiting) || r.waiting[next].ID != got.ID {
			failf("the queue keeps its order", "%s: got waiter %d offered, want the next of %v after %d", r.name, got.ID, r.waiting, next)
		}
		o := r.waiting[next]
		next++
		err := r.pick(o.req)
		if isFull(err) {
			blocked[o.Lane] = true
			stays = append(stays, o)
			return routing.Outcome{}
		}
		if err == nil {
			r.w.reach("waiter placed")
			r.w.sayf("%s: request %d waited and goes to %s", r.name, o.ID, o.req.b.decode.e.target)
		}
		return routing.Outcome{Leaves: true}
	})
	if skip(); next < len(r.waiting) {
		failf("no waiter is lost", "%s: waiter %d was not offered", r.name, r.waiting[next].ID)
	}
	r.waiting = stays
}

// giveUp ends a wait: its client left, or its time is over.
func (r *replica) giveUp(o *waiter) {
	if !r.queue.Remove(o.ID) {
		failf("no waiter is lost", "%s: waiter %d is not in the queue", r.name, o.ID)
	}
	r.waiting = slices.DeleteFunc(r.waiting, func(n *waiter) bool { return n == o })
	r.place()
}

// overlaps asks the index, and checks its answer.
func (r *replica) overlaps(last int) []routing.Overlap {
	r.expire()
	path := r.w.blocks[last].path
	var m kvindex.Matches
	r.index.Match(r.w.blocks[last].hashes, &m)
	found := map[kvindex.Slot]kvindex.Match{}
	var out []routing.Overlap
	for _, h := range m.Holders {
		found[h.Slot] = h
		o := routing.Overlap{Slot: h.Slot, Speculative: int32(h.Speculative * blockSize)}
		for tier, n := range h.Blocks {
			o.Tokens[tier] = int32(n * blockSize)
		}
		out = append(out, o)
	}
	for _, x := range r.targets {
		if x == nil {
			continue
		}
		h := found[x.slot]
		delete(found, x.slot)
		if len(x.lasts) > 1 { // a block may count twice, see checkIndex
			continue
		}
		device, all := x.prefix(path)
		if got := int(h.Blocks[0]); got > device || got < device && !r.bounded() {
			failf("1: no credit for blocks that are not held", "%s of %s, prompt %v: got %d blocks on the device, want %d", x.e.target, r.name, path, got, device)
		}
		if got := int(h.Total()); got > all || got < all && !r.bounded() {
			failf("1: no credit for blocks that are not held", "%s of %s, prompt %v: got %d blocks, want %d", x.e.target, r.name, path, got, all)
		}
		for _, n := range path[h.Total() : h.Total()+h.Speculative] {
			if _, claimed := x.claims[n]; !claimed && !x.known[0].has(n) && !x.known[1].has(n) {
				failf("1: no credit for blocks that are not held", "%s of %s, prompt %v: block %d is credited, was not sent", x.e.target, r.name, path, n)
			}
		}
	}
	for slot := range found {
		failf("1: no credit for blocks that are not held", "%s credits slot %d, which has no target", r.name, slot)
	}
	return out
}

// speculate credits a target with a prompt on its way.
func (q *request) speculate(x *target) {
	q.at, q.sent = x, q.r.index.Speculate(x.slot, q.r.w.blocks[q.last].hashes, q.r.clock())
	for _, n := range q.r.w.blocks[q.last].path {
		// An index at its bound may have dropped what the model knows.
		if _, has := x.claims[n]; q.r.bounded() || !has && !x.known[0].has(n) && !x.known[1].has(n) {
			x.claims[n] = claim{q.sent, q.r.clock().Add(30 * time.Second).UnixNano()}
		}
	}
}

// withdraw ends the credit: the target refused the prompt.
func (q *request) withdraw() {
	q.r.index.Withdraw(q.sent)
	for n, c := range q.at.claims {
		if c.credit == q.sent && !q.r.bounded() {
			delete(q.at.claims, n)
		}
	}
}

// pick decides, books, and checks the decision.
func (r *replica) pick(q *request) error {
	w := r.w
	overlaps := r.overlaps(q.last)
	bound := r.mayFollow(q)
	var plan routing.Plan
	var err error
	if w.rng.IntN(4) > 0 {
		plan, err = r.router.Pick(w.now, &q.q, overlaps, nil)
	} else {
		var d *routing.Decision
		d, err = r.router.PickRecorded(w.now, &q.q, overlaps, nil)
		plan = d.Plan
		r.rerun(d, err)
	}
	if err != nil {
		return err
	}
	b := &booking{id: plan.Reservation, decode: r.at(plan.Decode), miss: plan.Miss, kv: q.q.PromptTokens, sequences: q.q.Sequences, conversation: q.q.Conversation}
	if b.decode == nil || b.decode.role() == routing.Prefill || b.decode.unready {
		failf("requests go where they may", "slot %d", plan.Decode)
	}
	if slices.Contains(q.q.Exclude, plan.Decode) || q.q.Pin != nil && q.q.Pin.Worker != b.decode.e.target.Worker && !w.rules.Policy.PinOverflow {
		failf("requests go where they may", "%s is excluded or not the pinned one", b.decode.e.target)
	}
	if plan.Prefill != routing.NoSlot {
		w.reach("prefill leg")
		if b.prefill = r.at(plan.Prefill); b.prefill == nil || b.prefill.unready || b.prefill.role() == routing.Decode || b.prefill.e.target.Worker == b.decode.e.target.Worker {
			failf("requests go where they may", "prefill on slot %d", plan.Prefill)
		}
	}
	if limit := w.rules.Policy.Limits.MaxActive; limit > 0 && w.rules.Disagg.Mode == routing.ModeOff && r.loads()[b.decode].Sequences >= limit {
		failf("limits hold", "%s has %d sequences", b.decode.e.target, r.loads()[b.decode].Sequences)
	}
	q.plan, q.b = plan, b
	r.bookings = append(r.bookings, b)
	r.follow(q, bound)
	w.requests = append(w.requests, q)
	computes := b.decode
	if b.prefill != nil {
		computes = b.prefill
	}
	q.speculate(computes)
	if told, ok := r.router.Booking(plan.Reservation); ok {
		r.tell(booked, told)
	} else {
		failf("a booking can be told", "%v", plan)
	}
	return nil
}

func (r *replica) at(slot kvindex.Slot) *target {
	for _, x := range r.targets {
		if x != nil && x.slot == slot {
			return x
		}
	}
	return nil
}

func (x *target) role() routing.Role { return x.r.roles[x.e.number] }

// rerun repeats a decision from its record.
func (r *replica) rerun(d *routing.Decision, err error) {
	if r.w.rng.IntN(4) == 0 {
		data, jsonErr := json.Marshal(d) //nolint:musttag // kvindex.Target goes by the names of its fields
		again := new(routing.Decision)
		if jsonErr == nil {
			jsonErr = json.Unmarshal(data, again) //nolint:musttag // as above
		}
		if jsonErr != nil {
			panic(jsonErr)
		}
		d = again
	}
	plan, _, again := d.Rerun()
	if plan != d.Plan || fmt.Sprint(again) != fmt.Sprint(err) {
		failf("6: same state, same request, same decision", "got %+v %v from the record, want %+v %v", plan, again, d.Plan, err)
	}
	r.w.reach("rerun")
}

// home is where a conversation is bound to.
type home struct {
	conversation string
	at           *target
}

// binding is where a conversation is bound to before a decision; nil if nowhere. must reports that the rules keep the
// request there, mine that they would if the target had room or were not suspect: the conversation stays then.
type binding struct {
	at         *target
	must, mine bool
}

// mayFollow returns the home of a request's conversation, and whether the rules keep the request there.
func (r *replica) mayFollow(q *request) (bound binding) {
	p := &r.w.rules.Policy
	i := slices.IndexFunc(r.homes, func(h home) bool { return h.conversation == q.q.Conversation })
	if i < 0 || r.w.rules.Disagg.Mode != routing.ModeOff || p.Sticky.Mode != routing.StickyTarget || p.Sticky.Implicit {
		return bound
	}
	bound.at = r.homes[i].at
	load := r.loads()[bound.at]
	limit, most := p.Limits.MaxActive, p.Limits.MaxQueue
	if q.q.Priority < 0 {
		for _, l := range []*int64{&limit, &most} {
			if *l > 0 {
				*l = max(int64(float64(*l)*p.Limits.ShedAt), 1)
			}
		}
	}
	bound.mine = !slices.Contains(q.q.Exclude, bound.at.slot) && !bound.at.unready
	busy := limit > 0 && load.Sequences >= limit || most > 0 && load.Queue >= most || p.Sticky.HardCap && p.Cap.Hard > 0 && load.Active >= p.Cap.Hard
	bound.must = bound.mine && !busy && r.router.Suspect(bound.at.slot) == "" && !r.w.reports
	return bound
}

// follow checks that a conversation stays where it is bound, and records the binding.
func (r *replica) follow(q *request, bound binding) {
	if q.q.Conversation == "" {
		return
	}
	if bound.must && q.b.decode != bound.at && r.router.Suspect(bound.at.slot) == "" {
		failf("conversations stay where they are bound", "%s of %s is at %s, request %d goes to %s", q.q.Conversation, r.name, bound.at.e.target, q.id, q.b.decode.e.target)
	}
	if bound.at != nil && bound.at == q.b.decode {
		r.w.reach("conversation followed")
	}
	h := home{q.q.Conversation, q.b.decode}
	if bound.mine { // full, or suspect
		h.at = bound.at
	}
	i := slices.IndexFunc(r.homes, func(o home) bool { return o.conversation == h.conversation })
	if i >= 0 {
		r.homes = slices.Delete(r.homes, i, i+1)
	}
	r.homes = append(r.homes, h)
	if most := r.w.rules.MaxConversations; len(r.homes) > most {
		r.homes = slices.Delete(r.homes, 0, len(r.homes)-most)
	}
}

// TestCore is the simulation of routing, index, feeds and queue.
func TestCore(t *testing.T) {
	seeds := number("SEEDS", 2000)
	if raceDetector {
		seeds = 20
	}
	simulate(t, seeds, func(seed uint64) history { return draw(seed, 160, kinds) }, runCore, []string{
		"feed live", "feed gap", "feed stale", "feed syncing", "cleared: lost_batches", "cleared: engine_restarted", "replay done", "replay failed", "silent feed",
		"connection lost", "batch lost", "warm start", "remote booking", "remote booking expired", "replica dropped", "waiter", "waiter placed", "waiter shed",
		"refused", "prefill leg", "prefill moved", "computed locally", "suspect", "rerun", "conversation followed", "rebooked", "batches of two incarnations",
	})
}

// TestSameSeedSameRun: without that no failure could be replayed.
func TestSameSeedSameRun(t *testing.T) {
	for seed := range uint64(20) {
		h := draw(seed, 160, kinds)
		var a, b strings.Builder
		if bad := runCore(h, &a, map[string]int{}); bad != nil {
			t.Fatalf("seed %d breaks the law %q: %s", seed, bad.law, bad.text)
		}
		runCore(h, &b, map[string]int{})
		if a.String() != b.String() {
			t.Fatalf("seed %d: got\n%s\nthe second time, want\n%s", seed, b.String(), a.String())
		}
	}
}
