package body

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
)

// Edit is one change of one field. Make it with Set or Delete.
type Edit struct {
	path []string
	raw  []byte // nil deletes
}

// Set gives the field at path the JSON value raw, which Apply does not check. A field that is there keeps its place, a new
// one goes to the end of its object, and objects on the way are made where they are missing (or are no objects).
func Set(raw []byte, path ...string) Edit { return Edit{path: path, raw: raw} }

// Delete removes the field at path; it is no error if it is not there.
func Delete(path ...string) Edit { return Edit{path: path} }

// Apply is ApplyContext without a context.
func Apply(dst, body []byte, edits ...Edit) ([]byte, error) {
	return ApplyContext(context.Background(), dst, body, edits...)
}

// ApplyContext appends body, a checked JSON object, to dst with the edits made. Bytes outside the edited fields stay as they
// are. Where edits touch the same field, or one lies inside another, the later one wins. Of equal keys in one object the last
// is edited and the others go. dst must not overlap body. The cost grows linearly with the body and with the edits, however
// many members are equal; memory beyond dst depends on the edits alone. If ctx ends meanwhile, the error is its cause; after
// an error the bytes behind dst are meaningless.
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
	ctx    context.Context // of one call of ApplyContext
	b, out []byte
}

// checkMembers is how many members of an object are read between two looks at the context.
const checkMembers = 1024

// member is one that a change names.
type member struct {
	key, value Span
	index      int // among all members of its object
	before     int // end of the member before it
	change     int // index of its change
}

// change is what happens to one key of one object.
type change struct {
	name  string
	leaf  bool
	raw   []byte // of a leaf; nil deletes
	in    []Edit // edits further down, in order
	last  member // of those with this key, the last
	count int    // of those with this key
}

// changes groups edits by the key they touch at depth; a leaf undoes what was asked before for that key. at finds a change by
// its name.
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

// members calls each with the members of the object at start that at names. It returns the end of the last of all members,
// or of the brace if there is none, how many there are, and the end of the object.
func (e *editor) members(start int, at map[string]int, each func(m member)) (tail, n, end int, err error) {
	s := scanner{b: e.b}
	tail = start + 1
	end = s.object(start, func(key, value Span) {
		if n%checkMembers == 0 && err == nil {
			if err = context.Cause(e.ctx); err != nil {
				s.stop()
			}
		}
		name := e.b[key.Start+1 : key.End-1]
		if hasEscape(name) {
			name = []byte(text(key.Of(e.b)))
		}
		if i, ok := at[string(name)]; ok && err == nil {
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
	from, dropped := start, 0 // the bytes before from are copied, or have gone
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
		case m.index > dropped: // the comma before it goes with it
			e.out = append(e.out, e.b[from:m.before]...)
			from = m.value.End
		default: // nothing before it stays: the comma behind it goes
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
			if e.out, err = appendKey(e.out, c.name); err != nil {
				return 0, err
			}
			e.out = append(e.out, ':')
			if err := e.value(Span{}, c, depth); err != nil {
				return 0, err
			}
		}
	}
	e.out = append(e.out, e.b[tail:end]...)
	return end, nil
}

// inOrder are the members that changes found, as they stand in the body.
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

// next is where the member behind a value that ends at i starts, or i if there is none.
func (e *editor) next(i int) int {
	s := scanner{b: e.b}
	if comma := s.space(i); e.b[comma] == ',' {
		return s.space(comma + 1)
	}
	return i
}

// deletes reports whether nothing is left of a member.
func (c *change) deletes() bool { return c.leaf && c.raw == nil && len(c.in) == 0 }

// makes reports whether the change puts something where nothing is.
func (c *change) makes() bool {
	return c.leaf && c.raw != nil || anySets(c.in)
}

func anySets(edits []Edit) bool {
	return slices.ContainsFunc(edits, func(e Edit) bool { return e.raw != nil })
}

// value writes what becomes of old (absent if zero).
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

func appendKey(dst []byte, name string) ([]byte, error) {
	key, err := json.Marshal(name)
	if err != nil {
		return dst, fmt.Errorf("key %q: %w", name, err)
	}
	return append(dst, key...), nil
}
