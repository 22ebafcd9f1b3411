package kvindex

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"
)

// Config configures an Index; it cannot change later.
type Config struct {
	// BlockSize is the index's block size in tokens, 1..MaxBlockSize. It must be a multiple or a
	// divisor of the engines' block sizes.
	BlockSize int
	// MaxBytes limits the index's memory in bytes, 0 for no limit; docs/index.md describes what is dropped first.
	MaxBytes int64
	// Key is the secret of the block hash. Set it: with the zero Key clients can construct collisions.
	Key Key
	// SpeculativeTTL is the lifetime of speculative credit, which a sent prompt gets until events confirm it. Default
	// 30 s.
	SpeculativeTTL time.Duration
	// MaxSpeculative limits the blocks of such credit, for all targets together; the oldest is
	// dropped first. Default 1<<20.
	MaxSpeculative int
}

// Index tracks which targets hold which blocks. All methods are safe for concurrent use, but the
// changes of one slot must be made in order, by one caller at a time.
type Index struct {
	cfg    Config
	hasher *Hasher
	gate   gate
	handed atomic.Pointer[change] // changes for the writer that holds the mutex, newest first
	// handedBlocks is the number of blocks that the queued changes credit.
	handedBlocks atomic.Int64

	// Everything below is modified while the gate is shut. Writers read it under the gate's
	// mutex, lookups inside the gate.
	arena    arena
	segments []handle // by number; number 0 is never used
	freed    []uint32 // numbers of freed segments
	starts   table    // own hash of a segment's first block -> its place
	names    table    // engine hash -> places of the blocks first stored under it
	repeated int      // entries in excess of one for each name
	// These are the constants deferFrom, manyRuns, shortSegment and maxEqual; tests use smaller values.
	deferFrom, manyRuns, shortSegment, maxEqual int
	applying                                    Slot // whose maps the caller measures, or MaxSlots

	slots     []slotState
	freeSlots []Slot
	byTarget  map[Target]Slot
	// parts is, by slot, the number of index blocks in an engine block; slots past its end have 1.
	parts []uint32
	// windows is slotState.windows by slot, for lookups, which do not read slots; slots past its end have none.
	windows  []*windows
	postings int64 // bytes of all slots' lists
	mapBytes int64 // estimated bytes of all slots' aliases, pages and windows, which are Go maps

	claims     claimQueue
	origin     atomic.Pointer[time.Time] // the time of the first Speculate; nil before
	due        atomic.Int64              // when the oldest claim expires, after origin in nanoseconds; may be too early
	hand       uint32                    // the next segment for eviction
	counters   counters
	liveBlocks int64

	// scratch space of writers, under the mutex
	own     []uint64
	split   []EngineHash
	cover   []bool
	copied  []uint64
	leaving []leaving
	// fragmented are the segments that may have to be cut up, see cutUp.
	fragmented []uint32
	touched    uint64 // keeps flushNames' loads from being optimised away
}

// handle is a segment's record (lower 40 bits, noRecord for a free segment) and the segment's
// generation, which increases when the number is freed (upper 24 bits).
type handle uint64

const (
	handleBits = 40
	noRecord   = 1<<handleBits - 1
)

type counters struct {
	refused                                                    [numRefusals]int64
	stored, removed, unknownRemoved, cleared, evicted, rebuilt int64
}

// slotState is the state of one target.
type slotState struct {
	target Target
	model  string
	inUse  bool
	// dropping is set from the first step of Drop on, until the slot is free.
	dropping bool
	// blockSize is the engine's block size, 0 until known.
	blockSize int
	// group is the KV-cache group of the first event. Its blocks cost nothing extra; those of
	// further groups are counted in aliases.
	group    int32
	hasGroup bool
	seed     Hash // of the model alone
	// last seed with adapter or salt
	adapter, salt string
	salted        Hash
	// segments lists the segments where the slot has runs; entries may be stale or duplicate.
	// present counts the segments where it has runs now.
	segments []uint32
	present  int
	held     [numLevels]int64
	// claimsFrom is the number of the first valid claim: the slot was emptied after the earlier ones.
	claimsFrom uint64
	// deferred lists the segments where the slot holds deferred blocks; entries may be stale or duplicate.
	deferred []uint32
	guesses  guesses
	aliases  *aliases
	pages    *pages
	windows  *windows
	lone     int // see Event.Lone
}

