package tokenizer

import "unicode/utf8"

// regex is a compiled pattern. It is immutable; matching uses a reMatcher.
type regex struct {
	prog  []reInst
	first *runeSet // what a match can begin with
}

// reCode is the kind of an instruction.
type reCode uint8

const (
	rcSet    reCode = iota // a code point of set
	rcSets                 // min to max of them
	rcSplit                // go on at x, or else at y
	rcJump                 // go on at x
	rcLook                 // the instructions behind match here, up to rcMatch; then go on at x
	rcAtomic               // likewise, and go on where they end
	rcAssert               // check
	rcMatch
)

type reInst struct {
	code     reCode
	kind     reKind
	op       reOp // of an assertion
	not      bool
	set      *runeSet
	x, y     int
	min, max int // of rcSets; min of a look behind is how far
}

// maxProgram bounds the instructions of a pattern, and the turns of one search
// for each byte: beyond it the text is refused.
const (
	maxProgram = 4000
	maxTurns   = 200
	freeTurns  = 1 << 20
	keptStack  = 1 << 14 // of a text before
)

func compileRegex(text string) (*regex, error) {
	n, err := parseRegex(text)
	if err != nil {
		return nil, err
	}
	if n.nullable() {
		return nil, unsupported("the pattern %q matches nothing, too", text)
	}
	c := &reCompiler{}
	c.node(n)
	c.emit(reInst{code: rcMatch})
	if c.refused != "" || len(c.prog) > maxProgram {
		return nil, unsupported("the pattern %q: %s", text, orText(c.refused, "too long"))
	}
	re := &regex{prog: c.prog}
	ranges, _ := n.starts()
	re.first = newRuneSet(ranges)
	return re, nil
}

func orText(s, other string) string {
	if s != "" {
		return s
	}
	return other
}

// starts is what a node's matches can begin with; open says that it may match
// nothing, so that what follows counts too.
func (n *reNode) starts() (ranges [][2]rune, open bool) {
	switch n.op {
	case reSet:
		return n.set.ranges, false
	case reSeq, reAtomic:
		for _, s := range n.subs {
			r, more := s.starts()
			ranges = append(ranges, r...)
			if !more {
				return ranges, false
			}
		}
		return ranges, true
	case reAlt:
		for _, s := range n.subs {
			r, more := s.starts()
			ranges = append(ranges, r...)
			open = open || more
		}
		return ranges, open
	case reRepeat:
		r, more := n.subs[0].starts()
		return r, more || n.min == 0
	}
	return nil, true
}

type reCompiler struct {
	prog    []reInst
	refused string
}

func (c *reCompiler) emit(i reInst) int {
	c.prog = append(c.prog, i)
	return len(c.prog) - 1
}

func (c *reCompiler) node(n *reNode) {
	if len(c.prog) > maxProgram {
		return
	}
	switch n.op {
	case reSet:
		c.emit(reInst{code: rcSet, set: n.set})
	case reSeq:
		for _, s := range n.subs {
			c.node(s)
		}
	case reAlt:
		var ends []int
		for i, s := range n.subs {
			if i == len(n.subs)-1 {
				c.node(s)
				break
			}
			split := c.emit(reInst{code: rcSplit})
			c.prog[split].x = split + 1
			c.node(s)
			ends = append(ends, c.emit(reInst{code: rcJump}))
			c.prog[split].y = len(c.prog)
		}
		for _, e := range ends {
			c.prog[e].x = len(c.prog)
		}
	case reRepeat:
		c.repeat(n)
	case reLook:
		c.inner(reInst{code: rcLook, not: n.not, min: n.min}, n.subs[0]) // min is 0 of a look ahead
	case reAtomic:
		c.inner(reInst{code: rcAtomic}, n.subs[0])
	default:
		c.emit(reInst{code: rcAssert, op: n.op, not: n.not})
	}
}

// inner emits an instruction and the body that it runs on its own.
func (c *reCompiler) inner(i reInst, body *reNode) {
	at := c.emit(i)
	c.node(body)
	c.emit(reInst{code: rcMatch})
	c.prog[at].x = len(c.prog)
}

func (c *reCompiler) repeat(n *reNode) {
	body := n.subs[0]
	if body.op == reSet {
		c.emit(reInst{code: rcSets, set: body.set, min: n.min, max: n.max, kind: n.kind})
		return
	}
	if n.kind == rePossessive {
		greedy := *n
		greedy.kind = reGreedy
		c.inner(reInst{code: rcAtomic}, &greedy)
		return
	}
	if n.max < 0 && body.nullable() {
		c.refused = "repeats what may be empty"
		return
	}
	for range n.min {
		c.node(body)
	}
	if n.max < 0 {
		split := c.emit(reInst{code: rcSplit})
		c.node(body)
		c.emit(reInst{code: rcJump, x: split})
		c.branch(split, split+1, len(c.prog), n.kind)
		return
	}
	var splits []int
	for range n.max - n.min {
		splits = append(splits, c.emit(reInst{code: rcSplit}))
		c.node(body)
	}
	for _, s := range splits {
		c.branch(s, s+1, len(c.prog), n.kind)
	}
}

// branch sets where a split goes: into the body first, unless it is lazy.
func (c *reCompiler) branch(split, body, behind int, kind reKind) {
	if kind == reLazy {
		body, behind = behind, body
	}
	c.prog[split].x, c.prog[split].y = body, behind
}

