package jinja

import (
	"math"
	"math/bits"
	"unsafe"
)

func canIterate(v Value) bool {
	switch v.kind {
	case KindString, KindList, KindTuple, KindDict, kindRange, kindView, kindIterator, kindLoop, KindUndefined:
		return true
	}
	return false
}

var listMethods, tupleMethods, dictMethods, numberMethods map[string]methodFunc

func init() { //nolint:gochecknoinits // the tables and the methods need each other
	tupleMethods = map[string]methodFunc{
		"index": func(m *machine, v Value, a *arguments) Value {
			a.positional("index", 1, 3)
			items := m.items(v)
			bounds := [3]Value{None(), None(), None()}
			copy(bounds[:], a.pos[1:])
			start, count, _ := sliceIndices(bounds, len(items))
			for i := start; i < start+count; i++ {
				if m.same(items[i], a.pos[0], 0) {
					return Int(int64(i))
				}
			}
			raisef("ValueError", "%s is not in %s", m.appendRepr(nil, a.pos[0], 0), typeName(v))
			return Value{}
		},
		"count": func(m *machine, v Value, a *arguments) Value {
			a.positional("count", 1, 1)
			n := int64(0)
			for _, item := range m.items(v) {
				if m.same(item, a.pos[0], 0) {
					n++
				}
			}
			return Int(n)
		},
	}
	listMethods = map[string]methodFunc{
		"index": tupleMethods["index"],
		"count": tupleMethods["count"],
		"copy": func(m *machine, v Value, a *arguments) Value {
			a.positional("copy", 0, 0)
			m.charge((len(v.seq()) + 1) * valueSize)
			return List(append([]Value(nil), v.seq()...))
		},
	}
	for name := range listMutators {
		listMethods[name] = refuse(name)
	}
	dictMethods = map[string]methodFunc{
		"get": func(m *machine, v Value, a *arguments) Value {
			a.positional("get", 1, 2)
			m.mustHash(a.pos[0])
			if i := v.dict().find(a.pos[0]); i >= 0 {
				return v.dict().entries[i].value
			}
			if len(a.pos) > 1 {
				return a.pos[1]
			}
			return None()
		},
		"keys": viewMethod("keys", viewKeys), "values": viewMethod("values", viewValues), "items": viewMethod("items", viewItems),
		"copy": func(m *machine, v Value, a *arguments) Value {
			a.positional("copy", 0, 0)
			m.charge(v.dict().Len() * dictEntry)
			return FromDict(v.dict().Clone())
		},
		"fromkeys": func(m *machine, _ Value, a *arguments) Value {
			a.positional("fromkeys", 1, 2)
			value := None()
			if len(a.pos) > 1 {
				value = a.pos[1]
			}
			d := new(Dict)
			for _, k := range m.items(a.pos[0]) {
				m.charge(dictEntry)
				m.mustHash(k)
				d.put(k, value)
			}
			return FromDict(d)
		},
	}
	for name := range dictMutators {
		dictMethods[name] = refuse(name)
	}
	numberMethods = map[string]methodFunc{
		"bit_length": func(_ *machine, v Value, _ *arguments) Value { return Int(int64(v.big().BitLen())) },
		"bit_count":  bitCount,
		"conjugate":  func(_ *machine, v Value, _ *arguments) Value { return plus(v) },
		"is_integer": func(_ *machine, v Value, _ *arguments) Value {
			f := v.float()
			return Bool(f == math.Trunc(f) && !math.IsInf(f, 0))
		},
	}
}

func bitCount(_ *machine, v Value, _ *arguments) Value {
	n := 0
	for _, w := range v.big().Bits() {
		n += bits.OnesCount(uint(w))
	}
	return Int(int64(n))
}

// refuse stands for a method that would change its value.
func refuse(name string) methodFunc {
	return func(_ *machine, v Value, _ *arguments) Value {
		mustDefined(unsafeAttribute(v, name))
		return Value{}
	}
}

func viewMethod(name string, of viewOf) methodFunc {
	return func(_ *machine, v Value, a *arguments) Value {
		a.positional(name, 0, 0)
		return Value{kind: kindView, p: unsafe.Pointer(&dictView{v.dict(), of})}
	}
}
