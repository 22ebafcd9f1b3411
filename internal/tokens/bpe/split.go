package bpe

// A splitter finds the words of a piece of text, as a pre-tokenizer's regular
// expression would. It writes the end of each word that starts at or after at
// to ends and returns how many it wrote and where the next word starts; it
// stops when ends is full. Words are adjacent, so ends tell all. Every word end
// is a place where splitting may be resumed.
type splitter interface {
	split(s string, at int, ends []uint32) (n, next int)
}

// byteKind sorts bytes for the fast loops.
type byteKind uint8

const (
	kindUpper byteKind = 1 << iota
	kindLower
	kindDigit
	kindSpace // white space but for line ends
	kindLine  // \r \n
	kindOther // punctuation, symbols, controls
	kindWide  // not ASCII

	kindLetter = kindUpper | kindLower
	kindBlank  = kindSpace | kindLine
)

var byteKinds = func() (k [256]byteKind) {
	for b := range 256 {
		c := byte(b)
		switch {
		case c >= 0x80:
			k[b] = kindWide
		case c >= 'A' && c <= 'Z':
			k[b] = kindUpper
		case c >= 'a' && c <= 'z':
			k[b] = kindLower
		case c >= '0' && c <= '9':
			k[b] = kindDigit
		case c == '\r' || c == '\n':
			k[b] = kindLine
		case c == ' ' || c == '\t' || c == '\v' || c == '\f':
			k[b] = kindSpace
		default:
			k[b] = kindOther
		}
	}
	return k
}()

// skip is the end of the run at i of code points with one of the bits.
func skip(s string, i int, bits class) int {
	for i < len(s) {
		if b := s[i]; b < 0x80 {
			if asciiClass[b]&bits == 0 {
				break
			}
			i++
			continue
		}
		c, w := wideClassAt(s, i)
		if c&bits == 0 {
			break
		}
		i += w
	}
	return i
}

// skipNot is the end of the run at i of code points with none of the bits.
func skipNot(s string, i int, bits class) int {
	for i < len(s) {
		if b := s[i]; b < 0x80 {
			if asciiClass[b]&bits != 0 {
				break
			}
			i++
			continue
		}
		c, w := wideClassAt(s, i)
		if c&bits != 0 {
			break
		}
		i += w
	}
	return i
}

// skipDigits is the end of at most limit code points with one of the bits; a
// limit of 0 is none.
func skipDigits(s string, i, limit int, bits class) int {
	for k := 0; i < len(s) && (k < limit || limit == 0); k++ {
		c, w := classAt(s, i)
		if c&bits == 0 {
			break
		}
		i += w
	}
	return i
}

// skipTail is the end of the run at i of line ends, and slashes if wanted.
func skipTail(s string, i int, slash bool) int {
	for i < len(s) && (s[i] == '\n' || s[i] == '\r' || slash && s[i] == '/') {
		i++
	}
	return i
}

// blankRun is where the word ends that starts at white space at i:
// `\s*[\r\n]+|\s+(?!\S)|\s+` if lines, else the last two only.
func blankRun(s string, i int, lines bool) int {
	line, last, j := -1, i, i
	for j < len(s) {
		if k := byteKinds[s[j]]; k&(kindBlank|kindWide) != kindWide {
			if k&kindBlank == 0 {
				break
			}
			last = j
			j++
			if k == kindLine {
				line = j
			}
			continue
		}
		c, w := wideClassAt(s, j)
		if c&clsWS == 0 {
			break
		}
		last = j
		j += w
	}
	switch {
	case lines && line >= 0:
		return line
	case j < len(s) && last > i:
		return last
	}
	return j
}

// contraction is the length of `(?i:'s|'t|'re|'ve|'m|'ll|'d)` at s[i], which is
// an apostrophe, or 0. Case folding makes U+017F an s.
func contraction(s string, i int) int {
	if i+1 >= len(s) {
		return 0
	}
	switch s[i+1] | 0x20 {
	case 's', 't', 'm', 'd':
		return 2
	case 'r', 'v':
		if i+2 < len(s) && s[i+2]|0x20 == 'e' {
			return 3
		}
	case 'l':
		if i+2 < len(s) && s[i+2]|0x20 == 'l' {
			return 3
		}
	case 0xe5: // U+017F begins with 0xc5
		if s[i+1] == 0xc5 && i+2 < len(s) && s[i+2] == 0xbf {
			return 3
		}
	}
	return 0
}

// wholeSplit makes one word of the text.
type wholeSplit struct{}

func (wholeSplit) split(s string, at int, ends []uint32) (int, int) {
	if at == len(s) {
		return 0, at
	}
	ends[0] = uint32(len(s))
	return 1, len(s)
}

// spaceSplit cuts before a space: before each one, or only before those that
// follow something else. The second is for SentencePiece models without a
// pre-tokenizer of which no merge joins a non-space to a space after it.
type spaceSplit struct{ each bool }

func (p spaceSplit) split(s string, at int, ends []uint32) (int, int) {
	n := 0
	for at < len(s) {
		if n == len(ends) {
			return n, at
		}
		j := at + 1
		if !p.each {
			for j < len(s) && s[j-1] == ' ' && s[j] == ' ' {
				j++
			}
		}
		for j < len(s) && s[j] != ' ' {
			j++
		}
		ends[n] = uint32(j)
		n++
		at = j
	}
	return n, at
}
