package jinja

import (
	"unsafe"
)

// maxRange is the sandbox's MAX_RANGE.
const maxRange = 100000

func rangeValue(start, stop, step int64) Value {
	return Value{kind: kindRange, p: unsafe.Pointer(&rangeObject{start, stop, step})}
}

// globals are the names that a template has beside its context; pythonGlobals
// are those of them that jinja2 brings, the rest is transformers'.
var (
	globals       map[string]Value
	pythonGlobals = setOf("range", "dict", "lipsum", "cycler", "joiner", "namespace")
)

func init() { //nolint:gochecknoinits // the table and the functions need each other
	globals = map[string]Value{
		"range":     function("range", globalRange),
		"dict":      function("dict", func(m *machine, a *arguments) Value { return FromDict(m.dictOf("dict", a)) }),
		"namespace": function("namespace", globalNamespace),
		"cycler": function("cycler", func(m *machine, a *arguments) Value {
			if len(a.pos) == 0 {
				raisef("RuntimeError", "at least one item has to be provided")
			}
			m.charge(len(a.pos) * valueSize)
			items := append([]Value(nil), a.pos...)
			return Value{kind: kindCycler, p: unsafe.Pointer(&cyclerObject{items: items})}
		}),
		"joiner": function("joiner", func(_ *machine, a *arguments) Value {
			p := a.bind("joiner", 0, "sep")
			if !given(p[0]) {
				p[0] = String(", ")
			}
			return Value{kind: kindJoiner, p: unsafe.Pointer(&joinerObject{sep: p[0]})}
		}),
		"lipsum": function("lipsum", func(*machine, *arguments) Value {
			raisef("ResourceLimit", "lipsum is random: no two renderings agree")
			return Value{}
		}),
		"raise_exception": function("raise_exception", func(m *machine, a *arguments) Value {
			p := a.bind("raise_exception", 1, "message")
			text := m.text(p[0])
			m.charge(2 * len(text))
			raisef("TemplateError", "%s", text)
			return Value{}
		}),
		"strftime_now": function("strftime_now", func(m *machine, a *arguments) Value {
			p := a.bind("strftime_now", 1, "format")
			if p[0].kind != KindString {
				raisef("TypeError", "strftime() argument 1 must be str, not %s", typeName(p[0]))
			}
			m.chargeRepeat(int64(len(p[0].str())), 128)
			return String(strftime(m.now, p[0].str()))
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
	v := rangeValue(start, stop, step)
	if n := (*rangeObject)(v.p).length(); n > maxRange || n < 0 {
		raisef("OverflowError", "Range too big. The sandbox blocks ranges larger than MAX_RANGE (%d).", maxRange)
	}
	return v
}

// dictOf is Python's dict(...).
func (m *machine) dictOf(fn string, a *arguments) *Dict {
	d := new(Dict)
	if len(a.pos) > 1 {
		raisef("TypeError", "%s expected at most 1 argument, got %d", fn, len(a.pos))
	}
	if len(a.pos) == 1 {
		if v := a.pos[0]; v.kind == KindDict {
			m.charge(v.dict().Len() * dictEntry)
			d = v.dict().Clone()
		} else {
			for i, pair := range m.items(v) {
				if !canIterate(pair) {
					raisef("TypeError", "cannot convert dictionary update sequence element #%d to a sequence", i)
				}
				items := m.items(pair)
				if len(items) != 2 {
					raisef("ValueError", "dictionary update sequence element #%d has length %d; 2 is required", i, len(items))
				}
				m.charge(dictEntry)
				m.mustHash(items[0])
				d.put(items[0], items[1])
			}
		}
	}
	m.charge(len(a.names) * dictEntry)
	for i, name := range a.names {
		d.Set(name, a.kw[i])
	}
	return d
}

func globalNamespace(m *machine, a *arguments) Value {
	return Value{kind: kindNamespace, p: unsafe.Pointer(&namespaceObject{attrs: m.dictOf("dict", a)})}
}
