package tokenizer

import (
	"encoding/binary"
	"unsafe"
)

// What merging a word gave is kept by its size: up to shortSize bytes in a table
// whose entries are a quarter of a cache line, up to 16 bytes in one whose
// entries are half a line or, with more than hotIDs ids, in a store, as words up to maxWord. Longer words are never kept,
// so that a hostile prompt cannot fill the memory.
const (
	tinyBits = 14
	tinyIDs  = 3
	hotBits  = 14 // two entries share a bucket
	hotSize  = 16
	hotIDs   = 4
	maxWord  = 64
	longText = 1 << 18
)

// tinyWord is a word's key, and its ids with their number above them.
type tinyWord struct{ key, ids uint64 }

// packedID is the bits of an id among others.
const packedID = 20

func (e *tinyWord) appendTo(dst []uint32) []uint32 {
	ids := e.ids
	for range ids >> (tinyIDs * packedID) {
		dst = append(dst, uint32(ids&maxID))
		ids >>= packedID
	}
	return dst
}

// hotWord is a word of more than shortSize bytes. key is its bytes, padded with
// zeros; size tells "a" from "a\x00". A zero size is an empty entry. The ids from
// the fourth on are in rest.
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

// packed is up to tinyIDs ids in one word.
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

// worker is what one Encode at a time uses: caches and scratch memory.
type worker struct {
	t       *Tokenizer
	tiny    *[1 << tinyBits]tinyWord
	hot     []hotWord
	long    *store
	merge   merger
	match   regexSearch
	ends    [512]uint32
	parts   [512]uint32 // ends of the parts of one word
	nfc     []byte
	text    []byte // text with U+2581 turned into spaces
	spacing []byte // text with a space put before it
	added   []byte

	// Cuts of the text being encoded, for Cache.
	recording bool
	cuts      []hardCut
	cutBase   int // ids before the text in the result
	lastCut   int
	digests   []uint64

	watch watch
}

func newWorker(t *Tokenizer) *worker {
	return &worker{t: t, tiny: new([1 << tinyBits]tinyWord), hot: make([]hotWord, 1<<hotBits), long: newStore(1<<13, longText, longText/4)}
}

// maxScratch bounds the bytes of each buffer that a worker keeps between texts.
const maxScratch = 1 << 20

// trim gives back the buffers that an unusually long text took.
func (w *worker) trim() {
	for _, b := range []*[]byte{&w.nfc, &w.text, &w.spacing, &w.added} {
		if cap(*b) > maxScratch {
			*b = nil
		}
	}
}

// reset empties the caches.
func (w *worker) reset() {
	clear(w.tiny[:])
	clear(w.hot)
	w.long.reset()
}

// bytesOf is the bytes of s, not to be written to.
func bytesOf(s string) []byte {
	return unsafe.Slice(unsafe.StringData(s), len(s))
}

// stringOf is b as a string that lives only while b is not written to.
func stringOf(b []byte) string {
	return unsafe.String(unsafe.SliceData(b), len(b))
}

// words appends the ids of the words of s[at:end].
func (w *worker) words(dst []uint32, s string, at, end int) []uint32 {
	for text := s[:end]; at < end; {
		n, next := w.t.parter.split(text, at, w.ends[:])
		if w.watch.over(next - at) {
			break
		}
		dst = w.lookup(dst, bytesOf(s), at, w.ends[:n], false)
		at = next
	}
	return dst
}

// batch is the words whose slots are read before the first of them is looked
// at, so that the processor waits for all of them at once.
const batch = 32

// lookup appends the ids of the words of text that start at from and end at
// ends. Parts are pieces of words: those are not cut further.
func (w *worker) lookup(dst []uint32, text []byte, from int, ends []uint32, parts bool) []uint32 {
	var found [batch]uint64
	short := w.t.short
	slots, tagMask, idLimit := short.slots, short.tagMask, short.idLimit
	slotAt, idBits := short.slotAt&63, short.idBits&63 // so that shifts need no check
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
			// Without the tag, an id is left.
			if f := found[i&(batch-1)]; f-1 < idLimit && uint(int(e)-at) <= shortSize {
				dst = append(dst, uint32(f)-1)
			} else {
				dst = w.second(dst, text, at, int(e), parts)
			}
			at = int(e)
		}
		from = at
	}
	return dst
}

// tail is the up to eight bytes of b as a number.
func tail(b []byte) uint64 {
	var pad [8]byte
	copy(pad[:], b)
	return binary.LittleEndian.Uint64(pad[:])
}

