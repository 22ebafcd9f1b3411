package kvindex

import (
	"errors"
	"slices"
)

// Apply applies one event to the blocks that a target holds. The error is a RefusalError: the event, or its part from
// the offending block on, was not applied, which can lose matches but never produces a wrong one. Removing a block that
// the target is not known to hold is not an error; Stats counts these. Apply does not retain the event.
func (x *Index) Apply(s Slot, e *Event) error {
	x.lock()
	defer x.unlock()
	return x.countRefused(x.apply(s, e))
}

// ApplyContent is Apply for a Stored event whose blocks are given by hashes of their content
// instead of tokens, one for each block of the index. It serves replays of recorded block
// hashes; Hasher.AppendContents computes the hashes to look up.
func (x *Index) ApplyContent(s Slot, e *Event, contents []uint64) error {
	x.lock()
	defer x.unlock()
	return x.countRefused(x.applyContent(s, e, contents))
}

func (x *Index) applyContent(s Slot, e *Event, contents []uint64) error {
	switch {
	case int(s) >= len(x.slots) || !x.slots[s].inUse:
		return ErrUnknownSlot
	case e.Tier >= NumTiers:
		return ErrTier
	case e.Kind != Stored:
		return ErrKind
	}
	st := &x.slots[s]
	if !st.hasGroup {
		st.group, st.hasGroup = e.Group, true
	}
	if st.blockSize != x.cfg.BlockSize {
		return ErrBlockSize
	}
	if len(contents) != len(e.Hashes) {
		return ErrTokens
	}
	if e.HasParent && slices.Contains(e.Hashes, e.Parent) {
		return ErrCycle
	}
	parent, err := x.parentOf(s, e)
	if err != nil {
		x.evict() // the search may have grown the name table
		return err
	}
	x.own = slices.Grow(x.own[:0], len(contents))[:len(contents)]
	h := parent.own
	for i, c := range contents {
		h = x.hasher.chain(h, c)
		x.own[i] = uint64(h)
	}
	before := st.mapBytes()
	x.applying = s
	err = x.storeChain(s, e.Tier, e.Group, parent, e.Hashes, x.own)
	x.mapBytes, x.applying = x.mapBytes+st.mapBytes()-before, MaxSlots
	x.cutUp()
	x.evict()
	return err
}

func (x *Index) apply(s Slot, e *Event) error {
	if int(s) >= len(x.slots) || !x.slots[s].inUse {
		return ErrUnknownSlot
	}
	if e.Tier >= NumTiers {
		return ErrTier
	}
	switch e.Kind {
	case Stored, Removed:
		var err error
		before := x.slots[s].mapBytes()
		x.applying = s
		if e.Kind == Stored {
			err = x.store(s, e)
		} else {
			x.remove(s, e)
		}
		x.mapBytes, x.applying = x.mapBytes+x.slots[s].mapBytes()-before, MaxSlots
		x.cutUp()
		x.evict() // a removal too may have made names enter the name table
		return err
	case Cleared:
		if e.Lone > 0 && x.slots[s].lone == 0 {
			return nil
		}
		x.counters.cleared++
		x.clearSlowly(s)
		x.dropWindows(s) // the engine may have restarted with others
		return nil
	}
	return ErrKind
}

