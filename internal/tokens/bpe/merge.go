package bpe

// merger is the scratch memory of one merge at a time.
type merger struct {
	// parts are the symbols to merge: the symbol in the lower half, the rank of
	// the pair that it makes with the next one in the upper half.
	parts []uint64
	small smallMerge
	next  []int32
	prev  []int32
	heap  []uint64
}

// maxKept bounds the symbols for which a merger keeps its memory between words.
const maxKept = 1 << 14

// noPart is the upper half of a part whose pair does not merge.
const noPart = noRank << 32

// trim gives back the memory that an unusually long word took.
func (w *merger) trim() {
	if cap(w.parts) > maxKept {
		w.parts, w.next, w.prev, w.heap = nil, nil, nil, nil
	}
}

// run merges the symbols in w.parts, appending what is left to dst: always the
// pair of least rank, the leftmost of equals. The upper halves need not be set. A merge of
// very many symbols ends early, with a part of the ids, once it is stopped.
func (w *merger) run(m *merges, dst []uint32, wanted *watch) []uint32 {
	n := len(w.parts)
	if n == 0 {
		return dst
	}
	if n <= smallLimit {
		return w.small.parts(m, w.parts, dst)
	}
	if n <= longLimit {
		w.rankPairs(m, 0, n)
		return w.heaped(m, dst)
	}
	for from := 0; from < n; from += lookEvery {
		if wanted.look() {
			return dst
		}
		w.rankPairs(m, from, min(n, from+lookEvery))
	}
	return w.queued(m, dst, wanted)
}

// rankPairs sets the upper halves of the parts in [from, to), of which there are some.
func (w *merger) rankPairs(m *merges, from, to int) {
	parts := w.parts
	if to == len(parts) {
		to--
		parts[to] = noPart | uint64(uint32(parts[to]))
	}
	for i := from; i < to; i++ {
		parts[i] = uint64(m.rank(uint32(parts[i]), uint32(parts[i+1])))<<32 | uint64(uint32(parts[i]))
	}
}
