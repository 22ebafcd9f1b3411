package tokenizer

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
// pair of least rank, the leftmost of equals. The upper halves need not be set. A merge
// of very many symbols ends early, with a part of the ids, if these are not wanted any more.
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

// heaped is for many symbols: a linked list of them and a heap of rank and
// position, whose entries are stale when the pair there has changed. It takes
// n log n time, so that a word of any length is safe.
func (w *merger) heaped(m *merges, dst []uint32) []uint32 {
	parts := w.parts
	n := len(parts)
	if cap(w.next) < n {
		w.next, w.prev = make([]int32, 2*n), make([]int32, 2*n)
	}
	next, prev := w.next[:n], w.prev[:n]
	heap := w.heap[:0]
	for i, p := range parts {
		next[i], prev[i] = int32(i+1), int32(i-1)
		if p < noPart {
			heap = append(heap, p>>32<<32|uint64(i))
		}
	}
	for i := len(heap)/2 - 1; i >= 0; i-- {
		sink(heap, i)
	}
	set := func(i int32) {
		parts[i] |= noPart
		if j := next[i]; int(j) < n {
			if r := m.rank(uint32(parts[i]), uint32(parts[j])); r != noRank {
				parts[i] = uint64(r)<<32 | uint64(uint32(parts[i]))
				heap = append(heap, uint64(r)<<32|uint64(i))
				rise(heap)
			}
		}
	}
	for len(heap) > 0 {
		top := heap[0]
		heap[0] = heap[len(heap)-1]
		heap = heap[:len(heap)-1]
		sink(heap, 0)
		at := int32(uint32(top))
		if parts[at]>>32 != top>>32 {
			continue
		}
		parts[at] = noPart | uint64(m.result[top>>32])
		gone := next[at]
		parts[gone] |= noPart
		after := next[gone]
		next[at] = after
		if int(after) < n {
			prev[after] = at
		}
		set(at)
		if p := prev[at]; p >= 0 {
			set(p)
		}
	}
	w.heap = heap
	for i := 0; i < n; i = int(next[i]) {
		dst = append(dst, uint32(parts[i]))
	}
	return dst
}

// sink restores the heap below i.
func sink(h []uint64, i int) {
	for {
		c := 2*i + 1
		if c >= len(h) {
			return
		}
		if c+1 < len(h) && h[c+1] < h[c] {
			c++
		}
		if h[i] <= h[c] {
			return
		}
		h[i], h[c] = h[c], h[i]
		i = c
	}
}

// rise restores the heap above its last entry.
func rise(h []uint64) {
	for i := len(h) - 1; i > 0; {
		p := (i - 1) / 2
		if h[p] <= h[i] {
			return
		}
		h[p], h[i] = h[i], h[p]
		i = p
	}
}
