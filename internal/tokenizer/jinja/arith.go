package jinja

import (
	"math"
	"math/big"
	"strings"
)

// maxIntBits bounds the size of an int that arithmetic makes.
const maxIntBits = 1 << 17

var binaryOps = map[string]func(m *machine, a, b Value) Value{
	"+":  add,
	"-":  func(m *machine, a, b Value) Value { return m.arith("-", a, b) },
	"*":  multiply,
	"/":  func(m *machine, a, b Value) Value { return m.arith("/", a, b) },
	"//": func(m *machine, a, b Value) Value { return m.arith("//", a, b) },
	"%": func(m *machine, a, b Value) Value {
		if a.kind == KindString {
			return m.percent(a, b)
		}
		return m.arith("%", a, b)
	},
	"**": func(m *machine, a, b Value) Value { return m.arith("**", a, b) },
}

var opNames = map[string]string{"**": "** or pow()"}

func unsupported(op string, a, b Value) {
	mustDefined(a)
	mustDefined(b)
	if name, ok := opNames[op]; ok {
		op = name
	}
	raisef("TypeError", "unsupported operand type(s) for %s: '%s' and '%s'", op, typeName(a), typeName(b))
}

func add(m *machine, a, b Value) Value {
	switch {
	case a.isNumber() && b.isNumber():
		return m.arith("+", a, b)
	case a.kind == KindString && b.kind == KindString:
		x, y := a.str(), b.str()
		m.charge(len(x) + len(y))
		if a.safe || b.safe {
			m.chargeRepeat(int64(len(x)+len(y)), 5)
			if !a.safe {
				x = escapeHTML(x)
			}
			if !b.safe {
				y = escapeHTML(y)
			}
		}
		out := String(x + y)
		out.safe = a.safe || b.safe
		return out
	case a.kind == b.kind && a.isSequence():
		m.charge((len(a.seq()) + len(b.seq())) * valueSize)
		items := append(append(make([]Value, 0, len(a.seq())+len(b.seq())), a.seq()...), b.seq()...)
		if a.kind == KindList {
			return List(items)
		}
		return Tuple(items)
	}
	mustDefined(a)
	mustDefined(b)
	switch a.kind {
	case KindString:
		raisef("TypeError", "can only concatenate str (not \"%s\") to str", typeName(b))
	case KindList:
		raisef("TypeError", "can only concatenate list (not \"%s\") to list", typeName(b))
	case KindTuple:
		raisef("TypeError", "can only concatenate tuple (not \"%s\") to tuple", typeName(b))
	}
	unsupported("+", a, b)
	return Value{}
}

func multiply(m *machine, a, b Value) Value {
	if a.isNumber() && b.isNumber() {
		return m.arith("*", a, b)
	}
	if a.isInteger() {
		a, b = b, a
	}
	if !b.isInteger() || a.kind != KindString && !a.isSequence() {
		mustDefined(a)
		if a.safe && b.kind == KindUndefined {
			raisef("TypeError", "'Undefined' object cannot be interpreted as an integer") // Markup.__mul__ asks str's own
		}
		mustDefined(b)
		if a.kind == KindString || a.isSequence() {
			raisef("TypeError", "can't multiply sequence by non-int of type '%s'", typeName(b))
		}
		unsupported("*", a, b)
	}
	n, ok := b.small()
	if !ok {
		raisef("OverflowError", "cannot fit 'int' into an index-sized integer")
	}
	n = max(n, 0)
	if a.kind == KindString {
		m.chargeRepeat(n, len(a.str()))
		if a.n == 0 {
			n = 0
		}
		out := String(strings.Repeat(a.str(), int(n)))
		out.safe = a.safe
		return out
	}
	m.chargeRepeat(n, len(a.seq())*valueSize)
	if len(a.seq()) == 0 {
		n = 0
	}
	items := make([]Value, 0, int(n)*len(a.seq()))
	for range n {
		items = append(items, a.seq()...)
	}
	if a.kind == KindList {
		return List(items)
	}
	return Tuple(items)
}

// asFloat is Python's float(v) of a number.
func asFloat(v Value) float64 {
	if v.kind == KindFloat {
		return v.float()
	}
	if n, ok := v.small(); ok {
		return float64(n)
	}
	f, _ := new(big.Float).SetInt(v.big()).Float64()
	if math.IsInf(f, 0) {
		raisef("OverflowError", "int too large to convert to float")
	}
	return f
}

func (m *machine) arith(op string, a, b Value) Value {
	if !a.isNumber() || !b.isNumber() {
		unsupported(op, a, b)
	}
	if a.kind == KindFloat || b.kind == KindFloat {
		return floatArith(op, asFloat(a), asFloat(b))
	}
	x, xs := a.small()
	y, ys := b.small()
	if xs && ys {
		if v, ok := smallArith(op, x, y); ok {
			return v
		}
	}
	return m.bigArith(op, a, b)
}

