package shape

import (
	"bytes"
	"strconv"
)

// wideIntegers converts the integers in a JSON text that do not fit in 64 bits to floats, as
// orjson does. A text without any is returned unchanged.
func wideIntegers(text []byte) []byte {
	var out []byte
	at := 0
	for i := 0; i < len(text); {
		switch c := text[i]; {
		case c == '"':
			i = endOfString(text, i)
		case c == '-' || c-'0' < 10:
			end, whole := endOfNumber(text, i)
			if whole && isWide(text[i:end]) {
				out = append(append(out, text[at:end]...), ".0"...)
				at = end
			}
			i = end
		default:
			i++
		}
	}
	if at == 0 {
		return text
	}
	return append(out, text[at:]...)
}

// endOfString returns the offset after the closing quote of the string that starts at i.
func endOfString(text []byte, i int) int {
	for start := i + 1; ; {
		n := bytes.IndexByte(text[start:], '"')
		if n < 0 {
			return len(text)
		}
		end := start + n
		before := end
		for before > i+1 && text[before-1] == '\\' {
			before--
		}
		if (end-before)%2 == 0 { // the quote is not escaped
			return end + 1
		}
		start = end + 1
	}
}

// endOfNumber returns the end of the number that starts at i. whole reports that it has neither a fraction nor an exponent.
func endOfNumber(text []byte, i int) (end int, whole bool) {
	whole = true
	for i++; i < len(text); i++ {
		switch c := text[i]; {
		case c-'0' < 10:
		case c == '.' || c|0x20 == 'e' || c == '+' || c == '-':
			whole = false
		default:
			return i, whole
		}
	}
	return i, whole
}

// isWide reports whether an integer does not fit in 64 bits.
func isWide(digits []byte) bool {
	const sure, most = 18, 20 // digits that always fit, and that may fit at most
	if len(digits) <= sure || len(digits) > most+1 {
		return len(digits) > sure
	}
	var err error
	if digits[0] == '-' {
		_, err = strconv.ParseInt(string(digits), 10, 64)
	} else {
		_, err = strconv.ParseUint(string(digits), 10, 64)
	}
	return err != nil
}
