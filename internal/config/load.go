package config

import (
	"bytes"
	"encoding"
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// Problem is one thing wrong with a file.
type Problem struct {
	// File, Line and Column are the place; Line is 0 where there is none.
	File         string
	Line, Column int
	// Path is the dotted key, e.g. "workers.static[0].address".
	Path string
	// Message says what is wrong and what to do.
	Message string
}

func (p Problem) String() string {
	var b strings.Builder
	b.WriteString(p.File)
	if p.Line > 0 {
		fmt.Fprintf(&b, ":%d:%d", p.Line, p.Column)
	}
	b.WriteString(": ")
	if p.Path != "" {
		b.WriteString(p.Path + ": ")
	}
	b.WriteString(p.Message)
	return b.String()
}

// ProblemsError is everything wrong with a file, in order of place.
type ProblemsError []Problem

func (p ProblemsError) Error() string {
	lines := make([]string, len(p))
	for i := range p {
		lines[i] = p[i].String()
	}
	return strings.Join(lines, "\n")
}

// Load reads and validates a file. The error is a ProblemsError if the file could be
// read.
func Load(file string) (*Config, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	return Parse(file, text)
}

// Parse decodes and validates text; file is its name in problems.
func Parse(file string, text []byte) (*Config, error) {
	c, _, err := parse(file, text)
	return c, err
}

// parse returns the decoder too, which knows the places.
func parse(file string, text []byte) (*Config, *decoder, error) {
	c := Default()
	d, err := decodeFile(file, text, reflect.ValueOf(&c).Elem())
	if err != nil {
		return nil, nil, err
	}
	c.validate(d.problemf)
	if len(d.problems) > 0 {
		return nil, nil, d.sorted()
	}
	c.read = d
	return &c, d, nil
}

// Inspect is Load that looks further: into the workers file, and for what is allowed but
// is hardly meant (warnings).
func Inspect(file string) (c *Config, warnings []Problem, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, nil, fmt.Errorf("read configuration: %w", err)
	}
	c, d, err := parse(file, text)
	if err != nil {
		return nil, nil, err
	}
	if c.Workers.File != "" {
		text, err := os.ReadFile(c.Workers.File)
		if err != nil {
			d.problemf("workers.file", "%v", err)
			return nil, nil, d.sorted()
		}
		if c.listed, err = ParseWorkers(c.Workers.File, text); err != nil {
			return nil, nil, err
		}
	}
	c.warn(d.problemf)
	return c, d.sorted(), nil
}

// ParseWorkers decodes a workers file: a YAML list of workers. No workers at all are
// written as []: a file without a list is one that is not whole.
func ParseWorkers(file string, text []byte) ([]Worker, error) {
	var list []Worker
	d, err := decodeFile(file, text, reflect.ValueOf(&list).Elem())
	if err != nil {
		return nil, err
	}
	if !d.list && len(d.problems) == 0 {
		d.problemf("", "has no list of workers; an empty one is written []")
	}
	for i := range list {
		list[i].validate(fmt.Sprintf("[%d]", i), d.problemf)
	}
	uniqueWorkers("", list, d.problemf)
	uniqueEvents("", list, d.problemf)
	if len(d.problems) > 0 {
		return nil, d.sorted()
	}
	return list, nil
}

func decodeFile(file string, text []byte, into reflect.Value) (*decoder, error) {
	d := &decoder{file: file, places: map[string]place{}}
	text = bytes.TrimPrefix(text, []byte(byteOrderMark))
	if p, ok := unreadable(text); !ok {
		p.File = file
		return nil, ProblemsError{p}
	}
	f, err := parser.ParseBytes(text, 0)
	if err != nil {
		return nil, ProblemsError{yamlProblem(file, err)}
	}
	if len(f.Docs) > 1 {
		return nil, ProblemsError{{File: file, Message: "more than one YAML document"}}
	}
	if len(f.Docs) == 1 && f.Docs[0].Body != nil {
		d.decode(f.Docs[0].Body, into, "", "")
	}
	return d, nil
}

// byteOrderMark is what some editors begin UTF-8 with.
const byteOrderMark = "\xef\xbb\xbf"

