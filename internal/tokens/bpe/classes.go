package bpe

import (
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"
)

// class is a set of code point properties that split patterns, normalization and added tokens
// test. The bits above classBits hold the canonical combining class, which is 0 for a starter.
type class uint32

const classBits = 24

const (
	clsL          class = 1 << iota // \p{L}
	clsN                            // \p{N}
	clsM                            // \p{M}
	clsP                            // \p{P}
	clsS                            // \p{S}
	clsWS                           // \s
	clsNL                           // \r \n
	clsUpper                        // [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]
	clsLower                        // [\p{Ll}\p{Lm}\p{Lo}\p{M}]
	clsHan                          // \p{Han}
	clsKana                         // [一-龥぀-ゟ゠-ヿ], DeepSeek's second stage
	clsWord                         // \w of Rust's regex
	clsDigit                        // char::is_numeric of Rust
	clsCompose                      // NFC may change it or, as clsSecond, the code point before it
	clsFirst                        // the first half of a composition
	clsSecond                       // the second half of a composition
	clsDecomposes                   // it has a canonical decomposition
	clsAlpha                        // [A-Za-z]
	clsASCIIP                       // ASCII punctuation and symbols
)

// classIndex and classPages are the two levels of the class table.
var (
	asciiClass [128]class
	classIndex [0x110000 >> 8]uint16
	classPages [][256]class
)

// classNames maps the names in classRanges to their bits.
var classNames = map[string]class{
	"L": clsL, "N": clsN, "M": clsM | clsUpper | clsLower, "P": clsP, "S": clsS, "WS": clsWS,
	"Lu": clsUpper, "Lt": clsUpper, "Ll": clsLower, "Lm": clsUpper | clsLower, "Lo": clsUpper | clsLower,
	"Han": clsHan, "Word": clsWord, "Digit": clsDigit,
}

func init() {
	flat := make([]class, 0x110000)
	for name, bits := range classNames {
		setRanges(flat, classRanges[name], bits)
	}
	for _, r := range [][2]int{{0x4e00, 0x9fa5}, {0x3040, 0x30ff}} {
		for c := r[0]; c <= r[1]; c++ {
			flat[c] |= clsKana
		}
	}
	flat['\r'] |= clsNL
	flat['\n'] |= clsNL
	for c := range 128 {
		if flat[c]&(clsP|clsS) != 0 {
			flat[c] |= clsASCIIP
		}
		if flat[c]&clsL != 0 {
			flat[c] |= clsAlpha
		}
	}
	initNormal(flat)
	copy(asciiClass[:], flat)
	seen := map[[256]class]uint16{}
	for p := range classIndex {
		page := [256]class(flat[p<<8 : p<<8+256])
		at, ok := seen[page]
		if !ok {
			at = uint16(len(classPages))
			classPages = append(classPages, page)
			seen[page] = at
		}
		classIndex[p] = at
	}
}

// setRanges sets bits for "41-5a,61" style ranges.
func setRanges(flat []class, ranges string, bits class) {
	eachRange(ranges, func(from, to rune) {
		for c := from; c <= to; c++ {
			flat[c] |= bits
		}
	})
}

// eachRange calls f for each range of "41-5a,61".
func eachRange(ranges string, f func(from, to rune)) {
	for r := range strings.SplitSeq(ranges, ",") {
		from, to, ok := strings.Cut(r, "-")
		if !ok {
			to = from
		}
		f(mustHex(from), mustHex(to))
	}
}

// mustHex panics on input that the generator did not write.
func mustHex(s string) rune {
	v, err := strconv.ParseUint(s, 16, 21)
	if err != nil {
		panic("tokenizer: generated tables: " + err.Error())
	}
	return rune(v)
}

// runeClass returns the class of a code point.
func runeClass(r rune) class { return classPages[classIndex[r>>8]][r&0xff] }

// classAt returns the class and the length of the code point at s[i].
func classAt(s string, i int) (class, int) {
	if c := s[i]; c < 0x80 {
		return asciiClass[c], 1
	}
	return wideClassAt(s, i)
}

// wideClassAt is classAt for a non-ASCII code point. s must be valid UTF-8.
func wideClassAt(s string, i int) (class, int) {
	switch c := s[i]; {
	case c < 0xe0 && i+1 < len(s):
		r := uint32(c&0x1f)<<6 | uint32(s[i+1]&0x3f)
		return classPages[classIndex[r>>8]][r&0xff], 2
	case c < 0xf0 && i+2 < len(s):
		r := uint32(c&0xf)<<12 | uint32(s[i+1]&0x3f)<<6 | uint32(s[i+2]&0x3f)
		return classPages[classIndex[r>>8]][r&0xff], 3
	}
	r, n := utf8.DecodeRuneInString(s[i:])
	return runeClass(r), n
}

// runeSet is a set of code points. It is immutable.
//
// Invariant: ranges are sorted, disjoint and not adjacent; ascii and plane hold the same set below U+0080 and U+10000.
type runeSet struct {
	ranges [][2]rune
	ascii  [2]uint64
	plane  *[0x10000 / 64]uint64 // nil if the set has nothing from U+0080 to U+FFFF
}

// newRuneSet returns the set of the ranges, which may be in any order.
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

// inverse returns the ranges of all code points that are not in the set.
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

// shared returns the ranges of the code points that are in both sets.
func (s *runeSet) shared(other *runeSet) [][2]rune {
	outside := slices.Concat(s.inverse(), other.inverse())
	return newRuneSet(outside).inverse()
}

// namedSets holds the generated classes that were used. Its users wait for each other; see lazily.
var namedSets = struct {
	sync.Mutex
	sets map[string]*runeSet
}{sets: map[string]*runeSet{}}

// namedSet returns a generated class by name.
func namedSet(name string) *runeSet {
	namedSets.Lock()
	defer namedSets.Unlock()
	s := namedSets.sets[name]
	if s == nil {
		var ranges [][2]rune
		eachRange(classRanges[name], func(from, to rune) { ranges = append(ranges, [2]rune{from, to}) })
		s = newRuneSet(ranges)
		namedSets.sets[name] = s
	}
	return s
}
