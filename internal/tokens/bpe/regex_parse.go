package bpe

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// This engine runs the split patterns that have no splitter of their own. It supports the part of
// Oniguruma's syntax that the patterns of language models use, with the meaning that the
// reference library gives it; every other construct is rejected by name.

// regexOp is the kind of a node.
type regexOp uint8

const (
	opSet       regexOp = iota // one code point of set
	opSeq                      // all subs
	opAlt                      // the first of subs that leads to a match
	opRepeat                   // subs[0], min to max times; no limit if max is negative
	opLook                     // subs[0] matches here, or not
	opAtomic                   // the first match of subs[0], without backtracking
	opLineEnd                  // $: the end of the text or of any line
	opWordBound                // \b
)

// regexNode is a parsed pattern.
type regexNode struct {
	op         regexOp
	subs       []*regexNode
	set        *runeSet
	min, max   int
	possessive bool
	not        bool // negative look ahead
}

// maxRepeat and maxNesting bound a pattern.
const (
	maxRepeat  = 1000
	maxNesting = 50
)

// regexParser reads a pattern.
type regexParser struct {
	text  string
	at    int
	fold  bool // within (?i: )
	depth int
}

func parseRegex(text string) (*regexNode, error) {
	p := &regexParser{text: text}
	n, err := p.alternatives()
	if err == nil && p.at < len(text) {
		err = p.refuse("an unbalanced parenthesis")
	}
	return n, err
}

func (p *regexParser) refuse(what string) error {
	return unsupported("%s in the pattern %q", what, p.text)
}

// next reports whether the pattern continues with s, and skips it if so.
func (p *regexParser) next(s string) bool {
	if !strings.HasPrefix(p.text[p.at:], s) {
		return false
	}
	p.at += len(s)
	return true
}

// peek returns the next byte, 0 at the end.
func (p *regexParser) peek() byte {
	if p.at == len(p.text) {
		return 0
	}
	return p.text[p.at]
}

// nest counts a nesting level until the returned function is called.
func (p *regexParser) nest() (func(), error) {
	if p.depth++; p.depth > maxNesting {
		return nil, p.refuse("deep nesting")
	}
	return func() { p.depth-- }, nil
}

func (p *regexParser) alternatives() (*regexNode, error) {
	leave, err := p.nest()
	if err != nil {
		return nil, err
	}
	defer leave()
	all := &regexNode{op: opAlt}
	for {
		seq := &regexNode{op: opSeq}
		for p.at < len(p.text) && p.peek() != '|' && p.peek() != ')' {
			n, err := p.atom()
			if err != nil {
				return nil, err
			}
			if n, err = p.quantified(n); err != nil {
				return nil, err
			}
			seq.subs = append(seq.subs, n)
		}
		all.subs = append(all.subs, seq)
		if !p.next("|") {
			return all, nil
		}
	}
}

// quantified reads the quantifier after an atom, if there is one.
func (p *regexParser) quantified(n *regexNode) (*regexNode, error) {
	rep := &regexNode{op: opRepeat, subs: []*regexNode{n}}
	switch {
	case p.next("?"):
		rep.max = 1
	case p.next("*"):
		rep.max = -1
	case p.next("+"):
		rep.min, rep.max = 1, -1
	case p.next("{"):
		if err := p.interval(rep); err != nil {
			return nil, err
		}
		if strings.IndexByte("?*+{", p.peek()) >= 0 && p.peek() != 0 {
			return nil, p.refuse("a quantifier behind an interval")
		}
	default:
		return n, nil
	}
	rep.possessive = p.next("+")
	switch p.peek() {
	case '?', '*', '+', '{':
		return nil, p.refuse("a lazy or repeated quantifier")
	}
	switch n.op {
	case opLook, opLineEnd, opWordBound:
		return nil, p.refuse("a quantifier behind an assertion")
	}
	return rep, nil
}

// interval reads the rest of {n}, {n,}, {,m} or {n,m} after the brace.
func (p *regexParser) interval(rep *regexNode) error {
	low, hasLow := p.number()
	rep.min, rep.max = low, low
	if p.next(",") {
		high, hasHigh := p.number()
		rep.max = high
		if !hasHigh {
			rep.max = -1
		}
		hasLow = hasLow || hasHigh
	}
	if !hasLow || !p.next("}") || rep.max >= 0 && rep.max < rep.min || max(rep.min, rep.max) > maxRepeat {
		return p.refuse("an interval")
	}
	return nil
}

func (p *regexParser) number() (n int, ok bool) {
	for p.peek() >= '0' && p.peek() <= '9' && n <= maxRepeat {
		n = 10*n + int(p.peek()-'0')
		p.at++
		ok = true
	}
	return n, ok
}

