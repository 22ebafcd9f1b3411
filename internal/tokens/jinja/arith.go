package jinja

import (
	"math"
	"strings"
)

// binaryOps are the arithmetic operators. Ints are limited to 64 bits: overflow raises Unsupported.
var binaryOps = map[string]func(m *machine, a, b Value) Value{
	"+":  add,
	"-":  func(_ *machine, a, b Value) Value { return arith("-", a, b) },
	"*":  multiply,
	"/":  func(_ *machine, a, b Value) Value { return arith("/", a, b) },
	"//": func(_ *machine, a, b Value) Value { return arith("//", a, b) },
	"%":  func(_ *machine, a, b Value) Value { return arith("%", a, b) },
}

func badOperands(op string, a, b Value) {
	mustDefined(a)
	mustDefined(b)
	raisef("TypeError", "unsupported operand type(s) for %s: '%s' and '%s'", op, typeName(a), typeName(b))
}

func add(m *machine, a, b Value) Value {
	switch {
	case a.isNumber() && b.isNumber():
		return arith("+", a, b)
	case a.kind == KindString && b.kind == KindString:
		x, y := a.str(), b.str()
		m.charge(len(x) + len(y))
		if a.safe != b.safe {
			m.chargeRepeat(int64(len(x)+len(y)), 5)
			if b.safe {
				x = htmlEscaper.Replace(x)
			} else {
				y = htmlEscaper.Replace(y)
			}
		}
		out := String(x + y)
		out.safe = a.safe || b.safe
		return out
	case a.kind == b.kind && a.isSequence():
		m.charge((len(a.seq()) + len(b.seq())) * valueSize)
		items := append(append(make([]Value, 0, len(a.seq())+len(b.seq())), a.seq()...), b.seq()...)
		return sequenceLike(a, items)
	}
	mustDefined(a)
	mustDefined(b)
	switch a.kind {
	case KindString:
		raisef("TypeError", "can only concatenate str (not \"%s\") to str", typeName(b))
	case KindList, KindTuple:
		raisef("TypeError", "can only concatenate %s (not \"%s\") to %s", typeName(a), typeName(b), typeName(a))
	}
	badOperands("+", a, b)
	return Value{}
}

func multiply(m *machine, a, b Value) Value {
	if a.isNumber() && b.isNumber() {
		return arith("*", a, b)
	}
	if a.isInteger() {
		a, b = b, a
	}
	if !b.isInteger() || a.kind != KindString && !a.isSequence() {
		mustDefined(a)
		if a.safe && b.kind == KindUndefined {
			raisef("TypeError", "'Undefined' object cannot be interpreted as an integer") // Markup has its own __mul__
		}
		mustDefined(b)
		if a.kind == KindString || a.isSequence() {
			raisef("TypeError", "can't multiply sequence by non-int of type '%s'", typeName(b))
		}
		badOperands("*", a, b)
	}
	if a.kind != KindString {
		unsupportedf("repeating a %s", typeName(a))
	}
	n := max(smallInt(b), 0)
	m.chargeRepeat(n, len(a.str()))
	if a.n == 0 {
		n = 0
	}
	return like(a, strings.Repeat(a.str(), int(n)))
}

// sequenceLike returns items as a list or a tuple, whichever v is.
func sequenceLike(v Value, items []Value) Value {
	if v.kind == KindList {
		return List(items)
	}
	return Tuple(items)
}

// asFloat is Python's float(v) for a number.
func asFloat(v Value) float64 {
	if v.kind == KindFloat {
		return v.float()
	}
	return float64(smallInt(v))
}

// smallInt returns an int or bool of at most 64 bits.
func smallInt(v Value) int64 {
	n, ok := v.small()
	if !ok {
		unsupportedf("arithmetic with ints of more than 64 bits")
	}
	return n
}

func arith(op string, a, b Value) Value {
	switch {
	case a.kind == KindString && op == "%":
		unsupportedf("formatting with %q", "%")
	case !a.isNumber() || !b.isNumber():
		badOperands(op, a, b)
	case a.kind == KindFloat || b.kind == KindFloat:
		return floatArith(op, asFloat(a), asFloat(b))
	case op == "/":
		x, y := smallInt(a), smallInt(b)
		if y == 0 {
			raisef("ZeroDivisionError", "division by zero")
		}
		const exact = 1 << 53
		if max(x, y) > exact || min(x, y) < -exact {
			unsupportedf("a quotient of ints of more than 53 bits")
		}
		return Float(float64(x) / float64(y))
	}
	return intArith(op, smallInt(a), smallInt(b))
}

func intArith(op string, x, y int64) Value {
	switch op {
	case "+":
		if sum := x + y; (sum > x) == (y > 0) {
			return Int(sum)
		}
	case "-":
		if d := x - y; (d < x) == (y > 0) {
			return Int(d)
		}
	case "*":
		if p := x * y; x == 0 || x != -1 && p/x == y || x == -1 && y != math.MinInt64 {
			return Int(p)
		}
	default:
		switch {
		case y == 0 && op == "%":
			raisef("ZeroDivisionError", "integer modulo by zero")
		case y == 0:
			raisef("ZeroDivisionError", "integer division or modulo by zero")
		case x != math.MinInt64:
			q, r := x/y, x%y
			if r != 0 && (r < 0) != (y < 0) {
				q, r = q-1, r+y
			}
			if op == "%" {
				return Int(r)
			}
			return Int(q)
		}
	}
	unsupportedf("arithmetic with ints of more than 64 bits")
	return Value{}
}

func floatArith(op string, x, y float64) Value {
	switch op {
	case "+":
		return Float(x + y)
	case "-":
		return Float(x - y)
	case "*":
		return Float(x * y)
	case "/":
		if y == 0 {
			raisef("ZeroDivisionError", "float division by zero")
		}
		return Float(x / y)
	}
	unsupportedf("operator %q with a float", op)
	return Value{}
}

// unary is Python's +v or -v.
func unary(op string, v Value) Value {
	switch {
	case !v.isNumber():
		mustDefined(v)
		raisef("TypeError", "bad operand type for unary %s: '%s'", op, typeName(v))
	case op == "-" && v.kind == KindFloat:
		return Float(-v.float())
	case op == "-":
		return intArith("-", 0, smallInt(v))
	case v.kind == KindBool:
		return Int(int64(v.n))
	}
	return v
}
