package kvindex

import "slices"

// The reverse map from engine hashes to blocks is one table for all targets: a block is entered
// under the name that the first target to store it used, and most fleets use equal names for
// equal blocks. A name resolves only to a block that the target holds itself. Names that differ,
// repeat, or belong to a further KV-cache group are kept in the target's aliases.

// name enters a block in the table, under its engine hash or, if that has maxEqual entries, under a name of our own.
func (x *Index) name(g segment, name uint64, p place) {
	n := x.entries(name, x.maxEqual)
	if n == x.maxEqual {
		name = nonzero(EngineHash(fold(g.own()[p.offset()]^x.hasher.nameMul, x.hasher.nameKey|1)))
		n = x.entries(name, 1)
	}
	x.put(g, name, p, n > 0)
}

// put sets a block's name and enters it in the table. repeated reports whether that has entries of this name.
func (x *Index) put(g segment, name uint64, p place, repeated bool) {
	if repeated {
		x.repeated++
	}
	x.names.insert(x.hasher.mixName(name), p)
	g.names()[p.offset()] = name
	g.entered()[p.offset()/64] |= 1 << (p.offset() % 64)
}

// leaving is an entry of the name table that is queued for removal.
type leaving struct {
	mixed uint64
	at    place
}

// maxLeaving is the maximum number of queued entries. Engines remove one block per event; with a
// queue, the memory accesses for many removals overlap.
const maxLeaving = 64

// unname clears the name of a block. Its table entry is removed later; until then nameAt detects
// that the block is no longer entered under this name.
func (x *Index) unname(g segment, p place) {
	name := g.names()[p.offset()]
	if name == 0 {
		return
	}
	g.names()[p.offset()] = 0
	if !g.isEntered(p.offset()) {
		g.addDeferred(-1)
		return
	}
	g.entered()[p.offset()/64] &^= 1 << (p.offset() % 64)
	if len(x.leaving) == maxLeaving {
		x.flushNames()
	}
	x.leaving = append(x.leaving, leaving{x.hasher.mixName(name), p})
	if x.repeated > 0 && x.named(name) {
		x.repeated--
	}
}

// flushNames removes the queued entries.
func (x *Index) flushNames() {
	var sum uint64
	for _, l := range x.leaving {
		sum ^= x.names.touch(l.mixed)
	}
	x.touched = sum
	for _, l := range x.leaving {
		x.names.remove(l.mixed, l.at)
	}
	x.leaving = x.leaving[:0]
}

// nameAt returns the name under which the block at a place is entered, 0 if it is not (any more).
func (x *Index) nameAt(p place) uint64 {
	if !x.alive(p.segment()) {
		return 0
	}
	g := x.seg(p.segment())
	if p.offset() >= g.blocks() || !g.isEntered(p.offset()) {
		return 0
	}
	return g.names()[p.offset()]
}

// named reports whether any block is entered under this name.
func (x *Index) named(name uint64) bool { return x.entries(name, 1) > 0 }

// entries counts the blocks that are entered under this name, up to most.
func (x *Index) entries(name uint64, most int) (n int) {
	s, at, tag := x.names.probe(x.hasher.mixName(name))
	for n < most {
		p, after, ok := s.next(at, tag)
		if !ok {
			break
		}
		if x.nameAt(p) == name {
			n++
		}
		at = after
	}
	return n
}

// maxEqual bounds the entries of one name, because each search for the name compares with all of them, and targets choose
// names. Blocks of further contents are entered under a name of our own; their targets hold them by aliases.
const maxEqual = 32

// rename replaces the runs of a block, which has just been entered under a name of our own, by aliases. A target that calls
// another block so keeps its run, which no removal finds.
func (x *Index) rename(g segment, p place, name uint64) {
	offset := p.offset()
	own, canonical := g.own()[offset], g.names()[offset]
	for _, r := range g.runs() {
		s, t := runSlot(r), runTier(r)
		if t >= NumTiers || offset < runStart(r) || offset >= runEnd(r) {
			continue
		}
		st := &x.slots[s]
		before := st.mapBytes()
		a := st.needAliases()
		if n, taken := a.names[name]; taken && n.own != own {
			continue
		}
		a.add(unit{name, st.group, t}, own, canonical)
		key := aliasHeld{own, t}
		a.held[key] = aliasCount{units: a.held[key].units + 1}
		if s != x.applying {
			x.mapBytes += st.mapBytes() - before
		}
	}
}

