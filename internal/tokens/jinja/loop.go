package jinja

import "unsafe"

// iteration iterates over a value like Python's iter.
type iteration struct {
	items []Value // used if next is nil
	pos   int
	next  func() (Value, bool)
	// length is len() of the value, -1 if it has none.
	length int
}

func (it *iteration) step() (Value, bool) {
	if it.next != nil {
		return it.next()
	}
	if it.pos >= len(it.items) {
		return Value{}, false
	}
	it.pos++
	return it.items[it.pos-1], true
}

// loopObject is jinja2's LoopContext, the variable "loop".
type loopObject struct {
	m       *machine
	it      *iteration
	index0  int64
	length  int64 // -1: unknown yet
	before  Value
	current Value
	after   Value // kindMissing: not read ahead
}

func (l *loopObject) advance() bool {
	v := l.after
	if v.kind != kindMissing {
		l.after = Value{kind: kindMissing}
	} else {
		var ok bool
		if v, ok = l.it.step(); !ok {
			return false
		}
	}
	l.index0++
	l.before, l.current = l.current, v
	return true
}

func (l *loopObject) peek() (Value, bool) {
	if l.after.kind == kindMissing {
		v, ok := l.it.step()
		if !ok {
			return Value{}, false
		}
		l.after = v
	}
	return l.after, true
}

func (l *loopObject) len() int64 {
	if l.length >= 0 {
		return l.length
	}
	if l.it.length >= 0 {
		l.length = int64(l.it.length)
		return l.length
	}
	var rest []Value
	for {
		v, ok := l.it.step()
		if !ok {
			break
		}
		l.m.charge(2 * valueSize)
		rest = append(rest, v)
	}
	*l.it = iteration{items: rest, length: -1}
	l.length = int64(len(rest)) + l.index0 + 1
	if l.after.kind != kindMissing {
		l.length++
	}
	return l.length
}

var loopAttributes = map[string]func(l *loopObject) Value{
	"index":     func(l *loopObject) Value { return Int(l.index0 + 1) },
	"index0":    func(l *loopObject) Value { return Int(l.index0) },
	"revindex":  func(l *loopObject) Value { return Int(l.len() - l.index0) },
	"revindex0": func(l *loopObject) Value { return Int(l.len() - l.index0 - 1) },
	"first":     func(l *loopObject) Value { return Bool(l.index0 == 0) },
	"last": func(l *loopObject) Value {
		_, ok := l.peek()
		return Bool(!ok)
	},
	"length": func(l *loopObject) Value { return Int(l.len()) },
	"previtem": func(l *loopObject) Value {
		if l.index0 == 0 {
			return undefinedOf(&undefinedInfo{hint: "there is no previous item"})
		}
		return l.before
	},
	"nextitem": func(l *loopObject) Value {
		if v, ok := l.peek(); ok {
			return v
		}
		return undefinedOf(&undefinedInfo{hint: "there is no next item"})
	},
}

func (c *compiler) forLoop(s scope, n *node) stmt {
	extended := undeclared(n.body, "loop")["loop"]
	n.walk(func(x *node) {
		if x.kind == nodeName && x.ctx == ctxStore && x.name == "loop" {
			compileErrorf("TemplateAssertionError", x.at, "Can't assign to special loop variable in for-loop target")
		}
	})
	fn := s.sym.fn
	l := &loopCode{slot: -1}
	in := s.inner(fn)
	in.loop = true
	if extended {
		l.slot = in.sym.param("loop").slot
	}
	in.sym.visit(n.a, true)
	in.sym.visitAll(n.body)
	if n.c != nil {
		test := s.inner(fn)
		test.sym.visit(n.a, true)
		test.sym.visit(n.c, false)
		l.testTarget = c.target(test, n.a)
		l.test, l.testCost = c.expr(test, n.c), n.c.size()/nodesAtOnce
		l.testEnter = c.enter(test)
	}
	l.target = c.target(in, n.a)
	l.body = c.body(in, n.body)
	l.enter = c.enter(in)
	if n.other != nil {
		other := s.inner(fn)
		other.loop = s.loop
		other.sym.visitAll(n.other)
		l.other = c.function(other, n.other)
	}
	iter := c.expr(s, n.b)
	return func(f *frame) signal { return l.run(f, iter(f)) }
}

type loopCode struct {
	slot       int // of the variable loop, -1 if unused
	target     func(f *frame, v Value)
	enter      func(f *frame)
	body       stmt
	other      stmt // nil without an else
	test       expr // nil without an if
	testTarget func(f *frame, v Value)
	testEnter  func(f *frame)
	testCost   int
}

func (l *loopCode) run(f *frame, v Value) signal {
	m := f.m
	m.charge(8 * valueSize)
	it := m.iterate(v)
	if l.test != nil {
		it = l.filtered(f, it)
	}
	var loop *loopObject
	if l.slot >= 0 {
		loop = &loopObject{m: m, it: &it, index0: -1, length: -1, after: Value{kind: kindMissing}}
		f.slots[l.slot] = Value{kind: kindMissing}
	}
	empty := true
	for {
		var item Value
		if loop != nil {
			if !loop.advance() {
				break
			}
			item = loop.current
			f.slots[l.slot] = Value{kind: kindLoop, p: unsafe.Pointer(loop)}
		} else {
			var ok bool
			if item, ok = it.step(); !ok {
				break
			}
		}
		m.step()
		l.target(f, item)
		l.enter(f)
		sig := l.body(f)
		if sig == signalBreak {
			// Python clears its flag for the else only at the end of the body.
			break
		}
		if sig == signalNone {
			empty = false
		}
	}
	if empty && l.other != nil {
		return l.other(f)
	}
	return signalNone
}

// filtered yields the items that pass the loop's if. It is lazy: the test of an item sees the
// effects of the body on earlier items.
func (l *loopCode) filtered(f *frame, it iteration) iteration {
	source := it
	entered := false
	return iteration{length: -1, next: func() (Value, bool) {
		if !entered {
			l.testEnter(f)
			entered = true
		}
		for {
			item, ok := source.step()
			if !ok {
				return Value{}, false
			}
			f.m.steps -= l.testCost
			f.m.step()
			l.testTarget(f, item)
			if l.test(f).Truth() {
				return item, true
			}
		}
	}}
}