// New returns an empty index.
func New(cfg Config) (*Index, error) {
	if cfg.BlockSize < 1 || cfg.BlockSize > MaxBlockSize {
		return nil, fmt.Errorf("index block size %d is not in 1..%d", cfg.BlockSize, MaxBlockSize)
	}
	if cfg.MaxBytes < 0 || cfg.MaxSpeculative < 0 || cfg.SpeculativeTTL < 0 {
		return nil, errors.New("bounds of the index are negative")
	}
	cfg.SpeculativeTTL, cfg.MaxSpeculative = cmp.Or(cfg.SpeculativeTTL, 30*time.Second), cmp.Or(cfg.MaxSpeculative, 1<<20)
	return &Index{
		cfg:      cfg,
		hasher:   NewHasher(cfg.Key),
		segments: []handle{noRecord},
		byTarget: map[Target]Slot{},

		deferFrom: deferFrom, manyRuns: manyRuns, shortSegment: shortSegment, maxEqual: maxEqual, applying: MaxSlots,
	}, nil
}

// Hasher returns the block hash that requests must use.
func (x *Index) Hasher() *Hasher { return x.hasher }

// BlockSize returns the index's block size in tokens.
func (x *Index) BlockSize() int { return x.cfg.BlockSize }

// Add assigns a slot to a target. engineBlockSize is the block size of its engine in tokens, 0 to take it from the
// target's first stored event. Adding a known target returns its slot. Adding it with another model or block size is an
// error, because the blocks it holds would become wrong: Drop it first.
func (x *Index) Add(t Target, model string, engineBlockSize int) (Slot, error) {
	x.lock()
	defer x.unlock()
	if engineBlockSize < 0 || engineBlockSize > 0 && !x.fits(engineBlockSize) {
		return 0, fmt.Errorf("add %s: engine blocks of %d tokens, index blocks of %d: %w", t, engineBlockSize, x.cfg.BlockSize, ErrBlockSize)
	}
	if s, ok := x.byTarget[t]; ok && x.slots[s].dropping {
		x.clear(s)
		x.free(s)
	}
	if s, ok := x.byTarget[t]; ok {
		st := &x.slots[s]
		if st.model != model || engineBlockSize != 0 && st.blockSize != 0 && st.blockSize != engineBlockSize {
			return 0, fmt.Errorf("add %s: known with model %q and blocks of %d, now model %q and blocks of %d", t, st.model, st.blockSize, model, engineBlockSize)
		}
		if engineBlockSize != 0 {
			x.setBlockSize(s, engineBlockSize)
		}
		return s, nil
	}
	var s Slot
	if k := len(x.freeSlots); k > 0 {
		s, x.freeSlots = x.freeSlots[k-1], x.freeSlots[:k-1]
	} else {
		if len(x.slots) == MaxSlots {
			return 0, fmt.Errorf("add %s: %d targets are the most", t, MaxSlots)
		}
		s = Slot(len(x.slots))
		x.slots = append(x.slots, slotState{})
	}
	x.slots[s] = slotState{target: t, model: model, inUse: true, seed: x.hasher.Seed(model, "", ""), claimsFrom: x.claims.next()}
	x.setBlockSize(s, engineBlockSize)
	x.byTarget[t] = s
	return s, nil
}

// setBlockSize records an engine's block size, 0 for not known.
func (x *Index) setBlockSize(s Slot, engine int) {
	x.slots[s].blockSize = engine
	parts := uint32(engine / x.cfg.BlockSize)
	if parts <= 1 && int(s) >= len(x.parts) {
		return
	}
	x.gate.shut()
	defer x.gate.open()
	for int(s) >= len(x.parts) {
		x.parts = append(x.parts, 1)
	}
	x.parts[s] = max(parts, 1)
}

