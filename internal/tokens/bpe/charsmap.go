package bpe

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"
	"unicode/utf8"
)

// charsmap is the precompiled normalization of a SentencePiece model: a double-array trie of
// sequences of bytes, whose values are offsets of the texts that replace them.
type charsmap struct {
	units []uint32
	texts []byte // each ends with a zero byte
	plain [utf8.RuneSelf]bool
}

func newCharsmap(raw []byte) (*charsmap, error) {
	if len(raw) < 4 {
		return nil, fmt.Errorf("charsmap of %d bytes", len(raw))
	}
	size := int(binary.LittleEndian.Uint32(raw))
	raw = raw[4:]
	if size > len(raw) || size%4 != 0 || size == 0 {
		return nil, fmt.Errorf("charsmap of %d bytes with a trie of %d", len(raw), size)
	}
	m := &charsmap{units: make([]uint32, size/4), texts: raw[size:]}
	for i := range m.units {
		m.units[i] = binary.LittleEndian.Uint32(raw[4*i:])
	}
	for c := range m.plain {
		_, n := m.match(string(rune(c)), true)
		m.plain[c] = n == 0 && c != '\r'
	}
	return m, nil
}

// match returns the replacement of a sequence that s starts with, the shortest or the longest, and
// the length of the sequence; 0 if there is none.
func (m *charsmap) match(s string, shortest bool) (text []byte, n int) {
	value := uint32(0)
	at := trieOffset(m.units[0])
	for i := 0; i < len(s) && s[i] != 0; i++ {
		at ^= uint32(s[i])
		if at >= uint32(len(m.units)) {
			break
		}
		unit := m.units[at]
		if unit&(1<<31|0xff) != uint32(s[i]) {
			break
		}
		at ^= trieOffset(unit)
		if unit>>8&1 == 1 && at < uint32(len(m.units)) {
			value, n = m.units[at]&(1<<31-1), i+1
			if shortest {
				break
			}
		}
	}
	if n == 0 || value > uint32(len(m.texts)) {
		return nil, 0
	}
	text = m.texts[value:]
	if end := bytes.IndexByte(text, 0); end >= 0 {
		text = text[:end]
	}
	return text, n
}

// trieOffset returns the offset of a unit in the format of Darts-clone.
func trieOffset(unit uint32) uint32 { return unit >> 10 << (unit & (1 << 9) >> 6) }

// maxGrapheme is the size in bytes from which the library replaces the characters of a grapheme cluster one by one. A
// smaller cluster is replaced by the text of the shortest sequence that it starts with, regardless of its rest.
const maxGrapheme = 6

// normalize is the normalizer Precompiled of the library.
func (m *charsmap) normalize(enc *encoder, s string) string {
	out := enc.nfc[:0]
	start := 0 // of the text that is not yet in out
	for i := 0; i < len(s); {
		if c := s[i]; c < utf8.RuneSelf && m.plain[c] && (i+1 == len(s) || s[i+1] < utf8.RuneSelf) {
			if i++; enc.watch.over(1) {
				break
			}
			continue
		}
		_, size := utf8.DecodeRuneInString(s[i:])
		size += m.extenders(&enc.watch, s, i, size)
		if enc.watch.over(size) {
			break
		}
		if size < maxGrapheme {
			if text, n := m.match(s[i:i+size], true); n > 0 {
				out = append(append(out, s[start:i]...), text...)
				start = i + size
				i = start
				continue
			}
		}
		for end := i + size; i < end; {
			_, n := utf8.DecodeRuneInString(s[i:])
			if enc.watch.over(n) {
				break
			}
			if text, found := m.match(s[i:i+n], true); found > 0 {
				out = append(append(out, s[start:i]...), text...)
				start = i + n
			}
			i += n
		}
	}
	enc.nfc = out
	if start == 0 {
		return s
	}
	out = append(out, s[start:]...)
	enc.nfc = out
	return stringOf(out)
}

// extenders returns the length of what extends the character at s[i], of n bytes, to a grapheme cluster. Clusters of several
// characters that cannot be shorter than maxGrapheme count as their parts. Once stopped, it returns the length of a part.
func (m *charsmap) extenders(wanted *watch, s string, i, n int) int {
	first, _ := utf8.DecodeRuneInString(s[i:])
	at := i + n
	if first == '\r' && strings.HasPrefix(s[at:], "\n") {
		return 1
	}
	if at == len(s) || s[at] < utf8.RuneSelf || standsAlone(first) {
		return 0
	}
	for at < len(s) {
		r, n := utf8.DecodeRuneInString(s[at:])
		if r < 0x300 || (runeClass(r)&clsM == 0 || strings.ContainsRune(looseMarks, r)) && !otherExtender(r) {
			break
		}
		if wanted.over(n) {
			break
		}
		at += n
	}
	return at - i - n
}

// standsAlone reports whether a character of up to three bytes is a control character of grapheme segmentation, to which no mark attaches.
func standsAlone(r rune) bool {
	switch {
	case r < ' ', r >= 0x7f && r < 0xa0, r == 0xad, r == 0x61c, r == 0x180e, r == 0x200b, r == 0x200e, r == 0x200f, r >= 0x2028 && r <= 0x202e,
		r >= 0x2060 && r <= 0x206f, r == 0xfeff, r >= 0xfff0 && r <= 0xfffb:
		return true
	}
	return false
}

// looseMarks are the marks that do not extend a grapheme cluster.
const looseMarks = "\u102b\u102c\u1038\u1062\u1063\u1064\u1067\u1068\u1069\u106a\u106b\u106c\u106d\u1083\u1087\u1088\u1089\u108a\u108b\u108c\u108f" +
	"\u109a\u109b\u109c\u1a61\u1a63\u1a64\uaa7b\uaa7d\U00011720\U00011721"

// otherExtender reports whether a character other than a mark extends a grapheme cluster.
func otherExtender(r rune) bool {
	return r == 0x200c || r == 0x200d || r == 0xff9e || r == 0xff9f || r == 0xe33 || r == 0xeb3 || r >= 0x1f3fb && r <= 0x1f3ff || r >= 0xe0020 && r <= 0xe007f
}
