package jinja

import "math/big"

// testFunc is a test: v is what stands before "is".
type testFunc func(m *machine, v Value, a *arguments) bool

var tests map[string]testFunc

func init() { //nolint:gochecknoinits // tests refer to the table by name
	compareTest := func(op string) testFunc {
		f := comparisonOps[op]
		return func(m *machine, v Value, a *arguments) bool {
			a.positional(op, 1, 1)
			return f(m, v, a.pos[0])
		}
	}
	plain := func(name string, f func(v Value) bool) testFunc {
		return func(_ *machine, v Value, a *arguments) bool {
			a.bind(name, 0)
			return f(v)
		}
	}
	modulo := func(m *machine, v Value, n int64) int64 {
		if !v.isNumber() {
			if v.kind == KindString {
				raisef("TypeError", "not all arguments converted during string formatting")
			}
			unsupported("%", v, Int(n))
		}
		r := m.arith("%", v, Int(n))
		if r.kind == KindFloat {
			if r.float() == 0 || r.float() == 1 {
				return int64(r.float())
			}
			return -1
		}
		return index(r)
	}
	parity := func(name string, want int64) testFunc {
		return func(m *machine, v Value, a *arguments) bool {
			a.bind(name, 0)
			return modulo(m, v, 2) == want
		}
	}
	tests = map[string]testFunc{
		"odd":  parity("odd", 1),
		"even": parity("even", 0),
		"divisibleby": func(m *machine, v Value, a *arguments) bool {
			p := a.bind("divisibleby", 1, "num")
			return m.equal(binaryOps["%"](m, v, p[0]), Int(0))
		},
		"defined":   plain("defined", func(v Value) bool { return v.kind != KindUndefined }),
		"undefined": plain("undefined", func(v Value) bool { return v.kind == KindUndefined }),
		"filter": func(m *machine, v Value, _ *arguments) bool {
			m.mustHash(v)
			return v.kind == KindString && filters[v.str()] != nil
		},
		"test": func(m *machine, v Value, _ *arguments) bool {
			m.mustHash(v)
			return v.kind == KindString && tests[v.str()] != nil
		},
		"none":    plain("none", func(v Value) bool { return v.kind == KindNone }),
		"boolean": plain("boolean", func(v Value) bool { return v.kind == KindBool }),
		"false":   plain("false", func(v Value) bool { return v.kind == KindBool && v.n == 0 }),
		"true":    plain("true", func(v Value) bool { return v.kind == KindBool && v.n == 1 }),
		"integer": plain("integer", func(v Value) bool { return v.kind == KindInt }),
		"float":   plain("float", func(v Value) bool { return v.kind == KindFloat }),
		"lower": func(m *machine, v Value, _ *arguments) bool {
			return cased(isLower, isUpperOrTitle)(m, String(m.text(v)), nil).Truth()
		},
		"upper": func(m *machine, v Value, _ *arguments) bool {
			return strMethods["isupper"](m, String(m.text(v)), nil).Truth()
		},
		"string":  plain("string", func(v Value) bool { return v.kind == KindString }),
		"mapping": plain("mapping", func(v Value) bool { return v.kind == KindDict }),
		"number":  plain("number", func(v Value) bool { return v.isNumber() }),
		"sequence": plain("sequence", func(v Value) bool {
			switch v.kind {
			case KindString, KindList, KindTuple, KindDict, kindRange, KindUndefined:
				return true
			}
			return false
		}),
		"iterable": plain("iterable", canIterate),
		"callable": plain("callable", func(v Value) bool {
			return v.kind == kindCallable || v.kind == kindLoop || v.kind == kindJoiner || v.kind == KindUndefined
		}),
		"sameas": func(_ *machine, v Value, a *arguments) bool {
			o := a.bind("sameas", 1, "other")[0]
			if v.kind != o.kind || v.n != o.n {
				return false
			}
			if v.kind == KindString {
				return v.str() == o.str()
			}
			if v.kind == KindInt && v.p != nil && o.p != nil {
				return (*big.Int)(v.p).Cmp((*big.Int)(o.p)) == 0
			}
			return v.p == o.p
		},
		"escaped": plain("escaped", func(v Value) bool { return v.kind == KindString && v.safe }),
		"in": func(m *machine, v Value, a *arguments) bool {
			return m.contains(a.bind("in", 1, "seq")[0], v)
		},
	}
	for op, names := range map[string][]string{
		"==": {"==", "eq", "equalto"}, "!=": {"!=", "ne"}, ">": {">", "gt", "greaterthan"},
		">=": {">=", "ge"}, "<": {"<", "lt", "lessthan"}, "<=": {"<=", "le"},
	} {
		for _, name := range names {
			tests[name] = compareTest(op)
		}
	}
}
