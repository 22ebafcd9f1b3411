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
// most of them is cleared first: they cannot be dropped block by block, because their counts would become wrong. Then the
// worker that holds far more than others loses blocks, and at last a clock hand (CLOCK eviction) visits the segments: one
// that was looked up is spared three times, a new one once; any other is dropped for all its holders.
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
	x.shed(target)
	for x.plainBytes() > target && len(x.segments) > 1 {
		x.gate.shut()
		for step := 0; step < writeStep/4 && x.plainBytes() > target && len(x.segments) > 1; step++ {
			x.passHand()
		}
		x.gate.open()
	}
}

// shed drops segments of the worker that holds most, while that is over one and a half times the mean of all workers:
// what one engine claims to hold must not displace the blocks of others. Its oldest segments are visited first, and
// spared as by the clock hand.
func (x *Index) shed(target int64) {
	held, all, most := map[string]int{}, 0, ""
	for i := range x.slots {
		if st := &x.slots[i]; st.inUse {
			n := st.present * headWords // a segment's head takes the memory of some blocks
			for _, blocks := range st.held {
				n += int(blocks)
			}
			all += n
			if held[st.target.Worker] += n; held[st.target.Worker] > held[most] {
				most = st.target.Worker
			}
		}
	}
	excess := held[most] - 3*all/max(2*len(held), 1)
	for i := range len(x.slots) * (sparedLooked + 1) {
		s := Slot(i % len(x.slots))
		if x.slots[s].target.Worker != most {
			continue
		}
		for list := x.slots[s].segments; len(list) > 0 && excess > 0 && x.plainBytes() > target; {
			n := min(len(list), writeStep/4)
			x.gate.shut()
			for _, id := range list[:n] {
				if x.alive(id) && x.seg(id).present(s) {
					excess -= x.visit(id, s, s)
				}
			}
			x.gate.open()
			list = list[n:]
		}
	}
}

// passHand moves the clock hand by one segment.
func (x *Index) passHand() {
	if x.hand++; int(x.hand) >= len(x.segments) {
		x.hand = 1
	}
	if x.alive(x.hand) {
		x.visit(x.hand, 0, MaxSlots)
	}
}

// visit spares a segment once more, or takes its blocks from the slots from first to last. It returns how much it took.
func (x *Index) visit(id uint32, first, last Slot) int {
	if g := x.seg(id); g[3] > 0 {
		g[3]--
		return 0
	}
	n := x.expel(id, first, last)
	x.counters.evicted += int64(n)
	return n + headWords
}

// expel removes the blocks of a segment from the slots from first to last, and returns how many they held.
func (x *Index) expel(id uint32, first, last Slot) (n int) {
	for x.alive(id) {
		g := x.seg(id)
		runs := g.runs()
		i := lowerBound(runs, makeRun(first, 0, 0, 0))
		if i == len(runs) || runSlot(runs[i]) > last {
			return n
		}
		r := runs[i]
		x.forgetHeld(runSlot(r), g)
		n += runEnd(r) - runStart(r)
		x.unhold(id, runSlot(r), runTier(r), runStart(r), runEnd(r))
	}
	return n
}
