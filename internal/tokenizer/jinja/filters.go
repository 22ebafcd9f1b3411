package jinja

import (
	"math"
	"math/big"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
	"unsafe"
)

// filterFunc is a filter: v is what stands before the bar.
type filterFunc func(m *machine, v Value, a *arguments) Value

var filters map[string]filterFunc

func init() { //nolint:gochecknoinits // filters refer to the table by name
	filters = map[string]filterFunc{
		"abs": filterAbs, "attr": filterAttr, "batch": filterBatch, "center": filterCenter,
		"capitalize": textFilter("capitalize", capitalize), "lower": textFilter("lower", lower),
		"upper": textFilter("upper", upper), "title": textFilter("title", filterTitle),
		"count": filterLength, "length": filterLength, "d": filterDefault, "default": filterDefault,
		"dictsort": filterDictsort, "e": filterEscape, "escape": filterEscape, "forceescape": filterForceescape,
		"filesizeformat": filterFilesize, "first": filterFirst, "last": filterLast, "float": filterFloat,
		"format": filterFormat, "groupby": filterGroupby, "indent": filterIndent, "int": filterInt,
		"join": filterJoin, "list": filterList, "items": filterItems, "map": filterMap,
		"max": extreme("max", 1), "min": extreme("min", -1),
		"select": selector(true, false), "reject": selector(false, false),
		"selectattr": selector(true, true), "rejectattr": selector(false, true),
		"replace": filterReplace, "reverse": filterReverse, "round": filterRound, "safe": filterSafe,
		"slice": filterSlice, "sort": filterSort, "string": filterString, "striptags": filterStriptags,
		"sum": filterSum, "tojson": filterToJSON, "trim": filterTrim, "truncate": filterTruncate,
		"unique": filterUnique, "urlencode": filterURLEncode, "wordcount": filterWordcount,
		"xmlattr": filterXMLAttr, "pprint": filterUnstable("pprint"), "random": filterUnstable("random"),
		"urlize": filterUnstable("urlize"), "wordwrap": filterUnstable("wordwrap"),
	}
}

// filterUnstable stands for filters whose text is random or needs more of
// Python's library than a chat template has a use for: an error, never a guess.
func filterUnstable(name string) filterFunc {
	return func(*machine, Value, *arguments) Value {
		raisef("Unsupported", "the filter %s is not supported", name)
		return Value{}
	}
}

func textFilter(name string, f func(string) string) filterFunc {
	return func(m *machine, v Value, a *arguments) Value {
		a.bind(name, 0)
		s := m.text(v)
		m.work(16 * len(s))
		m.chargeCase(s, 8)
		if name == "title" { // a piece for each word
			m.chargeRepeat(int64(len(s)), 6)
		}
		out := String(f(s))
		out.safe = v.safe && v.kind == KindString
		return out
	}
}

// filterTitle capitalizes after spaces, dashes and opening brackets only.
func filterTitle(s string) string {
	var b strings.Builder
	start := 0
	for i := 0; i <= len(s); {
		size := 1
		if i < len(s) {
			var r rune
			r, size = utf8.DecodeRuneInString(s[i:])
			if !isSpace(r) && !strings.ContainsRune("-([{<", r) {
				i += size
				continue
			}
		}
		if word := s[start:i]; word != "" {
			first, n := utf8.DecodeRuneInString(word)
			b.WriteString(upper(string(first)) + lower(word[n:]))
		}
		if i < len(s) {
			b.WriteString(s[i : i+size])
		}
		i += size
		start = i
	}
	return b.String()
}

func filterAbs(_ *machine, v Value, a *arguments) Value {
	a.bind("abs", 0)
	switch {
	case v.kind == KindFloat:
		return Float(math.Abs(v.float()))
	case v.isInteger():
		return fromBig(new(big.Int).Abs(v.big()))
	}
	raisef("TypeError", "bad operand type for abs(): '%s'", typeName(v))
	return Value{}
}

func filterAttr(m *machine, v Value, a *arguments) Value {
	p := a.bind("attr", 1, "name")
	name := m.text(p[0])
	if v.kind == KindUndefined {
		mustDefined(v)
	}
	if item, ok := m.attribute(v, name); ok {
		return item
	}
	return noAttribute(v, name)
}

