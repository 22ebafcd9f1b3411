package jinja

import (
	"slices"
	"strings"
)

const (
	// maxSyntaxDepth bounds the nesting of expressions and statements.
	maxSyntaxDepth = 200
	// maxTree bounds the levels of the tree, to which the links of chains (a.b.c) in parentheses add up.
	maxTree = 10 * maxSyntaxDepth
)

type parser struct {
	tokens []token
	pos    int
	depth  int
	// ends holds the tags that end the current statements.
	ends [][]string
}

func parse(source string) *node {
	p := &parser{tokens: tokenize(source)}
	root := &node{kind: nodeTemplate, body: p.statements(nil), at: place{1, 1}}
	root.levels(0)
	return root
}

func (p *parser) cur() token  { return p.tokens[p.pos] }
func (p *parser) look() token { return p.tokens[min(p.pos+1, len(p.tokens)-1)] }

func (p *parser) next() token {
	t := p.tokens[p.pos]
	if p.pos < len(p.tokens)-1 {
		p.pos++
	}
	return t
}

func (p *parser) failf(format string, args ...any) { syntaxErrorf(p.cur().at, format, args...) }

func (p *parser) isOp(text string) bool   { return p.cur().is(tokOperator, text) }
func (p *parser) isName(text string) bool { return p.cur().is(tokName, text) }

func (p *parser) skip(kind tokenKind, text string) bool {
	if p.cur().is(kind, text) {
		p.next()
		return true
	}
	return false
}

func (p *parser) skipOp(text string) bool   { return p.skip(tokOperator, text) }
func (p *parser) skipName(text string) bool { return p.skip(tokName, text) }

func (p *parser) expectOp(text string) {
	if !p.skipOp(text) {
		p.unexpected(text)
	}
}

func (p *parser) unexpected(want string) {
	if t := p.cur(); t.kind == tokEOF {
		p.failf("unexpected end of template, expected '%s'.", want)
	} else {
		p.failf("expected token '%s', got %s", want, reprText(t.describe()))
	}
}

func (p *parser) expectKind(kind tokenKind) token {
	if p.cur().kind != kind {
		p.unexpected(token{kind: kind, text: "name"}.describe())
	}
	return p.next()
}

func (p *parser) expectName() string { return p.expectKind(tokName).text }

// enter increments the nesting depth; the caller defers leave.
func (p *parser) enter() {
	if p.depth++; p.depth > maxSyntaxDepth {
		p.failf("nested too deeply")
	}
}

func (p *parser) leave() { p.depth-- }

// statements reads up to one of the end tags, which stays the current token (after its block
// begin), or to the end of the template if ends is nil.
func (p *parser) statements(ends []string) []*node {
	p.enter()
	defer p.leave()
	if ends != nil {
		p.ends = append(p.ends, ends)
		defer func() { p.ends = p.ends[:len(p.ends)-1] }()
	}
	var body, data []*node
	flush := func() {
		if len(data) > 0 {
			body = append(body, &node{kind: nodeOutput, list: data, at: data[0].at})
			data = nil
		}
	}
	for {
		t := p.cur()
		switch t.kind {
		case tokEOF:
			if ends != nil {
				p.unknownTag("Unexpected end of template.")
			}
			flush()
			return body
		case tokData:
			p.next()
			data = append(data, &node{kind: nodeData, name: t.text, at: t.at})
		case tokVariableBegin:
			p.next()
			data = append(data, p.tuple(tupleOptions{condExpr: true}))
			p.expectKind(tokVariableEnd)
		case tokBlockBegin:
			flush()
			p.next()
			if t := p.cur(); t.kind == tokName && slices.Contains(ends, t.text) {
				return body
			}
			if n := p.statement(); n != nil {
				body = append(body, n)
			}
			p.expectKind(tokBlockEnd)
		default:
			p.failf("unexpected %s", reprText(t.describe()))
		}
	}
}

func (p *parser) unknownTag(message string) {
	if n := len(p.ends); n > 0 {
		message += " Jinja was looking for the following tags: '" + strings.Join(p.ends[n-1], "' or '") + "'."
	}
	p.failf("%s", message)
}