// reBack is a choice that may be taken back: go on at pc with position at. For a
// run of code points of a set, pc is that instruction, and left says how far the
// run may be given back (greedy), or how many more it may take (lazy; below zero
// without a limit).
type reBack struct {
	pc, at, left int
	run          bool
}

// reMatcher is the scratch memory of a search.
type reMatcher struct {
	stack []reBack
	turns int
	// exceeded says that a text takes more turns than it may.
	exceeded bool
}

// find is the first match in s that begins at or after i.
func (m *reMatcher) find(re *regex, s string, i int) (from, to int, ok bool) {
	for i < len(s) && !m.exceeded {
		in, n := re.first.hasAt(s, i)
		if in {
			if end := m.run(re.prog, 0, s, i); end >= 0 {
				return i, end, true
			}
		}
		i += n
	}
	return len(s), len(s), false
}

// allow sets how much work a text may make.
func (m *reMatcher) allow(bytes int) {
	m.turns, m.exceeded = freeTurns+maxTurns*bytes, false
	if cap(m.stack) > keptStack {
		m.stack = nil
	}
}

// run is where a match of the program from pc on that begins at i ends, or -1.
func (m *reMatcher) run(prog []reInst, pc int, s string, i int) int {
	base := len(m.stack)
	for {
		if m.turns--; m.turns < 0 {
			m.exceeded = true
			m.stack = m.stack[:base]
			return -1
		}
		in := &prog[pc]
		ok := true
		switch in.code {
		case rcMatch:
			m.stack = m.stack[:base]
			return i
		case rcJump:
			pc = in.x
			continue
		case rcSplit:
			m.stack = append(m.stack, reBack{pc: in.y, at: i})
			pc = in.x
			continue
		case rcSet:
			if ok = i < len(s); ok {
				var n int
				ok, n = in.set.hasAt(s, i)
				i += n
			}
		case rcSets:
			i, ok = m.sets(in, pc, s, i)
		case rcLook:
			if ok = m.look(prog, in, pc, s, i) != in.not; ok {
				pc = in.x
				continue
			}
		case rcAtomic:
			end := m.run(prog, pc+1, s, i)
			if ok = end >= 0; ok {
				pc, i = in.x, end
				continue
			}
		case rcAssert:
			ok = assert(in, s, i)
		}
		if ok {
			pc++
			continue
		}
		if pc, i, ok = m.back(prog, base, s); !ok {
			return -1
		}
	}
}

// sets takes a run of code points and remembers what it may give back or take.
func (m *reMatcher) sets(in *reInst, pc int, s string, i int) (int, bool) {
	count := 0
	for ; count < in.min; count++ {
		if i == len(s) {
			return i, false
		}
		ok, n := in.set.hasAt(s, i)
		if !ok {
			return i, false
		}
		i += n
	}
	if in.kind == reLazy {
		if in.max < 0 || in.max > in.min {
			m.stack = append(m.stack, reBack{pc: pc, at: i, left: in.max - in.min, run: true})
		}
		return i, true
	}
	least := i
	for ; (in.max < 0 || count < in.max) && i < len(s); count++ {
		ok, n := in.set.hasAt(s, i)
		if !ok {
			break
		}
		i += n
	}
	m.turns -= count
	if i > least && in.kind == reGreedy {
		m.stack = append(m.stack, reBack{pc: pc, at: i, left: least, run: true})
	}
	return i, true
}

// back takes the last choice of this run back.
func (m *reMatcher) back(prog []reInst, base int, s string) (pc, i int, ok bool) {
	for len(m.stack) > base {
		b := m.stack[len(m.stack)-1]
		m.stack = m.stack[:len(m.stack)-1]
		switch {
		case !b.run:
			return b.pc, b.at, true
		case prog[b.pc].kind == reLazy:
			if b.at == len(s) {
				continue
			}
			in, n := prog[b.pc].set.hasAt(s, b.at)
			if !in {
				continue
			}
			if b.left != 1 {
				m.stack = append(m.stack, reBack{pc: b.pc, at: b.at + n, left: b.left - 1, run: true})
			}
			return b.pc + 1, b.at + n, true
		}
		_, n := utf8.DecodeLastRuneInString(s[:b.at])
		if b.at -= n; b.at > b.left {
			m.stack = append(m.stack, b)
		}
		return b.pc + 1, b.at, true
	}
	return 0, 0, false
}

// look tells whether the body of a look matches at i, or so many code points before.
func (m *reMatcher) look(prog []reInst, in *reInst, pc int, s string, i int) bool {
	for range in.min {
		if i == 0 {
			return false
		}
		_, n := utf8.DecodeLastRuneInString(s[:i])
		i -= n
	}
	return m.run(prog, pc+1, s, i) >= 0
}

func assert(in *reInst, s string, i int) bool {
	switch in.op {
	case reBegin:
		return i == 0
	case reEnd:
		return i == len(s)
	case reLineBegin:
		return i == 0 || s[i-1] == '\n' && i < len(s)
	case reLineEnd:
		return i == len(s) || s[i] == '\n'
	default:
	}
	word, _ := namedSet("OnigWord")
	before, after := false, false
	if i > 0 {
		r, _ := utf8.DecodeLastRuneInString(s[:i])
		before = word.has(r)
	}
	if i < len(s) {
		after, _ = word.hasAt(s, i)
	}
	return (before != after) != in.not
}