// fits reports whether engine blocks can be split or combined into the index's.
func (x *Index) fits(engine int) bool {
	return engine > 0 && engine <= 1<<20 && (engine%x.cfg.BlockSize == 0 || x.cfg.BlockSize%engine == 0)
}

// Drop removes a target and everything that it holds; its slot may be reused. The time is
// proportional to what the target held. Dropping a free slot does nothing. Other writers can run
// meanwhile: a Drop of the same slot, or an Add of the target, finishes the drop that is under way.
func (x *Index) Drop(s Slot) {
	x.lock()
	defer x.unlock()
	if int(s) >= len(x.slots) || !x.slots[s].inUse {
		return
	}
	x.slots[s].dropping = true
	for x.clearStep(s) {
		x.yield()
		if !x.slots[s].dropping { // freed by another, and perhaps in use again
			return
		}
	}
	x.free(s)
}

// Relabel removes everything that a target holds, as Drop does. The target keeps its slot, and what it stores from
// now on belongs to model. It must not be dropped at the same time.
func (x *Index) Relabel(s Slot, model string) {
	x.lock()
	defer x.unlock()
	if int(s) >= len(x.slots) || !x.slots[s].inUse {
		return
	}
	x.clearSlowly(s)
	x.dropWindows(s)
	st := &x.slots[s]
	st.model, st.seed = model, x.hasher.Seed(model, "", "")
	st.adapter, st.salt, st.hasGroup = "", "", false
}

// free makes an empty slot reusable.
func (x *Index) free(s Slot) {
	delete(x.byTarget, x.slots[s].target)
	x.setBlockSize(s, 0)
	x.dropWindows(s)
	x.slots[s] = slotState{}
	x.freeSlots = append(x.freeSlots, s)
}

// clear removes everything that a slot holds, in steps between which lookups can run.
func (x *Index) clear(s Slot) {
	for x.clearStep(s) {
	}
}

// clearSlowly is clear, except that other writers can run between the steps too.
func (x *Index) clearSlowly(s Slot) {
	for x.clearStep(s) {
		x.yield()
	}
}

// yield lets other writers run. The caller holds the mutex again afterwards, also if a change that
// was handed over panics.
func (x *Index) yield() {
	x.gate.writers.Unlock()
	x.gate.writers.Lock()
	x.applyHanded()
}

// clearStep reports whether there is more to remove.
func (x *Index) clearStep(s Slot) bool {
	st := &x.slots[s]
	x.mapBytes -= st.mapBytes()
	st.aliases, st.pages = nil, nil
	x.gate.shut()
	x.emptyWindows(s)
	for step := 0; step < writeStep && len(st.segments) > 0; step++ {
		id := st.segments[len(st.segments)-1]
		st.segments = st.segments[:len(st.segments)-1]
		if x.alive(id) {
			x.expel(id, s, s)
		}
	}
	x.gate.open()
	if len(st.segments) > 0 {
		return true
	}
	x.dropPostings(st)
	st.claimsFrom = x.claims.next()
	return false
}

func (x *Index) seg(id uint32) segment {
	return x.arena.words(ref(x.segments[id] & (1<<handleBits - 1)))
}

// alive reports whether id is the number of a segment. It also accepts stale numbers beyond the
// end of segments, which may have shrunk.
func (x *Index) alive(id uint32) bool {
	return int(id) < len(x.segments) && x.segments[id]&noRecord != noRecord
}

func (x *Index) generation(id uint32) uint32 { return uint32(x.segments[id] >> handleBits) }

// newSegment returns a new segment without blocks and runs.
func (x *Index) newSegment(room, runRoom int) uint32 {
	words := roundUp(segmentWords(room, runRoom))
	room = roomIn(words, runRoom)
	r := x.arena.alloc(words)
	g := segment(x.arena.words(r))
	g[0], g[1], g[2], g[3] = uint64(room)<<32, uint64(runRoom)<<32, 0, sparedNew
	clear(g.entered())
	var id uint32
	if k := len(x.freed); k > 0 {
		id, x.freed = x.freed[k-1], x.freed[:k-1]
	} else {
		id = uint32(len(x.segments))
		x.segments = append(x.segments, 0)
	}
	x.segments[id] = x.segments[id]>>handleBits<<handleBits | handle(r)
	return id
}

