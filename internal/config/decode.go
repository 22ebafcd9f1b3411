package config

import (
	"cmp"
	"encoding"
	"errors"
	"fmt"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/goccy/go-yaml/ast"
)

// renamed maps the paths of old keys, with [] for any index, to their new names in the same
// section. Old keys are still read, with a warning. A renamed key of a worker needs an entry for
// each section with workers; in a workers file paths begin with [].
var renamed = map[string]string{"workers.kubernetes.pool": "pools"}

// removed maps keys that no longer have an effect, with their sections, to the warning about them.
var removed = map[string]string{"pick.temperature": noGain, "cost.blend": noGain, "worker_cost.blend": noGain}

const noGain = "no measured workload gained from it"

// maxAliases bounds the YAML aliases of a file, because they may multiply its content.
const maxAliases = 10_000

// decoder decodes a parsed document into Go values. goccy's own decoder stops at the first problem, truncates 1.7 to an
// integer, panics on lists longer than an array, and refuses keys that override those of a merge key.
type decoder struct {
	places

	problems, warnings ProblemsError
	bad, note          report // append to problems and to warnings
	anchors            map[string]ast.Node
	aliases            int
	meant              map[string]bool // paths of keys that unknown ones are likely meant to be
}

func (d *decoder) document(body ast.Node, root reflect.Value) {
	ast.Walk(d, body)
	d.decode(body, root, "", "")
}

// missing is the key that a section lacks, as an argument of a report.
type missing string

// incomplete is bad for the checks after decoding: broken or misspelt keys are not also reported as missing.
func (d *decoder) incomplete() report {
	broken := slices.Clone(d.problems)
	return func(path, format string, args ...any) {
		for _, arg := range args {
			key, lacks := arg.(missing)
			at := join(path, string(key))
			if lacks && (d.meant[at] || slices.ContainsFunc(broken, func(p Problem) bool { return p.Path == path || p.Path == at })) {
				return
			}
		}
		d.bad(path, format, args...)
	}
}

// Visit collects the anchors.
func (d *decoder) Visit(n ast.Node) ast.Visitor {
	if a, ok := n.(*ast.AnchorNode); ok {
		d.anchors[a.Name.GetToken().Value] = a.Value
	}
	return d
}

// resolve follows aliases, and skips anchors and tags. It returns nil for null and for a reported problem.
func (d *decoder) resolve(n ast.Node, path string) ast.Node {
	for {
		switch node := n.(type) {
		case *ast.AnchorNode:
			n = node.Value
		case *ast.TagNode:
			n = node.Value
		case *ast.AliasNode:
			name := node.Value.GetToken().Value
			if d.aliases++; d.aliases > maxAliases {
				if d.aliases == maxAliases+1 {
					d.bad(path, "the file has more than %d YAML aliases, or one that contains itself", maxAliases)
				}
				return nil
			}
			target, known := d.anchors[name]
			if !known {
				d.bad(path, "*%s: there is no anchor &%s", name, name)
			}
			n = target
		case nil, *ast.NullNode:
			return nil
		default:
			return n
		}
	}
}

// decode puts a node into v. rules is the jsonschema tag of the field.
func (d *decoder) decode(n ast.Node, v reflect.Value, path, rules string) {
	d.locate(n, path)
	n = d.resolve(n, path)
	if n == nil {
		return // an empty section keeps its defaults
	}
	if v = allocated(v); isScalar(v) {
		s, err := scalar(n)
		if err == nil {
			err = set(v, s)
		}
		if err != nil {
			d.bad(path, "%v", err)
			return
		}
		obeys(d.bad, path, v, rules)
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		d.decodeStruct(n, v, path)
	case reflect.Map:
		entries := d.entries(n, path)
		v.Set(reflect.MakeMapWithSize(v.Type(), len(entries)))
		for _, e := range entries {
			el := reflect.New(v.Type().Elem()).Elem()
			d.decode(e.value, el, join(path, e.key), "")
			v.SetMapIndex(reflect.ValueOf(e.key), el)
		}
	default: // a slice or an array
		seq, ok := n.(*ast.SequenceNode)
		switch {
		case v.Kind() == reflect.Array && (!ok || len(seq.Values) != v.Len()):
			d.bad(path, "needs a list of %d values", v.Len())
			return
		case !ok:
			d.bad(path, "needs a list, not a %s: write - before each element", kindOf(n))
			return
		case v.Kind() == reflect.Slice: // a list replaces its default
			v.Set(reflect.MakeSlice(v.Type(), len(seq.Values), len(seq.Values)))
		}
		for i, el := range seq.Values {
			setDefaults(v.Index(i))
			d.decode(el, v.Index(i), item(path, i), "")
		}
	}
}

