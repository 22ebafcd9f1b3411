package jinja

import (
	"math"
	"math/big"
	"strconv"
	"strings"
	"unsafe"
)

// filterFunc implements a filter or a method of a built-in type; v is the value before the bar or the dot.
type filterFunc func(m *machine, v Value, a *arguments) Value

var filters map[string]filterFunc

func init() { //nolint:gochecknoinits // filters refer to the table by name
	filters = map[string]filterFunc{
		"capitalize": textFilter("capitalize", capitalize), "lower": textFilter("lower", lower),
		"upper": textFilter("upper", upper), "title": textFilter("title", titleWords),
		"count": filterLength, "length": filterLength, "d": filterDefault, "default": filterDefault,
		"dictsort": filterDictsort, "first": filterFirst, "last": filterLast,
		"indent": filterIndent, "int": filterInt, "join": filterJoin, "list": filterList, "items": filterItems, "map": filterMap,
		"max": extreme("max", ">"), "min": extreme("min", "<"),
		"select": selector(true, false), "reject": selector(false, false),
		"selectattr": selector(true, true), "rejectattr": selector(false, true),
		"replace": filterReplace, "reverse": filterReverse, "safe": filterSafe, "sort": filterSort,
		"string": filterString, "tojson": filterToJSON, "trim": filterTrim, "unique": filterUnique,
	}
}

func textFilter(name string, f func(string) string) filterFunc {
	return func(m *machine, v Value, a *arguments) Value {
		a.bind(name, 0)
		s := m.text(v)
		m.work(16 * len(s))
		m.chargeCase(s)
		if name == "title" { // one piece per word
			m.chargeRepeat(int64(len(s)), 6)
		}
		out := String(f(s))
		out.safe = v.safe && v.kind == KindString
		return out
	}
}

func filterLength(m *machine, v Value, a *arguments) Value {
	a.noKeywords("len")
	return Int(m.length(v))
}

func filterDefault(_ *machine, v Value, a *arguments) Value {
	p := a.bind("default", 0, "default_value", "boolean")
	if v.kind == KindUndefined || isTrue(p[1]) && !v.Truth() {
		if !given(p[0]) {
			return String("")
		}
		return p[0]
	}
	return v
}

func filterSafe(m *machine, v Value, a *arguments) Value {
	a.bind("safe", 0)
	return markup(m.text(v))
}

func filterString(m *machine, v Value, a *arguments) Value {
	a.bind("string", 0)
	if v.kind == KindString {
		return v
	}
	return String(m.text(v))
}

func filterReplace(m *machine, v Value, a *arguments) Value {
	p := a.bind("replace", 2, "old", "new", "count")
	count := int64(-1)
	if given(p[2]) && p[2].kind != KindNone {
		count = index(p[2])
	}
	return String(m.replace(m.text(v), m.text(p[0]), m.text(p[1]), count))
}

func filterIndent(m *machine, v Value, a *arguments) Value {
	p := a.bind("indent", 0, "width", "first", "blank")
	switch v.kind {
	case KindString:
	case KindList:
		raisef("AttributeError", "'list' object has no attribute 'splitlines'")
	default:
		badOperands("+=", v, String("\n"))
	}
	s := v.str()
	indent := "    "
	if given(p[0]) {
		indent = m.indentation(p[0])
	}
	m.chargeLines(s, 2*len(indent)+24)
	m.charge(5 * len(s))
	lines := splitLines(s+"\n", false)
	var b strings.Builder
	for i, line := range lines {
		if i > 0 {
			b.WriteByte('\n')
			if isTrue(p[2]) || line != "" {
				b.WriteString(indent)
			}
		}
		b.WriteString(line)
	}
	out := b.String()
	if isTrue(p[1]) {
		m.charge(len(indent) + len(out))
		out = indent + out
	}
	return like(v, out)
}

// indentation returns a text, or as many spaces as a number says.
func (m *machine) indentation(v Value) string {
	if v.kind == KindString {
		return v.str()
	}
	n := max(index(v), 0)
	m.chargeRepeat(n, 1)
	return strings.Repeat(" ", int(n))
}

func filterTrim(m *machine, v Value, a *arguments) Value {
	p := a.bind("trim", 0, "chars")
	text := v
	if v.kind != KindString {
		text = String(m.text(v))
	}
	if !given(p[0]) || p[0].kind == KindNone {
		return like(text, strip(text.str(), true, true))
	}
	return like(text, m.trimChars(text.str(), needText("strip", p[0]), true, true))
}

// filterInt converts to a decimal int; its parameter base is outside the subset.
func filterInt(m *machine, v Value, a *arguments) Value {
	p := a.bind("int", 0, "default")
	m.charge(2 * v.textSize())
	def := p[0]
	if !given(def) {
		def = Int(0)
	}
	f := math.NaN()
	switch v.kind {
	case KindInt, KindBool:
		return unary("+", v)
	case KindFloat:
		f = v.float()
	case KindString:
		m.steps -= min(len(v.str()), maxIntDigits) >> 3
		if n, ok := parseInt(v.str()); ok {
			return n
		}
		if x, ok := parseFloat(v.str()); ok {
			f = x
		}
	}
	mustDefined(v)
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return def
	}
	n, _ := floatToInt(math.Trunc(f))
	return fromBig(n)
}

// numeral returns s without white space around it and without the underscores between digits; ok is false if there are others.
func numeral(s string) (bare string, ok bool) {
	s = strip(s, true, true)
	for i := range len(s) {
		if s[i] == '_' && (i == 0 || i == len(s)-1 || !isDigit(s[i-1]) || !isDigit(s[i+1])) {
			return "", false
		}
	}
	return strings.ReplaceAll(s, "_", ""), true
}

// parseInt is Python's int(s) for ASCII digits.
func parseInt(s string) (Value, bool) {
	s, ok := numeral(s)
	if !ok || len(strings.TrimLeft(s, "+-")) > maxIntDigits {
		return Value{}, false
	}
	n, ok := new(big.Int).SetString(s, 10)
	if !ok {
		return Value{}, false
	}
	return fromBig(n), true
}

// parseFloat is Python's float(text).
func parseFloat(s string) (float64, bool) {
	s, ok := numeral(s)
	if !ok || strings.ContainsAny(s, "xXpP") {
		return 0, false
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil && !math.IsInf(f, 0) {
		return 0, false
	}
	return f, true
}

func filterToJSON(m *machine, v Value, a *arguments) Value {
	p := a.bind("tojson", 0, "ensure_ascii", "indent", "separators", "sort_keys")
	o := JSONOptions{EnsureASCII: isTrue(p[0]), SortKeys: isTrue(p[3])}
	if given(p[1]) && p[1].kind != KindNone {
		o.Indented = true
		o.Indent = m.indentation(p[1])
	}
	if given(p[2]) && p[2].kind != KindNone {
		parts := m.unpack(p[2], 2)
		o.Separators = true
		o.ItemSeparator, o.KeySeparator = needText("separators", parts[0]), needText("separators", parts[1])
	}
	w := newJSONWriter(o)
	w.m, w.limit = m, m.memory/2
	out := w.value(nil, v, 0)
	m.charge(2 * len(out))
	return String(unsafe.String(unsafe.SliceData(out), len(out)))
}
