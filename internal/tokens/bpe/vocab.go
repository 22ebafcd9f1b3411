package bpe

import (
	"bytes"
	"fmt"
	"math/bits"
	"unicode/utf8"
)

// maxID exceeds all token ids, so that a pair of them and a rank fit one word of the merge table.
// Real vocabularies end near 270,000.
const maxID = 1<<20 - 1

// vocab holds the tokens of a model in the form in which text is matched: byte-level tokens as
// the bytes that they stand for, SentencePiece tokens with a space for U+2581.
//
// Invariant: the token id is blob[start[id]:start[id+1]]; it is absent if has is false. slots is
// an open-addressing table whose size is a power of two, at most half full.
type vocab struct {
	blob  []byte
	start []uint32
	has   []bool
	slots []uint32 // from the highest bits: 11 of the hash, wholeFlag, id+1; 0 is empty
	// literal holds tokens that no text can produce, by their string: those with characters
	// outside the byte alphabet, such as special tokens.
	literal map[string]uint32
	count   int
}

// wholeFlag marks tokens that merging their own bytes reproduces.
const wholeFlag = 1 << packedID

// find returns the id of the token with these bytes. whole reports whether merging its bytes yields it.
func (v *vocab) find(b []byte) (id uint32, whole, ok bool) { return v.findHash(hashBytes(b), b) }

// findHash is find with the hash of b.
func (v *vocab) findHash(h uint64, b []byte) (id uint32, whole, ok bool) {
	slot := v.slots[v.search(h, b)]
	if slot == 0 {
		return 0, false, false
	}
	return slot&maxID - 1, slot&wholeFlag != 0, true
}

// search returns the place of the token with these bytes and this hash, or else the empty one where it belongs.
func (v *vocab) search(h uint64, b []byte) uint64 {
	mask := uint64(len(v.slots) - 1)
	for at := h & mask; ; at = (at + 1) & mask {
		slot := v.slots[at]
		if slot == 0 || (slot^uint32(h>>32))>>(packedID+1) == 0 && bytes.Equal(v.bytes(slot&maxID-1), b) {
			return at
		}
	}
}

// bytes returns the text of a token; empty if there is none.
func (v *vocab) bytes(id uint32) []byte { return v.blob[v.start[id]:v.start[id+1]] }

// put adds a token to the table. It returns false if a token with these bytes exists already.
func (v *vocab) put(id uint32) bool {
	h := hashBytes(v.bytes(id))
	slot := &v.slots[v.search(h, v.bytes(id))]
	if *slot != 0 {
		return false
	}
	*slot = uint32(h>>32)>>(packedID+1)<<(packedID+1) | (id + 1)
	return true
}

// markWhole sets wholeFlag on each token for which whole is true, and returns them by id.
func (v *vocab) markWhole(whole func(id uint32) bool) []bool {
	wholes := make([]bool, len(v.has))
	for id := range wholes { // by id: their texts follow each other in memory
		wholes[id] = v.start[id] != v.start[id+1] && whole(uint32(id))
	}
	for at, slot := range v.slots {
		if slot != 0 && wholes[slot&maxID-1] {
			v.slots[at] |= wholeFlag
		}
	}
	return wholes
}

// vocabEntry is one member of the JSON object, with its text in raw.
type vocabEntry struct{ from, to, id uint32 }

// readVocab reads the object of token strings and ids. text converts a token string to the bytes
// that it matches, or reports that no text can contain it.
func readVocab(object []byte, text func(dst, token []byte) ([]byte, bool)) (*vocab, error) {
	l := tokenList{raw: make([]byte, 0, len(object)/4), literal: map[string]uint32{}}
	var buf []byte
	err := eachMember(object, func(key, value []byte) error {
		id, err := tokenID(value)
		if err != nil {
			return err
		}
		token, reachable := text(buf[:0], key)
		buf = token
		if _, named := l.literal[string(key)]; named && !reachable {
			return fmt.Errorf("the vocabulary names %q twice", key)
		}
		return l.addNamed(key, token, reachable, id)
	})
	if err != nil {
		return nil, err
	}
	return l.vocab()
}

