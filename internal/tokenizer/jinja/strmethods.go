package jinja

import (
	"strings"
	"unicode"
	"unicode/utf8"
	"unsafe"
)

// bind distributes arguments over named parameters, as Python does; a missing
// one has kindMissing.
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
		at := -1
		for j, p := range params {
			if p == name {
				at = j
			}
		}
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

// positional checks the number of arguments of a method that takes no keywords.
func (a *arguments) positional(fn string, least, most int) {
	a.noKeywords(fn)
	if len(a.pos) < least || len(a.pos) > most {
		raisef("TypeError", "%s() takes from %d to %d arguments (%d given)", fn, least, most, len(a.pos))
	}
}

func (a *arguments) at(i int) Value {
	if i < len(a.pos) {
		return a.pos[i]
	}
	return Value{kind: kindMissing}
}

func given(v Value) bool { return v.kind != kindMissing }

func needText(fn string, v Value) string {
	if v.kind != KindString {
		raisef("TypeError", "%s() argument must be str, not %s", fn, typeName(v))
	}
	return v.str()
}

// index is Python's operator.index: an int in the range of int64.
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

func optionalIndex(v Value, def int64) int64 {
	if !given(v) {
		return def
	}
	return index(v)
}

// like gives s the type of v: methods of Markup return Markup.
func like(v Value, s string) Value {
	out := String(s)
	out.safe = v.safe
	return out
}

var strMethods map[string]methodFunc

func init() { //nolint:gochecknoinits // the table and the methods need each other
	strMethods = map[string]methodFunc{
		"strip":  stripper("strip", true, true),
		"lstrip": stripper("lstrip", true, false),
		"rstrip": stripper("rstrip", false, true),
		"lower":  caser("lower", lower), "upper": caser("upper", upper), "title": caser("title", title),
		"capitalize": caser("capitalize", capitalize), "swapcase": caser("swapcase", swapcase), "casefold": caser("casefold", casefold),
		"startswith": affix("startswith", strings.HasPrefix), "endswith": affix("endswith", strings.HasSuffix),
		"split": strSplit, "rsplit": strRsplit, "splitlines": strSplitlines,
		"replace": strReplace, "join": strJoin, "format": strFormat, "format_map": strFormatMap,
		"find": finder("find", false, false), "rfind": finder("rfind", true, false),
		"index": finder("index", false, true), "rindex": finder("rindex", true, true),
		"count":     strCount,
		"partition": partitioner("partition", strings.Index), "rpartition": partitioner("rpartition", strings.LastIndex),
		"removeprefix": func(_ *machine, v Value, a *arguments) Value {
			a.positional("removeprefix", 1, 1)
			return like(v, strings.TrimPrefix(v.str(), needText("removeprefix", a.pos[0])))
		},
		"removesuffix": func(_ *machine, v Value, a *arguments) Value {
			a.positional("removesuffix", 1, 1)
			return like(v, strings.TrimSuffix(v.str(), needText("removesuffix", a.pos[0])))
		},
		"center": justifier("center"), "ljust": justifier("ljust"), "rjust": justifier("rjust"),
		"zfill": strZfill, "expandtabs": strExpandtabs,
		"isdigit":   tester(unicode.IsDigit),
		"isdecimal": tester(unicode.IsDigit),
		"isnumeric": tester(unicode.IsNumber),
		"isalpha":   tester(unicode.IsLetter),
		"isalnum":   tester(func(r rune) bool { return unicode.IsLetter(r) || unicode.IsNumber(r) }),
		"isspace":   tester(isSpace),
		"isascii": func(_ *machine, v Value, _ *arguments) Value {
			for _, c := range []byte(v.str()) {
				if c >= 0x80 {
					return Bool(false)
				}
			}
			return Bool(true)
		},
		"isprintable": func(m *machine, v Value, _ *arguments) Value {
			m.work(16 * len(v.str()))
			return Bool(strings.IndexFunc(v.str(), func(r rune) bool { return !printable(r) }) < 0)
		},
		"islower": cased(isLower, isUpperOrTitle),
		"isupper": cased(isUpper, func(r rune) bool { return isLower(r) || unicode.IsTitle(r) }),
		"istitle": strIstitle,
		"encode":  noBytes, "translate": noBytes, "maketrans": noBytes,
		"isidentifier": strIsidentifier,
	}
}

