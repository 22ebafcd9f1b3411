package body

// Ends memoizes where the nested objects and arrays of a checked JSON value end, so that a
// level-by-level traversal does not scan deep content again at each level. It is valid only for
// sub-slices of the value passed to EndsOf. It is not safe for concurrent use. The zero value and
// nil are usable and memoize nothing.
type Ends struct {
	length map[*byte]int // by the address of the first byte
	// Skipped is the number of bytes that were not scanned again.
	Skipped int
}

// leastEnd is the smallest object or array, in bytes, whose end is memoized.
const leastEnd = 64

// EndsOf scans raw, a checked JSON value, once.
func EndsOf(raw []byte) *Ends {
	e := &Ends{length: map[*byte]int{}}
	s := scanner{b: raw}
	var open []int
	for i := 0; i < len(raw); {
		switch raw[i] {
		case '"':
			if i = s.str(i); i < 0 {
				return e
			}
			continue
		case '{', '[':
			open = append(open, i)
		case '}', ']':
			if len(open) == 0 {
				return e
			}
			start := open[len(open)-1]
			open = open[:len(open)-1]
			if n := i + 1 - start; n >= leastEnd {
				e.length[&raw[start]] = n
			}
		}
		i++
	}
	return e
}

// EachMember is like the function EachMember.
func (e *Ends) EachMember(raw []byte, each func(key, value []byte)) {
	s := scanner{b: raw, ends: e}
	if start := s.begin(); start < len(raw) && raw[start] == '{' {
		s.object(start, func(key, value Span) { each(key.Of(raw), value.Of(raw)) })
	}
}

// EachItem is like the function EachItem.
func (e *Ends) EachItem(raw []byte, each func(item []byte)) {
	s := scanner{b: raw, ends: e}
	if start := s.begin(); start < len(raw) && raw[start] == '[' {
		s.array(start, func(element Span) { each(element.Of(raw)) })
	}
}

// Member is like the function Member.
func (e *Ends) Member(raw []byte, name string) (found []byte) {
	e.EachMember(raw, func(key, value []byte) {
		if sameKey(key, name) {
			found = value
		}
	})
	return found
}

// skip returns the length of the object or array that starts at b[i], or 0 if it is not memoized.
func (e *Ends) skip(b []byte, i int) int {
	n := e.length[&b[i]]
	if n > len(b)-i {
		return 0 // b is a slice of another value
	}
	e.Skipped += n
	return n
}
