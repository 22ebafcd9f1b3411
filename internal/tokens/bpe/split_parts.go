package bpe

import (
	"math/bits"
	"unicode/utf8"
)

// adjacency holds the pairs of characters that are adjacent in some token. No merge ever joins two characters that are
// not such a pair, so a word may be cut between them and its parts merged separately: parts are short, are often tokens
// themselves, and repeat where the word does not. This pays because a word of Chinese text is a whole clause, and one
// of a SentencePiece model includes punctuation.
//
// A merge across a cut makes a token that contains the last byte before it and the first one after it. If the token
// contains both characters whole, their pair is in ascii or in filter. If it contains only a part of one, as byte-level tokens may,
// the pair of bytes is in split. False positives of the filter cost only time.
type adjacency struct {
	ascii  [128][2]uint64
	split  [64]uint64 // last byte (0x80-0xbf), first byte (0xc0-0xff)
	filter []uint64
	shift  uint
}

// newAdjacency collects the pairs of all tokens of v. With wideOnly, for byte-level models, it skips
// pairs of an ASCII and a non-ASCII character: such models are never cut next to ASCII.
func newAdjacency(v *vocab, wideOnly bool) *adjacency {
	j := &adjacency{}
	var pairs []uint64
	for id := range v.has {
		b := v.bytes(uint32(id))
		for i := 1; i < len(b); i++ {
			switch left, right := b[i-1], b[i]; {
			case right&0xc0 == 0x80: // within a character
			case left < 0x80 && right < 0x80:
				j.ascii[left][right/64] |= 1 << (right % 64)
			case left < 0x80 || right < 0x80:
				if wideOnly {
					continue
				}
				fallthrough
			default:
				l, n := utf8.DecodeLastRune(b[:i])
				r, m := utf8.DecodeRune(b[i:])
				if l == utf8.RuneError && n <= 1 || r == utf8.RuneError && m <= 1 {
					j.split[left&0x3f] |= 1 << (right & 0x3f)
					continue
				}
				pairs = append(pairs, runePairProduct(l, r))
			}
		}
	}
	// 16 to 32 bits per pair
	filterBits := uint(max(6, bits.Len(uint(len(pairs)*16))))
	j.filter, j.shift = make([]uint64, 1<<(filterBits-6)), 64-filterBits
	for _, p := range pairs {
		p >>= j.shift
		j.filter[p/64] |= 1 << (p % 64)
	}
	return j
}

func runePairProduct(l, r rune) uint64 { return (uint64(l)<<21 | uint64(r)) * mulC }

// joined reports whether a token may contain the two characters next to each other.
func (j *adjacency) joined(l, r rune) bool {
	if l < 0x80 && r < 0x80 {
		return j.ascii[l][r/64]>>(r%64)&1 != 0
	}
	p := runePairProduct(l, r) >> j.shift
	return j.filter[p/64&uint64(len(j.filter)-1)]>>(p%64)&1 != 0
}

// cutNonASCII writes the ends of the parts of text[at:end] to ends, cutting only between non-ASCII
// characters. It returns how many it wrote and where to continue.
func (j *adjacency) cutNonASCII(text []byte, at, end int, ends []uint32) (n, next int) {
	last := rune(0) // 0: ASCII, or the start
	for at < end && n < len(ends) {
		r, size := rune(text[at]), 3
		switch {
		case r < 0x80:
			last = 0
			at++
			continue
		case r < 0xe0 && at+1 < len(text):
			r, size = r&0x1f<<6|rune(text[at+1]&0x3f), 2
		case r < 0xf0 && at+2 < len(text):
			r = r&0xf<<12 | rune(text[at+1]&0x3f)<<6 | rune(text[at+2]&0x3f)
		default:
			r, size = utf8.DecodeRune(text[at:])
		}
		if last != 0 {
			// No branch here: whether two characters are joined is hard to predict.
			p := runePairProduct(last, r) >> j.shift
			joined := j.filter[p/64&uint64(len(j.filter)-1)]>>(p%64) | j.split[text[at-1]&0x3f]>>(text[at]&0x3f)
			ends[n] = uint32(at)
			n += int(^joined & 1)
		}
		last = r
		at += size
	}
	if n < len(ends) {
		ends[n] = uint32(end)
		return n + 1, end
	}
	return n, int(ends[n-1])
}

// adjacencySplit is the splitter of a SentencePiece model. It cuts words into parts that no token crosses.
type adjacencySplit struct {
	*adjacency
	each bool // words also end before each space, see spaceSplit
}

func (p adjacencySplit) split(s string, at int, ends []uint32) (int, int) {
	n := 0
	for i := at; i < len(s) && n < len(ends); {
		j := i
		var last, r rune
		for ; j < len(s); last = r {
			size := 1
			if r = rune(s[j]); r >= 0x80 {
				r, size = utf8.DecodeRuneInString(s[j:])
			}
			if j > i && (!p.joined(last, r) || p.each && r == ' ') {
				break
			}
			j += size
		}
		ends[n] = uint32(j)
		n++
		i, at = j, j
	}
	return n, at
}
