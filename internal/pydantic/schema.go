package pydantic

import (
	"encoding/json"
	"fmt"
	"math/big"
	"regexp"
	"slices"
)

// Function is what an engine's own validator does around a part of a schema: it may refuse raw, or hand on something else.
type Function func(raw []byte, next func(raw []byte) error) error

// Functions are validators by the name of the Python function.
type Functions map[string]Function

// Tags are functions that tell which choice of a tagged union a value is, by the name of the Python function.
type Tags map[string]func(raw []byte) string

// Set is the schemas of one engine.
type Set struct {
	// Engine is the engine's name and version.
	Engine string
	apis   map[string]*Schema
}

// Schema is one type.
type Schema struct {
	kind kind
	// of are the parts: of a list its elements' type, of a union its choices.
	of []*Schema
	// keys is the type of a dictionary's keys.
	keys *Schema
	// fields of a model by name; required are those without a default.
	fields   map[string]*field
	ordered  []*field
	required []string
	forbid   bool // other fields are refused

	literals []string // as JSON
	by       string   // the field that tells which of tags it is, unless tag does
	tag      func(raw []byte) string
	tags     map[string]*Schema

	function Function

	least, most  *bound // of numbers
	short, long  int    // length of texts and lists, -1: unbounded
	pattern      *regexp.Regexp
	instanceList bool
}

type field struct {
	name   string
	index  int // in ordered
	schema *Schema
}

// bound is a bound of numbers: value itself belongs to them unless it is open.
type bound struct {
	value *big.Float
	open  bool
}

type kind uint8

const (
	anything kind = iota
	nothing
	boolean
	integer
	number
	text
	literal
	list
	iterable
	tuple
	dict
	nullable
	union
	tagged
	all
	model
	function
	instance
)

// Schema is the schema of an API, nil if there is none.
func (s *Set) Schema(api string) *Schema { return s.apis[api] }

// Load reads the file that schemas.py wrote. functions and tags stand for the own ones of the engine.
func Load(data []byte, functions Functions, tags Tags) (*Set, error) {
	var file struct {
		Engine string                     `json:"engine"`
		APIs   map[string]json.RawMessage `json:"apis"`
		Parts  []json.RawMessage          `json:"parts"`
	}
	if err := json.Unmarshal(data, &file); err != nil {
		return nil, fmt.Errorf("schemas: %w", err)
	}
	l := loader{parts: make([]*Schema, len(file.Parts)), functions: functions, tags: tags}
	for i := range l.parts {
		l.parts[i] = new(Schema)
	}
	for i, raw := range file.Parts {
		if err := l.fill(l.parts[i], raw); err != nil {
			return nil, fmt.Errorf("schemas: part %d: %w", i, err)
		}
	}
	set := &Set{Engine: file.Engine, apis: map[string]*Schema{}}
	for api, raw := range file.APIs {
		s, err := l.schema(raw)
		if err != nil {
			return nil, fmt.Errorf("schemas: %s: %w", api, err)
		}
		set.apis[api] = s
	}
	return set, nil
}

type loader struct {
	parts     []*Schema
	functions Functions
	tags      Tags
}

// schema is a node: the number of a part, or a type of its own.
func (l *loader) schema(raw json.RawMessage) (*Schema, error) {
	var number int
	if json.Unmarshal(raw, &number) == nil {
		if number < 0 || number >= len(l.parts) {
			return nil, fmt.Errorf("no part %d", number)
		}
		return l.parts[number], nil
	}
	s := new(Schema)
	return s, l.fill(s, raw)
}

func (l *loader) schemas(raws []json.RawMessage) ([]*Schema, error) {
	out := make([]*Schema, 0, len(raws))
	for _, raw := range raws {
		s, err := l.schema(raw)
		if err != nil {
			return nil, err
		}
		out = append(out, s)
	}
	return out, nil
}

var kinds = map[string]kind{"any": anything, "none": nothing, "bool": boolean, "int": integer, "float": number, "str": text, "bytes": text,
	"literal": literal, "list": list, "set": list, "generator": iterable, "tuple": tuple, "dict": dict, "null": nullable, "union": union,
	"tagged": tagged, "all": all, "model": model, "before": function, "after": function, "wrap": function, "function": function,
	"instance": instance}

