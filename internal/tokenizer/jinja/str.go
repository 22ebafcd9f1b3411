package jinja

import (
	"strconv"
	"strings"
)

// appendStr is Python's str(v) for a value that holds no text beyond bounds.
func appendStr(dst []byte, v Value) []byte {
	m := &machine{maxOutput: defaultMaxOutput, steps: defaultMaxSteps, memory: defaultMaxMemory}
	return m.appendStr(dst, v)
}

// appendStr is Python's str(v).
func (m *machine) appendStr(dst []byte, v Value) []byte {
	switch v.kind {
	case KindString:
		return append(dst, v.str()...)
	case KindUndefined:
		return dst
	}
	return m.appendRepr(dst, v, 0)
}

// appendRepr is Python's repr(v).
func (m *machine) appendRepr(dst []byte, v Value, depth int) []byte {
	if depth > maxNesting {
		raisef("RecursionError", "maximum recursion depth exceeded while getting the repr of an object")
	}
	m.charge(24)
	switch v.kind {
	case KindString:
		m.charge(2 * reprSize(v.str()))
		if v.safe {
			dst = append(dst, "Markup("...)
			return append(appendRepr(dst, v.str()), ')')
		}
		return appendRepr(dst, v.str())
	case KindUndefined:
		return append(dst, "Undefined"...)
	case KindNone:
		return append(dst, "None"...)
	case KindBool:
		if v.n != 0 {
			return append(dst, "True"...)
		}
		return append(dst, "False"...)
	case KindInt:
		m.chargeInt(v)
		if v.p != nil && v.big().BitLen() > 14000 {
			if b := v.big().String(); len(strings.TrimPrefix(b, "-")) > maxIntDigits {
				raisef("ValueError", "Exceeds the limit (%d digits) for integer string conversion", maxIntDigits)
			}
		}
		return appendInt(dst, v)
	case KindFloat:
		return appendFloat(dst, v.float())
	case KindList:
		dst = append(dst, '[')
		dst = m.appendItems(dst, v.seq(), depth)
		return append(dst, ']')
	case KindTuple:
		dst = append(dst, '(')
		dst = m.appendItems(dst, v.seq(), depth)
		if len(v.seq()) == 1 {
			dst = append(dst, ',')
		}
		return append(dst, ')')
	case KindDict:
		return append(m.appendEntries(append(dst, '{'), v.dict(), depth), '}')
	case kindRange:
		r := (*rangeObject)(v.p)
		dst = append(dst, "range("...)
		dst = strconv.AppendInt(dst, r.start, 10)
		dst = append(dst, ", "...)
		dst = strconv.AppendInt(dst, r.stop, 10)
		if r.step != 1 {
			dst = append(dst, ", "...)
			dst = strconv.AppendInt(dst, r.step, 10)
		}
		return append(dst, ')')
	case kindView:
		view := (*dictView)(v.p)
		dst = append(dst, typeName(v)...)
		dst = append(dst, "(["...)
		for i := range view.dict.Len() {
			if i > 0 {
				dst = append(dst, ", "...)
			}
			dst = m.appendRepr(dst, view.at(i), depth+1)
		}
		return append(dst, "])"...)
	case kindNamespace:
		dst = append(dst, "<Namespace {"...)
		dst = m.appendEntries(dst, (*namespaceObject)(v.p).attrs, depth)
		return append(dst, "}>"...)
	case kindLoop:
		l := (*loopObject)(v.p)
		dst = append(dst, "<LoopContext "...)
		dst = strconv.AppendInt(dst, l.index0+1, 10)
		dst = append(dst, '/')
		dst = strconv.AppendInt(dst, l.len(), 10)
		return append(dst, '>')
	case kindCallable:
		if fn := (*callable)(v.p); fn.isMacro {
			if fn.name == "" {
				return append(dst, "<Macro anonymous>"...)
			}
			dst = append(dst, "<Macro "...)
			return append(appendRepr(dst, fn.name), '>')
		}
	}
	// Python prints an address here: no two runs agree.
	raisef("TypeError", "%s has no stable text", typeName(v))
	return dst
}

func (m *machine) appendItems(dst []byte, items []Value, depth int) []byte {
	for i := range items {
		if i > 0 {
			dst = append(dst, ", "...)
		}
		dst = m.appendRepr(dst, items[i], depth+1)
	}
	return dst
}

func (m *machine) appendEntries(dst []byte, d *Dict, depth int) []byte {
	for i := range d.entries {
		if i > 0 {
			dst = append(dst, ", "...)
		}
		dst = m.appendRepr(dst, d.entries[i].key, depth+1)
		dst = append(dst, ": "...)
		dst = m.appendRepr(dst, d.entries[i].value, depth+1)
	}
	return dst
}

// appendASCII is Python's ascii(v).
func (m *machine) appendASCII(dst []byte, v Value) []byte {
	start := len(dst)
	dst = m.appendRepr(dst, v, 0)
	m.charge(4 * (len(dst) - start))
	text := string(dst[start:])
	dst = dst[:start]
	for _, r := range text {
		switch {
		case r < 0x80:
			dst = append(dst, byte(r))
		case r <= 0xff:
			dst = append(dst, '\\', 'x', hexDigits[r>>4], hexDigits[r&15])
		case r <= 0xffff:
			dst = appendEscape(dst, r)
		default:
			dst = append(dst, '\\', 'U', '0', '0', hexDigits[r>>20&15], hexDigits[r>>16&15],
				hexDigits[r>>12&15], hexDigits[r>>8&15], hexDigits[r>>4&15], hexDigits[r&15])
		}
	}
	return dst
}
