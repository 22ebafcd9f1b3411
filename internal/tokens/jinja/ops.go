package jinja

import (
	"cmp"
	"math"
	"math/big"
	"strings"
)

// maxNesting bounds recursion into nested values, like Python's recursion limit.
const maxNesting = 900

// undefinedInfo records the origin of an Undefined, for the error text.
type undefinedInfo struct {
	hint   string // the whole text if not empty
	name   string // the name or the key, as text
	obj    Value  // the object that lacks the attribute, kindMissing for a plain name
	byItem bool   // the key was not a str
	unsafe bool   // the sandbox refuses this attribute
}

func (u *undefinedInfo) raise() {
	switch {
	case u == nil:
		raisef("UndefinedError", "value is undefined")
	case u.unsafe:
		raisef("SecurityError", "%s", u.hint)
	case u.hint != "":
		raisef("UndefinedError", "%s", u.hint)
	case u.obj.kind == kindMissing:
		raisef("UndefinedError", "%s is undefined", reprText(u.name))
	case u.byItem:
		raisef("UndefinedError", "%s has no element %s", objectTypeRepr(u.obj), u.name)
	default:
		raisef("UndefinedError", "%s has no attribute %s", reprText(objectTypeRepr(u.obj)), reprText(u.name))
	}
}

func objectTypeRepr(v Value) string {
	switch v.kind {
	case KindNone:
		return "None"
	case KindString:
		if v.safe {
			return "markupsafe.Markup object"
		}
		return "str object"
	case KindUndefined, kindNamespace, kindLoop, kindCallable:
		return typeModule(v) + typeName(v) + " object"
	default:
		return typeName(v) + " object"
	}
}

func typeModule(v Value) string {
	switch {
	case v.kind == kindCallable && !(*callable)(v.p).isMacro:
		return ""
	case v.kind == kindNamespace:
		return "jinja2.utils."
	}
	return "jinja2.runtime."
}

// typeName is Python's type(v).__name__.
func typeName(v Value) string {
	switch v.kind {
	case KindString:
		if v.safe {
			return "Markup"
		}
	case kindView:
		return [...]string{"dict_keys", "dict_values", "dict_items"}[(*dictView)(v.p).of]
	case kindIterator:
		return (*iterator)(v.p).typeName
	case kindCallable:
		if (*callable)(v.p).isMacro {
			return "Macro"
		}
		if (*callable)(v.p).builtin {
			return "builtin_function_or_method"
		}
	}
	return typeNames[v.kind]
}

var typeNames = [...]string{
	KindUndefined: "Undefined", KindNone: "NoneType", KindBool: "bool", KindInt: "int", KindFloat: "float", KindString: "str",
	KindList: "list", KindTuple: "tuple", KindDict: "dict", kindRange: "range", kindNamespace: "Namespace", kindLoop: "LoopContext",
	kindCallable: "function", kindMissing: "object",
}

// mustDefined raises if v is Undefined, as Python's Undefined does in __getattr__, arithmetic, ordering and calls.
func mustDefined(v Value) {
	if v.kind == KindUndefined {
		(*undefinedInfo)(v.p).raise()
	}
}

// equal is Python's a == b.
func (m *machine) equal(a, b Value) bool { return m.equalAt(a, b, 0) }

func (m *machine) equalAt(a, b Value, depth int) bool {
	m.step()
	if depth > maxNesting {
		raisef("RecursionError", "maximum recursion depth exceeded in comparison")
	}
	switch {
	case a.kind == KindString:
		if b.kind == KindString && a.n == b.n {
			m.work(int(a.n))
			return a.str() == b.str()
		}
		return false
	case a.isNumber() && b.isNumber():
		m.chargeInt(a)
		m.chargeInt(b)
		c, ok := compareNumbers(a, b)
		return ok && c == 0
	case a.kind != b.kind:
		return false
	}
	switch a.kind {
	case KindNone, KindUndefined:
		return true
	case KindList, KindTuple:
		return a.p == b.p || m.equalItems(a.seq(), b.seq(), depth)
	case KindDict:
		return a.p == b.p || m.equalDicts(a.dict(), b.dict(), depth)
	case kindRange, kindView:
		unsupportedf("comparison of a %s", typeName(a))
		return false
	default:
		return a.p == b.p
	}
}

