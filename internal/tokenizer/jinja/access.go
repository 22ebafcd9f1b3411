package jinja

import (
	"strings"
	"unicode/utf8"
	"unsafe"
)

// methodFunc is a method of a built-in type.
type methodFunc func(m *machine, v Value, a *arguments) Value

func isDunder(name string) bool {
	return strings.HasPrefix(name, "__") && strings.HasSuffix(name, "__") && dunders[name]
}

// dunders are the attributes that every Python object has.
var dunders = setOf("__class__", "__delattr__", "__dir__", "__doc__", "__eq__", "__format__", "__ge__",
	"__getattribute__", "__getstate__", "__gt__", "__hash__", "__init__", "__init_subclass__", "__le__", "__lt__", "__ne__",
	"__new__", "__reduce__", "__reduce_ex__", "__repr__", "__setattr__", "__sizeof__", "__str__", "__subclasshook__")

func setOf(names ...string) map[string]bool {
	set := make(map[string]bool, len(names))
	for _, name := range names {
		set[name] = true
	}
	return set
}

// The methods that the immutable sandbox hides.
var (
	listMutators = setOf("append", "clear", "pop", "reverse", "insert", "sort", "extend", "remove")
	dictMutators = setOf("clear", "pop", "popitem", "setdefault", "update")
)

func unsafeAttribute(v Value, name string) Value {
	return undefinedOf(&undefinedInfo{unsafe: true, hint: "access to attribute " + reprText(name) + " of " + reprText(typeName(v)) + " object is unsafe."})
}

func noAttribute(v Value, name string) Value {
	return undefinedOf(&undefinedInfo{name: name, obj: v})
}

// attribute is Python's getattr(v, name) as the sandbox allows it; ok is false
// if there is no such attribute.
func (m *machine) attribute(v Value, name string) (Value, bool) {
	if isDunder(name) {
		return unsafeAttribute(v, name), true
	}
	var methods map[string]methodFunc
	switch v.kind {
	case KindString:
		methods = strMethods
	case KindList:
		if listMutators[name] {
			return unsafeAttribute(v, name), true
		}
		methods = listMethods
	case KindTuple:
		if v.safe && (name == "grouper" || name == "list") {
			return v.seq()[map[string]int{"grouper": 0, "list": 1}[name]], true
		}
		methods = tupleMethods
	case KindDict:
		if dictMutators[name] {
			return unsafeAttribute(v, name), true
		}
		methods = dictMethods
	case KindInt, KindBool, KindFloat:
		methods = numberMethods
		switch name {
		case "real":
			return plus(v), true
		case "imag":
			if v.kind == KindFloat {
				return Float(0), true
			}
			return Int(0), true
		case "numerator":
			return plus(v), v.kind != KindFloat
		case "denominator":
			return Int(1), v.kind != KindFloat
		case "is_integer":
			if v.kind != KindFloat {
				return Value{}, false
			}
		case "bit_length", "bit_count":
			if v.kind == KindFloat {
				return Value{}, false
			}
		}
	case kindRange:
		r := (*rangeObject)(v.p)
		switch name {
		case "start":
			return Int(r.start), true
		case "stop":
			return Int(r.stop), true
		case "step":
			return Int(r.step), true
		}
		methods = tupleMethods
	case kindLoop:
		if get, ok := loopAttributes[name]; ok {
			return get((*loopObject)(v.p)), true
		}
	case kindNamespace:
		return (*namespaceObject)(v.p).attrs.Get(name)
	case kindCallable:
		if fn := (*callable)(v.p); fn.isMacro {
			return macroAttribute(fn, name)
		}
	case kindCycler:
		return cyclerAttribute((*cyclerObject)(v.p), name)
	case kindSelf:
		return m.selfBlock(name)
	}
	if method := methods[name]; method != nil {
		m.charge(6 * valueSize)
		bound := &callable{name: name, builtin: true, call: func(m *machine, a *arguments) Value {
			m.operands(v, a)
			return method(m, v, a)
		}}
		return Value{kind: kindCallable, p: unsafe.Pointer(bound)}, true
	}
	return Value{}, false
}

func macroAttribute(fn *callable, name string) (Value, bool) {
	code := fn.macro.code
	switch name {
	case "name":
		if code.name == "" {
			return None(), true
		}
		return String(code.name), true
	case "arguments":
		var names []Value
		for _, p := range code.params {
			names = append(names, String(p))
		}
		return Tuple(names), true
	case "catch_kwargs":
		return Bool(code.kwargs >= 0), true
	case "catch_varargs":
		return Bool(code.varargs >= 0), true
	case "caller":
		return Bool(code.caller >= 0 || code.explicitCaller), true
	}
	return Value{}, false
}

