package jinja

import (
	"math"
	"math/big"
	"unsafe"
)

// Kind is the type of a Value. Callers see only the first nine kinds; the others exist only during a rendering.
type Kind uint8

const (
	KindUndefined Kind = iota
	KindNone
	KindBool
	KindInt
	KindFloat
	KindString
	KindList
	KindTuple
	KindDict

	kindRange
	kindView      // dict.keys(), dict.values(), dict.items()
	kindIterator  // results of map, select, reverse and the like: consumed once
	kindNamespace // namespace(...)
	kindLoop      // the variable "loop"
	kindCallable  // macros, global functions, bound methods
	kindMissing   // a slot without a value yet
)

// Value is a Python value. It is small (24 bytes), cheap to copy, and immutable to templates: the
// sandbox that engines use forbids every method that modifies a list or a dict.
//
// Invariant: p points at
//   - the bytes of a string (n is the length in bytes),
//   - *big.Int of an int outside of int64 (else p is nil and n holds it),
//   - *sequence of a list or tuple, *Dict of a dict,
//   - *undefinedInfo of an Undefined (may be nil),
//   - the type that belongs to the kind for the rest.
type Value struct {
	p    unsafe.Pointer
	n    uint64
	kind Kind
	safe bool // a str that is markupsafe.Markup
}

// sequence is the body of a list or a tuple.
type sequence struct{ items []Value }

// Undefined returns the value of a name that is not defined.
func Undefined() Value { return Value{} }

// None returns Python's None.
func None() Value { return Value{kind: KindNone} }

// Bool returns True or False.
func Bool(b bool) Value {
	if b {
		return Value{kind: KindBool, n: 1}
	}
	return Value{kind: KindBool}
}

// Int returns a Python int.
func Int(i int64) Value { return Value{kind: KindInt, n: uint64(i)} }

// BigInt returns the Python int with this decimal representation, which may have a sign; Undefined if it is not such a number.
func BigInt(decimal string) Value {
	b, ok := new(big.Int).SetString(decimal, 10)
	if !ok {
		return Undefined()
	}
	return fromBig(b)
}

// fromBig takes ownership of b.
func fromBig(b *big.Int) Value {
	if b.IsInt64() {
		return Int(b.Int64())
	}
	return Value{kind: KindInt, p: unsafe.Pointer(b)}
}

// Float returns a Python float.
func Float(f float64) Value { return Value{kind: KindFloat, n: math.Float64bits(f)} }

// String returns a Python str. s must be valid UTF-8.
func String(s string) Value {
	return Value{kind: KindString, p: unsafe.Pointer(unsafe.StringData(s)), n: uint64(len(s))}
}

// List returns a Python list of these items. The slice is not copied and must not be modified afterwards.
func List(items []Value) Value { return Value{kind: KindList, p: unsafe.Pointer(&sequence{items})} }

// Tuple returns a Python tuple of these items. The slice is not copied and must not be modified afterwards.
func Tuple(items []Value) Value { return Value{kind: KindTuple, p: unsafe.Pointer(&sequence{items})} }

// FromDict returns d as a value; nil is an empty dict.
func FromDict(d *Dict) Value {
	if d == nil {
		d = new(Dict)
	}
	return Value{kind: KindDict, p: unsafe.Pointer(d)}
}

// Kind returns the type of v.
func (v Value) Kind() Kind { return v.kind }

// IsUndefined reports whether v is Undefined.
func (v Value) IsUndefined() bool { return v.kind == KindUndefined }

// IsNone reports whether v is None.
func (v Value) IsNone() bool { return v.kind == KindNone }

// AsString returns the text of a str; ok is false for other kinds.
func (v Value) AsString() (string, bool) {
	if v.kind != KindString {
		return "", false
	}
	return v.str(), true
}

// AsInt returns an int that fits into 64 bits; ok is false for all others, bools included.
func (v Value) AsInt() (int64, bool) {
	if v.kind != KindInt || v.p != nil {
		return 0, false
	}
	return int64(v.n), true
}

// AsFloat returns the value of a float; ok is false for other kinds.
func (v Value) AsFloat() (float64, bool) {
	if v.kind != KindFloat {
		return 0, false
	}
	return v.float(), true
}

// AsBool returns the value of a bool; ok is false for other kinds.
func (v Value) AsBool() (value, ok bool) { return v.n != 0, v.kind == KindBool }

// AsList returns the items of a list or a tuple, which must not be modified.
func (v Value) AsList() ([]Value, bool) {
	if v.kind != KindList && v.kind != KindTuple {
		return nil, false
	}
	return v.seq(), true
}

// AsDict returns the dict in v. It must not be modified once it has been rendered.
func (v Value) AsDict() (*Dict, bool) {
	if v.kind != KindDict {
		return nil, false
	}
	return v.dict(), true
}

// Truth is Python's bool(v).
func (v Value) Truth() bool {
	switch v.kind {
	case KindUndefined, KindNone:
		return false
	case KindBool, KindString:
		return v.n != 0
	case KindInt:
		return v.n != 0 || v.p != nil
	case KindFloat:
		return v.float() != 0
	case KindList, KindTuple:
		return len(v.seq()) != 0
	case KindDict:
		return v.dict().Len() != 0
	case kindRange:
		return (*rangeObject)(v.p).length() != 0
	case kindView:
		return (*dictView)(v.p).dict.Len() != 0
	default:
		return true
	}
}

func (v Value) str() string { return unsafe.String((*byte)(v.p), int(v.n)) }

// textSize returns the length of a str in bytes, 0 for other kinds.
func (v Value) textSize() int {
	if v.kind != KindString {
		return 0
	}
	return int(v.n)
}

func (v Value) float() float64       { return math.Float64frombits(v.n) }
func (v Value) seq() []Value         { return (*sequence)(v.p).items }
func (v Value) dict() *Dict          { return (*Dict)(v.p) }
func (v Value) isInteger() bool      { return v.kind == KindInt || v.kind == KindBool }
func (v Value) isNumber() bool       { return v.isInteger() || v.kind == KindFloat }
func (v Value) isSequence() bool     { return v.kind == KindList || v.kind == KindTuple }
func (v Value) small() (int64, bool) { return int64(v.n), v.isInteger() && v.p == nil }

// big returns an int or bool as a big.Int, which must not be modified.
func (v Value) big() *big.Int {
	if v.p != nil {
		return (*big.Int)(v.p)
	}
	return big.NewInt(int64(v.n))
}

// rangeObject is a Python range within 64 bits. Invariant: step != 0.
type rangeObject struct{ start, stop, step int64 }

func (r *rangeObject) length() int64 {
	switch {
	case r.step > 0 && r.start < r.stop:
		return int64((uint64(r.stop)-uint64(r.start)-1)/uint64(r.step)) + 1
	case r.step < 0 && r.start > r.stop:
		return int64((uint64(r.start)-uint64(r.stop)-1)/(-uint64(r.step))) + 1
	}
	return 0
}

func (r *rangeObject) at(i int64) Value { return Int(r.start + i*r.step) }

// viewOf selects what a dict view shows: keys, values or items.
type viewOf uint8

const (
	viewKeys viewOf = iota
	viewValues
	viewItems
)

type dictView struct {
	dict *Dict
	of   viewOf
}

func (v *dictView) at(i int) Value {
	e := &v.dict.entries[i]
	switch v.of {
	case viewKeys:
		return e.key
	case viewValues:
		return e.value
	default:
		return Tuple([]Value{e.key, e.value})
	}
}
