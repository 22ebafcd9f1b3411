package simulate

import (
	"encoding/binary"
	"math/bits"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
)

// blockSize is the tokens of a block, of the index and of all engines.
const blockSize = 4

// Tiers that the engines use.
const tiers = 2

// set is a set of blocks, by number.
type set []uint64 //nolint:recvcheck // only add needs the pointer

func (s set) has(i int) bool { return i/64 < len(s) && s[i/64]&(1<<(i%64)) != 0 }

func (s *set) add(i int) {
	for i/64 >= len(*s) {
		*s = append(*s, 0)
	}
	(*s)[i/64] |= 1 << (i % 64)
}

func (s set) remove(i int) {
	if i/64 < len(s) {
		s[i/64] &^= 1 << (i % 64)
	}
}

func (s set) count() (n int) {
	for _, w := range s {
		n += bits.OnesCount64(w)
	}
	return n
}

// outside returns a member of s that is not in t, -1 if there is none.
func (s set) outside(t set) int {
	for i, w := range s {
		if i < len(t) {
			w &^= t[i]
		}
		if w != 0 {
			return i*64 + bits.TrailingZeros64(w)
		}
	}
	return -1
}

// block is one block of prompts after all blocks before it: a node of the tree of prompts.
type block struct {
	parent int // -1 for a prompt's first block
	kind   uint32
	// path is the blocks from the prompt's start to this one, hashes the index's hashes of them.
	path   []int
	hashes []kvindex.Hash
}

// child returns the block of a kind after another, -1 for the start of prompts.
func (w *world) child(parent int, kind uint32) int {
	key := [2]int{parent, int(kind)}
	if n, ok := w.children[key]; ok {
		return n
	}
	b, n, before := block{parent: parent, kind: kind}, len(w.blocks), w.hasher.Seed("m", "", "")
	if parent >= 0 {
		up := &w.blocks[parent]
		b.path, b.hashes = append(b.path, up.path...), append(b.hashes, up.hashes...)
		before = up.hashes[len(up.hashes)-1]
	}
	b.path, b.hashes = append(b.path, n), w.hasher.AppendHashes(b.hashes, before, tokensOf(kind), blockSize)
	w.blocks, w.children[key] = append(w.blocks, b), n
	return n
}

func tokensOf(kind uint32) []uint32 { return []uint32{kind, kind, kind, kind + 1} }

// prompt returns the last block of a random prompt; many share a beginning.
func (w *world) prompt() int {
	at := -1
	for range 1 + w.rng.IntN(w.depth) {
		at = w.child(at, uint32(w.rng.IntN(w.kinds)))
	}
	return at
}

// engine is what runs behind a target: a cache, and a publisher of what changes in it.
type engine struct {
	w      *world
	target kvindex.Target
	number int
	// incarnation counts the engine's starts.
	incarnation int
	next        uint64 // number of the next batch
	// log is the batches that a replay can still send; last is the newest one.
	log  []*batch
	last *batch
	held [tiers]set
	// hung engines answer nothing, failing ones only with errors.
	hung, failing bool
}

// batch is one message of an engine. after is what the engine held when it had sent it.
type batch struct {
	engine      *engine
	incarnation int
	seq         uint64
	payload     []byte
	events      []event
	after       [tiers]set
}

type event struct {
	kvindex.Event
	blocks []int
}

// name is the engine's own hash of a block.
func (e *engine) name(block int) kvindex.EngineHash {
	family := uint64(0)
	if !e.w.oneFamily {
		family = uint64(e.number+1) << 40
	}
	return kvindex.EngineHash(family + uint64(block)*0x9e3779b97f4a7c15 + 1)
}

// store computes a prompt: it evicts to make room, and publishes all that.
func (e *engine) store(last int) {
	path := e.w.blocks[last].path
	var events []event
	missing := 0
	for _, n := range path {
		if !e.held[0].has(n) {
			missing++
		}
	}
	for e.held[0].count()+missing > e.w.capacity {
		victim := e.victim(0, path)
		if victim < 0 {
			break
		}
		if e.w.offload && !e.held[1].has(victim) && e.w.rng.IntN(2) == 0 {
			events = append(events, event{kvindex.Event{Kind: kvindex.Stored, Tier: kvindex.Host, Hashes: []kvindex.EngineHash{e.name(victim)}}, []int{victim}})
			e.held[1].add(victim)
		}
		events = append(events, e.removal(0, victim))
	}
	for e.held[1].count() > e.w.capacity {
		events = append(events, e.removal(1, e.victim(1, nil)))
	}
	for at := 0; at < len(path); {
		if e.held[0].has(path[at]) {
			at++
			continue
		}
		ev := event{Event: kvindex.Event{Kind: kvindex.Stored, BlockSize: blockSize}}
		if at > 0 {
			ev.Parent, ev.HasParent = e.name(path[at-1]), true
		}
		for ; at < len(path) && !e.held[0].has(path[at]); at++ {
			ev.blocks = append(ev.blocks, path[at])
			ev.Hashes = append(ev.Hashes, e.name(path[at]))
			ev.Tokens = append(ev.Tokens, tokensOf(e.w.blocks[path[at]].kind)...)
		}
		events = append(events, ev)
		for _, n := range ev.blocks {
			e.held[0].add(n)
		}
	}
	e.publish(events)
}