// noBytes stands for methods that need types no template uses.
func noBytes(*machine, Value, *arguments) Value {
	raisef("Unsupported", "bytes and translation tables are not supported")
	return Value{}
}

func stripper(name string, left, right bool) methodFunc {
	return func(m *machine, v Value, a *arguments) Value {
		s := v.str()
		if len(a.pos) == 0 && len(a.kw) == 0 {
			return like(v, strip(s, left, right))
		}
		a.positional(name, 0, 1)
		if a.pos[0].kind == KindNone {
			return like(v, strip(s, left, right))
		}
		if a.pos[0].kind != KindString {
			raisef("TypeError", "%s arg must be None or str", name)
		}
		chars := a.pos[0].str()
		in := func(r rune) bool {
			m.work(64 + 4*len(chars))
			return strings.ContainsRune(chars, r)
		}
		if left {
			s = strings.TrimLeftFunc(s, in)
		}
		if right {
			s = strings.TrimRightFunc(s, in)
		}
		return like(v, s)
	}
}

func strip(s string, left, right bool) string {
	if left {
		s = s[skipSpace(s, 0):]
	}
	if right {
		s = strings.TrimRightFunc(s, isSpace)
	}
	return s
}

func caser(name string, f func(string) string) methodFunc {
	return func(m *machine, v Value, a *arguments) Value {
		a.positional(name, 0, 0)
		s := v.str()
		m.work(4 * len(s))
		m.chargeCase(s, 8)
		if name == "title" || name == "swapcase" { // by the character
			m.work(64 * len(s))
			m.chargeRepeat(int64(len(s)), 40)
		}
		return like(v, f(v.str()))
	}
}

func affix(name string, has func(s, affix string) bool) methodFunc {
	return func(m *machine, v Value, a *arguments) Value {
		a.positional(name, 1, 3)
		s := v.str()
		options := a.pos[:1]
		if a.pos[0].kind == KindTuple {
			options = a.pos[0].seq()
		}
		if len(a.pos) > 1 {
			var ok bool
			if s, _, ok = window(s, a.at(1), a.at(2)); !ok {
				return Bool(false)
			}
		}
		for _, o := range options {
			m.operands(o, &noArguments)
			if o.kind != KindString {
				raisef("TypeError", "%s first arg must be str or a tuple of str, not %s", name, typeName(a.pos[0]))
			}
			if has(s, o.str()) {
				return Bool(true)
			}
		}
		return Bool(false)
	}
}

// window is s[start:end] with the number of characters before it; ok is false
// if start lies behind the end, where not even the empty str is found.
func window(s string, from, to Value) (part string, start int, ok bool) {
	n := utf8.RuneCountInString(s)
	bounds := [3]Value{None(), None(), None()}
	if given(from) {
		bounds[0] = from
	}
	if given(to) {
		bounds[1] = to
	}
	if bounds[0].kind != KindNone && bounds[0].isInteger() && sliceBound(bounds[0]) > n {
		return "", 0, false
	}
	start, count, _ := sliceIndices(bounds, n)
	if end := bounds[1]; end.kind != KindNone && count == 0 {
		i := sliceBound(end)
		if i < 0 {
			i = max(i+n, 0)
		}
		if i < start {
			return "", 0, false
		}
	}
	at := byteOffset(s, n, start)
	return s[at : at+byteOffset(s[at:], n-start, count)], start, true
}

