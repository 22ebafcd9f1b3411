package bpe

// caseSplit is the family of o200k (gpt-oss, Llama 4), tekken and Kimi:
//
//	[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|
//	[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|
//	\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+
//
// Kimi has `[\p{Han}]+|` before it and takes Han out of the two classes.
type caseSplit struct {
	digits       int
	contractions bool
	slash        bool
	han          bool
}

func (p caseSplit) split(s string, at int, ends []uint32) (int, int) {
	rules := windowRules{codes: allCodes, digits: p.digits, endings: p.contractions, cases: true, slash: p.slash}
	return rules.split(s, at, ends, p.next)
}

// class is classAt, without the letter classes of Han characters if those are split separately.
func (p caseSplit) class(s string, i int) (class, int) {
	c, w := classAt(s, i)
	if p.han && c&clsHan != 0 {
		c &^= clsUpper | clsLower
	}
	return c, w
}

func (p caseSplit) next(s string, i int) int {
	switch k := byteKinds[s[i]]; {
	case k == kindDigit && p.digits == 1:
		return i + 1
	case k == kindLine, k == kindSpace && i+1 < len(s) && byteKinds[s[i+1]]&kindBlank != 0:
		return blankRun(s, i, true)
	}
	c, w := classAt(s, i)
	if p.han && c&clsHan != 0 {
		return skip(s, i+w, clsHan)
	}
	prefix := c&(clsNL|clsL|clsN) == 0 && i+w < len(s)
	end := -1
	if prefix {
		end = p.lowerEnding(s, i+w)
	}
	if end < 0 {
		end = p.lowerEnding(s, i)
	}
	if end < 0 && prefix {
		end = p.upperStarting(s, i+w)
	}
	if end < 0 {
		end = p.upperStarting(s, i)
	}
	if end >= 0 {
		if p.contractions && end < len(s) && s[end] == '\'' {
			end += contraction(s, end)
		}
		return end
	}
	if c&clsN != 0 {
		return skipDigits(s, i, p.digits)
	}
	j := i
	if s[i] == ' ' {
		j++
	}
	if k := skipNot(s, j, clsWS|clsL|clsN); k > j {
		return skipTail(s, k, p.slash)
	}
	return blankRun(s, i, true)
}

// lowerEnding returns the end of `[upper]*[lower]+` at i, or -1. The classes share marks and caseless letters, so the
// first run may have to give back what follows its last shared code point.
func (p caseSplit) lowerEnding(s string, i int) int {
	j, shared := i, -1
	for j < len(s) {
		c, w := p.class(s, j)
		if c&clsUpper == 0 {
			break
		}
		j += w
		if c&clsLower != 0 {
			shared = j
		}
	}
	if k := p.lowerRun(s, j); k > j {
		return k
	}
	return shared
}

// upperStarting returns the end of `[upper]+[lower]*` at i, or -1.
func (p caseSplit) upperStarting(s string, i int) int {
	j := i
	for j < len(s) {
		c, w := p.class(s, j)
		if c&clsUpper == 0 {
			break
		}
		j += w
	}
	if j == i {
		return -1
	}
	return p.lowerRun(s, j)
}

func (p caseSplit) lowerRun(s string, i int) int {
	for i < len(s) {
		c, w := p.class(s, i)
		if c&clsLower == 0 {
			break
		}
		i += w
	}
	return i
}
