package bpe

// merger is scratch memory for merging; one word at a time uses it.
type merger struct {
	// parts are the symbols to merge: the symbol in the lower half, the rank of its pair with the next one in the upper half.
	parts []uint64
	small smallMerge
	next  []int32
	prev  []int32
	heap  []uint64
}

// maxKept is the maximum number of symbols whose memory is kept between words.
const maxKept = 1 << 14

// noPart is the upper half of a part whose pair does not merge.
const noPart = noRank << 32

// trim releases the memory of an unusually long word.
func (w *merger) trim() {
	if cap(w.parts) > maxKept {
		w.parts, w.next, w.prev, w.heap = nil, nil, nil, nil
	}
}

// run merges the symbols in w.parts and appends the result to dst. It always merges the pair of lowest rank, the leftmost of
// equals. The upper halves need not be set. Once stopped, a merge of very many symbols ends early with some of the ids.
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

// rankPairs sets the upper halves of the parts in [from, to), which must not be empty.
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