// fill arranges the entries by id.
func (v *vocab) fill(raw []byte, entries []vocabEntry, top uint32) error {
	v.count = len(entries)
	v.has = make([]bool, top)
	v.start = make([]uint32, top+1)
	v.blob = make([]byte, 0, len(raw))
	byID := make([]vocabEntry, top)
	for _, e := range entries {
		if v.has[e.id] {
			return fmt.Errorf("two tokens of the vocabulary have id %d", e.id)
		}
		v.has[e.id] = true
		byID[e.id] = e
	}
	for id, e := range byID {
		v.blob = append(v.blob, raw[e.from:e.to]...)
		v.start[id+1] = uint32(len(v.blob))
	}
	v.slots = make([]uint32, 1<<bits.Len(uint(len(entries)*3/2)))
	for id := range top {
		if v.start[id] != v.start[id+1] && !v.put(id) {
			return fmt.Errorf("token %d repeats the text of another one", id)
		}
	}
	return nil
}

// tokenForm defines how the strings of a vocabulary represent text.
type tokenForm struct {
	// text converts a token string to the bytes that it matches, or reports that no text can contain it; name is its inverse.
	text func(dst, token []byte) ([]byte, bool)
	name func(text []byte) string
}

var (
	byteForm    = tokenForm{byteLevelText, byteLevelString}
	spaceForm   = tokenForm{spaceMarkText, spaceMarkString}
	literalForm = tokenForm{literalText, func(b []byte) string { return string(b) }}
)

// literalText returns the text of a token that stands for itself.
func literalText(dst, token []byte) ([]byte, bool) { return append(dst, token...), len(token) > 0 }

// byteAlphabet maps the characters of byte-level vocabularies to the bytes that they represent: GPT-2's printable substitutes.
var (
	byteToRune [256]rune
	runeToByte [0x180]int16
)

func init() {
	for i := range runeToByte {
		runeToByte[i] = -1
	}
	next := rune(256)
	for b := range 256 {
		r := rune(b)
		if b <= ' ' || b >= 0x7f && b <= 0xa0 || b == 0xad {
			r = next
			next++
		}
		byteToRune[b] = r
		runeToByte[r] = int16(b)
	}
}

// byteLevelText returns the bytes that a byte-level token matches.
func byteLevelText(dst, token []byte) ([]byte, bool) {
	for _, r := range string(token) {
		if int(r) >= len(runeToByte) || runeToByte[r] < 0 {
			return dst, false
		}
		dst = append(dst, byte(runeToByte[r]))
	}
	return dst, len(token) > 0
}

const spaceMark = "\u2581"

// spaceMarkText returns the text that a SentencePiece token matches: U+2581 becomes a space, and
// a token with a real space can never match.
func spaceMarkText(dst, token []byte) ([]byte, bool) {
	for i := 0; i < len(token); i++ {
		switch {
		case token[i] == ' ':
			return dst, false
		case token[i] == spaceMark[0] && bytes.HasPrefix(token[i:], []byte(spaceMark)):
			dst = append(dst, ' ')
			i += len(spaceMark) - 1
		default:
			dst = append(dst, token[i])
		}
	}
	return dst, len(token) > 0
}

// byteLevelString returns the token string of a byte-level token.
func byteLevelString(b []byte) string {
	out := make([]byte, 0, 2*len(b))
	for _, c := range b {
		out = utf8.AppendRune(out, byteToRune[c])
	}
	return string(out)
}

// spaceMarkString returns the token string of a SentencePiece token.
func spaceMarkString(b []byte) string {
	return string(bytes.ReplaceAll(b, []byte{' '}, []byte(spaceMark)))
}
