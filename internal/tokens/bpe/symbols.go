package bpe

import (
	"slices"
	"unicode/utf8"
)

// symbols appends the tokens that the merging of a word starts from, as parts of a merger.
func (t *Tokenizer) symbols(dst []uint64, word []byte) []uint64 {
	if t.sp != nil {
		return t.sp.symbols(dst, word)
	}
	for i := 0; i < len(word); {
		if word[i] >= 0xc0 {
			if id, n := t.units.at(word, i); n > 0 {
				dst = append(dst, uint64(id))
				i += n
				continue
			}
		}
		dst = append(dst, uint64(t.byteID[word[i]]))
		i++
	}
	return dst
}

func (m *spaceModel) symbols(dst []uint64, word []byte) []uint64 {
	for i := 0; i < len(word); {
		r, n := rune(word[i]), 1
		if r >= 0x80 {
			r, n = utf8.DecodeRune(word[i:])
		}
		id := uint32(maxID)
		if r < 0x10000 {
			id = m.bmp[r]
		} else if a, ok := m.astral[r]; ok {
			id = a
		}
		if id == maxID && m.unk != maxID {
			id = m.unk
		}
		if id != maxID {
			dst = append(dst, uint64(id))
		} else {
			for _, b := range word[i : i+n] {
				dst = append(dst, uint64(m.bytes[b]))
			}
		}
		i += n
	}
	return dst
}

// units are the characters of two and three bytes for which merging may start from their token
// instead of from their bytes, which halves the work for non-Latin scripts.
//
// That is exact for a character if nothing can happen to its bytes before they have become its token. Let R be the highest rank
// of the merges that make the token from the bytes alone. Until they are done, one of them, of rank R or less, is always
// possible. So if every merge that joins a part of the character to something outside has a rank above R, none of those comes
// first; and if every merge that consumes the token has a rank above R, starting with it changes no order. The result depends on
// the neighbours: two bits record whether they may be ASCII or non-ASCII. Text is valid UTF-8, so a non-ASCII neighbour is the
// end of a character (a byte below 0xc0) before this one, and the start of one (0xc0 or above) after it.
type units []uint32 // by code point: flags and token+1, 0 if none

const (
	unitAfterASCII uint32 = 1 << (28 + iota)
	unitAfterWide
	unitBeforeASCII
	unitBeforeWide
	unitID = 1<<28 - 1
)

// at returns the token of the character at word[i], whose first byte is at least 0xc0, and the
// length of the character; length 0 if it must be spelled in bytes.
func (u units) at(word []byte, i int) (uint32, int) {
	if len(u) == 0 {
		return 0, 0
	}
	var r, n int
	switch b := word[i]; {
	case b < 0xe0 && i+1 < len(word):
		r, n = int(b&0x1f)<<6|int(word[i+1]&0x3f), 2
	case b < 0xf0 && i+2 < len(word):
		r, n = int(b&0xf)<<12|int(word[i+1]&0x3f)<<6|int(word[i+2]&0x3f), 3
	default:
		return 0, 0
	}
	unit := u[r]
	need := uint32(0)
	if i > 0 {
		need = unitAfterASCII << (word[i-1] >> 7)
	}
	if i+n < len(word) {
		need |= unitBeforeASCII << (word[i+n] >> 7)
	}
	if unit&need != need || unit == 0 {
		return 0, 0
	}
	return unit&unitID - 1, n
}

// edges holds, for each kind of neighbour and each token, the lowest rank of the merges that consume the token with such a
// neighbour on the other side. Merges that are possible only inside a character do not count.
type edges [4][]uint32

// The kinds of neighbours, in the order of the flags of units.
const (
	afterASCII  = iota // the token is the right part, and the left one ends in ASCII
	afterWide          // or in another character
	beforeASCII        // the token is the left part, and the right one begins with ASCII
	beforeWide         // or with another character
)

func newEdges(v *vocab, m *merges) (e edges) {
	for kind := range e {
		e[kind] = slices.Repeat([]uint32{noRank}, len(v.has))
	}
	for i, p := range m.pairs {
		if p == noPair {
			continue
		}
		rank, left, right := m.rankAt(i), v.bytes(p[0]), v.bytes(p[1])
		switch last := left[len(left)-1]; {
		case last < 0x80:
			e[afterASCII][p[1]] = min(e[afterASCII][p[1]], rank)
		case last < 0xc0:
			e[afterWide][p[1]] = min(e[afterWide][p[1]], rank)
		}
		switch first := right[0]; {
		case first < 0x80:
			e[beforeASCII][p[0]] = min(e[beforeASCII][p[0]], rank)
		case first >= 0xc0:
			e[beforeWide][p[0]] = min(e[beforeWide][p[0]], rank)
		}
	}
	return e
}

// findUnits fills the table for a byte-level model.
func (t *Tokenizer) findUnits() {
	u := make(units, 0x10000)
	e := newEdges(t.vocab, t.merges)
	for id, has := range t.vocab.has {
		b := t.vocab.bytes(uint32(id))
		if !has || len(b) < 2 || len(b) > 3 {
			continue
		}
		if r, ok := onlyRune(b); ok && r >= 0x80 && r != 0xfffd {
			u[r] = t.unit(e, uint32(id), b)
		}
	}
	t.units = u
}

// unit returns the entry of one character, which it finds by merging its bytes.
func (t *Tokenizer) unit(e edges, id uint32, b []byte) uint32 {
	syms := make([]uint32, 0, 3)
	for _, c := range b {
		syms = append(syms, t.byteID[c])
	}
	highest := uint32(0)
	lowest := [len(e)]uint32{noRank, noRank, noRank, noRank}
	for len(syms) > 1 {
		first, last := syms[0], syms[len(syms)-1]
		for kind, token := range [len(e)]uint32{first, first, last, last} {
			lowest[kind] = min(lowest[kind], e[kind][token])
		}
		least, at := uint32(noRank), 0
		for i := range len(syms) - 1 {
			if r := t.merges.rank(syms[i], syms[i+1]); r < least {
				least, at = r, i
			}
		}
		if least == noRank {
			return 0
		}
		highest = max(highest, least)
		syms[at] = t.merges.result[least]
		syms = slices.Delete(syms, at+1, at+2)
	}
	if syms[0] != id {
		return 0
	}
	unit := id + 1
	for kind := range e {
		if e[kind][id] <= highest {
			return 0
		}
		if lowest[kind] > highest {
			unit |= unitAfterASCII << kind
		}
	}
	return unit
}
