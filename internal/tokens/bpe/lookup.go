package bpe

import (
	"encoding/binary"
	"slices"
)

// The ids of words are cached by length: words of up to frontSize bytes in front, whose entries take half a cache line;
// those of up to broadSize in broad, whose entries take one; others of up to maxWord bytes, and those with more ids
// than an entry has room for, in a store. Longer words are never cached, so a hostile prompt cannot fill the memory.
const (
	frontBits = 15 // two entries share a bucket, also in broad
	frontSize = 15
	frontIDs  = 2 * perWord
	broadBits = 13
	broadSize = 31
	broadIDs  = 4 * perWord
	maxWord   = 64
	longText  = 1 << 18
)

// packedID is the width in bits of a packed id; an integer has room for perWord of them and, in the bits above, their number.
const (
	packedID = 20
	perWord  = 3
	countAt  = perWord * packedID
)

// frontWord is a word and its ids. The key is the bytes, zero-padded, with the size in the last one:
// it distinguishes "a" from "a\x00" and is zero only in an empty entry. ids[0] has the number of ids.
type frontWord struct{ key, ids [2]uint64 }

// broadWord is the same for longer words.
type broadWord struct{ key, ids [4]uint64 }

// keyMasks keep the first n bytes of a word of 16.
var keyMasks = func() (m [frontSize + 1][2]uint64) {
	for n := range m {
		m[n] = [2]uint64{headMask[min(n, 8)], headMask[max(n, 8)-8]}
	}
	return m
}()

// pack overwrites all with the number of ids and the ids, which must fit.
func pack(all []uint64, ids []uint32) {
	clear(all)
	all[0] = uint64(len(ids)) << countAt
	for i, id := range ids {
		all[i/perWord] |= uint64(id) << (i % perWord * packedID)
	}
}

// unpack appends what pack wrote.
func unpack(dst []uint32, all []uint64) []uint32 {
	for i := range int(all[0] >> countAt) {
		dst = append(dst, uint32(all[i/perWord]>>(i%perWord*packedID)&maxID))
	}
	return dst
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

// batch is the number of words whose slots are loaded before the first of them is compared, so that the cache misses overlap.
const batch = 32

// lookup appends the ids of the words of text that start at from and end at ends. parts reports that they already are
// parts of words, which are not split again.
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

// second looks up one word that is not in its home slot of the table of short tokens. Except for the rare fourth id, a
// known word of up to frontSize bytes takes no branch that depends on it: the entry is selected by arithmetic, and all
// three ids of its first integer are written; the next word overwrites the unused ones.
func (enc *encoder) second(dst []uint32, text []byte, from, end int, parts bool) []uint32 {
	size := uint(end - from)
	if size > frontSize {
		return enc.longWord(dst, text, from, end, parts)
	}
	var k0, k1 uint64
	if from+16 <= len(text) {
		b, mask := (*[16]byte)(text[from:]), &keyMasks[size]
		k0, k1 = binary.LittleEndian.Uint64(b[:])&mask[0], binary.LittleEndian.Uint64(b[8:])&mask[1]|uint64(size)<<56
	} else {
		k0, k1 = tail(text[from:end]), tail(text[min(from+8, end):end])|uint64(size)<<56
	}
	bucket := &enc.front[fold(k0^hashSeed, k1^mulA)>>(64-(frontBits-1))]
	x := (bucket[0].key[0] ^ k0) | (bucket[0].key[1] ^ k1)
	w := &bucket[(x|-x)>>63] // the first one if x is 0
	at := len(dst)
	if w.key == [2]uint64{k0, k1} {
		dst = slices.Grow(dst, frontIDs)
		room := (*[frontIDs]uint32)(dst[at : at+frontIDs])
		unpackWord(room[:perWord], w.ids[0])
		if w.ids[0]>>countAt > perWord {
			unpackWord(room[perWord:], w.ids[1])
		}
		return dst[:at+int(w.ids[0]>>countAt)]
	}
	dst = enc.merged(dst, text, from, end, parts)
	if len(dst)-at <= frontIDs && enc.sure {
		// The newer of the two entries moves to the second place.
		bucket[1], bucket[0].key = bucket[0], [2]uint64{k0, k1}
		pack(bucket[0].ids[:], dst[at:])
	}
	return dst
}

// unpackWord writes the ids of one integer.
func unpackWord(dst []uint32, ids uint64) {
	dst[0], dst[1], dst[2] = uint32(ids&maxID), uint32(ids>>packedID&maxID), uint32(ids>>(2*packedID)&maxID)
}

// merged appends the ids of a word that is in neither front nor broad.
func (enc *encoder) merged(dst []uint32, text []byte, from, end int, parts bool) []uint32 {
	word, at := text[from:end], len(dst)
	if len(word) <= shortSize {
		if id, ok, sure := enc.t.short.find(shortKey(tail(word), len(word))); ok {
			return append(dst, id)
		} else if sure {
			return enc.spelled(dst, word)
		}
	}
	h := hashBytes(word)
	if id, whole, ok := enc.t.vocab.findHash(h, word); ok && (whole || enc.t.ignoreMerges) {
		return append(dst, id)
	}
	if ids, ok := enc.long.get(h^enc.space, word); ok && len(word) <= maxWord {
		return append(dst, ids...)
	}
	done := false
	if !parts && len(word) > shortSize {
		dst, done = enc.inParts(dst, text, from, end)
	}
	if !done {
		dst = enc.spelled(dst, word)
	}
	if n, size := len(dst)-at, len(word); size <= maxWord && enc.sure && (size > broadSize || n > broadIDs || size <= frontSize && n > frontIDs) {
		enc.long.put(h^enc.space, word, dst[at:])
	}
	return dst
}

// longWord appends the ids of a word of more than frontSize bytes. Up to maxWord bytes it is stored
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
	var bucket *[2]broadWord
	var key [4]uint64
	if len(word) <= broadSize {
		b, mask := text[from:], &keyMasks[len(word)-16]
		if len(b) < 32 {
			b = append(make([]byte, 0, 32), word...)[:32]
		}
		key = [4]uint64{
			binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:16]),
			binary.LittleEndian.Uint64(b[16:24]) & mask[0], binary.LittleEndian.Uint64(b[24:32])&mask[1] | uint64(len(word))<<56,
		}
		bucket = &enc.broad[fold(fold(key[0]^hashSeed, key[1]^mulA)^key[2], key[3]^mulB)>>(64-(broadBits-1))]
		for i := range bucket {
			if w := &bucket[i]; w.key == key {
				return unpack(dst, w.ids[:])
			}
		}
	}
	dst = enc.merged(dst, text, from, end, parts)
	if bucket != nil && len(dst)-at <= broadIDs && enc.sure {
		bucket[1], bucket[0].key = bucket[0], key
		pack(bucket[0].ids[:], dst[at:])
	}
	return dst
}

// inParts appends the ids of a word that can be cut into parts; false if it cannot.
func (enc *encoder) inParts(dst []uint32, text []byte, from, end int) ([]uint32, bool) {
	j := enc.t.adjacency
	// A word that starts with ASCII other than a space is hardly ever cut.
	if j == nil || text[from] < 0x80 && text[from+1] < 0x80 {
		return dst, false
	}
	for at := from; at < end; {
		n, next := j.cutNonASCII(text, at, end, enc.parts[:])
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
