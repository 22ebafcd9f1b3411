package kvindex

import "math/bits"

// place is the position of a block: its offset in a segment in the high bits, the segment's
// number (never 0) in the low bits.
type place uint64

const (
	segmentBits = 28
	placeBits   = 40
	tagBits     = 64 - placeBits
	// maxSegment is the largest number of blocks in a segment, maxSegments the largest number of segments.
	maxSegment  = 1 << (placeBits - segmentBits)
	maxSegments = 1 << segmentBits

	numShards  = 512
	shardShift = 64 - 9
)

func placeAt(segment uint32, offset int) place { return place(offset)<<segmentBits | place(segment) }

func (p place) segment() uint32 { return uint32(p & (maxSegments - 1)) }
func (p place) offset() int     { return int(p >> segmentBits) }

// table is a multimap from 64-bit names to places. It does not store the names, only 24 bits of
// their mix with the place, so the caller must compare a candidate with the name in the segment.
// The 24 bits also determine an entry's home group, so moving entries (growth, removal) never
// reads a segment. The shards grow one by one, which keeps the pause of a growing table short.
type table struct {
	shards [numShards]shard
	live   int
	bytes  int64
}

// shard stores its entries in groups of groupSize; a group is one cache line. In front of the groups there is one word
// per group with one byte, the mark, from each entry's tag. Most searches are for absent names (every fresh block is
// looked up), and the marks answer them in an eighth of the memory, which stays in the processor's caches. Invariant:
// an entry is in its home group, or cyclically after it with only full groups between; only empty places have mark 0.
type shard struct {
	words        []uint64 // marks of the groups, then the entries: tag in the high bits, place in the low bits
	groups, live int
}

const groupSize = 8

// lows and highs are the lowest and the highest bit of every byte.
const (
	lows  = 0x0101010101010101
	highs = 0x8080808080808080
)

// zeros has the highest bit of every byte that is 0, and perhaps of some above the lowest such byte.
func zeros(w uint64) uint64 { return (w - lows) &^ w & highs }

func markOf(tag uint64) uint64 { return max(tag&0xff, 1) }

// cursorStep is the difference between the cursors of adjacent groups. A cursor encodes the
// group being searched and the number of its places already searched.
const cursorStep = 2 * groupSize

// probe returns the shard of a mixed name, the cursor to start at, and the tag to search for.
func (t *table) probe(mixed uint64) (s *shard, at int, tag uint64) {
	s = &t.shards[mixed>>shardShift]
	tag = mixed >> (shardShift - tagBits) & (1<<tagBits - 1)
	return s, s.home(tag) * cursorStep, tag
}

func (s *shard) home(tag uint64) int { return int(tag * uint64(s.groups) >> tagBits) }

// prefetch prefetches the entries at at, for searches that will probably find one; the marks are read meanwhile.
func (s *shard) prefetch(at int) {
	if i := s.groups + at/cursorStep*groupSize; i < len(s.words) {
		prefetch(&s.words[i], 1)
	}
}

// next returns the first place with this tag, starting at a cursor, and the cursor to continue
// with; ok is false if there is none.
func (s *shard) next(at int, tag uint64) (p place, after int, ok bool) {
	if s.groups == 0 {
		return 0, 0, false
	}
	marks := s.words[:s.groups]
	looked := lows * markOf(tag)
	seen := uint64(1)<<(at%cursorStep*8) - 1 // the marks of places already searched
	for g := at / cursorStep; ; g++ {
		if g >= len(marks) {
			g = 0
		}
		m := marks[g]
		for found := zeros(m^looked) &^ seen; found != 0; found &= found - 1 {
			i := bits.TrailingZeros64(found) / 8
			if v := s.words[s.groups+g*groupSize+i]; v>>placeBits == tag && v != 0 {
				return place(v & (1<<placeBits - 1)), g*cursorStep + i + 1, true
			}
		}
		if zeros(m) != 0 {
			return 0, 0, false
		}
		seen = 0
	}
}

// insert adds an entry without checking for an equal one.
func (t *table) insert(mixed uint64, p place) {
	s, _, tag := t.probe(mixed)
	if (s.live+1)*4 > s.groups*groupSize*3 {
		t.resize(s, s.live*2)
	}
	s.put(tag<<placeBits | uint64(p))
	s.live++
	t.live++
}

// put writes an entry to the first empty place, starting at its home group.
func (s *shard) put(entry uint64) {
	tag := entry >> placeBits
	for g := s.home(tag); ; g++ {
		if g >= s.groups {
			g = 0
		}
		if empty := zeros(s.words[g]); empty != 0 {
			s.set(g, bits.TrailingZeros64(empty)/8, entry)
			return
		}
	}
}

func (s *shard) set(group, i int, entry uint64) {
	s.words[group] |= markOf(entry>>placeBits) << (i * 8)
	s.words[s.groups+group*groupSize+i] = entry
}

func (s *shard) unset(group, i int) {
	s.words[group] &^= 0xff << (i * 8)
	s.words[s.groups+group*groupSize+i] = 0
}

// touch loads the words where a search would start. A loop of touches over many names waits for
// memory once instead of once per name.
func (t *table) touch(mixed uint64) uint64 {
	s, at, _ := t.probe(mixed)
	if s.groups == 0 {
		return 0
	}
	g := at / cursorStep
	return s.words[g] ^ s.words[s.groups+g*groupSize]
}

// remove deletes the entry of this name and place, if there is one.
func (t *table) remove(mixed uint64, p place) {
	s, at, tag := t.probe(mixed)
	s.prefetch(at)
	for {
		found, after, ok := s.next(at, tag)
		if !ok {
			return
		}
		at = after
		if found == p {
			break
		}
	}
	s.close(at/cursorStep, at%cursorStep-1)
	s.live--
	t.live--
	if n := s.groups * groupSize; s.live == 0 || n > 32 && s.live*5 < n {
		t.resize(s, s.live*2)
	}
}

// close empties a place. If its group was full, an entry that had overflowed past the group
// moves back into it, and so on.
func (s *shard) close(group, i int) {
	full := zeros(s.words[group]) == 0
	s.unset(group, i)
	for k := group + 1; full; k++ {
		if k >= s.groups {
			k = 0
		}
		if k == group {
			return
		}
		full = zeros(s.words[k]) == 0
		for j := range groupSize {
			v := s.words[s.groups+k*groupSize+j]
			if v == 0 || s.after(s.home(v>>placeBits), k) < s.after(group, k) {
				continue
			}
			s.set(group, i, v)
			s.unset(k, j)
			group, i = k, j
			break
		}
	}
}

// after returns the cyclic distance in groups from g to k.
func (s *shard) after(g, k int) int {
	if k < g {
		return k + s.groups - g
	}
	return k - g
}

// resize changes a shard to at least room places and reinserts its entries.
func (t *table) resize(s *shard, room int) {
	old := s.words[min(s.groups, len(s.words)):]
	groups := (room + groupSize - 1) / groupSize
	if room == 0 && s.groups == 0 {
		groups = 1
	}
	t.bytes -= int64(len(s.words)) * 8
	s.groups, s.words = groups, nil
	if groups > 0 {
		s.words = make([]uint64, groups*(groupSize+1))
	}
	t.bytes += int64(len(s.words)) * 8
	for _, v := range old {
		if v != 0 {
			s.put(v)
		}
	}
}