func (x *Index) store(s Slot, e *Event) error {
	st := &x.slots[s]
	if e.Lone > 0 && !st.hasGroup {
		x.dropWindows(s) // of a snapshot that was made before such a group counted as main attention
	}
	if e.Window > 0 || st.windows.index(e.Group) >= 0 {
		return x.storeWindow(s, e)
	}
	if !st.hasGroup {
		st.group, st.hasGroup = e.Group, true
	}
	if len(e.Hashes) == 0 {
		return nil
	}
	if len(e.Tokens) == 0 {
		return x.storePlaceholders(s, e)
	}
	st.lone = e.Lone
	if st.blockSize == 0 && x.fits(e.BlockSize) {
		x.setBlockSize(s, e.BlockSize)
	}
	if e.BlockSize != st.blockSize || st.blockSize == 0 {
		return ErrBlockSize
	}
	if len(e.Tokens) != len(e.Hashes)*e.BlockSize {
		return ErrTokens
	}
	if len(e.Extra) != 0 && len(e.Extra) != len(e.Hashes) {
		return ErrExtra
	}
	for i, m := range e.Media {
		if m.At < 0 || m.At >= len(e.Tokens) || i > 0 && m.At < e.Media[i-1].At {
			return ErrExtra
		}
	}
	if e.HasParent && slices.Contains(e.Hashes, e.Parent) {
		return ErrCycle
	}
	if st.blockSize < x.cfg.BlockSize {
		return x.storePages(s, e)
	}

	parent, err := x.parentOf(s, e)
	if err != nil {
		return err
	}
	names := x.blockNames(e.Hashes, st.blockSize)
	x.own = slices.Grow(x.own[:0], len(names))[:len(names)]
	h := parent.own
	size, each, media := x.cfg.BlockSize, st.blockSize/x.cfg.BlockSize, e.Media
	for i := range x.own {
		c := x.hasher.content(e.Tokens[i*size : i*size+size])
		if len(e.Extra) != 0 {
			c = x.hasher.withExtra(c, e.Extra[i/each])
		}
		c, media = x.hasher.withMedia(c, media, i*size, i*size+size, 0)
		h = x.hasher.chain(h, c)
		x.own[i] = uint64(h)
	}
	if st.windows != nil {
		x.learnNames(s, names, x.own)
	}
	return x.storeChain(s, e.Tier, e.Group, parent, names, x.own)
}

// link is a known block as the parent of others: its hash and its place. A zero place is the start of a chain.
type link struct {
	own Hash
	at  place
}

// parentOf returns the parent of a Stored event's blocks.
func (x *Index) parentOf(s Slot, e *Event) (link, error) {
	if !e.HasParent {
		return link{own: x.seedOf(&x.slots[s], e.Adapter, e.Salt)}, nil
	}
	name := nonzero(e.Parent)
	st := &x.slots[s]
	if p, ok := x.guess(s, name, st.guesses.last); ok {
		return x.linkTo(p), nil
	}
	if parent, ok := x.linkOf(s, name); ok {
		return parent, nil
	}
	return link{}, ErrUnknownParent
}

func (x *Index) linkTo(p place) link {
	return link{own: Hash(x.seg(p.segment()).own()[p.offset()]), at: p}
}

// linkOf resolves the name of a block that the slot holds.
func (x *Index) linkOf(s Slot, name uint64) (link, bool) {
	p, ok := x.resolve(s, name)
	if !ok {
		return link{}, false
	}
	return x.linkTo(p), true
}

func (x *Index) seedOf(st *slotState, adapter, salt string) Hash {
	if adapter == "" && salt == "" {
		return st.seed
	}
	if adapter != st.adapter || salt != st.salt {
		st.adapter, st.salt = adapter, salt
		st.salted = x.hasher.Seed(st.model, adapter, salt)
	}
	return st.salted
}

// nonzero maps hash 0 to another value, because 0 means "no name".
func nonzero(h EngineHash) uint64 {
	if h == 0 {
		return 0x9e3779b97f4a7c15
	}
	return uint64(h)
}

// blockNames returns a name for every index block of these engine blocks: the engine's hash for
// the last part of an engine block, hashes derived from it for the other parts.
func (x *Index) blockNames(hashes []EngineHash, engineSize int) []EngineHash {
	each := engineSize / x.cfg.BlockSize
	if each <= 1 {
		return hashes
	}
	x.split = x.split[:0]
	for _, h := range hashes {
		for part := 1; part < each; part++ {
			x.split = append(x.split, EngineHash(fold(nonzero(h)^0x589965cc75374cc3, uint64(part)*2+0x1d8e4e27c47d124f)))
		}
		x.split = append(x.split, h)
	}
	return x.split
}