// resize moves a segment to a record with at least this capacity.
func (x *Index) resize(id uint32, room, runRoom int) segment {
	old := x.seg(id)
	words := roundUp(segmentWords(room, runRoom))
	room = roomIn(words, runRoom)
	r := x.arena.alloc(words)
	g := segment(x.arena.words(r))
	copy(g[:headWords], old[:headWords])
	g[0] = uint64(room)<<32 | uint64(old.blocks())
	g[1] = uint64(runRoom)<<32 | uint64(old.numRuns())
	copy(g.runs(), old.runs())
	copy(g.own(), old.own())
	copy(g.names(), old.names())
	bits := g.entered()
	clear(bits[copy(bits, old.entered()):])
	x.arena.release(ref(x.segments[id] & (1<<handleBits - 1)))
	x.segments[id] = x.segments[id]>>handleBits<<handleBits | handle(r)
	return g
}

// freeSegment frees a segment whose blocks are all unnamed and unheld.
func (x *Index) freeSegment(id uint32) {
	g := x.seg(id)
	// the first word of own is valid even when blocks() is 0
	first := g[headWords+g.runRoom()]
	x.starts.remove(x.hasher.mixName(first), placeAt(id, 0))
	x.arena.release(ref(x.segments[id] & (1<<handleBits - 1)))
	x.segments[id] = (x.segments[id]>>handleBits+1)<<handleBits | noRecord
	x.freed = append(x.freed, id)
	if len(x.freed) == len(x.segments)-1 {
		// no segment is left: release the numbers too
		x.segments, x.freed = []handle{noRecord}, nil
		x.claims.reset()
		for _, w := range x.windows {
			if w != nil {
				x.forgetTails(w) // their claims are gone
			}
		}
		x.arena.reset()
		x.starts, x.names, x.repeated, x.leaving = table{}, table{}, 0, nil
		x.hand = 0
	}
}

// findStart returns the segment whose first block has this hash, 0 if there is none.
func (x *Index) findStart(h uint64) uint32 {
	s, at, tag := x.starts.probe(x.hasher.mixName(h))
	for {
		p, after, ok := s.next(at, tag)
		if !ok {
			return 0
		}
		g := x.seg(p.segment())
		if g[headWords+g.runRoom()] == h {
			return p.segment()
		}
		at = after
	}
}

// hold adds a run, which must not overlap the slot's runs on that tier, and removes the
// speculative credit that it confirms.
func (x *Index) hold(id uint32, s Slot, t Tier, start, end int) {
	st := &x.slots[s]
	if t < speculative && st.held[speculative] > 0 {
		if g := x.seg(id); g.lacks(s, speculative, start, end) < end-start {
			st.held[speculative] -= int64(x.cut(id, s, speculative, start, end))
		}
	}
	st.held[t] += int64(end - start)
	g := x.seg(id)
	if g.deferred() > 0 && t < speculative {
		x.listDeferred(st, s, id)
	}
	runs := g.runs()
	r := makeRun(s, t, start, end)
	lo := lowerBound(runs, makeRun(s, t, start, 0))
	hi := lo
	if lo > 0 && sameHolder(runs[lo-1], r) && runEnd(runs[lo-1]) == start {
		lo--
		start = runStart(runs[lo])
	}
	if hi < len(runs) && sameHolder(runs[hi], r) && runStart(runs[hi]) == end {
		end = runEnd(runs[hi])
		hi++
	}
	r = makeRun(s, t, start, end)
	if hi > lo {
		runs[lo] = r
		if hi-lo == 2 {
			copy(runs[lo+1:], runs[hi:])
			g.setRuns(len(runs) - 1)
		}
		return
	}
	known := lo > 0 && runSlot(runs[lo-1]) == s || lo < len(runs) && runSlot(runs[lo]) == s
	x.insertRun(id, lo, r)
	if !known {
		x.post(st, s, id)
	}
}

