package bpe

import "unicode/utf8"

// stagedSplit is DeepSeek V3's sequence of three splits, each of which works inside the pieces that the one before it left:
//
//	\p{N}{1,3}
//	[一-龥぀-ゟ゠-ヿ]+
//	[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|
//	\s*[\r\n]+|\s+(?!\S)|\s+
//
// Text that no expression matches is a word of its own between its neighbours.
type stagedSplit struct{}

var stagedRules = windowRules{codes: printedCodes, digits: 3, numbersApart: true}

func (p stagedSplit) split(s string, at int, ends []uint32) (int, int) {
	n, i := 0, at
	var piece stagedPiece
	for i < len(s) && n < len(ends) {
		if n+windowSize <= len(ends) && windowAt(s, i) {
			if k, next := stagedRules.words(s, i, ends, n); k > n {
				n, i = k, next
				continue
			}
		} else if n > 0 && len(ends) >= windowSize && n+windowSize > len(ends) {
			break
		}
		if i >= piece.end {
			c, w := classAt(s, i)
			if c&clsN != 0 {
				i = skipDigits(s, i, 3)
				ends[n] = uint32(i)
				n++
				continue
			}
			piece = stagedPiece{end: i + w, kana: c&clsKana != 0}
		}
		i = p.word(s, i, &piece)
		ends[n] = uint32(i)
		n++
	}
	return n, i
}

// word returns the end of the word at i within the piece: a match of the third stage, or the
// unmatched text before the next match.
func (p stagedSplit) word(s string, i int, piece *stagedPiece) int {
	for from := i; ; {
		if i >= piece.end {
			if piece.whole {
				return i
			}
			piece.extend(s, i)
			continue
		}
		text := s[:piece.end]
		end := p.match(text, i)
		// match reads at most to its result, the white space at i and two more characters.
		if read := max(end, skip(text, i, clsWS), i+2*utf8.UTFMax); read >= piece.end && !piece.whole {
			piece.extend(s, i)
			continue
		}
		switch {
		case end >= 0 && i == from:
			return end
		case end >= 0:
			return i // the match that follows is found again
		}
		_, w := classAt(s, i)
		i += w
	}
}

// stagedPiece is a piece that the first two stages leave, as far as it has been read. A piece may
// be the rest of the text; reading all of it for every few words would take quadratic time.
type stagedPiece struct {
	end   int
	whole bool // the piece ends there
	kana  bool // it consists of Han and Kana
}

// extend reads on, at least doubling what was read after i.
func (p *stagedPiece) extend(s string, i int) {
	const least = 256
	for limit := p.end + max(least, p.end-i); p.end < limit; {
		if p.end == len(s) {
			p.whole = true
			return
		}
		c, w := classAt(s, p.end)
		if c&clsN != 0 || (c&clsKana != 0) != p.kana {
			p.whole = true
			return
		}
		p.end += w
	}
}

// match returns the end of a match of the third stage at i, or -1.
func (stagedSplit) match(s string, i int) int {
	c, w := classAt(s, i)
	if c&clsASCIIP != 0 && i+1 < len(s) && byteKinds[s[i+1]]&kindLetter != 0 {
		return skip(s, i+2, clsAlpha)
	}
	if c&(clsNL|clsL|clsP|clsS) == 0 && i+w < len(s) {
		if c2, w2 := classAt(s, i+w); c2&(clsL|clsM) != 0 {
			return skip(s, i+w+w2, clsL|clsM)
		}
	}
	if c&(clsL|clsM) != 0 {
		return skip(s, i+w, clsL|clsM)
	}
	j := i
	if s[i] == ' ' {
		j++
	}
	if k := skip(s, j, clsP|clsS); k > j {
		return skipTail(s, k, false)
	}
	if c&clsWS != 0 {
		return blankRun(s, i, true)
	}
	return -1
}