// storeChain makes the slot hold a chain of blocks after parent, in steps between which lookups
// can run. own are the blocks' hashes, names their engine hashes.
func (x *Index) storeChain(s Slot, t Tier, group int32, parent link, names []EngineHash, own []uint64) error {
	st := &x.slots[s]
	if parent.at != st.guesses.last {
		x.leaveAt(s, st.guesses.last)
	}
	for len(own) > 0 {
		n := min(len(own), writeStep)
		x.gate.shut()
		at, err := x.storeStep(s, t, group, parent.at, names[:n], own[:n])
		x.gate.open()
		if err != nil {
			return err
		}
		parent.at, st.guesses.last = at, at
		names, own = names[n:], own[n:]
	}
	return nil
}

// storeStep stores blocks after the place at and returns the last one's place.
func (x *Index) storeStep(s Slot, t Tier, group int32, at place, names []EngineHash, own []uint64) (place, error) {
	for i := 0; i < len(own); {
		id, from := at.segment(), at.offset()+1
		var g segment
		known := false
		if id != 0 {
			g = x.seg(id)
			known = from < g.blocks() && g.own()[from] == own[i]
		}
		if !known {
			if next := x.findStart(own[i]); next != 0 {
				id, from, known = next, 0, true
				g = x.seg(id)
			}
		}
		if known {
			n := 1
			for rest := g.own()[from:]; n < len(rest) && i+n < len(own) && rest[n] == own[i+n]; {
				n++
			}
			if err := x.storeKnown(s, t, group, id, from, names[i:i+n]); err != nil {
				return at, err
			}
			x.counters.stored += int64(n)
			i += n
			// storing may have moved the segment's words, but places stay valid
			at = placeAt(id, from+n-1)
			continue
		}
		n := 1
		for i+n < len(own) && x.findStart(own[i+n]) == 0 {
			n++
		}
		if id, from, n = x.room(id, from, n); from == 0 && at != 0 {
			x.enter(x.seg(at.segment()), at) // a branch
		}
		stored, err := x.storeFresh(s, t, group, id, from, names[i:i+n], own[i:i+n])
		x.counters.stored += int64(stored)
		if err != nil {
			return at, err
		}
		i += n
		at = placeAt(id, from+n-1)
	}
	return at, nil
}

// room returns where to store up to n fresh blocks: the end of the parent's segment if the parent is its last block,
// else a new segment.
func (x *Index) room(id uint32, from, n int) (uint32, int, int) {
	if id != 0 {
		g := x.seg(id)
		// Do not append to a segment that many slots share, so that its few runs stay separate
		// from the long private tail of one slot.
		if from == g.blocks() && from < maxSegment && g.numRuns() <= 8 {
			n = min(n, maxSegment-from)
			if from+n > g.room() {
				x.resize(id, min(from+n+(from+n)/8+1, maxSegment), g.runRoom())
			}
			return id, from, n
		}
	}
	n = min(n, maxSegment)
	return x.newSegment(n, 2), 0, n // a run of the credit and one of the events that confirm it
}

