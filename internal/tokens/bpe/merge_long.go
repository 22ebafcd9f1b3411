package bpe

import "slices"

// hugeWord is the size in bytes above which only one word at a time is merged in the process:
// merging takes about 30 times the size of the word. Natural text has no such words.
const hugeWord = 256 << 10

// huge is held while such a word is merged.
var huge = make(hugeLock, 1)

type hugeLock chan struct{}

// take waits for the lock. It returns false if stop is closed first.
func (l hugeLock) take(stop <-chan struct{}) bool {
	select {
	case l <- struct{}{}:
		return true
	case <-stop:
		return false
	}
}

func (l hugeLock) give() { <-l }

// longLimit is the number of symbols from which a heap of all pairs exceeds the CPU caches and queues by rank are faster.
const longLimit = 1 << 13

// emptied is the capacity above which an empty queue releases its memory.
const emptied = 1 << 10

// symbolList is a doubly linked list of the symbols of a long word, in the form of merger.parts.
// A symbol that is removed, or whose pair does not merge, has noPart.
type symbolList struct {
	parts      []uint64
	next, prev []int32
}

// link links all parts.
func (l *symbolList) link() {
	for i := range l.parts {
		l.next[i], l.prev[i] = int32(i+1), int32(i-1)
	}
}

// join replaces the symbol at and the next one by joined.
func (l *symbolList) join(at int32, joined uint32) {
	l.parts[at] = noPart | uint64(joined)
	gone := l.next[at]
	l.parts[gone] |= noPart
	after := l.next[gone]
	l.next[at] = after
	if int(after) < len(l.parts) {
		l.prev[after] = at
	}
}

// pair sets the rank of the symbol at and the next one, and returns it.
func (l *symbolList) pair(m *merges, at int32) uint32 {
	l.parts[at] |= noPart
	after := l.next[at]
	if int(after) >= len(l.parts) {
		return noRank
	}
	rank := m.rank(uint32(l.parts[at]), uint32(l.parts[after]))
	l.parts[at] = uint64(rank)<<32 | uint64(uint32(l.parts[at]))
	return rank
}

func (l *symbolList) appendTo(dst []uint32) []uint32 {
	for i := 0; i < len(l.parts); i = int(l.next[i]) {
		dst = append(dst, uint32(l.parts[i]))
	}
	return dst
}

// heaped merges many symbols with a heap of rank and place. An entry is stale if the pair at its
// place has changed. It takes O(n log n) time, so words of any length are safe.
func (w *merger) heaped(m *merges, dst []uint32) []uint32 {
	n := len(w.parts)
	if cap(w.next) < n {
		w.next, w.prev = make([]int32, 2*n), make([]int32, 2*n)
	}
	list := symbolList{w.parts, w.next[:n], w.prev[:n]}
	list.link()
	heap := w.heap[:0]
	for i, p := range list.parts {
		if p < noPart {
			heap = append(heap, p>>32<<32|uint64(i))
		}
	}
	for i := len(heap)/2 - 1; i >= 0; i-- {
		sink(heap, i)
	}
	set := func(at int32) {
		if rank := list.pair(m, at); rank != noRank {
			heap = append(heap, uint64(rank)<<32|uint64(at))
			rise(heap, len(heap)-1)
		}
	}
	for len(heap) > 0 {
		top := heap[0]
		heap[0] = heap[len(heap)-1]
		heap = heap[:len(heap)-1]
		sink(heap, 0)
		at := int32(uint32(top))
		if list.parts[at]>>32 != top>>32 {
			continue
		}
		list.join(at, m.result[top>>32])
		set(at)
		if p := list.prev[at]; p >= 0 {
			set(p)
		}
	}
	w.heap = heap
	return list.appendTo(dst)
}

// rankQueue holds the places of one pair. Those before head are done; the others are sorted when the queue's rank is reached.
type rankQueue struct {
	places []uint32
	head   int
	sorted bool
}

