package jinja

import (
	"fmt"
	"runtime"
)

// Error classes of the engine itself; every other class is a Python exception.
const (
	// Unsupported: the template uses a feature that the engine lacks (see the package comment). Python may be able to render it.
	Unsupported = "Unsupported"
	// internalError is a bug in the engine; tests treat it as a failure.
	internalError = "InternalError"
)

// Error is an exception that a template raises in Python, or the reason why the engine does not run it.
type Error struct {
	// Class is the name of the Python exception, such as UndefinedError, or one of Unsupported,
	// ResourceLimit, Stopped and InternalError.
	Class string
	// Message equals Python's where clients see it (raise_exception, undefined names); elsewhere it has the same meaning.
	Message string
	// Line and Column (in characters, from 1) locate errors of Compile; else they are 0.
	Line, Column int
}

func (e *Error) Error() string {
	switch {
	case e.Class != Unsupported:
		return e.Class + ": " + e.Message
	case e.Line > 0:
		return fmt.Sprintf("line %d, column %d: %s", e.Line, e.Column, e.Message)
	default:
		return e.Message
	}
}

func newErrorf(class, format string, args ...any) *Error {
	return &Error{Class: class, Message: fmt.Sprintf(format, args...)}
}

// raisef is Python's raise: it panics up to the next rescue, which every public function of the
// package that evaluates anything defers. Templates raise from deep inside expressions; returning
// the error through each level would double the size of the engine.
func raisef(class, format string, args ...any) { panic(newErrorf(class, format, args...)) }

// unsupportedf raises Unsupported for a construct that is detected only at run time.
func unsupportedf(format string, args ...any) {
	raisef(Unsupported, format+" is not supported", args...)
}

// place is a position in a template; both count from 1, the column in characters.
type place struct{ line, column int }

// refusef raises Unsupported for a construct of the template.
func refusef(at place, format string, args ...any) {
	compileErrorf(Unsupported, at, format+" is not supported", args...)
}

func syntaxErrorf(at place, format string, args ...any) {
	compileErrorf("TemplateSyntaxError", at, format, args...)
}

func compileErrorf(class string, at place, format string, args ...any) {
	err := newErrorf(class, format, args...)
	err.Line, err.Column = at.line, at.column
	panic(err)
}

// rescue converts what raisef threw to an error. Runtime panics become errors too: a template must never crash the process.
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