// same is the comparison of Python's containers: identity, then equality.
func (m *machine) same(a, b Value, depth int) bool {
	m.step()
	if a.kind == b.kind && a.p == b.p && a.n == b.n {
		return true
	}
	return m.equalAt(a, b, depth)
}

func (m *machine) equalItems(a, b []Value, depth int) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if !m.same(a[i], b[i], depth+1) {
			return false
		}
	}
	return true
}

func (m *machine) equalDicts(a, b *Dict, depth int) bool {
	if a.Len() != b.Len() {
		return false
	}
	for i := range a.entries {
		j := m.find(b, a.entries[i].key)
		if j < 0 || !m.same(a.entries[i].value, b.entries[j].value, depth+1) {
			return false
		}
	}
	return true
}

// compareNumbers compares exactly, as Python does; ok is false if one is NaN.
func compareNumbers(a, b Value) (c int, ok bool) {
	if a.kind != KindFloat && b.kind != KindFloat {
		x, xs := a.small()
		y, ys := b.small()
		if xs && ys {
			return cmp.Compare(x, y), true
		}
		return a.big().Cmp(b.big()), true
	}
	if a.kind == KindFloat && b.kind == KindFloat {
		x, y := a.float(), b.float()
		return cmp.Compare(x, y), !math.IsNaN(x) && !math.IsNaN(y)
	}
	if a.kind == KindFloat {
		c, ok = compareNumbers(b, a)
		return -c, ok
	}
	f := b.float()
	if math.IsNaN(f) {
		return 0, false
	}
	if math.IsInf(f, 0) {
		return -int(math.Copysign(1, f)), true
	}
	return new(big.Float).SetInt(a.big()).Cmp(big.NewFloat(f)), true
}

// less is Python's a < b.
func (m *machine) less(a, b Value) bool {
	c, ok := m.compare(a, b, "<", 0)
	return ok && c < 0
}

// order is the comparison of Python's sorted, which uses only a < b.
func (m *machine) order(a, b Value) int {
	if m.less(a, b) {
		return -1
	}
	if m.less(b, a) {
		return 1
	}
	return 0
}

// compare orders a and b; ok is false for numbers that have no order (NaN).
func (m *machine) compare(a, b Value, op string, depth int) (c int, ok bool) {
	m.step()
	if depth > maxNesting {
		raisef("RecursionError", "maximum recursion depth exceeded in comparison")
	}
	switch {
	case a.isNumber() && b.isNumber():
		m.chargeInt(a)
		m.chargeInt(b)
		return compareNumbers(a, b)
	case a.kind == KindString && b.kind == KindString:
		m.work(int(min(a.n, b.n)))
		return strings.Compare(a.str(), b.str()), true
	case a.kind == b.kind && a.isSequence():
		x, y := a.seq(), b.seq()
		for i := 0; i < len(x) && i < len(y); i++ {
			if !m.same(x[i], y[i], depth+1) {
				return m.compare(x[i], y[i], op, depth+1)
			}
		}
		return len(x) - len(y), true
	}
	mustDefined(a)
	mustDefined(b)
	raisef("TypeError", "'%s' not supported between instances of '%s' and '%s'", op, typeName(a), typeName(b))
	return 0, false
}

// find looks up a key, and charges its hashes, copies and comparisons, and those for storing it.
func (m *machine) find(d *Dict, key Value) int {
	m.mustHash(key, d.Len())
	return d.find(key)
}

// member is find for a name.
func (m *machine) member(d *Dict, name string) (Value, bool) {
	m.mustHash(String(name), d.Len())
	return d.Get(name)
}

// mustHash raises unless v can be a key of a dict of that many entries, and charges for a look.
func (m *machine) mustHash(v Value, entries int) {
	switch v.kind {
	case KindString:
		if strings.HasPrefix(v.str(), hashMark) {
			m.charge(4 * int(v.n))
		}
		m.work(int(v.n) * min(entries+2, linearLimit)) // other keys may differ in the last byte only
	case KindFloat:
		m.charge(512) // as an int of 300 digits
	case KindUndefined, KindNone, KindBool, KindInt:
		m.charge(32)
		m.chargeInt(v)
	case KindList, KindDict:
		raisef("TypeError", "unhashable type: '%s'", typeName(v))
	default:
		unsupportedf("a %s as a key", typeName(v))
	}
}