// add counts a holding of a block by an alias.
func (a *aliases) add(u unit, own, canonical uint64) {
	a.units[u]++
	n := a.names[u.name]
	n.own, n.canonical = own, canonical
	n.units++
	a.names[u.name] = n
}

// aliases are the holdings of one slot that a run alone cannot express: a run means "held once,
// by the block's own name, in the slot's own group".
type aliases struct {
	units map[unit]uint32
	names map[uint64]aliasName
	held  map[aliasHeld]aliasCount
}

// unit is one holding of a block in addition to its run.
type unit struct {
	name  uint64
	group int32
	tier  Tier
}

// aliasName is the block that a name stands for, and the number of its units.
type aliasName struct {
	own, canonical uint64
	units          uint32
}

type aliasHeld struct {
	own  uint64
	tier Tier
}

// aliasCount describes how a block with units is held: by how many units, and whether also by
// its run (plain). Invariant: units > 0.
type aliasCount struct {
	units uint32
	plain bool
}

// aliasBytes is the accounted size of one unit, measured with Go's maps.
const aliasBytes = 160

func (st *slotState) needAliases() *aliases {
	if st.aliases == nil {
		st.aliases = &aliases{units: map[unit]uint32{}, names: map[uint64]aliasName{}, held: map[aliasHeld]aliasCount{}}
	}
	return st.aliases
}

// stand reports whether the name is an alias: only then can it mean another block than the one entered under it, or a
// second holding. For other names the slot's aliases need not be searched.
func (a *aliases) stand(name uint64) bool {
	if a == nil {
		return false
	}
	_, ok := a.names[name]
	return ok
}

func (a *aliases) standAny(names []EngineHash) bool {
	return a != nil && slices.ContainsFunc(names, func(n EngineHash) bool { return a.stand(nonzero(n)) })
}

// count reports whether the name is an alias, or the block is held by more than its run.
func (a *aliases) count(name, own uint64, t Tier) bool {
	if a == nil {
		return false
	}
	_, ok := a.held[aliasHeld{own, t}]
	return ok || a.stand(name)
}

// plainly reports whether the slot holds the block on the tier by a run that stands for the block's own name.
func (x *Index) plainly(s Slot, t Tier, g segment, offset int) bool {
	if !g.holds(s, t, offset) {
		return false
	}
	a := x.slots[s].aliases
	if a == nil {
		return true
	}
	c, ok := a.held[aliasHeld{g.own()[offset], t}]
	return !ok || c.plain
}

// known reports whether the slot holds the block on any tier by a run that stands for the block's own name.
func (x *Index) known(s Slot, g segment, offset int) bool {
	if x.slots[s].aliases == nil {
		return g.holdsAny(s, offset)
	}
	for t := range Tier(NumTiers) {
		if x.plainly(s, t, g, offset) {
			return true
		}
	}
	return false
}

// resolve returns the block that the slot holds, on any tier, under this name.
func (x *Index) resolve(s Slot, name uint64) (place, bool) {
	if p, ok := x.resolveEntered(s, name); ok {
		return p, true
	}
	return x.findDeferred(s, name)
}

// resolveEntered is resolve without the blocks whose names are deferred.
func (x *Index) resolveEntered(s Slot, name uint64) (place, bool) {
	sh, at, tag := x.names.probe(x.hasher.mixName(name))
	sh.prefetch(at)
	for {
		p, after, ok := sh.next(at, tag)
		if !ok {
			break
		}
		at = after
		if x.nameAt(p) == name && x.known(s, x.seg(p.segment()), p.offset()) {
			return p, true
		}
	}
	if a := x.slots[s].aliases; a != nil {
		if n, ok := a.names[name]; ok {
			return x.locate(n.canonical, n.own)
		}
	}
	return 0, false
}

// locate finds a block by its name in the table and its own hash.
func (x *Index) locate(canonical, own uint64) (place, bool) {
	s, at, tag := x.names.probe(x.hasher.mixName(canonical))
	for {
		p, after, ok := s.next(at, tag)
		if !ok {
			return 0, false
		}
		if x.nameAt(p) == canonical && x.seg(p.segment()).own()[p.offset()] == own {
			return p, true
		}
		at = after
	}
}