// block reads the body of a statement whose opening tag is still open.
func (p *parser) block(ends ...string) []*node {
	p.skipOp(":")
	p.expectKind(tokBlockEnd)
	return p.statements(ends)
}

// lastBlock also drops the end tag.
func (p *parser) lastBlock(end string) []*node {
	body := p.block(end)
	p.next()
	return body
}

var statementParsers map[string]func(*parser) *node

func init() { //nolint:gochecknoinits // breaks the cycle between the table and the parsers
	statementParsers = map[string]func(*parser) *node{
		"for": (*parser).forStatement, "if": (*parser).ifStatement, "set": (*parser).setStatement,
		"macro": (*parser).macro, "call": (*parser).callBlock, "filter": (*parser).filterBlock,
		"generation": (*parser).generation, "break": (*parser).loopControl, "continue": (*parser).loopControl,
	}
}

func (p *parser) statement() *node {
	t := p.cur()
	if t.kind != tokName {
		p.failf("tag name expected")
	}
	read, ok := statementParsers[t.text]
	if otherTags[t.text] {
		refusef(t.at, "tag %q", t.text)
	}
	if !ok {
		p.unknownTag("Encountered unknown tag " + reprText(t.text) + ".")
	}
	p.next()
	n := read(p)
	n.at = t.at
	return n
}

func (p *parser) forStatement() *node {
	n := &node{kind: nodeFor}
	n.a = p.target(tupleOptions{end: "in"})
	if !p.skipName("in") {
		p.unexpected("in")
	}
	n.b = p.tuple(tupleOptions{end: "recursive"})
	if p.skipName("if") {
		n.c = p.expression()
	}
	if p.isName("recursive") {
		refusef(p.cur().at, "a recursive loop")
	}
	n.body = p.block("endfor", "else")
	if p.next().text == "else" {
		n.other = p.lastBlock("endfor")
	}
	return n
}

func (p *parser) ifStatement() *node {
	first := &node{kind: nodeIf}
	n := first
	for {
		n.at = p.cur().at
		n.a = p.tuple(tupleOptions{})
		n.body = p.block("elif", "else", "endif")
		switch p.next().text {
		case "elif":
			n = &node{kind: nodeIf}
			first.list = append(first.list, n)
			continue
		case "else":
			first.other = p.lastBlock("endif")
		}
		return first
	}
}

func (p *parser) setStatement() *node {
	target := p.target(tupleOptions{namespace: true})
	if p.skipOp("=") {
		return &node{kind: nodeAssign, a: target, b: p.tuple(tupleOptions{condExpr: true})}
	}
	n := &node{kind: nodeAssignBlock, a: target, b: p.filters(nil, false)}
	n.body = p.lastBlock("endset")
	return n
}

func (p *parser) signature(n *node) {
	p.expectOp("(")
	for !p.isOp(")") {
		if len(n.params) > 0 {
			p.expectOp(",")
		}
		n.params = append(n.params, &node{kind: nodeName, name: p.nameTarget(), ctx: ctxParam, at: p.cur().at})
		if p.skipOp("=") {
			n.list = append(n.list, p.expression())
		} else if len(n.list) > 0 {
			p.failf("non-default argument follows default argument")
		}
	}
	p.expectOp(")")
}

// nameTarget reads a name as an assignment target.
func (p *parser) nameTarget() string {
	name := p.expectName()
	if slices.Contains([]string{"true", "false", "none", "True", "False", "None"}, name) {
		p.failf("can't assign to 'name'")
	}
	return name
}

func (p *parser) macro() *node {
	n := &node{kind: nodeMacro, name: p.nameTarget()}
	p.signature(n)
	n.body = p.lastBlock("endmacro")
	return n
}

func (p *parser) callBlock() *node {
	n := &node{kind: nodeCallBlock}
	if p.isOp("(") {
		p.signature(n)
	}
	n.a = p.expression()
	if n.a.kind != nodeCall {
		p.failf("expected call")
	}
	n.body = p.lastBlock("endcall")
	return n
}