func (x *Index) insertRun(id uint32, at int, r run) {
	g := x.seg(id)
	n := g.numRuns()
	if n == g.runRoom() {
		g = x.resize(id, g.room(), n+n/4+1)
		if n >= x.manyRuns && g.blocks() > x.shortSegment {
			x.fragmented = append(x.fragmented, id)
		}
	}
	g.setRuns(n + 1)
	runs := g.runs()
	copy(runs[at+1:], runs[at:n])
	runs[at] = r
}

// post records that a slot has runs in a segment now.
func (x *Index) post(st *slotState, s Slot, id uint32) {
	st.present++
	st.segments = x.appendPosting(st.segments, id, st.present, func(id uint32) bool { return x.alive(id) && x.seg(id).present(s) })
}

// appendPosting appends a segment to a list of a slot that has runs in present segments. Before it lets the list grow it drops
// duplicates, and entries that are stale by keep, if these are more than half of the list.
func (x *Index) appendPosting(list []uint32, id uint32, present int, keep func(id uint32) bool) []uint32 {
	n := len(list)
	if n == cap(list) && n > 16 && n > 2*present {
		slices.Sort(list)
		list = slices.DeleteFunc(slices.Compact(list), func(id uint32) bool { return !keep(id) })
	}
	if len(list) == cap(list) {
		grown := make([]uint32, len(list), n+n/2+4)
		copy(grown, list)
		x.postings += int64(cap(grown)-cap(list)) * 4
		list = grown
	}
	return append(list, id)
}

// cut removes the slot's coverage of [start, end) on a tier and returns the number of blocks
// removed. It changes runs only: see unhold.
func (x *Index) cut(id uint32, s Slot, t Tier, start, end int) int {
	g := x.seg(id)
	key := makeRun(s, t, 0, 0)
	removed := 0
	for {
		runs := g.runs()
		i := firstTouching(runs, s, t, start)
		if i == len(runs) || !sameHolder(runs[i], key) || runStart(runs[i]) >= end {
			return removed
		}
		from, to := runStart(runs[i]), runEnd(runs[i])
		removed += min(to, end) - max(from, start)
		switch {
		case from < start && to > end:
			runs[i] = makeRun(s, t, from, start)
			x.insertRun(id, i+1, makeRun(s, t, end, to))
			return removed
		case from < start:
			runs[i] = makeRun(s, t, from, start)
		case to > end:
			runs[i] = makeRun(s, t, end, to)
			return removed
		default:
			copy(runs[i:], runs[i+1:])
			g.setRuns(len(runs) - 1)
			if !g.present(s) {
				x.leave(&x.slots[s])
			}
		}
	}
}

// leave records that a slot has no runs in a segment any more.
func (x *Index) leave(st *slotState) {
	if st.present--; st.present == 0 {
		x.dropPostings(st)
	}
}

func (x *Index) dropPostings(st *slotState) {
	x.postings -= int64(cap(st.segments)+cap(st.deferred)) * 4
	st.segments, st.deferred = nil, nil
}

// unhold removes blocks from a slot and forgets those that are not held any more.
func (x *Index) unhold(id uint32, s Slot, t Tier, start, end int) {
	x.slots[s].held[t] -= int64(x.cut(id, s, t, start, end))
	x.reap(id, start, end)
}

// reap forgets the blocks of [start, end) that no slot holds.
func (x *Index) reap(id uint32, start, end int) {
	g := x.seg(id)
	killed := 0
	g.uncovered(start, end, func(from, to int) {
		for i := from; i < to; i++ {
			x.unname(g, placeAt(id, i))
		}
		killed += to - from
	})
	if killed == 0 {
		return
	}
	x.liveBlocks -= int64(killed)
	g.addDead(killed)
	if end := g.maxEnd(); end < g.blocks() {
		g[2] -= uint64(g.blocks() - end)
		g.setBlocks(end)
		if end == 0 {
			x.freeSegment(id)
			return
		}
	}
	n := g.blocks()
	switch {
	case g.dead() >= 8 && g.dead()*2 > n:
		x.rebuild(id, n)
	case segmentWords(g.room(), g.runRoom()) > 24 && segmentWords(n, g.numRuns())*2 < segmentWords(g.room(), g.runRoom()):
		x.resize(id, n+n/8, g.numRuns())
	}
}

