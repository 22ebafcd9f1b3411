package bpe

import (
	"bytes"
	"fmt"
	"math/bits"
	"slices"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// noRank is the rank of a pair that does not merge. Ranks need 24 bits.
const (
	noRank   = 1<<32 - 1
	maxRanks = 1<<24 - 1
)

// merges maps pairs of tokens to the rank and the result of their merge.
//
// Invariant: a pair is in near, or in slots with its bit set in filter.
type merges struct {
	// near holds the pairs of low rank, which most lookups hit, in a table that fits the CPU
	// cache; each pair has one possible slot.
	near *[1 << nearBits]uint64
	// slots is an open-addressing table, whose size is a power of two, at most four fifths full.
	// A slot is left id (20 bits), right id (20 bits), rank (24 bits), and all ones when empty.
	slots []uint64
	shift uint
	// filter has a bit for each hash prefix of a pair in slots. Most pairs do not merge; the
	// filter, which also fits the cache, rules them out.
	filter      []uint64
	filterShift uint
	result      []uint32    // rank -> token
	pairs       [][2]uint32 // only while loading; noPair if no text can produce it
	ranks       []uint32    // those of pairs, only while loading; nil: the index
}

// rankAt returns the rank of pairs[i].
func (m *merges) rankAt(i int) uint32 {
	if m.ranks == nil {
		return uint32(i)
	}
	return m.ranks[i]
}

// noPair is a pair that no text can produce.
var noPair = [2]uint32{maxID, maxID}

// filterBits is the number of filter bits per slot.
const filterBits = 8

// A pair is pairBits wide. Multiplying by an odd number is invertible, so the upper bits of the
// product, which select a slot, and the lower ones, the tag, together determine the pair.
const (
	pairBits = 2 * packedID
	pairMask = 1<<pairBits - 1
	pairMul  = mulC & pairMask
)

// A near slot holds tag, rank and token, from the highest bits to the lowest. XOR with an equal
// tag leaves a value below nearHit. The highest bit marks an empty slot.
const (
	nearBits  = 15
	tagBits   = pairBits - nearBits
	tagMask   = 1<<tagBits - 1
	maxNear   = 1<<(63-tagBits-packedID) - 1 // rank
	valueBits = 63 - tagBits
	nearHit   = 1 << valueBits
	nearEmpty = 1 << 63
)

// pairProduct returns the hash of a pair.
func pairProduct(left, right uint32) uint64 {
	return (uint64(left)<<packedID | uint64(right)) * pairMul & pairMask
}

// newMerges builds the tables for the pairs with their ranks (nil: the index); result are the
// tokens that they merge to, by rank. Of a duplicate pair the later rank counts, as in the library. The error wraps
// ErrUnsupported: too many pairs share a place.
func newMerges(pairs [][2]uint32, ranks, result []uint32) (*merges, error) {
	m := &merges{near: new([1 << nearBits]uint64), result: result, pairs: pairs, ranks: ranks}
	for i := range m.near {
		m.near[i] = nearEmpty
	}
	far := 0
	for i, p := range pairs {
		if p != noPair && !m.putNear(p, m.rankAt(i)) {
			far++
		}
	}
	size := 1 << bits.Len(uint(far*5/4+1))
	m.shift = uint(pairBits - bits.Len(uint(size-1)))
	m.filterShift = m.shift - uint(bits.Len(filterBits-1))
	m.slots, m.filter = make([]uint64, size), make([]uint64, max(1, size*filterBits/64))
	for i := range m.slots {
		m.slots[i] = ^uint64(0)
	}
	for i, p := range pairs {
		if p == noPair {
			continue
		}
		rank := m.rankAt(i)
		v := m.nearest(pairProduct(p[0], p[1]))
		if v < nearHit && v>>packedID < uint64(rank) {
			m.near[pairProduct(p[0], p[1])>>tagBits] = nearEmpty // its later rank is too high for near
		}
		if v >= nearHit || v>>packedID < uint64(rank) {
			if !m.putFar(p, rank) {
				return nil, unsupported("merge %d: more than %d pairs of ids share a place of the table", rank, maxProbe)
			}
		}
	}
	return m, nil
}

// maxProbe bounds the slots that a search reads. The product is known, so a file can choose ids whose pairs meet: loading
// them takes quadratic time. Pairs of random ids in a table that is four fifths full need about 600, real ones 170 (gpt-oss).
const maxProbe = 1024

// putNear stores a pair in its near slot, unless a pair of lower rank occupies it.
func (m *merges) putNear(pair [2]uint32, rank uint32) bool {
	p := pairProduct(pair[0], pair[1])
	place := &m.near[p>>tagBits]
	if rank > maxNear || *place != nearEmpty && *place>>valueBits != p&tagMask {
		return false
	}
	*place = p&tagMask<<valueBits | uint64(rank)<<packedID | uint64(m.result[rank])
	return true
}

// nearest looks up the pair with this product in near. It returns the pair's rank and, in the lower bits, its token,
// or a value of at least nearHit if the pair is not there.
func (m *merges) nearest(p uint64) uint64 { return m.near[p>>tagBits] ^ p&tagMask<<valueBits }

// putFar reports false if the pair is maxProbe slots or more from its place.
func (m *merges) putFar(pair [2]uint32, rank uint32) bool {
	p := pairProduct(pair[0], pair[1])
	key := uint64(pair[0])<<packedID | uint64(pair[1])
	at, probed := p>>m.shift, 0
	for m.slots[at] != ^uint64(0) && m.slots[at]>>24 != key {
		if probed++; probed >= maxProbe {
			return false
		}
		at = (at + 1) & uint64(len(m.slots)-1)
	}
	m.slots[at] = key<<24 | uint64(rank)
	bit := p >> m.filterShift
	m.filter[bit>>6] |= 1 << (bit & 63)
	return true
}

// rank returns the rank of the pair's merge, noRank if it does not merge.
func (m *merges) rank(left, right uint32) uint32 {
	p := pairProduct(left, right)
	if v := m.nearest(p); v < nearHit {
		return uint32(v >> packedID)
	}
	if bit := p >> m.filterShift; m.filter[bit>>6&uint64(len(m.filter)-1)]>>(bit&63)&1 == 0 {
		return noRank
	}
	return m.farRank(left, right, p)
}

// farRank is rank for a pair that is not in near.
func (m *merges) farRank(left, right uint32, p uint64) uint32 {
	key := uint64(left)<<packedID | uint64(right)
	slots := m.slots
	for at := p >> m.shift; ; at++ {
		slot := slots[at&uint64(len(slots)-1)]
		if slot>>24 == key {
			return uint32(slot & (1<<24 - 1))
		}
		if slot == ^uint64(0) {
			return noRank
		}
	}
}

// readMerges reads the list of pairs, "a b" or ["a","b"]; text converts a token string as for the vocabulary.
func readMerges(list []byte, v *vocab, text func(dst, token []byte) ([]byte, bool)) (*merges, error) {
	room := bytes.Count(list, []byte(`,`)) + 1
	if bytes.Count(list[:min(len(list), 64)], []byte(`[`)) > 1 {
		room /= 2 // ["a","b"]
	}
	r := &mergeReader{v: v, text: text, pairs: make([][2]uint32, 0, room), result: make([]uint32, 0, room)}
	if err := eachItem(list, r.read); err != nil {
		return nil, err
	}
	return newMerges(r.pairs, nil, slices.Clone(r.result))
}

// mergeReader is the state of readMerges.
type mergeReader struct {
	v      *vocab
	text   func(dst, token []byte) ([]byte, bool)
	pairs  [][2]uint32
	result []uint32

	buf  []byte // the decoded strings of a pair
	both []byte // text of the two parts
	last []byte // text of the preceding pair: lists that have all ways to a token have them in sequence
	// single caches the tokens of single bytes, which are frequent parts.
	single [256]struct {
		id    uint32
		known bool
	}
}

// read reads one pair.
func (r *mergeReader) read(raw []byte) error {
	rank := len(r.result)
	left, right, err := r.parts(raw)
	if err != nil {
		return err
	}
	if rank >= maxRanks {
		return fmt.Errorf("more than %d merges", maxRanks)
	}
	r.both = r.both[:0]
	a, reachable, err := r.token(left)
	if err != nil {
		return err
	}
	b, too, err := r.token(right)
	if err != nil {
		return err
	}
	if !reachable || !too {
		r.pairs, r.result, r.last = append(r.pairs, noPair), append(r.result, 0), r.last[:0]
		return nil
	}
	var joined uint32
	if rank > 0 && bytes.Equal(r.both, r.last) {
		joined = r.result[rank-1]
	} else if joined, _, reachable = r.v.find(r.both); !reachable {
		return fmt.Errorf("merge %d makes %q, which is not in the vocabulary", rank, r.both)
	}
	r.last = append(r.last[:0], r.both...)
	r.pairs, r.result = append(r.pairs, [2]uint32{a, b}), append(r.result, joined)
	return nil
}

// parts reads the two tokens of a pair.
func (r *mergeReader) parts(raw []byte) (left, right []byte, err error) {
	n := 0
	if r.buf = r.buf[:0]; raw[0] == '[' {
		err = eachItem(raw, func(token []byte) (err error) {
			n++
			from := len(r.buf)
			r.buf, err = body.AppendText(r.buf, token)
			left, right = right, r.buf[from:]
			return err
		})
	} else if r.buf, err = body.AppendText(r.buf, raw); err == nil {
		n = bytes.Count(r.buf, []byte(" ")) + 1
		left, right, _ = bytes.Cut(r.buf, []byte(" "))
	}
	if err == nil && n != 2 {
		err = fmt.Errorf("merge %d has %d parts", len(r.result), n)
	}
	return left, right, err
}

// token returns the id of a part and appends its text to both. reachable is false if no text can produce the part.
func (r *mergeReader) token(part []byte) (id uint32, reachable bool, err error) {
	from := len(r.both)
	b, reachable := r.text(r.both, part)
	if !reachable {
		if _, ok := r.v.literal[string(part)]; !ok {
			err = fmt.Errorf("merge %d names %q, which is not in the vocabulary", len(r.result), part)
		}
		return 0, false, err
	}
	r.both = b
	if b = b[from:]; len(b) == 1 && r.single[b[0]].known {
		return r.single[b[0]].id, true, nil
	}
	id, _, ok := r.v.find(b)
	if !ok {
		return 0, true, fmt.Errorf("merge %d names %q, which is not in the vocabulary", len(r.result), part)
	}
	if len(b) == 1 {
		r.single[b[0]].id, r.single[b[0]].known = id, true
	}
	return id, true, nil
}
