package tokenizer

import (
	"fmt"
	"math/bits"
)

// noRank says that a pair does not merge. Ranks need 24 bits.
const (
	noRank   = 1<<32 - 1
	maxRanks = 1<<24 - 1
)

// merges answers which pairs of tokens join, in which order, into what.
//
// Invariant: slots is an open-addressing table, a power of two, at most two
// thirds full; a slot is left id (20 bits), right id (20 bits), rank (24 bits),
// and all ones when empty.
type merges struct {
	slots  []uint64
	shift  uint
	result []uint32 // rank -> token
	// filter has a bit for each hash prefix of a pair that merges. Most pairs do
	// not, and this answers for them from a table that stays in the cache.
	filter      []uint64
	filterShift uint
	pairs       [][2]uint32 // rank -> parts, while loading only; noPair if no text reaches it
}

// noPair stands for a pair that no text reaches.
var noPair = [2]uint32{maxID, maxID}

// filterBits is the bits of the filter for each slot.
const filterBits = 8

func newMerges(n int) *merges {
	size := 1 << bits.Len(uint(n*3/2+1))
	shift := uint(64 - bits.Len(uint(size-1)))
	m := &merges{
		slots: make([]uint64, size), shift: shift,
		filter: make([]uint64, max(1, size*filterBits/64)), filterShift: shift - uint(bits.Len(filterBits-1)),
	}
	for i := range m.slots {
		m.slots[i] = ^uint64(0)
	}
	return m
}

// put sets the rank of a pair. Of a pair that is listed twice the later rank
// counts, as in the library.
func (m *merges) put(left, right, rank uint32) {
	key := uint64(left)<<20 | uint64(right)
	at := key * mulC >> m.shift
	for m.slots[at] != ^uint64(0) && m.slots[at]>>24 != key {
		at = (at + 1) & uint64(len(m.slots)-1)
	}
	m.slots[at] = key<<24 | uint64(rank)
	bit := key * mulC >> m.filterShift
	m.filter[bit>>6] |= 1 << (bit & 63)
}

// rank is the order of the pair's merge, noRank if it has none.
func (m *merges) rank(left, right uint32) uint32 {
	key := uint64(left)<<20 | uint64(right)
	h := key * mulC
	if bit := h >> m.filterShift; m.filter[bit>>6&uint64(len(m.filter)-1)]>>(bit&63)&1 == 0 {
		return noRank
	}
	slots := m.slots
	for at := h >> m.shift; ; at++ {
		slot := slots[at&uint64(len(slots)-1)]
		if slot>>24 == key {
			return uint32(slot & (1<<24 - 1))
		}
		if slot == ^uint64(0) {
			return noRank
		}
	}
}

// flatLimit is the number of symbols up to which scanning all ranks for the
// least beats a heap. Measured: they cross between 40 and 60.
const flatLimit = 48

// merger is the scratch memory of one merge at a time.
type merger struct {
	// parts are the symbols to merge: the symbol in the lower half, the rank of
	// the pair that it makes with the next one in the upper half.
	parts []uint64
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
		*w = merger{}
	}
}

// run merges the symbols in w.parts, appending what is left to dst: always the
// pair of least rank, the leftmost of equals. The upper halves need not be set.
func (w *merger) run(m *merges, dst []uint32) []uint32 {
	n := len(w.parts)
	if n == 0 {
		return dst
	}
	w.rankPairs(m)
	switch {
	case n <= flatLimit:
		return flat(m, w.parts, dst)
	case n <= longLimit:
		return w.heaped(m, dst)
	}
	return w.queued(m, dst)
}

// rankPairs sets the upper halves of the parts, of which there are some.
func (w *merger) rankPairs(m *merges) {
	parts, last := w.parts, len(w.parts)-1
	for i := range last {
		parts[i] = uint64(m.rank(uint32(parts[i]), uint32(parts[i+1])))<<32 | uint64(uint32(parts[i]))
	}
	parts[last] = noPart | uint64(uint32(parts[last]))
}