// With manyRuns or more runs, of which a slot has more than slotRuns in the mean, a segment is cut into pieces of shortSegment
// blocks: each change and each lookup of a segment takes time in proportion to its runs.
const (
	manyRuns     = 512
	slotRuns     = 8
	shortSegment = 64
)

// cutUp cuts up the segments that engines have fragmented. The caller holds the mutex, with the gate open.
func (x *Index) cutUp() {
	for _, id := range x.fragmented {
		if !x.alive(id) || x.seg(id).blocks() <= x.shortSegment {
			continue
		}
		runs, slots := x.seg(id).runs(), 0
		for i, r := range runs {
			if i == 0 || runSlot(runs[i-1]) != runSlot(r) {
				slots++
			}
		}
		if len(runs) > slotRuns*slots || x.manyRuns < manyRuns {
			x.gate.shut()
			x.rebuild(id, x.shortSegment)
			x.gate.open()
		}
	}
	x.fragmented = x.fragmented[:0]
}

// rebuild replaces a segment by segments of its live stretches, each of at most limit blocks. Their speculative credit is lost.
func (x *Index) rebuild(id uint32, limit int) {
	x.counters.rebuilt++
	old := x.seg(id)
	n := old.blocks()
	x.copied = append(x.copied[:0], old[:segmentWords(old.room(), old.runRoom())]...)
	was := segment(x.copied)
	moved, own, names, entered := was.runs(), was.own(), was.names(), was.entered()
	x.cover = append(x.cover[:0], make([]bool, n)...)
	for _, r := range moved {
		x.slots[runSlot(r)].held[runTier(r)] -= int64(runEnd(r) - runStart(r))
		if runTier(r) < speculative {
			for i := runStart(r); i < runEnd(r); i++ {
				x.cover[i] = true
			}
		}
	}
	for i, r := range moved {
		if i == 0 || runSlot(moved[i-1]) != runSlot(r) {
			x.slots[runSlot(r)].present--
		}
	}
	x.liveBlocks -= int64(n - old.dead())
	for i := range names {
		x.unname(old, placeAt(id, i))
	}
	x.freeSegment(id)
	type stretch struct {
		from int
		id   uint32
	}
	var stretches []stretch
	for from := 0; from < n; {
		if !x.cover[from] {
			from++
			continue
		}
		to := from
		for to < min(n, from+limit) && x.cover[to] {
			to++
		}
		fresh := x.newSegment(to-from, 1)
		g := x.seg(fresh)
		g.setBlocks(to - from)
		copy(g.own(), own[from:to])
		clear(g.names())
		x.liveBlocks += int64(to - from)
		x.starts.insert(x.hasher.mixName(own[from]), placeAt(fresh, 0))
		for i, name := range names[from:to] {
			if at := from + i; entered[at/64]>>(at%64)&1 != 0 || name != 0 && (at == from || at == to-1) && x.entries(name, x.maxEqual) < x.maxEqual {
				x.put(g, name, placeAt(fresh, i), x.named(name)) // an end is likely to be removed next
			} else if name != 0 {
				g.names()[i] = name
				g.addDeferred(1)
			}
		}
		stretches = append(stretches, stretch{from, fresh})
		from = to
	}
	for _, r := range moved {
		if runTier(r) >= speculative {
			continue
		}
		i, found := slices.BinarySearchFunc(stretches, runStart(r), func(t stretch, at int) int { return t.from - at })
		if !found {
			i--
		}
		for ; i < len(stretches) && stretches[i].from < runEnd(r); i++ {
			t := stretches[i]
			a, b := max(runStart(r), t.from), min(runEnd(r), t.from+x.seg(t.id).blocks())
			x.hold(t.id, runSlot(r), runTier(r), a-t.from, b-t.from)
		}
	}
}
