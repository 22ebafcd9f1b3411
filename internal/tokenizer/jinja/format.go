package jinja

import (
	"math"
	"math/big"
	"strconv"
	"strings"
	"unicode/utf8"
)

// maxWidth bounds width and precision in formats.
const maxWidth = 1 << 20

// spec is one format specification, of "%5.1f" as of "{:>5.1f}".
type spec struct {
	fill      string
	align     byte // 0 if not given
	sign      byte // '+', ' ' or 0
	alternate bool
	zero      bool
	width     int
	group     byte // ',', '_' or 0
	precision int  // -1 if not given
	verb      byte // 0 if not given
}

// pad puts text (a number's sign first) into the width of the spec.
func (m *machine) pad(text string, s spec, align byte) string {
	if s.align != 0 {
		align = s.align
	}
	n := s.width - utf8.RuneCountInString(text)
	if n <= 0 {
		return text
	}
	fill := s.fill
	if fill == "" {
		fill = " "
	}
	switch align {
	case '<':
		return m.padded(text, fill, 0, int64(n))
	case '>':
		return m.padded(text, fill, int64(n), 0)
	case '^':
		return m.padded(text, fill, int64(n/2), int64(n-n/2))
	}
	sign := 0
	if text != "" && strings.IndexByte("+- ", text[0]) >= 0 {
		sign = 1
	}
	if len(text) > sign+1 && text[sign] == '0' && strings.IndexByte("xXob", text[sign+1]) >= 0 {
		sign += 2
	}
	m.charge(len(text) + n*len(fill))
	return text[:sign] + m.padded(text[sign:], fill, int64(n), 0)
}

func signed(negative bool, s spec, body string) string {
	switch {
	case negative:
		return "-" + body
	case s.sign != 0:
		return string(rune(s.sign)) + body
	}
	return body
}

// formatFloat writes f with the verbs e, f, g, % and their capitals; 0 is
// Python's default, which is repr or g with at least one digit after the point.
func formatFloat(f float64, s spec) string {
	negative := math.Signbit(f) && !math.IsNaN(f)
	f = math.Abs(f)
	verb := s.verb
	upperCase := verb >= 'A' && verb <= 'Z'
	verb |= 0x20
	precision := s.precision
	if precision < 0 {
		precision = 6
	}
	var body string
	switch {
	case math.IsNaN(f):
		body = "nan"
	case math.IsInf(f, 0):
		body = "inf"
	case s.verb == 0 && s.precision < 0:
		body = string(appendFloat(nil, f))
	case s.verb == '%':
		body = strconv.FormatFloat(f*100, 'f', precision, 64)
	case s.verb == 0 || verb == 'g' || verb == 'n':
		body = generalFloat(f, max(precision, 1), s.alternate, s.verb == 0)
	case verb == 'e':
		body = strconv.FormatFloat(f, 'e', precision, 64)
	default:
		body = strconv.FormatFloat(f, 'f', precision, 64)
	}
	if s.group != 0 {
		body = groupDigits(body, s.group)
	}
	if s.verb == '%' {
		body += "%"
	}
	if upperCase {
		body = strings.ToUpper(body)
	}
	return signed(negative, s, body)
}

// generalFloat is C's %g; with pointed it keeps a ".0".
func generalFloat(f float64, precision int, keepZeros, pointed bool) string {
	e := strconv.FormatFloat(f, 'e', precision-1, 64)
	at := strings.IndexByte(e, 'e')
	exponent, _ := strconv.Atoi(e[at+1:])
	limit := precision
	if pointed {
		limit--
		if precision == 1 {
			limit = 1
		}
	}
	if exponent < -4 || exponent >= limit && (!pointed || exponent >= precision || exponent >= limit) {
		mantissa := e[:at]
		if !keepZeros && strings.Contains(mantissa, ".") {
			mantissa = strings.TrimRight(strings.TrimRight(mantissa, "0"), ".")
		}
		return mantissa + e[at:]
	}
	body := strconv.FormatFloat(f, 'f', max(precision-1-exponent, 0), 64)
	if !keepZeros && strings.Contains(body, ".") {
		body = strings.TrimRight(strings.TrimRight(body, "0"), ".")
	}
	if pointed && !strings.Contains(body, ".") {
		body += ".0"
	}
	return body
}