// unreadable is what is wrong with a file that is no text: its lines would only fill
// the terminal. ok says that it is text.
func unreadable(text []byte) (p Problem, ok bool) {
	line := func(at int) int { return 1 + bytes.Count(text[:at], []byte{'\n'}) }
	switch {
	case bytes.HasPrefix(text, []byte{0x1f, 0x8b}):
		return Problem{Line: 1, Column: 1, Message: "is compressed with gzip: unpack it"}, false
	case bytes.HasPrefix(text, []byte{0xff, 0xfe}), bytes.HasPrefix(text, []byte{0xfe, 0xff}):
		return Problem{Line: 1, Column: 1, Message: "is UTF-16: save it as UTF-8"}, false
	}
	for at := 0; at < len(text); {
		r, n := utf8.DecodeRune(text[at:])
		if r == utf8.RuneError && n == 1 || r < ' ' && r != '\t' && r != '\n' && r != '\r' || r == 0x7f {
			start := bytes.LastIndexByte(text[:at], '\n') + 1
			return Problem{Line: line(at), Column: 1 + utf8.RuneCount(text[start:at]),
				Message: fmt.Sprintf("is no text (byte %#02x): a configuration is YAML in UTF-8", text[at])}, false
		}
		at += n
	}
	return Problem{}, true
}

// yamlProblem keeps the parser's place and drops its picture of the source.
func yamlProblem(file string, err error) Problem {
	p := Problem{File: file, Message: "is no YAML: " + err.Error()}
	var placed interface {
		GetMessage() string
		GetToken() *token.Token
	}
	if errors.As(err, &placed) {
		p.Message = "is no YAML: " + placed.GetMessage()
		if t := placed.GetToken(); t != nil && t.Position != nil {
			p.Line, p.Column = t.Position.Line, t.Position.Column
		}
	}
	return p
}

type place struct{ line, column int }

type decoder struct {
	file     string
	problems ProblemsError
	places   map[string]place
	list     bool // the document is a list
}

func (d *decoder) sorted() ProblemsError {
	slices.SortStableFunc(d.problems, func(a, b Problem) int { return a.Line - b.Line })
	return d.problems
}

func (d *decoder) problemf(path, format string, args ...any) {
	d.problems = append(d.problems, d.problem(path, format, args...))
}

// problem is one at the place of path, or of its nearest parent that is in the file.
func (d *decoder) problem(path, format string, args ...any) Problem {
	p := Problem{File: d.file, Path: path, Message: fmt.Sprintf(format, args...)}
	for at := path; ; {
		if pl, ok := d.places[at]; ok {
			p.Line, p.Column = pl.line, pl.column
			break
		}
		cut := strings.LastIndexAny(at, ".[")
		if cut < 0 {
			break
		}
		at = at[:cut]
	}
	return p
}

// Problem is a problem with a key, found by whoever uses it, at its place in the file
// that c was read from.
func (c *Config) Problem(path, format string, args ...any) Problem {
	d := c.read
	if d == nil {
		d = &decoder{}
	}
	return d.problem(path, format, args...)
}

var textUnmarshaler = reflect.TypeFor[encoding.TextUnmarshaler]()

// preparer is a section whose defaults depend on some of its own keys.
type preparer interface {
	prepare(value func(key string) (string, bool), bad report)
}

// decode puts a node into v. rules is the jsonschema tag of the field.
func (d *decoder) decode(n ast.Node, v reflect.Value, path, rules string) {
	d.locate(n, path)
	switch node := n.(type) {
	case *ast.AnchorNode:
		d.decode(node.Value, v, path, rules)
		return
	case *ast.TagNode:
		d.decode(node.Value, v, path, rules)
		return
	case *ast.AliasNode:
		d.problemf(path, "YAML aliases are not supported")
		return
	case *ast.NullNode:
		return // an empty section keeps its defaults
	}
	if v.Kind() == reflect.Pointer {
		v.Set(reflect.New(v.Type().Elem()))
		setDefaults(v.Elem())
		v = v.Elem()
	}
	if v.CanAddr() && v.Addr().Type().Implements(textUnmarshaler) {
		s, ok := scalar(n)
		if !ok {
			d.problemf(path, "needs a value, not a %s", kindOf(n))
			return
		}
		if err := v.Addr().Interface().(encoding.TextUnmarshaler).UnmarshalText([]byte(s)); err != nil {
			d.problemf(path, "%v", err)
		}
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		d.decodeStruct(n, v, path)
	case reflect.Slice:
		seq, ok := n.(*ast.SequenceNode)
		if !ok {
			d.problemf(path, "needs a list, not a %s", kindOf(n))
			return
		}
		v.SetZero() // a list replaces its default
		d.list = d.list || path == ""
		for i, item := range seq.Values {
			e := reflect.New(v.Type().Elem()).Elem()
			setDefaults(e)
			d.decode(item, e, fmt.Sprintf("%s[%d]", path, i), "")
			v.Set(reflect.Append(v, e))
		}
	case reflect.Map:
		d.decodeMap(n, v, path)
	case reflect.Array:
		d.decodeArray(n, v, path)
	default:
		d.decodeScalar(n, v, path, rules)
	}
}

