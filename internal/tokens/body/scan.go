package body

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/bits"
	"slices"
	"strconv"
	"unicode/utf8"

	"github.com/segmentio/asm/ascii"
)

// MaxDepth is the maximum nesting depth of arrays and objects. Deeper bodies are rejected with an
// *UnreadError, which bounds the stack. Engines stop near 1,000.
const MaxDepth = 512

// UnreadError reports why Kvlane cannot read a body that an engine may accept: Python's
// json.loads allows deeper nesting, UTF-16, UTF-32, and surrogates that are encoded in UTF-8.
type UnreadError struct{ Reason string }

func (e *UnreadError) Error() string { return "the body is not read: " + e.Reason }

// byteOrderMark may precede a body: Python decodes bytes that start with it as utf-8-sig.
const byteOrderMark = "\xef\xbb\xbf"

// SyntaxError reports where a body is not valid JSON.
type SyntaxError struct {
	Offset int    // byte offset in the body
	Path   string // JSON path of the innermost value at the offset, such as $.messages[3].content
	Reason string
}

func (e *SyntaxError) Error() string {
	return fmt.Sprintf("invalid JSON at byte %d (%s): %s", e.Offset, e.Path, e.Reason)
}

// Span is a half-open byte range of the body. The zero Span denotes an absent value; no value is empty.
type Span struct{ Start, End int }

// Present reports whether the span denotes a value.
func (s Span) Present() bool { return s.End > s.Start }

// Of returns the span's bytes.
func (s Span) Of(body []byte) []byte { return body[s.Start:s.End] }

// scanner checks JSON as the engines' reader, Python's json, does: RFC 8259 plus the numbers NaN, Infinity and
// -Infinity. Methods take the offset at which their value starts and return the offset after it, or -1 after setting
// err. The path of an error is collected while unwinding, so valid input pays nothing for it.
type scanner struct {
	b     []byte
	depth int
	err   *SyntaxError
	deep  bool     // err is about the depth
	lone  bool     // err is about a surrogate
	path  []string // innermost first
	long  bool     // some integer has more than LongestInteger digits
	// stopped ends the walk over an object's members, which returns -1 without an err.
	stopped bool
}

// LongestInteger is the maximum number of digits of an integer that Python's json accepts (sys.int_info.default_max_str_digits).
const LongestInteger = 4300

func (s *scanner) fail(at int, reason string) int {
	if s.err == nil {
		if at >= len(s.b) {
			at, reason = len(s.b), "unexpected end of input"
		}
		s.err = &SyntaxError{Offset: at, Reason: reason}
	}
	return -1
}

func (s *scanner) within(step string) int {
	s.path = append(s.path, step)
	return -1
}

// shortKey returns a key without its quotes for an error's path, truncated because clients may send very long ones.
func shortKey(key []byte) string {
	const most = 64
	if key = key[1 : len(key)-1]; len(key) > most {
		return string(key[:most]) + "…"
	}
	return string(key)
}

// maxSteps bounds the path in an error: of a longer one, only the first and last maxSteps steps are shown.
const maxSteps = 8

// stop ends the walk over an object. Only object's callback may call it.
func (s *scanner) stop() { s.stopped = true }

// finish adds the path to the error, or returns an *UnreadError instead.
func (s *scanner) finish() error {
	switch {
	case s.deep:
		return &UnreadError{fmt.Sprintf("it is nested deeper than %d at byte %d", MaxDepth, s.err.Offset)}
	case s.lone:
		return &UnreadError{"a string has a surrogate in UTF-8"}
	case wide(s.b):
		return &UnreadError{"it seems to be UTF-16 or UTF-32"}
	}
	path := []byte("$")
	for i, step := range slices.Backward(s.path) {
		switch {
		case i < maxSteps || i >= len(s.path)-maxSteps:
			path = append(path, step...)
		case i == maxSteps:
			path = append(path, "…"...)
		}
	}
	s.err.Path = string(path)
	return s.err
}

// wide reports whether Python's json would decode b as UTF-16 or UTF-32, which it detects by a
// byte order mark or by zeros next to the first character.
func wide(b []byte) bool {
	if len(b) < 2 {
		return false
	}
	return b[0] == 0 || b[1] == 0 || b[0] == 0xff && b[1] == 0xfe || b[0] == 0xfe && b[1] == 0xff
}

// failDeep is fail for a value that is nested too deeply.
func (s *scanner) failDeep(at int) int {
	s.deep = s.err == nil
	return s.fail(at, "")
}

// noKey is fail where a key was expected.
func (s *scanner) noKey(at int) int { return s.fail(at, "a key was expected, not "+s.found(at)) }

// found quotes the character at an offset.
func (s *scanner) found(at int) string {
	if at >= len(s.b) {
		return "the end"
	}
	r, _ := utf8.DecodeRune(s.b[at:])
	return strconv.QuoteRune(r)
}

// begin returns where the body's value starts.
func (s *scanner) begin() int {
	if len(s.b) >= len(byteOrderMark) && string(s.b[:len(byteOrderMark)]) == byteOrderMark {
		return s.space(len(byteOrderMark))
	}
	return s.space(0)
}