// atom reads one code point, class, group or assertion.
func (p *regexParser) atom() (*regexNode, error) {
	switch c := p.peek(); {
	case c == '(':
		return p.group()
	case c == '[':
		set, err := p.class()
		return &regexNode{op: opSet, set: set}, err
	case c == '^':
		return nil, p.refuse("^")
	case strings.IndexByte("*+?{}", c) >= 0:
		return nil, p.refuse("a quantifier without an atom")
	case p.next("."):
		return &regexNode{op: opSet, set: newRuneSet([][2]rune{{0, '\n' - 1}, {'\n' + 1, utf8.MaxRune}})}, nil
	case p.next("$"):
		return &regexNode{op: opLineEnd}, nil
	case p.next(`\b`):
		return &regexNode{op: opWordBound}, nil
	}
	ranges, err := p.codePoints(false)
	if err != nil {
		return nil, err
	}
	set, err := p.cased(ranges)
	return &regexNode{op: opSet, set: set}, err
}

// cased returns the set of ranges, extended by both cases of each letter if case is ignored. That
// is supported for ASCII letters only, of which s and k have a third form.
func (p *regexParser) cased(ranges [][2]rune) (*runeSet, error) {
	if !p.fold {
		return newRuneSet(ranges), nil
	}
	out := ranges
	for _, r := range ranges {
		if r[1] >= utf8.RuneSelf {
			return nil, p.refuse("more than ASCII where case is ignored")
		}
		for c := r[0]; c <= r[1]; c++ {
			switch lower := c | 0x20; {
			case lower < 'a' || lower > 'z':
				continue
			case lower == 's':
				out = append(out, [2]rune{0x17f, 0x17f}) // long s
			case lower == 'k':
				out = append(out, [2]rune{0x212a, 0x212a}) // Kelvin
			}
			out = append(out, [2]rune{c ^ 0x20, c ^ 0x20})
		}
	}
	return newRuneSet(out), nil
}

// regexGroups are the groups by their opening; others that start with "(?" or "(*" are rejected.
var regexGroups = []struct {
	begin string
	node  regexNode
	fold  bool
}{
	{begin: "(?:", node: regexNode{op: opSeq}},
	{begin: "(?i:", node: regexNode{op: opSeq}, fold: true},
	{begin: "(?=", node: regexNode{op: opLook}},
	{begin: "(?!", node: regexNode{op: opLook, not: true}},
	{begin: "(?>", node: regexNode{op: opAtomic}},
	{begin: "(?", node: regexNode{op: opSet}},
	{begin: "(*", node: regexNode{op: opSet}},
	{begin: "(", node: regexNode{op: opSeq}},
}

// foldedPairs are pairs of letters that match a single letter when case is ignored.
var foldedPairs = []string{"ss", "ff", "fi", "fl", "st"}

func (p *regexParser) group() (*regexNode, error) {
	defer func(fold bool) { p.fold = fold }(p.fold)
	for _, g := range regexGroups {
		if !p.next(g.begin) {
			continue
		}
		if g.node.op == opSet {
			return nil, p.refuse("an unknown group")
		}
		p.fold = p.fold || g.fold
		from := p.at
		n, err := p.alternatives()
		if err != nil {
			return nil, err
		}
		for _, pair := range foldedPairs {
			if p.fold && strings.Contains(strings.ToLower(p.text[from:p.at]), pair) {
				return nil, p.refuse(pair + " where case is ignored")
			}
		}
		if !p.next(")") {
			return nil, p.refuse("an open group")
		}
		node := g.node
		node.subs = []*regexNode{n}
		return &node, nil
	}
	return nil, p.refuse("a group")
}

// regexEscapes are the escapes that stand for one code point, regexClasses those that stand for a
// class; the capital letter denotes its inverse.
var (
	regexEscapes = map[byte]rune{'t': '\t', 'n': '\n', 'r': '\r', 'f': '\f', 'v': '\v'}
	regexClasses = map[byte]string{'s': "WS", 'd': "OnigDigit", 'w': "OnigWord"}
)

// regexProperties are the generated classes that patterns may name as in \p{L}.
const regexProperties = " L N M P S Z Lu Ll Lt Lm Lo Nd Nl No Mn Mc Han Hiragana Katakana Hangul Latin Cyrillic Greek Arabic Hebrew Thai Devanagari "

// latinNumbers are in \w, except inside a bracketed class.
var latinNumbers = newRuneSet([][2]rune{{0xb2, 0xb3}, {0xb9, 0xb9}, {0xbc, 0xbe}})

