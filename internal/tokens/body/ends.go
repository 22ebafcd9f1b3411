package body

// Ends knows where the objects and arrays of a checked JSON value end, so that who
// walks into it level by level does not read what is deep inside again at each level.
// It belongs to one goroutine and is for the slices of the value that it was made of.
// The zero value and nil know nothing.
type Ends struct {
	length map[*byte]int // by their first byte
	// Skipped is the bytes that were not read again.
	Skipped int
}

// leastEnd is the bytes of an object or array from which its end is worth keeping.
const leastEnd = 64

// EndsOf reads raw, a checked JSON value, once.
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

// EachMember is the function of this name.
func (e *Ends) EachMember(raw []byte, each func(key, value []byte)) {
	s := scanner{b: raw, ends: e}
	if start := s.begin(); start < len(raw) && raw[start] == '{' {
		s.object(start, func(key, value Span) { each(key.Of(raw), value.Of(raw)) })
	}
}

// EachItem is the function of this name.
func (e *Ends) EachItem(raw []byte, each func(item []byte)) {
	s := scanner{b: raw, ends: e}
	if start := s.begin(); start < len(raw) && raw[start] == '[' {
		s.array(start, func(element Span) { each(element.Of(raw)) })
	}
}

// Member is the function of this name.
func (e *Ends) Member(raw []byte, name string) (found []byte) {
	e.EachMember(raw, func(key, value []byte) {
		if sameKey(key, name) {
			found = value
		}
	})
	return found
}

// skip is the length of the object or array that begins with b[i], 0 if it is not known.
func (e *Ends) skip(b []byte, i int) int {
	n := e.length[&b[i]]
	if n > len(b)-i {
		return 0 // of another slice
	}
	e.Skipped += n
	return n
}