func (s *scanner) space(i int) int {
	for i < len(s.b) {
		switch s.b[i] {
		case ' ', '\n', '\r', '\t':
			i++
		default:
			return i
		}
	}
	return i
}

func (s *scanner) value(i int) int {
	if i >= len(s.b) {
		return s.fail(i, "")
	}
	switch c := s.b[i]; {
	case c == '"':
		return s.str(i)
	case c == '{':
		return s.object(i, nil)
	case c == '[':
		return s.array(i, nil)
	case c == '-' && i+1 < len(s.b) && s.b[i+1] == 'I':
		return s.literal(i, "-Infinity")
	case c == '-' || c-'0' < 10:
		return s.number(i)
	case c == 't':
		return s.literal(i, "true")
	case c == 'f':
		return s.literal(i, "false")
	case c == 'n':
		return s.literal(i, "null")
	case c == 'N':
		return s.literal(i, "NaN")
	case c == 'I':
		return s.literal(i, "Infinity")
	default:
		return s.fail(i, "a value was expected, not "+s.found(i))
	}
}

func (s *scanner) literal(i int, word string) int {
	if len(s.b)-i >= len(word) && string(s.b[i:i+len(word)]) == word {
		return i + len(word)
	}
	return s.fail(i, word+" was expected")
}

// object walks the members. It passes the spans of every key (including its quotes) and value to each, unless each is nil.
func (s *scanner) object(i int, each func(key, value Span)) int { return s.members(i, nil, each) }

// members is object that reads values with read, unless read is nil.
func (s *scanner) members(i int, read func(key []byte, at int) int, each func(key, value Span)) int {
	if s.depth++; s.depth > MaxDepth {
		return s.failDeep(i)
	}
	i = s.space(i + 1)
	if i < len(s.b) && s.b[i] == '}' {
		s.depth--
		return i + 1
	}
	for {
		if i >= len(s.b) || s.b[i] != '"' {
			return s.noKey(i)
		}
		key := Span{Start: i}
		if i = s.str(i); i < 0 {
			return -1
		}
		key.End = i
		if i = s.space(i); i >= len(s.b) || s.b[i] != ':' {
			return s.fail(i, "':' was expected")
		}
		value := Span{Start: s.space(i + 1)}
		if read == nil {
			i = s.value(value.Start)
		} else {
			i = read(key.Of(s.b), value.Start)
		}
		if i < 0 {
			return s.within("." + shortKey(key.Of(s.b)))
		}
		value.End = i
		if each != nil {
			if each(key, value); s.stopped {
				return -1
			}
		}
		if i = s.space(i); i >= len(s.b) {
			return s.fail(i, "")
		}
		switch s.b[i] {
		case ',':
			i = s.space(i + 1)
		case '}':
			s.depth--
			return i + 1
		default:
			return s.fail(i, "',' or '}' was expected")
		}
	}
}

// array walks the elements. It passes the span of every element to each, unless each is nil.
func (s *scanner) array(i int, each func(element Span)) int {
	if s.depth++; s.depth > MaxDepth {
		return s.failDeep(i)
	}
	i = s.space(i + 1)
	if i < len(s.b) && s.b[i] == ']' {
		s.depth--
		return i + 1
	}
	if i = s.element(i, 0, each); i < 0 {
		return -1
	}
	return s.elements(i, 1, each)
}

// element reads the array element with index n, which starts at i.
func (s *scanner) element(i, n int, each func(element Span)) int {
	element := Span{Start: i}
	if i = s.value(i); i < 0 {
		return s.within("[" + strconv.Itoa(n) + "]")
	}
	element.End = i
	if each != nil {
		each(element)
	}
	return i
}

// elements walks the rest of an array after its first n elements.
func (s *scanner) elements(i, n int, each func(element Span)) int {
	for ; ; n++ {
		if i = s.space(i); i >= len(s.b) {
			return s.fail(i, "")
		}
		switch s.b[i] {
		case ',':
			if i = s.element(s.space(i+1), n, each); i < 0 {
				return -1
			}
		case ']':
			s.depth--
			return i + 1
		default:
			return s.fail(i, "',' or ']' was expected")
		}
	}
}

func (s *scanner) digits(i int) int {
	for i < len(s.b) && s.b[i]-'0' < 10 {
		i++
	}
	return i
}

func (s *scanner) number(i int) int {
	if s.b[i] == '-' {
		i++
	}
	start := i
	switch i = s.digits(i); {
	case i == start:
		return s.fail(i, "a digit was expected")
	case s.b[start] == '0' && i > start+1:
		return s.fail(start, "a number must not start with 0")
	}
	if i-start > LongestInteger && (i == len(s.b) || s.b[i] != '.' && s.b[i]|0x20 != 'e') {
		s.long = true
	}
	if i < len(s.b) && s.b[i] == '.' {
		start = i + 1
		if i = s.digits(start); i == start {
			return s.fail(i, "a digit was expected")
		}
	}
	if i < len(s.b) && s.b[i]|0x20 == 'e' {
		if i++; i < len(s.b) && (s.b[i] == '+' || s.b[i] == '-') {
			i++
		}
		start = i
		if i = s.digits(start); i == start {
			return s.fail(i, "a digit was expected")
		}
	}
	return i
}

