package jinja

import "fmt"

func (c *compiler) variable(s scope, name string) expr {
	id := s.sym.find(name)
	slot, up := id.slot, hops(s.sym.fn, id.fn)
	missing := undefinedOf(&undefinedInfo{name: name, obj: Value{kind: kindMissing}})
	if up == 0 {
		return func(f *frame) Value {
			if v := f.slots[slot]; v.kind != kindMissing {
				return v
			}
			return missing
		}
	}
	return func(f *frame) Value {
		if v := f.up(up).slots[slot]; v.kind != kindMissing {
			return v
		}
		return missing
	}
}

func (c *compiler) exprs(s scope, nodes []*node) []expr {
	out := make([]expr, len(nodes))
	for i, n := range nodes {
		out[i] = c.expr(s, n)
	}
	return out
}

func (c *compiler) expr(s scope, n *node) expr {
	switch n.kind {
	case nodeName:
		return c.variable(s, n.name)
	case nodeConst:
		v := n.value
		if n.attr != "" { // the text that a block captured
			slot := int(v.n)
			return func(f *frame) Value { return f.slots[slot] }
		}
		return func(*frame) Value { return v }
	case nodeTuple, nodeList:
		items := c.exprs(s, n.list)
		make_ := List
		if n.kind == nodeTuple {
			make_ = Tuple
		}
		return func(f *frame) Value {
			f.m.charge((len(items) + 1) * valueSize)
			out := make([]Value, len(items))
			for i, item := range items {
				out[i] = item(f)
			}
			return make_(out)
		}
	case nodeDict:
		items := c.exprs(s, n.list)
		return func(f *frame) Value {
			f.m.charge(2 * len(items) * valueSize)
			d := NewDict(len(items) / 2)
			for i := 0; i < len(items); i += 2 {
				k := items[i](f)
				v := items[i+1](f)
				if at := f.m.find(d, k); at >= 0 {
					d.entries[at].value = v
				} else {
					d.add(k, v)
				}
			}
			return FromDict(d)
		}
	case nodeGetattr:
		return c.getattr(s, n)
	case nodeGetitem:
		return c.getitem(s, n)
	case nodeCall:
		return c.call(s, n, nil)
	case nodeFilter:
		return c.filter(s, n)
	case nodeTest:
		return c.test(s, n)
	case nodeCond:
		return c.cond(s, n)
	case nodeOr:
		a, b := c.expr(s, n.a), c.expr(s, n.b)
		return func(f *frame) Value {
			if v := a(f); v.Truth() {
				return v
			}
			return b(f)
		}
	case nodeAnd:
		a, b := c.expr(s, n.a), c.expr(s, n.b)
		return func(f *frame) Value {
			if v := a(f); !v.Truth() {
				return v
			}
			return b(f)
		}
	case nodeNot:
		a := c.expr(s, n.a)
		return func(f *frame) Value { return Bool(!a(f).Truth()) }
	case nodeNeg:
		a := c.expr(s, n.a)
		return func(f *frame) Value { return unary("-", a(f)) }
	case nodePos:
		a := c.expr(s, n.a)
		return func(f *frame) Value { return unary("+", a(f)) }
	case nodeBinary:
		if isSum(n) {
			return c.sum(s, n).value
		}
		a, b := c.expr(s, n.a), c.expr(s, n.b)
		op := binaryOps[n.name]
		return func(f *frame) Value {
			x := a(f)
			return op(f.m, x, b(f))
		}
	case nodeConcat:
		parts := c.exprs(s, n.list)
		return func(f *frame) Value {
			values := make([]Value, 0, 8)
			for _, part := range parts {
				values = append(values, part(f))
			}
			return f.m.concat(values)
		}
	case nodeCompare:
		return c.compare(s, n)
	}
	syntaxErrorf(n.at, "unexpected expression")
	return nil
}

func (c *compiler) cond(s scope, n *node) expr {
	s.soft = true
	test, then := c.expr(s, n.a), c.expr(s, n.b)
	missing := undefinedOf(&undefinedInfo{hint: fmt.Sprintf("the inline if-expression on line %d evaluated to false and no else section was defined.", n.at.line)})
	otherwise := func(*frame) Value { return missing }
	if n.c != nil {
		otherwise = c.expr(s, n.c)
	}
	return func(f *frame) Value {
		if test(f).Truth() {
			return then(f)
		}
		return otherwise(f)
	}
}

