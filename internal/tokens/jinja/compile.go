package jinja

import "unsafe"

// expr computes a value; stmt writes to the machine's output.
type (
	expr func(f *frame) Value
	stmt func(f *frame) signal
)

// signal is how a statement ended.
type signal uint8

const (
	signalNone signal = iota
	signalBreak
	signalContinue
)

// frame is an activation of a funcScope. It outlives its call if a macro that the call defined does.
type frame struct {
	slots  []Value
	parent *frame
	m      *machine
}

func (f *frame) up(hops int) *frame {
	for ; hops > 0; hops-- {
		f = f.parent
	}
	return f
}

// scope is the compiler's state at one place of the template.
type scope struct {
	sym *symbols
	// soft: the code may never run, so unknown filters are not an error yet.
	soft bool
	// loop: break and continue are allowed.
	loop bool
}

func (s scope) inner(fn *funcScope) scope { return scope{sym: newSymbols(s.sym, fn), loop: s.loop} }

type compiler struct {
	// names are resolved in the context once per rendering.
	names    []string
	position map[string]int
}

func (c *compiler) resolve(name string) int {
	i, ok := c.position[name]
	if !ok {
		i = len(c.names)
		c.names = append(c.names, name)
		c.position[name] = i
	}
	return i
}

func compileTree(root *node) *Template {
	c := &compiler{position: map[string]int{}}
	fn := &funcScope{}
	s := scope{sym: newSymbols(nil, fn)}
	s.sym.visitAll(root.body)
	body := c.function(s, root.body)
	for _, name := range c.names {
		if otherGlobals[name] {
			refusef(placeOf(root.body, name), "global %q", name)
		}
	}
	return &Template{root: root, body: body, slots: fn, names: c.names}
}

// function compiles a body, preceded by the loads of its scope.
func (c *compiler) function(s scope, nodes []*node) stmt {
	body := c.body(s, nodes)
	enter := c.enter(s)
	return func(f *frame) signal {
		enter(f)
		return body(f)
	}
}

// enter compiles the loads of a scope.
func (c *compiler) enter(s scope) func(f *frame) {
	type step struct {
		slot, from, hops int
		kind             loadKind
	}
	var steps []step
	for _, id := range *s.sym.order {
		l, ok := s.sym.loads[id]
		if !ok || l.kind == loadParam {
			continue
		}
		st := step{slot: id.slot, kind: l.kind}
		switch l.kind {
		case loadResolve:
			st.from = c.resolve(l.name)
		case loadAlias:
			st.from, st.hops = l.outer.slot, hops(s.sym.fn, l.outer.fn)
		}
		steps = append(steps, st)
	}
	return func(f *frame) {
		f.m.steps -= len(steps) / nodesAtOnce
		for i := range steps {
			st := &steps[i]
			switch st.kind {
			case loadResolve:
				f.slots[st.slot] = f.m.names[st.from]
			case loadAlias:
				f.slots[st.slot] = f.up(st.hops).slots[st.from]
			default:
				f.slots[st.slot] = Value{kind: kindMissing}
			}
		}
	}
}

// hops counts the frames between a function and the one that owns a variable.
func hops(from, to *funcScope) int {
	n := 0
	for ; from != to; from = from.parent {
		n++
	}
	return n
}

func (c *compiler) body(s scope, nodes []*node) stmt {
	steps := make([]stmt, 0, len(nodes))
	size := 0
	for _, n := range nodes {
		steps = append(steps, c.statement(s, n)...)
		size += n.size()
	}
	if len(steps) == 0 {
		return func(*frame) signal { return signalNone }
	}
	cost := 1 + size/nodesAtOnce
	return func(f *frame) signal {
		f.m.steps -= cost // loops and calls, which repeat bodies, look at them
		for _, step := range steps {
			if sig := step(f); sig != signalNone {
				return sig
			}
		}
		return signalNone
	}
}

func (c *compiler) statement(s scope, n *node) []stmt {
	var one func(s scope, n *node) stmt
	switch n.kind {
	case nodeOutput:
		return c.output(s, n)
	case nodeAssign:
		one = c.assign
	case nodeAssignBlock:
		one = c.assignBlock
	case nodeFor:
		one = c.forLoop
	case nodeIf:
		one = c.conditional
	case nodeMacro:
		one = c.macroStatement
	case nodeCallBlock:
		one = c.callBlock
	case nodeFilterBlock:
		one = c.filterBlock
	case nodeGeneration:
		one = c.generation
	case nodeBreak:
		one = leaveLoop("break", signalBreak)
	case nodeContinue:
		one = leaveLoop("continue", signalContinue)
	default:
		syntaxErrorf(n.at, "unexpected statement")
	}
	return []stmt{one(s, n)}
}

