package kvindex

import "slices"

// Most blocks are never asked for by name: the parent of a stored block is
// nearly always the block stored last, and engines free chains block after
// block from their end. So the name of a block that is stored plainly is only
// noted in its segment (but for small events, whose blocks are the likely
// parents), and enters the name table when it may soon be asked for: when a chain
// is left at this block, by storing or by removing, or branches off it. A name that is asked for and neither guessed nor in the table is
// searched for in the segments where the slot holds deferred blocks; a segment
// that was searched maxSearches times enters all of its names. So a block costs
// its slots maxSearches comparisons and one entry at most, whatever the order.
const maxSearches = 8

// deferFrom is the smallest number of fresh blocks of an event whose names are deferred.
const deferFrom = 8

// guesses are the places that a slot's next event is likely to name.
type guesses struct {
	last    place // of the block stored last, likely to be the next parent
	removed place // of the block removed last, whose neighbours are likely to follow
}

// guess tries places that are likely to have this name. They may be gone or taken
// by other blocks; the name tells.
func (x *Index) guess(s Slot, name uint64, places ...place) (place, bool) {
	for _, p := range places {
		if !x.alive(p.segment()) {
			continue
		}
		g := x.seg(p.segment())
		if n := g.names(); p.offset() < len(n) && n[p.offset()] == name && x.known(s, g, p.offset()) {
			return p, true
		}
	}
	return 0, false
}

// before and after are a place's neighbours, which may not exist.
func (p place) before() place { return p - placeAt(0, 1) }
func (p place) after() place  { return p + placeAt(0, 1) }

// enter makes the name table lead to a block.
func (x *Index) enter(g segment, p place) {
	name := g.names()[p.offset()]
	if name == 0 || g.isEntered(p.offset()) {
		return
	}
	g.addDeferred(-1)
	x.name(g, name, p)
}

// leaveAt enters a block at which a slot's events leave a chain: they are likely
// to come back to it.
func (x *Index) leaveAt(s Slot, p place) {
	if !x.alive(p.segment()) {
		return
	}
	if g := x.seg(p.segment()); p.offset() < g.blocks() && x.slots[s].aliases == nil && g.holdsAny(s, p.offset()) {
		x.enter(g, p)
	}
}

// listDeferred notes that a slot holds deferred blocks in a segment.
func (x *Index) listDeferred(st *slotState, s Slot, id uint32) {
	n := len(st.deferred)
	if n > 0 && st.deferred[n-1] == id {
		return
	}
	if n == cap(st.deferred) {
		if n > 16 && n > 2*st.present {
			slices.Sort(st.deferred)
			st.deferred = slices.DeleteFunc(slices.Compact(st.deferred), func(id uint32) bool { return !x.defers(s, id) })
		}
		if len(st.deferred) == cap(st.deferred) {
			grown := make([]uint32, len(st.deferred), n+n/2+4)
			copy(grown, st.deferred)
			x.postings += int64(cap(grown)-cap(st.deferred)) * 4
			st.deferred = grown
		}
	}
	st.deferred = append(st.deferred, id)
}

// defers reports whether a slot may hold deferred blocks in a segment.
func (x *Index) defers(s Slot, id uint32) bool {
	return x.alive(id) && x.seg(id).deferred() > 0 && x.seg(id).present(s)
}

// findDeferred searches the slot's deferred blocks for a name, those in the
// segment listed last first, and enters the block that it finds. Lookups run
// meanwhile, for it may take long and changes nothing that they read; so callers
// that have shut the gate may not be amid a change that lookups must not see.
func (x *Index) findDeferred(s Slot, name uint64) (place, bool) {
	st := &x.slots[s]
	if len(st.deferred) == 0 {
		return 0, false
	}
	if x.gate.isShut() {
		x.gate.open()
		defer x.gate.shut()
	}
	i := len(st.deferred)
	stale := 0
	var found place
	for i > 0 && found == 0 {
		i--
		id := st.deferred[i]
		if !x.defers(s, id) {
			st.deferred[i] = 0
			stale++
			continue
		}
		g := x.seg(id)
		g.addSearch()
		if k := g.indexDeferred(name); k >= 0 && x.known(s, g, k) {
			found = placeAt(id, k)
		}
		switch {
		case g.searches() >= maxSearches:
			x.enterAll(id)
			st.deferred[i] = 0
			stale++
		case found != 0:
			x.enter(g, found)
		}
	}
	if stale > 0 {
		rest := slices.DeleteFunc(st.deferred[i:], func(id uint32) bool { return id == 0 })
		st.deferred = st.deferred[:i+len(rest)]
	}
	return found, found != 0
}

// indexDeferred returns the first deferred block of this name, or -1.
func (g segment) indexDeferred(name uint64) int {
	names := g.names()
	for i, bits := range g.entered() {
		if bits == 1<<64-1 {
			continue
		}
		part := names[min(64*i, len(names)):min(64*i+64, len(names))]
		for k, n := range part {
			if n == name && bits>>k&1 == 0 {
				return 64*i + k
			}
		}
	}
	return -1
}

// enterAll enters all names of a segment.
func (x *Index) enterAll(id uint32) {
	g := x.seg(id)
	for i := range g.names() {
		x.enter(g, placeAt(id, i))
	}
	g[2] &= 1<<48 - 1
}
