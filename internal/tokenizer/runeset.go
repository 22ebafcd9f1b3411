package tokenizer

import (
	"slices"
	"sync"
	"unicode/utf8"
)

// runeSet is a set of code points. A set is made once and only read afterwards.
//
// Invariant: ranges are sorted, disjoint and not adjacent; ascii and plane hold
// the same set below U+0080 and U+10000.
type runeSet struct {
	ranges [][2]rune
	ascii  [2]uint64
	plane  *[0x10000 / 64]uint64 // nil if the set has nothing from U+0080 to U+FFFF
}

// newRuneSet makes a set of ranges in any order.
func newRuneSet(ranges [][2]rune) *runeSet {
	s := &runeSet{}
	sorted := slices.Clone(ranges)
	slices.SortFunc(sorted, func(a, b [2]rune) int { return int(a[0]) - int(b[0]) })
	for _, r := range sorted {
		if n := len(s.ranges); n > 0 && r[0] <= s.ranges[n-1][1]+1 {
			s.ranges[n-1][1] = max(s.ranges[n-1][1], r[1])
			continue
		}
		s.ranges = append(s.ranges, r)
	}
	for _, r := range s.ranges {
		for c := r[0]; c <= min(r[1], 0xffff); c++ {
			if c < utf8.RuneSelf {
				s.ascii[c/64] |= 1 << (c % 64)
				continue
			}
			if s.plane == nil {
				s.plane = new([0x10000 / 64]uint64)
			}
			s.plane[c/64] |= 1 << (c % 64)
		}
	}
	return s
}

func (s *runeSet) has(r rune) bool {
	switch {
	case r < utf8.RuneSelf:
		return s.ascii[r/64]>>(r%64)&1 != 0
	case r < 0x10000:
		return s.plane != nil && s.plane[r/64]>>(r%64)&1 != 0
	}
	_, ok := slices.BinarySearchFunc(s.ranges, r, func(have [2]rune, r rune) int {
		switch {
		case have[1] < r:
			return -1
		case have[0] > r:
			return 1
		}
		return 0
	})
	return ok
}

// hasAt reports whether the code point at s[i] is in the set, and its length.
func (s *runeSet) hasAt(text string, i int) (bool, int) {
	c := text[i]
	if c < utf8.RuneSelf {
		return s.ascii[c/64]>>(c%64)&1 != 0, 1
	}
	r, n := utf8.DecodeRuneInString(text[i:])
	return s.has(r), n
}

// inverse is the ranges of all code points that are not in the set.
func (s *runeSet) inverse() [][2]rune {
	var out [][2]rune
	next := rune(0)
	for _, r := range s.ranges {
		if next < r[0] {
			out = append(out, [2]rune{next, r[0] - 1})
		}
		next = r[1] + 1
	}
	if next <= utf8.MaxRune {
		out = append(out, [2]rune{next, utf8.MaxRune})
	}
	return out
}

// shared is the ranges of the code points that are in both sets.
func (s *runeSet) shared(other *runeSet) [][2]rune {
	outside := slices.Concat(s.inverse(), other.inverse())
	return newRuneSet(outside).inverse()
}

var namedSets sync.Map // name -> *runeSet

// namedSet is one of the generated classes.
func namedSet(name string) *runeSet {
	if s, ok := namedSets.Load(name); ok {
		return s.(*runeSet) //nolint:forcetypeassert // the map holds nothing else
	}
	var ranges [][2]rune
	eachRange(classRanges[name], func(from, to rune) { ranges = append(ranges, [2]rune{from, to}) })
	s, _ := namedSets.LoadOrStore(name, newRuneSet(ranges))
	return s.(*runeSet) //nolint:forcetypeassert // the map holds nothing else
}
