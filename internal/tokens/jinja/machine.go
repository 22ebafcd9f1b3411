package jinja

import (
	"slices"
	"strings"
	"time"
	"unicode/utf8"
	"unsafe"
)

// machine is the state of a rendering.
type machine struct {
	ctx   *Dict
	now   time.Time
	names []Value // the values of Template.names

	out   []byte
	base  int // start of the rendered text in out
	stack []Value

	maxOutput int
	steps     int // steps until the next check of stop, or all remaining steps if stop is nil
	later     int // remaining steps beyond these
	stop      <-chan struct{}
	memory    int
	depth     int // of calls
	nested    int // iterators that wait for the next item of another one
}

func (m *machine) step() {
	if m.steps--; m.steps < 0 {
		m.look()
	}
}

// stepsAtOnce is the number of steps between two checks of the stop channel: about a millisecond.
const stepsAtOnce = 1 << 16

// nodesAtOnce is the number of expressions and statements that a body runs for a step.
const nodesAtOnce = 8

// look grants further steps. It raises ResourceLimit if none remain, and Stopped if stop is closed.
func (m *machine) look() {
	for m.steps < 0 {
		if m.later == 0 {
			raisef("ResourceLimit", "template takes too many steps")
		}
		select {
		case <-m.stop:
			raisef("Stopped", "the rendering was stopped")
		default:
		}
		n := min(m.later, stepsAtOnce)
		m.later -= n
		m.steps += n
	}
}

// work charges the steps for reading that many bytes, at the rate of a plain comparison.
func (m *machine) work(bytes int) {
	if m.steps -= bytes >> 6; m.steps < 0 {
		m.step()
	}
}

// operands charges the steps for the text that a filter, method or test may read.
func (m *machine) operands(v Value, a *arguments) {
	n := v.textSize()
	for i := range a.pos {
		n += a.pos[i].textSize()
	}
	for i := range a.kw {
		n += a.kw[i].textSize()
	}
	m.steps -= n >> 5
	m.step()
}

// charge deducts bytes of intermediate values from the memory budget, before they are allocated.
func (m *machine) charge(bytes int) {
	if bytes < 0 || bytes > m.memory {
		raisef("ResourceLimit", "template needs too much memory")
	}
	m.memory -= bytes
	m.steps -= bytes >> 8
	m.step()
}

// chargeInt charges for the digits of an int.
func (m *machine) chargeInt(v Value) {
	if v.kind == KindInt && v.p != nil {
		words := v.big().BitLen() / 64
		m.steps -= words * words / 32
		m.charge(words * 18)
	}
}

// chargeRepeat charges n copies of size bytes.
func (m *machine) chargeRepeat(n int64, size int) {
	if n > 0 && size > 0 && n > int64(m.memory/size) {
		raisef("ResourceLimit", "template needs too much memory")
	}
	if n > 0 {
		m.charge(int(n) * size)
	}
}

// levelSize is about the stack, in bytes, that a level of the tree takes while it is evaluated.
const levelSize = 192

// enterCall charges for the stack of a call of that many levels, until leaveCall.
func (m *machine) enterCall(levels int) {
	if m.depth++; m.depth > maxCalls {
		raisef("RecursionError", "maximum recursion depth exceeded")
	}
	m.charge(levels * levelSize)
}

func (m *machine) leaveCall(levels int) {
	m.depth--
	m.memory += levels * levelSize
}

func (m *machine) newFrame(fn *funcScope, parent *frame) *frame {
	m.charge((fn.slots + 2) * valueSize)
	return &frame{slots: make([]Value, fn.slots), parent: parent, m: m}
}

func (m *machine) fromContext(name string) Value {
	if v, ok := m.ctx.Get(name); ok {
		return v
	}
	if v, ok := globals[name]; ok {
		return v
	}
	return Value{kind: kindMissing}
}

func (m *machine) write(text string) {
	if len(m.out)-m.base+len(text) > m.maxOutput {
		raisef("ResourceLimit", "template writes too much")
	}
	m.work(len(text))
	m.out = append(m.out, text...)
}

func (m *machine) emit(v Value) {
	switch v.kind {
	case KindString:
		m.write(v.str())
	case KindUndefined:
	default:
		m.write(m.text(v))
	}
}