// rankQueues holds the queues by rank, and a heap of the ranks with places left.
type rankQueues struct {
	byRank map[uint32]*rankQueue
	ranks  []uint64
}

// queued merges very many symbols with a queue of places per rank and a heap of the ranks with places left. A long word
// repeats few pairs, so the heap is small and time is nearly linear. Merging a pair never creates the same pair again,
// so a queue does not grow while it is processed.
func (w *merger) queued(m *merges, dst []uint32, wanted *watch) []uint32 {
	n := len(w.parts)
	list := symbolList{w.parts, make([]int32, n), make([]int32, n)}
	list.link()
	queues := newRankQueues(list.parts, wanted)
	if queues == nil {
		return dst
	}
	set := func(at int32) {
		if rank := list.pair(m, at); rank != noRank {
			queues.push(rank, at)
		}
	}
	merges := 0
	for len(queues.ranks) > 0 {
		rank := uint32(queues.ranks[0])
		q := queues.byRank[rank]
		if !q.sorted {
			slices.Sort(q.places[q.head:])
			q.sorted = true
		}
		for q.head < len(q.places) && uint32(queues.ranks[0]) == rank {
			if merges++; merges%mergesEvery == 0 && wanted.look() {
				return dst
			}
			at := int32(q.places[q.head])
			q.head++
			if list.parts[at]>>32 != uint64(rank) {
				continue
			}
			list.join(at, m.result[rank])
			if p := list.prev[at]; p >= 0 {
				set(p)
			}
			set(at)
		}
		if q.head == len(q.places) {
			queues.drop(rank)
			if cap(q.places) > emptied {
				*q = rankQueue{}
			}
		}
	}
	return list.appendTo(dst)
}

// newRankQueues returns the queues of the pairs of parts. It counts the pairs first: growing the queues place by place
// would take several times the memory. It returns nil if the encoding is stopped.
func newRankQueues(parts []uint64, wanted *watch) *rankQueues {
	counts := map[uint32]int{}
	for i, p := range parts {
		if i%lookEvery == 0 && wanted.look() {
			return nil
		}
		if p < noPart {
			counts[uint32(p>>32)]++
		}
	}
	q := &rankQueues{byRank: make(map[uint32]*rankQueue, len(counts))}
	for rank, n := range counts {
		q.byRank[rank] = &rankQueue{places: make([]uint32, 0, n)}
	}
	for i, p := range parts {
		if i%lookEvery == 0 && wanted.look() {
			return nil
		}
		if p < noPart {
			q.push(uint32(p>>32), int32(i))
		}
	}
	return q
}

// push adds a place to the queue of a rank.
func (s *rankQueues) push(rank uint32, at int32) {
	q := s.byRank[rank]
	if q == nil {
		q = &rankQueue{}
		s.byRank[rank] = q
	}
	if q.head == len(q.places) {
		q.places, q.head, q.sorted = q.places[:0], 0, true
		s.ranks = append(s.ranks, uint64(rank))
		rise(s.ranks, len(s.ranks)-1)
	} else if q.places[len(q.places)-1] > uint32(at) {
		q.sorted = false
	}
	if n := len(q.places); n == cap(q.places) {
		q.places = slices.Grow(q.places, n+1) // doubling leaves less garbage than append's growth
	}
	q.places = append(q.places, uint32(at))
}

// drop removes a rank from the heap. It is the minimum or close to it.
func (s *rankQueues) drop(rank uint32) {
	i, last := slices.Index(s.ranks, uint64(rank)), len(s.ranks)-1
	s.ranks[i] = s.ranks[last]
	s.ranks = s.ranks[:last]
	if i < last {
		rise(s.ranks, i)
		sink(s.ranks, i)
	}
}

// sink restores the heap order downwards from i.
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

// rise restores the heap order upwards from i.
func rise(h []uint64, i int) {
	for i > 0 {
		p := (i - 1) / 2
		if h[p] <= h[i] {
			return
		}
		h[p], h[i] = h[i], h[p]
		i = p
	}
}
