package bpe

// stagedSplit is DeepSeek V3's sequence of three splits, each of which works
// inside the pieces that the one before it left:
//
//	\p{N}{1,3}
//	[一-龥぀-ゟ゠-ヿ]+
//	[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|
//	\s*[\r\n]+|\s+(?!\S)|\s+
//
// What no expression matches stays a word of its own between its neighbours.
type stagedSplit struct{}

var stagedRules = windowRules{codes: printedCodes, digits: 3, numbersApart: true}

func (p stagedSplit) split(s string, at int, ends []uint32) (int, int) {
	n, i := 0, at
	piece := at // end of the piece of the first two stages
	for i < len(s) && n < len(ends) {
		if n+windowSize <= len(ends) && windowAt(s, i) {
			if k, next := stagedRules.words(s, i, ends, n); k > n {
				n, i = k, next
				continue
			}
		} else if n > 0 && len(ends) >= windowSize && n+windowSize > len(ends) {
			break
		}
		if i >= piece {
			c, w := classAt(s, i)
			switch {
			case c&clsN != 0:
				i = skipDigits(s, i, 3, clsN)
				ends[n] = uint32(i)
				n++
				piece = i
				continue
			case c&clsKana != 0:
				piece = skip(s, i+w, clsKana)
			default:
				piece = p.plainEnd(s, i+w)
			}
		}
		// A stretch that nothing matches is one word.
		text, from := s[:piece], i
		end := -1
		for i < piece {
			if end = p.match(text, i); end >= 0 {
				break
			}
			_, w := classAt(s, i)
			i += w
		}
		if i > from {
			ends[n] = uint32(i)
			n++
			continue // the match behind it is found again
		}
		i = end
		ends[n] = uint32(i)
		n++
	}
	return n, i
}

// plainEnd is where the digits or the Han and Kana after i begin.
func (stagedSplit) plainEnd(s string, i int) int {
	for {
		for i < len(s) && byteKinds[s[i]]&(kindDigit|kindWide) == 0 {
			i++
		}
		if i == len(s) || s[i] < 0x80 {
			return i
		}
		c, w := wideClassAt(s, i)
		if c&(clsN|clsKana) != 0 {
			return i
		}
		i += w
	}
}

// match is the end of a match of the third stage at i, or -1.
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
