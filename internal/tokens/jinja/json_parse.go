package jinja

import (
	"errors"
	"fmt"
	"math/bits"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
	"unsafe"

	"github.com/segmentio/asm/ascii"
)

// Errors of ParseJSON other than syntax errors.
var (
	// ErrLoneSurrogate: an escape such as \ud800 without its other half. Python accepts it, but
	// no tokenizer accepts the resulting str.
	ErrLoneSurrogate = errors.New("lone surrogate")
	// ErrJSONDepth: lists and objects are nested deeper than maxJSONDepth.
	ErrJSONDepth = errors.New("nested too deeply")
	// ErrIntDigits: an int has more digits than Python accepts.
	ErrIntDigits = errors.New("exceeds the limit for integer string conversion")
	// ErrInvalidUTF8: the document is not UTF-8.
	ErrInvalidUTF8 = errors.New("invalid UTF-8")
	// ErrStopped: the stop channel was closed. The caller of a Model gets the error of its context instead.
	ErrStopped = errors.New("the reading of JSON was stopped")
)

// maxJSONDepth is below the depth at which Python raises RecursionError.
const maxJSONDepth = 500

// maxIntDigits is the maximum number of digits of an int that Python reads (sys.int_info.default_max_str_digits).
const maxIntDigits = 4300

// ParseJSON parses a document like Python's json.loads: order and big ints are preserved, of duplicate keys the last
// value wins in the position of the first, and NaN and Infinity are numbers. Strings without escapes alias data, which
// must not be modified while the value is in use.
func ParseJSON(data []byte) (Value, error) { return ParseJSONInto(nil, nil, data, false) }

// ParseJSONInto is ParseJSON for a value that is used briefly: strings with escapes are appended to texts, unless it is
// nil, and are valid until that is shortened. With surrogates it accepts lone ones, as Python does: each becomes the
// three bytes that UTF-8 would use for it. Such a string is not valid text. That matters only if it is printed, and
// then no tokenizer accepts the prompt. It ends with ErrStopped soon after stop is closed.
func ParseJSONInto(stop <-chan struct{}, texts *[]byte, data []byte, surrogates bool) (Value, error) {
	p := jsonParser{src: unsafe.String(unsafe.SliceData(data), len(data)), texts: texts, surrogates: surrogates, stop: stop}
	if !ascii.ValidString(p.src) && !utf8.ValidString(p.src) {
		return Value{}, fmt.Errorf("parse JSON: %w", ErrInvalidUTF8)
	}
	p.src = strings.TrimPrefix(p.src, "\ufeff")
	p.space()
	v, err := p.value(0)
	if err == nil {
		if p.space(); p.pos < len(p.src) {
			err = errors.New("extra data")
		}
	}
	if err != nil {
		return Value{}, fmt.Errorf("parse JSON at byte %d: %w", p.pos, err)
	}
	return v, nil
}

type jsonParser struct {
	src        string
	texts      *[]byte // see ParseJSONInto
	surrogates bool    // accept lone surrogates
	stop       <-chan struct{}
	seen       uint // values and members so far
	pos        int
	items      []Value // stack of the items of unfinished lists
	pairs      []entry // the same for objects
}

// stopped counts a value or a member, and checks the stop channel at least once per millisecond.
func (p *jsonParser) stopped() bool {
	if p.seen++; p.seen%(1<<12) != 0 {
		return false
	}
	select {
	case <-p.stop:
		return true
	default:
		return false
	}
}

func (p *jsonParser) space() {
	for p.pos < len(p.src) {
		switch p.src[p.pos] {
		case ' ', '\t', '\n', '\r':
			p.pos++
		default:
			return
		}
	}
}

func (p *jsonParser) value(depth int) (Value, error) {
	switch {
	case p.pos >= len(p.src):
		return Value{}, errors.New("expecting value")
	case p.stopped():
		return Value{}, ErrStopped
	}
	switch c := p.src[p.pos]; c {
	case '"':
		s, err := p.text()
		return String(s), err
	case '{':
		return p.objectValue(depth + 1)
	case '[':
		return p.array(depth + 1)
	default:
		for _, w := range jsonWords {
			if c == w.text[0] && strings.HasPrefix(p.src[p.pos:], w.text) {
				p.pos += len(w.text)
				return w.value, nil
			}
		}
		return p.number()
	}
}

var jsonWords = []struct {
	text  string
	value Value
}{
	{"null", None()},
	{"true", Bool(true)},
	{"false", Bool(false)},
	{"NaN", Float(nan)},
	{"Infinity", Float(inf)},
	{"-Infinity", Float(-inf)},
}

