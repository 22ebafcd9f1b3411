package jinja

import (
	"math"
	"slices"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

var (
	nan = math.NaN()
	inf = math.Inf(1)
)

// JSONOptions are the arguments of Python's json.dumps. The zero value is the output of
// transformers' tojson: one line, ", " and ": ", no ASCII escapes.
type JSONOptions struct {
	// Indent is written once per level; it is used only if Indented is set.
	Indent   string
	Indented bool
	// ItemSeparator and KeySeparator replace Python's defaults if Separators is set.
	ItemSeparator, KeySeparator string
	Separators                  bool
	SortKeys                    bool
	EnsureASCII                 bool
	// DenyNaN makes NaN and Infinity an error (allow_nan=False).
	DenyNaN bool
}

// AppendJSON appends v as Python's json.dumps writes it. For a value that Python cannot
// serialize, the error is an *Error of class TypeError or ValueError.
func AppendJSON(dst []byte, v Value, opts JSONOptions) (out []byte, err error) {
	defer rescue(&err)
	return newJSONWriter(opts).value(dst, v, 0), nil
}

func newJSONWriter(opts JSONOptions) *jsonWriter {
	w := &jsonWriter{opts: opts, item: ", ", colon: ": ", limit: defaultMaxMemory}
	if opts.Indented {
		w.item = ","
	}
	if opts.Separators {
		w.item, w.colon = opts.ItemSeparator, opts.KeySeparator
	}
	return w
}

type jsonWriter struct {
	opts        JSONOptions
	item, colon string
	limit       int      // maximum number of bytes to write
	m           *machine // charged for the steps; may be nil
}

// newline begins a new line if the output is indented.
func (w *jsonWriter) newline(dst []byte, depth int) []byte {
	if !w.opts.Indented {
		return dst
	}
	dst = append(dst, '\n')
	w.reserve(dst, depth*len(w.opts.Indent))
	for range depth {
		dst = append(dst, w.opts.Indent...)
	}
	return dst
}

// reserve raises if n more bytes exceed the limit.
func (w *jsonWriter) reserve(dst []byte, n int) {
	if len(dst)+n > w.limit {
		raisef("ResourceLimit", "template needs too much memory")
	}
}

func (w *jsonWriter) value(dst []byte, v Value, depth int) []byte {
	if depth > maxJSONDepth {
		raisef("RecursionError", "maximum recursion depth exceeded while encoding a JSON object")
	}
	w.reserve(dst, v.textSize())
	if w.m != nil {
		w.m.operands(v, &noArguments)
		if v.kind == KindInt {
			w.m.chargeInt(v)
		}
	}
	switch v.kind {
	case KindNone:
		return append(dst, "null"...)
	case KindBool:
		return strconv.AppendBool(dst, v.n != 0)
	case KindInt:
		return appendInt(dst, v)
	case KindFloat:
		return w.float(dst, v.float())
	case KindString:
		return w.text(dst, v.str())
	case KindList, KindTuple:
		return w.list(dst, v.seq(), depth)
	case KindDict:
		return w.dict(dst, v.dict(), depth)
	}
	raisef("TypeError", "Object of type %s is not JSON serializable", typeName(v))
	return dst
}

func (w *jsonWriter) separator(dst []byte, text string) []byte {
	w.reserve(dst, len(text))
	return append(dst, text...)
}

func (w *jsonWriter) float(dst []byte, f float64) []byte {
	switch {
	case !math.IsNaN(f) && !math.IsInf(f, 0):
		return appendFloat(dst, f)
	case w.opts.DenyNaN:
		raisef("ValueError", "Out of range float values are not JSON compliant")
	case math.IsNaN(f):
		return append(dst, "NaN"...)
	case f < 0:
		dst = append(dst, '-')
	}
	return append(dst, "Infinity"...)
}

func (w *jsonWriter) list(dst []byte, items []Value, depth int) []byte {
	if len(items) == 0 {
		return append(dst, "[]"...)
	}
	dst = append(dst, '[')
	for i := range items {
		if i > 0 {
			dst = w.separator(dst, w.item)
		}
		dst = w.value(w.newline(dst, depth+1), items[i], depth+1)
	}
	return append(w.newline(dst, depth), ']')
}

func (w *jsonWriter) dict(dst []byte, d *Dict, depth int) []byte {
	if d.Len() == 0 {
		return append(dst, "{}"...)
	}
	entries := d.entries
	if w.opts.SortKeys {
		m := w.m
		if m == nil {
			m = &machine{steps: defaultMaxSteps, memory: defaultMaxMemory}
		}
		m.charge(len(entries) * 2 * valueSize)
		entries = slices.Clone(entries)
		slices.SortStableFunc(entries, func(a, b entry) int { return m.order(a.key, b.key) })
	}
	dst = append(dst, '{')
	for i := range entries {
		if i > 0 {
			dst = w.separator(dst, w.item)
		}
		dst = w.key(w.newline(dst, depth+1), entries[i].key)
		dst = w.value(w.separator(dst, w.colon), entries[i].value, depth+1)
	}
	return append(w.newline(dst, depth), '}')
}

func (w *jsonWriter) key(dst []byte, k Value) []byte {
	switch k.kind {
	case KindString:
		return w.value(dst, k, 0)
	case KindNone, KindBool, KindInt, KindFloat:
		return append(w.value(append(dst, '"'), k, 0), '"')
	}
	raisef("TypeError", "keys must be str, int, float, bool or None, not %s", typeName(k))
	return dst
}

const hexDigits = "0123456789abcdef"

// shortEscapes are the letters of escapes without digits, 0 for characters that have none.
var shortEscapes = [256]byte{'"': '"', '\\': '\\', '\n': 'n', '\r': 'r', '\t': 't', '\b': 'b', '\f': 'f'}

func (w *jsonWriter) text(dst []byte, s string) []byte {
	dst = append(dst, '"')
	start := 0
	for i := 0; i < len(s); {
		c := s[i]
		if c >= ' ' && c != '"' && c != '\\' && (!w.opts.EnsureASCII || c < 0x7f) {
			i++
			continue
		}
		w.reserve(dst, 0)
		dst = append(dst, s[start:i]...)
		size := 1
		if short := shortEscapes[c]; short != 0 {
			dst = append(dst, '\\', short)
		} else {
			var r rune
			r, size = utf8.DecodeRuneInString(s[i:])
			if r > 0xffff {
				high, low := utf16.EncodeRune(r)
				dst = appendEscape(dst, high)
				r = low
			}
			dst = appendEscape(dst, r)
		}
		i += size
		start = i
	}
	dst = append(dst, s[start:]...)
	return append(dst, '"')
}

func appendEscape(dst []byte, r rune) []byte {
	return append(dst, '\\', 'u', hexDigits[r>>12&15], hexDigits[r>>8&15], hexDigits[r>>4&15], hexDigits[r&15])
}
