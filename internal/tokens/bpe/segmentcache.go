package bpe

import (
	"encoding/binary"
	"sync"
	"unicode/utf8"
)

// memo caches the ids of segments of text between safe cuts, so that repeated text costs a hash and a copy. All
// encoders share it. It has shards of a fixed size, which are allocated on first use.
type memo struct {
	shards [memoShards]memoShard
}

// memoShard keeps a segment from its first occurrence on while it has room, then from its second:
// most text occurs once, and would evict text that occurs again.
type memoShard struct {
	mu    sync.Mutex
	store *store
	once  *[memoOnce]uint32 // upper halves of the hashes seen once, by their lower bits
	_     [40]byte          // one shard per cache line
}

const (
	memoShards = 16
	// memoMinimum is the length in bytes from which a lookup pays off.
	memoMinimum = 48
	memoSlots   = 1 << 13
	memoText    = 1 << 19
	memoIDs     = 1 << 17
	memoOnce    = 1 << 11
)

// paragraphs appends the ids of pre-tokenized text through the memo.
func (enc *encoder) paragraphs(dst []uint32, s string) []uint32 {
	if most := enc.t.maxRun; most > 0 && len(s) > most {
		for from, to := range runs(s, most) {
			if dst = enc.segments(dst, s[from:to]); enc.watch.stopped {
				break
			}
		}
		return dst
	}
	return enc.segments(dst, s)
}

// segments is paragraphs for a text that is not cut further.
func (enc *encoder) segments(dst []uint32, s string) []uint32 {
	cuts := enc.t.cuts
	if cuts == nil || len(s) < memoMinimum {
		return enc.uncached(dst, s, 0, len(s))
	}
	text := bytesOf(s)
	for at := 0; at < len(s); {
		for limit := min(at+lookEvery, len(s)); at < limit; {
			end := cuts.next(text, s, at)
			if end-at < memoMinimum {
				return enc.uncached(dst, s, at, end)
			}
			dst = enc.cachedSegment(dst, s, at, end)
			at = end
		}
		if at < len(s) && enc.watch.look() {
			break
		}
	}
	return dst
}

// cachedSegment appends the ids of s[at:end], which lies between two cuts.
func (enc *encoder) cachedSegment(dst []uint32, s string, at, end int) []uint32 {
	key := bytesOf(s)[at:end]
	h := hashBytes(key) ^ enc.space
	shard := &enc.t.memo.shards[h>>60]
	dst, ok, keep := shard.get(dst, h, key)
	if ok {
		return dst
	}
	n := len(dst)
	dst = enc.uncached(dst, s, at, end)
	if keep && !enc.watch.stopped && !enc.invalid {
		shard.mu.Lock()
		if _, ok := shard.store.get(h, key); !ok { // another request's may be there by now
			shard.store.put(h, key, dst[n:])
		}
		shard.mu.Unlock()
	}
	return dst
}

// uncached appends the ids of the segment s[at:end], which is not in the memo.
func (enc *encoder) uncached(dst []uint32, s string, at, end int) []uint32 {
	if !enc.t.lazy {
		return enc.words(dst, s, at, end)
	}
	hit := at
	if enc.t.nfc {
		hit += composeAt(s[at:end], 0, &enc.watch)
	}
	if !utf8.ValidString(s[hit:end]) {
		enc.invalid = true
		return dst
	}
	if enc.t.nfc && hit < end {
		enc.nfc = enc.composed(enc.nfc[:0], s[at:end])
		s, at, end = stringOf(enc.nfc), 0, len(enc.nfc)
	}
	return enc.words(dst, s, at, end)
}

// get appends the ids of a segment if they are cached. Otherwise keep reports whether the caller should
// cache them: the segment was seen before, or there is room for it without an eviction.
func (m *memoShard) get(dst []uint32, h uint64, key []byte) (_ []uint32, ok, keep bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.store == nil {
		m.store, m.once = newStore(memoSlots, memoText, memoIDs), new([memoOnce]uint32)
	}
	if ids, ok := m.store.get(h, key); ok {
		return append(dst, ids...), true, false
	}
	once := &m.once[h%memoOnce]
	keep = *once == uint32(h>>32) || m.store.roomFor(len(key))
	*once = uint32(h >> 32)
	return dst, false, keep
}

