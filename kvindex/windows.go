package kvindex

import (
	"maps"
	"slices"
)

// Layers with a sliding window have KV-cache groups of their own. An engine reuses a prefix only if it
// holds all of its blocks of full attention and, for each window, the blocks of the prefix's last tokens
// that the window covers. So a slot records which blocks its groups with windows hold, and lookups
// shorten its match to the longest prefix that the engine can reuse.
//
// Events of these groups omit blocks without naming them, so block hashes cannot be computed from them.
// But an engine uses the same name for a block in all groups: the full-attention event for the same
// block, which arrives before or after, gives its content.

// windows are the blocks that one slot holds in groups with sliding windows.
type windows struct {
	groups []windowGroup
	kinds  []windowKind
	units  map[unit]uint32
	names  map[uint64]windowName
	// pending is the number of names whose block is not known.
	pending int
	// most is the greatest number of units since the maps were made: Go's maps do not shrink.
	most int
	// held maps a block's own hash (that of its last index block, if the engine's block is larger) to a bit set of the
	// groups that hold it. Invariant: a bit is set only if units has an entry of that group under a name of the block.
	held map[Hash]uint64
	// lastNames and lastOwn are the blocks of full attention that were stored last, at most maxLast.
	lastNames []uint64
	lastOwn   []Hash
	// tails holds the ends of prompts that were sent to the target and not confirmed by events, by the own hash of
	// their last block, because an engine keeps the windows at the end of a prompt. At most maxTails.
	tails map[Hash]windowTail
}

// windowGroup is a KV-cache group, and the tokens of its window and of a block of it.
type windowGroup struct {
	id            int32
	window, block int
}

// windowKind is a set of groups with equal windows and blocks, by their bits in held.
type windowKind struct {
	window, block int
	groups        uint64
}

// windowName is the block that a name stands for, 0 while unknown, and the number of its units.
type windowName struct {
	own   Hash
	units uint32
}

// windowTail is the length of a prompt in blocks, and the number of the claim that credits its end.
type windowTail struct {
	blocks int
	claim  uint64
}

// maxWindowGroups is as many as held has bits; maxAlign bounds the common multiple of their blocks, and windows, in tokens.
const maxWindowGroups, maxAlign, maxTails = 64, 1 << 30, 1024

// A name is first searched for among the last maxLast stored ones, with at most maxCompared comparisons per event, and
// then in the maps.
const maxLast, maxCompared = 1 << 14, 1 << 22

// The accounted sizes of a name, of its holding in one group, and of a tail, measured with Go's maps.
const windowBytes, windowUnitBytes, tailBytes = 64, 48, 56

// bytes is the memory without that of tails, which Index.mapBytes counts as they come and go.
func (w *windows) bytes() int {
	return len(w.names)*windowBytes + len(w.units)*windowUnitBytes + cap(w.lastNames)*16
}

// index returns a group's place in groups, -1 for none.
func (w *windows) index(group int32) int {
	if w == nil {
		return -1
	}
	return slices.IndexFunc(w.groups, func(g windowGroup) bool { return g.id == group })
}

func newWindows() *windows {
	return &windows{units: map[unit]uint32{}, names: map[uint64]windowName{}, held: map[Hash]uint64{}, tails: map[Hash]windowTail{}}
}

// emptyWindows drops what a slot's windows hold and keeps the list of groups. The gate is shut.
func (x *Index) emptyWindows(s Slot) {
	if w := x.slots[s].windows; w != nil {
		x.forgetTails(w)
		fresh := newWindows()
		fresh.groups, fresh.kinds = w.groups, w.kinds
		x.setWindows(s, fresh)
	}
}

// dropWindows forgets the groups of a slot that holds nothing.
func (x *Index) dropWindows(s Slot) {
	if x.slots[s].windows != nil {
		x.gate.shut()
		x.emptyWindows(s)
		x.setWindows(s, nil)
		x.gate.open()
	}
}

// setWindows sets the windows of a slot, nil for none. The gate is shut.
func (x *Index) setWindows(s Slot, w *windows) {
	x.slots[s].windows = w
	for w != nil && int(s) >= len(x.windows) {
		x.windows = append(x.windows, nil)
	}
	if int(s) < len(x.windows) {
		x.windows[s] = w
	}
	for n := len(x.windows); n > 0 && x.windows[n-1] == nil; n-- {
		x.windows = x.windows[:n-1]
	}
}