var comparisonOps = map[string]func(m *machine, a, b Value) bool{
	"==":     func(m *machine, a, b Value) bool { return m.equal(a, b) },
	"!=":     func(m *machine, a, b Value) bool { return !m.equal(a, b) },
	"<":      (*machine).less,
	"<=":     ordered("<=", func(c int) bool { return c <= 0 }),
	">":      ordered(">", func(c int) bool { return c > 0 }),
	">=":     ordered(">=", func(c int) bool { return c >= 0 }),
	"in":     func(m *machine, a, b Value) bool { return m.contains(b, a) },
	"not in": func(m *machine, a, b Value) bool { return !m.contains(b, a) },
}

func ordered(op string, holds func(c int) bool) func(m *machine, a, b Value) bool {
	return func(m *machine, a, b Value) bool {
		c, ok := m.compare(a, b, op, 0)
		return ok && holds(c)
	}
}

func (c *compiler) compare(s scope, n *node) expr {
	first := c.expr(s, n.a)
	rest := c.exprs(s, n.list)
	ops := make([]func(m *machine, a, b Value) bool, len(n.ops))
	for i, op := range n.ops {
		ops[i] = comparisonOps[op]
	}
	if len(ops) == 1 {
		op, right := ops[0], rest[0]
		if text := n.list[0]; n.ops[0] == "==" && text.kind == nodeConst && text.value.kind == KindString {
			want := text.value.str()
			return func(f *frame) Value {
				v := first(f)
				if v.kind != KindString || v.n != uint64(len(want)) {
					return Bool(false)
				}
				f.m.work(len(want))
				return Bool(v.str() == want)
			}
		}
		return func(f *frame) Value {
			x := first(f)
			return Bool(op(f.m, x, right(f)))
		}
	}
	return func(f *frame) Value {
		x := first(f)
		for i, op := range ops {
			y := rest[i](f)
			if !op(f.m, x, y) {
				return Bool(false)
			}
			x = y
		}
		return Bool(true)
	}
}

func (c *compiler) getattr(s scope, n *node) expr {
	object, name := c.expr(s, n.a), n.name
	plain := dictMethods[name] == nil && !dictMutators[name] && !otherAttributes[KindDict][name]
	missing := undefinedOf(&undefinedInfo{name: name, obj: FromDict(nil)}) // the error text names only the dict's type
	ofLoop := loopAttributes[name]
	return func(f *frame) Value {
		v := object(f)
		switch {
		case plain && v.kind == KindDict:
			if item, ok := f.m.member(v.dict(), name); ok {
				return item
			}
			return missing
		case ofLoop != nil && v.kind == kindLoop:
			return ofLoop((*loopObject)(v.p))
		}
		return f.m.getattr(v, name)
	}
}

func (c *compiler) getitem(s scope, n *node) expr {
	object := c.expr(s, n.a)
	if n.b.kind == nodeSlice {
		var part [3]expr
		for i, p := range n.b.list {
			if p != nil {
				part[i] = c.expr(s, p)
			}
		}
		return func(f *frame) Value {
			v := object(f)
			bounds := [3]Value{None(), None(), None()}
			for i, p := range part {
				if p != nil {
					bounds[i] = p(f)
				}
			}
			return f.m.slice(v, bounds)
		}
	}
	index := c.expr(s, n.b)
	if n.b.kind == nodeConst && n.b.attr == "" && n.b.value.kind == KindString {
		key := n.b.value
		return func(f *frame) Value {
			v := object(f)
			if v.kind == KindDict {
				if item, ok := f.m.member(v.dict(), key.str()); ok {
					return item
				}
			}
			return f.m.getitem(v, key)
		}
	}
	return func(f *frame) Value {
		v := object(f)
		return f.m.getitem(v, index(f))
	}
}

// argsCode evaluates the arguments of a call.
type argsCode struct {
	pos     []expr
	names   []string
	kwargs  []expr
	dynArgs expr
	none    bool
}

