package pydantic

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/kvlane/kvlane/internal/prompt"
)

// Error says where a value does not fit, and why.
type Error struct {
	Path   string // such as messages.3.role
	Reason string
}

func (e *Error) Error() string {
	if e.Path == "" {
		return e.Reason
	}
	return e.Path + ": " + e.Reason
}

func wrong(reason string) error { return &Error{Reason: reason} }

func within(step string, err error) error {
	e, ok := errors.AsType[*Error](err)
	if !ok {
		return err
	}
	if e.Path == "" {
		return &Error{Path: step, Reason: e.Reason}
	}
	return &Error{Path: step + "." + e.Path, Reason: e.Reason}
}

// Check says why raw, a checked JSON value, does not fit; nil if it does. Elements of an Iterable are looked at when Python
// walks over them, which is later; Check does not.
func (s *Schema) Check(raw []byte) error {
	_, err := s.judge(newWalk(raw), raw)
	return err
}

// CheckAll is Check, and then looks at the elements of every Iterable that the chosen types hold.
func (s *Schema) CheckAll(raw []byte) error { return s.checkAll(newWalk(raw), raw) }

func (s *Schema) checkAll(w *walk, raw []byte) error {
	v, err := s.judge(w, raw)
	if err != nil {
		return err
	}
	for _, l := range v.later {
		if err := l.items(w, l.raw); err != nil {
			return err
		}
	}
	return nil
}

// verdict is how well a value fits: unions choose by it (pydantic's smart mode).
type verdict struct {
	exact exactness
	// fields counts the fields of models that the value sets; counted is false if there is no model in it.
	fields  int
	counted bool
	later   []iterator
}

type exactness uint8

const (
	exact  exactness = iota // the very type
	strict                  // another type that the strict mode takes
	lax                     // converted
)

// iterator is an Iterable that nobody has walked over.
type iterator struct {
	of  *Schema
	raw []byte
}

func (v *verdict) add(o verdict) {
	v.exact = max(v.exact, o.exact)
	v.fields += o.fields
	v.counted = v.counted || o.counted
	v.later = append(v.later, o.later...)
}

// items checks the elements: of an object its keys, of a text its characters.
func (l iterator) items(w *walk, raw []byte) error {
	n := 0
	var err error
	each := func(item []byte) {
		if err == nil {
			if err = l.of.checkAll(w, item); err != nil {
				err = within(fmt.Sprint(n), err)
			}
		}
		n++
	}
	switch raw[0] {
	case '[':
		w.ends(raw).EachItem(raw, each)
	case '{':
		w.ends(raw).EachMember(raw, func(key, _ []byte) { each(key) })
	default:
		if string(raw) != `""` {
			each([]byte(`"x"`)) // any character is a text of its own
		}
	}
	return err
}

func (s *Schema) judge(w *walk, raw []byte) (verdict, error) {
	switch s.kind {
	case anything:
		return verdict{exact: strict}, nil
	case nothing:
		if !isNull(raw) {
			return verdict{}, wrong("Input should be None")
		}
		return verdict{}, nil
	case nullable:
		if isNull(raw) {
			return verdict{}, nil
		}
		return s.of[0].judge(w, raw)
	case boolean:
		if _, ok := Bool(raw); !ok {
			return verdict{}, wrong("Input should be a valid boolean")
		}
		if raw[0] == 't' || raw[0] == 'f' {
			return verdict{}, nil
		}
		return verdict{exact: lax}, nil
	case integer, number:
		return s.judgeNumber(raw)
	case text:
		return verdict{}, s.checkText(raw)
	case literal:
		return verdict{}, s.checkLiteral(raw)
	case list, iterable, tuple:
		return s.judgeList(w, raw)
	case dict:
		return s.judgeDict(w, raw)
	case union:
		return s.judgeUnion(w, raw)
	case tagged:
		return s.judgeTagged(w, raw)
	case all:
		var v verdict
		for _, step := range s.of {
			o, err := step.judge(w, raw)
			if err != nil {
				return v, err
			}
			v.add(o)
		}
		return v, nil
	case model:
		return s.judgeModel(w, raw)
	case function:
		return s.judgeFunction(w, raw)
	default: // instance
		if s.instanceList && len(raw) > 0 && raw[0] == '[' {
			return verdict{}, nil
		}
		return verdict{}, wrong("Input should be an instance of another type")
	}
}