func filterBatch(m *machine, v Value, a *arguments) Value {
	p := a.bind("batch", 1, "linecount", "fill_with")
	size := index(p[0])
	it := m.iterate(v)
	done := false
	return iteratorOf("generator", func() (Value, bool) {
		if done {
			return Value{}, false
		}
		var row []Value
		for {
			item, ok := it.step()
			if !ok {
				done = true
				break
			}
			m.charge(3 * valueSize)
			row = append(row, item)
			if int64(len(row)) == size {
				return List(row), true
			}
		}
		if len(row) == 0 {
			return Value{}, false
		}
		if given(p[1]) && p[1].kind != KindNone {
			m.chargeRepeat(size-int64(len(row)), valueSize)
			for int64(len(row)) < size {
				row = append(row, p[1])
			}
		}
		return List(row), true
	})
}

func filterSlice(m *machine, v Value, a *arguments) Value {
	p := a.bind("slice", 1, "slices", "fill_with")
	items := m.items(v)
	n := index(p[0])
	if n == 0 {
		raisef("ZeroDivisionError", "integer division or modulo by zero")
	}
	m.chargeRepeat(n, valueSize)
	size, extra := int64(len(items))/max(n, 1), int64(len(items))%max(n, 1)
	row, offset := int64(0), int64(0)
	return iteratorOf("generator", func() (Value, bool) {
		if row >= n {
			return Value{}, false
		}
		start := offset + row*size
		if row < extra {
			offset++
		}
		m.charge(int(size+3) * valueSize)
		part := slices.Clone(items[start : offset+(row+1)*size])
		if given(p[1]) && p[1].kind != KindNone && row >= extra {
			part = append(part, p[1])
		}
		row++
		return List(part), true
	})
}

func filterCenter(m *machine, v Value, a *arguments) Value {
	p := a.bind("center", 0, "width")
	return String(m.justify("center", m.text(v), optionalIndex(p[0], 80), " "))
}

func filterLength(m *machine, v Value, a *arguments) Value {
	a.noKeywords("len")
	return Int(m.length(v))
}

func filterDefault(_ *machine, v Value, a *arguments) Value {
	p := a.bind("default", 0, "default_value", "boolean")
	if v.kind == KindUndefined || given(p[1]) && p[1].Truth() && !v.Truth() {
		if !given(p[0]) {
			return String("")
		}
		return p[0]
	}
	return v
}

// sortKey is what values are compared by: text without case unless told.
func (m *machine) sortKey(v Value, caseSensitive bool) Value {
	if v.kind == KindString && !caseSensitive {
		m.chargeCase(v.str(), 8)
		return String(lower(v.str()))
	}
	return v
}

func isTrue(v Value) bool { return given(v) && v.Truth() }

func filterDictsort(m *machine, v Value, a *arguments) Value {
	p := a.bind("dictsort", 0, "case_sensitive", "by", "reverse")
	pos := 0
	if given(p[1]) {
		switch {
		case p[1].kind == KindString && p[1].str() == "value":
			pos = 1
		case p[1].kind != KindString || p[1].str() != "key":
			raisef("FilterArgumentError", "You can only sort by either \"key\" or \"value\"")
		}
	}
	if v.kind != KindDict {
		mustDefined(v)
		raisef("AttributeError", "'%s' object has no attribute 'items'", typeName(v))
	}
	entries := v.dict().entries
	m.charge(len(entries) * 6 * valueSize)
	items, keys := make([]Value, len(entries)), make([]Value, len(entries))
	for i, e := range entries {
		items[i] = Tuple([]Value{e.key, e.value})
		keys[i] = m.sortKey(items[i].seq()[pos], isTrue(p[0]))
	}
	return List(m.sorted(items, keys, isTrue(p[2])))
}

// sorted is Python's sorted(items, key=..., reverse=...): stable both ways.
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

var htmlEscaper = strings.NewReplacer("&", "&amp;", ">", "&gt;", "<", "&lt;", "'", "&#39;", `"`, "&#34;")

func escapeHTML(s string) string { return htmlEscaper.Replace(s) }

func filterEscape(m *machine, v Value, a *arguments) Value {
	a.bind("escape", 0)
	if v.kind == KindString && v.safe {
		return v
	}
	return filterForceescape(m, v, a)
}

