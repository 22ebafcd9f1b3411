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

func iteratorOf(typeName string, next func() (Value, bool)) Value {
	return Value{kind: kindIterator, p: unsafe.Pointer(&iterator{typeName, next})}
}

func undefinedOf(u *undefinedInfo) Value { return Value{kind: KindUndefined, p: unsafe.Pointer(u)} }

// namespaceObject is jinja2's Namespace.
type namespaceObject struct{ attrs *Dict }