func finder(name string, last, strict bool) methodFunc {
	return func(_ *machine, v Value, a *arguments) Value {
		a.positional(name, 1, 3)
		sub := needText(name, a.pos[0])
		part, start, ok := window(v.str(), a.at(1), a.at(2))
		at := -1
		if ok {
			if last {
				at = strings.LastIndex(part, sub)
			} else {
				at = strings.Index(part, sub)
			}
		}
		if at < 0 {
			if strict {
				raisef("ValueError", "substring not found")
			}
			return Int(-1)
		}
		return Int(int64(start + utf8.RuneCountInString(part[:at])))
	}
}

func strCount(_ *machine, v Value, a *arguments) Value {
	a.positional("count", 1, 3)
	sub := needText("count", a.pos[0])
	part, _, ok := window(v.str(), a.at(1), a.at(2))
	if !ok {
		return Int(0)
	}
	return Int(int64(strings.Count(part, sub)))
}

func partitioner(name string, find func(s, sub string) int) methodFunc {
	return func(_ *machine, v Value, a *arguments) Value {
		a.positional(name, 1, 1)
		s, sep := v.str(), needText(name, a.pos[0])
		if sep == "" {
			raisef("ValueError", "empty separator")
		}
		at := find(s, sep)
		if at >= 0 {
			return Tuple([]Value{like(v, s[:at]), like(v, sep), like(v, s[at+len(sep):])})
		}
		if name == "partition" {
			return Tuple([]Value{v, like(v, ""), like(v, "")})
		}
		return Tuple([]Value{like(v, ""), like(v, ""), v})
	}
}

// splitArgs reads sep and maxsplit; all is set if every part is wanted.
func splitArgs(name string, a *arguments) (sep string, spaces bool, limit int64) {
	p := a.bind(name, 0, "sep", "maxsplit")
	limit = optionalIndex(p[1], -1)
	if !given(p[0]) || p[0].kind == KindNone {
		return "", true, limit
	}
	if p[0].kind != KindString {
		raisef("TypeError", "must be str or None, not %s", typeName(p[0]))
	}
	if sep = p[0].str(); sep == "" {
		raisef("ValueError", "empty separator")
	}
	return sep, false, limit
}

func (m *machine) texts(v Value, parts []string) Value {
	m.charge((len(parts) + 1) * valueSize)
	out := make([]Value, len(parts))
	for i, p := range parts {
		out[i] = like(v, p)
	}
	return List(out)
}

func strSplit(m *machine, v Value, a *arguments) Value {
	sep, spaces, limit := splitArgs("split", a)
	s := v.str()
	if !spaces {
		if limit < 0 || limit > int64(len(s)) {
			limit = int64(len(s)) + 1
		}
		m.chargeRepeat(min(int64(strings.Count(s, sep)), limit)+1, 16)
		return m.texts(v, strings.SplitN(s, sep, int(limit)+1))
	}
	var parts []string
	for s = strip(s, true, false); s != ""; s = strip(s, true, false) {
		m.charge(2 * valueSize)
		if limit == 0 {
			parts = append(parts, s)
			break
		}
		limit--
		end := strings.IndexFunc(s, isSpace)
		if end < 0 {
			end = len(s)
		}
		parts = append(parts, s[:end])
		s = s[end:]
	}
	return m.texts(v, parts)
}

func strRsplit(m *machine, v Value, a *arguments) Value {
	sep, spaces, limit := splitArgs("rsplit", a)
	s := v.str()
	var parts []string
	if spaces {
		for s = strip(s, false, true); s != ""; s = strip(s, false, true) {
			m.charge(2 * valueSize)
			if limit == 0 {
				parts = append(parts, s)
				break
			}
			limit--
			at := strings.LastIndexFunc(s, isSpace)
			if at >= 0 {
				_, size := utf8.DecodeRuneInString(s[at:])
				at += size
			} else {
				at = 0
			}
			parts = append(parts, s[at:])
			s = s[:at]
		}
	} else {
		for at := strings.LastIndex(s, sep); at >= 0 && limit != 0; at = strings.LastIndex(s, sep) {
			m.charge(2 * valueSize)
			parts = append(parts, s[at+len(sep):])
			s = s[:at]
			limit--
		}
		parts = append(parts, s)
	}
	for i, j := 0, len(parts)-1; i < j; i, j = i+1, j-1 {
		parts[i], parts[j] = parts[j], parts[i]
	}
	return m.texts(v, parts)
}

