package jinja

import (
	"unicode/utf8"
	"unsafe"
)

// Methods that the immutable sandbox hides.
var (
	listMutators = setOf("append", "clear", "pop", "reverse", "insert", "sort", "extend", "remove")
	dictMutators = setOf("clear", "pop", "popitem", "setdefault", "update")
)

func setOf(names ...string) map[string]bool {
	set := make(map[string]bool, len(names))
	for _, name := range names {
		set[name] = true
	}
	return set
}

func unsafeAttribute(v Value, name string) Value {
	return undefinedOf(&undefinedInfo{unsafe: true, hint: "access to attribute " + reprText(name) + " of " + reprText(typeName(v)) + " object is unsafe."})
}

func noAttribute(v Value, name string) Value { return undefinedOf(&undefinedInfo{name: name, obj: v}) }

// longestName is the most bytes of a method's or an attribute's name. Longer ones, which may have megabytes, are not looked up.
const longestName = 16

// attribute is Python's getattr(v, name) as the sandbox allows it; ok is false if the attribute does not exist.
func (m *machine) attribute(v Value, name string) (Value, bool) {
	if v.kind == kindNamespace {
		return m.member((*namespaceObject)(v.p).attrs, name)
	}
	if len(name) > longestName {
		return Value{}, false
	}
	var method filterFunc
	switch v.kind {
	case KindString:
		method = strMethods[name]
	case KindList:
		if listMutators[name] {
			return unsafeAttribute(v, name), true
		}
	case KindDict:
		if dictMutators[name] {
			return unsafeAttribute(v, name), true
		}
		method = dictMethods[name]
	case kindLoop:
		if get, ok := loopAttributes[name]; ok {
			return get((*loopObject)(v.p)), true
		}
	}
	if method != nil {
		m.charge(6 * valueSize)
		bound := &callable{builtin: true, call: func(m *machine, a *arguments) Value {
			m.operands(v, a)
			return method(m, v, a)
		}}
		return Value{kind: kindCallable, p: unsafe.Pointer(bound)}, true
	}
	if otherAttributes[v.kind][name] {
		unsupportedf("attribute %q of a %s", name, typeName(v))
	}
	return Value{}, false
}

// getattr is Jinja2's environment.getattr: the attribute, else the item of that name.
func (m *machine) getattr(v Value, name string) Value {
	mustDefined(v)
	if item, ok := m.attribute(v, name); ok {
		return item
	}
	if v.kind == KindDict {
		if item, ok := m.member(v.dict(), name); ok {
			return item
		}
	}
	return noAttribute(v, name)
}

// getitem is Jinja2's environment.getitem: the item, else the attribute of that name.
func (m *machine) getitem(v, key Value) Value {
	mustDefined(v)
	switch v.kind {
	case KindDict:
		if key.kind != KindList && key.kind != KindDict {
			if i := m.find(v.dict(), key); i >= 0 {
				return v.dict().entries[i].value
			}
		}
	case KindList, KindTuple:
		items := v.seq()
		if i, ok := itemIndex(key, len(items)); ok {
			return items[i]
		}
	case KindString:
		if key.isInteger() {
			s := v.str()
			m.work(len(s))
			n := utf8.RuneCountInString(s)
			if i, ok := itemIndex(key, n); ok {
				return like(v, m.sliceText(s, n, i, 1, 1))
			}
		}
	case kindRange:
		r := (*rangeObject)(v.p)
		if i, ok := itemIndex(key, int(r.length())); ok {
			return r.at(int64(i))
		}
	}
	if key.kind == KindString {
		if item, ok := m.attribute(v, key.str()); ok {
			return item
		}
		return noAttribute(v, key.str())
	}
	return undefinedOf(&undefinedInfo{name: string(m.appendRepr(nil, key, 0)), obj: v, byItem: true})
}

func itemIndex(key Value, n int) (int, bool) {
	i, ok := key.small()
	if !ok {
		return 0, false
	}
	if i < 0 {
		i += int64(n)
	}
	return int(i), i >= 0 && i < int64(n)
}

// slice is Python's v[a:b:c].
func (m *machine) slice(v Value, bounds [3]Value) Value {
	switch v.kind {
	case KindString:
		s := v.str()
		m.work(2 * len(s))
		n := utf8.RuneCountInString(s)
		start, count, step := sliceIndices(bounds, n)
		return like(v, m.sliceText(s, n, start, count, step))
	case KindList, KindTuple:
		items := v.seq()
		start, count, step := sliceIndices(bounds, len(items))
		m.charge((count + 1) * valueSize)
		out := make([]Value, count)
		for i := range out {
			out[i] = items[start+i*step]
		}
		return sequenceLike(v, out)
	case kindRange:
		unsupportedf("a slice of a range")
	case KindDict:
		raisef("TypeError", "unhashable type: 'slice'")
	}
	mustDefined(v)
	raisef("TypeError", "'%s' object is not subscriptable", typeName(v))
	return Value{}
}

func (m *machine) sliceText(s string, n, start, count, step int) string {
	if count == 0 {
		return ""
	}
	if step == 1 {
		from := byteOffset(s, n, start)
		to := from + byteOffset(s[from:], n-start, count)
		return s[from:to]
	}
	m.charge(12 * n)
	runes := []rune(s)
	out := make([]rune, count)
	for i := range out {
		out[i] = runes[start+i*step]
	}
	return string(out)
}

// byteOffset returns the offset of the i-th of the n characters of s.
func byteOffset(s string, n, i int) int {
	if n == len(s) {
		return i
	}
	pos := 0
	for ; i > 0; i-- {
		_, size := utf8.DecodeRuneInString(s[pos:])
		pos += size
	}
	return pos
}

// sliceIndices is Python's slice.indices, with the number of selected items.
func sliceIndices(bounds [3]Value, n int) (start, count, step int) {
	step = 1
	if bounds[2].kind != KindNone {
		step = sliceBound(bounds[2])
		if step == 0 {
			raisef("ValueError", "slice step cannot be zero")
		}
	}
	low, high := 0, n
	if step < 0 {
		low, high = -1, n-1
	}
	clamp := func(v Value, def int) int {
		if v.kind == KindNone {
			return def
		}
		i := sliceBound(v)
		if i < 0 {
			i += n
		}
		return min(max(i, low), high)
	}
	var stop int
	if step > 0 {
		start, stop = clamp(bounds[0], low), clamp(bounds[1], high)
		if start < stop {
			count = (stop-start-1)/step + 1
		}
		return start, count, step
	}
	start, stop = clamp(bounds[0], high), clamp(bounds[1], low)
	if start > stop {
		count = (start-stop-1)/-step + 1
	}
	return start, count, step
}

// sliceBound clamps an int, so that sums of bounds cannot overflow.
func sliceBound(v Value) int {
	if !v.isInteger() {
		raisef("TypeError", "slice indices must be integers or None or have an __index__ method")
	}
	const limit = 1 << 40
	n, ok := v.small()
	if !ok {
		return v.big().Sign() * limit
	}
	return int(min(max(n, -limit), limit))
}