func (p *jsonParser) array(depth int) (Value, error) {
	if depth > maxJSONDepth {
		return Value{}, ErrJSONDepth
	}
	p.pos++
	p.space()
	if p.pos < len(p.src) && p.src[p.pos] == ']' {
		p.pos++
		return List(nil), nil
	}
	start := len(p.items)
	for more := true; more; {
		v, err := p.value(depth)
		if err != nil {
			return Value{}, err
		}
		p.items = append(p.items, v)
		if more, err = p.more(']'); err != nil {
			return Value{}, err
		}
	}
	items := append(make([]Value, 0, len(p.items)-start), p.items[start:]...)
	p.items = p.items[:start]
	return List(items), nil
}

// more reads what follows an element: a comma, or the end of its list or object.
func (p *jsonParser) more(end byte) (bool, error) {
	p.space()
	switch {
	case p.pos < len(p.src) && p.src[p.pos] == ',':
		p.pos++
		p.space()
		return true, nil
	case p.pos < len(p.src) && p.src[p.pos] == end:
		p.pos++
		return false, nil
	}
	return false, errors.New("expecting ',' delimiter")
}

func (p *jsonParser) objectValue(depth int) (Value, error) {
	if depth > maxJSONDepth {
		return Value{}, ErrJSONDepth
	}
	p.pos++
	p.space()
	if p.pos < len(p.src) && p.src[p.pos] == '}' {
		p.pos++
		return FromDict(new(Dict)), nil
	}
	start := len(p.pairs)
	for more := true; more; {
		if p.pos >= len(p.src) || p.src[p.pos] != '"' {
			return Value{}, errors.New("expecting property name enclosed in double quotes")
		}
		key, err := p.text()
		if err != nil {
			return Value{}, err
		}
		p.space()
		if p.pos >= len(p.src) || p.src[p.pos] != ':' {
			return Value{}, errors.New("expecting ':' delimiter")
		}
		p.pos++
		p.space()
		v, err := p.value(depth)
		if err != nil {
			return Value{}, err
		}
		p.pairs = append(p.pairs, entry{String(key), v})
		if more, err = p.more('}'); err != nil {
			return Value{}, err
		}
	}
	d := NewDict(len(p.pairs) - start)
	for i := range p.pairs[start:] {
		if p.stopped() {
			return Value{}, ErrStopped
		}
		d.Set(p.pairs[start+i].key.str(), p.pairs[start+i].value) // of duplicate keys the last one wins
	}
	p.pairs = p.pairs[:start]
	return FromDict(d), nil
}

// number reads an int or a float; the grammar is stricter than Go's.
func (p *jsonParser) number() (Value, error) {
	start := p.pos
	at := func(i int) byte {
		if i < len(p.src) {
			return p.src[i]
		}
		return 0
	}
	i := p.pos
	if at(i) == '-' {
		i++
	}
	digits := i
	switch {
	case at(i) == '0':
		i++
	case at(i) >= '1' && at(i) <= '9':
		for isDigit(at(i)) {
			i++
		}
	default:
		return Value{}, errors.New("expecting value")
	}
	digitsEnd := i
	isFloat := false
	if at(i) == '.' && isDigit(at(i+1)) {
		isFloat = true
		for i++; isDigit(at(i)); i++ {
		}
	}
	if at(i) == 'e' || at(i) == 'E' {
		j := i + 1
		if at(j) == '+' || at(j) == '-' {
			j++
		}
		if isDigit(at(j)) {
			isFloat = true
			for i = j; isDigit(at(i)); i++ {
			}
		}
	}
	p.pos = i
	text := p.src[start:i]
	if isFloat {
		f, err := strconv.ParseFloat(text, 64)
		if err != nil && !errors.Is(err, strconv.ErrRange) {
			return Value{}, err
		}
		return Float(f), nil
	}
	if digitsEnd-digits > maxIntDigits {
		return Value{}, ErrIntDigits
	}
	if n, err := strconv.ParseInt(text, 10, 64); err == nil {
		return Int(n), nil
	}
	return BigInt(text), nil
}

func isDigit(c byte) bool { return c >= '0' && c <= '9' }

// text reads a string whose opening quote is at pos.
func (p *jsonParser) text() (string, error) {
	p.pos++
	start := p.pos
	if s := p.src[start:]; strings.HasPrefix(s, "data:") { // often a large URL
		if n := strings.IndexByte(s, '"'); n > 0 && ascii.ValidPrintString(s[:n]) && strings.IndexByte(s[:n], '\\') < 0 {
			p.pos = start + n + 1
			return s[:n], nil
		}
	}
	i := plainEnd(p.src, start)
	switch {
	case i >= len(p.src):
		return "", errors.New("unterminated string")
	case p.src[i] == '"':
		p.pos = i + 1
		return p.src[start:i], nil
	case p.src[i] == '\\':
		return p.escaped(start, i)
	}
	p.pos = i
	return "", errors.New("invalid control character")
}

