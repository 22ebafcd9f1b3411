package tokenizer

import (
	"strings"
	"unicode/utf8"
)

// Split patterns that no scanner was written for are run by an engine of our own.
// It has that part of Oniguruma's language, as the library sets it up, that
// patterns of tokenizers use and whose meaning is the same under every option: the
// rest is refused. Differences to other engines that matter: `{1,3}+` is a
// repetition of `{1,3}` and not possessive, `$` is the end of every line, an
// option such as (?i) reaches over the alternatives behind it.

// reOp is the kind of a node.
type reOp uint8

const (
	reSet       reOp = iota // one code point of set
	reSeq                   // all subs
	reAlt                   // the first of subs that leads to a match
	reRepeat                // subs[0], min to max times; max < 0 is no limit
	reLook                  // subs[0] matches ahead, or behind
	reAtomic                // subs[0], as it matches first
	reBegin                 // \A
	reEnd                   // \z
	reLineBegin             // ^
	reLineEnd               // $
	reBound                 // \b
)

// reKind is how a repetition tries.
type reKind uint8

const (
	reGreedy reKind = iota
	reLazy
	rePossessive
)

// reNode is a parsed pattern.
type reNode struct {
	op       reOp
	subs     []*reNode
	set      *runeSet
	min, max int
	kind     reKind
	not      bool // \B, negative look
	behind   bool
}

// maxRepeat and maxNesting bound what a pattern may ask for.
const (
	maxRepeat  = 1000
	maxNesting = 50
)

// reParser reads a pattern.
type reParser struct {
	text  string
	at    int
	fold  bool // (?i)
	depth int
}

// parseRegex refuses what is not surely understood.
func parseRegex(text string) (*reNode, error) {
	p := &reParser{text: text}
	n, err := p.alternatives()
	if err == nil && p.at < len(text) {
		err = p.refuse("unbalanced )")
	}
	if err != nil {
		return nil, err
	}
	return n, nil
}

func (p *reParser) refuse(why string) error {
	return unsupported("%s in the pattern %q", why, p.text)
}

// next tells whether the pattern goes on with s, and takes it.
func (p *reParser) next(s string) bool {
	if !strings.HasPrefix(p.text[p.at:], s) {
		return false
	}
	p.at += len(s)
	return true
}

// peek is the next byte, 0 at the end.
func (p *reParser) peek() byte {
	if p.at == len(p.text) {
		return 0
	}
	return p.text[p.at]
}

func (p *reParser) alternatives() (*reNode, error) {
	if p.depth++; p.depth > maxNesting {
		return nil, p.refuse("deep nesting")
	}
	defer func() { p.depth-- }()
	all := &reNode{op: reAlt}
	for {
		n, err := p.sequence()
		if err != nil {
			return nil, err
		}
		all.subs = append(all.subs, n)
		if !p.next("|") {
			break
		}
	}
	if len(all.subs) == 1 {
		return all.subs[0], nil
	}
	return all, nil
}

// folded are the pairs of letters that also match one letter when case is ignored.
var folded = []string{"ss", "ff", "fi", "fl", "st"}

func (p *reParser) sequence() (*reNode, error) {
	seq := &reNode{op: reSeq}
	var letters []byte // literals that follow each other
	for p.at < len(p.text) && p.peek() != '|' && p.peek() != ')' {
		if p.next("(?i)") {
			// The option is a group of all that follows, alternatives too.
			saved := p.fold
			p.fold = true
			n, err := p.alternatives()
			p.fold = saved
			if err != nil {
				return nil, err
			}
			seq.subs = append(seq.subs, n)
			return seq, nil
		}
		from := p.at
		n, err := p.atom()
		if err != nil {
			return nil, err
		}
		if p.fold && p.at == from+1 {
			letters = append(letters, p.text[from]|0x20)
			for _, pair := range folded {
				if strings.HasSuffix(string(letters), pair) {
					return nil, p.refuse(pair + " where case is ignored")
				}
			}
		} else {
			letters = letters[:0]
		}
		if n, err = p.quantified(n); err != nil {
			return nil, err
		}
		seq.subs = append(seq.subs, n)
	}
	if len(seq.subs) == 1 {
		return seq.subs[0], nil
	}
	return seq, nil
}

