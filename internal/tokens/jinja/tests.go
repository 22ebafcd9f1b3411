package jinja

// testFunc implements a test; v is the value before "is".
type testFunc func(m *machine, v Value, a *arguments) bool

var tests = map[string]testFunc{
	"odd":       kindTest("odd", func(v Value) bool { return arith("%", v, Int(2)) == Int(1) }),
	"even":      kindTest("even", func(v Value) bool { return arith("%", v, Int(2)) == Int(0) }),
	"defined":   kindTest("defined", func(v Value) bool { return v.kind != KindUndefined }),
	"undefined": kindTest("undefined", func(v Value) bool { return v.kind == KindUndefined }),
	"none":      kindTest("none", func(v Value) bool { return v.kind == KindNone }),
	"boolean":   kindTest("boolean", func(v Value) bool { return v.kind == KindBool }),
	"false":     kindTest("false", func(v Value) bool { return v.kind == KindBool && v.n == 0 }),
	"true":      kindTest("true", func(v Value) bool { return v.kind == KindBool && v.n == 1 }),
	"integer":   kindTest("integer", func(v Value) bool { return v.kind == KindInt }),
	"float":     kindTest("float", func(v Value) bool { return v.kind == KindFloat }),
	"number":    kindTest("number", Value.isNumber),
	"string":    kindTest("string", func(v Value) bool { return v.kind == KindString }),
	"mapping":   kindTest("mapping", func(v Value) bool { return v.kind == KindDict }),
	"iterable":  kindTest("iterable", canIterate),
	"sequence": kindTest("sequence", func(v Value) bool {
		switch v.kind {
		case KindString, KindList, KindTuple, KindDict, kindRange, KindUndefined:
			return true
		}
		return false
	}),
	"callable": kindTest("callable", func(v Value) bool {
		return v.kind == kindCallable || v.kind == kindLoop || v.kind == KindUndefined
	}),
	"in": func(m *machine, v Value, a *arguments) bool {
		return m.contains(a.bind("in", 1, "seq")[0], v)
	},
	"==": comparisonTest("=="), "eq": comparisonTest("=="), "equalto": comparisonTest("=="),
	"!=": comparisonTest("!="), "ne": comparisonTest("!="),
	">": comparisonTest(">"), "gt": comparisonTest(">"), "greaterthan": comparisonTest(">"),
	"<": comparisonTest("<"), "lt": comparisonTest("<"), "lessthan": comparisonTest("<"),
	">=": comparisonTest(">="), "ge": comparisonTest(">="), "<=": comparisonTest("<="), "le": comparisonTest("<="),
}

func comparisonTest(op string) testFunc {
	compare := comparisonOps[op]
	return func(m *machine, v Value, a *arguments) bool {
		a.positional(op, 1, 1)
		return compare(m, v, a.pos[0])
	}
}

// kindTest returns a test without arguments.
func kindTest(name string, is func(v Value) bool) testFunc {
	return func(_ *machine, v Value, a *arguments) bool {
		a.bind(name, 0)
		return is(v)
	}
}