func filterForceescape(m *machine, v Value, _ *arguments) Value {
	s := m.text(v)
	m.chargeRepeat(int64(len(s)), 5)
	m.work(8 * len(s))
	return markup(escapeHTML(s))
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

func filterFilesize(m *machine, v Value, a *arguments) Value {
	p := a.bind("filesizeformat", 0, "binary")
	n := asFloat(m.toFloat(v))
	base, units := 1000.0, []string{"kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"}
	if isTrue(p[0]) {
		base, units = 1024, []string{"KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB"}
	}
	switch {
	case n == 1:
		return String("1 Byte")
	case n < base:
		return String(string(appendInt(nil, toInt(Float(n)))) + " Bytes")
	}
	for i, name := range units {
		unit := math.Pow(base, float64(i+2))
		if n < unit || i == len(units)-1 {
			return String(strconv.FormatFloat(base*n/unit, 'f', 1, 64) + " " + name)
		}
	}
	return Value{}
}

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
		out := m.slice(v, [3]Value{None(), None(), Int(-1)})
		return out
	}
	if !canIterate(v) {
		raisef("FilterArgumentError", "argument must be iterable")
	}
	items := m.items(v)
	i := len(items)
	return iteratorOf("list_reverseiterator", func() (Value, bool) {
		if i == 0 {
			return Value{}, false
		}
		i--
		return items[i], true
	})
}