func leaveLoop(tag string, sig signal) func(s scope, n *node) stmt {
	return func(s scope, n *node) stmt {
		if !s.loop {
			compileErrorf("SyntaxError", n.at, "'%s' outside loop", tag)
		}
		return func(*frame) signal { return sig }
	}
}

func (c *compiler) output(s scope, n *node) []stmt {
	steps := make([]stmt, 0, len(n.list))
	for _, part := range n.list {
		if part.kind == nodeData || part.kind == nodeConst {
			text := part.name
			if part.kind == nodeConst {
				text = string(AppendStr(nil, part.value))
			}
			steps = append(steps, func(f *frame) signal {
				f.m.write(text)
				return signalNone
			})
			continue
		}
		if isSum(part) {
			steps = append(steps, c.sum(s, part).write)
			continue
		}
		e := c.expr(s, part)
		steps = append(steps, func(f *frame) signal {
			f.m.emit(e(f))
			return signalNone
		})
	}
	return steps
}

// target compiles an assignment to a name, an attribute or a tuple of them.
func (c *compiler) target(s scope, n *node) func(f *frame, v Value) {
	switch n.kind {
	case nodeName:
		slot := s.sym.find(n.name).slot
		return func(f *frame, v Value) { f.slots[slot] = v }
	case nodeNSRef:
		get := c.variable(s, n.name)
		attr := n.attr
		return func(f *frame, v Value) {
			ns := get(f)
			if ns.kind != kindNamespace {
				raisef("TemplateRuntimeError", "cannot assign attribute on non-namespace object")
			}
			d := (*namespaceObject)(ns.p).attrs
			f.m.mustHash(String(attr), d.Len())
			d.Set(attr, v)
		}
	}
	parts := make([]func(*frame, Value), len(n.list))
	for i, part := range n.list {
		parts[i] = c.target(s, part)
	}
	return func(f *frame, v Value) {
		items := f.m.unpack(v, len(parts))
		for i, set := range parts {
			set(f, items[i])
		}
	}
}

func (c *compiler) assign(s scope, n *node) stmt {
	// Checked before the value is computed, as in Jinja2.
	var checks []expr
	n.a.walk(func(t *node) {
		if t.kind == nodeNSRef {
			checks = append(checks, c.variable(s, t.name))
		}
	})
	value := c.expr(s, n.b)
	set := c.target(s, n.a)
	return func(f *frame) signal {
		for _, check := range checks {
			if check(f).kind != kindNamespace {
				raisef("TemplateRuntimeError", "cannot assign attribute on non-namespace object")
			}
		}
		set(f, value(f))
		return signalNone
	}
}

func (c *compiler) assignBlock(s scope, n *node) stmt {
	in := s.inner(s.sym.fn)
	in.sym.visitAll(n.body)
	body := c.function(in, n.body)
	set := c.target(s, n.a)
	filter := func(_ *frame, v Value) Value { return v }
	if n.b != nil {
		filter = c.blockFilter(in, n.b)
	}
	return func(f *frame) signal {
		text, sig := f.m.capture(f, body)
		if sig == signalNone {
			set(f, filter(f, text))
		}
		return sig
	}
}

// blockFilter compiles a chain of filters whose first operand is the captured text.
func (c *compiler) blockFilter(s scope, n *node) func(f *frame, v Value) Value {
	slot := s.sym.fn.slots
	s.sym.fn.slots++
	inner := n
	for inner.a != nil {
		inner = inner.a
	}
	inner.a = &node{kind: nodeConst, attr: "captured", value: Int(int64(slot))}
	e := c.expr(s, n)
	inner.a = nil
	return func(f *frame, v Value) Value {
		f.slots[slot] = v
		return e(f)
	}
}

func (c *compiler) filterBlock(s scope, n *node) stmt {
	in := s.inner(s.sym.fn)
	in.sym.visit(n.a, false)
	in.sym.visitAll(n.body)
	body := c.function(in, n.body)
	filter := c.blockFilter(in, n.a)
	return func(f *frame) signal {
		text, sig := f.m.capture(f, body)
		if sig == signalNone {
			f.m.emit(filter(f, text))
		}
		return sig
	}
}

