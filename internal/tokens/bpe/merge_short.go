package bpe

import "math/bits"

const (
	// smallLimit is the maximum number of symbols that smallMerge merges. Measured: below it a
	// heap is not faster, and almost all words are shorter.
	smallLimit = 63
	smallGroup = 8
	placeBits  = 6
)

// smallMerge merges up to smallLimit symbols. Cache misses and mispredicted branches dominate, so
// the symbols stay in place with a bit set of the remaining ones, the lowest rank is searched in
// all places, used or not, and the two pairs that a merge creates are looked up together.
//
// Invariant: pairs[i] describes the merge of symbol i and the next remaining one: rank, token and i, from the highest bits to the
// lowest; noSmall if they do not merge. The last entry of ids stands for the outside of the word: a token that never merges.
type smallMerge struct {
	pairs [smallLimit + smallGroup]uint64
	ids   [smallLimit + 1]uint32
}

const (
	noSmall   = ^uint64(0)
	outside   = smallLimit
	placeMask = 1<<placeBits - 1
)

// asciiPairs holds the pairs of ASCII characters in the form of smallMerge, without the place.
type asciiPairs [1 << 14]uint64

// pair returns a pair with its place, in the form of smallMerge; rank may be noRank.
func (m *merges) pair(rank uint32, at uint64) uint64 {
	if rank == noRank {
		return noSmall
	}
	return uint64(rank)<<(packedID+placeBits) | uint64(m.result[rank])<<placeBits | at
}

// ascii appends the tokens of an ASCII word.
func (s *smallMerge) ascii(t *Tokenizer, word []byte, dst []uint32) []uint32 {
	last := len(word) - 1
	for i, b := range word[:last] {
		s.ids[i&placeMask] = t.byteID[b]
		s.pairs[i&placeMask] = t.asciiPairs[int(b&0x7f)<<7|int(word[i+1]&0x7f)] | uint64(i)
	}
	s.ids[last] = t.byteID[word[last]]
	return s.run(t.merges, len(word), dst)
}

// parts appends the tokens of the parts of a merger.
func (s *smallMerge) parts(m *merges, parts []uint64, dst []uint32) []uint32 {
	last := len(parts) - 1
	for i, p := range parts[:last] {
		s.ids[i] = uint32(p)
		s.pairs[i] = m.pair(m.rank(uint32(p), uint32(parts[i+1])), uint64(i))
	}
	s.ids[last] = uint32(parts[last])
	return s.run(m, len(parts), dst)
}

// least returns which of the pairs of n symbols must be merged first. The places are read first, so that the compiler
// emits conditional moves.
func (s *smallMerge) least(n int) uint64 {
	a, b, c, d := noSmall, noSmall, noSmall, noSmall
	for i := 0; i < n; i += smallGroup {
		p := (*[smallGroup]uint64)(s.pairs[i:])
		a = min(a, p[0])
		b = min(b, p[1])
		c = min(c, p[2])
		d = min(d, p[3])
		a = min(a, p[4])
		b = min(b, p[5])
		c = min(c, p[6])
		d = min(d, p[7])
	}
	a = min(a, b)
	c = min(c, d)
	return min(a, c)
}

// missed returns all ones if v, from the near table, is at least nearHit, else 0.
func missed(v uint64) uint64 {
	v >>= valueBits
	return uint64(int64(-v) >> 63)
}

// run merges n symbols whose pairs are set, except for the last one.
func (s *smallMerge) run(m *merges, n int, dst []uint32) []uint32 {
	end := (*[smallGroup]uint64)(s.pairs[n-1:])
	for i := range end {
		end[i] = noSmall
	}
	s.ids[outside] = maxID
	alive := uint64(1)<<(n&63) - 1 | 1<<outside
	filter, filterShift := m.filter, m.filterShift&63
	for {
		least := s.least(n)
		if least == noSmall {
			break
		}
		at := least & placeMask
		joined := uint32(least >> placeBits & maxID)
		behind := alive & (^uint64(1) << at)
		gone := bits.TrailingZeros64(behind | 1<<outside)
		behind &= behind - 1
		after := bits.TrailingZeros64(behind | 1<<outside)
		before := uint64(bits.Len64(alive&(1<<at-1))-1) & placeMask // the outside if there is none
		alive ^= 1 << gone
		s.pairs[gone] = noSmall
		s.ids[at] = joined

		left, right := s.ids[before], s.ids[after]
		lp, rp := pairProduct(left, joined), pairProduct(joined, right)
		lv, rv := m.nearest(lp), m.nearest(rp)
		lbit, rbit := lp>>filterShift, rp>>filterShift
		lfar := filter[lbit>>6&uint64(len(filter)-1)] >> (lbit & 63) & 1
		rfar := filter[rbit>>6&uint64(len(filter)-1)] >> (rbit & 63) & 1
		lmiss, rmiss := missed(lv), missed(rv)
		lfar &= lmiss
		rfar &= rmiss
		s.pairs[before] = lv<<placeBits | before | lmiss
		s.pairs[at] = rv<<placeBits | at | rmiss
		if lfar|rfar != 0 {
			if lfar != 0 {
				s.pairs[before] = m.pair(m.farRank(left, joined, lp), before)
			}
			if rfar != 0 {
				s.pairs[at] = m.pair(m.farRank(joined, right, rp), at)
			}
		}
		s.pairs[outside] = noSmall
	}
	for alive != 1<<outside {
		dst = append(dst, s.ids[bits.TrailingZeros64(alive)])
		alive &= alive - 1
	}
	return dst
}