// storeFresh stores blocks that are not in the index yet at the end of a segment.
func (x *Index) storeFresh(s Slot, t Tier, group int32, id uint32, from int, names []EngineHash, own []uint64) (int, error) {
	g := x.seg(id)
	n := len(own)
	g.setBlocks(from + n)
	copy(g.own()[from:], own)
	if from == 0 {
		x.starts.insert(x.hasher.mixName(own[0]), placeAt(id, 0))
	}
	x.liveBlocks += int64(n)
	blockNames := g.names()[from:]
	if st := &x.slots[s]; n >= x.deferFrom && st.group == group && !st.aliases.standAny(names) {
		for i, name := range names {
			blockNames[i] = nonzero(name)
		}
		g.addDeferred(n)
		x.hold(id, s, t, from, from+n)
		x.enter(x.seg(id), placeAt(id, from))
		return n, nil
	}
	stored, renamed := 0, false
	var conflict error
	clear(blockNames)
	for ; stored < n; stored++ {
		if !x.nameFor(s, g, nonzero(names[stored]), placeAt(id, from+stored), from) {
			conflict = ErrHashConflict
			break
		}
		renamed = renamed || blockNames[stored] != nonzero(names[stored])
	}
	if stored == 0 {
		// none of them is held: roll back
		x.liveBlocks -= int64(n)
		g.setBlocks(from)
		if from == 0 {
			x.freeSegment(id)
		}
		return 0, conflict
	}
	if stored < n {
		x.liveBlocks -= int64(n - stored)
		g.setBlocks(from + stored)
	}
	if group == x.slots[s].group && !renamed {
		x.hold(id, s, t, from, from+stored)
		return stored, conflict
	}
	for i := range stored {
		if err := x.storeOne(s, t, group, nonzero(names[i]), placeAt(id, from+i)); err != nil {
			// nameFor has ruled this out; if it happens all the same, no block may stay that no slot holds
			x.reap(id, from+i, from+stored)
			return i, err
		}
	}
	return stored, conflict
}

// nameFor enters a fresh block under a name. It reports false if the slot already holds another block of this name, or
// stored one with this event. from is where the event's blocks start in p's segment.
func (x *Index) nameFor(s Slot, g segment, name uint64, p place, from int) bool {
	if x.slots[s].aliases != nil || x.named(name) {
		if _, taken := x.resolve(s, name); taken {
			return false
		}
		if slices.Contains(g.names()[from:p.offset()], name) {
			return false
		}
	}
	x.name(g, name, p)
	return true
}

// storeKnown makes the slot hold blocks that are already in the index.
func (x *Index) storeKnown(s Slot, t Tier, group int32, id uint32, from int, names []EngineHash) error {
	st := &x.slots[s]
	var n int
	for ; len(names) > 0; names, from = names[n:], from+n {
		g := x.seg(id)
		name, at, to := nonzero(names[0]), placeAt(id, from), from+len(names)
		if g.names()[from] == 0 {
			if n = g.unnamed(from, to); n >= x.deferFrom && group == st.group && !st.aliases.standAny(names[:n]) {
				x.storeNameless(s, t, id, from, names[:n])
				continue
			}
			if was, taken := x.resolve(s, name); taken && was != at {
				return ErrHashConflict
			}
			g = x.seg(id)
			x.revive(g, from, from+1)
			x.name(g, name, at)
		} else if group == st.group && x.repeated == 0 {
			n = g.lacks(s, t, from, to)
			for blockNames, i := g.names()[from:], 0; i < n; i++ {
				if known := blockNames[i]; known != nonzero(names[i]) || st.aliases.stand(known) {
					n = i
				}
			}
			if n > 0 {
				x.hold(id, s, t, from, from+n)
				continue
			}
		}
		n = 1
		if err := x.storeOne(s, t, group, name, at); err != nil {
			return err
		}
	}
	return nil
}

// unnamed returns the number of consecutive blocks without a name in [from, to), starting at from.
func (g segment) unnamed(from, to int) int {
	blockNames := g.names()[from:to]
	n := 0
	for n < len(blockNames) && blockNames[n] == 0 {
		n++
	}
	return n
}

// storeNameless makes the slot hold blocks in the index that no target has named yet, most of them because they were
// claimed for a request in flight. Their names are deferred like those of fresh blocks.
func (x *Index) storeNameless(s Slot, t Tier, id uint32, from int, names []EngineHash) {
	g := x.seg(id)
	to := from + len(names)
	x.revive(g, from, to)
	blockNames := g.names()[from:to]
	for i, name := range names {
		blockNames[i] = nonzero(name)
	}
	g.addDeferred(len(names))
	x.hold(id, s, t, from, to)
	x.enter(x.seg(id), placeAt(id, from))
}

// revive moves blocks that are about to be held from the dead to the live count.
func (x *Index) revive(g segment, from, to int) {
	if g.dead() > 0 {
		g.uncovered(from, to, func(a, b int) {
			g.addDead(a - b)
			x.liveBlocks += int64(b - a)
		})
	}
}