func (d *decoder) decodeStruct(n ast.Node, v reflect.Value, path string) {
	entries := d.entries(n, path)
	if r, ok := reflect.TypeAssert[*Routing](v.Addr()); ok {
		r.prepare(func(key string) (string, bool) {
			i := slices.IndexFunc(entries, func(e entry) bool { return e.key == key })
			if i < 0 {
				return "", false
			}
			d.locate(entries[i].value, join(path, key))
			s, err := scalar(d.resolve(entries[i].value, path))
			return s, err == nil
		}, d.bad.under(path))
	}
	for _, e := range entries {
		at := join(path, e.key)
		d.at[at] = e.place
		field, rules, known := fieldByKey(v, e.key)
		if why := removed[path[strings.LastIndexByte(path, '.')+1:]+"."+e.key]; why != "" {
			if s, err := scalar(d.resolve(e.value, at)); err != nil || s != "" && s != "0" { // older versions of "kvlane config" print unset keys
				d.note(at, "has no effect: %s", why)
			}
			continue
		}
		if name := renamed[index.ReplaceAllString(at, "[]")]; !known && name != "" {
			to := join(path, name)
			if s, err := scalar(d.resolve(e.value, at)); err == nil && s == "" {
				continue // not set, as older versions of "kvlane config" print it
			}
			if slices.ContainsFunc(entries, func(e entry) bool { return e.key == name }) {
				d.bad(at, "is the old name of %s, which is set too: remove the old one", to)
				continue
			}
			d.note(at, "is now called %s: rename it", to)
			d.at[to], at = e.place, to
			field, rules, known = fieldByKey(v, name)
			if one := d.resolve(e.value, to); one != nil && kindOf(one) == "value" && field.Kind() == reflect.Slice {
				e.value = &ast.SequenceNode{Values: []ast.Node{one}} // the old key had one value
			}
		}
		if known {
			d.decode(e.value, field, at, rules)
		} else {
			d.bad(at, "unknown key%s", d.unknownHint(path, e.key, v))
		}
	}
}

var index = regexp.MustCompile(`\[\d+\]`)

// entry is a key of a section with its value.
type entry struct {
	key string
	place
	value ast.Node
}

// instead maps a section, and the kind of value that stands in its place, to what is probably meant.
var instead = map[string]string{
	"routing value":        ": a policy is named by routing.preset",
	"routing.policy value": ": a policy is named by routing.preset",
	"workers list":         ": a list of workers is workers.static",
	"listen value":         ": an address is listen.address",
	"admin value":          ": an address is admin.address",
	"log value":            ": a level is log.level",
	"models[] value":       ": a model is name: NAME",

	"workers.static[] value":        ": a worker is address: IP:PORT",
	"workers.static[].events value": ": an address is events.endpoint",
}

// entries returns the entries of a section, then those of its merge keys (<<) that it does not override.
func (d *decoder) entries(n ast.Node, path string) []entry {
	values, ok := mapping(n)
	if !ok {
		d.bad(path, "needs a section with keys, not a %s%s", kindOf(n), instead[index.ReplaceAllString(path, "[]")+" "+kindOf(n)])
		return nil
	}
	var own, merged []entry
	for _, m := range values {
		if m.Key.IsMergeKey() {
			sources := []ast.Node{d.resolve(m.Value, path)}
			if list, ok := sources[0].(*ast.SequenceNode); ok {
				sources = list.Values
			}
			for _, s := range sources {
				if s = d.resolve(s, path); s != nil {
					merged = append(merged, d.entries(s, path)...)
				}
			}
			continue
		}
		pos := m.Key.GetToken().Position
		own = append(own, entry{keyText(m.Key), place{pos.Line, pos.Column}, m.Value})
	}
	seen := map[string]bool{}
	return slices.DeleteFunc(append(own, merged...), func(e entry) bool {
		again := seen[e.key]
		seen[e.key] = true
		return again
	})
}