func (p *parser) filterBlock() *node {
	n := &node{kind: nodeFilterBlock, a: p.filters(nil, true)}
	n.body = p.lastBlock("endfilter")
	return n
}

func (p *parser) generation() *node {
	n := &node{kind: nodeGeneration}
	n.body = p.lastBlock("endgeneration")
	return n
}

func (p *parser) loopControl() *node {
	kind := nodeBreak
	if p.tokens[p.pos-1].text == "continue" {
		kind = nodeContinue
	}
	return &node{kind: kind}
}

// tupleOptions define the extent of a tuple without brackets.
type tupleOptions struct {
	simplified bool   // only names and literals
	condExpr   bool   // may contain "a if b else c"
	end        string // a name that ends it
	explicit   bool   // it is in parentheses, so it may be empty
	namespace  bool   // "ns.attr" is a target
}

func (p *parser) target(o tupleOptions) *node {
	o.simplified = true
	n := p.tuple(o)
	setCtx(n, ctxStore)
	p.checkTarget(n)
	return n
}

func (p *parser) checkTarget(n *node) {
	switch n.kind {
	case nodeName, nodeNSRef:
	case nodeTuple:
		for _, c := range n.list {
			p.checkTarget(c)
		}
	default:
		p.failf("can't assign to this expression")
	}
}

func setCtx(n *node, ctx nodeCtx) {
	n.ctx = ctx
	if n.kind == nodeTuple {
		for _, c := range n.list {
			setCtx(c, ctx)
		}
	}
}

func (p *parser) tuple(o tupleOptions) *node {
	at := p.cur().at
	var items []*node
	isTuple := false
	for {
		if len(items) > 0 {
			p.expectOp(",")
		}
		t := p.cur()
		if t.kind == tokVariableEnd || t.kind == tokBlockEnd || t.is(tokOperator, ")") || o.end != "" && t.is(tokName, o.end) {
			break
		}
		switch {
		case o.simplified:
			items = append(items, p.primary(o.namespace))
		case o.condExpr || o.explicit:
			items = append(items, p.expression())
		default:
			items = append(items, p.or())
		}
		if !p.isOp(",") {
			break
		}
		isTuple = true
	}
	if !isTuple {
		if len(items) > 0 {
			return items[0]
		}
		if !o.explicit {
			p.failf("Expected an expression, got %s", reprText(p.cur().describe()))
		}
	}
	return &node{kind: nodeTuple, list: items, at: at}
}

func (p *parser) expression() *node {
	p.enter()
	defer p.leave()
	n := p.or()
	for links := 0; p.skipName("if"); p.grow(&links) {
		cond := &node{kind: nodeCond, at: n.at, b: n, a: p.or()}
		if p.skipName("else") {
			cond.c = p.expression()
		}
		n = cond
	}
	return n
}

func (p *parser) or() *node  { return p.chain("or", nodeOr, p.and) }
func (p *parser) and() *node { return p.chain("and", nodeAnd, p.not) }

// chain reads operands joined by a word.
func (p *parser) chain(word string, kind nodeKind, operand func() *node) *node {
	n := operand()
	for links := 0; p.skipName(word); p.grow(&links) {
		n = &node{kind: kind, a: n, b: operand(), at: n.at}
	}
	return n
}

func (p *parser) not() *node {
	p.enter()
	defer p.leave()
	if p.skipName("not") {
		return &node{kind: nodeNot, a: p.not(), at: p.cur().at}
	}
	return p.comparison()
}

var comparisons = []string{"==", "!=", "<", "<=", ">", ">="}

func (p *parser) comparison() *node {
	first := p.binary(0)
	n := &node{kind: nodeCompare, a: first, at: first.at}
	for {
		t := p.cur()
		op := t.text
		switch {
		case t.kind == tokOperator && slices.Contains(comparisons, op):
			p.next()
		case t.is(tokName, "in"):
			p.next()
		case t.is(tokName, "not") && p.look().is(tokName, "in"):
			p.next()
			p.next()
			op = "not in"
		default:
			if len(n.ops) == 0 {
				return first
			}
			return n
		}
		n.ops = append(n.ops, op)
		n.list = append(n.list, p.binary(0))
	}
}

