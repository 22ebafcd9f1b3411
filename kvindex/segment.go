package kvindex

import "math/bits"

// A segment is a stretch of a chain of blocks: block i+1's parent is block i. Its record consists of a head of
// headWords words, the runs (which slots hold which part), the blocks' own hashes, their engine hashes, and a bitmap
// with one bit per block that is set if the name table contains the block:
//
//	word 0  blocks | capacity for blocks
//	word 1  runs | capacity for runs
//	word 2  dead blocks (not held, but between held ones) | deferred blocks
//	        (named, but not in the name table) | searches among these
//	word 3  how many times eviction will spare it; the only word that readers write
//
// Runs are sorted. A run means that a slot holds blocks [start, end) on a tier; runs of one slot
// and tier neither overlap nor touch.
type segment []uint64

const headWords = 4

// headLines is how many cache lines of a record a lookup prefetches: the head, the runs of some
// 60 slots, or the hashes of a short chain.
const headLines = 9

// speculative is the tier of credit that no event has confirmed yet.
const (
	speculative Tier = NumTiers
	numLevels        = NumTiers + 1
)

func (g segment) blocks() int   { return int(uint32(g[0])) }
func (g segment) room() int     { return int(g[0] >> 32) }
func (g segment) numRuns() int  { return int(uint32(g[1])) }
func (g segment) runRoom() int  { return int(g[1] >> 32) }
func (g segment) dead() int     { return int(uint32(g[2])) }
func (g segment) addDead(n int) { g[2] += uint64(n) }
func (g segment) deferred() int { return int(uint16(g[2] >> 32)) }
func (g segment) searches() int { return int(g[2] >> 48) }

func (g segment) addDeferred(n int) { g[2] += uint64(n) << 32 }
func (g segment) addSearch()        { g[2] += 1 << 48 }

func (g segment) setBlocks(n int) { g[0] = g[0]&^(1<<32-1) | uint64(n) }
func (g segment) setRuns(n int)   { g[1] = g[1]&^(1<<32-1) | uint64(n) }

func (g segment) runs() []run { return g[headWords : headWords+g.numRuns()] }

// own are the blocks' own hashes.
func (g segment) own() []uint64 {
	at := headWords + g.runRoom()
	return g[at : at+g.blocks()]
}

// names are the blocks' engine hashes as used by the slot that stored them first; 0 for blocks
// without a name (dead or speculative only).
func (g segment) names() []uint64 {
	at := headWords + g.runRoom() + g.room()
	return g[at : at+g.blocks()]
}

// entered is the bitmap of the blocks that the name table contains. Invariant: the bits of
// blocks without a name, and of unused capacity, are 0.
func (g segment) entered() []uint64 {
	at := headWords + g.runRoom() + 2*g.room()
	return g[at : at+bitWords(g.room())]
}

func (g segment) isEntered(offset int) bool { return g.entered()[offset/64]>>(offset%64)&1 != 0 }

func bitWords(blocks int) int { return (blocks + 63) / 64 }

func segmentWords(blocks, runs int) int { return headWords + runs + 2*blocks + bitWords(blocks) }

// roomIn returns the largest number of blocks that fit into a record of this size; 64 blocks need 129 words. It is at
// least the number that the record was made for.
func roomIn(words, runs int) int { return min((words-headWords-runs)*64/129, maxSegment) }

// run is a stretch of a segment's blocks held by a slot on a tier: slot, tier,
// start and end from the highest bits down, so that sorting words sorts runs.
type run = uint64

const (
	slotShift  = 40
	tierShift  = 36
	startShift = 16
	// MaxSlots is the largest number of concurrent targets.
	MaxSlots = 1 << 20
)

// notFromStart masks the tier and the start of a run: both are 0 if it is on the device and starts where its segment does.
const notFromStart = 7<<tierShift | (1<<14-1)<<startShift

func makeRun(s Slot, t Tier, start, end int) run {
	return run(s)<<slotShift | run(t)<<tierShift | run(start)<<startShift | run(end)
}

