package jinja

import (
	"fmt"
	"runtime"
)

// Classes of errors that are the engine's own; every other class is a Python exception.
const (
	// Unsupported: the template uses what the engine does not have (see the package comment). Python may render it.
	Unsupported = "Unsupported"
	// internalError is a fault of the engine. Tests take it as a bug.
	internalError = "InternalError"
)

// Error is what a template raises in Python, or why the engine does not run it.
type Error struct {
	// Class is the name of the Python exception, such as UndefinedError, or Unsupported, ResourceLimit, Stopped,
	// InternalError.
	Class string
	// Message is its text; it equals Python's where clients see it
	// (raise_exception, undefined names) and has the same meaning elsewhere.
	Message string
	// Line and Column (in characters, from 1) are where the template is wrong for errors of Compile, else 0.
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

// raisef is Python's raise: it unwinds to the next rescue, which every public
// function of the package that evaluates anything has. Templates raise from
// deep inside of expressions; returning the error through each of them would
// double the engine.
func raisef(class, format string, args ...any) {
	panic(newErrorf(class, format, args...))
}

// unsupportedf raises Unsupported for what is only known while the template runs.
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

// rescue turns what raisef threw into an error value. Runtime panics become
// errors too: a template must never crash the process.
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