// parseFloat is Python's float(text).
func parseFloat(s string) (float64, bool) {
	s = strip(s, true, true)
	if strings.ContainsAny(s, "xXpP") {
		return 0, false
	}
	if strings.Contains(s, "_") {
		for i := range len(s) {
			if s[i] == '_' && (i == 0 || i == len(s)-1 || !isDigit(s[i-1]) || !isDigit(s[i+1])) {
				return 0, false
			}
		}
		s = strings.ReplaceAll(s, "_", "")
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil && !math.IsInf(f, 0) {
		return 0, false
	}
	return f, true
}

// toFloat is Python's float(v) as a value.
func (m *machine) toFloat(v Value) Value {
	switch {
	case v.isNumber():
		return Float(asFloat(v))
	case v.kind == KindString:
		f, ok := parseFloat(v.str())
		if !ok {
			raisef("ValueError", "could not convert string to float: %s", reprText(v.str()))
		}
		return Float(f)
	}
	mustDefined(v)
	raisef("TypeError", "float() argument must be a string or a real number, not '%s'", typeName(v))
	return Value{}
}

func filterFloat(m *machine, v Value, a *arguments) Value {
	p := a.bind("float", 0, "default")
	m.charge(v.textSize())
	def := p[0]
	if !given(def) {
		def = Float(0)
	}
	switch {
	case v.isNumber():
		return Float(asFloat(v))
	case v.kind == KindString:
		if f, ok := parseFloat(v.str()); ok {
			return Float(f)
		}
	}
	mustDefined(v)
	return def
}

// parseInt reads the digits of a literal: decimal or with a prefix.
func parseInt(s string) Value {
	if n, ok := parseIntBase(s, 0); ok {
		return n
	}
	return Int(0)
}

// parseIntBase is Python's int(text, base).
func parseIntBase(s string, base int) (Value, bool) {
	s = strip(s, true, true)
	body := strings.TrimLeft(s, "+-")
	if len(s)-len(body) > 1 || body == "" {
		return Value{}, false
	}
	prefixed := func(c byte) bool { return len(body) > 1 && body[0] == '0' && body[1]|32 == c }
	switch {
	case prefixed('x') && (base == 0 || base == 16):
		body, base = strings.TrimPrefix(body[2:], "_"), 16
	case prefixed('o') && (base == 0 || base == 8):
		body, base = strings.TrimPrefix(body[2:], "_"), 8
	case prefixed('b') && (base == 0 || base == 2):
		body, base = strings.TrimPrefix(body[2:], "_"), 2
	case base == 0:
		if len(body) > 1 && body[0] == '0' && strings.Trim(body, "0_") != "" {
			return Value{}, false
		}
		base = 10
	}
	if body == "" || body[0] == '_' || body[len(body)-1] == '_' || strings.Contains(body, "__") || body[0] == '+' || body[0] == '-' {
		return Value{}, false
	}
	body = strings.ReplaceAll(body, "_", "")
	if base < 2 || base > 36 || len(body) > maxIntDigits {
		return Value{}, false
	}
	n, ok := new(big.Int).SetString(body, base)
	if !ok {
		return Value{}, false
	}
	if s[0] == '-' {
		n.Neg(n)
	}
	return fromBig(n), true
}

func filterInt(m *machine, v Value, a *arguments) Value {
	p := a.bind("int", 0, "default", "base")
	m.charge(2 * v.textSize())
	if v.kind == KindString {
		m.steps -= min(len(v.str()), maxIntDigits) >> 3
	}
	def := p[0]
	if !given(def) {
		def = Int(0)
	}
	switch v.kind {
	case KindInt, KindBool:
		return plus(v)
	case KindFloat:
		if math.IsNaN(v.float()) || math.IsInf(v.float(), 0) {
			return def
		}
		return toInt(v)
	case KindString:
		if n, ok := parseIntBase(v.str(), int(optionalIndex(p[1], 10))); ok {
			return n
		}
		if f, ok := parseFloat(v.str()); ok && !math.IsNaN(f) && !math.IsInf(f, 0) {
			return toInt(Float(f))
		}
	}
	mustDefined(v)
	return def
}

func filterFormat(m *machine, v Value, a *arguments) Value {
	if len(a.pos) > 0 && len(a.kw) > 0 {
		raisef("FilterArgumentError", "can't handle positional and keyword arguments at the same time")
	}
	text := v
	if v.kind != KindString {
		text = String(m.text(v))
	}
	if len(a.kw) > 0 {
		return m.percent(text, FromDict(m.dictOf("format", a)))
	}
	m.charge((len(a.pos) + 1) * valueSize)
	return m.percent(text, Tuple(slices.Clone(a.pos)))
}

// attrGetter is jinja2's make_attrgetter: a path with dots, digits are indices.
func (m *machine) attrGetter(attribute, def Value) func(v Value) Value {
	var parts []Value
	switch {
	case !given(attribute) || attribute.kind == KindNone:
	case attribute.kind == KindString:
		m.chargeRepeat(int64(strings.Count(attribute.str(), "."))+1, 3*valueSize)
		for part := range strings.SplitSeq(attribute.str(), ".") {
			if part != "" && strings.IndexFunc(part, func(r rune) bool { return !unicode.IsDigit(r) }) < 0 {
				parts = append(parts, parseInt(strings.TrimLeft(part[:len(part)-1], "0")+part[len(part)-1:]))
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

func filterGroupby(m *machine, v Value, a *arguments) Value {
	p := a.bind("groupby", 1, "attribute", "default", "case_sensitive")
	get := m.attrGetter(p[0], p[1])
	items := m.items(v)
	m.charge(len(items) * 2 * valueSize)
	keys := make([]Value, len(items))
	for i, item := range items {
		keys[i] = m.sortKey(get(item), isTrue(p[2]))
	}
	var groups []Value
	var last Value
	for _, item := range m.sorted(items, keys, false) {
		key := m.sortKey(get(item), isTrue(p[2]))
		m.charge(8 * valueSize)
		if n := len(groups); n > 0 && m.equal(last, key) {
			s := (*sequence)(groups[n-1].seq()[1].p)
			s.items = append(s.items, item)
			continue
		}
		last = key
		g := Tuple([]Value{get(item), List([]Value{item})})
		g.safe = true
		groups = append(groups, g)
	}
	return List(groups)
}

func filterIndent(m *machine, v Value, a *arguments) Value {
	p := a.bind("indent", 0, "width", "first", "blank")
	switch v.kind {
	case KindString:
	case KindList:
		raisef("AttributeError", "'list' object has no attribute 'splitlines'")
	default:
		unsupported("+=", v, String("\n"))
	}
	s := v.str()
	indent := "    "
	if given(p[0]) {
		if p[0].kind == KindString {
			indent = p[0].str()
		} else {
			n := max(index(p[0]), 0)
			m.chargeRepeat(n, 1)
			indent = strings.Repeat(" ", int(n))
		}
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

func filterJoin(m *machine, v Value, a *arguments) Value {
	p := a.bind("join", 0, "d", "attribute")
	sep := ""
	if given(p[0]) {
		sep = m.text(p[0])
	}
	get := func(v Value) Value { return v }
	if given(p[1]) && p[1].kind != KindNone {
		get = m.attrGetter(p[1], Value{kind: kindMissing})
	}
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

func filterList(m *machine, v Value, a *arguments) Value {
	a.bind("list", 0)
	items := m.items(v)
	m.charge(len(items) * valueSize)
	return List(slices.Clone(items))
}

func filterItems(m *machine, v Value, a *arguments) Value {
	a.bind("items", 0)
	if v.kind == KindUndefined {
		return iteratorOf("generator", func() (Value, bool) { return Value{}, false })
	}
	if v.kind != KindDict {
		raisef("TypeError", "Can only get item pairs from a mapping.")
	}
	d, i := v.dict(), 0
	return iteratorOf("generator", func() (Value, bool) {
		if i >= d.Len() {
			return Value{}, false
		}
		i++
		m.charge(4 * valueSize)
		return Tuple([]Value{d.entries[i-1].key, d.entries[i-1].value}), true
	})
}

// keep copies arguments that outlive the call.
func (a *arguments) keep(from int) *arguments {
	return &arguments{pos: slices.Clone(a.pos[from:]), names: a.names, kw: slices.Clone(a.kw)}
}

func filterMap(m *machine, v Value, a *arguments) Value {
	// Python's generator looks at its arguments when the first item is asked for.
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

// lazy is a generator over v; prepare runs before the first item.
func (m *machine) lazy(v Value, prepare func(), f func(item Value) (Value, bool)) Value {
	var it iteration
	started := false
	return iteratorOf("generator", func() (Value, bool) {
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

func extreme(name string, sign int) filterFunc {
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
			if sign > 0 && m.greater(k, key) || sign < 0 && m.less(k, key) {
				best, key = item, k
			}
		}
		return best
	}
}

// greater is Python's a > b.
func (m *machine) greater(a, b Value) bool {
	c, ok := m.compare(a, b, ">", 0)
	return ok && c > 0
}

func filterReplace(m *machine, v Value, a *arguments) Value {
	p := a.bind("replace", 2, "old", "new", "count")
	count := int64(-1)
	if given(p[2]) && p[2].kind != KindNone {
		count = index(p[2])
	}
	return String(m.replace(m.text(v), m.text(p[0]), m.text(p[1]), count))
}

func filterRound(m *machine, v Value, a *arguments) Value {
	p := a.bind("round", 0, "precision", "method")
	precision := optionalIndex(p[0], 0)
	method := "common"
	if given(p[1]) {
		method = m.text(p[1])
	}
	if method != "common" && method != "ceil" && method != "floor" {
		raisef("FilterArgumentError", "method must be common, ceil or floor")
	}
	if !v.isNumber() {
		if method != "common" {
			mustDefined(v) // it is multiplied first
		}
		raisef("TypeError", "type %s doesn't define __round__ method", typeName(v))
	}
	if method == "common" {
		if v.kind != KindFloat {
			m.steps -= 64
			m.chargeInt(v)
			return roundInt(v, precision)
		}
		return Float(roundHalfEven(v.float(), precision))
	}
	scale := math.Pow(10, float64(precision))
	f := math.Ceil
	if method == "floor" {
		f = math.Floor
	}
	return Float(f(asFloat(v)*scale) / scale)
}

// roundInt is Python's round(i, n).
func roundInt(v Value, n int64) Value {
	if n >= 0 {
		return plus(v)
	}
	if n < -maxIntDigits {
		return Int(0)
	}
	unit := new(big.Int).Exp(big.NewInt(10), big.NewInt(-n), nil)
	q, r := new(big.Int).DivMod(v.big(), unit, new(big.Int))
	if c := new(big.Int).Lsh(r, 1).Cmp(unit); c > 0 || c == 0 && q.Bit(0) == 1 {
		q.Add(q, big.NewInt(1))
	}
	return fromBig(q.Mul(q, unit))
}

// roundHalfEven is Python's round(f, n): exact in decimal.
func roundHalfEven(f float64, n int64) float64 {
	if math.IsNaN(f) || math.IsInf(f, 0) || n > 323 {
		return f
	}
	if n >= 0 {
		out, _ := strconv.ParseFloat(strconv.FormatFloat(f, 'f', int(n), 64), 64)
		return out
	}
	if n < -308 {
		return math.Copysign(0, f)
	}
	scale := math.Pow(10, float64(-n))
	return math.RoundToEven(f/scale) * scale
}

func filterSort(m *machine, v Value, a *arguments) Value {
	p := a.bind("sort", 0, "reverse", "case_sensitive", "attribute")
	var gets []func(Value) Value
	if given(p[2]) && p[2].kind == KindString {
		m.chargeRepeat(int64(strings.Count(p[2].str(), ","))+1, 8*valueSize)
		for part := range strings.SplitSeq(p[2].str(), ",") {
			gets = append(gets, m.attrGetter(String(part), Value{kind: kindMissing}))
		}
	} else {
		gets = append(gets, m.attrGetter(p[2], Value{kind: kindMissing}))
	}
	items := m.items(v)
	m.chargeRepeat(int64(len(items)), (2+2*len(gets))*valueSize)
	keys := make([]Value, len(items))
	for i, item := range items {
		parts := make([]Value, len(gets))
		for j, get := range gets {
			parts[j] = m.sortKey(get(item), isTrue(p[1]))
		}
		keys[i] = List(parts)
	}
	return List(m.sorted(items, keys, isTrue(p[0])))
}

func filterUnique(m *machine, v Value, a *arguments) Value {
	p := a.bind("unique", 0, "case_sensitive", "attribute")
	get := m.attrGetter(p[1], Value{kind: kindMissing})
	seen := new(Dict)
	it := m.iterate(v)
	return iteratorOf("generator", func() (Value, bool) {
		for {
			item, ok := it.step()
			if !ok {
				return Value{}, false
			}
			m.charge(dictEntry)
			key := m.sortKey(get(item), isTrue(p[0]))
			m.mustHash(key)
			if seen.find(key) < 0 {
				seen.put(key, None())
				return item, true
			}
		}
	})
}

func filterSum(m *machine, v Value, a *arguments) Value {
	p := a.bind("sum", 0, "attribute", "start")
	get := m.attrGetter(p[0], Value{kind: kindMissing})
	total := p[1]
	if !given(total) {
		total = Int(0)
	}
	if total.kind == KindString {
		raisef("TypeError", "sum() can't sum strings [use ''.join(seq) instead]")
	}
	for _, item := range m.items(v) {
		total = add(m, total, get(item))
	}
	return total
}

var tagSpaces = strings.Fields

func filterStriptags(m *machine, v Value, a *arguments) Value {
	a.bind("striptags", 0)
	s := m.text(v)
	for _, pair := range [][2]string{{"<!--", "-->"}, {"<", ">"}} {
		for {
			start := strings.Index(s, pair[0])
			if start < 0 {
				break
			}
			end := strings.Index(s[start:], pair[1])
			if end < 0 {
				break
			}
			m.charge(len(s))
			s = s[:start] + s[start+end+len(pair[1]):]
		}
	}
	m.chargeRepeat(int64(len(s)), 10)
	s = strings.Join(tagSpaces(s), " ")
	if strings.Contains(s, "&") {
		s = strings.NewReplacer("&amp;", "&", "&lt;", "<", "&gt;", ">", "&#39;", "'", "&#34;", `"`, "&quot;", `"`).Replace(s)
	}
	return String(s)
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
	return strMethods["strip"](m, text, &arguments{pos: p[:1]})
}

func filterTruncate(m *machine, v Value, a *arguments) Value {
	p := a.bind("truncate", 0, "length", "killwords", "end", "leeway")
	length, leeway := optionalIndex(p[0], 255), optionalIndex(p[3], 5)
	end := "..."
	if given(p[2]) {
		end = m.text(p[2])
	}
	endLen := int64(utf8.RuneCountInString(end))
	if length < endLen {
		raisef("AssertionError", "expected length >= %d, got %d", endLen, length)
	}
	if leeway < 0 {
		raisef("AssertionError", "expected leeway >= 0, got %d", leeway)
	}
	if m.length(v) <= length+leeway {
		return v
	}
	if v.kind != KindString {
		raisef("AttributeError", "'%s' object has no attribute 'rsplit'", typeName(v))
	}
	s := v.str()
	cut := truncate(s, int(length-endLen))
	if !isTrue(p[1]) {
		if at := strings.LastIndexByte(cut, ' '); at >= 0 {
			cut = cut[:at]
		}
	}
	if v.safe {
		m.chargeRepeat(int64(len(end)), 5)
		end = escapeHTML(end)
	}
	m.charge(len(cut) + len(end))
	return like(v, cut+end)
}

func filterURLEncode(m *machine, v Value, a *arguments) Value {
	a.bind("urlencode", 0)
	if v.kind == KindString || !canIterate(v) {
		return String(m.quoteURL(m.text(v), "/"))
	}
	pairs := m.items(v)
	if v.kind == KindDict {
		pairs = m.items(dictMethods["items"](m, v, &arguments{}))
	}
	var parts []string
	for _, pair := range pairs {
		kv := m.unpack(pair, 2)
		part := m.quoteURL(m.text(kv[0]), "") + "=" + m.quoteURL(m.text(kv[1]), "")
		m.charge(2*len(part) + valueSize)
		parts = append(parts, part)
	}
	return String(strings.Join(parts, "&"))
}

// quoteURL is jinja2's url_quote; without a safe slash it is for a query.
func (m *machine) quoteURL(s, safe string) string {
	m.work(8 * len(s))
	m.chargeRepeat(int64(len(s)), 8)
	var b strings.Builder
	for i := range len(s) {
		c := s[i]
		switch {
		case isDigit(c) || c|32 >= 'a' && c|32 <= 'z' || strings.IndexByte("_.-~"+safe, c) >= 0:
			b.WriteByte(c)
		case c == ' ' && safe == "":
			b.WriteByte('+')
		default:
			b.WriteByte('%')
			b.WriteByte("0123456789ABCDEF"[c>>4])
			b.WriteByte("0123456789ABCDEF"[c&15])
		}
	}
	return b.String()
}

func filterWordcount(m *machine, v Value, a *arguments) Value {
	a.bind("wordcount", 0)
	n, in := int64(0), false
	text := m.text(v)
	m.work(4 * len(text))
	for _, r := range text {
		word := r == '_' || unicode.IsLetter(r) || unicode.IsNumber(r)
		if word && !in {
			n++
		}
		in = word
	}
	return Int(n)
}

func filterXMLAttr(m *machine, v Value, a *arguments) Value {
	p := a.bind("xmlattr", 0, "autospace")
	if v.kind != KindDict {
		mustDefined(v)
		raisef("AttributeError", "'%s' object has no attribute 'items'", typeName(v))
	}
	var parts []string
	for _, e := range v.dict().entries {
		if e.value.kind == KindNone || e.value.kind == KindUndefined {
			continue
		}
		if e.key.kind != KindString {
			raisef("TypeError", "expected string or bytes-like object, got '%s'", typeName(e.key))
		}
		key := e.key.str()
		if strings.ContainsAny(key, " \t\n\r\f\v/>=") {
			raisef("ValueError", "Invalid character in attribute name: %s", reprText(key))
		}
		text := m.text(e.value)
		m.chargeRepeat(int64(len(key)+len(text)+8), 12)
		parts = append(parts, escapeHTML(key)+`="`+escapeHTML(text)+`"`)
	}
	out := strings.Join(parts, " ")
	if out != "" && (!given(p[0]) || p[0].Truth()) {
		out = " " + out
	}
	return String(out)
}

func filterToJSON(m *machine, v Value, a *arguments) Value {
	p := a.bind("tojson", 0, "ensure_ascii", "indent", "separators", "sort_keys")
	o := JSONOptions{EnsureASCII: isTrue(p[0]), SortKeys: isTrue(p[3])}
	if given(p[1]) && p[1].kind != KindNone {
		o.Indented = true
		if p[1].kind == KindString {
			o.Indent = p[1].str()
		} else {
			n := max(index(p[1]), 0)
			m.chargeRepeat(n, 1)
			o.Indent = strings.Repeat(" ", int(n))
		}
	}
	if given(p[2]) && p[2].kind != KindNone {
		parts := m.unpack(p[2], 2)
		o.Separators = true
		o.ItemSeparator, o.KeySeparator = needText("separators", parts[0]), needText("separators", parts[1])
	}
	w := newJSONWriter(o)
	w.m, w.limit = m, m.memory/2
	out, err := w.value(nil, v, 0)
	if err != nil {
		panic(err)
	}
	m.charge(2 * len(out))
	return String(unsafe.String(unsafe.SliceData(out), len(out)))
}