// locate records the position of path: a value's own, a section's or list's key, a list element's first key.
func (d *decoder) locate(n ast.Node, path string) {
	_, known := d.at[path]
	if entries, ok := mapping(n); ok {
		if len(entries) == 0 || known {
			return
		}
		n = entries[0].Key
	} else if known && (kindOf(n) != "value" || path == "") {
		return
	}
	if t := n.GetToken(); t != nil && t.Position != nil {
		d.at[path] = place{t.Position.Line, t.Position.Column}
	}
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

func keyText(n ast.MapKeyNode) string {
	if s, ok := n.(*ast.StringNode); ok {
		return s.Value // without quotes
	}
	return n.GetToken().Value
}

func kindOf(n ast.Node) string {
	switch n.(type) {
	case *ast.MappingNode, *ast.MappingValueNode:
		return "section"
	case *ast.SequenceNode:
		return "list"
	case *ast.AnchorNode, *ast.TagNode, *ast.NullNode:
		return "node"
	}
	return "value"
}

// scalar returns the text of a value with environment variables expanded.
func scalar(n ast.Node) (string, error) {
	switch node := n.(type) {
	case *ast.StringNode:
		return expand(node.Value)
	case *ast.LiteralNode:
		return expand(node.Value.Value)
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.InfinityNode, *ast.NanNode:
		return n.GetToken().Value, nil
	}
	return "", fmt.Errorf("needs a value, not a %s", kindOf(n))
}

var (
	reference = regexp.MustCompile(`\$\$|\$\{[^}]*\}?`)
	variable  = regexp.MustCompile(`^\$\{([A-Za-z_][A-Za-z0-9_]*)(:-)?(.*)\}$`)
)

// expand replaces ${NAME} and ${NAME:-default}, whose default is used if the variable is unset or empty, and $$ by $.
func expand(s string) (string, error) {
	var err error
	text := reference.ReplaceAllStringFunc(s, func(ref string) string {
		if ref == "$$" {
			return "$"
		}
		m := variable.FindStringSubmatch(ref)
		if m == nil || m[2] == "" && m[3] != "" {
			err = fmt.Errorf("%q is not like ${NAME} or ${NAME:-default}; a $ before { is written $$", ref)
			return ""
		}
		value, given := os.LookupEnv(m[1])
		switch {
		case m[2] != "" && value == "":
			return m[3]
		case !given:
			err = fmt.Errorf("the environment variable %s is not set: set it, or write ${%s:-default}", m[1], m[1])
		}
		return value
	})
	return text, err
}

var textUnmarshaler = reflect.TypeFor[encoding.TextUnmarshaler]()

func isScalar(v reflect.Value) bool {
	switch v.Kind() {
	case reflect.Struct, reflect.Slice, reflect.Array, reflect.Map:
		return false
	}
	return true
}

// set parses a value.
func set(v reflect.Value, s string) (err error) {
	switch {
	case v.Type() == reflect.TypeFor[time.Duration]():
		return (*Duration)(v.Addr().Interface().(*time.Duration)).UnmarshalText([]byte(s))
	case v.CanAddr() && v.Addr().Type().Implements(textUnmarshaler):
		return v.Addr().Interface().(encoding.TextUnmarshaler).UnmarshalText([]byte(s))
	}
	what := "a whole number"
	switch v.Kind() {
	case reflect.String:
		v.SetString(s)
	case reflect.Bool:
		what = "true or false"
		if err = errors.ErrUnsupported; strings.EqualFold(s, "true") || strings.EqualFold(s, "false") {
			v.SetBool(strings.EqualFold(s, "true"))
			err = nil
		}
	case reflect.Uint64:
		what = "a whole number from 0"
		var n uint64
		n, err = strconv.ParseUint(s, 0, 64)
		v.SetUint(n)
	case reflect.Int, reflect.Int64:
		var n int64
		n, err = strconv.ParseInt(s, 0, 64)
		v.SetInt(n)
	case reflect.Float64:
		what = "a number"
		var f float64
		if f, err = strconv.ParseFloat(s, 64); f != f {
			err = errors.ErrUnsupported
		}
		v.SetFloat(f)
	default:
		panic("config: field of kind " + v.Kind().String())
	}
	if err != nil {
		return fmt.Errorf("%q is not %s", s, what)
	}
	return nil
}

// obeys checks a value against the jsonschema tag of its field.
func obeys(bad report, path string, v reflect.Value, rules string) {
	var number float64
	switch v.Kind() {
	case reflect.String:
		if enum := ruleValues(rules, "enum"); len(enum) > 0 && !slices.Contains(enum, v.String()) {
			enum = slices.DeleteFunc(enum, func(s string) bool { return s == "" })
			bad(path, "%q is not one of %s%s", v.String(), strings.Join(enum, ", "), hint(Nearest(v.String(), enum)))
		}
		return
	case reflect.Int, reflect.Int64:
		number = float64(v.Int())
	case reflect.Float64:
		number = v.Float()
	}
	for _, r := range []struct {
		name, text string
		broken     func(bound float64) bool
	}{
		{"minimum", "at least", func(b float64) bool { return number < b }},
		{"maximum", "at most", func(b float64) bool { return number > b }},
		{"exclusiveMinimum", "more than", func(b float64) bool { return number <= b }},
	} {
		for _, text := range ruleValues(rules, r.name) {
			if bound, err := strconv.ParseFloat(text, 64); err == nil && r.broken(bound) {
				bad(path, "%s must be %s %s", strconv.FormatFloat(number, 'f', -1, 64), r.text, text)
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

// allocated returns what a pointer points to, allocated with its defaults if it is nil;
// other values are returned unchanged.
func allocated(v reflect.Value) reflect.Value {
	if v.Kind() != reflect.Pointer {
		return v
	}
	if v.IsNil() {
		v.Set(reflect.New(v.Type().Elem()))
		setDefaults(v.Elem())
	}
	return v.Elem()
}

// inline is the tag of a struct whose keys belong to its parent.
const inline = ",inline"

// fields calls yield with each key of a section until it returns false.
func fields(v reflect.Value, yield func(f reflect.StructField, v reflect.Value) bool) bool {
	for f, fv := range v.Fields() {
		key := f.Tag.Get("yaml")
		if key == inline && !fields(fv, yield) || key != inline && key != "" && key != "-" && !yield(f, fv) {
			return false
		}
	}
	return true
}

func fieldByKey(v reflect.Value, key string) (field reflect.Value, rules string, known bool) {
	fields(v, func(f reflect.StructField, fv reflect.Value) bool {
		if known = f.Tag.Get("yaml") == key; known {
			field, rules = fv, f.Tag.Get("jsonschema")
		}
		return !known
	})
	return field, rules, known
}

// unknownHint suggests what an unknown key likely means: a similar key of the section, or the section that has it.
func (d *decoder) unknownHint(path, key string, section reflect.Value) string {
	var known []string
	fields(section, func(f reflect.StructField, _ reflect.Value) bool {
		known = append(known, f.Tag.Get("yaml"))
		return true
	})
	if near := Nearest(key, known); near != "" {
		d.meant[join(path, near)] = true
		return hint(near)
	}
	if meant := meant[index.ReplaceAllString(join(path, key), "[]")]; meant != "" {
		return "; did you mean " + meant + "?"
	}
	if of := sections()[key]; len(of) > 0 && len(of) <= 3 {
		return "; it is a key of " + strings.Join(of, " and ")
	}
	return "; the keys of this section are " + strings.Join(known, ", ")
}

// meant maps keys that exist nowhere to the keys that replace them.
var meant = map[string]string{
	"routing.weights": "routing.policy.cost",
	"routing.scorers": "routing.policy.cost",
	"port":            "listen.address",
	"listen.port":     "listen.address",
	"admin.port":      "admin.address",
}

// sections maps each key to the sections that have it; only the first of sections with the same keys is named.
var sections = sync.OnceValue(func() map[string][]string {
	of := map[string][]string{}
	seen := map[reflect.Type]bool{}
	var visit func(path string, v reflect.Value)
	visit = func(path string, v reflect.Value) {
		for v.Kind() == reflect.Slice || v.Kind() == reflect.Pointer {
			if v.Kind() == reflect.Slice {
				path += "[]"
			}
			v = reflect.New(v.Type().Elem()).Elem()
		}
		if v.Kind() != reflect.Struct || seen[v.Type()] {
			return
		}
		seen[v.Type()] = true
		fields(v, func(f reflect.StructField, v reflect.Value) bool {
			key := f.Tag.Get("yaml")
			of[key] = append(of[key], cmp.Or(path, "the top of the file"))
			visit(join(path, key), v)
			return true
		})
	}
	visit("", reflect.ValueOf(&Config{}).Elem())
	return of
})

// hint suggests what was meant, "" for nothing.
func hint(meant string) string {
	if meant == "" {
		return ""
	}
	return fmt.Sprintf("; did you mean %q?", meant)
}

// Nearest returns the known word that is closest to another one, "" if none is close.
func Nearest(word string, known []string) (near string) {
	distance := max(len(word), 2)
	for _, name := range known {
		d := editDistance(word, name)
		if strings.HasPrefix(word, name+"_") || strings.HasPrefix(name, word+"_") {
			d = 1
		}
		if d < distance && d <= max(len(word), len(name))/3+1 {
			near, distance = name, d
		}
	}
	return near
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

func item(path string, i int) string { return path + "[" + strconv.Itoa(i) + "]" }