// storePlaceholders adds a further tier to blocks that an event names without their tokens, as offloading connectors
// do.
func (x *Index) storePlaceholders(s Slot, e *Event) error {
	st := &x.slots[s]
	if st.blockSize == 0 {
		return ErrPlaceholder
	}
	if st.blockSize < x.cfg.BlockSize {
		return x.storePagePlaceholders(s, e)
	}
	var err error
	for _, name := range x.blockNames(e.Hashes, st.blockSize) {
		p, ok := x.resolve(s, nonzero(name))
		if !ok {
			err = ErrPlaceholder
			continue
		}
		x.gate.shut()
		stored := x.storeOne(s, e.Tier, e.Group, nonzero(name), p)
		x.gate.open()
		if stored != nil {
			return stored
		}
		x.counters.stored++
	}
	return err
}

func (x *Index) remove(s Slot, e *Event) {
	st := &x.slots[s]
	if group := st.windows.index(e.Group); group >= 0 {
		x.removeWindow(s, e, group)
		return
	}
	if st.pages != nil {
		for _, h := range e.Hashes {
			x.countRemoved(x.removePage(s, nonzero(h), e.Tier, e.Group))
		}
		return
	}
	names := x.blockNames(e.Hashes, max(st.blockSize, 1))
	for len(names) > 0 {
		n := min(len(names), writeStep)
		x.gate.shut()
		x.removeStep(s, e.Tier, e.Group, names[:n])
		x.gate.open()
		if len(x.leaving) > maxLeaving/2 {
			x.flushNames() // while lookups, which do not read names, can run
		}
		names = names[n:]
	}
}

// removeStep removes blocks by name. Adjacent blocks of one segment, in either direction, are
// removed together and found without the name table.
func (x *Index) removeStep(s Slot, t Tier, group int32, names []EngineHash) {
	st := &x.slots[s]
	for i := 0; i < len(names); {
		name, last, a := nonzero(names[i]), st.guesses.removed, st.aliases
		if group != st.group || x.repeated > 0 || a.stand(name) {
			x.countRemoved(x.removeOne(s, t, group, name))
			i++
			continue
		}
		p, ok := x.guess(s, name, last.before(), last.after(), st.guesses.last)
		if !ok {
			x.leaveAt(s, last.before())
			x.leaveAt(s, last.after())
			p, ok = x.resolve(s, name)
			a = st.aliases // entering may have renamed blocks
		}
		if !ok || !x.seg(p.segment()).holds(s, t, p.offset()) {
			x.countRemoved(false)
			i++
			continue
		}
		id, from := p.segment(), p.offset()
		to := from + 1
		g := x.seg(id)
		if a.count(name, g.own()[from], t) {
			x.countRemoved(x.removeOne(s, t, group, name))
			i++
			continue
		}
		blockNames := g.names()
		runs := g.runs()
		r := runs[firstTouching(runs, s, t, from)]
		n := i + 1
		for from > runStart(r) && n < len(names) && blockNames[from-1] == nonzero(names[n]) && !a.count(blockNames[from-1], g.own()[from-1], t) {
			from--
			n++
		}
		if n == i+1 {
			for to < runEnd(r) && n < len(names) && blockNames[to] == nonzero(names[n]) && !a.count(blockNames[to], g.own()[to], t) {
				to++
				n++
			}
		}
		x.counters.removed += int64(n - i)
		st.guesses.removed = placeAt(id, to-1)
		if from < p.offset() {
			st.guesses.removed = placeAt(id, from)
		}
		x.unhold(id, s, t, from, to)
		i = n
	}
}

// countRefused counts a refusal by its reason, and returns err.
func (x *Index) countRefused(err error) error {
	if reason, ok := errors.AsType[RefusalError](err); ok {
		x.counters.refused[reason]++
	}
	return err
}

func (x *Index) countRemoved(known bool) {
	if known {
		x.counters.removed++
	} else {
		x.counters.unknownRemoved++
	}
}
