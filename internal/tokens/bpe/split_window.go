package bpe

import "math/bits"

// A window is up to 64 bytes of ASCII whose words are found together, with a bit set per kind of byte and arithmetic on the sets
// instead of a branch per byte. Addition follows runs: adding the first bit of a run of ones carries to the bit after it.
//
// A window starts at a word start. A word start is certain only if everything that it depends on is within the window,
// so an uncertain word at the end is left to the next window, and non-ASCII text to the splitter's own code.
const windowSize = 64

// windowRules are the parameters, for ASCII, of a split pattern of the form
//
//	[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
type windowRules struct {
	codes *[256]uint64
	// digits is the maximum length of a number, 0 for no limit.
	digits int
	// contractions: a contraction is a word of its own; endings: it belongs to the preceding word.
	contractions, endings bool
	// cases: words are cut between a lower-case and an upper-case letter.
	cases bool
	// slash: slashes count as line ends after punctuation.
	slash bool
	// numbersApart hides a number from the white space before it, which then does not leave its last character to the next word.
	numbersApart bool
}

// The code of a byte has a bit in each of four lanes of 16 bits, so that the codes of 16 bytes fit one word: letter;
// other than letter, digit and white space; white space; and more, which distinguishes upper-case letters, apostrophes
// and the space character from the rest of their kind. Line ends are white space and letter, the slash is letter and
// other. Digits have no bit; a byte that ends a window has only more.
const (
	laneLetter = 1 << (16 * iota)
	laneOther
	laneSpace
	laneMore
)

// windowCodes returns a table of codes. With controls, control characters count as other;
// patterns that name punctuation and symbols do not match them.
func windowCodes(controls bool) *[256]uint64 {
	var t [256]uint64
	for b := range t {
		switch k := byteKinds[b]; {
		case k == kindUpper:
			t[b] = laneLetter | laneMore
		case k == kindLower:
			t[b] = laneLetter
		case b == ' ':
			t[b] = laneSpace | laneMore
		case k == kindSpace:
			t[b] = laneSpace
		case k == kindLine:
			t[b] = laneSpace | laneLetter
		case b == '\'':
			t[b] = laneOther | laneMore
		case b == '/':
			t[b] = laneOther | laneLetter
		case k == kindOther && (controls || b >= ' ' && b != 0x7f):
			t[b] = laneOther
		case k == kindDigit:
		default:
			t[b] = laneMore
		}
	}
	return &t
}

var (
	allCodes     = windowCodes(true)
	printedCodes = windowCodes(false)
)

// lanes are the bit sets of a window.
type lanes struct{ letter, other, space, more uint64 }

// read fills the lanes from text up to the first byte that ends the window, and returns their length in bytes.
func (w *lanes) read(codes *[256]uint64, text []byte) int {
	var pad [windowSize]byte
	n := len(text)
	if n >= windowSize {
		n = windowSize
	} else {
		copy(pad[:], text)
		text = pad[:]
	}
	*w = lanes{}
	for at := 0; at < n; at += 16 {
		t := (*[16]byte)(text[at:])
		a := codes[t[0]] | codes[t[1]]<<1 | codes[t[2]]<<2 | codes[t[3]]<<3
		b := codes[t[4]] | codes[t[5]]<<1 | codes[t[6]]<<2 | codes[t[7]]<<3
		c := codes[t[8]] | codes[t[9]]<<1 | codes[t[10]]<<2 | codes[t[11]]<<3
		d := codes[t[12]] | codes[t[13]]<<1 | codes[t[14]]<<2 | codes[t[15]]<<3
		a |= b<<4 | c<<8 | d<<12
		w.letter |= a & 0xffff << at
		w.other |= a >> 16 & 0xffff << at
		w.space |= a >> 32 & 0xffff << at
		w.more |= a >> 48 << at
		if end := w.more &^ (w.letter | w.other | w.space); end != 0 {
			return min(n, bits.TrailingZeros64(end))
		}
	}
	return n
}

// windowAt reports whether a window at i of s is worth reading.
func windowAt(s string, i int) bool { return s[i] < 0x80 && i+1 < len(s) && s[i+1] < 0x80 }

// words writes to ends[n:] the ends of the words in the window at i of s, which must be a word start; ends must have
// room for windowSize more. It returns the new n and the start of the next word, which is i if no end is certain.
func (r *windowRules) words(s string, i int, ends []uint32, n int) (count, next int) {
	var w lanes
	size := w.read(r.codes, bytesOf(s)[i:])
	start, whole := r.starts(&w, s, i, size)
	start &^= 1
	for start != 0 {
		next = i + bits.TrailingZeros64(start)
		start &= start - 1
		ends[n] = uint32(next)
		n++
	}
	if whole {
		ends[n] = uint32(i + size)
		return n + 1, i + size
	}
	return n, max(i, next)
}

