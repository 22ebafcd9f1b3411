package jinja

import (
	"strings"
)

// AppendStr appends Python's str of v, whose text is bounded.
func AppendStr(dst []byte, v Value) []byte {
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
	}
	unsupportedf("the text of a %s", typeName(v))
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
