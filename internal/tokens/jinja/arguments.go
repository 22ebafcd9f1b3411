package jinja

import "slices"

// bind assigns arguments to named parameters, as Python does. A missing one is kindMissing.
func (a *arguments) bind(fn string, required int, params ...string) []Value {
	if len(a.names) == 0 && len(a.pos) == len(params) {
		return a.pos
	}
	out := make([]Value, len(params), 8)
	for i := range out {
		out[i] = Value{kind: kindMissing}
	}
	if len(a.pos) > len(params) {
		raisef("TypeError", "%s() takes at most %d arguments (%d given)", fn, len(params), len(a.pos))
	}
	copy(out, a.pos)
	for i, name := range a.names {
		at := slices.Index(params, name)
		if at < 0 {
			raisef("TypeError", "%s() got an unexpected keyword argument %s", fn, reprText(name))
		}
		if out[at].kind != kindMissing {
			raisef("TypeError", "%s() got multiple values for argument %s", fn, reprText(name))
		}
		out[at] = a.kw[i]
	}
	for i := range required {
		if out[i].kind == kindMissing {
			raisef("TypeError", "%s() missing required argument %s", fn, reprText(params[i]))
		}
	}
	return out
}

func (a *arguments) noKeywords(fn string) {
	if len(a.kw) > 0 {
		raisef("TypeError", "%s() takes no keyword arguments", fn)
	}
}

// positional checks the number of arguments of a method without keyword parameters.
func (a *arguments) positional(fn string, least, most int) {
	a.noKeywords(fn)
	if len(a.pos) < least || len(a.pos) > most {
		raisef("TypeError", "%s() takes from %d to %d arguments (%d given)", fn, least, most, len(a.pos))
	}
}

// keep copies arguments that outlive the call.
func (a *arguments) keep(from int) *arguments {
	return &arguments{pos: slices.Clone(a.pos[from:]), names: a.names, kw: slices.Clone(a.kw)}
}

func given(v Value) bool { return v.kind != kindMissing }

func isTrue(v Value) bool { return given(v) && v.Truth() }

func needText(fn string, v Value) string {
	if v.kind != KindString {
		raisef("TypeError", "%s() argument must be str, not %s", fn, typeName(v))
	}
	return v.str()
}

// index is Python's operator.index, limited to ints in the range of int64.
func index(v Value) int64 {
	n, ok := v.small()
	if !ok {
		if v.kind == KindInt {
			raisef("OverflowError", "Python int too large to convert to C ssize_t")
		}
		raisef("TypeError", "'%s' object cannot be interpreted as an integer", typeName(v))
	}
	return n
}
