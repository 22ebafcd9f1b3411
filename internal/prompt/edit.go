package prompt

import (
	"bytes"
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

// Apply appends body, a checked JSON object, to dst with the edits made. Bytes outside the edited fields stay as they are.
// Where edits touch the same field, or one lies inside another, the later one wins. Of equal keys in one object the last
// is edited and the others go. dst must not overlap body.
func Apply(dst, body []byte, edits ...Edit) ([]byte, error) {
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
	e := editor{b: body, out: append(dst, body[:start]...)}
	end, err := e.object(start, edits, 0)
	if err != nil {
		return dst, err
	}
	return append(e.out, body[end:]...), nil
}

type editor struct{ b, out []byte }

type member struct {
	key, value Span
	change     int // index of its change, -1 if it stays
	dropped    bool
}

// change is what happens to one key of one object.
type change struct {
	name string
	leaf bool
	raw  []byte // of a leaf; nil deletes
	in   []Edit // edits further down, in order
	made bool
}

// changes groups edits by the key they touch at depth; a leaf undoes what was asked before for that key.
func changes(edits []Edit, depth int) []change {
	var out []change
next:
	for _, e := range edits {
		at := -1
		for i := range out {
			if out[i].name == e.path[depth] {
				at = i
			}
		}
		if at < 0 {
			at = len(out)
			out = append(out, change{name: e.path[depth]})
		}
		c := &out[at]
		if len(e.path) == depth+1 {
			*c = change{name: c.name, leaf: true, raw: e.raw}
			continue next
		}
		if c.leaf && c.raw == nil && e.raw == nil && len(c.in) == 0 {
			continue next // nothing is left to delete below
		}
		c.in = append(c.in, e)
	}
	return out
}

// object copies the object at start with its edits and returns the offset after it.
func (e *editor) object(start int, edits []Edit, depth int) (int, error) {
	todo := changes(edits, depth)
	var members []member
	s := scanner{b: e.b}
	end := s.object(start, func(key, value Span) {
		m := member{key: key, value: value, change: -1}
		for i := range todo {
			if sameKey(key.Of(e.b), todo[i].name) {
				m.change = i
			}
		}
		if m.change >= 0 {
			for i := range members {
				if members[i].change == m.change {
					members[i].dropped = true
				}
			}
			m.dropped = todo[m.change].leaf && todo[m.change].raw == nil && len(todo[m.change].in) == 0
		}
		members = append(members, m)
	})
	if end < 0 {
		return 0, s.finish()
	}
	// The bytes before a kept member are the gap behind its predecessor, comma included; the first one kept has the gap
	// that followed the brace.
	gap := start
	kept := false
	for i := range members {
		m := &members[i]
		if m.dropped {
			if !kept && i == 0 {
				e.out = append(e.out, e.b[start:m.key.Start]...)
			}
			gap = m.value.End
			if m.change >= 0 && todo[m.change].leaf && todo[m.change].raw == nil {
				todo[m.change].made = true
			}
			continue
		}
		if kept || i == 0 {
			e.out = append(e.out, e.b[gap:m.key.Start]...)
		}
		kept = true
		gap = m.value.End
		if m.change < 0 {
			e.out = append(e.out, e.b[m.key.Start:m.value.End]...)
			continue
		}
		e.out = append(e.out, e.b[m.key.Start:m.value.Start]...)
		c := &todo[m.change]
		c.made = true
		if err := e.value(m.value, c, depth); err != nil {
			return 0, err
		}
	}
	if len(members) == 0 {
		e.out = append(e.out, '{')
		gap = start + 1
	}
	for i := range todo {
		if c := &todo[i]; !c.made && c.makes() {
			if kept {
				e.out = append(e.out, ',')
			}
			kept = true
			var err error
			if e.out, err = appendKey(e.out, c.name); err != nil {
				return 0, err
			}
			e.out = append(e.out, ':')
			if err := e.value(Span{}, c, depth); err != nil {
				return 0, err
			}
		}
	}
	e.out = append(e.out, e.b[gap:end]...)
	return end, nil
}

// makes tells whether the change puts something where nothing is.
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
		inner := editor{b: bytes.TrimLeft(c.raw, " \t\r\n"), out: e.out}
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
		inner := editor{b: []byte("{}"), out: e.out}
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