const (
	ones  = 0x0101010101010101
	highs = 0x8080808080808080
)

// stops sets the high bit of the first byte of w that is a quote, a backslash or a control character. Bytes after the
// first match may be marked wrongly (borrow); bytes of 0x80 and above are never the first.
func stops(w uint64) uint64 {
	quote := w ^ ones*'"'
	slash := w ^ ones*'\\'
	return ((quote-ones)&^quote | (slash-ones)&^slash | (w-ones*0x20)&^w) & highs
}

// run returns the offset of the first quote, backslash or control character at or after i, or
// len(b). It ORs the high bits of the bytes it passed into nonASCII.
func run(b []byte, i int, nonASCII *uint64) int {
	high := *nonASCII
	for i+16 <= len(b) {
		v := binary.LittleEndian.Uint64(b[i:])
		w := binary.LittleEndian.Uint64(b[i+8:])
		if m := stops(v); m != 0 {
			*nonASCII = high | v
			return i + bits.TrailingZeros64(m)>>3
		}
		if m := stops(w); m != 0 {
			*nonASCII = high | v | w
			return i + 8 + bits.TrailingZeros64(m)>>3
		}
		high |= v | w
		i += 16
	}
	for ; i < len(b); i++ {
		c := b[i]
		if c == '"' || c == '\\' || c < 0x20 {
			break
		}
		high |= uint64(c)
	}
	*nonASCII = high
	return i
}

// plainURL returns the length of the data: URL in the string at the start of b, -1 if there is none or it has escapes.
func plainURL(b []byte) int {
	if len(b) <= 5 || string(b[:5]) != "data:" {
		return -1
	}
	const piece = 4 << 10 // stays in the processor's first cache while it is read three times
	for at := 0; at < len(b); at += piece {
		part := b[at:min(at+piece, len(b))]
		n := bytes.IndexByte(part, '"')
		if n >= 0 {
			part = part[:n]
		}
		if !ascii.ValidPrint(part) || bytes.IndexByte(part, '\\') >= 0 {
			return -1
		}
		if n >= 0 {
			return at + n
		}
	}
	return -1
}

// surrogateFirst reports whether the first bytes of b that are not UTF-8 are a surrogate.
func surrogateFirst(b []byte) bool {
	for r, n := utf8.DecodeRune(b); r != utf8.RuneError || n > 1; r, n = utf8.DecodeRune(b) {
		b = b[n:]
	}
	return len(b) > 2 && b[0] == 0xed && b[1]&0xe0 == 0xa0 && b[2]&0xc0 == 0x80
}

// str scans a string from its opening quote. Invalid UTF-8 is rejected, as in every engine's JSON
// reader; surrogates are left to the engine.
func (s *scanner) str(i int) int {
	start := i + 1
	if n := plainURL(s.b[start:]); n >= 0 {
		return start + n + 1
	}
	var high uint64
	for i = start; ; {
		if i = run(s.b, i, &high); i >= len(s.b) {
			return s.fail(i, "")
		}
		switch c := s.b[i]; {
		case c == '"':
			if high&highs != 0 && !utf8.Valid(s.b[start:i]) {
				s.lone = s.err == nil && surrogateFirst(s.b[start:i])
				return s.fail(start, "a string must be UTF-8")
			}
			return i + 1
		case c < 0x20:
			return s.fail(i, "a control character in a string must be escaped")
		}
		if i+1 >= len(s.b) {
			return s.fail(i+1, "")
		}
		switch s.b[i+1] {
		case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
			i += 2
		case 'u':
			if _, ok := hex4(s.b, i+2); !ok {
				return s.fail(i, "\\u needs four hexadecimal digits")
			}
			i += 6
		default:
			return s.fail(i, "unknown escape")
		}
	}
}

func hex4(b []byte, i int) (rune, bool) {
	if i+4 > len(b) {
		return 0, false
	}
	var r rune
	for _, c := range b[i : i+4] {
		switch {
		case c-'0' < 10:
			r = r<<4 | rune(c-'0')
		case c|0x20 >= 'a' && c|0x20 <= 'f':
			r = r<<4 | rune(c|0x20-'a'+10)
		default:
			return 0, false
		}
	}
	return r, true
}

// Valid checks one JSON text. It returns nil, a *SyntaxError or an *UnreadError.
func Valid(body []byte) error {
	s := scanner{b: body}
	return s.end(s.value(s.begin()))
}

// end checks that nothing follows the body's value, which ends at i. It returns what Valid does.
func (s *scanner) end(i int) error {
	if i >= 0 {
		if i = s.space(i); i != len(s.b) {
			i = s.fail(i, "nothing may follow the value")
		}
	}
	if i < 0 {
		return s.finish()
	}
	return nil
}