// announce returns the place of the group of a Stored event, which may be new. The gate is shut.
func (x *Index) announce(s Slot, e *Event) (int, error) {
	w := x.slots[s].windows
	i, g := w.index(e.Group), windowGroup{e.Group, min(e.Window, maxAlign), e.BlockSize}
	switch {
	case i < 0 && (e.Window <= 0 || e.BlockSize == 0):
		return 0, ErrPlaceholder
	case e.Window <= 0 || e.BlockSize == 0, i >= 0 && w.groups[i] == g:
		return i, nil
	case !x.fits(e.BlockSize) || e.BlockSize%x.cfg.BlockSize != 0:
		return 0, ErrBlockSize
	case w != nil && (i < 0 && len(w.groups) == maxWindowGroups || lcm(w.align(1, x.cfg.BlockSize), e.BlockSize) > maxAlign):
		return 0, ErrBlockSize
	}
	if w == nil {
		w = newWindows()
		x.setWindows(s, w)
	}
	if i < 0 {
		i = len(w.groups)
		w.groups = append(w.groups, windowGroup{})
	}
	w.groups[i] = g
	w.sort()
	return i, nil
}

// sort fills kinds.
func (w *windows) sort() {
	w.kinds = w.kinds[:0]
	for i, g := range w.groups {
		k := slices.IndexFunc(w.kinds, func(k windowKind) bool { return k.window == g.window && k.block == g.block })
		if k < 0 {
			k = len(w.kinds)
			w.kinds = append(w.kinds, windowKind{window: g.window, block: g.block})
		}
		w.kinds[k].groups |= 1 << i
	}
}

// storeWindow adds blocks of a group with a sliding window.
func (x *Index) storeWindow(s Slot, e *Event) error {
	x.gate.shut()
	place, err := x.announce(s, e)
	x.gate.open()
	if err != nil {
		return err
	}
	w, bit := x.slots[s].windows, uint64(1)<<place
	x.identify(s, e.Hashes)
	own := x.own
	for hashes := range slices.Chunk(e.Hashes, writeStep) {
		x.gate.shut()
		for i, h := range hashes {
			w.add(unit{nonzero(h), e.Group, e.Tier}, 1, Hash(own[i]), bit)
		}
		x.gate.open()
		own = own[len(hashes):]
	}
	w.most = max(w.most, len(w.units))
	x.counters.stored += int64(len(e.Hashes))
	return nil
}

// identify puts the blocks' own hashes into x.own, 0 for a block whose name is not known yet.
func (x *Index) identify(s Slot, hashes []EngineHash) {
	w := x.slots[s].windows
	x.own = slices.Grow(x.own[:0], len(hashes))[:len(hashes)]
	clear(x.own)
	rest, own, resolve := w.lastNames, w.lastOwn, x.resolveEntered
	if rest == nil { // the slot's first event of windows
		resolve = x.resolve
	}
	if n := len(hashes); n > 0 && !slices.Contains(rest, nonzero(hashes[0])) && !slices.Contains(rest, nonzero(hashes[n-1])) {
		rest = nil // the event is of another prompt
	}
	compared := 0
	for i, h := range hashes {
		name := nonzero(h)
		k := slices.Index(rest, name)
		if k >= 0 {
			x.own[i] = uint64(own[k])
			rest, own = rest[k+1:], own[k+1:] // both are in the order of the prompt
			continue
		}
		if compared += len(rest); compared > maxCompared {
			rest = nil
		}
		if n := w.names[name]; n.own != 0 {
			x.own[i] = uint64(n.own)
		} else if p, ok := resolve(s, name); ok {
			x.own[i] = uint64(x.linkTo(p).own)
		}
	}
}

// add adds holdings of a block whose own hash is 0 if it is not known. The gate is shut.
func (w *windows) add(u unit, count uint32, own Hash, bit uint64) {
	n, known := w.names[u.name]
	if !known && own == 0 {
		w.pending++
	}
	n.units += count
	w.names[u.name] = n
	w.units[u] += count
	if n.own != 0 {
		w.held[n.own] |= bit
	} else if own != 0 {
		w.learn(u.name, own, known)
	}
}

