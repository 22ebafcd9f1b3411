package kvindex

// place is where a block stands: its offset in a segment above, the segment's
// number (never 0) below.
type place uint64

const (
	segmentBits = 28
	placeBits   = 40
	tagBits     = 64 - placeBits
	// maxSegment is the largest number of blocks in a segment, maxSegments that of
	// segments.
	maxSegment  = 1 << (placeBits - segmentBits)
	maxSegments = 1 << segmentBits

	numShards  = 512
	shardShift = 64 - 9
)

func placeAt(segment uint32, offset int) place { return place(offset)<<segmentBits | place(segment) }

func (p place) segment() uint32 { return uint32(p & (maxSegments - 1)) }
func (p place) offset() int     { return int(p >> segmentBits) }

// table is a multimap from 64-bit names to places. It does not keep the names,
// only 24 bits of their mix beside the place: whoever finds a candidate compares
// the name that the segment holds. The 24 bits also say where an entry belongs,
// so moving entries (growth, removal) never looks into a segment. The shards
// grow one by one, which keeps the pause of a growing table short.
type table struct {
	shards [numShards]shard
	live   int
	bytes  int64
}

// shard is a linear-probing table of any capacity. Invariant: an entry stands
// at or cyclically after its home with no empty entry between.
type shard struct {
	entries []uint64 // tag above, place below; 0 is empty
	live    int
}

func mixName(name uint64) uint64 { return fold(name^0x2d358dccaa6c78a5, 0x8bb84b93962eacc9) }

// probe returns the shard of a mixed name, the index to start from, and the tag
// to look for.
func (t *table) probe(mixed uint64) (s *shard, at int, tag uint64) {
	s = &t.shards[mixed>>shardShift]
	tag = mixed >> (shardShift - tagBits) & (1<<tagBits - 1)
	return s, s.home(tag), tag
}

func (s *shard) home(tag uint64) int { return int(tag * uint64(len(s.entries)) >> tagBits) }

// next returns the first place with this tag at or after at, and the index to
// go on from; ok is false if there is none.
func (s *shard) next(at int, tag uint64) (p place, after int, ok bool) {
	e := s.entries
	for len(e) > 0 {
		if at >= len(e) {
			at = 0
		}
		v := e[at]
		at++
		if v == 0 {
			break
		}
		if v>>placeBits == tag {
			return place(v & (1<<placeBits - 1)), at, true
		}
	}
	return 0, 0, false
}

// insert adds an entry; it does not look for an equal one.
func (t *table) insert(mixed uint64, p place) {
	t.reserve(mixed)
	s, at, tag := t.probe(mixed)
	e := s.entries
	for e[at] != 0 {
		if at++; at == len(e) {
			at = 0
		}
	}
	t.put(s, at, tag, p)
}

func (t *table) put(s *shard, at int, tag uint64, p place) {
	s.entries[at] = tag<<placeBits | uint64(p)
	s.live++
	t.live++
}

// reserve makes room for one entry more.
func (t *table) reserve(mixed uint64) {
	s := &t.shards[mixed>>shardShift]
	if (s.live+1)*5 > len(s.entries)*3 {
		t.resize(s, max(8, s.live*9/4))
	}
}

// touch loads the entry where a search would begin. A loop of these over many
// names waits for memory once instead of once a name.
func (t *table) touch(mixed uint64) uint64 {
	s, at, _ := t.probe(mixed)
	if at < len(s.entries) {
		return s.entries[at]
	}
	return 0
}

// remove deletes the entry of this name and place, if there is one.
func (t *table) remove(mixed uint64, p place) {
	s, at, tag := t.probe(mixed)
	want := tag<<placeBits | uint64(p)
	e := s.entries
	if len(e) == 0 {
		return
	}
	for e[at] != want {
		if e[at] == 0 {
			return
		}
		at++
		if at == len(e) {
			at = 0
		}
	}
	// Close the hole: move up every later entry of the cluster that may stand here.
	hole := at
	for {
		at++
		if at == len(e) {
			at = 0
		}
		v := e[at]
		if v == 0 {
			break
		}
		home := s.home(v >> placeBits)
		if hole <= at && (home <= hole || home > at) || hole > at && home <= hole && home > at {
			e[hole] = v
			hole = at
		}
	}
	e[hole] = 0
	s.live--
	t.live--
	if s.live == 0 || len(e) > 32 && s.live*5 < len(e) {
		t.resize(s, s.live*2)
	}
}

func (t *table) resize(s *shard, size int) {
	old := s.entries
	t.bytes += int64(size-len(old)) * 8
	s.entries = nil
	if size > 0 {
		s.entries = make([]uint64, size)
	}
	e := s.entries
	for _, v := range old {
		if v == 0 {
			continue
		}
		at := s.home(v >> placeBits)
		for e[at] != 0 {
			if at++; at == len(e) {
				at = 0
			}
		}
		e[at] = v
	}
}