// second is lookup for one word that is not in its first place in the table of
// short tokens.
func (w *worker) second(dst []uint32, text []byte, from, end int, parts bool) []uint32 {
	word := text[from:end]
	size := len(word)
	var k0, k1 uint64
	switch {
	case size <= shortSize:
		return w.shortWord(dst, word)
	case size > hotSize:
		return w.longWord(dst, text, from, end, parts)
	case from+hotSize <= len(text):
		t := text[from : from+hotSize]
		k0, k1 = binary.LittleEndian.Uint64(t), binary.LittleEndian.Uint64(t[8:])&headMask[size-8]
	default:
		k0, k1 = tail(word), tail(word[8:])
	}
	bucket := fold(k0^hashSeed, k1^mulA+uint64(size)) & (1<<hotBits - 1) &^ 1
	for i := bucket; i <= bucket|1; i++ {
		if e := &w.hot[i]; e.key[0] == k0 && e.key[1] == k1 && int(e.size) == size {
			return e.appendTo(dst)
		}
	}
	at := len(dst)
	h := hashBytes(word)
	done := false
	if id, whole, ok := w.t.vocab.findHash(h, word); ok && (whole || w.t.ignoreMerges) {
		dst, done = append(dst, id), true
	} else if !parts {
		dst, done = w.inParts(dst, text, from, end)
	}
	if !done {
		if ids, ok := w.long.get(h, word); ok {
			return append(dst, ids...)
		}
		dst = w.spelled(dst, word)
	}
	if n := len(dst) - at; n <= hotIDs {
		// The newer of the two moves to the second place.
		w.hot[bucket|1] = w.hot[bucket]
		w.hot[bucket] = hotWord{key: [2]uint64{k0, k1}, size: uint8(size), n: uint8(n), ids: packed(dst[at:min(len(dst), at+tinyIDs)])}
		if n > tinyIDs {
			w.hot[bucket].rest = dst[at+tinyIDs]
		}
	} else if !done {
		w.long.put(h, word, dst[at:])
	}
	return dst
}

// shortWord appends the ids of a word of up to shortSize bytes.
func (w *worker) shortWord(dst []uint32, word []byte) []uint32 {
	key := shortKey(tail(word), len(word))
	id, ok, sure := w.t.short.find(key)
	if !sure {
		var whole bool
		id, whole, ok = w.t.vocab.find(word)
		ok = ok && (whole || w.t.ignoreMerges)
	}
	if ok {
		return append(dst, id)
	}
	e := &w.tiny[((key^hashSeed)*mulC)>>(64-tinyBits)]
	if e.key == key {
		return e.appendTo(dst)
	}
	at := len(dst)
	dst = w.spelled(dst, word)
	if n := len(dst) - at; n <= tinyIDs {
		*e = tinyWord{key, packed(dst[at:]) | uint64(n)<<(tinyIDs*packedID)}
	}
	return dst
}

// longWord appends the ids of a word of more than hotSize bytes.
func (w *worker) longWord(dst []uint32, text []byte, from, end int, parts bool) []uint32 {
	word := text[from:end]
	h := hashBytes(word)
	if id, whole, ok := w.t.vocab.findHash(h, word); ok && (whole || w.t.ignoreMerges) {
		return append(dst, id)
	}
	if !parts {
		var done bool
		if dst, done = w.inParts(dst, text, from, end); done {
			return dst
		}
	}
	if len(word) > maxWord {
		return w.spelled(dst, word)
	}
	if ids, ok := w.long.get(h, word); ok {
		return append(dst, ids...)
	}
	at := len(dst)
	dst = w.spelled(dst, word)
	w.long.put(h, word, dst[at:])
	return dst
}

// inParts appends the ids of a word that can be cut into parts.
func (w *worker) inParts(dst []uint32, text []byte, from, end int) ([]uint32, bool) {
	j := w.t.joints
	// A word that begins with ASCII, but for a space, is hardly ever cut.
	if j == nil || text[from] < 0x80 && text[from+1] < 0x80 {
		return dst, false
	}
	for at := from; at < end; {
		n, next := j.cutWide(text, at, end, w.parts[:])
		if at == from && n == 1 && next == end {
			return dst, false
		}
		dst = w.lookup(dst, text, at, w.parts[:n], true)
		at = next
	}
	return dst, true
}

// spelled appends the ids that merging gives.
func (w *worker) spelled(dst []uint32, word []byte) []uint32 {
	if len(word) <= smallLimit && isASCII(word) {
		return w.merge.small.ascii(w.t, word, dst)
	}
	if len(word) > hugeWord {
		if !huge.take(w.watch.stop) {
			w.watch.look()
			return dst
		}
		defer huge.give()
		w.merge.parts = make([]uint64, 0, len(word))
	}
	w.merge.parts = w.t.symbols(w.merge.parts[:0], word)
	dst = w.merge.run(w.t.merges, dst, &w.watch)
	w.merge.trim()
	return dst
}