// binaryLevels lists the operators of equal precedence, lowest first. All are left-associative.
var binaryLevels = [][]string{{"+", "-"}, {"~"}, {"*", "/", "//", "%"}}

func (p *parser) binary(level int) *node {
	if level == len(binaryLevels) {
		n := p.unary(true)
		if p.isOp("**") {
			refusef(p.cur().at, "operator %q", "**")
		}
		return n
	}
	n := p.binary(level + 1)
	joined := false
	for p.cur().kind == tokOperator && slices.Contains(binaryLevels[level], p.cur().text) {
		op := p.next().text
		right := p.binary(level + 1)
		switch {
		case op != "~":
			n = &node{kind: nodeBinary, name: op, a: n, b: right, at: n.at}
		case joined:
			n.list = append(n.list, right)
		default:
			n = &node{kind: nodeConcat, list: []*node{n, right}, at: n.at}
			joined = true
		}
		// A chain becomes a left-leaning tree whose depth is the length of the chain.
		if p.depth++; p.depth > maxTree {
			p.failf("nested too deeply")
		}
		defer p.leave()
	}
	return n
}

func (p *parser) unary(withFilter bool) *node {
	p.enter()
	defer p.leave()
	at := p.cur().at
	var n *node
	switch {
	case p.skipOp("-"):
		n = &node{kind: nodeNeg, a: p.unary(false), at: at}
	case p.skipOp("+"):
		n = &node{kind: nodePos, a: p.unary(false), at: at}
	default:
		n = p.primary(false)
	}
	if n = p.postfix(n, false); withFilter {
		n = p.postfix(n, true)
	}
	return n
}

func (p *parser) primary(namespace bool) *node {
	t := p.cur()
	switch t.kind {
	case tokName:
		p.next()
		switch t.text {
		case "true", "True", "false", "False":
			return &node{kind: nodeConst, value: Bool(t.text[0]|32 == 't'), at: t.at}
		case "none", "None":
			return &node{kind: nodeConst, value: None(), at: t.at}
		}
		if namespace && p.skipOp(".") {
			return &node{kind: nodeNSRef, name: t.text, attr: p.expectName(), at: t.at}
		}
		return &node{kind: nodeName, name: t.text, at: t.at}
	case tokString:
		var text strings.Builder
		for p.cur().kind == tokString {
			text.WriteString(p.next().value.str())
		}
		return &node{kind: nodeConst, value: String(text.String()), at: t.at}
	case tokNumber:
		p.next()
		return &node{kind: nodeConst, value: t.value, at: t.at}
	}
	switch {
	case p.skipOp("("):
		n := p.tuple(tupleOptions{explicit: true})
		p.expectOp(")")
		return n
	case p.isOp("["):
		return &node{kind: nodeList, list: p.brackets("[", "]", false), at: t.at}
	case p.isOp("{"):
		return &node{kind: nodeDict, list: p.brackets("{", "}", true), at: t.at}
	}
	p.failf("unexpected %s", reprText(t.describe()))
	return nil
}

func (p *parser) brackets(open, closing string, pairs bool) []*node {
	p.expectOp(open)
	var items []*node
	for !p.isOp(closing) {
		if len(items) > 0 {
			p.expectOp(",")
		}
		if p.isOp(closing) {
			break
		}
		items = append(items, p.expression())
		if pairs {
			p.expectOp(":")
			items = append(items, p.expression())
		}
	}
	p.expectOp(closing)
	return items
}

// grow counts another link of a chain of operators, which adds a level to the tree.
func (p *parser) grow(links *int) {
	if *links++; *links > maxTree {
		p.failf("nested too deeply")
	}
}

// postfix reads calls, and either attributes and subscripts or filters and tests.
func (p *parser) postfix(n *node, filters bool) *node {
	for links := 0; ; p.grow(&links) {
		switch {
		case p.isOp("("):
			n = &node{kind: nodeCall, a: n, at: p.cur().at, call: p.arguments()}
		case !filters && (p.isOp(".") || p.isOp("[")):
			n = p.subscript(n)
		case filters && p.isOp("|"):
			n = p.filters(n, false)
		case filters && p.isName("is"):
			n = p.test(n)
		default:
			return n
		}
	}
}

