package kvindex

import "slices"

// Most blocks are never looked up by name: the parent of a stored block is nearly always the block stored last, and
// engines free chains block by block from their end. So the name of a block is at first only recorded in its segment
// (deferred), except for small events, whose blocks are likely parents. It enters the name table when a lookup by name
// becomes likely: when it is the first block of its event, because some engines free chains from their start; when
// storing or removing leaves a chain at this block, or a chain branches off it; and when it becomes an end of the rest
// of a segment.
//
// So both ends of a chain are in the table, and removing a chain from either end finds each block
// without a search: the first one there, each further one as the neighbour of the one before.
//
// A name that is neither guessed nor in the table is searched for in the segments where the slot holds deferred blocks.
// After maxSearches searches of a segment all of its names are entered. So a block costs its slots at most maxSearches
// comparisons and one entry, whatever the order of events.
const maxSearches = 8

// deferFrom is the smallest number of fresh blocks of an event whose names are deferred.
const deferFrom = 8

// guesses are the places that a slot's next event is likely to refer to.
type guesses struct {
	last    place // the block stored last, likely to be the next parent
	removed place // the block removed last, whose neighbours are likely to follow
}

// guess returns the first of places whose block has this name. A place may have been freed or
// reused for another block; comparing the name detects that.
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

// before and after are adjacent places, which may not exist.
func (p place) before() place { return p - placeAt(0, 1) }
func (p place) after() place  { return p + placeAt(0, 1) }

// enter adds a block to the name table.
func (x *Index) enter(g segment, p place) {
	name := g.names()[p.offset()]
	if name == 0 || g.isEntered(p.offset()) {
		return
	}
	g.addDeferred(-1)
	if x.name(g, name, p); g.names()[p.offset()] != name {
		x.rename(g, p, name)
	}
}

// leaveAt enters the block at which a slot's events leave a chain, because they are likely to return to it.
func (x *Index) leaveAt(s Slot, p place) {
	if !x.alive(p.segment()) {
		return
	}
	if g := x.seg(p.segment()); p.offset() < g.blocks() && g.holdsAny(s, p.offset()) {
		x.enter(g, p)
	}
}

// listDeferred records that a slot holds deferred blocks in a segment.
func (x *Index) listDeferred(st *slotState, s Slot, id uint32) {
	if n := len(st.deferred); n == 0 || st.deferred[n-1] != id {
		st.deferred = x.appendPosting(st.deferred, id, st.present, func(id uint32) bool { return x.defers(s, id) })
	}
}

// defers reports whether a slot may hold deferred blocks in a segment.
func (x *Index) defers(s Slot, id uint32) bool {
	return x.alive(id) && x.seg(id).deferred() > 0 && x.seg(id).present(s)
}

// findDeferred searches the slot's deferred blocks for a name, starting with the segment listed last, and enters the
// block that it finds. It opens a shut gate meanwhile, because it may take long and changes nothing that lookups read.
// So a caller that has shut the gate must not be in the middle of a visible change.
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

// enterAll adds all blocks of a segment to the name table.
func (x *Index) enterAll(id uint32) {
	g := x.seg(id)
	for i := range g.names() {
		x.enter(g, placeAt(id, i))
	}
	g[2] &= 1<<48 - 1
}