func (e *engine) removal(tier, victim int) event {
	e.held[tier].remove(victim)
	return event{kvindex.Event{Kind: kvindex.Removed, Tier: kvindex.Tier(tier), Hashes: []kvindex.EngineHash{e.name(victim)}}, []int{victim}}
}

// victim returns a block that is not among keep.
func (e *engine) victim(tier int, keep []int) int {
	kept := set(nil)
	for _, n := range keep {
		kept.add(n)
	}
	n := len(e.w.blocks)
	if n == 0 {
		return -1
	}
	start := e.w.rng.IntN(n)
	for i := range n {
		if b := (start + i) % n; e.held[tier].has(b) && !kept.has(b) {
			return b
		}
	}
	return -1
}

// publish sends a batch to all that are connected.
func (e *engine) publish(events []event) {
	if len(events) == 0 {
		return
	}
	b := &batch{engine: e, incarnation: e.incarnation, seq: e.next, events: events}
	b.payload = binary.LittleEndian.AppendUint64(nil, uint64(len(e.w.batches)))
	e.w.batches = append(e.w.batches, b)
	for tier := range b.after {
		b.after[tier] = append(set(nil), e.held[tier]...)
	}
	e.next++
	e.last = b
	if e.log = append(e.log, b); len(e.log) > e.w.buffer {
		e.log = e.log[1:]
	}
	for _, r := range e.w.replicas {
		if x := r.targets[e.number]; x != nil && (x.connected || e.w.feeds == polled) {
			x.wire = append(x.wire, b)
		}
	}
}

// restart loses the cache. Connections break, which the feeds notice after what is on the wire.
func (e *engine) restart() {
	e.incarnation++
	e.next, e.log, e.last, e.held, e.hung, e.failing = 0, nil, nil, [tiers]set{}, false, false
	for _, r := range e.w.replicas {
		if x := r.targets[e.number]; x != nil {
			x.restarted = true
			x.cut()
		}
	}
}

// outdated reports whether the feed still believes in an engine that is gone: it has not seen the end of the connection,
// or has not finished its first exchange with the new engine.
func (x *target) outdated() bool {
	if x.restarted && x.connected && x.machine.State() == feed.Live {
		x.restarted = false
	}
	return x.restarted
}

// target is an engine as one replica knows it, from when it was added until it is removed.
type target struct {
	r       *replica
	e       *engine
	slot    kvindex.Slot
	removed bool
	unready bool

	machine *feed.Machine
	// connected: new batches arrive. wire is what is on its way; nil stands for the end of the connection.
	connected bool
	wire      []*batch
	replay    *replay
	// restarted is set while the feed cannot know that its engine has restarted, or has to find out.
	restarted bool

	// known is what the applied events say, last the newest applied batch since the target was cleared, lasts the newest
	// one of each incarnation. claims is the credit for prompts on their way.
	known  [tiers]set
	last   *batch
	lasts  map[int]*batch
	claims map[int]claim
}

type claim struct {
	credit  kvindex.Credit
	expires int64
}

// replay is a running request for past batches.
type replay struct {
	epoch, from uint64
	started     bool
	broken      bool
	left        []*batch
}

// cut breaks the connection and a replay at the engine's end.
func (x *target) cut() {
	if x.r.w.feeds == polled {
		x.wire = nil // what was not fetched is lost
		x.down()
		return
	}
	if x.connected {
		x.connected = false
		x.wire = append(x.wire, nil)
	}
	if x.replay != nil && x.replay.started {
		x.replay.broken = true
	}
}

func (x *target) connect() {
	if !x.connected && (len(x.wire) == 0 || x.r.w.feeds == polled) {
		x.connected = true
		x.do(x.machine.Up())
	}
}

func (x *target) down() {
	x.connected, x.replay = false, nil
	x.r.w.reach("connection lost")
	x.do(x.machine.Down())
}

