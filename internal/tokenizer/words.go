package tokenizer

import (
	"encoding/binary"
	"unsafe"
)

// Words of 8 to 16 bytes whose ids are at most three are kept in a table whose
// entries are half a cache line; longer words up to maxWord bytes in a store.
// Longer ones are never kept, so that a hostile prompt cannot fill the memory.
const (
	hotBits  = 14 // two entries share a bucket
	hotIDs   = 3
	maxWord  = 64
	longText = 1 << 18
)

// hotWord is one short word. key is its bytes, padded with zeros; size tells
// "a" from "a\x00". A zero size is an empty entry.
type hotWord struct {
	key  [2]uint64
	size uint16
	n    uint16
	ids  [hotIDs]uint32
}

// Words of up to tinySize bytes with one or two ids, most of all words, have a
// table of their own that stays in the processor's nearer cache.
const (
	tinyBits = 14
	tinySize = 7
)

// tinyWord is a word whose bytes are the lower seven of key and whose size is
// the highest; second is maxID if there is one id.
type tinyWord struct {
	key           uint64
	first, second uint32
}

// keep stores ids if there are one or two.
func (e *tinyWord) keep(key uint64, ids []uint32) bool {
	switch len(ids) {
	case 1:
		*e = tinyWord{key, ids[0], maxID}
	case 2:
		*e = tinyWord{key, ids[0], ids[1]}
	default:
		return false
	}
	return true
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
	ends    [512]uint32
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
		n, next := w.t.splitter.split(text, at, w.ends[:])
		dst = w.lookup(dst, bytesOf(s), at, w.ends[:n])
		at = next
	}
	return dst
}

// lookup appends the ids of the words of text that start at from and end at
// ends.
func (w *worker) lookup(dst []uint32, text []byte, from int, ends []uint32) []uint32 {
	hot := w.hot
	for _, e := range ends {
		end := int(e)
		size := end - from
		if size > 16 {
			dst = w.longWord(dst, text[from:end])
			from = end
			continue
		}
		var k0, k1 uint64
		if from+16 <= len(text) {
			t := text[from : from+16]
			k0, k1 = binary.LittleEndian.Uint64(t), binary.LittleEndian.Uint64(t[8:])
		} else {
			var pad [16]byte
			copy(pad[:], text[from:])
			k0, k1 = binary.LittleEndian.Uint64(pad[:]), binary.LittleEndian.Uint64(pad[8:])
		}
		if size <= tinySize {
			k0 = k0&headMask[size] | uint64(size)<<56
			entry := &w.tiny[((k0^hashSeed)*mulC)>>(64-tinyBits)]
			if entry.key != k0 {
				at := len(dst)
				dst = w.missed(dst, text[from:end])
				if !entry.keep(k0, dst[at:]) {
					from = end
					continue
				}
				dst = dst[:at]
			}
			dst = append(dst, entry.first)
			if entry.second != maxID {
				dst = append(dst, entry.second)
			}
			from = end
			continue
		}
		if size == 8 {
			k1 = 0
		} else {
			k1 &= headMask[size-8]
		}
		h := fold(k0^hashSeed, k1^mulA+uint64(size))
		bucket := h & uint64(len(hot)-1) &^ 1
		entry := &hot[bucket]
		if entry.key[0] != k0 || entry.key[1] != k1 || int(entry.size) != size {
			entry = &hot[bucket|1]
		}
		if entry.key[0] == k0 && entry.key[1] == k1 && int(entry.size) == size {
			if n := len(dst); cap(dst)-n >= hotIDs {
				*(*[hotIDs]uint32)(dst[n : n+hotIDs]) = entry.ids
				dst = dst[:n+int(entry.n)]
			} else {
				dst = append(dst, entry.ids[:entry.n]...)
			}
			from = end
			continue
		}
		at := len(dst)
		dst = w.missed(dst, text[from:end])
		if n := len(dst) - at; n <= hotIDs {
			// The newer of the two moves to the second place.
			hot[bucket|1] = hot[bucket]
			hot[bucket] = hotWord{key: [2]uint64{k0, k1}, size: uint16(size), n: uint16(n)}
			copy(hot[bucket].ids[:], dst[at:])
		}
		from = end
	}
	return dst
}

// longWord is lookup for a word of more than 16 bytes.
func (w *worker) longWord(dst []uint32, word []byte) []uint32 {
	if len(word) > maxWord {
		return w.merged(dst, word)
	}
	return w.missed(dst, word)
}

// missed appends the ids of a word that is not in the table of short words:
// from the vocabulary, the store of words, or a merge.
func (w *worker) missed(dst []uint32, word []byte) []uint32 {
	h := hashBytes(word)
	if id, whole, ok := w.t.vocab.findHash(h, word); ok && (whole || w.t.ignoreMerges) {
		return append(dst, id)
	}
	if ids, ok := w.long.get(h, word); ok {
		return append(dst, ids...)
	}
	at := len(dst)
	dst = w.spelled(dst, word)
	w.long.put(h, word, dst[at:])
	return dst
}

// merged appends the ids of a word without asking the caches.
func (w *worker) merged(dst []uint32, word []byte) []uint32 {
	if id, whole, ok := w.t.vocab.find(word); ok && (whole || w.t.ignoreMerges) {
		return append(dst, id)
	}
	return w.spelled(dst, word)
}

// spelled appends the ids that merging gives.
func (w *worker) spelled(dst []uint32, word []byte) []uint32 {
	w.merge.parts = w.t.symbols(w.merge.parts[:0], word)
	dst = w.merge.run(w.t.merges, dst)
	w.merge.trim()
	return dst
}