// locate remembers where path is: a value where it stands, a section or list at
// its key, an element of a list at its first key.
func (d *decoder) locate(n ast.Node, path string) {
	if entries, ok := mapping(n); ok {
		if len(entries) == 0 {
			return
		}
		n = entries[0].Key
	}
	_, isScalar := scalar(n)
	if _, known := d.places[path]; known && (!isScalar || path == "") {
		return
	}
	if t := n.GetToken(); t != nil && t.Position != nil {
		d.places[path] = place{t.Position.Line, t.Position.Column}
	}
}

func (d *decoder) decodeStruct(n ast.Node, v reflect.Value, path string) {
	entries, ok := mapping(n)
	if !ok {
		d.problemf(path, "needs a section with keys, not a %s", kindOf(n))
		return
	}
	if p, ok := reflect.TypeAssert[preparer](v.Addr()); ok {
		p.prepare(func(key string) (string, bool) {
			for _, e := range entries {
				if e.Key.String() == key {
					return scalar(e.Value)
				}
			}
			return "", false
		}, func(key, format string, args ...any) { d.problemf(join(path, key), format, args...) })
	}
	seen := map[string]bool{}
	for _, e := range entries {
		key, at := e.Key.String(), join(path, e.Key.String())
		pos := e.Key.GetToken().Position
		d.places[at] = place{pos.Line, pos.Column}
		field, rules, known := fieldByKey(v, key)
		switch {
		case !known:
			d.problemf(at, "unknown key%s", nearest(key, v.Type()))
		case seen[key]:
			d.problemf(at, "given twice")
		default:
			d.decode(e.Value, field, at, rules)
		}
		seen[key] = true
	}
}

// decodeArray needs exactly as many elements as the array has.
func (d *decoder) decodeArray(n ast.Node, v reflect.Value, path string) {
	seq, ok := n.(*ast.SequenceNode)
	if !ok || len(seq.Values) != v.Len() {
		d.problemf(path, "needs a list of %d values", v.Len())
		return
	}
	for i, item := range seq.Values {
		d.decode(item, v.Index(i), fmt.Sprintf("%s[%d]", path, i), "")
	}
}

func (d *decoder) decodeMap(n ast.Node, v reflect.Value, path string) {
	entries, ok := mapping(n)
	if !ok {
		d.problemf(path, "needs a section with keys, not a %s", kindOf(n))
		return
	}
	v.Set(reflect.MakeMapWithSize(v.Type(), len(entries)))
	for _, e := range entries {
		key := strings.Trim(e.Key.String(), `"'`)
		el := reflect.New(v.Type().Elem()).Elem()
		d.decode(e.Value, el, join(path, key), "")
		v.SetMapIndex(reflect.ValueOf(key), el)
	}
}

func (d *decoder) decodeScalar(n ast.Node, v reflect.Value, path, rules string) {
	s, ok := scalar(n)
	if !ok {
		d.problemf(path, "needs a value, not a %s", kindOf(n))
		return
	}
	var number float64
	var err error
	if v.Type() == reflect.TypeFor[time.Duration]() {
		var span Duration
		if err := span.UnmarshalText([]byte(s)); err != nil {
			d.problemf(path, "%v", err)
			return
		}
		v.SetInt(int64(span))
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(s)
		oneOf(d.problemf, path, s, rules)
		return
	case reflect.Bool:
		b, ok := n.(*ast.BoolNode)
		if !ok {
			d.problemf(path, "%q is not true or false", s)
			return
		}
		v.SetBool(b.Value)
		return
	case reflect.Uint64:
		var u uint64
		if u, err = strconv.ParseUint(s, 0, 64); err != nil {
			d.problemf(path, "%q is not a whole number from 0", s)
			return
		}
		v.SetUint(u)
		return
	case reflect.Int, reflect.Int64:
		var i int64
		if i, err = strconv.ParseInt(s, 0, 64); err != nil {
			d.problemf(path, "%q is not a whole number", s)
			return
		}
		v.SetInt(i)
		number = float64(i)
	case reflect.Float64:
		if number, err = strconv.ParseFloat(s, 64); err != nil || number != number {
			d.problemf(path, "%q is not a number", s)
			return
		}
		v.SetFloat(number)
	default:
		panic("config: field of kind " + v.Kind().String())
	}
	bounds(d.problemf, path, number, rules)
}