// deliver passes the next batch on the wire to the machine.
func (x *target) deliver() {
	if len(x.wire) == 0 || x.r.w.feeds == polled && !x.connected || x.machine.Full() && x.wire[0] != nil && x.r.w.rng.IntN(8) > 0 {
		return
	}
	b := x.wire[0]
	x.wire = x.wire[1:]
	if b == nil {
		x.down()
		return
	}
	x.do(x.machine.Live(b.seq, b.payload))
}

// stepReplay lets a replay go on by one message, or fail.
func (x *target) stepReplay(fail bool) {
	p := x.replay
	if p == nil {
		return
	}
	if !p.started {
		p.started = true
		for _, b := range x.e.log {
			if b.seq >= p.from {
				p.left = append(p.left, b)
			}
		}
	}
	switch {
	case fail || p.broken:
		x.replay = nil
		x.r.w.reach("replay failed")
		x.do(x.machine.ReplayEnd(p.epoch, false))
	case len(p.left) > 0:
		b := p.left[0]
		p.left = p.left[1:]
		x.do(x.machine.Replayed(p.epoch, b.seq, b.payload))
	default:
		x.replay = nil
		x.r.w.reach("replay done")
		x.do(x.machine.ReplayEnd(p.epoch, true))
	}
}

// do performs a machine's actions, as the feed and the fleet do.
func (x *target) do(actions []feed.Action) {
	for _, a := range actions {
		switch a.Kind {
		case feed.Apply:
			x.apply(x.r.w.batches[binary.LittleEndian.Uint64(a.Payload)])
		case feed.Clear:
			x.r.w.reach("cleared: " + string(a.Reason))
			x.clear()
		case feed.Enter:
			x.r.w.reach("feed " + a.State.String())
		case feed.Replay:
			x.replay = &replay{epoch: a.Epoch, from: a.Seq}
		case feed.Warn:
			x.r.w.reach("silent feed")
		}
	}
}

func (x *target) clear() {
	if err := x.r.index.Apply(x.slot, &kvindex.Event{Kind: kvindex.Cleared}); err != nil {
		failf("events apply", "clear %s: %v", x.e.target, err)
	}
	x.known, x.last, x.lasts, x.claims = [tiers]set{}, nil, map[int]*batch{}, map[int]claim{}
}

// apply passes a batch to the index, and to its naive model.
func (x *target) apply(b *batch) {
	for i := range b.events {
		ev := &b.events[i]
		got, want := x.r.index.Apply(x.slot, &ev.Event), x.learn(ev)
		if (got != nil) != want && !x.r.bounded() {
			failf("1: the index follows the events", "%s at %s: got error %v of batch %d, want one: %v", x.e.target, x.r.name, got, b.seq, want)
		}
	}
	x.last, x.lasts[b.incarnation] = b, b
}

// learn is Apply of the naive model. It reports whether an index refuses the event or a part of it.
func (x *target) learn(ev *event) (refused bool) {
	switch ev.Kind {
	case kvindex.Removed:
		x.known[ev.Tier].remove(ev.blocks[0])
	case kvindex.Cleared:
		x.known, x.claims = [tiers]set{}, map[int]claim{}
	case kvindex.Stored:
		knows := func(n int) bool { return x.known[0].has(n) || x.known[1].has(n) }
		before := ev.blocks[0]
		if len(ev.Tokens) > 0 {
			before = x.r.w.blocks[before].parent
		}
		if before >= 0 && !knows(before) {
			return true
		}
		for _, n := range ev.blocks {
			x.known[ev.Tier].add(n)
			if !x.r.bounded() { // an index at its bound may lack the parent
				delete(x.claims, n)
			}
		}
	}
	return false
}

// backed returns what the engine held after the newest batch that was applied. While the connection of an engine that has
// restarted still delivers, a replay that was verified by nothing may have come from the new one: the target is then
// credited with what either of them held, until the next connection.
func (x *target) backed(tier int) (all set) {
	if x.last == nil {
		return nil
	}
	if !x.outdated() {
		return x.last.after[tier]
	}
	for _, b := range x.lasts {
		for i, word := range b.after[tier] {
			if i >= len(all) {
				all = append(all, 0)
			}
			all[i] |= word
		}
	}
	return all
}

// prefix returns what the target holds of a prompt: blocks of the first tier, and on all tiers together.
func (x *target) prefix(path []int) (device, all int) {
	for device < len(path) && x.known[0].has(path[device]) {
		device++
	}
	for all < len(path) && (x.known[0].has(path[all]) || x.known[1].has(path[all])) {
		all++
	}
	return device, all
}