func (c *compiler) args(s scope, a callArgs) *argsCode {
	code := &argsCode{pos: c.exprs(s, a.args), names: a.names, kwargs: c.exprs(s, a.kwargs)}
	code.none = len(a.args) == 0 && len(a.kwargs) == 0 && a.dynArgs == nil
	if a.dynArgs != nil {
		code.dynArgs = c.expr(s, a.dynArgs)
	}
	return code
}

// arguments are the arguments of a callable. The slices are valid only during the call.
type arguments struct {
	pos   []Value
	names []string
	kw    []Value
}

// noArguments is shared by all calls without any: callees only read them.
var noArguments arguments

// eval pushes the arguments onto the machine's stack; the caller truncates it afterwards.
func (code *argsCode) eval(f *frame) arguments {
	if code.none {
		return arguments{}
	}
	m := f.m
	base := len(m.stack)
	for _, e := range code.pos {
		v := e(f)
		m.stack = append(m.stack, v)
	}
	if code.dynArgs != nil {
		it := m.iterate(code.dynArgs(f))
		for v, ok := it.step(); ok; v, ok = it.step() {
			m.charge(2 * valueSize)
			m.stack = append(m.stack, v)
		}
	}
	mid := len(m.stack)
	for _, e := range code.kwargs {
		v := e(f)
		m.stack = append(m.stack, v)
	}
	end := len(m.stack)
	return arguments{pos: m.stack[base:mid:mid], names: code.names, kw: m.stack[mid:end:end]}
}

// apply calls a filter, test or method of v.
func (code *argsCode) apply(f *frame, fn filterFunc, v Value) Value {
	if code.none {
		f.m.operands(v, &noArguments)
		return fn(f.m, v, &noArguments)
	}
	base := len(f.m.stack)
	a := code.eval(f)
	f.m.operands(v, &a)
	out := fn(f.m, v, &a)
	f.m.stack = f.m.stack[:base]
	return out
}

// call compiles a call; caller is the body of a call block or nil.
func (c *compiler) call(s scope, n *node, caller *macroCode) expr {
	args := c.args(s, n.call)
	invoke := func(f *frame, call func(a *arguments) Value) Value {
		base := len(f.m.stack)
		a := args.eval(f)
		if caller != nil {
			a.names = append(append([]string(nil), a.names...), "caller")
			a.kw = append(append([]Value(nil), a.kw...), caller.bind(f))
		}
		v := call(&a)
		f.m.stack = f.m.stack[:base]
		return v
	}
	if n.a.kind == nodeGetattr && caller == nil {
		// calls a method of a str or dict without creating a bound method
		object, name := c.expr(s, n.a.a), n.a.name
		str, dict := strMethods[name], dictMethods[name]
		return func(f *frame) Value {
			v := object(f)
			var method filterFunc
			switch v.kind {
			case KindString:
				method = str
			case KindDict:
				method = dict
			}
			if method != nil {
				return args.apply(f, method, v)
			}
			callee := f.m.getattr(v, name)
			return invoke(f, func(a *arguments) Value { return f.m.call(callee, a) })
		}
	}
	callee := c.expr(s, n.a)
	return func(f *frame) Value {
		fn := callee(f)
		return invoke(f, func(a *arguments) Value { return f.m.call(fn, a) })
	}
}

func (c *compiler) filter(s scope, n *node) expr { return c.applied(s, n, "filter", filters[n.name]) }

func (c *compiler) test(s scope, n *node) expr {
	var fn filterFunc
	if is := tests[n.name]; is != nil {
		fn = func(m *machine, v Value, a *arguments) Value { return Bool(is(m, v, a)) }
	}
	return c.applied(s, n, "test", fn)
}

// applied compiles a filter or test; fn is nil if there is none of that name.
func (c *compiler) applied(s scope, n *node, what string, fn filterFunc) expr {
	if fn == nil {
		if !s.soft {
			compileErrorf("TemplateAssertionError", n.at, "No %s named %s.", what, reprText(n.name))
		}
		fn = func(*machine, Value, *arguments) Value {
			raisef("TemplateRuntimeError", "No %s named %s found.", what, reprText(n.name))
			return Value{}
		}
	}
	object, args := c.expr(s, n.a), c.args(s, n.call)
	return func(f *frame) Value { return args.apply(f, fn, object(f)) }
}
