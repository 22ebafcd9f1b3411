package jinja

import (
	"fmt"
	"runtime"
)

// Error is what a template raises in Python.
type Error struct {
	// Class is the name of the Python exception, such as UndefinedError.
	Class string
	// Message is its text; it equals Python's where clients see it
	// (raise_exception, undefined names) and has the same meaning elsewhere.
	Message string
	// Line is the line of the template for syntax errors, else 0.
	Line int
}

func (e *Error) Error() string { return e.Class + ": " + e.Message }

func newErrorf(class, format string, args ...any) *Error {
	return &Error{Class: class, Message: fmt.Sprintf(format, args...)}
}

// raisef is Python's raise: it unwinds to the next rescue, which every public
// function of the package that evaluates anything has. Templates raise from
// deep inside of expressions; returning the error through each of them would
// double the engine.
func raisef(class, format string, args ...any) {
	panic(newErrorf(class, format, args...))
}

// rescue turns what raisef threw into an error value. A fault of the engine
// itself becomes one too: a template must not end the process.
func rescue(err *error) {
	switch r := recover().(type) {
	case nil:
	case *Error:
		*err = r
	case runtime.Error:
		*err = newErrorf(internalError, "%v", r)
	default:
		panic(r)
	}
}

// internalError is the class of an engine's own fault; tests take it as a bug.
const internalError = "InternalError"
