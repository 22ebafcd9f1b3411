package jinja

import (
	"slices"
	"strings"
	"unsafe"
)

func noItem(text string) Value { return undefinedOf(&undefinedInfo{hint: text}) }

func filterFirst(m *machine, v Value, a *arguments) Value {
	a.bind("first", 0)
	it := m.iterate(v)
	if item, ok := it.step(); ok {
		return item
	}
	return noItem("No first item, sequence was empty.")
}

func filterLast(m *machine, v Value, a *arguments) Value {
	a.bind("last", 0)
	if v.kind == kindIterator {
		raisef("TypeError", "'%s' object is not reversible", typeName(v))
	}
	items := m.items(v)
	if len(items) == 0 {
		return noItem("No last item, sequence was empty.")
	}
	return items[len(items)-1]
}

func filterReverse(m *machine, v Value, a *arguments) Value {
	a.bind("reverse", 0)
	if v.kind == KindString {
		return m.slice(v, [3]Value{None(), None(), Int(-1)})
	}
	if !canIterate(v) {
		raisef("FilterArgumentError", "argument must be iterable")
	}
	items := m.items(v)
	return m.iteratorOf("list_reverseiterator", counted(len(items), func(i int) Value { return items[len(items)-1-i] }).next)
}

func filterList(m *machine, v Value, a *arguments) Value {
	a.bind("list", 0)
	items := m.items(v)
	m.charge(len(items) * valueSize)
	return List(slices.Clone(items))
}

func filterItems(m *machine, v Value, a *arguments) Value {
	a.bind("items", 0)
	if v.kind == KindUndefined {
		return m.iteratorOf("generator", counted(0, nil).next)
	}
	if v.kind != KindDict {
		raisef("TypeError", "Can only get item pairs from a mapping.")
	}
	return m.iteratorOf("generator", m.iterate(Value{kind: kindView, p: unsafe.Pointer(&dictView{v.dict(), viewItems})}).next)
}

func filterJoin(m *machine, v Value, a *arguments) Value {
	p := a.bind("join", 0, "d", "attribute")
	sep := ""
	if given(p[0]) {
		sep = m.text(p[0])
	}
	get := m.attrGetter(p[1], Value{kind: kindMissing})
	it := m.iterate(v)
	var b strings.Builder
	first := true
	for item, ok := it.step(); ok; item, ok = it.step() {
		text := m.text(get(item))
		m.charge(2 * (len(text) + len(sep)))
		if !first {
			b.WriteString(sep)
		}
		first = false
		b.WriteString(text)
	}
	return String(b.String())
}

// attrGetter is jinja2's make_attrgetter: a dotted path, whose digits are indices.
func (m *machine) attrGetter(attribute, def Value) func(v Value) Value {
	var parts []Value
	switch {
	case !given(attribute) || attribute.kind == KindNone:
	case attribute.kind == KindString:
		m.charge(2 * attribute.textSize())
		m.chargeRepeat(int64(strings.Count(attribute.str(), "."))+1, 3*valueSize)
		for part := range strings.SplitSeq(attribute.str(), ".") {
			if n, ok := parseInt(part); ok && strings.IndexFunc(part, func(r rune) bool { return !isDigit(byte(r)) || r >= 0x80 }) < 0 {
				parts = append(parts, n)
			} else {
				parts = append(parts, String(part))
			}
		}
	default:
		parts = []Value{attribute}
	}
	return func(v Value) Value {
		for _, part := range parts {
			m.step()
			v = m.getitem(v, part)
			if v.kind == KindUndefined && given(def) && def.kind != KindNone {
				v = def
			}
		}
		return v
	}
}

func filterMap(m *machine, v Value, a *arguments) Value {
	// Python's generator checks its arguments when the first item is requested.
	m.charge((len(a.pos) + len(a.kw)) * 2 * valueSize)
	a = a.keep(0)
	var f func(Value) Value
	prepare := func() {
		if len(a.pos) == 0 && slices.Contains(a.names, "attribute") {
			p := a.bind("map", 0, "attribute", "default")
			f = m.attrGetter(p[0], p[1])
			return
		}
		if len(a.pos) == 0 {
			raisef("FilterArgumentError", "map requires a filter argument")
		}
		name := m.text(a.pos[0])
		filter, ok := filters[name]
		if !ok {
			raisef("TemplateRuntimeError", "No filter named %s.", reprText(name))
		}
		rest := a.keep(1)
		f = func(item Value) Value {
			m.operands(item, rest)
			return filter(m, item, rest)
		}
	}
	return m.lazy(v, prepare, func(item Value) (Value, bool) { return f(item), true })
}

