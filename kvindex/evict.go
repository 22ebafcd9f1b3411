package kvindex

// bytes returns the index's memory: records, tables, lists of the slots, aliases, pages and windows
// (estimated from Go's maps), and the queue of speculative credit.
func (x *Index) bytes() int64 { return x.plainBytes() + x.mapBytes }

func (x *Index) plainBytes() int64 {
	return x.arena.used + x.starts.bytes + x.names.bytes + int64(cap(x.segments))*8 + int64(cap(x.freed))*4 +
		x.postings + int64(len(x.claims.ring))*32
}

// mapBytes estimates the memory of the slot's aliases, pages and windows.
func (st *slotState) mapBytes() int64 {
	n := 0
	if st.aliases != nil {
		n += len(st.aliases.units) * aliasBytes
	}
	if st.pages != nil {
		n += len(st.pages.byName) * pageBytes
	}
	if st.windows != nil {
		n += st.windows.bytes()
	}
	return int64(n)
}

// How many times the clock hand spares a segment.
const (
	sparedNew    = 1
	sparedLooked = 3
)

// evict keeps the index within its byte budget. If aliases, pages and windows take more than half of it, the slot with
// most of them is cleared first: they cannot be dropped block by block, because their counts would become wrong. Then a
// clock hand (CLOCK eviction) visits the segments: one that was looked up is spared three times, a new one once; any
// other is dropped for all its holders.
func (x *Index) evict() {
	limit := x.cfg.MaxBytes
	if limit == 0 || x.bytes() <= limit {
		return
	}
	for x.mapBytes > limit/2 {
		most, at := int64(0), Slot(0)
		for i := range x.slots {
			if n := x.slots[i].mapBytes(); n > most {
				most, at = n, Slot(i)
			}
		}
		for _, n := range x.slots[at].held {
			x.counters.evicted += n
		}
		if most == 0 {
			break
		}
		x.clear(at)
	}
	// a little below the limit, so that the next event does not start eviction again
	target := limit - limit/64 - x.mapBytes
	for x.plainBytes() > target && len(x.segments) > 1 {
		x.gate.shut()
		for step := 0; step < writeStep/4 && x.plainBytes() > target && len(x.segments) > 1; step++ {
			x.passHand()
		}
		x.gate.open()
	}
}

// passHand moves the clock hand by one segment.
func (x *Index) passHand() {
	x.hand++
	if int(x.hand) >= len(x.segments) {
		x.hand = 1
	}
	id := x.hand
	if !x.alive(id) {
		return
	}
	g := x.seg(id)
	if g[3] > 0 {
		g[3]--
		return
	}
	for x.alive(id) && x.seg(id).numRuns() > 0 {
		g := x.seg(id)
		r := g.runs()[0]
		x.forgetHeld(runSlot(r), g)
		x.counters.evicted += int64(runEnd(r) - runStart(r))
		x.unhold(id, runSlot(r), runTier(r), runStart(r), runEnd(r))
	}
}
