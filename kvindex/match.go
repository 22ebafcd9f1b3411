package kvindex

import "sync/atomic"

// Match is the part of a prompt that one target holds, in blocks from its start.
type Match struct {
	Slot Slot
	// Blocks counts blocks per tier. Blocks[Device] are held contiguously on the device;
	// Blocks[Host] is how many blocks the prefix grows by if blocks on the host count too, and
	// so on. A block on several tiers counts for the first of them.
	Blocks [NumTiers]uint32
	// Speculative is how many blocks the prefix grows by if speculative credit counts too:
	// prompts that were sent to the target and are not confirmed by events yet.
	Speculative uint32
}

// Total returns the number of blocks held on any tier, without speculative ones.
func (m *Match) Total() uint32 {
	var n uint32
	for _, b := range m.Blocks {
		n += b
	}
	return n
}

// Matches is the reusable result of lookups. It must not be used concurrently.
type Matches struct {
	// Holders are the targets that hold at least the first block, in ascending order of slots.
	Holders []Match
	// Blocks is how many blocks, counted from the prompt's start, the target that holds most has.
	Blocks int

	stripe uint32
}

// Match computes, for every target that holds the first of these blocks, how many it holds contiguously from the start.
// The result is the state at one moment during the call (Apply's changes become visible in steps of up to 256 blocks).
// It allocates only to grow m, and stops at the first block that no target holds together with all blocks before it, or after
// some 65,000 runs (stretches that a target holds of a segment): targets may hold more than is found then.
func (x *Index) Match(hashes []Hash, m *Matches) {
	x.MatchPrompt(hashes, len(hashes)*x.cfg.BlockSize+1, 0, m)
}

// MatchPrompt is Match for a prompt of this number of tokens. unused is the number of last blocks that an engine computes again
// even if it has them (vLLM with EAGLE: one). The number of tokens matters only then, and for targets with sliding windows:
// engines always compute the last token, so it determines where the reused prefix ends and which windows the target must hold.
func (x *Index) MatchPrompt(hashes []Hash, tokens, unused int, m *Matches) {
	if m.stripe == 0 {
		m.stripe = x.gate.turn.Add(1)
	}
	if !x.gate.enter(m.stripe) {
		x.lock()
		defer x.unlock()
		x.match(hashes, tokens, unused, m)
		return
	}
	defer x.gate.leave(m.stripe) // a panic must not block writers forever
	x.match(hashes, tokens, unused, m)
}

// maxMatchRuns bounds what a lookup reads, to about a millisecond, some if blocks are on two tiers: its last segment is the one
// that reaches this number. If each block is a segment of its own that 1,024 targets hold, 64 blocks are found.
const maxMatchRuns = 1 << 16

func (x *Index) match(hashes []Hash, tokens, unused int, m *Matches) {
	m.Holders, m.Blocks = m.Holders[:0], 0
	if len(hashes) == 0 {
		return
	}
	w := walk{out: m.Holders}
	for at, runs := 0, 0; at < len(hashes) && runs < maxMatchRuns; {
		g, n := x.step(hashes[at:])
		if n == 0 {
			break
		}
		runs += g.numRuns()
		if atomic.LoadUint64(&g[3]) != sparedLooked {
			atomic.StoreUint64(&g[3], sparedLooked)
		}
		if at == 0 {
			w.first(g, n)
		} else {
			w.follow(g, uint32(at), n)
		}
		at += n
		if w.active == 0 {
			break
		}
	}
	w.finish()
	if len(x.parts) > 0 {
		w.wholeBlocks(x.parts)
	}
	if len(x.windows) > 0 || unused > 0 {
		w.out = x.shorten(w.out, hashes, x.readable(tokens), unused)
	}
	m.Holders = w.out
	if !w.tiered && len(x.parts) == 0 && len(x.windows) == 0 && unused == 0 {
		m.Blocks = w.longest
		return
	}
	for i := range w.out {
		m.Blocks = max(m.Blocks, int(w.out[i].Total()+w.out[i].Speculative))
	}
}

// step returns the segment that starts with the first hash, and how many of the hashes it
// contains. Hashes are chained, so equal hashes at an offset imply that all before them are
// equal: step compares the last one and, if it differs, does a binary search.
func (x *Index) step(hashes []Hash) (segment, int) {
	s, at, tag := x.starts.probe(x.hasher.mixName(uint64(hashes[0])))
	for {
		p, after, ok := s.next(at, tag)
		if !ok {
			return nil, 0
		}
		g := x.seg(p.segment())
		prefetch(&g[0], headLines)
		own := g.own()
		n := min(len(own), len(hashes))
		if n > 0 && own[n-1] == uint64(hashes[n-1]) {
			return g, n
		}
		if n > 0 && own[0] == uint64(hashes[0]) {
			lo, hi := 1, n-1 // own[lo-1] is equal, own[hi] differs
			for lo < hi {
				mid := int(uint(lo+hi) >> 1)
				if own[mid] == uint64(hashes[mid]) {
					lo = mid + 1
				} else {
					hi = mid
				}
			}
			return g, lo
		}
		at = after
	}
}

// walk collects holders along a path. As long as all segments have only device runs (flat), only
// Blocks[Device] is maintained. After that, and until finish, each element of Blocks is the length of
// the prefix that is held on its tier or a faster one, and Speculative that with credited blocks.
type walk struct {
	out    []Match
	active int // holders that have all blocks so far, on some tier
	// longest is the largest Blocks[Device] while flat.
	longest int
	tiered  bool
}