// codePoints reads a code point or an escape that stands for one or for a class.
func (p *regexParser) codePoints(bracketed bool) ([][2]rune, error) {
	if p.at == len(p.text) {
		return nil, p.refuse("an open class")
	}
	escaped := p.next(`\`)
	r, n := utf8.DecodeRuneInString(p.text[p.at:])
	if p.at += n; n == 0 {
		return nil, p.refuse("a backslash at the end")
	}
	if !escaped || r >= utf8.RuneSelf {
		return [][2]rune{{r, r}}, nil
	}
	c := byte(r)
	if one, ok := regexEscapes[c]; ok {
		return [][2]rune{{one, one}}, nil
	}
	name, ok := regexClasses[c|0x20]
	switch {
	case ok:
	case c|0x20 == 'p':
		var end bool
		name, _, end = strings.Cut(strings.TrimPrefix(p.text[p.at:], "{"), "}")
		if !end || !p.next("{"+name+"}") || !strings.Contains(regexProperties, " "+name+" ") {
			return nil, p.refuse(`the property \p{` + name + "}")
		}
	case c == 'x' && p.peek() == '{' || c == 'u':
		return p.hex(c == 'x')
	case c >= '0' && c <= '9' || c|0x20 >= 'a' && c|0x20 <= 'z':
		return nil, p.refuse(`\` + string(c))
	default:
		return [][2]rune{{r, r}}, nil
	}
	set := namedSet(name)
	if bracketed && name == "OnigWord" {
		set = newRuneSet(set.shared(newRuneSet(latinNumbers.inverse())))
	}
	if c&0x20 == 0 {
		return set.inverse(), nil
	}
	return set.ranges, nil
}

// hex reads the four digits of \uHHHH or the up to six of \x{H}.
func (p *regexParser) hex(braces bool) ([][2]rune, error) {
	digits, ok := p.text[p.at:min(p.at+4, len(p.text))], true
	if braces {
		digits, _, ok = strings.Cut(p.text[p.at+1:], "}")
		p.at += len("{}")
	}
	v, err := strconv.ParseUint(digits, 16, 21)
	if r := rune(v); ok && err == nil && utf8.ValidRune(r) && (braces || len(digits) == 4) {
		p.at += len(digits)
		return [][2]rune{{r, r}}, nil
	}
	return nil, p.refuse("a hexadecimal escape")
}

// class reads a bracketed class, with nested ones and &&.
func (p *regexParser) class() (*runeSet, error) {
	leave, err := p.nest()
	if err != nil {
		return nil, err
	}
	defer leave()
	p.at++
	not := p.next("^")
	if not && p.fold {
		return nil, p.refuse("an inverted class where case is ignored")
	}
	all := newRuneSet([][2]rune{{0, utf8.MaxRune}})
	for more := true; more; {
		var ranges [][2]rune
		if ranges, more, err = p.members(); err != nil {
			return nil, err
		}
		set, err := p.cased(ranges)
		if err != nil {
			return nil, err
		}
		all = newRuneSet(all.shared(set))
	}
	if not {
		all = newRuneSet(all.inverse())
	}
	return all, nil
}

// members reads the members of a class up to its end, or up to &&, in which case more is true.
func (p *regexParser) members() (ranges [][2]rune, more bool, err error) {
	for {
		switch {
		case p.peek() == ']' && ranges == nil, strings.HasPrefix(p.text[p.at:], "&&") && ranges == nil:
			return nil, false, p.refuse("an empty class")
		case strings.HasPrefix(p.text[p.at:], "[:"):
			return nil, false, p.refuse("a POSIX class")
		case p.next("]"):
			return ranges, false, nil
		case p.next("&&"):
			if p.peek() == '&' {
				return nil, false, p.refuse("&&&")
			}
			return ranges, true, nil
		}
		var one [][2]rune
		if p.peek() == '[' {
			var inner *runeSet
			if inner, err = p.class(); err == nil {
				one = inner.ranges
			}
		} else {
			one, err = p.member()
		}
		if err != nil {
			return nil, false, err
		}
		ranges = append(ranges, one...)
	}
}

// member reads a code point, an escape or a range of a class.
func (p *regexParser) member() ([][2]rune, error) {
	if strings.HasPrefix(p.text[p.at:], `\b`) {
		return nil, p.refuse(`\b in a class`)
	}
	first, err := p.codePoints(true)
	if err != nil || p.peek() != '-' || strings.HasPrefix(p.text[p.at:], "-]") {
		return first, err // a dash before the end is a member itself
	}
	from, ok := onlyOne(first)
	if !ok || from == '-' || strings.HasPrefix(p.text[p.at:], "-[") || strings.HasPrefix(p.text[p.at:], "-&&") {
		return nil, p.refuse("a dash")
	}
	p.at++
	second, err := p.codePoints(true)
	if err != nil {
		return nil, err
	}
	to, ok := onlyOne(second)
	if !ok || to < from {
		return nil, p.refuse("a range")
	}
	return [][2]rune{{from, to}}, nil
}

// onlyOne returns the code point of ranges if it is exactly one.
func onlyOne(ranges [][2]rune) (rune, bool) {
	if len(ranges) == 1 && ranges[0][0] == ranges[0][1] {
		return ranges[0][0], true
	}
	return 0, false
}
