package jinja

import (
	"cmp"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

type tokenKind uint8

const (
	tokEOF tokenKind = iota
	tokData
	tokVariableBegin
	tokVariableEnd
	tokBlockBegin
	tokBlockEnd
	tokName
	tokString
	tokNumber
	tokOperator
)

type token struct {
	kind  tokenKind
	text  string // data, name, operator
	value Value  // string, number
	at    place
}

// is reports whether t has this kind and text.
func (t token) is(kind tokenKind, text string) bool { return t.kind == kind && t.text == text }

func (t token) describe() string {
	if t.kind == tokNumber && t.value.kind == KindFloat {
		return "float"
	}
	return cmp.Or(tokenNames[t.kind], t.text)
}

// tokenNames describe tokens in errors; others are shown as written.
var tokenNames = map[tokenKind]string{
	tokEOF: "end of template", tokData: "template data / text", tokVariableBegin: "begin of print statement", tokVariableEnd: "end of print statement",
	tokBlockBegin: "begin of statement block", tokBlockEnd: "end of statement block", tokString: "string", tokNumber: "integer",
}

// lexer tokenizes a template with trim_blocks and lstrip_blocks on and keep_trailing_newline off,
// which is how transformers configures Jinja2.
type lexer struct {
	src    string
	pos    int
	at     place
	tokens []token
	// lineStart: the last match ended with a newline, or there was none yet.
	lineStart bool
	// closers holds the closing brackets expected inside a tag.
	closers []byte
}

func tokenize(source string) []token {
	source = strings.ReplaceAll(source, "\r\n", "\n")
	source = strings.ReplaceAll(source, "\r", "\n")
	source = strings.TrimSuffix(source, "\n")
	l := &lexer{src: source, at: place{1, 1}, lineStart: true}
	for l.pos < len(l.src) {
		l.root()
	}
	l.add(token{kind: tokEOF})
	return l.tokens
}

// add appends a token that starts at the current position.
func (l *lexer) add(t token) {
	t.at = l.at
	l.tokens = append(l.tokens, t)
}

// advance moves to end and counts lines and columns.
func (l *lexer) advance(end int) {
	if end <= l.pos {
		return
	}
	text := l.src[l.pos:end]
	if n := strings.Count(text, "\n"); n > 0 {
		l.at = place{l.at.line + n, 1}
		text = text[strings.LastIndexByte(text, '\n')+1:]
	}
	l.at.column += utf8.RuneCountInString(text)
	l.lineStart = text == ""
	l.pos = end
}

func skipSpace(s string, i int) int { return len(s) - len(strings.TrimLeftFunc(s[i:], isSpace)) }

// isSpace is Python's str.isspace for one character.
func isSpace(r rune) bool {
	if r < 0x80 {
		return r == ' ' || r >= 9 && r <= 13 || r >= 0x1c && r <= 0x1f
	}
	return r == 0x85 || r == 0xa0 || r == 0x1680 || r >= 0x2000 && r <= 0x200a ||
		r == 0x2028 || r == 0x2029 || r == 0x202f || r == 0x205f || r == 0x3000
}

// nextTag finds the next "{{", "{%" or "{#".
func nextTag(s string, from int) int {
	for i := from; ; i++ {
		j := strings.IndexByte(s[i:], '{')
		if j < 0 || i+j+1 >= len(s) {
			return -1
		}
		i += j
		if c := s[i+1]; c == '{' || c == '%' || c == '#' {
			return i
		}
	}
}

// data adds the text before a tag, stripped according to the tag's sign.
func (l *lexer) data(end int, sign byte, isVariable bool) {
	text := l.src[l.pos:end]
	switch {
	case sign == '-':
		text = strings.TrimRightFunc(text, isSpace)
	case sign != '+' && !isVariable:
		start := strings.LastIndexByte(text, '\n') + 1
		if (start > 0 || l.lineStart) && start < len(text) && skipSpace(text, start) == len(text) {
			text = text[:start]
		}
	}
	if text != "" {
		l.add(token{kind: tokData, text: text})
	}
	l.advance(end)
}

// signAt returns the sign at i, 0 if there is none, and the position after it.
func signAt(s string, i int) (sign byte, next int) {
	if i < len(s) && (s[i] == '-' || s[i] == '+') {
		return s[i], i + 1
	}
	return 0, i
}

func (l *lexer) root() {
	at := nextTag(l.src, l.pos)
	if at < 0 {
		l.add(token{kind: tokData, text: l.src[l.pos:]})
		l.advance(len(l.src))
		return
	}
	sign, body := signAt(l.src, at+2)
	switch l.src[at+1] {
	case '{':
		l.data(at, sign, true)
		l.add(token{kind: tokVariableBegin})
		l.advance(body)
		l.tag("}}", tokVariableEnd)
	case '#':
		l.data(at, sign, false)
		l.advance(body)
		l.comment()
	default:
		if end, ok := rawBegin(l.src, body); ok {
			l.data(at, sign, false)
			l.advance(end)
			l.raw()
			return
		}
		l.data(at, sign, false)
		l.add(token{kind: tokBlockBegin})
		l.advance(body)
		l.tag("%}", tokBlockEnd)
	}
}

// rawBegin matches what follows "{%" in {% raw %}.
func rawBegin(s string, i int) (end int, ok bool) {
	i = skipSpace(s, i)
	if !strings.HasPrefix(s[i:], "raw") {
		return 0, false
	}
	i = skipSpace(s, i+3)
	switch {
	case strings.HasPrefix(s[i:], "-%}"):
		return skipSpace(s, i+3), true
	case strings.HasPrefix(s[i:], "%}"):
		return i + 2, true
	}
	return 0, false
}

// tagEnd matches the end of a block or a comment at i, including the white space that it strips.
func tagEnd(s string, i int, mark string) (end int, ok bool) {
	rest := s[i:]
	switch {
	case strings.HasPrefix(rest, "+"+mark):
		return i + 3, true
	case strings.HasPrefix(rest, "-"+mark):
		return skipSpace(s, i+3), true
	case strings.HasPrefix(rest, mark):
		i += 2
		if i < len(s) && s[i] == '\n' {
			i++
		}
		return i, true
	}
	return 0, false
}

func (l *lexer) comment() {
	for i := l.pos; i < len(l.src); i++ {
		if end, ok := tagEnd(l.src, i, "#}"); ok {
			l.advance(end)
			return
		}
	}
	syntaxErrorf(l.at, "Missing end of comment tag")
}

func (l *lexer) raw() {
	for i := l.pos; i < len(l.src); i++ {
		if !strings.HasPrefix(l.src[i:], "{%") {
			continue
		}
		sign, j := signAt(l.src, i+2)
		j = skipSpace(l.src, j)
		if !strings.HasPrefix(l.src[j:], "endraw") {
			continue
		}
		j = skipSpace(l.src, j+len("endraw"))
		if end, ok := tagEnd(l.src, j, "%}"); ok {
			l.data(i, sign, false)
			l.advance(end)
			return
		}
	}
	syntaxErrorf(l.at, "Missing end of raw directive")
}

var operators = []string{
	"**", "//", "==", "!=", ">=", "<=",
	"+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<", "=", ".", ":", "|", ",", ";",
}

// tag reads the inside of {{ }} or {% %} up to its end.
func (l *lexer) tag(mark string, end tokenKind) {
	l.closers = l.closers[:0]
	for l.pos < len(l.src) {
		if len(l.closers) == 0 && l.tagEnd(mark, end) {
			return
		}
		r, _ := utf8.DecodeRuneInString(l.src[l.pos:])
		switch {
		case isSpace(r):
			l.advance(skipSpace(l.src, l.pos))
		case l.number():
		case inName(r):
			l.name()
		case (r == '"' || r == '\'') && l.text(byte(r)):
		default:
			l.operator(r)
		}
	}
}

func (l *lexer) tagEnd(mark string, kind tokenKind) bool {
	var end int
	var ok bool
	if kind == tokBlockEnd {
		end, ok = tagEnd(l.src, l.pos, mark)
	} else if rest := l.src[l.pos:]; strings.HasPrefix(rest, "-"+mark) {
		end, ok = skipSpace(l.src, l.pos+3), true
	} else if strings.HasPrefix(rest, mark) {
		end, ok = l.pos+2, true
	}
	if ok {
		l.add(token{kind: kind})
		l.advance(end)
	}
	return ok
}

func (l *lexer) operator(r rune) {
	for _, op := range operators {
		if !strings.HasPrefix(l.src[l.pos:], op) {
			continue
		}
		switch op {
		case "{":
			l.closers = append(l.closers, '}')
		case "(":
			l.closers = append(l.closers, ')')
		case "[":
			l.closers = append(l.closers, ']')
		case "}", ")", "]":
			n := len(l.closers)
			if n == 0 {
				syntaxErrorf(l.at, "unexpected '%s'", op)
			}
			if want := l.closers[n-1]; want != op[0] {
				syntaxErrorf(l.at, "unexpected '%s', expected '%c'", op, want)
			}
			l.closers = l.closers[:n-1]
		}
		l.add(token{kind: tokOperator, text: op})
		l.advance(l.pos + len(op))
		return
	}
	syntaxErrorf(l.at, "unexpected char %s at %d", reprText(string(r)), utf8.RuneCountInString(l.src[:l.pos]))
}

func inName(r rune) bool {
	return r == '_' || r == '·' || unicode.IsLetter(r) || unicode.IsDigit(r) || unicode.IsMark(r)
}

func (l *lexer) name() {
	rest := l.src[l.pos:]
	text := rest[:len(rest)-len(strings.TrimLeftFunc(rest, inName))]
	if r, _ := utf8.DecodeRuneInString(text); r != '_' && !unicode.IsLetter(r) {
		syntaxErrorf(l.at, "Invalid character in identifier")
	}
	l.add(token{kind: tokName, text: text})
	l.advance(l.pos + len(text))
}

// digits matches \d(_?\d)* and returns its end, or i if there is none.
func digits(s string, i int) int {
	if i >= len(s) || !isDigit(s[i]) {
		return i
	}
	for i++; i < len(s); i++ {
		if s[i] == '_' && i+1 < len(s) && isDigit(s[i+1]) {
			i++
			continue
		}
		if !isDigit(s[i]) {
			break
		}
	}
	return i
}

func (l *lexer) number() bool {
	s, start := l.src, l.pos
	if !isDigit(s[start]) {
		return false
	}
	if end := floatEnd(s, start); end > 0 {
		f, err := strconv.ParseFloat(strings.ReplaceAll(s[start:end], "_", ""), 64)
		if err != nil && f == 0 {
			syntaxErrorf(l.at, "invalid float")
		}
		l.add(token{kind: tokNumber, value: Float(f)})
		l.advance(end)
		return true
	}
	end := digits(s, start)
	text := strings.ReplaceAll(s[start:end], "_", "")
	if s[start] == '0' && (strings.Trim(text, "0") != "" || end < len(s) && strings.IndexByte("bBoOxX", s[end]) >= 0) {
		refusef(l.at, "a number with a prefix")
	}
	n, ok := parseInt(text)
	if !ok {
		refusef(l.at, "an integer of more than %d digits", maxIntDigits)
	}
	l.add(token{kind: tokNumber, value: n})
	l.advance(end)
	return true
}

// floatEnd returns the end of the float at start, 0 if there is none.
func floatEnd(s string, start int) int {
	if start > 0 && s[start-1] == '.' {
		return 0
	}
	i := digits(s, start)
	end := 0
	if i < len(s) && s[i] == '.' {
		if j := digits(s, i+1); j > i+1 {
			i, end = j, j
		}
	}
	if i < len(s) && s[i]|32 == 'e' {
		j := i + 1
		if j < len(s) && (s[j] == '+' || s[j] == '-') {
			j++
		}
		if k := digits(s, j); k > j {
			end = k
		}
	}
	return end
}

func (l *lexer) text(quote byte) bool {
	for i := l.pos + 1; i < len(l.src); i++ {
		switch l.src[i] {
		case '\\':
			i++
		case quote:
			l.add(token{kind: tokString, value: String(l.unescape(l.src[l.pos+1 : i]))})
			l.advance(i + 1)
			return true
		}
	}
	return false
}

// unescape replaces Python's escapes in the text between two quotes.
func (l *lexer) unescape(s string) string {
	if strings.IndexByte(s, '\\') < 0 {
		return s
	}
	out := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		if s[i] != '\\' || i+1 >= len(s) {
			out = append(out, s[i])
			continue
		}
		i++
		c := s[i]
		size := 0
		switch {
		case stringEscapes[c] != 0:
			out = append(out, stringEscapes[c])
		case c == '\n':
		case c == 'x':
			size = 2
		case c == 'u':
			size = 4
		case c == 'U':
			size = 8
		case isDigit(c) || c == 'N' || c >= utf8.RuneSelf:
			refusef(l.at, "the escape %q", s[i-1:i+1])
		default:
			out = append(out, '\\', c)
		}
		if size == 0 {
			continue
		}
		if i+1+size > len(s) {
			syntaxErrorf(l.at, "truncated \\%c escape", c)
		}
		n, err := strconv.ParseUint(s[i+1:i+1+size], 16, 32)
		if err != nil || !utf8.ValidRune(rune(n)) {
			syntaxErrorf(l.at, "illegal Unicode character")
		}
		out = utf8.AppendRune(out, rune(n))
		i += size
	}
	return string(out)
}

var stringEscapes = [256]byte{
	'\\': '\\', '\'': '\'', '"': '"', 'a': 7, 'b': 8, 'f': 12, 'n': 10, 'r': 13, 't': 9, 'v': 11,
}
