package bpe

import (
	"slices"
	"unicode/utf8"
)

// regex is a compiled split pattern. It is immutable; run it with a regexSearch.
type regex struct{ match step }

// step matches the rest of a pattern at byte i of the text. It returns the end of the match, or -1. The continuation of
// each part is bound when the pattern is compiled, so matching allocates nothing.
type step func(m *regexSearch, i int) int

const (
	maxProgram = 4000 // steps of a pattern
	// A text may take freeWork + workPerByte per byte, counted in code points tried. A text that exceeds it gets no
	// ids: backtracking is exponential for some patterns, and quadratic for many.
	workPerByte = 200
	freeWork    = 1 << 20
	// maxDepth bounds the iterations of a repeated group, each of which takes stack.
	maxDepth = 1 << 15
)

// regexSearch is the state of the searches in one text.
type regexSearch struct {
	text  string
	work  int // remaining; negative once the text exceeded its limit
	depth int
}

// allow sets the work that a text of the given size may take.
func (m *regexSearch) allow(bytes int) { m.work, m.depth = freeWork+workPerByte*bytes, 0 }

// exceeded reports whether the text exceeded its work limit. If so, no result since allow is valid.
func (m *regexSearch) exceeded() bool { return m.work < 0 }

// find returns the first match in s that starts in the given number of bytes from i.
func (m *regexSearch) find(re *regex, s string, i, within int) (from, to int, ok bool) {
	m.text = s
	for end := min(len(s), i+within); i < end && !m.exceeded(); i++ {
		if !utf8.RuneStart(s[i]) {
			continue
		}
		m.work--
		if end := re.match(m, i); end >= 0 {
			return i, end, true
		}
	}
	return len(s), len(s), false
}

// compileRegex rejects patterns whose meaning is uncertain or that match the empty string.
func compileRegex(text string) (*regex, error) {
	n, err := parseRegex(text)
	if err != nil {
		return nil, err
	}
	c := &regexCompiler{}
	match := c.compile(n, matched)
	switch {
	case n.nullable():
		return nil, unsupported("the pattern %q, which matches the empty string", text)
	case c.loops:
		return nil, unsupported("a repeated group that matches the empty string in the pattern %q", text)
	case c.size > maxProgram:
		return nil, unsupported("the pattern %q, which is too long", text)
	}
	return &regex{match}, nil
}

// matched is the step after the last one.
func matched(_ *regexSearch, i int) int { return i }

// nullable reports whether a node can match the empty string.
func (n *regexNode) nullable() bool {
	switch n.op {
	case opSet:
		return false
	case opSeq, opAtomic:
		return !slices.ContainsFunc(n.subs, func(s *regexNode) bool { return !s.nullable() })
	case opAlt:
		return slices.ContainsFunc(n.subs, (*regexNode).nullable)
	case opRepeat:
		return n.min == 0 || n.subs[0].nullable()
	}
	return true
}

type regexCompiler struct {
	size  int
	loops bool // a group that may be empty is repeated without a limit
}

// compile returns the step that matches n and then next.
func (c *regexCompiler) compile(n *regexNode, next step) step {
	if c.size++; c.size > maxProgram {
		return next
	}
	switch n.op {
	case opSet:
		return repeatSet(n.set, 1, 1, false, next)
	case opSeq:
		for _, s := range slices.Backward(n.subs) {
			next = c.compile(s, next)
		}
		return next
	case opAlt:
		if len(n.subs) == 1 {
			return c.compile(n.subs[0], next)
		}
		ways := make([]step, len(n.subs))
		for i, s := range n.subs {
			ways[i] = c.compile(s, next)
		}
		return func(m *regexSearch, i int) int {
			for _, way := range ways {
				if end := way(m, i); end >= 0 {
					return end
				}
			}
			return -1
		}
	case opRepeat:
		return c.repeat(n, next)
	case opAtomic:
		inner := c.compile(n.subs[0], matched)
		return func(m *regexSearch, i int) int {
			if i = inner(m, i); i < 0 {
				return -1
			}
			return next(m, i)
		}
	case opLook:
		inner := c.compile(n.subs[0], matched)
		return func(m *regexSearch, i int) int {
			if inner(m, i) >= 0 == n.not {
				return -1
			}
			return next(m, i)
		}
	case opLineEnd:
		return func(m *regexSearch, i int) int {
			if i < len(m.text) && m.text[i] != '\n' {
				return -1
			}
			return next(m, i)
		}
	case opWordBound:
	}
	word := namedSet("OnigWord")
	return func(m *regexSearch, i int) int {
		before, _ := utf8.DecodeLastRuneInString(m.text[:i])
		after, _ := utf8.DecodeRuneInString(m.text[i:])
		if (i > 0 && word.has(before)) == (i < len(m.text) && word.has(after)) {
			return -1
		}
		return next(m, i)
	}
}

// repeatSet matches least to most code points of a set (no limit if most is negative): as many as
// possible, giving them back one by one unless it is possessive.
func repeatSet(set *runeSet, least, most int, possessive bool, next step) step {
	return func(m *regexSearch, i int) int {
		count := 0
		for ; (most < 0 || count < most) && i < len(m.text); count++ {
			in, n := set.hasAt(m.text, i)
			if !in {
				break
			}
			i += n
		}
		for m.work -= count + 1; count >= least && m.work >= 0; count-- {
			end := next(m, i)
			if end >= 0 || possessive || count == least {
				return end
			}
			_, n := utf8.DecodeLastRuneInString(m.text[:i])
			i -= n
			m.work--
		}
		return -1
	}
}

// repeat is compile for a repetition.
func (c *regexCompiler) repeat(n *regexNode, next step) step {
	body := n.subs[0]
	if body.op == opSet {
		return repeatSet(body.set, n.min, n.max, n.possessive, next)
	}
	if n.possessive {
		greedy := *n
		greedy.possessive = false
		return c.compile(&regexNode{op: opAtomic, subs: []*regexNode{&greedy}}, next)
	}
	all := next
	if n.max < 0 {
		c.loops = c.loops || body.nullable()
		var again step
		once := c.compile(body, func(m *regexSearch, i int) int { return again(m, i) })
		again = func(m *regexSearch, i int) int {
			if m.depth++; m.depth > maxDepth {
				m.work = -1
			}
			if m.exceeded() {
				return -1
			}
			end := once(m, i)
			if end < 0 {
				end = next(m, i)
			}
			m.depth--
			return end
		}
		all = again
	}
	for range n.max - n.min {
		once := c.compile(body, all)
		all = func(m *regexSearch, i int) int {
			if end := once(m, i); end >= 0 {
				return end
			}
			return next(m, i)
		}
	}
	for range n.min {
		all = c.compile(body, all)
	}
	return all
}