func runSlot(r run) Slot { return Slot(r >> slotShift) }
func runTier(r run) Tier { return Tier(r >> tierShift & 7) }
func runStart(r run) int { return int(r >> startShift & (1<<14 - 1)) }
func runEnd(r run) int   { return int(r & (1<<14 - 1)) }

// sameHolder reports whether two runs belong to one slot and tier.
func sameHolder(a, b run) bool { return a>>tierShift == b>>tierShift }

// lowerBound returns the index of the first run that is not below r.
func lowerBound(runs []run, r run) int {
	lo, hi := 0, len(runs)
	for lo < hi {
		mid := int(uint(lo+hi) >> 1)
		if runs[mid] < r {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo
}

// firstTouching returns the index of the first run of this slot and tier that ends after start,
// or else where such a run belongs.
func firstTouching(runs []run, s Slot, t Tier, start int) int {
	r := makeRun(s, t, start, 0)
	i := lowerBound(runs, r)
	if i > 0 && sameHolder(runs[i-1], r) && runEnd(runs[i-1]) > start {
		i--
	}
	return i
}

// holds reports whether the slot holds the block at offset on the tier.
func (g segment) holds(s Slot, t Tier, offset int) bool {
	runs := g.runs()
	i := firstTouching(runs, s, t, offset)
	return i < len(runs) && sameHolder(runs[i], makeRun(s, t, 0, 0)) && runStart(runs[i]) <= offset
}

// lacks returns how many blocks of [start, end), counted from start, the slot does not hold on the tier.
func (g segment) lacks(s Slot, t Tier, start, end int) int {
	runs := g.runs()
	i := firstTouching(runs, s, t, start)
	if i < len(runs) && sameHolder(runs[i], makeRun(s, t, 0, 0)) {
		end = min(end, max(start, runStart(runs[i])))
	}
	return end - start
}

// holdsAny reports whether the slot holds the block at offset on any real tier.
func (g segment) holdsAny(s Slot, offset int) bool {
	runs := g.runs()
	for i := lowerBound(runs, makeRun(s, 0, 0, 0)); i < len(runs) && runSlot(runs[i]) == s && runTier(runs[i]) < NumTiers; i++ {
		if runStart(runs[i]) <= offset && offset < runEnd(runs[i]) {
			return true
		}
	}
	return false
}

// present reports whether the slot has any run here.
func (g segment) present(s Slot) bool {
	runs := g.runs()
	i := lowerBound(runs, makeRun(s, 0, 0, 0))
	return i < len(runs) && runSlot(runs[i]) == s
}

// maxEnd returns the end of the last held block.
func (g segment) maxEnd() int {
	end := 0
	for _, r := range g.runs() {
		end = max(end, runEnd(r))
	}
	return end
}

// uncovered calls gone for every maximal part of [start, end) that no run covers.
func (g segment) uncovered(start, end int, gone func(from, to int)) {
	gaps(g.runs(), start, end, gone)
}

// gaps calls gone for every maximal part of [start, end) that none of the runs covers. It looks at each run once, before
// the first call.
func gaps(runs []run, start, end int, gone func(from, to int)) {
	var covered [maxSegment / 64]uint64
	for _, r := range runs {
		from, to := max(runStart(r), start), min(runEnd(r), end)
		if from >= to {
			continue
		}
		if from == start && to == end {
			return
		}
		first, last := from/64, (to-1)/64
		head, tail := ^uint64(0)<<(from%64), ^uint64(0)>>(63-(to-1)%64)
		if first == last {
			covered[first] |= head & tail
			continue
		}
		covered[first] |= head
		for i := first + 1; i < last; i++ {
			covered[i] = ^uint64(0)
		}
		covered[last] |= tail
	}
	// skip returns the end of the blocks from at on that are covered, or not.
	skip := func(at int, isCovered bool) int {
		for at < end {
			w := covered[at/64]
			if isCovered {
				w = ^w
			}
			if w >>= at % 64; w != 0 {
				return min(at+bits.TrailingZeros64(w), end)
			}
			at = at/64*64 + 64
		}
		return end
	}
	for at := start; at < end; {
		from := skip(at, true)
		at = skip(from, false)
		if from < at {
			gone(from, at)
		}
	}
}