func cyclerAttribute(c *cyclerObject, name string) (Value, bool) {
	switch name {
	case "current":
		return c.items[c.pos], true
	case "pos":
		return Int(int64(c.pos)), true
	case "next":
		return function(name, func(*machine, *arguments) Value {
			v := c.items[c.pos]
			c.pos = (c.pos + 1) % len(c.items)
			return v
		}), true
	case "reset":
		return function(name, func(*machine, *arguments) Value {
			c.pos = 0
			return None()
		}), true
	}
	return Value{}, false
}

func (m *machine) selfBlock(name string) (Value, bool) {
	b := m.t.blocks[name]
	if b == nil {
		return Value{}, false
	}
	return function(name, func(m *machine, _ *arguments) Value {
		m.enterCall()
		text, _ := m.capture(m.newFrame(b.fn, nil), b.body)
		m.leaveCall()
		return text
	}), true
}

// getattr is environment.getattr: the attribute, else the item of that name.
func (m *machine) getattr(v Value, name string) Value {
	if v.kind == KindUndefined && isDunder(name) {
		return unsafeAttribute(v, name)
	}
	mustDefined(v)
	if item, ok := m.attribute(v, name); ok {
		return item
	}
	if v.kind == KindDict {
		if item, ok := v.dict().Get(name); ok {
			return item
		}
	}
	return noAttribute(v, name)
}

// getitem is environment.getitem: the item, else the attribute of that name.
func (m *machine) getitem(v, key Value) Value {
	mustDefined(v)
	switch v.kind {
	case KindDict:
		if key.kind != KindList && key.kind != KindDict {
			m.mustHashOrMiss(key)
			if i := v.dict().find(key); i >= 0 {
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
			if i, ok := itemIndex(key, utf8.RuneCountInString(s)); ok {
				s = runeAt(s, i)
				c := String(s)
				c.safe = v.safe
				return c
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

// mustHashOrMiss lets a tuple with a list in it be a key that is not found.
func (m *machine) mustHashOrMiss(key Value) {
	defer func() {
		if e, ok := recover().(*Error); ok && e.Class != "TypeError" {
			panic(e)
		}
	}()
	m.mustHash(key)
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

func runeAt(s string, i int) string {
	for ; i > 0; i-- {
		_, size := utf8.DecodeRuneInString(s)
		s = s[size:]
	}
	_, size := utf8.DecodeRuneInString(s)
	return s[:size]
}

// slice is Python's v[a:b:c].
func (m *machine) slice(v Value, bounds [3]Value) Value {
	switch v.kind {
	case KindString:
		s := v.str()
		m.work(2 * len(s))
		n := utf8.RuneCountInString(s)
		start, count, step := sliceIndices(bounds, n)
		out := m.sliceText(s, n, start, count, step)
		out.safe = v.safe
		return out
	case KindList, KindTuple:
		items := v.seq()
		start, count, step := sliceIndices(bounds, len(items))
		m.charge((count + 1) * valueSize)
		out := make([]Value, count)
		for i := range out {
			out[i] = items[start+i*step]
		}
		if v.kind == KindList {
			return List(out)
		}
		return Tuple(out)
	case kindRange:
		r := (*rangeObject)(v.p)
		start, count, step := sliceIndices(bounds, int(r.length()))
		from := r.start + int64(start)*r.step
		by := r.step * int64(step)
		return rangeValue(from, from+by*int64(count), by)
	case KindDict:
		raisef("TypeError", "unhashable type: 'slice'")
	}
	mustDefined(v)
	raisef("TypeError", "'%s' object is not subscriptable", typeName(v))
	return Value{}
}

func (m *machine) sliceText(s string, n, start, count, step int) Value {
	if count == 0 {
		return String("")
	}
	if step == 1 {
		from := byteOffset(s, n, start)
		to := from + byteOffset(s[from:], n-start, count)
		return String(s[from:to])
	}
	m.charge(12 * n)
	runes := []rune(s)
	out := make([]rune, count)
	for i := range out {
		out[i] = runes[start+i*step]
	}
	return String(string(out))
}

// byteOffset returns where the i-th of the n characters of s begins.
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

// sliceIndices is Python's slice.indices with the number of items it gives.
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

// sliceBound clamps an int, so that sums of it do not overflow.
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
