package jinja

import "unsafe"

// callable is a macro, a global function or a method bound to its value.
type callable struct {
	isMacro bool
	builtin bool // a method of a built-in type
	call    func(m *machine, a *arguments) Value
}

func function(call func(m *machine, a *arguments) Value) Value {
	return Value{kind: kindCallable, p: unsafe.Pointer(&callable{call: call})}
}

// iterator is a Python generator or iterator: it can be consumed once.
type iterator struct {
	typeName string
	next     func() (Value, bool)
}

// iteratorOf charges for the iterator and what its next function keeps. Iterators over others are nested at most as deep as values.
func (m *machine) iteratorOf(typeName string, next func() (Value, bool)) Value {
	m.charge(20 * valueSize)
	return Value{kind: kindIterator, p: unsafe.Pointer(&iterator{typeName, func() (Value, bool) {
		if m.nested++; m.nested > maxNesting {
			raisef("RecursionError", "maximum recursion depth exceeded in generators")
		}
		item, ok := next()
		m.nested--
		return item, ok
	}})}
}

func undefinedOf(u *undefinedInfo) Value { return Value{kind: KindUndefined, p: unsafe.Pointer(u)} }

// namespaceObject is jinja2's Namespace.
type namespaceObject struct{ attrs *Dict }
