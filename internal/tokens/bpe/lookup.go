package bpe

import "encoding/binary"

// The ids of merged words are cached by word length. Words of up to shortSize bytes are in a
// table whose entries take a quarter of a cache line; words of up to hotSize bytes in one whose
// entries take half a line; all other words of up to maxWord bytes, which includes those with
// more than hotIDs ids, in a store. Longer words are never cached, so a hostile prompt cannot
// fill the memory.
const (
	tinyBits = 14
	tinyIDs  = 3
	hotBits  = 14 // two entries share a bucket
	hotSize  = 16
	hotIDs   = 4
	maxWord  = 64
	longText = 1 << 18
)

// tinyWord is the key of a word and its ids, with their number in the upper bits.
type tinyWord struct{ key, ids uint64 }

// packedID is the width in bits of a packed id.
const packedID = 20

func (e *tinyWord) appendTo(dst []uint32) []uint32 {
	ids := e.ids
	for range ids >> (tinyIDs * packedID) {
		dst = append(dst, uint32(ids&maxID))
		ids >>= packedID
	}
	return dst
}

// hotWord is a word of more than shortSize bytes. key is its bytes, zero-padded; size
// distinguishes "a" from "a\x00" and is zero in an empty entry. The ids from the fourth on are in
// rest.
type hotWord struct {
	key  [2]uint64
	size uint8
	n    uint8
	rest uint32
	ids  uint64
}

func (e *hotWord) appendTo(dst []uint32) []uint32 {
	ids := e.ids
	for range min(e.n, tinyIDs) {
		dst = append(dst, uint32(ids&maxID))
		ids >>= packedID
	}
	if e.n > tinyIDs {
		dst = append(dst, e.rest)
	}
	return dst
}

// packed packs up to tinyIDs ids into one integer.
func packed(ids []uint32) (all uint64) {
	for i, id := range ids {
		all |= uint64(id) << (i * packedID)
	}
	return all
}

// headMask keeps the first n bytes of a little-endian word.
var headMask = func() (m [9]uint64) {
	for n := 1; n < 8; n++ {
		m[n] = 1<<(8*n) - 1
	}
	m[8] = ^uint64(0)
	return m
}()

// words appends the ids of the words of s[at:end].
func (enc *encoder) words(dst []uint32, s string, at, end int) []uint32 {
	for text := s[:end]; at < end; {
		n, next := enc.t.parter.split(text, at, enc.ends[:])
		if enc.watch.over(next - at) {
			break
		}
		dst = enc.lookup(dst, bytesOf(s), at, enc.ends[:n], false)
		at = next
	}
	return dst
}

// batch is the number of words whose slots are loaded before the first of them is compared, so
// that the cache misses overlap.
const batch = 32

// lookup appends the ids of the words of text that start at from and end at ends. With parts they
// are parts of words, which are not cut further.
func (enc *encoder) lookup(dst []uint32, text []byte, from int, ends []uint32, parts bool) []uint32 {
	var found [batch]uint64
	short := enc.t.short
	slots, tagMask, idLimit := short.slots, short.tagMask, short.idLimit
	slotAt, idBits := short.slotAt&63, short.idBits&63 // lets the compiler drop the shift checks
	for len(ends) > 0 {
		round := ends[:min(batch, len(ends))]
		ends = ends[len(round):]
		at := from
		for i, e := range round {
			var x uint64
			if at+8 <= len(text) {
				x = binary.LittleEndian.Uint64(text[at:])
			} else {
				x = tail(text[at:])
			}
			product := shortKey(x, int(e)-at) * keyMul & keyMask
			at = int(e)
			found[i&(batch-1)] = slots[product>>slotAt] ^ product&tagMask<<idBits
		}
		at = from
		for i, e := range round {
			// If the tag matched, the XOR leaves an id.
			if f := found[i&(batch-1)]; f-1 < idLimit && uint(int(e)-at) <= shortSize {
				dst = append(dst, uint32(f)-1)
			} else {
				dst = enc.second(dst, text, at, int(e), parts)
			}
			at = int(e)
		}
		from = at
	}
	return dst
}

// tail returns the up to eight bytes of b as an integer.
func tail(b []byte) uint64 {
	var pad [8]byte
	copy(pad[:], b)
	return binary.LittleEndian.Uint64(pad[:])
}