// capture runs body and removes its output, which it returns as a str.
func (m *machine) capture(f *frame, body stmt) (Value, signal) {
	start := len(m.out)
	sig := body(f)
	m.charge(len(m.out) - start)
	text := String(string(m.out[start:]))
	m.out = m.out[:start]
	return text, sig
}

// text is Python's str(v).
func (m *machine) text(v Value) string {
	if v.kind == KindString {
		return v.str()
	}
	b := m.appendStr(nil, v)
	return unsafe.String(unsafe.SliceData(b), len(b))
}

func (m *machine) concat(values []Value) Value {
	n := 0
	for i, v := range values {
		if v.kind != KindString {
			values[i] = String(m.text(v))
		}
		n += int(values[i].n)
	}
	m.charge(n)
	buf := make([]byte, 0, n)
	for _, v := range values {
		buf = append(buf, v.str()...)
	}
	return String(unsafe.String(unsafe.SliceData(buf), len(buf)))
}

func (m *machine) call(v Value, a *arguments) Value {
	m.step()
	switch v.kind {
	case kindCallable:
		return (*callable)(v.p).call(m, a)
	case kindLoop:
		raisef("TypeError", "The loop must have the 'recursive' marker to be called recursively.")
	case KindUndefined:
		mustDefined(v)
	}
	raisef("TypeError", "'%s' object is not callable", typeName(v))
	return Value{}
}

// call runs a macro; parent is the frame in which it was defined.
func (code *macroCode) call(m *machine, parent *frame, a *arguments) Value {
	m.enterCall(code.levels)
	m.steps -= (code.size + len(a.names)*len(code.params)) / nodesAtOnce
	f := m.newFrame(code.fn, parent)
	missing := Value{kind: kindMissing}
	used := make([]bool, len(a.kw))
	keyword := func(name string) (Value, bool) {
		for i, n := range a.names {
			if n == name {
				used[i] = true
				return a.kw[i], true
			}
		}
		return missing, false
	}
	n := min(len(a.pos), len(code.params))
	for i := range n {
		f.slots[code.slots[i]] = a.pos[i]
	}
	foundCaller := n == len(code.params) && code.explicitCaller
	for i := n; i < len(code.params); i++ {
		v, _ := keyword(code.params[i])
		f.slots[code.slots[i]] = v
		foundCaller = foundCaller || code.params[i] == "caller"
	}
	if code.caller >= 0 && !foundCaller {
		v, ok := keyword("caller")
		if !ok || v.kind == KindNone {
			v = undefinedOf(&undefinedInfo{hint: "No caller defined"})
		}
		f.slots[code.caller] = v
	}
	code.refuseRest(a, used)
	code.enter(f)
	for i, slot := range code.slots {
		if f.slots[slot].kind != kindMissing {
			continue
		}
		if d := code.defaults[i]; d != nil {
			f.slots[slot] = d(f)
		} else {
			f.slots[slot] = undefinedOf(&undefinedInfo{hint: "parameter " + reprText(code.params[i]) + " was not provided"})
		}
	}
	text, _ := m.capture(f, code.body)
	m.leaveCall(code.levels)
	return text
}

// refuseRest raises if an argument matches no parameter.
func (code *macroCode) refuseRest(a *arguments, used []bool) {
	name := "None"
	if code.name != "" {
		name = reprText(code.name)
	}
	first := ""
	for i, u := range slices.Backward(used) {
		if u {
			continue
		}
		if first = a.names[i]; first == "caller" {
			raisef("TypeError", "macro %s was invoked with two values for the special caller argument. This is most likely a bug.", name)
		}
	}
	if first != "" {
		raisef("TypeError", "macro %s takes no keyword argument %s", name, reprText(first))
	}
	if len(a.pos) > len(code.params) {
		raisef("TypeError", "macro %s takes not more than %d argument(s)", name, len(code.params))
	}
}