func selector(want, byAttr bool) filterFunc {
	return func(m *machine, v Value, a *arguments) Value {
		m.charge((len(a.pos) + len(a.kw)) * 2 * valueSize)
		a = a.keep(0)
		var pick func(Value) bool
		prepare := func() {
			get, from := func(v Value) Value { return v }, 0
			if byAttr {
				if len(a.pos) == 0 {
					raisef("FilterArgumentError", "Missing parameter for attribute name")
				}
				get, from = m.attrGetter(a.pos[0], Value{kind: kindMissing}), 1
			}
			if len(a.pos) <= from {
				pick = func(item Value) bool { return get(item).Truth() == want }
				return
			}
			testName := m.text(a.pos[from])
			test, ok := tests[testName]
			if !ok {
				raisef("TemplateRuntimeError", "No test named %s.", reprText(testName))
			}
			rest := a.keep(from + 1)
			pick = func(item Value) bool {
				item = get(item)
				m.operands(item, rest)
				return test(m, item, rest) == want
			}
		}
		return m.lazy(v, prepare, func(item Value) (Value, bool) { return item, pick(item) })
	}
}

// lazy returns a generator over v; prepare runs before the first item.
func (m *machine) lazy(v Value, prepare func(), f func(item Value) (Value, bool)) Value {
	var it iteration
	started := false
	return m.iteratorOf("generator", func() (Value, bool) {
		if !started {
			started = true
			if !v.Truth() && v.kind != kindIterator {
				return Value{}, false
			}
			prepare()
			it = m.iterate(v)
		}
		for {
			item, ok := it.step()
			if !ok {
				return Value{}, false
			}
			m.step()
			if out, ok := f(item); ok {
				return out, true
			}
		}
	})
}

// sortKey returns the value to compare by: text is lower-cased unless caseSensitive.
func (m *machine) sortKey(v Value, caseSensitive bool) Value {
	if v.kind == KindString && !caseSensitive {
		m.chargeCase(v.str())
		return String(lower(v.str()))
	}
	return v
}

// sorted is Python's sorted(items, key=..., reverse=...), which is stable in both directions.
func (m *machine) sorted(items, keys []Value, reverse bool) []Value {
	m.charge(len(items) * 2 * valueSize)
	at := make([]int, len(items))
	for i := range at {
		at[i] = i
	}
	slices.SortStableFunc(at, func(i, j int) int {
		m.step()
		if reverse {
			return m.order(keys[j], keys[i])
		}
		return m.order(keys[i], keys[j])
	})
	out := make([]Value, len(items))
	for i, j := range at {
		out[i] = items[j]
	}
	return out
}

func filterSort(m *machine, v Value, a *arguments) Value {
	p := a.bind("sort", 0, "reverse", "case_sensitive", "attribute")
	if given(p[2]) && p[2].kind == KindString && strings.Contains(p[2].str(), ",") {
		unsupportedf("sorting by more than one attribute")
	}
	get := m.attrGetter(p[2], Value{kind: kindMissing})
	items := m.items(v)
	m.chargeRepeat(int64(len(items)), 4*valueSize)
	keys := make([]Value, len(items))
	for i, item := range items {
		keys[i] = List([]Value{m.sortKey(get(item), isTrue(p[1]))}) // as in Jinja2: Undefineds in lists are equal
	}
	return List(m.sorted(items, keys, isTrue(p[0])))
}

func filterDictsort(m *machine, v Value, a *arguments) Value {
	a.bind("dictsort", 0)
	if v.kind != KindDict {
		mustDefined(v)
		raisef("AttributeError", "'%s' object has no attribute 'items'", typeName(v))
	}
	entries := v.dict().entries
	m.charge(len(entries) * 6 * valueSize)
	items, keys := make([]Value, len(entries)), make([]Value, len(entries))
	for i, e := range entries {
		items[i] = Tuple([]Value{e.key, e.value})
		keys[i] = m.sortKey(e.key, false)
	}
	return List(m.sorted(items, keys, false))
}

// extreme returns the filter that picks the first item that compares by op with all others.
func extreme(name, op string) filterFunc {
	beats := comparisonOps[op]
	return func(m *machine, v Value, a *arguments) Value {
		p := a.bind(name, 0, "case_sensitive", "attribute")
		get := m.attrGetter(p[1], Value{kind: kindMissing})
		items := m.items(v)
		if len(items) == 0 {
			return noItem("No aggregated item, sequence was empty.")
		}
		best, key := items[0], m.sortKey(get(items[0]), isTrue(p[0]))
		for _, item := range items[1:] {
			m.step()
			k := m.sortKey(get(item), isTrue(p[0]))
			if beats(m, k, key) {
				best, key = item, k
			}
		}
		return best
	}
}

func filterUnique(m *machine, v Value, a *arguments) Value {
	p := a.bind("unique", 0, "case_sensitive", "attribute")
	get := m.attrGetter(p[1], Value{kind: kindMissing})
	seen := new(Dict)
	it := m.iterate(v)
	return m.iteratorOf("generator", func() (Value, bool) {
		for {
			item, ok := it.step()
			if !ok {
				return Value{}, false
			}
			m.charge(dictEntry)
			key := m.sortKey(get(item), isTrue(p[0]))
			if m.find(seen, key) < 0 {
				seen.add(key, None())
				return item, true
			}
		}
	})
}
