package bpe

// A splitter finds the words of a piece of text, like a pre-tokenizer's regular expression. It writes to ends the end
// of each word that starts at or after at, until ends is full, and returns how many it wrote and where the next word
// starts. Words are adjacent, so the ends define them. Splitting may be resumed at any word end.
type splitter interface {
	split(s string, at int, ends []uint32) (n, next int)
}

// byteKind classifies bytes for the fast loops.
type byteKind uint8

const (
	kindUpper byteKind = 1 << iota
	kindLower
	kindDigit
	kindSpace // white space except line ends
	kindLine  // \r \n
	kindOther // punctuation, symbols, controls
	kindWide  // non-ASCII

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

// skip returns the end of the run at i of code points with at least one of the bits.
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

// skipNot returns the end of the run at i of code points with none of the bits.
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

// skipDigits returns the end of the run at i of at most limit numbers (\p{N}); limit 0 means no limit.
func skipDigits(s string, i, limit int) int {
	for k := 0; i < len(s) && (k < limit || limit == 0); k++ {
		c, w := classAt(s, i)
		if c&clsN == 0 {
			break
		}
		i += w
	}
	return i
}

// skipTail returns the end of the run at i of line ends, and of slashes if slash is set.
func skipTail(s string, i int, slash bool) int {
	for i < len(s) && (s[i] == '\n' || s[i] == '\r' || slash && s[i] == '/') {
		i++
	}
	return i
}

// blankRun returns the end of the word that starts with white space at i:
// `\s*[\r\n]+|\s+(?!\S)|\s+` if lines, else only the last two alternatives.
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

// contraction returns the length of `(?i:'s|'t|'re|'ve|'m|'ll|'d)` at s[i], which is an
// apostrophe, or 0. Under case folding U+017F is an s.
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
	case 0xe5: // U+017F starts with 0xc5
		if s[i+1] == 0xc5 && i+2 < len(s) && s[i+2] == 0xbf {
			return 3
		}
	}
	return 0
}

// wholeSplit makes the whole text one word.
type wholeSplit struct{}

func (wholeSplit) split(s string, at int, ends []uint32) (int, int) {
	if at == len(s) {
		return 0, at
	}
	ends[0] = uint32(len(s))
	return 1, len(s)
}

// spaceSplit cuts before spaces: before each one, or only before those that follow a non-space. The latter is for
// SentencePiece models without a pre-tokenizer whose merges never join a non-space to a following space.
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