// iterate is Python's iter(v).
func (m *machine) iterate(v Value) iteration {
	switch v.kind {
	case KindList, KindTuple:
		return iteration{items: v.seq(), length: len(v.seq())}
	case KindDict:
		d := v.dict()
		return counted(d.Len(), func(i int) Value { return d.entries[i].key })
	case kindView:
		view := (*dictView)(v.p)
		if view.of == viewItems {
			return counted(view.dict.Len(), func(i int) Value {
				m.charge(4 * valueSize)
				return view.at(i)
			})
		}
		return counted(view.dict.Len(), view.at)
	case KindString:
		s, pos := v.str(), 0
		m.work(len(s))
		return iteration{length: utf8.RuneCountInString(s), next: func() (Value, bool) {
			if pos >= len(s) {
				return Value{}, false
			}
			_, size := utf8.DecodeRuneInString(s[pos:])
			pos += size
			return String(s[pos-size : pos]), true
		}}
	case kindRange:
		r := (*rangeObject)(v.p)
		return counted(int(r.length()), func(i int) Value { return r.at(int64(i)) })
	case kindIterator:
		return iteration{length: -1, next: (*iterator)(v.p).next}
	case kindLoop:
		unsupportedf("a loop over the variable loop")
	case KindUndefined:
		return iteration{}
	}
	raisef("TypeError", "'%s' object is not iterable", typeName(v))
	return iteration{}
}

func canIterate(v Value) bool {
	switch v.kind {
	case KindString, KindList, KindTuple, KindDict, kindRange, kindView, kindIterator, kindLoop, KindUndefined:
		return true
	}
	return false
}

func counted(n int, at func(i int) Value) iteration {
	i := 0
	return iteration{length: n, next: func() (Value, bool) {
		if i >= n {
			return Value{}, false
		}
		i++
		return at(i - 1), true
	}}
}

// items is Python's list(v), without copying a list.
func (m *machine) items(v Value) []Value {
	it := m.iterate(v)
	if it.next == nil {
		return it.items
	}
	var out []Value
	for item, ok := it.step(); ok; item, ok = it.step() {
		m.charge(2 * valueSize)
		out = append(out, item)
	}
	return out
}

// unpack is the assignment of v to n targets.
func (m *machine) unpack(v Value, n int) []Value {
	m.steps -= n / nodesAtOnce
	it := m.iterate(v)
	var items []Value
	if it.next == nil {
		items = it.items
	} else {
		for len(items) <= n {
			item, ok := it.step()
			if !ok {
				break
			}
			items = append(items, item)
		}
	}
	switch {
	case len(items) < n:
		raisef("ValueError", "not enough values to unpack (expected %d, got %d)", n, len(items))
	case len(items) > n:
		raisef("ValueError", "too many values to unpack (expected %d)", n)
	}
	return items
}

// contains is Python's item in container.
func (m *machine) contains(container, item Value) bool {
	switch container.kind {
	case KindString:
		if item.kind != KindString {
			if item.kind == KindUndefined {
				raisef("TypeError", "'in <string>' requires string as left operand, not Undefined")
			}
			raisef("TypeError", "'in <string>' requires string as left operand, not %s", typeName(item))
		}
		m.work(4 * (len(container.str()) + len(item.str())))
		return strings.Contains(container.str(), item.str())
	case KindDict:
		return m.find(container.dict(), item) >= 0
	case kindView:
		if view := (*dictView)(container.p); view.of == viewKeys {
			return m.find(view.dict, item) >= 0
		}
	case kindRange:
		if n, ok := item.small(); ok {
			r := (*rangeObject)(container.p)
			m.work(int(min(r.length(), maxRange)) << 6)
			for i := range r.length() {
				if r.start+i*r.step == n {
					return true
				}
			}
			return false
		}
	case KindUndefined, KindList, KindTuple, kindIterator:
	default:
		raisef("TypeError", "argument of type '%s' is not iterable", typeName(container))
	}
	it := m.iterate(container)
	for v, ok := it.step(); ok; v, ok = it.step() {
		if m.same(v, item, 0) {
			return true
		}
	}
	return false
}

// length is Python's len(v).
func (m *machine) length(v Value) int64 {
	switch v.kind {
	case KindString:
		m.work(len(v.str()))
		return int64(utf8.RuneCountInString(v.str()))
	case KindList, KindTuple:
		return int64(len(v.seq()))
	case KindDict:
		return int64(v.dict().Len())
	case kindView:
		return int64((*dictView)(v.p).dict.Len())
	case kindRange:
		return (*rangeObject)(v.p).length()
	case kindLoop:
		return (*loopObject)(v.p).len()
	case KindUndefined:
		return 0
	}
	raisef("TypeError", "object of type '%s' has no len()", typeName(v))
	return 0
}