func isNull(raw []byte) bool { return string(raw) == "null" }

func (s *Schema) checkText(raw []byte) error {
	if raw[0] != '"' {
		return wrong("Input should be a valid string")
	}
	if s.short < 0 && s.long < 0 && s.pattern == nil {
		return nil // whatever Python's str holds, halves of surrogate pairs too
	}
	value, ok := prompt.TextOf(raw)
	if !ok {
		return wrong("Input should be a valid string, unable to parse raw data as a unicode string")
	}
	n := utf8.RuneCountInString(value)
	switch {
	case n < s.short:
		return wrong(fmt.Sprintf("String should have at least %d characters", s.short))
	case s.long >= 0 && n > s.long:
		return wrong(fmt.Sprintf("String should have at most %d characters", s.long))
	case s.pattern != nil && !s.pattern.MatchString(value):
		return wrong("String should match pattern '" + s.pattern.String() + "'")
	}
	return nil
}

func (s *Schema) checkLiteral(raw []byte) error {
	if slices.Contains(s.literals, string(raw)) {
		return nil
	}
	if value, ok := prompt.TextOf(raw); ok && slices.Contains(s.literals, `"`+value+`"`) {
		return nil
	}
	return wrong("Input should be " + strings.Join(s.literals, ", "))
}

func (s *Schema) judgeList(w *walk, raw []byte) (verdict, error) {
	if s.kind == iterable && (raw[0] == '[' || raw[0] == '{' || raw[0] == '"') {
		return verdict{later: []iterator{{s.of[0], raw}}}, nil
	}
	var v verdict
	if raw[0] != '[' {
		return v, wrong("Input should be a valid list")
	}
	n := 0
	var err error
	w.ends(raw).EachItem(raw, func(item []byte) {
		at := n
		if n++; err != nil {
			return
		}
		of := s.of[0]
		if s.kind == tuple {
			if at >= len(s.of) {
				return
			}
			of = s.of[at]
		}
		var o verdict
		if o, err = of.judge(w, item); err != nil {
			err = within(fmt.Sprint(at), err)
		}
		v.add(o)
	})
	if err == nil && s.kind == tuple && n != len(s.of) {
		err = wrong("Input should be a tuple of another length")
	}
	if err == nil {
		err = s.length("List", n)
	}
	return v, err
}

// length checks how many items there are.
func (s *Schema) length(what string, n int) error {
	switch {
	case n < s.short:
		return wrong(fmt.Sprintf("%s should have at least %d items after validation, not %d", what, s.short, n))
	case s.long >= 0 && n > s.long:
		return wrong(fmt.Sprintf("%s should have at most %d items after validation, not %d", what, s.long, n))
	}
	return nil
}

func (s *Schema) judgeDict(w *walk, raw []byte) (verdict, error) {
	var v verdict
	if raw[0] != '{' {
		return v, wrong("Input should be a valid dictionary")
	}
	n := 0
	var err error
	w.ends(raw).EachMember(raw, func(key, value []byte) {
		n++
		for _, part := range [...]struct {
			of  *Schema
			raw []byte
		}{{s.keys, key}, {s.of[0], value}} {
			if err != nil {
				return
			}
			var o verdict
			if o, err = part.of.judge(w, part.raw); err != nil {
				err = within(nameOf(key), err)
			}
			v.add(o)
		}
	})
	if err == nil {
		err = s.length("Dictionary", n)
	}
	return v, err
}

func nameOf(key []byte) string {
	name, ok := prompt.TextOf(key)
	if !ok {
		return string(key)
	}
	return name
}