// plainEnd returns the first position at or after i with a quote, a backslash or a control character, or the length of s.
func plainEnd(s string, i int) int {
	const ones, highs = 0x0101010101010101, 0x8080808080808080
	for ; i+8 <= len(s); i += 8 {
		b := s[i : i+8]
		v := uint64(b[0]) | uint64(b[1])<<8 | uint64(b[2])<<16 | uint64(b[3])<<24 | uint64(b[4])<<32 | uint64(b[5])<<40 | uint64(b[6])<<48 | uint64(b[7])<<56
		quote, slash := v^ones*'"', v^ones*'\\'
		// A byte of x is below n, or zero, where x-n*ones borrows and x has no high bit. A borrow may propagate to
		// higher bytes, so only the lowest mark is certain.
		if found := ((v-ones*' ')&^v | (quote-ones)&^quote | (slash-ones)&^slash) & highs; found != 0 {
			return i + bits.TrailingZeros64(found)/8
		}
	}
	for i < len(s) && s[i] != '"' && s[i] != '\\' && s[i] >= ' ' {
		i++
	}
	return i
}

// quoteEnd estimates where a string with a backslash at i ends: at its closing quote, or earlier if escapes mislead the search.
func quoteEnd(s string, i int) int {
	for from := i; ; {
		q := strings.IndexByte(s[from:], '"')
		if q < 0 {
			return len(s)
		}
		q += from
		if s[q-1] != '\\' {
			return q
		}
		from = q + 1
	}
}

var jsonEscapes = [256]byte{'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}

// room returns an empty slice with room for n bytes. Full texts are not changed, because strings refer to them.
func (p *jsonParser) room(n int) []byte {
	if p.texts == nil {
		return make([]byte, 0, n)
	}
	texts := *p.texts
	if cap(texts)-len(texts) < n {
		texts = make([]byte, 0, max(n+n/8, min(2*cap(texts), 64<<10)))
	}
	*p.texts = texts[:len(texts)+n]
	return texts[len(texts):len(texts):len(*p.texts)]
}

// escaped reads the rest of a string from its first backslash.
func (p *jsonParser) escaped(start, i int) (string, error) {
	buf := append(p.room(quoteEnd(p.src, i)-start), p.src[start:i]...)
	for i < len(p.src) {
		c := p.src[i]
		switch {
		case c == '"':
			p.pos = i + 1
			return unsafe.String(unsafe.SliceData(buf), len(buf)), nil
		case c < ' ':
			p.pos = i
			return "", errors.New("invalid control character")
		case c != '\\':
			j := plainEnd(p.src, i)
			buf = append(buf, p.src[i:j]...)
			i = j
			continue
		}
		p.pos = i
		if i+1 >= len(p.src) {
			return "", errors.New("unterminated string")
		}
		if p.src[i+1] != 'u' {
			e := jsonEscapes[p.src[i+1]]
			if e == 0 {
				return "", errors.New("invalid \\escape")
			}
			buf = append(buf, e)
			i += 2
			continue
		}
		r, ok := p.hex4(i + 2)
		if !ok {
			return "", errors.New("invalid \\uXXXX escape")
		}
		i += 6
		if utf16.IsSurrogate(r) {
			whole := rune(utf8.RuneError)
			if i+1 < len(p.src) && p.src[i] == '\\' && p.src[i+1] == 'u' {
				low, ok := p.hex4(i + 2)
				if !ok {
					return "", errors.New("invalid \\uXXXX escape")
				}
				whole = utf16.DecodeRune(r, low)
			}
			if whole == utf8.RuneError {
				if !p.surrogates {
					return "", ErrLoneSurrogate
				}
				buf = append(buf, 0xe0|byte(r>>12), 0x80|byte(r>>6)&0xbf, 0x80|byte(r)&0xbf)
				continue
			}
			r = whole
			i += 6
		}
		buf = utf8.AppendRune(buf, r)
	}
	return "", errors.New("unterminated string")
}

func (p *jsonParser) hex4(i int) (rune, bool) {
	if i+4 > len(p.src) {
		return 0, false
	}
	n, err := strconv.ParseUint(p.src[i:i+4], 16, 16)
	return rune(n), err == nil
}