func (c *compiler) conditional(s scope, n *node) stmt {
	s.soft = true
	type arm struct {
		test expr
		body stmt
	}
	arms := []arm{{c.expr(s, n.a), c.body(s, n.body)}}
	for _, e := range n.list {
		arms = append(arms, arm{c.expr(s, e.a), c.body(s, e.body)})
	}
	other := c.body(s, n.other)
	if len(arms) == 1 {
		test, body := arms[0].test, arms[0].body
		return func(f *frame) signal {
			if test(f).Truth() {
				return body(f)
			}
			return other(f)
		}
	}
	return func(f *frame) signal {
		for i := range arms {
			if arms[i].test(f).Truth() {
				return arms[i].body(f)
			}
		}
		return other(f)
	}
}

// generation compiles the tag that marks the assistant's text, which acts as a call block around its body.
func (c *compiler) generation(s scope, n *node) stmt {
	fn := &funcScope{parent: s.sym.fn}
	in := s.inner(fn)
	in.loop = false
	in.sym.visitAll(n.body)
	body, levels := c.function(in, n.body), n.levels(0)
	return func(f *frame) signal {
		f.m.enterCall(levels)
		sig := body(f.m.newFrame(fn, f))
		f.m.leaveCall(levels)
		return sig
	}
}

// macroCode is the compiled body of a macro or a call block.
type macroCode struct {
	name     string
	fn       *funcScope
	params   []string
	slots    []int
	defaults []expr // nil for parameters without a default
	body     stmt
	enter    func(f *frame)
	caller   int // slot of the variable caller, -1 if the body does not use it
	// explicitCaller: caller is one of the parameters.
	explicitCaller bool
	levels, size   int // of the tree
}

func (c *compiler) macro(s scope, n *node) *macroCode {
	fn := &funcScope{parent: s.sym.fn}
	in := s.inner(fn)
	in.loop = false
	for _, p := range n.params {
		in.sym.visit(p, false)
	}
	in.sym.visitAll(n.list)
	in.sym.visitAll(n.body)
	code := &macroCode{name: n.name, fn: fn, caller: -1, levels: n.levels(0), size: n.size()}
	special := undeclared(n.body, "caller", "kwargs", "varargs")
	hasParam := map[string]int{}
	for i, p := range n.params {
		hasParam[p.name] = i + 1
		code.params = append(code.params, p.name)
		code.slots = append(code.slots, in.sym.find(p.name).slot)
	}
	code.explicitCaller = hasParam["caller"] > 0
	if special["caller"] {
		if i := hasParam["caller"]; i > 0 {
			if i-1-len(n.params)+len(n.list) < 0 {
				compileErrorf("TemplateAssertionError", n.at, "When defining macros or call blocks the special \"caller\" argument must be omitted or be given a default.")
			}
		} else {
			code.caller = in.sym.param("caller").slot
		}
	}
	for _, name := range []string{"kwargs", "varargs"} {
		if special[name] && hasParam[name] == 0 {
			refusef(placeOf(n.body, name), "%q of a macro", name)
		}
	}
	code.defaults = make([]expr, len(n.params))
	for i := range n.params {
		if j := i - len(n.params) + len(n.list); j >= 0 {
			code.defaults[i] = c.expr(in, n.list[j])
		}
	}
	code.body = c.body(in, n.body)
	code.enter = c.enter(in)
	return code
}

func (code *macroCode) bind(f *frame) Value {
	f.m.charge(6 * valueSize)
	call := func(m *machine, a *arguments) Value { return code.call(m, f, a) }
	return Value{kind: kindCallable, p: unsafe.Pointer(&callable{isMacro: true, call: call})}
}

func (c *compiler) macroStatement(s scope, n *node) stmt {
	code := c.macro(s, n)
	set := c.target(s, &node{kind: nodeName, name: n.name, ctx: ctxStore})
	return func(f *frame) signal {
		set(f, code.bind(f))
		return signalNone
	}
}

func (c *compiler) callBlock(s scope, n *node) stmt {
	code := c.macro(s, &node{kind: nodeCallBlock, name: "caller", params: n.params, list: n.list, body: n.body, at: n.at})
	code.name = ""
	call := c.call(s, n.a, code)
	return func(f *frame) signal {
		f.m.emit(call(f))
		return signalNone
	}
}