// second is lookup for one word that is not in its home slot of the table of short tokens.
func (enc *encoder) second(dst []uint32, text []byte, from, end int, parts bool) []uint32 {
	word := text[from:end]
	size := len(word)
	var k0, k1 uint64
	switch {
	case size <= shortSize:
		return enc.shortWord(dst, word)
	case size > hotSize:
		return enc.longWord(dst, text, from, end, parts)
	case from+hotSize <= len(text):
		t := text[from : from+hotSize]
		k0, k1 = binary.LittleEndian.Uint64(t), binary.LittleEndian.Uint64(t[8:])&headMask[size-8]
	default:
		k0, k1 = tail(word), tail(word[8:])
	}
	bucket := fold(k0^hashSeed, k1^mulA+uint64(size)) & (1<<hotBits - 1) &^ 1
	for i := bucket; i <= bucket|1; i++ {
		if e := &enc.hot[i]; e.key[0] == k0 && e.key[1] == k1 && int(e.size) == size {
			return e.appendTo(dst)
		}
	}
	at := len(dst)
	h := hashBytes(word)
	done := false
	if id, whole, ok := enc.t.vocab.findHash(h, word); ok && (whole || enc.t.ignoreMerges) {
		dst, done = append(dst, id), true
	} else if !parts {
		dst, done = enc.inParts(dst, text, from, end)
	}
	if !done {
		if ids, ok := enc.long.get(h, word); ok {
			return append(dst, ids...)
		}
		dst = enc.spelled(dst, word)
	}
	if n := len(dst) - at; n <= hotIDs {
		// The newer of the two entries moves to the second slot.
		enc.hot[bucket|1] = enc.hot[bucket]
		enc.hot[bucket] = hotWord{key: [2]uint64{k0, k1}, size: uint8(size), n: uint8(n), ids: packed(dst[at:min(len(dst), at+tinyIDs)])}
		if n > tinyIDs {
			enc.hot[bucket].rest = dst[at+tinyIDs]
		}
	} else if !done {
		enc.long.put(h, word, dst[at:])
	}
	return dst
}

// shortWord appends the ids of a word of up to shortSize bytes.
func (enc *encoder) shortWord(dst []uint32, word []byte) []uint32 {
	key := shortKey(tail(word), len(word))
	id, ok, sure := enc.t.short.find(key)
	if !sure {
		var whole bool
		id, whole, ok = enc.t.vocab.find(word)
		ok = ok && (whole || enc.t.ignoreMerges)
	}
	if ok {
		return append(dst, id)
	}
	e := &enc.tiny[((key^hashSeed)*mulC)>>(64-tinyBits)]
	if e.key == key {
		return e.appendTo(dst)
	}
	at := len(dst)
	dst = enc.spelled(dst, word)
	if n := len(dst) - at; n <= tinyIDs {
		*e = tinyWord{key, packed(dst[at:]) | uint64(n)<<(tinyIDs*packedID)}
	}
	return dst
}

// longWord appends the ids of a word of more than hotSize bytes. Up to maxWord bytes it is stored
// whole, even if it has parts: one lookup takes less time than finding and looking up the parts.
func (enc *encoder) longWord(dst []uint32, text []byte, from, end int, parts bool) []uint32 {
	word, at := text[from:end], len(dst)
	// A clause of Chinese or Japanese hardly ever repeats, but its parts do. A word that is a token
	// is never cut, so the vocabulary need not be asked first.
	if word[0] >= 0xe3 && word[0] <= 0xe9 && !parts {
		if dst, ok := enc.inParts(dst, text, from, end); ok {
			return dst
		}
		parts = true
	}
	h := hashBytes(word)
	if id, whole, ok := enc.t.vocab.findHash(h, word); ok && (whole || enc.t.ignoreMerges) {
		return append(dst, id)
	}
	if len(word) <= maxWord {
		if ids, ok := enc.long.get(h, word); ok {
			return append(dst, ids...)
		}
	}
	done := false
	if !parts {
		dst, done = enc.inParts(dst, text, from, end)
	}
	if !done {
		dst = enc.spelled(dst, word)
	}
	if len(word) <= maxWord {
		enc.long.put(h, word, dst[at:])
	}
	return dst
}

// inParts appends the ids of a word that can be cut into parts; false if it cannot.
func (enc *encoder) inParts(dst []uint32, text []byte, from, end int) ([]uint32, bool) {
	j := enc.t.joints
	// A word that starts with ASCII other than a space is hardly ever cut.
	if j == nil || text[from] < 0x80 && text[from+1] < 0x80 {
		return dst, false
	}
	for at := from; at < end; {
		n, next := j.cutWide(text, at, end, enc.parts[:])
		if at == from && n == 1 && next == end {
			return dst, false
		}
		dst = enc.lookup(dst, text, at, enc.parts[:n], true)
		at = next
	}
	return dst, true
}

// spelled appends the ids that merging yields.
func (enc *encoder) spelled(dst []uint32, word []byte) []uint32 {
	if u := enc.t.unigram; u != nil {
		return u.viterbi(enc, dst, word)
	}
	if len(word) <= smallLimit && isASCII(word) {
		return enc.merge.small.ascii(enc.t, word, dst)
	}
	if len(word) > hugeWord {
		if !huge.take(enc.watch.stop) {
			enc.watch.look()
			return dst
		}
		defer huge.give()
		enc.merge.parts = make([]uint64, 0, len(word))
	}
	enc.merge.parts = enc.t.symbols(enc.merge.parts[:0], word)
	dst = enc.merge.run(enc.t.merges, dst, &enc.watch)
	enc.merge.trim()
	return dst
}