func (p *parser) subscript(n *node) *node {
	at := p.cur().at
	if p.skipOp(".") {
		t := p.next()
		switch {
		case t.kind == tokName:
			return &node{kind: nodeGetattr, a: n, name: t.text, at: t.at}
		case t.kind == tokNumber && t.value.kind == KindInt:
			return &node{kind: nodeGetitem, a: n, b: &node{kind: nodeConst, value: t.value}, at: at}
		}
		p.failf("expected name or number")
	}
	p.expectOp("[")
	var args []*node
	for !p.isOp("]") {
		if len(args) > 0 {
			p.expectOp(",")
		}
		args = append(args, p.subscribed())
	}
	p.expectOp("]")
	arg := &node{kind: nodeTuple, list: args, at: at}
	if len(args) == 1 {
		arg = args[0]
	}
	return &node{kind: nodeGetitem, a: n, b: arg, at: at}
}

func (p *parser) subscribed() *node {
	n := &node{kind: nodeSlice, list: make([]*node, 3), at: p.cur().at}
	if !p.isOp(":") {
		first := p.expression()
		if !p.isOp(":") {
			return first
		}
		n.list[0] = first
	}
	for i := 1; i < 3 && p.skipOp(":"); i++ {
		if !p.isOp(":") && !p.isOp("]") && !p.isOp(",") {
			n.list[i] = p.expression()
		}
	}
	return n
}

func (p *parser) arguments() callArgs {
	var c callArgs
	p.expectOp("(")
	ensure := func(ok bool) {
		if !ok {
			p.failf("invalid syntax for function call expression")
		}
	}
	for first := true; !p.isOp(")"); first = false {
		if !first {
			p.expectOp(",")
			if p.isOp(")") {
				break
			}
		}
		switch {
		case p.skipOp("*"):
			ensure(c.dynArgs == nil)
			c.dynArgs = p.expression()
		case p.skipOp("**"):
			refusef(p.tokens[p.pos-1].at, "an argument with %q", "**")
		case p.cur().kind == tokName && p.look().is(tokOperator, "="):
			name := p.next().text
			p.next()
			if slices.Contains(c.names, name) {
				p.failf("keyword argument repeated: %s", name)
			}
			c.names = append(c.names, name)
			c.kwargs = append(c.kwargs, p.expression())
		default:
			ensure(c.dynArgs == nil && len(c.kwargs) == 0)
			c.args = append(c.args, p.expression())
		}
	}
	p.expectOp(")")
	return c
}

func (p *parser) dotted() string {
	parts := []string{p.expectName()}
	for p.skipOp(".") {
		parts = append(parts, p.expectName())
	}
	return strings.Join(parts, ".")
}

// filters reads "|a|b(c)"; with inline the first filter has no bar. It returns n itself if there are none.
func (p *parser) filters(n *node, inline bool) *node {
	for links := 0; inline || p.isOp("|"); p.grow(&links) {
		if !inline {
			p.next()
		}
		inline = false
		f := &node{kind: nodeFilter, a: n, at: p.cur().at, name: p.dotted()}
		if p.isOp("(") {
			f.call = p.arguments()
		}
		n = f
	}
	return n
}

func (p *parser) test(n *node) *node {
	p.enter()
	defer p.leave()
	at := p.next().at
	negated := p.skipName("not")
	t := &node{kind: nodeTest, a: n, at: at, name: p.dotted()}
	c := p.cur()
	switch {
	case p.isOp("("):
		t.call = p.arguments()
	case c.kind == tokName && slices.Contains([]string{"else", "or", "and"}, c.text):
	case c.kind == tokName || c.kind == tokString || c.kind == tokNumber || p.isOp("[") || p.isOp("{"):
		if p.isName("is") {
			p.failf("You cannot chain multiple tests with is")
		}
		t.call.args = []*node{p.postfix(p.primary(false), false)}
	}
	if negated {
		return &node{kind: nodeNot, a: t, at: at}
	}
	return t
}