// learn records which block the units of this name hold. The gate is shut.
func (w *windows) learn(name uint64, own Hash, pending bool) {
	n := w.names[name]
	n.own = own
	w.names[name] = n
	if pending {
		w.pending--
	}
	for i := range w.groups {
		if w.holds(name, i) {
			w.held[own] |= 1 << i
		}
	}
}

// holds reports whether a group holds the block of this name on any tier.
func (w *windows) holds(name uint64, group int) bool {
	for t := range Tier(NumTiers) {
		if w.units[unit{name, w.groups[group].id, t}] > 0 {
			return true
		}
	}
	return false
}

// learnNames records the names and own hashes of full-attention blocks that a slot with windows stores.
func (x *Index) learnNames(s Slot, names []EngineHash, own []uint64) {
	w := x.slots[s].windows
	w.lastNames, w.lastOwn = w.lastNames[:0], w.lastOwn[:0]
	for i := max(0, len(names)-maxLast); i < len(names); i++ {
		w.lastNames, w.lastOwn = append(w.lastNames, nonzero(names[i])), append(w.lastOwn, Hash(own[i]))
	}
	for len(names) > 0 && w.pending+len(w.tails) > 0 {
		n := min(len(names), writeStep)
		shut := false
		for i, h := range names[:n] {
			name, own := nonzero(h), Hash(own[i])
			_, kept := w.tails[own]
			known, pending := w.names[name]
			if pending = pending && known.own == 0; !kept && !pending {
				continue
			}
			if !shut {
				x.gate.shut()
				shut = true
			}
			if kept {
				x.forgetTail(w, own) // from now on the engine's events say which windows it keeps
			}
			if pending {
				w.learn(name, own, true)
			}
		}
		if shut {
			x.gate.open()
		}
		names, own = names[n:], own[n:]
	}
}

// removeWindow removes blocks of the group at a place of groups.
func (x *Index) removeWindow(s Slot, e *Event, group int) {
	w := x.slots[s].windows
	for hashes := range slices.Chunk(e.Hashes, writeStep) {
		x.gate.shut()
		for _, h := range hashes {
			x.countRemoved(w.remove(unit{nonzero(h), e.Group, e.Tier}, group))
		}
		x.gate.open()
	}
	if w.most > maxTails && len(w.units) < w.most/4 {
		held := packed(w.held)
		w.units, w.names, w.most = packed(w.units), packed(w.names), len(w.units)
		x.gate.shut()
		w.held = held
		x.gate.open()
	}
}

// packed returns a copy of m without its unused capacity, which maps.Clone would keep.
func packed[K comparable, V any](m map[K]V) map[K]V {
	fresh := make(map[K]V, len(m))
	maps.Copy(fresh, m)
	return fresh
}

func (w *windows) remove(u unit, group int) bool {
	k, n := w.units[u], w.names[u.name]
	switch k {
	case 0:
		return false
	case 1:
		delete(w.units, u)
	default:
		w.units[u] = k - 1
	}
	if n.own != 0 && k == 1 && !w.holds(u.name, group) {
		if w.held[n.own] &^= 1 << group; w.held[n.own] == 0 {
			delete(w.held, n.own)
		}
	}
	if n.units--; n.units > 0 {
		w.names[u.name] = n
		return true
	}
	if delete(w.names, u.name); n.own == 0 {
		w.pending--
	}
	return true
}

// shorten limits the slots' matches to most blocks and to what their windows allow, less the engine's unused blocks,
// and drops empty ones.
func (x *Index) shorten(out []Match, hashes []Hash, most, unused int) []Match {
	kept := out[:0]
	for _, h := range out {
		windowed, parts := int(h.Slot) < len(x.windows) && x.windows[h.Slot] != nil, x.partsOf(h.Slot)
		if windowed || unused > 0 {
			held := max(0, min(int(h.Total()+h.Speculative), most)/parts-unused) * parts
			if windowed {
				held = x.windows[h.Slot].longest(hashes[:held], parts, x.cfg.BlockSize)
			}
			left := uint32(held)
			for t := range h.Blocks {
				h.Blocks[t] = min(h.Blocks[t], left)
				left -= h.Blocks[t]
			}
			h.Speculative = min(h.Speculative, left)
			if h.Total()+h.Speculative == 0 {
				continue
			}
		}
		kept = append(kept, h)
	}
	return kept
}

// readable returns how many blocks of a prompt an engine can take from its cache; it always computes the last token.
func (x *Index) readable(tokens int) int { return max(0, tokens-1) / x.cfg.BlockSize }