// smallArith computes in 64 bits; ok is false where that may not be exact.
func smallArith(op string, x, y int64) (Value, bool) {
	const half = 1 << 62
	const root = 1 << 31
	switch op {
	case "+":
		return Int(x + y), x < half && x > -half && y < half && y > -half
	case "-":
		return Int(x - y), x < half && x > -half && y < half && y > -half
	case "*":
		return Int(x * y), x < root && x > -root && y < root && y > -root
	case "//", "%":
		if y == 0 || x == math.MinInt64 {
			return Value{}, false
		}
		q, r := x/y, x%y
		if r != 0 && (r < 0) != (y < 0) {
			q, r = q-1, r+y
		}
		if op == "%" {
			return Int(r), true
		}
		return Int(q), true
	}
	return Value{}, false
}

func (m *machine) bigArith(op string, a, b Value) Value {
	x, y := a.big(), b.big()
	m.chargeBig(x.BitLen(), y.BitLen())
	switch op {
	case "+":
		return fromBig(new(big.Int).Add(x, y))
	case "-":
		return fromBig(new(big.Int).Sub(x, y))
	case "*":
		checkBits(x.BitLen() + y.BitLen())
		return fromBig(new(big.Int).Mul(x, y))
	case "/":
		if y.Sign() == 0 {
			raisef("ZeroDivisionError", "division by zero")
		}
		f, _ := new(big.Rat).SetFrac(x, y).Float64()
		if f == 0 && y.Sign() < 0 && x.Sign() == 0 {
			f = math.Copysign(0, -1)
		}
		if math.IsInf(f, 0) {
			raisef("OverflowError", "integer division result too large for a float")
		}
		return Float(f)
	case "//", "%":
		if y.Sign() == 0 {
			if op == "%" {
				raisef("ZeroDivisionError", "integer modulo by zero")
			}
			raisef("ZeroDivisionError", "integer division or modulo by zero")
		}
		q, r := new(big.Int).QuoRem(x, y, new(big.Int))
		if r.Sign() != 0 && r.Sign() != y.Sign() {
			q.Sub(q, big.NewInt(1))
			r.Add(r, y)
		}
		if op == "%" {
			return fromBig(r)
		}
		return fromBig(q)
	}
	if y.Sign() < 0 {
		return floatArith("**", asFloat(a), asFloat(b))
	}
	switch {
	case x.BitLen() > 1:
		if !y.IsInt64() || y.Int64() > maxIntBits {
			checkBits(maxIntBits + 1)
		}
		checkBits((x.BitLen() - 1) * int(y.Int64()))
	case x.Sign() < 0:
		y = new(big.Int).And(y, big.NewInt(1)) // -1: only the parity counts
	case y.Sign() > 0:
		y = big.NewInt(1)
	}
	if bits := x.BitLen() * int(y.Int64()); bits > 64 {
		m.chargeBig(bits, bits)
	}
	return fromBig(new(big.Int).Exp(x, y, nil))
}

// chargeBig pays for an operation on ints of these lengths in bits: at worst each word meets each word.
func (m *machine) chargeBig(x, y int) {
	m.steps -= (x / 64) * (y / 64) / 4
	m.charge((x + y) / 4)
}

// chargeInt pays for the digits of an int.
func (m *machine) chargeInt(v Value) {
	if v.kind == KindInt && v.p != nil {
		bits := v.big().BitLen()
		m.chargeBig(bits, bits/8)
	}
}

func checkBits(n int) {
	if n > maxIntBits {
		raisef("ResourceLimit", "int with more than %d bits", maxIntBits)
	}
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
	case "//", "%":
		if y == 0 {
			if op == "%" {
				raisef("ZeroDivisionError", "float modulo")
			}
			raisef("ZeroDivisionError", "float floor division by zero")
		}
		q, r := floatDivMod(x, y)
		if op == "%" {
			return Float(r)
		}
		return Float(q)
	}
	if x == 0 && y < 0 {
		raisef("ZeroDivisionError", "0.0 cannot be raised to a negative power")
	}
	if x < 0 && !math.IsInf(x, 0) && y != math.Trunc(y) && !math.IsNaN(y) {
		raisef("TypeError", "complex numbers are not supported")
	}
	f := math.Pow(x, y)
	if math.IsInf(f, 0) && !math.IsInf(x, 0) && !math.IsInf(y, 0) {
		raisef("OverflowError", "(34, 'Numerical result out of range')")
	}
	return Float(f)
}

// floatDivMod is Python's divmod of floats.
func floatDivMod(x, y float64) (q, r float64) {
	r = math.Mod(x, y)
	d := (x - r) / y
	if r != 0 {
		if (y < 0) != (r < 0) {
			r += y
			d--
		}
	} else {
		r = math.Copysign(0, y)
	}
	if d == 0 {
		return math.Copysign(0, x/y), r
	}
	q = math.Floor(d)
	if d-q > 0.5 {
		q++
	}
	return q, r
}

func negate(v Value) Value {
	if v.kind == KindFloat {
		return Float(-v.float())
	}
	if !v.isInteger() {
		mustDefined(v)
		raisef("TypeError", "bad operand type for unary -: '%s'", typeName(v))
	}
	return fromBig(new(big.Int).Neg(v.big()))
}

func plus(v Value) Value {
	if v.kind == KindFloat {
		return v
	}
	if !v.isInteger() {
		mustDefined(v)
		raisef("TypeError", "bad operand type for unary +: '%s'", typeName(v))
	}
	if v.kind == KindBool {
		return Int(int64(v.n))
	}
	return v
}
