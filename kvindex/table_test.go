package kvindex

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// TestTableAgainstList crowds the entries of one shard around few homes, so that groups overflow
// and removals move entries back, and compares with a plain list.
func TestTableAgainstList(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type entry struct {
			tag uint64
			at  place
		}
		var tab table
		var held []entry
		spread := rapid.SampledFrom([]uint64{1, 1 << 12, 1 << 20, 1<<tagBits - 1}).Draw(t, "spread")
		mixed := func(tag uint64) uint64 { return tag << (shardShift - tagBits) }
		for step := range rapid.IntRange(1, 400).Draw(t, "steps") {
			if grow := rapid.IntRange(0, 99).Draw(t, "grow"); grow < 60 || len(held) == 0 {
				e := entry{rapid.Uint64Range(0, spread).Draw(t, "tag"), placeAt(uint32(step+1), step%7)}
				tab.insert(mixed(e.tag), e.at)
				held = append(held, e)
			} else {
				i := rapid.IntRange(0, len(held)-1).Draw(t, "which")
				tab.remove(mixed(held[i].tag), held[i].at)
				held = slices.Delete(held, i, i+1)
			}
			tab.remove(mixed(rapid.Uint64Range(0, spread).Draw(t, "absent")), placeAt(1<<20, 0))
			s := &tab.shards[0]
			if tab.live != len(held) || s.live != len(held) || tab.bytes != int64(len(s.words))*8 {
				t.Fatalf("%d entries of %d, %d bytes of %d words", tab.live, len(held), tab.bytes, len(s.words))
			}
			for _, tag := range []uint64{0, spread, held0(held, func(e entry) uint64 { return e.tag })} {
				var want, got []place
				for _, e := range held {
					if e.tag == tag {
						want = append(want, e.at)
					}
				}
				s, at, tag := tab.probe(mixed(tag))
				for {
					p, after, ok := s.next(at, tag)
					if !ok {
						break
					}
					got, at = append(got, p), after
				}
				slices.Sort(want)
				slices.Sort(got)
				if !slices.Equal(got, want) {
					t.Fatalf("tag %x: got %v, want %v", tag, got, want)
				}
			}
			checkShard(t, s)
		}
	})
}

func held0[E any](held []E, of func(E) uint64) uint64 {
	if len(held) == 0 {
		return 7
	}
	return of(held[len(held)/2])
}

// checkShard checks the invariant of shard.
func checkShard(t *rapid.T, s *shard) {
	live := 0
	for g := range s.groups {
		for i := range groupSize {
			v := s.words[s.groups+g*groupSize+i]
			mark := s.words[g] >> (8 * i) & 0xff
			if v == 0 && mark != 0 || v != 0 && mark != markOf(v>>placeBits) {
				t.Fatalf("entry %x has mark %x", v, mark)
			}
			if v == 0 {
				continue
			}
			live++
			for k := s.home(v >> placeBits); k != g; k = (k + 1) % s.groups {
				if zeros(s.words[k]) != 0 {
					t.Fatalf("entry of group %d in %d, and group %d is not full", s.home(v>>placeBits), g, k)
				}
			}
		}
	}
	if live != s.live {
		t.Fatalf("got %d entries, counted %d", live, s.live)
	}
}

// Engines choose the names of their blocks. Names that collide in one index do not in an index with another key: who does
// not know the key cannot make a search of one compare with all others.
func TestNamesThatCollideDependOnTheKey(t *testing.T) {
	const bits = 16
	one, other := NewHasher(Key{1}), NewHasher(Key{2})
	again, spread := NewHasher(Key{1}), map[uint64]bool{}
	n := 0
	for name := uint64(1); n < 200; name++ {
		if one.mixName(name)>>(64-bits) != 0 {
			continue
		}
		n++
		spread[other.mixName(name)>>(64-bits)] = true
		if again.mixName(name) != one.mixName(name) {
			t.Fatal("got two mixes of one name with the same key")
		}
	}
	if len(spread) < n*9/10 {
		t.Errorf("got %d places with another key for %d names that share one, want them apart", len(spread), n)
	}
}
