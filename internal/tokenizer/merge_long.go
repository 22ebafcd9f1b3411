package tokenizer

import "slices"

// hugeWord is the bytes of a word above which only one is merged at a time in the
// process: merging takes some 30 times a word's size. No text that people write
// has such a word.
const hugeWord = 256 << 10

// huge is held while such a word is merged.
var huge = make(hugeLock, 1)

// emptied is the places above which a queue that is worked off gives its memory back.
const emptied = 1 << 10

// longLimit is the number of symbols from which a heap of all pairs no longer
// fits the processor's caches, and queues by rank are faster.
const longLimit = 1 << 13

// rankQueue holds the places of one pair. Places from head on are still to be
// done; they are sorted when the queue's turn comes.
type rankQueue struct {
	places []uint32
	head   int
	sorted bool
}

// queued is for very many symbols: the places of each rank in a queue, and
// a heap of the ranks that have any. A long word repeats few pairs, so the heap
// is small and time is near linear. Merging a pair never makes the same pair
// again, so a queue does not grow while it is worked off.
func (w *merger) queued(m *merges, dst []uint32, wanted *watch) []uint32 {
	parts := w.parts
	n := len(parts)
	queues := roomFor(parts, wanted)
	if queues == nil {
		return dst
	}
	next, prev := make([]int32, n), make([]int32, n)
	var ranks []uint64 // heap of the ranks with places left
	push := func(rank uint32, at int32) {
		q := queues[rank]
		if q == nil {
			q = &rankQueue{}
			queues[rank] = q
		}
		if q.head == len(q.places) {
			q.places, q.head, q.sorted = q.places[:0], 0, true
			ranks = append(ranks, uint64(rank))
			rise(ranks)
		} else if q.places[len(q.places)-1] > uint32(at) {
			q.sorted = false
		}
		if n := len(q.places); n == cap(q.places) {
			q.places = slices.Grow(q.places, n+1) // doubling leaves less garbage than append
		}
		q.places = append(q.places, uint32(at))
	}
	for i, p := range parts {
		if i%lookEvery == 0 && wanted.look() {
			return dst
		}
		next[i], prev[i] = int32(i+1), int32(i-1)
		if p < noPart {
			push(uint32(p>>32), int32(i))
		}
	}
	set := func(at int32) {
		parts[at] |= noPart
		if j := next[at]; int(j) < n {
			if r := m.rank(uint32(parts[at]), uint32(parts[j])); r != noRank {
				parts[at] = uint64(r)<<32 | uint64(uint32(parts[at]))
				push(r, at)
			}
		}
	}
	merges := 0
	for len(ranks) > 0 {
		rank := uint32(ranks[0])
		q := queues[rank]
		if !q.sorted {
			slices.Sort(q.places[q.head:])
			q.sorted = true
		}
		for q.head < len(q.places) && uint32(ranks[0]) == rank {
			if merges++; merges%mergesEvery == 0 && wanted.look() {
				return dst
			}
			at := int32(q.places[q.head])
			q.head++
			if parts[at]>>32 != uint64(rank) {
				continue
			}
			parts[at] = noPart | uint64(m.result[rank])
			gone := next[at]
			parts[gone] |= noPart
			after := next[gone]
			next[at] = after
			if int(after) < n {
				prev[after] = at
			}
			if p := prev[at]; p >= 0 {
				set(p)
			}
			set(at)
		}
		if q.head == len(q.places) {
			remove(&ranks, uint64(rank))
			if cap(q.places) > emptied {
				*q = rankQueue{}
			}
		}
	}
	for i := 0; i < n; i = int(next[i]) {
		dst = append(dst, uint32(parts[i]))
	}
	return dst
}

// roomFor are empty queues with room for the pairs of the parts: growing them place
// by place would take the memory several times. They are nil if the ids are not wanted
// any more.
func roomFor(parts []uint64, wanted *watch) map[uint32]*rankQueue {
	counts := map[uint32]int{}
	for i, p := range parts {
		if i%lookEvery == 0 && wanted.look() {
			return nil
		}
		if p < noPart {
			counts[uint32(p>>32)]++
		}
	}
	queues := make(map[uint32]*rankQueue, len(counts))
	for rank, n := range counts {
		queues[rank] = &rankQueue{places: make([]uint32, 0, n)}
	}
	return queues
}

// remove takes a value out of a heap. It is the least or near it.
func remove(h *[]uint64, v uint64) {
	i := slices.Index(*h, v)
	last := len(*h) - 1
	(*h)[i] = (*h)[last]
	*h = (*h)[:last]
	if i < last {
		for i > 0 && (*h)[(i-1)/2] > (*h)[i] {
			(*h)[(i-1)/2], (*h)[i] = (*h)[i], (*h)[(i-1)/2]
			i = (i - 1) / 2
		}
		sink(*h, i)
	}
}