func isLineEnd(r rune) bool {
	return r >= 0x0a && r <= 0x0d || r >= 0x1c && r <= 0x1e || r == 0x85 || r == 0x2028 || r == 0x2029
}

// splitLines is Python's str.splitlines.
func splitLines(s string, keep bool) []string {
	var parts []string
	for s != "" {
		at := strings.IndexFunc(s, isLineEnd)
		if at < 0 {
			return append(parts, s)
		}
		_, size := utf8.DecodeRuneInString(s[at:])
		if strings.HasPrefix(s[at:], "\r\n") {
			size = 2
		}
		if keep {
			parts = append(parts, s[:at+size])
		} else {
			parts = append(parts, s[:at])
		}
		s = s[at+size:]
	}
	return parts
}

// chargeLines pays so much for each line of s.
func (m *machine) chargeLines(s string, each int) {
	m.work(4 * len(s))
	n := int64(1)
	for _, r := range s {
		if isLineEnd(r) {
			n++
		}
	}
	m.chargeRepeat(n, each)
}

func strSplitlines(m *machine, v Value, a *arguments) Value {
	p := a.bind("splitlines", 0, "keepends")
	m.chargeLines(v.str(), 2*valueSize)
	return m.texts(v, splitLines(v.str(), given(p[0]) && p[0].Truth()))
}

func (m *machine) replace(s, old, with string, count int64) string {
	if count < 0 || count > int64(len(s))+1 {
		count = int64(len(s)) + 1
	}
	if n := min(int64(strings.Count(s, old)), count); n > 0 {
		m.chargeRepeat(n, len(with)+1)
	}
	m.charge(len(s))
	return strings.Replace(s, old, with, int(count))
}

func strReplace(m *machine, v Value, a *arguments) Value {
	a.positional("replace", 2, 3)
	with := needText("replace", a.pos[1])
	if v.safe && !a.pos[1].safe {
		m.chargeRepeat(int64(len(with)), 5)
		with = escapeHTML(with)
	}
	return like(v, m.replace(v.str(), needText("replace", a.pos[0]), with, optionalIndex(a.at(2), -1)))
}

func strJoin(m *machine, v Value, a *arguments) Value {
	a.positional("join", 1, 1)
	if !canIterate(a.pos[0]) {
		raisef("TypeError", "can only join an iterable")
	}
	items := m.items(a.pos[0])
	m.charge(len(items) * valueSize)
	parts := make([]string, len(items))
	n := 0
	for i, item := range items {
		if item.kind != KindString {
			if v.safe {
				item = String(m.text(item))
			} else {
				raisef("TypeError", "sequence item %d: expected str instance, %s found", i, typeName(item))
			}
		}
		parts[i] = item.str()
		if v.safe && !item.safe {
			m.chargeRepeat(int64(len(parts[i])), 5)
			parts[i] = escapeHTML(parts[i])
		}
		n += len(parts[i])
	}
	m.charge(n)
	m.chargeRepeat(int64(len(items)), len(v.str()))
	return like(v, strings.Join(parts, v.str()))
}

// padded is s between so many fills, made in one piece.
func (m *machine) padded(s, fill string, left, right int64) string {
	m.chargeRepeat(left, len(fill))
	m.chargeRepeat(right, len(fill))
	m.charge(len(s))
	out := make([]byte, 0, int(left+right)*len(fill)+len(s))
	out = appendFill(out, fill, left)
	out = append(out, s...)
	out = appendFill(out, fill, right)
	return unsafe.String(unsafe.SliceData(out), len(out))
}

// appendFill appends n fills, each time as many as there are.
func appendFill(dst []byte, fill string, n int64) []byte {
	if n <= 0 {
		return dst
	}
	start, end := len(dst), len(dst)+int(n)*len(fill)
	for dst = append(dst, fill...); len(dst) < end; {
		dst = append(dst, dst[start:min(len(dst), start+end-len(dst))]...)
	}
	return dst
}