// storeOne adds one holding of a block to a slot.
func (x *Index) storeOne(s Slot, t Tier, group int32, name uint64, p place) error {
	st := &x.slots[s]
	g := x.seg(p.segment())
	if g.names()[p.offset()] != name || !x.known(s, g, p.offset()) {
		if was, ok := x.resolve(s, name); ok && was != p {
			return ErrHashConflict
		}
	}
	held := g.holds(s, t, p.offset())
	own := g.own()[p.offset()]
	if !held && g.names()[p.offset()] == name && group == st.group {
		x.hold(p.segment(), s, t, p.offset(), p.offset()+1)
		return nil
	}
	x.enter(g, p) // so that locate finds it
	canonical := g.names()[p.offset()]
	plain := canonical == name && group == st.group
	a := st.needAliases()
	key := aliasHeld{own, t}
	c, ok := a.held[key]
	if !ok {
		c.plain = held
	}
	if plain && !c.plain {
		c.plain = true
	} else {
		a.add(unit{name, group, t}, own, canonical)
		c.units++
	}
	a.held[key] = c
	if !held {
		x.hold(p.segment(), s, t, p.offset(), p.offset()+1)
	}
	return nil
}

// removeOne removes one holding of a block from a slot, and reports whether the slot had it.
func (x *Index) removeOne(s Slot, t Tier, group int32, name uint64) bool {
	st := &x.slots[s]
	if x.removeUnit(s, unit{name, group, t}) {
		return true
	}
	if group != st.group {
		return false
	}
	sh, at, tag := x.names.probe(x.hasher.mixName(name))
	sh.prefetch(at)
	for {
		p, after, ok := sh.next(at, tag)
		if !ok {
			break
		}
		at = after
		if x.nameAt(p) == name && x.plainly(s, t, x.seg(p.segment()), p.offset()) {
			x.removePlain(s, t, p)
			return true
		}
	}
	p, ok := x.findDeferred(s, name)
	if ok && x.removeUnit(s, unit{name, group, t}) { // found and renamed
		return true
	}
	if !ok || !x.plainly(s, t, x.seg(p.segment()), p.offset()) {
		return false
	}
	x.removePlain(s, t, p)
	return true
}

// removeUnit removes one holding by an alias, and reports whether the slot had it.
func (x *Index) removeUnit(s Slot, u unit) bool {
	a := x.slots[s].aliases
	if a == nil || a.units[u] == 0 {
		return false
	}
	if x.removeAlias(a, s, u); len(a.units) == 0 {
		x.slots[s].aliases = nil
	}
	return true
}

// removeAlias removes one holding by an alias, which a.units must count, from a slot.
func (x *Index) removeAlias(a *aliases, s Slot, u unit) {
	n := a.names[u.name]
	p, ok := x.locate(n.canonical, n.own)
	if k := a.units[u]; k == 1 {
		delete(a.units, u)
	} else {
		a.units[u] = k - 1
	}
	if n.units--; n.units == 0 {
		delete(a.names, u.name)
	} else {
		a.names[u.name] = n
	}
	key := aliasHeld{n.own, u.tier}
	c, counted := a.held[key]
	if !counted { // evicted in the meantime
		return
	}
	if c.units--; c.units > 0 {
		a.held[key] = c
		return
	}
	delete(a.held, key)
	if !c.plain && ok {
		x.unhold(p.segment(), s, u.tier, p.offset(), p.offset()+1)
	}
}

// removePlain removes the holding that the slot's run stands for. If there are units, the slot still holds the block.
func (x *Index) removePlain(s Slot, t Tier, p place) {
	g := x.seg(p.segment())
	if a := x.slots[s].aliases; a != nil {
		key := aliasHeld{g.own()[p.offset()], t}
		if c, ok := a.held[key]; ok {
			c.plain = false
			a.held[key] = c
			return
		}
	}
	x.unhold(p.segment(), s, t, p.offset(), p.offset()+1)
}

// forgetHeld removes the record of how the slot's aliases held a segment's blocks; eviction calls it before it removes
// the runs. The aliases' units stay, because the engine has not removed these holdings.
func (x *Index) forgetHeld(s Slot, g segment) {
	a := x.slots[s].aliases
	if a == nil {
		return
	}
	for _, h := range g.own() {
		for t := range Tier(NumTiers) {
			delete(a.held, aliasHeld{h, t})
		}
	}
}