// split implements splitter.split: windows find the ends of ASCII words; next finds those in other
// text, and where ends has no room for a window.
func (r *windowRules) split(s string, at int, ends []uint32, next func(s string, i int) int) (int, int) {
	n, i := 0, at
	for i < len(s) && n < len(ends) && (len(ends) < windowSize || n+windowSize <= len(ends)) {
		if len(ends) >= windowSize && windowAt(s, i) {
			if k, to := r.words(s, i, ends, n); k > n {
				n, i = k, to
				continue
			}
		}
		i = next(s, i)
		ends[n] = uint32(i)
		n++
	}
	return n, i
}

// upTo returns the set of the bits below i.
func upTo(i int) uint64 { return 1<<uint(i) - 1 }

// starts returns the set of certain word starts in a window of size bytes at i. whole reports
// whether the last of these words ends with both the window and the text.
func (r *windowRules) starts(w *lanes, s string, i, size int) (start uint64, whole bool) {
	if size == 0 {
		return 0, false
	}
	valid := ^uint64(0) >> (windowSize - uint(size))
	other, space := w.other&valid, w.space&valid
	letter := w.letter &^ (other | space) & valid
	line := space & w.letter
	blank := space &^ line
	single := space & w.more // the space character: punctuation forms a word with one before it
	digit := ^(w.letter | w.other | w.space | w.more) & valid
	solid := ^space & valid

	// Punctuation is one word with the space before it. A single character without such a space joins the letters after it.
	others := other &^ (other << 1) &^ (single << 1)
	prefix := others & (letter >> 1)
	start = others | letter&^(letter<<1)&^(blank<<1)&^(prefix<<1)
	if r.cases {
		start |= letter & w.more & (letter &^ w.more << 1)
	}
	switch number := digit &^ (digit << 1); r.digits {
	case 0:
		start |= number
	case 1:
		start |= digit
	default:
		for number != 0 {
			start |= number
			for range r.digits {
				number = number << 1 & digit
			}
		}
	}

	// The bytes up to a place decide whether a word starts there, in white space those after it too (contractions and
	// slashes: below). So of white space at the window's end only the first place, above the last solid one, is certain.
	certain := ^uint64(0)
	if space>>(size-1) != 0 {
		certain = upTo(bits.Len64(solid) + 1)
	}

	// Line ends after punctuation belong to it. A run of white space is one word up to its last
	// line end; the last character of the remainder joins the next word.
	runs := space &^ (space << 1)
	start |= runs & (blank | line&^(other<<1))
	if r.numbersApart {
		start |= blank & (solid &^ digit >> 1)
	} else {
		start |= blank & (solid >> 1)
	}
	if line != 0 {
		tails := (line&(other<<1) + line) &^ line // what follows line ends after punctuation
		if slash := tails & w.other & w.letter & valid; r.slash && slash != 0 {
			certain &= slash&-slash - 1
		}
		start |= tails&blank | afterLines(line, blank)
	}
	if a := prefix & w.more &^ w.letter; a != 0 && r.contractions {
		start, certain = contractionStarts(a, start, certain, s, i, size)
	}
	if a := other & w.more & (letter << 1); a != 0 && r.endings {
		start, certain = contractionEndings(a, start, certain, s, i, size)
	}
	return start & certain, ^certain == 0 && i+size == len(s)
}

// afterLines returns the blanks that start a word after the last line end of a run of white space. A run of blanks has at
// most one bit of rest, its first, so the sum carries to the byte after the run. If that ends a line, no word starts.
func afterLines(line, blank uint64) uint64 {
	rest := blank & (line << 1)
	absorbed := (rest + blank) &^ blank & line
	for absorbed != 0 {
		end := bits.TrailingZeros64(absorbed)
		absorbed &= absorbed - 1
		rest &^= 1 << uint(bits.Len64(upTo(end)&^blank))
	}
	return rest
}

// contractionStarts adds the ends of contractions that are words, at the apostrophes a.
func contractionStarts(a, start, certain uint64, s string, i, size int) (uint64, uint64) {
	for ; a != 0; a &= a - 1 {
		at := bits.TrailingZeros64(a)
		if at+3 >= size {
			return start, certain & upTo(at+1)
		}
		if k := contraction(s, i+at); k > 0 {
			start |= 1 << uint(at+k)
		}
	}
	return start, certain
}

// contractionEndings joins contractions to the preceding words, at the apostrophes a.
func contractionEndings(a, start, certain uint64, s string, i, size int) (uint64, uint64) {
	done := -1
	for ; a != 0; a &= a - 1 {
		at := bits.TrailingZeros64(a)
		if at+3 >= size {
			return start, certain & upTo(at)
		}
		if k := contraction(s, i+at); k > 0 && at != done {
			done = at + k
			start = start&^(upTo(done)&^upTo(at)) | 1<<uint(done)
		}
	}
	return start, certain
}