func justifier(name string) methodFunc {
	return func(m *machine, v Value, a *arguments) Value {
		a.positional(name, 1, 2)
		fill := " "
		if len(a.pos) > 1 {
			if fill = needText(name, a.pos[1]); utf8.RuneCountInString(fill) != 1 {
				raisef("TypeError", "The fill character must be exactly one character long")
			}
		}
		return like(v, m.justify(name, v.str(), index(a.pos[0]), fill))
	}
}

func (m *machine) justify(how, s string, width int64, fill string) string {
	pad := width - int64(utf8.RuneCountInString(s))
	if pad <= 0 {
		return s
	}
	left := int64(0)
	switch how {
	case "rjust":
		left = pad
	case "center":
		left = pad/2 + pad&width&1
	}
	return m.padded(s, fill, left, pad-left)
}

func strZfill(m *machine, v Value, a *arguments) Value {
	a.positional("zfill", 1, 1)
	s := v.str()
	sign := ""
	if s != "" && (s[0] == '+' || s[0] == '-') {
		sign = s[:1]
	}
	out := m.justify("rjust", s[len(sign):], max(index(a.pos[0]), 0)-int64(len(sign)), "0")
	m.charge(len(out))
	return like(v, sign+out)
}

func strExpandtabs(m *machine, v Value, a *arguments) Value {
	p := a.bind("expandtabs", 0, "tabsize")
	size := optionalIndex(p[0], 8)
	m.chargeRepeat(int64(strings.Count(v.str(), "\t")), 3*int(min(max(size, 0), 1<<30)))
	m.work(4 * len(v.str()))
	m.charge(3 * len(v.str()))
	var b strings.Builder
	column := int64(0)
	for _, r := range v.str() {
		switch r {
		case '\t':
			if size > 0 {
				n := size - column%size
				b.WriteString(strings.Repeat(" ", int(n)))
				column += n
			}
			continue
		case '\n', '\r':
			column = -1
		}
		b.WriteRune(r)
		column++
	}
	return like(v, b.String())
}

func tester(ok func(r rune) bool) methodFunc {
	return func(m *machine, v Value, _ *arguments) Value {
		s := v.str()
		m.work(4 * len(s))
		return Bool(s != "" && strings.IndexFunc(s, func(r rune) bool { return !ok(r) }) < 0)
	}
}

func cased(want, refuse func(r rune) bool) methodFunc {
	return func(m *machine, v Value, _ *arguments) Value {
		m.work(8 * len(v.str()))
		found := false
		for _, r := range v.str() {
			if refuse(r) {
				return Bool(false)
			}
			found = found || want(r)
		}
		return Bool(found)
	}
}

func isLower(r rune) bool { return unicode.IsLower(r) || unicode.Is(unicode.Other_Lowercase, r) }
func isUpper(r rune) bool { return unicode.IsUpper(r) || unicode.Is(unicode.Other_Uppercase, r) }

func isUpperOrTitle(r rune) bool { return isUpper(r) || unicode.IsTitle(r) }

func isCased(r rune) bool { return isLower(r) || isUpper(r) || unicode.IsTitle(r) }

func strIstitle(m *machine, v Value, _ *arguments) Value {
	m.work(8 * len(v.str()))
	found, after := false, false
	for _, r := range v.str() {
		switch {
		case isUpper(r) || unicode.IsTitle(r):
			if after {
				return Bool(false)
			}
			found, after = true, true
		case isLower(r):
			if !after {
				return Bool(false)
			}
		default:
			after = false
		}
	}
	return Bool(found)
}

func strIsidentifier(m *machine, v Value, _ *arguments) Value {
	m.work(4 * len(v.str()))
	for i, r := range v.str() {
		if r != '_' && !unicode.IsLetter(r) && (i == 0 || !unicode.IsDigit(r) && !unicode.IsMark(r)) {
			return Bool(false)
		}
	}
	return Bool(v.n > 0)
}