// quantified reads the quantifiers behind an atom.
func (p *reParser) quantified(n *reNode) (*reNode, error) {
	rep := &reNode{op: reRepeat, subs: []*reNode{n}}
	interval := false
	switch {
	case p.next("?"):
		rep.max = 1
	case p.next("*"):
		rep.max = -1
	case p.next("+"):
		rep.min, rep.max = 1, -1
	case p.peek() == '{':
		if err := p.interval(rep); err != nil {
			return nil, err
		}
		interval = true
	default:
		return n, nil
	}
	switch {
	case interval && p.peek() == '?' && rep.min == rep.max:
		return nil, p.refuse("{n}?")
	case p.next("?"):
		rep.kind = reLazy
	case interval && p.next("+"):
		rep = &reNode{op: reRepeat, min: 1, max: -1, subs: []*reNode{rep}}
	case p.next("+"):
		rep.kind = rePossessive
	}
	switch p.peek() {
	case '?', '*', '+', '{':
		return nil, p.refuse("a repeated quantifier")
	}
	switch n.op {
	case reLook, reBegin, reEnd, reLineBegin, reLineEnd, reBound:
		return nil, p.refuse("a quantifier behind what has no width")
	}
	return rep, nil
}

// interval reads {n}, {n,}, {,m} or {n,m}.
func (p *reParser) interval(rep *reNode) error {
	p.at++
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
	if !hasLow || !p.next("}") || rep.max >= 0 && rep.max < rep.min || rep.min > maxRepeat || rep.max > maxRepeat {
		return p.refuse("an interval")
	}
	return nil
}

func (p *reParser) number() (n int, ok bool) {
	for p.peek() >= '0' && p.peek() <= '9' && n <= maxRepeat {
		n = 10*n + int(p.peek()-'0')
		p.at++
		ok = true
	}
	return n, ok
}

// atom reads one code point, class, group or assertion.
func (p *reParser) atom() (*reNode, error) {
	switch c := p.peek(); c {
	case '(':
		return p.group()
	case '[':
		s, err := p.class()
		return &reNode{op: reSet, set: s}, err
	case '.':
		p.at++
		return &reNode{op: reSet, set: newRuneSet([][2]rune{{0, '\n' - 1}, {'\n' + 1, utf8.MaxRune}})}, nil
	case '^':
		p.at++
		return &reNode{op: reLineBegin}, nil
	case '$':
		p.at++
		return &reNode{op: reLineEnd}, nil
	case '\\':
		return p.escape()
	case '*', '+', '?', '{', '}':
		return nil, p.refuse("a quantifier without an atom")
	}
	r, n := utf8.DecodeRuneInString(p.text[p.at:])
	p.at += n
	return p.literal(r)
}

func (p *reParser) literal(r rune) (*reNode, error) {
	s, err := p.cased([][2]rune{{r, r}})
	return &reNode{op: reSet, set: s}, err
}

