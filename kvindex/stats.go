package kvindex

// Stats are an index's current sizes, and counts since New.
type Stats struct {
	// Blocks is the number of blocks that some target holds or is credited with; HolderBlocks counts each once per
	// target and tier; Segments is the number of stretches they are stored in.
	Blocks       int64 `json:"blocks"`
	HolderBlocks int64 `json:"holder_blocks"`
	Segments     int   `json:"segments"`
	// Bytes is the memory in use, Reserved the memory allocated from the runtime.
	Bytes    int64 `json:"bytes"`
	Reserved int64 `json:"reserved"`
	// Speculative is the number of credited blocks that are not confirmed by events yet.
	Speculative int64         `json:"speculative"`
	Targets     []TargetStats `json:"targets"`

	Stored         int64 `json:"stored"`
	Removed        int64 `json:"removed"`
	UnknownRemoved int64 `json:"unknown_removed"`
	Cleared        int64 `json:"cleared"`
	// Evicted counts holder-blocks dropped for the byte budget, Rebuilt segments that were split
	// because most of their blocks were gone.
	Evicted int64 `json:"evicted"`
	Rebuilt int64 `json:"rebuilt"`
	// Refused counts refused events by reason.
	Refused map[RefusalError]int64 `json:"refused"`
}

// TargetStats are one target's sizes.
type TargetStats struct {
	Target Target `json:"target"`
	Slot   Slot   `json:"slot"`
	Model  string `json:"model"`
	// BlockSize is the engine's block size in tokens, 0 while unknown.
	BlockSize   int             `json:"block_size"`
	Held        [NumTiers]int64 `json:"held"`
	Speculative int64           `json:"speculative"`
	// Aliases counts holdings beyond the plain one: repeated, in a further group, or under a
	// name that differs from the fleet's. Pages counts engine blocks smaller than the index's.
	Aliases int `json:"aliases"`
	Pages   int `json:"pages"`
	// Windows counts blocks in groups with sliding windows.
	Windows int `json:"windows"`
}

// Stats returns sizes and counts. It blocks writers, not lookups.
func (x *Index) Stats() Stats {
	x.lock()
	defer x.unlock()
	s := Stats{
		Blocks:         x.liveBlocks,
		Segments:       len(x.segments) - 1 - len(x.freed),
		Bytes:          x.bytes(),
		Reserved:       x.bytes() - x.arena.used + x.arena.reserved,
		Stored:         x.counters.stored,
		Removed:        x.counters.removed,
		UnknownRemoved: x.counters.unknownRemoved,
		Cleared:        x.counters.cleared,
		Evicted:        x.counters.evicted,
		Rebuilt:        x.counters.rebuilt,
		Refused:        map[RefusalError]int64{},
	}
	for i, n := range x.counters.refused {
		if n > 0 {
			s.Refused[RefusalError(i)] = n
		}
	}
	for i := range x.slots {
		st := &x.slots[i]
		if !st.inUse {
			continue
		}
		t := TargetStats{Target: st.target, Slot: Slot(i), Model: st.model, BlockSize: st.blockSize, Speculative: st.held[speculative]}
		copy(t.Held[:], st.held[:NumTiers])
		if st.aliases != nil {
			t.Aliases = len(st.aliases.units)
		}
		if st.pages != nil {
			t.Pages = len(st.pages.byName)
		}
		if st.windows != nil {
			t.Windows = len(st.windows.names)
		}
		for _, n := range t.Held {
			s.HolderBlocks += n
		}
		s.Speculative += t.Speculative
		s.Targets = append(s.Targets, t)
	}
	return s
}