func (w *walk) first(g segment, n int) {
	runs := g.runs()
	if cap(w.out) < len(runs) {
		w.out = make([]Match, 0, len(runs)+len(runs)/2)
	}
	out := w.out[:len(runs)]
	k, full, longest := 0, 0, uint32(0)
	for _, r := range runs {
		if r&notFromStart != 0 {
			if runTier(r) != 0 {
				w.firstTiered(g, n)
				return
			}
			// A device run that starts later adds nothing to a prefix on the device: runs of one
			// slot and tier do not touch, so the block before it is missing.
			continue
		}
		if k >= len(out) {
			break // cannot happen; eliminates a bounds check
		}
		e := min(uint32(r)&(1<<startShift-1), uint32(n))
		if e == uint32(n) {
			full++
		}
		longest = max(longest, e)
		o := &out[k] // field by field: the compiler builds a literal elsewhere and copies it
		o.Slot = runSlot(r)
		o.Blocks[Device] = e
		o.Blocks[Host] = 0
		o.Blocks[Disk] = 0
		o.Blocks[External] = 0
		o.Speculative = 0
		k++
	}
	w.out, w.active, w.longest = out[:k], full, int(longest)
}

func (w *walk) firstTiered(g segment, n int) {
	w.tiered = true
	for runs := g.runs(); len(runs) > 0; {
		k, level := cover(runs, n)
		if level[numLevels-1] > 0 {
			h := Match{Slot: runSlot(runs[0]), Speculative: level[NumTiers]}
			copy(h.Blocks[:], level[:NumTiers])
			w.out = append(w.out, h)
			if int(level[numLevels-1]) == n {
				w.active++
			}
		}
		runs = runs[k:]
	}
}

// cover returns how many of the runs belong to the first one's slot. For each tier it also returns how far, at most n,
// the slot's blocks on this and faster tiers reach from the segment's start. It looks at each run once: an engine can
// make thousands of one segment, with blocks that alternate between tiers.
func cover(runs []run, n int) (count int, level [numLevels]uint32) {
	var next, last [numLevels]int // the runs of a tier that were not looked at: they are sorted by their start
	for count < len(runs) && runs[count]>>slotShift == runs[0]>>slotShift {
		t := runTier(runs[count])
		if last[t] == 0 {
			next[t] = count
		}
		count++
		last[t] = count
	}
	end := 0
	for t := range level {
		for grown := true; grown && end < n; {
			grown = false
			for u := range t + 1 {
				for ; next[u] < last[u] && runStart(runs[next[u]]) <= end && end < n; next[u]++ {
					end, grown = max(end, runEnd(runs[next[u]])), true
				}
			}
		}
		level[t] = uint32(min(end, n))
	}
	return count, level
}

// follow extends the holders by a segment that contains n blocks of the path after at.
func (w *walk) follow(g segment, at uint32, n int) {
	runs := g.runs()
	w.active = 0
	low := 0 // holders before this one are done
	for i := 0; i < len(runs); {
		r := runs[i]
		slot := runSlot(r)
		single := runTier(r) == 0 && (i+1 == len(runs) || runSlot(runs[i+1]) != slot)
		lo, hi := low, len(w.out)
		for lo < hi && w.out[lo].Slot < slot { // mostly the first one is it: the same slots hold the segment before
			mid := int(uint(lo+hi) >> 1)
			if w.out[mid].Slot < slot {
				lo = mid + 1
			} else {
				hi = mid
			}
		}
		low = lo
		if lo == len(w.out) {
			break
		}
		h := &w.out[lo]
		if h.Slot != slot {
			i++
			continue
		}
		low++
		if single && !w.tiered {
			i++
			if h.Blocks[Device] == at && runStart(r) == 0 {
				e := min(runEnd(r), n)
				h.Blocks[Device] += uint32(e)
				w.longest = max(w.longest, int(h.Blocks[Device]))
				if e == n {
					w.active++
				}
			}
			continue
		}
		w.tier()
		k, level := cover(runs[i:], n)
		i += k
		for t := range NumTiers {
			if h.Blocks[t] == at {
				h.Blocks[t] += level[t]
			}
		}
		if h.Speculative == at {
			h.Speculative += level[NumTiers]
		}
		if h.Speculative == at+uint32(n) {
			w.active++
		}
	}
}

// tier switches from the flat form to the tiered one.
func (w *walk) tier() {
	if w.tiered {
		return
	}
	w.tiered = true
	for i := range w.out {
		h := &w.out[i]
		for t := Host; t < NumTiers; t++ {
			h.Blocks[t] = h.Blocks[Device]
		}
		h.Speculative = h.Blocks[Device]
	}
}

// finish turns prefix lengths into growth per tier.
func (w *walk) finish() {
	if !w.tiered {
		return
	}
	for i := range w.out {
		h := &w.out[i]
		h.Speculative -= h.Blocks[NumTiers-1]
		for t := NumTiers - 1; t > 0; t-- {
			h.Blocks[t] -= h.Blocks[t-1]
		}
	}
}

// wholeBlocks rounds down to what the engine can use, for engines whose block is several index
// blocks, and drops holders that have nothing left.
func (w *walk) wholeBlocks(parts []uint32) {
	kept := w.out[:0]
	for _, h := range w.out {
		if int(h.Slot) < len(parts) && parts[h.Slot] > 1 {
			k := parts[h.Slot]
			before, length := uint32(0), uint32(0)
			for t := range h.Blocks {
				length += h.Blocks[t]
				h.Blocks[t] = length/k*k - before
				before = length / k * k
			}
			h.Speculative = (length+h.Speculative)/k*k - before
			if before+h.Speculative == 0 {
				continue
			}
		}
		kept = append(kept, h)
	}
	w.out = kept
}
