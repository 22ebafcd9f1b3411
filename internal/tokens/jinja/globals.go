package jinja

import "unsafe"

// maxRange is the sandbox's MAX_RANGE.
const maxRange = 100000

// globals are the names that a template has in addition to its context. pythonGlobals are those
// from Jinja2; the others are from transformers.
var (
	globals       map[string]Value
	pythonGlobals = setOf("range", "dict", "namespace")
)

func init() { //nolint:gochecknoinits // the table and the functions need each other
	globals = map[string]Value{
		"range": function(globalRange),
		"dict":  function(func(m *machine, a *arguments) Value { return FromDict(m.dictOf(a)) }),
		"namespace": function(func(m *machine, a *arguments) Value {
			return Value{kind: kindNamespace, p: unsafe.Pointer(&namespaceObject{attrs: m.dictOf(a)})}
		}),
		"raise_exception": function(func(m *machine, a *arguments) Value {
			p := a.bind("raise_exception", 1, "message")
			text := m.text(p[0])
			m.charge(2 * len(text))
			raisef("TemplateError", "%s", text)
			return Value{}
		}),
		"strftime_now": function(func(m *machine, a *arguments) Value {
			p := a.bind("strftime_now", 1, "format")
			if p[0].kind != KindString {
				raisef("TypeError", "strftime() argument 1 must be str, not %s", typeName(p[0]))
			}
			format := p[0].str()
			m.chargeRepeat(int64(len(format)), 128)
			text, unknown := strftime(m.now, format)
			if unknown != "" {
				unsupportedf("%q of strftime_now", unknown)
			}
			return String(text)
		}),
	}
}

func globalRange(_ *machine, a *arguments) Value {
	a.positional("range", 1, 3)
	for _, v := range a.pos {
		if !v.isInteger() {
			raisef("TypeError", "'%s' object cannot be interpreted as an integer", typeName(v))
		}
	}
	start, stop, step := int64(0), index(a.pos[0]), int64(1)
	if len(a.pos) > 1 {
		start, stop = stop, index(a.pos[1])
	}
	if len(a.pos) > 2 {
		step = index(a.pos[2])
	}
	if step == 0 {
		raisef("ValueError", "range() arg 3 must not be zero")
	}
	v := Value{kind: kindRange, p: unsafe.Pointer(&rangeObject{start, stop, step})}
	if n := (*rangeObject)(v.p).length(); n > maxRange || n < 0 {
		raisef("OverflowError", "Range too big. The sandbox blocks ranges larger than MAX_RANGE (%d).", maxRange)
	}
	return v
}

// dictOf is Python's dict(...) with a dict and keywords.
func (m *machine) dictOf(a *arguments) *Dict {
	d := new(Dict)
	if len(a.pos) > 1 {
		raisef("TypeError", "dict expected at most 1 argument, got %d", len(a.pos))
	}
	if len(a.pos) == 1 {
		if m.iterate(a.pos[0]); a.pos[0].kind != KindDict { // iterate raises Python's error
			unsupportedf("a dict of a %s", typeName(a.pos[0]))
		}
		d = a.pos[0].dict()
		for _, e := range d.entries {
			m.charge(dictEntry)
			m.mustHash(e.key, 0)
		}
		d = d.Clone()
	}
	m.charge(len(a.names) * dictEntry)
	for i, name := range a.names {
		m.mustHash(String(name), d.Len())
		d.Set(name, a.kw[i])
	}
	return d
}