// judgeUnion chooses as pydantic's smart mode does: an exact value without fields wins at once, else the choice that sets
// most fields, then the most exact one, then the first.
func (s *Schema) judgeUnion(w *walk, raw []byte) (verdict, error) {
	var first error
	var best verdict
	found := false
	for _, choice := range s.of {
		v, err := choice.judge(w, raw)
		if err != nil {
			if first == nil {
				first = err
			}
			continue
		}
		if v.exact == exact && !v.counted {
			return v, nil
		}
		better := v.exact < best.exact
		if v.counted && best.counted && v.fields != best.fields {
			better = v.fields > best.fields
		}
		if !found || better {
			best, found = v, true
		}
	}
	if found {
		return best, nil
	}
	return best, first
}

func (s *Schema) judgeTagged(w *walk, raw []byte) (verdict, error) {
	if raw[0] != '{' {
		return verdict{}, wrong("Input should be a valid dictionary or object to extract fields from")
	}
	tag, ok := prompt.TextOf(w.ends(raw).Member(raw, s.by))
	if s.tag != nil {
		tag, ok = s.tag(raw), true
	}
	if !ok {
		return verdict{}, wrong("Unable to extract tag using discriminator '" + s.by + "'")
	}
	choice := s.tags[tag]
	if choice == nil {
		return verdict{}, wrong("Input tag '" + tag + "' found using '" + s.by + "' does not match any of the expected tags")
	}
	v, err := choice.judge(w, raw)
	return v, within(tag, err)
}

func (s *Schema) judgeModel(w *walk, raw []byte) (verdict, error) {
	v := verdict{counted: true}
	if raw[0] != '{' {
		return v, wrong("Input should be a valid dictionary")
	}
	values := make([][]byte, len(s.fields))
	var err error
	w.ends(raw).EachMember(raw, func(key, value []byte) {
		name, ok := prompt.TextOf(key)
		if f := s.fields[name]; ok && f != nil {
			values[f.index] = value // the last one of equal keys counts
		} else if s.forbid && err == nil {
			err = within(nameOf(key), wrong("Extra inputs are not permitted"))
		}
	})
	if err != nil {
		return v, err
	}
	for _, name := range s.required {
		if values[s.fields[name].index] == nil {
			return v, within(name, wrong("Field required"))
		}
	}
	for i, f := range s.ordered {
		if values[i] == nil {
			continue
		}
		o, err := f.schema.judge(w, values[i])
		if err != nil {
			return v, within(f.name, err)
		}
		v.add(o)
		v.fields++
	}
	return v, nil
}

func (s *Schema) judgeFunction(w *walk, raw []byte) (v verdict, err error) {
	next := func(raw []byte) error {
		if len(s.of) == 0 {
			return nil
		}
		var err error
		v, err = s.of[0].judge(w, raw)
		return err
	}
	if s.function == nil {
		err = next(raw)
	} else {
		err = s.function(raw, next)
	}
	return v, err
}

// inner is the model within the validators around it.
func (s *Schema) inner() *Schema {
	for s.kind == function && len(s.of) > 0 {
		s = s.of[0]
	}
	return s
}

// Field is the type of a model's field, nil if the model does not declare it. Validators around the model do not matter.
func (s *Schema) Field(name string) *Schema {
	if f := s.inner().fields[name]; f != nil {
		return f.schema
	}
	return nil
}

// Required are the names of a model's fields that have no default.
func (s *Schema) Required() []string { return s.inner().required }

// Item is the type of a list's elements, nil if the schema is no list.
func (s *Schema) Item() *Schema {
	m := s.inner()
	for m.kind == nullable {
		m = m.of[0].inner()
	}
	if m.kind != list && m.kind != iterable {
		return nil
	}
	return m.of[0]
}

// Choices are the models of a union, or the schema alone.
func (s *Schema) Choices() []*Schema {
	if s.kind == union {
		return s.of
	}
	return []*Schema{s}
}