// flat looks at all pairs for each merge. Equal ranks are equal pairs, so that
// comparing whole parts orders by rank and then by place.
func flat(m *merges, parts []uint64, dst []uint32) []uint32 {
	for {
		least := uint64(noPart)
		for _, p := range parts {
			least = min(least, p) // without a branch that cannot be predicted
		}
		if least == noPart {
			break
		}
		at := 0
		for parts[at] != least {
			at++
		}
		joined := m.result[least>>32]
		n := len(parts) - 1
		for i := at + 1; i < n; i++ {
			parts[i] = parts[i+1]
		}
		parts = parts[:n]
		if at > 0 {
			left := uint32(parts[at-1])
			parts[at-1] = uint64(m.rank(left, joined))<<32 | uint64(left)
		}
		parts[at] = noPart | uint64(joined)
		if at+1 < n {
			parts[at] = uint64(m.rank(joined, uint32(parts[at+1])))<<32 | uint64(joined)
		}
	}
	for _, p := range parts {
		dst = append(dst, uint32(p))
	}
	return dst
}

// heaped is flat for many symbols: a linked list of them and a heap of rank and
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

// readMerges reads the list of pairs, "a b" or ["a","b"]. text is that of the
// vocabulary's form; the second part of each pair begins with a subword prefix of
// so many bytes, which the merge drops.
func readMerges(s *scanner, v *vocab, text func(dst, token []byte) ([]byte, bool), prefix int) (*merges, error) {
	var left, both []byte
	var pairs [][2]uint32
	var result []uint32
	part := func(token []byte) ([]byte, uint32, bool, error) {
		from := len(both)
		b, reachable := text(both, token)
		if !reachable {
			if _, ok := v.literal[string(token)]; ok {
				return both, 0, false, nil
			}
			return both, 0, false, fmt.Errorf("merge %d names %q, which is not in the vocabulary", len(result), token)
		}
		id, _, ok := v.find(b[from:])
		if !ok {
			return both, 0, false, fmt.Errorf("merge %d names %q, which is not in the vocabulary", len(result), token)
		}
		return b, id, true, nil
	}
	err := s.array(func() error {
		both = both[:0]
		var ids [2]uint32
		usable := true
		take := func(k int, token []byte) error {
			from := len(both)
			b, id, reachable, err := part(token)
			both, ids[k] = b, id
			usable = usable && reachable
			if k == 1 && prefix > 0 && usable && err == nil {
				both = append(both[:from], both[min(from+prefix, len(both)):]...)
			}
			return err
		}
		if s.peek() == '[' {
			k := 0
			if err := s.array(func() error {
				token, err := s.str()
				if err != nil {
					return err
				}
				if k > 1 {
					return fmt.Errorf("merge %d has more than two parts", len(result))
				}
				k++
				return take(k-1, token)
			}); err != nil {
				return err
			}
			if k != 2 {
				return fmt.Errorf("merge %d has %d parts", len(result), k)
			}
		} else {
			pair, err := s.str()
			if err != nil {
				return err
			}
			cut := -1
			for i, c := range pair {
				if c == ' ' {
					if cut >= 0 {
						return fmt.Errorf("merge %d has more than two parts", len(result))
					}
					cut = i
				}
			}
			if cut < 0 {
				return fmt.Errorf("merge %d has one part", len(result))
			}
			left = append(left[:0], pair[cut+1:]...)
			if err := take(0, pair[:cut]); err != nil {
				return err
			}
			if err := take(1, left); err != nil {
				return err
			}
		}
		if len(result) >= maxRanks {
			return fmt.Errorf("more than %d merges", maxRanks)
		}
		joined := uint32(0)
		if usable {
			id, _, ok := v.find(both)
			if !ok {
				return fmt.Errorf("merge %d makes %q, which is not in the vocabulary", len(result), both)
			}
			joined = id
			pairs = append(pairs, ids)
		} else {
			pairs = append(pairs, noPair)
		}
		result = append(result, joined)
		return nil
	})
	if err != nil {
		return nil, err
	}
	m := newMerges(len(pairs))
	m.result = append([]uint32(nil), result...)
	m.pairs = pairs
	for rank, p := range pairs {
		if p != noPair {
			m.put(p[0], p[1], uint32(rank))
		}
	}
	return m, nil
}