var boundRules = []struct {
	name, text string
	broken     func(v, bound float64) bool
}{
	{"minimum", "at least", func(v, b float64) bool { return v < b }},
	{"maximum", "at most", func(v, b float64) bool { return v > b }},
	{"exclusiveMinimum", "more than", func(v, b float64) bool { return v <= b }},
}

// oneOf looks at a text by the enum of its field's jsonschema tag.
func oneOf(bad report, path, s, rules string) {
	if enum := ruleValues(rules, "enum"); len(enum) > 0 && !slices.Contains(enum, s) {
		bad(path, "%q is not one of %s", s, strings.Join(slices.DeleteFunc(enum, func(s string) bool { return s == "" }), ", "))
	}
}

// bounds looks at a number by the jsonschema tag of its field.
func bounds(bad report, path string, v float64, rules string) {
	for _, r := range boundRules {
		for _, text := range ruleValues(rules, r.name) {
			if bound, err := strconv.ParseFloat(text, 64); err == nil && r.broken(v, bound) {
				bad(path, "%s must be %s %s", strconv.FormatFloat(v, 'f', -1, 64), r.text, text)
			}
		}
	}
}

func ruleValues(rules, name string) []string {
	var out []string
	for rule := range strings.SplitSeq(rules, ",") {
		if v, ok := strings.CutPrefix(rule, name+"="); ok {
			out = append(out, v)
		}
	}
	return out
}

// setDefaults fills elements of lists and optional sections, which Default does not hold.
func setDefaults(v reflect.Value) {
	switch p := v.Addr().Interface().(type) {
	case *Worker:
		*p = defaultWorker()
	case *Model:
		*p = defaultModel()
	case *DNS:
		*p = DNS{Every: Duration(5e9), Worker: defaultWorker()}
	case *Kubernetes:
		*p = DefaultKubernetes()
	}
}

func fieldByKey(v reflect.Value, key string) (reflect.Value, string, bool) {
	for f, fv := range v.Fields() {
		switch f.Tag.Get("yaml") {
		case key:
			return fv, f.Tag.Get("jsonschema"), true
		case inline:
			if found, rules, ok := fieldByKey(fv, key); ok {
				return found, rules, true
			}
		}
	}
	return reflect.Value{}, "", false
}

// inline is the tag of a struct whose keys stand beside those of its parent.
const inline = ",inline"

func keysOf(t reflect.Type) []string {
	var keys []string
	for f := range t.Fields() {
		switch key := f.Tag.Get("yaml"); key {
		case inline:
			keys = append(keys, keysOf(f.Type)...)
		case "":
		default:
			keys = append(keys, key)
		}
	}
	return keys
}

// nearest names the known key that is closest to an unknown one.
func nearest(key string, t reflect.Type) string {
	best, distance := "", 0
	for _, name := range keysOf(t) {
		if d := editDistance(key, name); best == "" || d < distance {
			best, distance = name, d
		}
	}
	if best == "" || distance > max(len(key), len(best))/2+1 {
		return ""
	}
	return fmt.Sprintf("; did you mean %q?", best)
}

func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j+1]+1, row[j]+1)
		}
	}
	return row[len(b)]
}

func mapping(n ast.Node) ([]*ast.MappingValueNode, bool) {
	switch node := n.(type) {
	case *ast.MappingNode:
		return node.Values, true
	case *ast.MappingValueNode:
		return []*ast.MappingValueNode{node}, true
	}
	return nil, false
}

func scalar(n ast.Node) (string, bool) {
	switch node := n.(type) {
	case *ast.StringNode:
		return node.Value, true
	case *ast.LiteralNode:
		return node.Value.Value, true
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.InfinityNode, *ast.NanNode:
		return n.GetToken().Value, true
	}
	return "", false
}

func kindOf(n ast.Node) string {
	switch n.(type) {
	case *ast.MappingNode, *ast.MappingValueNode:
		return "section"
	case *ast.SequenceNode:
		return "list"
	}
	return "value"
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}