// groupDigits puts a separator between groups of three digits before the point.
func groupDigits(s string, sep byte) string {
	end := strings.IndexAny(s, ".e")
	if end < 0 {
		end = len(s)
	}
	if end > 0 && !isDigit(s[0]) {
		return s
	}
	var b strings.Builder
	for i := range end {
		if i > 0 && (end-i)%3 == 0 {
			b.WriteByte(sep)
		}
		b.WriteByte(s[i])
	}
	return b.String() + s[end:]
}

func formatInt(v Value, s spec) string {
	n := v.big()
	negative := n.Sign() < 0
	base, prefix := 10, ""
	switch s.verb {
	case 'x', 'X':
		base, prefix = 16, "0x"
	case 'o':
		base, prefix = 8, "0o"
	case 'b':
		base, prefix = 2, "0b"
	}
	body := new(big.Int).Abs(n).Text(base)
	if s.group != 0 {
		if base == 10 {
			body = groupDigits(body, s.group)
		} else {
			body = groupFours(body, s.group)
		}
	}
	if s.alternate {
		body = prefix + body
	}
	if s.verb == 'X' {
		body = strings.ToUpper(body)
	}
	return signed(negative, s, body)
}

func groupFours(s string, sep byte) string {
	var b strings.Builder
	for i := range len(s) {
		if i > 0 && (len(s)-i)%4 == 0 {
			b.WriteByte(sep)
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

func truncate(s string, n int) string {
	if n < 0 || n >= utf8.RuneCountInString(s) {
		return s
	}
	return s[:byteOffset(s, utf8.RuneCountInString(s), n)]
}

// percent is Python's text % values.
func (m *machine) percent(format, values Value) Value {
	src := format.str()
	items := []Value{values}
	isTuple := values.kind == KindTuple
	if isTuple {
		items = values.seq()
	}
	m.charge(2 * len(src))
	var out []byte
	next := 0
	take := func() Value {
		if next >= len(items) {
			raisef("TypeError", "not enough arguments for format string")
		}
		next++
		return items[next-1]
	}
	mapped := false
	for i := 0; i < len(src); {
		at := strings.IndexByte(src[i:], '%')
		if at < 0 {
			out = append(out, src[i:]...)
			break
		}
		out = append(out, src[i:i+at]...)
		i += at + 1
		s := spec{precision: -1}
		var value *Value
		if i < len(src) && src[i] == '(' {
			end := closing(src, i)
			if end < 0 {
				raisef("ValueError", "incomplete format key")
			}
			if values.kind != KindDict {
				raisef("TypeError", "format requires a mapping")
			}
			item, ok := values.dict().Get(src[i+1 : end])
			if !ok {
				raisef("KeyError", "%s", reprText(src[i+1:end]))
			}
			value, mapped = &item, true
			i = end + 1
		}
		for ; i < len(src) && strings.IndexByte("-+ #0", src[i]) >= 0; i++ {
			switch src[i] {
			case '-':
				s.align = '<'
			case '#':
				s.alternate = true
			case '0':
				s.zero = true
			case '+':
				s.sign = '+'
			default:
				if s.sign == 0 {
					s.sign = ' '
				}
			}
		}
		number := func(def int) int {
			if i < len(src) && src[i] == '*' {
				i++
				v := take()
				if !v.isInteger() {
					raisef("TypeError", "* wants int")
				}
				return int(min(max(index(v), -maxWidth), maxWidth))
			}
			n, digits := readInt(src[i:])
			i += digits
			if digits == 0 {
				return def
			}
			return n
		}
		if s.width = number(0); s.width < 0 {
			s.width, s.align = -s.width, '<'
		}
		if i < len(src) && src[i] == '.' {
			i++
			s.precision = max(number(0), 0)
		}
		for i < len(src) && strings.IndexByte("hlL", src[i]) >= 0 {
			i++
		}
		if i >= len(src) {
			raisef("ValueError", "incomplete format")
		}
		s.verb = src[i]
		i++
		if s.verb == '%' {
			out = append(out, '%')
			continue
		}
		if value == nil {
			v := take()
			value = &v
		}
		text := m.percentItem(*value, s, format.safe)
		m.charge(2 * len(text))
		out = append(out, text...)
	}
	if next < len(items) && !mapped && (isTuple || values.kind != KindDict) {
		if isTuple || next == 0 && !takesAny(values) {
			raisef("TypeError", "not all arguments converted during string formatting")
		}
	}
	m.charge(len(out))
	return like(format, string(out))
}

// takesAny tells whether "text" % v is allowed without a place for v: Python
// takes everything that has items for a mapping.
func takesAny(v Value) bool {
	return v.kind == KindDict || v.kind == KindList || v.kind == kindRange || v.kind == KindUndefined
}

func closing(s string, i int) int {
	depth := 0
	for ; i < len(s); i++ {
		switch s[i] {
		case '(':
			depth++
		case ')':
			if depth--; depth == 0 {
				return i
			}
		}
	}
	return -1
}

func readInt(s string) (n, digits int) {
	for digits < len(s) && isDigit(s[digits]) {
		n = n*10 + int(s[digits]-'0')
		if n > maxWidth {
			raisef("ValueError", "Too many decimal digits in format string")
		}
		digits++
	}
	return n, digits
}

func (m *machine) percentItem(v Value, s spec, escape bool) string {
	m.operands(v, &noArguments)
	m.chargeRepeat(int64(max(s.precision, 0)), 4)
	m.chargeInt(v)
	align := byte('>')
	var text string
	switch s.verb {
	case 's', 'r', 'a':
		switch s.verb {
		case 's':
			text = m.text(v)
		case 'r':
			text = string(m.appendRepr(nil, v, 0))
		default:
			text = string(m.appendASCII(nil, v))
		}
		text = truncate(text, s.precision)
		if escape && !v.safe {
			m.chargeRepeat(int64(len(text)), 5)
			text = escapeHTML(text)
		}
	case 'd', 'i', 'u':
		if !v.isNumber() {
			mustDefined(v)
			raisef("TypeError", "%%%c format: a real number is required, not %s", s.verb, typeName(v))
		}
		align = numberAlign(s)
		text = withPrecision(formatInt(toInt(v), spec{sign: s.sign}), s.precision)
	case 'x', 'X', 'o':
		if !v.isInteger() {
			mustDefined(v)
			raisef("TypeError", "%%%c format: an integer is required, not %s", s.verb, typeName(v))
		}
		align = numberAlign(s)
		text = withPrecision(formatInt(v, spec{sign: s.sign, verb: s.verb, alternate: s.alternate}), s.precision)
	case 'e', 'E', 'f', 'F', 'g', 'G':
		if !v.isNumber() {
			mustDefined(v)
			raisef("TypeError", "must be real number, not %s", typeName(v))
		}
		align = numberAlign(s)
		text = formatFloat(asFloat(v), s)
	case 'c':
		text = character(v)
	default:
		raisef("ValueError", "unsupported format character '%c' (0x%x)", s.verb, s.verb)
	}
	if align == '=' && s.align == 0 {
		s.fill = "0"
	}
	return m.pad(text, s, align)
}

func numberAlign(s spec) byte {
	if s.zero {
		return '='
	}
	return '>'
}

func withPrecision(text string, precision int) string {
	sign := 0
	if text != "" && !isDigit(text[0]) && strings.IndexByte("+- ", text[0]) >= 0 {
		sign = 1
	}
	if n := precision - (len(text) - sign); n > 0 {
		return text[:sign] + strings.Repeat("0", n) + text[sign:]
	}
	return text
}

func character(v Value) string {
	if v.kind == KindString && utf8.RuneCountInString(v.str()) == 1 {
		return v.str()
	}
	if !v.isInteger() {
		raisef("TypeError", "%%c requires int or char")
	}
	n, ok := v.small()
	if !ok || n < 0 || n > utf8.MaxRune || n >= 0xd800 && n < 0xe000 {
		raisef("OverflowError", "%%c arg not in range(0x110000)")
	}
	return string(rune(n))
}

// toInt is Python's int(v) of a number.
func toInt(v Value) Value {
	if v.kind != KindFloat {
		return plus(v)
	}
	f := v.float()
	if math.IsNaN(f) {
		raisef("ValueError", "cannot convert float NaN to integer")
	}
	if math.IsInf(f, 0) {
		raisef("OverflowError", "cannot convert float infinity to integer")
	}
	n, _ := floatToInt(math.Trunc(f))
	return fromBig(new(big.Int).Set(n))
}

func strFormat(m *machine, v Value, a *arguments) Value {
	m.charge(len(a.kw) * dictEntry)
	kwargs := NewDict(len(a.kw))
	for i, name := range a.names {
		kwargs.Set(name, a.kw[i])
	}
	f := formatter{m: m, pos: a.pos, kwargs: kwargs, escape: v.safe}
	return like(v, f.format(v.str(), 0))
}

func strFormatMap(m *machine, v Value, a *arguments) Value {
	a.positional("format_map", 1, 1)
	d, ok := a.pos[0].AsDict()
	if !ok {
		raisef("TypeError", "format requires a mapping")
	}
	f := formatter{m: m, kwargs: d, escape: v.safe}
	return like(v, f.format(v.str(), 0))
}

// formatter is Python's str.format in the sandbox.
type formatter struct {
	m      *machine
	pos    []Value
	kwargs *Dict
	auto   int // the next {} field, -1 after a numbered one
	manual bool
	escape bool
}

func (f *formatter) format(src string, depth int) string {
	if depth > 1 {
		raisef("ValueError", "Max string recursion exceeded")
	}
	f.m.charge(3 * len(src))
	f.m.work(4 * len(src))
	var out strings.Builder
	for i := 0; i < len(src); i++ {
		c := src[i]
		if c != '{' && c != '}' {
			out.WriteByte(c)
			continue
		}
		if i+1 < len(src) && src[i+1] == c {
			out.WriteByte(c)
			i++
			continue
		}
		if c == '}' {
			raisef("ValueError", "Single '}' encountered in format string")
		}
		end := i + 1
		for open := 1; ; end++ {
			if end >= len(src) {
				if end == i+1 {
					raisef("ValueError", "Single '{' encountered in format string")
				}
				raisef("ValueError", "expected '}' before end of string")
			}
			if src[end] == '{' {
				open++
			} else if src[end] == '}' {
				if open--; open == 0 {
					break
				}
			}
		}
		text := f.field(src[i+1:end], depth)
		f.m.charge(2 * len(text))
		out.WriteString(text)
		i = end
	}
	return out.String()
}

func (f *formatter) field(src string, depth int) string {
	name, format, conversion := src, "", byte(0)
	bracket := false
	for i := range len(src) {
		c := src[i]
		switch c {
		case '[':
			bracket = true
		case ']':
			bracket = false
		}
		if bracket || c != '!' && c != ':' {
			continue
		}
		name, format = src[:i], src[i:]
		if c == '!' {
			if len(format) < 2 || len(format) > 2 && format[2] != ':' {
				raisef("ValueError", "expected ':' after conversion specifier")
			}
			conversion, format = format[1], format[2:]
		}
		format = strings.TrimPrefix(format, ":")
		break
	}
	v := f.lookup(name)
	switch conversion {
	case 's':
		v = String(f.m.text(v))
	case 'r':
		v = String(string(f.m.appendRepr(nil, v, 0)))
	case 'a':
		v = String(string(f.m.appendASCII(nil, v)))
	case 0:
	default:
		raisef("ValueError", "Unknown conversion specifier %c", conversion)
	}
	if strings.Contains(format, "{") {
		format = f.format(format, depth+1)
	}
	text := f.m.formatValue(v, format)
	if f.escape && !v.safe {
		f.m.chargeRepeat(int64(len(text)), 5)
		text = escapeHTML(text)
	}
	return text
}

func (f *formatter) lookup(name string) Value {
	end := strings.IndexAny(name, ".[")
	if end < 0 {
		end = len(name)
	}
	first, rest := name[:end], name[end:]
	var v Value
	n, digits := readInt(first)
	switch {
	case first == "":
		if f.manual {
			raisef("ValueError", "cannot switch from manual field specification to automatic field numbering")
		}
		n = f.auto
		f.auto++
		v = f.positional(n)
	case digits == len(first):
		if f.auto > 0 {
			raisef("ValueError", "cannot switch from automatic field numbering to manual field specification")
		}
		f.manual = true
		v = f.positional(n)
	default:
		item, ok := f.kwargs.Get(first)
		if !ok {
			raisef("KeyError", "%s", reprText(first))
		}
		v = item
	}
	for rest != "" {
		if rest[0] == '.' {
			end = strings.IndexAny(rest[1:], ".[")
			if end < 0 {
				end = len(rest) - 1
			}
			v = f.m.getattr(v, rest[1:1+end])
			rest = rest[1+end:]
			continue
		}
		end = strings.IndexByte(rest, ']')
		if rest[0] != '[' || end < 0 {
			raisef("ValueError", "Missing ']' in format string")
		}
		key := String(rest[1:end])
		if n, digits := readInt(rest[1:end]); digits > 0 && digits == end-1 {
			key = Int(int64(n))
		}
		f.m.step()
		v = f.m.getitem(v, key)
		rest = rest[end+1:]
	}
	return v
}

func (f *formatter) positional(i int) Value {
	if i >= len(f.pos) {
		raisef("IndexError", "Replacement index %d out of range for positional args tuple", i)
	}
	return f.pos[i]
}

// formatValue is Python's format(v, text).
func (m *machine) formatValue(v Value, text string) string {
	if text == "" {
		return m.text(v)
	}
	switch v.kind {
	case KindString, KindInt, KindBool, KindFloat:
	default:
		mustDefined(v)
		raisef("TypeError", "unsupported format string passed to %s.__format__", typeName(v))
	}
	m.operands(v, &noArguments)
	s := parseSpec(text)
	m.chargeRepeat(int64(max(s.precision, 0)), 4)
	m.chargeInt(v)
	if v.kind == KindString {
		if s.verb != 0 && s.verb != 's' {
			raisef("ValueError", "Unknown format code '%c' for object of type 'str'", s.verb)
		}
		if s.sign != 0 || s.alternate || s.group != 0 || s.align == '=' {
			raisef("ValueError", "Invalid format specifier for str")
		}
		return m.pad(truncate(v.str(), s.precision), s, '<')
	}
	if v.kind == KindBool && s.verb == 0 {
		v = Int(int64(v.n))
	}
	if v.kind != KindFloat && strings.IndexByte("\x00dxXobnc", s.verb) >= 0 {
		if s.precision >= 0 {
			raisef("ValueError", "Precision not allowed in integer format specifier")
		}
		if s.verb == 'c' {
			return m.pad(character(v), s, '<')
		}
		return m.pad(formatInt(v, s), s, '>')
	}
	if strings.IndexByte("\x00eEfFgG%n", s.verb) < 0 {
		raisef("ValueError", "Unknown format code '%c' for object of type '%s'", s.verb, typeName(v))
	}
	return m.pad(formatFloat(asFloat(v), s), s, '>')
}

func parseSpec(text string) spec {
	s := spec{precision: -1}
	isAlign := func(c byte) bool { return strings.IndexByte("<>=^", c) >= 0 }
	_, size := utf8.DecodeRuneInString(text)
	i := 0
	switch {
	case len(text) > size && isAlign(text[size]):
		s.fill, s.align, i = text[:size], text[size], size+1
	case isAlign(text[0]):
		s.align, i = text[0], 1
	}
	skip := func(chars string) byte {
		if i < len(text) && strings.IndexByte(chars, text[i]) >= 0 {
			i++
			return text[i-1]
		}
		return 0
	}
	if s.sign = skip("+- "); s.sign == '-' {
		s.sign = 0
	}
	s.alternate = skip("#") != 0
	if skip("0") != 0 {
		if s.fill == "" {
			s.fill = "0"
		}
		if s.align == 0 {
			s.align = '='
		}
	}
	n, digits := readInt(text[i:])
	s.width, i = n, i+digits
	s.group = skip(",_")
	if skip(".") != 0 {
		n, digits = readInt(text[i:])
		if digits == 0 {
			raisef("ValueError", "Format specifier missing precision")
		}
		s.precision, i = n, i+digits
	}
	if i < len(text) {
		s.verb = text[i]
		i++
	}
	if i < len(text) {
		raisef("ValueError", "Invalid format specifier")
	}
	return s
}