// partsOf returns the number of index blocks in a block of full attention.
func (x *Index) partsOf(s Slot) int {
	if int(s) < len(x.parts) {
		return int(x.parts[s])
	}
	return 1
}

// longest returns the length, in index blocks, of the longest prefix whose windows are held. hashes are
// the prefix that full attention holds.
func (w *windows) longest(hashes []Hash, parts, size int) int {
	var scans [maxWindowGroups]windowScan
	for i, k := range w.kinds {
		// If a block of full attention is larger, the window's blocks that end within it have no known name.
		scans[i].step = lcm(k.block/size, parts)
		scans[i].need = max(1, (k.window-1+k.block-1)/k.block) * (k.block / size)
		scans[i].from = len(hashes) + 1
	}
	align := w.align(parts, size)
	n := len(hashes) / align * align
	for n > 0 {
		missing := w.missing(hashes[:n], &scans)
		if missing == 0 {
			break
		}
		n = (missing - 1) / align * align // none of the lengths in between has this block
	}
	if n == len(hashes) {
		return n
	}
	for h, t := range w.tails {
		if t.blocks > n && t.blocks <= len(hashes) && hashes[t.blocks-1] == h {
			n = t.blocks
		}
	}
	return n
}

// windowScan is the search for one kind. step is the distance between the ends of its blocks, need the length of the
// window, both in index blocks. Blocks of the prefix that end at or after from are known to be held, so each block is
// looked up once, however often other kinds shorten the prefix.
type windowScan struct{ step, need, from int }

// align returns a number of index blocks of which the length of every reusable prefix is a multiple.
func (w *windows) align(parts, size int) int {
	n := parts
	for _, k := range w.kinds {
		n = lcm(n, k.block/size)
	}
	return n
}

// missing returns the end of the first block that a window of this prefix lacks, 0 if all are there.
func (w *windows) missing(hashes []Hash, scans *[maxWindowGroups]windowScan) int {
	first := 0
	for i, k := range w.kinds {
		c := &scans[i]
		start := max(0, len(hashes)-c.need)/c.step*c.step + c.step
		for end := start; end < c.from && end <= len(hashes) && (first == 0 || end < first); end += c.step {
			if w.held[hashes[end-1]]&k.groups != k.groups {
				first = end
				break
			}
		}
		c.from = start // the next prefix ends before first
	}
	return first
}

func lcm(a, b int) int {
	x, y := a, b
	for y != 0 {
		x, y = y, x%y
	}
	return a / x * b
}

// tailMark is the start and the end of a claim that is for a tail; the claim's segment and generation then hold the hash of the
// tail's block.
const tailMark = 1<<16 - 1

// claimTail credits a slot with the windows at the end of a prompt: its engine keeps those in any case.
func (x *Index) claimTail(s Slot, hashes []Hash, expires int64) {
	w := x.slots[s].windows
	align := w.align(x.partsOf(s), x.cfg.BlockSize)
	n := len(hashes) / align * align
	if n == 0 || len(w.tails) == maxTails {
		return
	}
	own := hashes[n-1]
	if _, ok := w.tails[own]; !ok {
		x.mapBytes += tailBytes
	}
	x.gate.shut()
	w.tails[own] = windowTail{blocks: n, claim: x.claims.next()}
	x.gate.open()
	x.pushClaim(claim{expires: expires, segment: uint32(own), generation: uint32(own >> 32), slot: s, start: tailMark, end: tailMark})
}

// unclaimTail withdraws a claim of claimTail. A later claim of the same tail stays.
func (x *Index) unclaimTail(number uint64, c claim) {
	w, own := x.slots[c.slot].windows, Hash(c.generation)<<32|Hash(c.segment)
	if w == nil {
		return
	}
	if t, ok := w.tails[own]; ok && t.claim == number {
		x.gate.shut()
		x.forgetTail(w, own)
		x.gate.open()
	}
}

// forgetTail drops a tail. The gate is shut.
func (x *Index) forgetTail(w *windows, own Hash) {
	x.mapBytes -= tailBytes
	delete(w.tails, own)
}

// forgetTails drops all tails. The gate is shut.
func (x *Index) forgetTails(w *windows) {
	x.mapBytes -= int64(len(w.tails)) * tailBytes
	clear(w.tails)
}
