package bpe

import "unicode/utf8"

// wordSplit is the family of cl100k, Llama 3 and Qwen:
//
//	(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
//
// digits is the limit of a number; with marks, \p{M} belongs to words ([\p{L}\p{M}]+) and not to punctuation, as in Qwen 3.5.
type wordSplit struct {
	digits int
	marks  bool
}

func (p wordSplit) split(s string, at int, ends []uint32) (int, int) {
	rules := windowRules{codes: allCodes, digits: p.digits, contractions: true}
	return rules.split(s, at, ends, p.next)
}

// next returns the end of the word at i.
func (p wordSplit) next(s string, i int) int {
	switch k := byteKinds[s[i]]; {
	case k == kindDigit && p.digits == 1:
		return i + 1
	case k == kindLine, k == kindSpace && i+1 < len(s) && byteKinds[s[i+1]]&kindBlank != 0:
		return blankRun(s, i, true)
	}
	letters, others := clsL, clsWS|clsL|clsN
	if p.marks {
		letters, others = clsL|clsM, clsWS|clsL|clsN|clsM
	}
	if s[i] == '\'' {
		if k := contraction(s, i); k > 0 {
			return i + k
		}
	}
	c, w := classAt(s, i)
	if c&(clsNL|clsL|clsN) == 0 && i+w < len(s) {
		if c2, w2 := classAt(s, i+w); c2&letters != 0 {
			return skip(s, i+w+w2, letters)
		}
	}
	if c&letters != 0 {
		return skip(s, i+w, letters)
	}
	if c&clsN != 0 {
		return skipDigits(s, i, p.digits)
	}
	j := i
	if s[i] == ' ' {
		j++
	}
	if k := skipNot(s, j, others); k > j {
		return skipTail(s, k, false)
	}
	return blankRun(s, i, true)
}

// gpt2Split is GPT-2's pattern, which the ByteLevel pre-tokenizer has built in:
//
//	's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//
// With digits, each digit is cut out first (pre-tokenizer Digits), as StarCoder and Command R do.
type gpt2Split struct{ digits bool }

func (p gpt2Split) split(s string, at int, ends []uint32) (int, int) {
	n, i := 0, at
	for i < len(s) && n < len(ends) {
		if p.digits {
			i = p.nextBeforeDigit(s, i)
		} else {
			i = p.next(s, i)
		}
		ends[n] = uint32(i)
		n++
	}
	return n, i
}

// nextBeforeDigit returns the end of the word at i where each digit is a word of its own: a digit ends the text that next
// sees. Only a digit up to the second rune behind the word can change where it ends, since next looks no further ahead.
// Looking for a digit beyond that would take quadratic time on text without digits.
func (p gpt2Split) nextBeforeDigit(s string, i int) int {
	c, w := classAt(s, i)
	if c&clsDigit != 0 {
		return i + w
	}
	end := p.next(s, i)
	seen := min(len(s), end+2*utf8.UTFMax)
	if digit := skipNot(s[:seen], i+w, clsDigit); digit < seen {
		return p.next(s[:digit], i)
	}
	return end
}

func (gpt2Split) next(s string, i int) int {
	if s[i] == '\'' {
		if k := contraction(s, i); k > 0 && s[i+1] >= 'a' && s[i+1] <= 'z' && (k == 2 || s[i+2] >= 'a' && s[i+2] <= 'z') {
			return i + k
		}
	}
	j := i
	if s[i] == ' ' && i+1 < len(s) {
		j++
	}
	switch c, w := classAt(s, j); {
	case c&clsL != 0:
		return skip(s, j+w, clsL)
	case c&clsN != 0:
		return skip(s, j+w, clsN)
	case c&clsWS == 0:
		return skipNot(s, j+w, clsWS|clsL|clsN)
	}
	return blankRun(s, i, false)
}
