package body

import (
	"bytes"
	"errors"
	"unicode/utf16"
	"unicode/utf8"
)

// ErrLoneSurrogate is returned for a string with half of a surrogate pair. It is valid JSON, but
// not valid text; engines answer 400.
var ErrLoneSurrogate = errors.New("lone surrogate in a string")

// AppendText appends the decoded text of raw, a checked JSON string including its quotes.
func AppendText(dst, raw []byte) ([]byte, error) {
	if len(raw) < 2 || raw[0] != '"' {
		return dst, errors.New("not a string")
	}
	raw = raw[1 : len(raw)-1]
	for {
		i := bytes.IndexByte(raw, '\\')
		if i < 0 {
			return append(dst, raw...), nil
		}
		dst = append(dst, raw[:i]...)
		c := raw[i+1]
		raw = raw[i+2:]
		if c != 'u' {
			dst = append(dst, unescaped[c])
			continue
		}
		r, _ := hex4(raw, 0)
		raw = raw[4:]
		if utf16.IsSurrogate(r) {
			if len(raw) < 6 || raw[0] != '\\' || raw[1] != 'u' {
				return dst, ErrLoneSurrogate
			}
			low, _ := hex4(raw, 2)
			if r = utf16.DecodeRune(r, low); r == utf8.RuneError {
				return dst, ErrLoneSurrogate
			}
			raw = raw[6:]
		}
		dst = utf8.AppendRune(dst, r)
	}
}

var unescaped = [256]byte{'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}

// roomForKey is more than any field's name has in bytes. Longer keys are decoded on the heap.
const roomForKey = 64

// textWithin returns the text of raw, a checked JSON string, decoded behind room if it has escapes. ok is false if it has half of a
// surrogate pair or more than most bytes. The latter costs no time if it is much longer: each byte is written as 6 at most.
func textWithin(most int, room, raw []byte) (text []byte, ok bool) {
	switch inner := raw[1 : len(raw)-1]; {
	case len(inner) > 6*most:
		return nil, false
	case !hasEscape(inner):
		return inner, len(inner) <= most
	}
	text, err := AppendText(room, raw)
	if err != nil {
		return nil, false
	}
	return text, len(text) <= most
}

// IsKey reports whether a key as written, including its quotes, equals name.
func IsKey(key []byte, name string) bool {
	var room [roomForKey]byte
	text, _ := textWithin(len(name), room[:0], key)
	return text != nil && string(text) == name
}