// cased is the set of ranges, with both cases of letters where case is ignored:
// known for ASCII only.
func (p *reParser) cased(ranges [][2]rune) (*runeSet, error) {
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

// groups are what may stand behind an opening parenthesis.
var groups = []struct {
	text string
	node reNode
	fold int // 1 switches (?i) on, -1 off
}{
	{text: "(?:"},
	{text: "(?i:", fold: 1},
	{text: "(?-i:", fold: -1},
	{text: "(?=", node: reNode{op: reLook}},
	{text: "(?!", node: reNode{op: reLook, not: true}},
	{text: "(?<=", node: reNode{op: reLook, behind: true}},
	{text: "(?<!", node: reNode{op: reLook, behind: true, not: true}},
	{text: "(?>", node: reNode{op: reAtomic}},
}

func (p *reParser) group() (*reNode, error) {
	saved := p.fold
	defer func() { p.fold = saved }()
	for _, g := range groups {
		if !p.next(g.text) {
			continue
		}
		p.fold = g.fold > 0 || p.fold && g.fold == 0
		n, err := p.alternatives()
		if err != nil || !p.next(")") {
			return nil, orElse(err, p.refuse("an open group"))
		}
		if g.node.op == reSet {
			return &reNode{op: reSeq, subs: []*reNode{n}}, nil
		}
		node := g.node
		node.subs = []*reNode{n}
		if node.behind {
			return p.lookBehind(&node)
		}
		return &node, nil
	}
	if strings.HasPrefix(p.text[p.at:], "(?") || strings.HasPrefix(p.text[p.at:], "(*") {
		return nil, p.refuse("an unknown group")
	}
	p.at++
	n, err := p.alternatives()
	if err != nil || !p.next(")") {
		return nil, orElse(err, p.refuse("an open group"))
	}
	return &reNode{op: reSeq, subs: []*reNode{n}}, nil
}

func orElse(err, other error) error {
	if err != nil {
		return err
	}
	return other
}

// lookBehind takes bodies of one length, or alternatives of one length each.
func (p *reParser) lookBehind(n *reNode) (*reNode, error) {
	bodies := []*reNode{n.subs[0]}
	if bodies[0].op == reAlt {
		bodies = bodies[0].subs
	}
	all := &reNode{op: reAlt}
	if n.not {
		all.op = reSeq
	}
	for _, body := range bodies {
		size, ok := body.width()
		if !ok {
			return nil, p.refuse("a look behind of several lengths")
		}
		all.subs = append(all.subs, &reNode{op: reLook, not: n.not, behind: true, min: size, subs: []*reNode{body}})
	}
	if len(all.subs) == 1 {
		return all.subs[0], nil
	}
	return all, nil
}

// width is the number of code points that a node matches, if it is always the same.
func (n *reNode) width() (int, bool) {
	total := 0
	switch n.op {
	case reSet:
		return 1, true
	case reSeq, reAtomic:
		for _, s := range n.subs {
			w, ok := s.width()
			if !ok {
				return 0, false
			}
			total += w
		}
		return total, true
	case reAlt:
		for i, s := range n.subs {
			w, ok := s.width()
			if !ok || i > 0 && w != total {
				return 0, false
			}
			total = w
		}
		return total, true
	case reRepeat:
		w, ok := n.subs[0].width()
		return w * n.min, ok && n.min == n.max
	}
	return 0, true
}

// nullable tells whether a node can match without taking anything.
func (n *reNode) nullable() bool {
	switch n.op {
	case reSet:
		return false
	case reSeq, reAtomic:
		for _, s := range n.subs {
			if !s.nullable() {
				return false
			}
		}
		return true
	case reAlt:
		for _, s := range n.subs {
			if s.nullable() {
				return true
			}
		}
		return false
	case reRepeat:
		return n.min == 0 || n.subs[0].nullable()
	}
	return true
}

// plainEscapes are the escapes that stand for one code point.
var plainEscapes = map[byte]rune{'t': '\t', 'n': '\n', 'r': '\r', 'f': '\f', 'v': '\v', 'a': '\a', 'e': 0x1b}

// setEscapes are the escapes that stand for a class; a capital one for its inverse.
var setEscapes = map[byte]string{'s': "WS", 'd': "OnigDigit", 'w': "OnigWord"}

// escape reads what a backslash begins, outside of a class.
func (p *reParser) escape() (*reNode, error) {
	if p.at+1 < len(p.text) {
		found := true
		var n *reNode
		switch p.text[p.at+1] {
		case 'A':
			n = &reNode{op: reBegin}
		case 'z':
			n = &reNode{op: reEnd}
		case 'b':
			n = &reNode{op: reBound}
		case 'B':
			n = &reNode{op: reBound, not: true}
		default:
			found = false
		}
		if found {
			p.at += 2
			return n, nil
		}
	}
	blank := strings.HasPrefix(p.text[p.at:], `\s`)
	ranges, err := p.escaped(false)
	if err != nil {
		return nil, err
	}
	if r, ok := onlyOne(ranges); ok {
		return p.literal(r)
	}
	if p.fold && !blank {
		return nil, p.refuse("a class where case is ignored")
	}
	return &reNode{op: reSet, set: newRuneSet(ranges)}, nil
}

// latinNumbers are in \w, but not where it stands in a bracketed class.
var latinNumbers = newRuneSet([][2]rune{{0xb2, 0xb3}, {0xb9, 0xb9}, {0xbc, 0xbe}})

// escaped reads an escape that is a code point or a class, maybe in a bracketed one.
func (p *reParser) escaped(bracketed bool) ([][2]rune, error) {
	p.at++
	c := p.peek()
	if c == 0 {
		return nil, p.refuse("a backslash at the end")
	}
	p.at++
	if r, ok := plainEscapes[c]; ok {
		return [][2]rune{{r, r}}, nil
	}
	if name, ok := setEscapes[c|0x20]; ok {
		set, _ := namedSet(name)
		if bracketed && c|0x20 == 'w' {
			set = newRuneSet(set.shared(newRuneSet(latinNumbers.inverse())))
		}
		if c&0x20 == 0 {
			return set.inverse(), nil
		}
		return set.ranges, nil
	}
	switch {
	case c == 'p' || c == 'P':
		return p.property(c == 'P')
	case c == 'x':
		return p.hex(2)
	case c == 'u':
		return p.hex(4)
	case c >= '0' && c <= '9' || c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z':
		return nil, p.refuse(`\` + string(c))
	}
	r, n := utf8.DecodeRuneInString(p.text[p.at-1:])
	p.at += n - 1
	return [][2]rune{{r, r}}, nil
}

// property reads {L}, {^L} or a longer name.
func (p *reParser) property(not bool) ([][2]rune, error) {
	name, _, ok := strings.Cut(p.text[p.at:], "}")
	if !ok || !strings.HasPrefix(name, "{") {
		return nil, p.refuse("a property")
	}
	p.at += len(name) + 1
	name = name[1:]
	if strings.HasPrefix(name, "^") {
		name, not = name[1:], !not
	}
	if long, ok := longNames[name]; ok {
		name = long
	}
	set, ok := namedSet(name)
	if !ok || !properties[name] {
		return nil, p.refuse("the property " + name)
	}
	if not {
		return set.inverse(), nil
	}
	return set.ranges, nil
}

// longNames are other names of properties.
var longNames = map[string]string{
	"Letter": "L", "Number": "N", "Mark": "M", "Punctuation": "P", "Symbol": "S", "Separator": "Z",
	"Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Decimal_Number": "Nd",
}

// properties are the generated classes that have a name in patterns.
var properties = func() map[string]bool {
	out := map[string]bool{}
	for name := range strings.SplitSeq("L N M P S Z Lu Ll Lt Lm Lo Nd Nl No Mn Mc Han Hiragana Katakana Hangul Latin Cyrillic Greek Arabic Hebrew Thai Devanagari", " ") {
		out[name] = true
	}
	return out
}()

// hex reads hexadecimal digits, all of them in braces or at most n.
func (p *reParser) hex(n int) ([][2]rune, error) {
	braces := n == 2 && p.next("{")
	if braces {
		n = 6
	}
	from := p.at
	for p.at < len(p.text) && p.at-from < n && strings.IndexByte("0123456789abcdefABCDEF", p.peek()) >= 0 {
		p.at++
	}
	digits := p.text[from:p.at]
	if digits == "" || n == 4 && len(digits) < 4 || braces && !p.next("}") {
		return nil, p.refuse("a hexadecimal escape")
	}
	r := mustHex(digits)
	if !utf8.ValidRune(r) || !braces && n == 2 && r >= utf8.RuneSelf {
		return nil, p.refuse("a hexadecimal escape")
	}
	return [][2]rune{{r, r}}, nil
}

// class reads a bracketed class, with nested ones and &&.
func (p *reParser) class() (*runeSet, error) {
	if p.depth++; p.depth > maxNesting {
		return nil, p.refuse("deep nesting")
	}
	defer func() { p.depth-- }()
	p.at++
	not := p.next("^")
	var ranges [][2]rune
	var both *runeSet // what stands before &&
	empty := true
	meet := func() error {
		set, err := p.cased(ranges)
		if err != nil {
			return err
		}
		if both != nil {
			set = newRuneSet(both.shared(set))
		}
		both, ranges = set, nil
		return nil
	}
	for {
		switch {
		case p.at == len(p.text):
			return nil, p.refuse("an open class")
		case p.peek() == ']' && empty:
			return nil, p.refuse("an empty class")
		case p.next("]"):
			if err := meet(); err != nil {
				return nil, err
			}
			if not && p.fold {
				return nil, p.refuse("an inverted class where case is ignored")
			}
			if not {
				return newRuneSet(both.inverse()), nil
			}
			return both, nil
		case p.next("&&"):
			if empty || p.peek() == ']' || p.peek() == '&' {
				return nil, p.refuse("&& without two sides")
			}
			if err := meet(); err != nil {
				return nil, err
			}
			continue
		case strings.HasPrefix(p.text[p.at:], "[:"):
			return nil, p.refuse("a POSIX class")
		case p.peek() == '[':
			inner, err := p.class()
			if err != nil {
				return nil, err
			}
			ranges = append(ranges, inner.ranges...)
		default:
			more, err := p.member()
			if err != nil {
				return nil, err
			}
			ranges = append(ranges, more...)
		}
		empty = false
	}
}

// member reads a code point, an escape or a range of a class.
func (p *reParser) member() ([][2]rune, error) {
	first, err := p.single()
	if err != nil || p.peek() != '-' {
		return first, err
	}
	if strings.HasPrefix(p.text[p.at:], "-]") {
		return first, nil // the dash is the next member
	}
	from, ok := onlyOne(first)
	if !ok || strings.HasPrefix(p.text[p.at:], "-[") || strings.HasPrefix(p.text[p.at:], "-&&") {
		return nil, p.refuse("a dash")
	}
	if from == '-' {
		return nil, p.refuse("a dash")
	}
	p.at++
	second, err := p.single()
	if err != nil {
		return nil, err
	}
	to, ok := onlyOne(second)
	if !ok || to < from {
		return nil, p.refuse("a range")
	}
	return [][2]rune{{from, to}}, nil
}

// onlyOne is the code point of ranges, if it is one.
func onlyOne(ranges [][2]rune) (rune, bool) {
	if len(ranges) == 1 && ranges[0][0] == ranges[0][1] {
		return ranges[0][0], true
	}
	return 0, false
}

// single reads a code point or an escape of a class.
func (p *reParser) single() ([][2]rune, error) {
	switch {
	case p.at == len(p.text):
		return nil, p.refuse("an open class")
	case p.peek() == '\\' && p.at+1 < len(p.text) && p.text[p.at+1] == 'b':
		return nil, p.refuse(`\b in a class`)
	case p.peek() == '\\':
		return p.escaped(true)
	}
	r, n := utf8.DecodeRuneInString(p.text[p.at:])
	p.at += n
	return [][2]rune{{r, r}}, nil
}
