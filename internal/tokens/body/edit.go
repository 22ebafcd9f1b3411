package body

import (
	"bytes"
	"context"
	"errors"
	"slices"
)

// Edit is a change of one field, created by Set or Delete.
type Edit struct {
	path []string
	raw  []byte // nil deletes
}

// Set gives the field at path the JSON value raw, which Apply does not validate. An existing field keeps its position; a new one
// is appended to its object. Objects along the path are created where they are missing, and replace values of other types.
func Set(raw []byte, path ...string) Edit { return Edit{path: path, raw: raw} }

// Delete removes the field at path. A missing field is not an error.
func Delete(path ...string) Edit { return Edit{path: path} }

// Path returns the keys that lead to the field, which must not be changed.
func (e *Edit) Path() []string { return e.path }

// Deletes reports whether the edit removes the field.
func (e *Edit) Deletes() bool { return e.raw == nil }

// Apply is ApplyContext with a background context.
func Apply(dst, body []byte, edits ...Edit) ([]byte, error) {
	return ApplyContext(context.Background(), dst, body, edits...)
}

// ApplyContext appends body, a checked JSON object, to dst with the edits applied. Bytes outside the edited fields stay
// unchanged. If edits overlap, the later one wins. Of duplicate keys in an object the last is edited and the others are removed.
// dst must not overlap body. Time is linear in the body plus the edits, even with many duplicate keys; memory beyond dst depends
// on the edits alone. If ctx ends early, the error is its cause. After an error the bytes appended to dst are meaningless.
func ApplyContext(ctx context.Context, dst, body []byte, edits ...Edit) ([]byte, error) {
	for i := range edits {
		if len(edits[i].path) == 0 {
			return dst, errors.New("an edit needs a path")
		}
	}
	s := scanner{b: body}
	start := s.begin()
	if start >= len(body) || body[start] != '{' {
		return dst, errors.New("only a JSON object can be edited")
	}
	e := editor{ctx: ctx, b: body, out: append(dst, body[:start]...)}
	end, err := e.object(start, edits, 0)
	if err != nil {
		return dst, err
	}
	return append(e.out, body[end:]...), nil
}

type editor struct {
	ctx    context.Context // of the current ApplyContext call
	b, out []byte
}

// checkMembers is the number of object members that are read between two checks of the context.
const checkMembers = 1024

// member is an object member that a change names.
type member struct {
	key, value Span
	index      int // among all members of its object
	before     int // end of the preceding member
	change     int // index of its change
}

// change is the combined edit of one key of an object.
type change struct {
	name  string
	leaf  bool
	raw   []byte // if leaf; nil deletes
	in    []Edit // edits at deeper levels, in order
	last  member // the last member with this key
	count int    // number of members with this key
}

// changes groups edits by their key at depth. A leaf replaces all earlier edits of its key. at maps a key to its index in list.
func changes(edits []Edit, depth int) (list []change, at map[string]int) {
	at = make(map[string]int, len(edits))
	for _, e := range edits {
		name := e.path[depth]
		i, ok := at[name]
		if !ok {
			i = len(list)
			at[name] = i
			list = append(list, change{name: name})
		}
		c := &list[i]
		if len(e.path) == depth+1 {
			*c = change{name: name, leaf: true, raw: e.raw}
			continue
		}
		if c.leaf && c.raw == nil && e.raw == nil && len(c.in) == 0 {
			continue // nothing is left to delete below
		}
		c.in = append(c.in, e)
	}
	return list, at
}

// members calls each with those members of the object at start whose key is in at. It returns the end of the object's
// last member (of the opening brace if there is none), the number of members, and the end of the object.
func (e *editor) members(start int, at map[string]int, each func(m member)) (tail, n, end int, err error) {
	s := scanner{b: e.b}
	tail = start + 1
	longest := 0
	for name := range at {
		longest = max(longest, len(name))
	}
	end = s.object(start, func(key, value Span) {
		if n%checkMembers == 0 && err == nil {
			if err = context.Cause(e.ctx); err != nil {
				s.stop()
			}
		}
		var room [roomForKey]byte
		name, ok := textWithin(longest, room[:0], key.Of(e.b))
		if i, named := at[string(name)]; ok && named && err == nil {
			each(member{key: key, value: value, index: n, before: tail, change: i})
		}
		n++
		tail = value.End
	})
	if end < 0 && err == nil {
		err = s.finish()
	}
	return tail, n, end, err
}