// A cutter finds places where pre-tokenized text may be cut regardless of the text on either side: the words of both
// sides together are the words of the whole text. So the ids of a segment between two cuts can be cached.
//
// The rules, which TestCutsAreSafe checks for each splitter on random text:
//   - An ASCII letter before an ASCII blank, symbol or punctuation other than an apostrophe. No alternative of any
//     pattern goes over from one to the other; the apostrophe could begin a contraction that belongs to the word.
//   - A letter of another script before a space or Chinese punctuation.
//   - A line end before anything but white space (and slashes, where punctuation takes slashes after line ends),
//     unless the pattern is GPT-2's, whose white space looks at what follows.
//   - In SentencePiece models, before a space that follows a non-space.
//
// A code point is quiet if NFC never changes it or joins it to another one. Text that is not normalized yet is cut only
// after a quiet code point and before one that a quiet one, or the end, follows. The segments a and b of such a cut can
// be normalized separately: b begins with ASCII or punctuation, which is a starter that neither decomposes nor joins
// anything before it. So decomposing and sorting move nothing over the cut, and as the last starter it also keeps all
// of b from joining a: NFC(ab) = NFC(a)NFC(b). The characters at the cut stay: the last one of a is quiet and the last
// of a, so it recomposes to itself and joins nothing, and what follows the first one of b does not join it. So the
// rules hold for the normalized text, too. Text that is not valid UTF-8 may be cut as well: a cut is before the first
// byte of a character, so the text is valid if and only if all its segments are.
type cutter struct {
	before, after [256]uint8
	raw           bool // the text is not normalized yet: cuts must be quiet too
}

// Bits of the tables: a cut is possible where the entries of the bytes before and after share a bit.
const (
	cutWord uint8 = 1 << iota
	cutLine
	cutWide // a non-ASCII byte is involved: wideCut decides
)

// Of the possible cuts, a hash of the bytes before selects some, so that equal text is cut alike wherever it begins.
const (
	minSegment = 192 // bytes
	maxSegment = 768 // or the next cut after it
)

// newCutter returns nil if the splitter's text cannot be cut. With raw, text is cut that is not normalized yet.
func newCutter(p splitter, raw bool) *cutter {
	c := &cutter{raw: raw}
	line, slash := true, false
	switch p := p.(type) {
	case spaceSplit:
		for b := range 256 {
			if b != ' ' {
				c.before[b] = cutWord
			}
		}
		c.after[' '] = cutWord
		return c
	case gpt2Split:
		line = false
	case caseSplit:
		slash = p.slash
	case wordSplit, stagedSplit:
	default:
		return nil
	}
	for b, k := range byteKinds {
		if k&kindLetter != 0 {
			c.before[b] |= cutWord
		}
		if k&(kindBlank|kindOther) != 0 && b != '\'' {
			c.after[b] |= cutWord
		}
		if line && k&(kindLetter|kindDigit|kindOther) != 0 && (b != '/' || !slash) {
			c.after[b] |= cutLine
		}
	}
	if line {
		c.before['\n'] |= cutLine
	}
	for b := 0x80; b < 0x100; b++ {
		c.before[b] |= cutWide
	}
	for _, b := range []byte{' ', 0xe3, 0xef} {
		c.after[b] |= cutWide
	}
	return c
}

// safe reports whether s may be cut at i, 0 < i < len(s).
func (c *cutter) safe(s string, i int) bool {
	shared := c.before[s[i-1]] & c.after[s[i]]
	return (shared&(cutWord|cutLine) != 0 || shared == cutWide && wideCut(s, i)) && (!c.raw || quietCut(s, i))
}

// quietCut reports whether normalization does not change the characters on both sides of i.
func quietCut(s string, i int) bool {
	if r, _ := utf8.DecodeLastRuneInString(s[:i]); !runeClass(r).quiet() {
		return false
	}
	next := i + 1
	if s[i] >= 0x80 {
		next = i + 3
	}
	if next >= len(s) {
		return true
	}
	c, _ := classAt(s, next)
	return c.quiet()
}

// wideCut reports whether the text may be cut at i between a letter and a space or Chinese punctuation.
func wideCut(s string, i int) bool {
	r, _ := utf8.DecodeLastRuneInString(s[:i])
	if runeClass(r)&(clsL|clsM) != clsL || s[i] != ' ' && i+2 >= len(s) {
		return false
	}
	if s[i] == ' ' {
		return true
	}
	switch [3]byte{s[i], s[i+1], s[i+2]} {
	case [3]byte{0xe3, 0x80, 0x81}, [3]byte{0xe3, 0x80, 0x82}, // 、。
		[3]byte{0xef, 0xbc, 0x8c}, [3]byte{0xef, 0xbc, 0x9a}, [3]byte{0xef, 0xbc, 0x9b}, // ，：；
		[3]byte{0xef, 0xbc, 0x81}, [3]byte{0xef, 0xbc, 0x9f}: // ！？
		return true
	}
	return false
}

// next returns the end of the segment that starts at i. The hash is checked before safe, which takes longer and accepts
// most of what the hash refuses; kana, before which safe accepts no cut, are told by their second byte.
func (c *cutter) next(text []byte, s string, i int) int {
	for j := i + minSegment; j < len(s); j++ {
		if c.before[text[j-1]]&c.after[text[j]] == 0 || text[j] == 0xe3 && j+1 < len(s) && text[j+1] != 0x80 {
			continue
		}
		h := binary.LittleEndian.Uint32(text[j-4:]) * 0x9e3779b1
		if (h < 1<<29 || text[j-1] >= 0x80 && h < 1<<30 || j-i >= maxSegment) && c.safe(s, j) {
			return j
		}
	}
	return len(s)
}
