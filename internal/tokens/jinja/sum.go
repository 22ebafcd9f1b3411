package jinja

import (
	"slices"
	"unsafe"
)

// sum is a chain a + b + c ..., by which most templates build a message. As long as its operands are plain strs, their
// text is copied only once, or not at all if the chain is written to the output.
type sum []expr

// sum compiles the chain that ends with n.
func (c *compiler) sum(s scope, n *node) sum {
	var nodes []*node
	for ; isSum(n); n = n.a {
		nodes = append(nodes, n.b)
	}
	nodes = append(nodes, n)
	slices.Reverse(nodes)
	return c.exprs(s, nodes)
}

func isSum(n *node) bool { return n.kind == nodeBinary && n.name == "+" }

// collect pushes the leading plain strs onto the machine's stack, from base on. If an operand is
// something else, v is the value of the whole chain and plain is false. Adding strs cannot fail
// and is not observable by an operand, so it can be deferred. The caller truncates the stack.
func (s sum) collect(f *frame) (base, size int, v Value, plain bool) {
	m := f.m
	base = len(m.stack)
	for i, part := range s {
		v := part(f)
		if v.kind != KindString || v.safe {
			if i > 0 {
				m.charge(size)
				v = add(m, m.joined(base, size), v)
			}
			for _, part := range s[i+1:] {
				v = add(m, v, part(f))
			}
			return base, size, v, false
		}
		size += len(v.str())
		m.step()
		m.stack = append(m.stack, v)
	}
	return base, size, Value{}, true
}

// joined returns the text on the stack from base on, which has size bytes.
func (m *machine) joined(base, size int) Value {
	parts := m.stack[base:]
	if len(parts) == 1 {
		return parts[0]
	}
	buf := make([]byte, 0, size)
	for _, v := range parts {
		buf = append(buf, v.str()...)
	}
	return String(unsafe.String(unsafe.SliceData(buf), len(buf)))
}

func (s sum) value(f *frame) Value {
	base, size, v, plain := s.collect(f)
	if plain {
		if len(s) > 1 {
			f.m.charge(size)
		}
		v = f.m.joined(base, size)
	}
	f.m.stack = f.m.stack[:base]
	return v
}

// write is value followed by emit.
func (s sum) write(f *frame) signal {
	m := f.m
	base, _, v, plain := s.collect(f)
	if plain {
		for i := base; i < len(m.stack); i++ {
			m.write(m.stack[i].str())
		}
	} else {
		m.emit(v)
	}
	m.stack = m.stack[:base]
	return signalNone
}