// object copies the object at start with its edits and returns the offset after it.
func (e *editor) object(start int, edits []Edit, depth int) (int, error) {
	todo, at := changes(edits, depth)
	twice := false
	tail, n, end, err := e.members(start, at, func(m member) {
		c := &todo[m.change]
		c.last = m
		c.count++
		twice = twice || c.count > 1
	})
	if err != nil {
		return 0, err
	}
	from, dropped := start, 0 // the bytes before from are already copied or dropped
	edit := func(m member) {
		if err != nil {
			return
		}
		c := &todo[m.change]
		switch {
		case m.index == c.last.index && !c.deletes():
			e.out = append(e.out, e.b[from:m.value.Start]...)
			from = m.value.End
			err = e.value(m.value, c, depth)
			return
		case m.index > dropped: // drop the preceding comma too
			e.out = append(e.out, e.b[from:m.before]...)
			from = m.value.End
		default: // no earlier member remains: drop the following comma
			e.out = append(e.out, e.b[from:m.key.Start]...)
			from = e.next(m.value.End)
		}
		dropped++
	}
	if twice {
		if _, _, _, gone := e.members(start, at, edit); gone != nil {
			return 0, gone
		}
	} else {
		for _, m := range inOrder(todo) {
			edit(m)
		}
	}
	if err != nil {
		return 0, err
	}
	e.out = append(e.out, e.b[from:tail]...)
	kept := n > dropped
	for i := range todo {
		if c := &todo[i]; c.count == 0 && c.makes() {
			if kept {
				e.out = append(e.out, ',')
			}
			kept = true
			e.out = append(AppendQuoted(e.out, c.name), ':')
			if err := e.value(Span{}, c, depth); err != nil {
				return 0, err
			}
		}
	}
	e.out = append(e.out, e.b[tail:end]...)
	return end, nil
}

// inOrder returns the members found for todo, in the order of the body.
func inOrder(todo []change) []member {
	var out []member
	for i := range todo {
		if todo[i].count > 0 {
			out = append(out, todo[i].last)
		}
	}
	slices.SortFunc(out, func(a, b member) int { return a.index - b.index })
	return out
}

// next returns the start of the member after a value that ends at i, or i if there is none.
func (e *editor) next(i int) int {
	s := scanner{b: e.b}
	if comma := s.space(i); e.b[comma] == ',' {
		return s.space(comma + 1)
	}
	return i
}

// deletes reports whether the change removes the member altogether.
func (c *change) deletes() bool { return c.leaf && c.raw == nil && len(c.in) == 0 }

// makes reports whether the change creates a missing member.
func (c *change) makes() bool { return c.leaf && c.raw != nil || anySets(c.in) }

func anySets(edits []Edit) bool {
	return slices.ContainsFunc(edits, func(e Edit) bool { return e.raw != nil })
}

// value writes the new form of old; a zero old is an absent member.
func (e *editor) value(old Span, c *change, depth int) error {
	switch {
	case c.leaf && len(c.in) == 0:
		e.out = append(e.out, c.raw...)
		return nil
	case c.leaf:
		inner := editor{ctx: e.ctx, b: bytes.TrimLeft(c.raw, " \t\r\n"), out: e.out}
		if len(inner.b) == 0 || inner.b[0] != '{' {
			if !anySets(c.in) {
				e.out = append(e.out, c.raw...)
				return nil
			}
			inner.b = []byte("{}")
		}
		_, err := inner.object(0, c.in, depth+1)
		e.out = inner.out
		return err
	case old.Present() && e.b[old.Start] == '{':
		_, err := e.object(old.Start, c.in, depth+1)
		return err
	case old.Present() && !c.makes():
		e.out = append(e.out, old.Of(e.b)...)
		return nil
	default:
		inner := editor{ctx: e.ctx, b: []byte("{}"), out: e.out}
		_, err := inner.object(0, c.in, depth+1)
		e.out = inner.out
		return err
	}
}
