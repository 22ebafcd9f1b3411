package model

import "strconv"

// wideIntegers makes floats of the integers in a JSON text that 64 bits do not hold, as orjson reads them. A text without
// any is returned as it is.
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

// endOfString is where the string that begins at i ends, behind its quote.
func endOfString(text []byte, i int) int {
	for i++; i < len(text) && text[i] != '"'; i++ {
		if text[i] == '\\' {
			i++
		}
	}
	return min(i+1, len(text))
}

// endOfNumber is where the number that begins at i ends; whole says that it has neither a fraction nor an exponent.
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

// isWide tells whether 64 bits do not hold an integer.
func isWide(digits []byte) bool {
	const sure, most = 18, 20 // so many digits always fit, and never more
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
