package jinja

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// maxQuoted bounds, in bytes, the text that an error message quotes.
const maxQuoted = 4 << 10

// reprText is Python's repr of a str for an error message; very long text is truncated.
func reprText(s string) string {
	if len(s) > maxQuoted {
		s = strings.ToValidUTF8(s[:maxQuoted], "") + "..."
	}
	return string(appendRepr(nil, s))
}

// reprSize returns an upper bound of the length of a str's repr.
func reprSize(s string) int {
	n := len(s) + 2
	for i := range len(s) {
		if c := s[i]; c < ' ' || c == '\\' || c == '\'' || c >= 0x7f {
			n += 3
		}
	}
	return n
}

func appendRepr(dst []byte, s string) []byte {
	quote := byte('\'')
	if strings.IndexByte(s, '\'') >= 0 && strings.IndexByte(s, '"') < 0 {
		quote = '"'
	}
	dst = append(dst, quote)
	for i := 0; i < len(s); {
		c := s[i]
		if c < utf8.RuneSelf {
			i++
			switch {
			case c == quote || c == '\\':
				dst = append(dst, '\\', c)
			case c == '\n' || c == '\r' || c == '\t':
				dst = append(dst, '\\', shortEscapes[c])
			case c < ' ' || c == 0x7f:
				dst = append(dst, '\\', 'x', hexDigits[c>>4], hexDigits[c&15])
			default:
				dst = append(dst, c)
			}
			continue
		}
		r, size := utf8.DecodeRuneInString(s[i:])
		switch {
		case printable(r):
			dst = append(dst, s[i:i+size]...)
		case r <= 0xff:
			dst = append(dst, '\\', 'x', hexDigits[r>>4&15], hexDigits[r&15])
		case r <= 0xffff:
			dst = appendEscape(dst, r)
		default:
			dst = append(dst, '\\', 'U', '0', '0', hexDigits[r>>20&15], hexDigits[r>>16&15],
				hexDigits[r>>12&15], hexDigits[r>>8&15], hexDigits[r>>4&15], hexDigits[r&15])
		}
		i += size
	}
	return append(dst, quote)
}

// printable is Python's str.isprintable for one character: everything except the categories Other
// and Separator, of which only the space is printable.
func printable(r rune) bool { return unicode.IsPrint(r) }