type node struct {
	Type      string          `json:"t"`
	Of        json.RawMessage `json:"of"`
	Name      string          `json:"name"`
	By        string          `json:"by"`
	Keys      json.RawMessage `json:"keys"`
	Forbid    int             `json:"forbid"`
	GE        json.Number     `json:"ge"`
	GT        json.Number     `json:"gt"`
	LE        json.Number     `json:"le"`
	LT        json.Number     `json:"lt"`
	MinLength *int            `json:"min_length"`
	MaxLength *int            `json:"max_length"`
	Pattern   string          `json:"pattern"`
}

func (l *loader) fill(s *Schema, raw json.RawMessage) (err error) {
	var n node
	if err := json.Unmarshal(raw, &n); err != nil {
		return err
	}
	k, ok := kinds[n.Type]
	if !ok {
		return fmt.Errorf("unknown type %q", n.Type)
	}
	*s = Schema{kind: k, forbid: n.Forbid == 1, by: n.By, short: -1, long: -1, least: boundOf(n.GE, n.GT), most: boundOf(n.LE, n.LT)}
	if n.MinLength != nil {
		s.short = *n.MinLength
	}
	if n.MaxLength != nil {
		s.long = *n.MaxLength
	}
	if n.Pattern != "" {
		if s.pattern, err = regexp.Compile(n.Pattern); err != nil {
			return err
		}
	}
	switch k {
	case literal:
		return l.fillLiterals(s, n.Of)
	case instance:
		return l.fillInstance(s, n.Of)
	case tagged:
		return l.fillTags(s, n.Of)
	case model:
		return l.fillFields(s, n.Of)
	case union, all, tuple:
		var parts []json.RawMessage
		if err := json.Unmarshal(n.Of, &parts); err != nil {
			return err
		}
		s.of, err = l.schemas(parts)
		return err
	case dict:
		if s.keys, err = l.schema(n.Keys); err != nil {
			return err
		}
	case function:
		if s.function = l.functions[n.Name]; n.Of == nil {
			return nil
		}
	}
	if n.Of == nil {
		return nil
	}
	s.of, err = l.schemas([]json.RawMessage{n.Of})
	return err
}

func boundOf(closed, open json.Number) *bound {
	for _, b := range [...]struct {
		text json.Number
		open bool
	}{{closed, false}, {open, true}} {
		if b.text == "" {
			continue
		}
		if v, _, err := big.ParseFloat(b.text.String(), 10, precision, big.ToNearestEven); err == nil {
			return &bound{value: v, open: b.open}
		}
	}
	return nil
}

func (l *loader) fillLiterals(s *Schema, raw json.RawMessage) error {
	var values []json.RawMessage
	if err := json.Unmarshal(raw, &values); err != nil {
		return err
	}
	for _, v := range values {
		s.literals = append(s.literals, string(v))
	}
	return nil
}

func (l *loader) fillInstance(s *Schema, raw json.RawMessage) error {
	var name string
	err := json.Unmarshal(raw, &name)
	s.instanceList = name == "Sequence" || name == "list" // other classes are not made by a JSON reader
	return err
}

func (l *loader) fillTags(s *Schema, raw json.RawMessage) error {
	var choices map[string]json.RawMessage
	if err := json.Unmarshal(raw, &choices); err != nil {
		return err
	}
	s.tags, s.tag = map[string]*Schema{}, l.tags[s.by]
	for tag, node := range choices {
		choice, err := l.schema(node)
		if err != nil {
			return err
		}
		s.tags[tag] = choice
	}
	return nil
}

func (l *loader) fillFields(s *Schema, raw json.RawMessage) error {
	var fields map[string][2]json.RawMessage
	if err := json.Unmarshal(raw, &fields); err != nil {
		return err
	}
	names := make([]string, 0, len(fields))
	for name := range fields {
		names = append(names, name)
	}
	slices.Sort(names)
	s.fields = map[string]*field{}
	for i, name := range names {
		schema, err := l.schema(fields[name][0])
		if err != nil {
			return err
		}
		f := &field{name: name, index: i, schema: schema}
		s.fields[name], s.ordered = f, append(s.ordered, f)
		if string(fields[name][1]) == "1" {
			s.required = append(s.required, name)
		}
	}
	return nil
}
