package jinja

import (
	"strings"
	"time"
)

// This file rejects, at compile time, the constructs of Jinja2 that this engine lacks (the package comment lists what
// it supports). Names that Jinja2 does not know either cause Jinja2's own errors.

// otherTags are the tags of Jinja2 outside the subset.
var otherTags = setOf("autoescape", "block", "extends", "from", "import", "include", "print", "with")

// otherGlobals are the global names of Jinja2 outside the subset.
var otherGlobals = setOf("cycler", "joiner", "lipsum", "self")

var otherFilters = setOf("abs", "attr", "batch", "center", "e", "escape", "filesizeformat", "float", "forceescape", "groupby",
	"pprint", "random", "round", "slice", "striptags", "sum", "truncate", "urlencode", "urlize", "wordcount", "wordwrap", "xmlattr")

// otherParameters are parameters of filters in the subset; except for dictsort's, none is the first parameter.
var otherParameters = map[string]map[string]bool{"dictsort": setOf("case_sensitive", "by", "reverse"), "int": setOf("base")}

var otherTests = setOf("divisibleby", "escaped", "filter", "lower", "sameas", "test", "upper")

// otherAttributes are the attributes of Python's types outside the subset. A dict may have an item with the name of
// another type's method, so only calls are rejected by name; other uses are rejected when the object is known.
var otherAttributes = map[Kind]map[string]bool{
	KindString: setOf("casefold", "center", "count", "encode", "expandtabs", "find", "format", "format_map", "index", "isalnum",
		"isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace",
		"istitle", "isupper", "ljust", "maketrans", "partition", "rfind", "rindex", "rjust", "rpartition", "rsplit", "swapcase", "translate", "zfill"),
	KindList:  setOf("copy", "count", "index"),
	KindTuple: setOf("count", "index"),
	KindDict:  setOf("copy", "fromkeys"),
	KindInt: setOf("as_integer_ratio", "bit_count", "bit_length", "conjugate", "denominator", "from_bytes", "imag",
		"is_integer", "numerator", "real", "to_bytes"),
	KindFloat:    setOf("as_integer_ratio", "conjugate", "fromhex", "hex", "imag", "is_integer", "real"),
	kindRange:    setOf("count", "index", "start", "step", "stop"),
	kindView:     setOf("isdisjoint", "mapping"),
	kindLoop:     setOf("changed", "cycle", "depth", "depth0"),
	kindCallable: setOf("arguments", "caller", "catch_kwargs", "catch_varargs", "name"),
}

// otherMethods are the members of otherAttributes that are methods.
var otherMethods = map[string]bool{}

func init() { //nolint:gochecknoinits // a table made of another one
	otherAttributes[KindBool] = otherAttributes[KindInt]
	for _, kind := range []Kind{KindString, KindList, KindTuple, KindDict, KindInt, KindFloat, kindLoop} {
		for name := range otherAttributes[kind] {
			otherMethods[name] = true
		}
	}
}

// checkSubset rejects the constructs in the tree below root that are outside the subset. It
// replaces the formatting of literals by concatenation.
func checkSubset(root *node) {
	root.walk(func(n *node) {
		switch n.kind {
		case nodeFilter:
			checkFilter(n)
		case nodeTest:
			checkName(n.at, "test", n.name, otherTests)
		case nodeGetattr:
			if strings.HasPrefix(n.name, "__") {
				refusef(n.at, "attribute %q", n.name)
			}
			if n.a.kind == nodeName && n.a.name == "loop" && otherAttributes[kindLoop][n.name] {
				refusef(n.at, "attribute %q of the variable loop", n.name)
			}
		case nodeCall:
			checkCall(n)
		case nodeBinary:
			if n.name == "%" && isText(n.a) {
				refusef(n.at, "formatting with %q", "%")
			}
		}
	})
}

func isText(n *node) bool { return n != nil && n.kind == nodeConst && n.value.kind == KindString }

func checkName(at place, what, name string, other map[string]bool) {
	if other[name] {
		refusef(at, "%s %q", what, name)
	}
}

func checkFilter(n *node) {
	checkName(n.at, "filter", n.name, otherFilters)
	args := n.call.args
	if other := otherParameters[n.name]; other != nil {
		for _, name := range n.call.names {
			checkName(n.at, "filter "+n.name+" with", name, other)
		}
		if len(args) > 1 || len(args) == 1 && n.name == "dictsort" {
			refusef(args[len(args)-1].at, "this parameter of filter %q", n.name)
		}
	}
	switch n.name {
	case "format":
		if !isText(n.a) || len(n.call.kwargs) > 0 || n.call.dynArgs != nil || !format(n, n.a.value.str(), percentField) {
			refusef(n.at, "filter %q of anything but a literal with %q", "format", "%s")
		}
	case "map":
		checkPicked(n, args, 0, "filter", otherFilters)
	case "select", "reject":
		checkPicked(n, args, 0, "test", otherTests)
	case "selectattr", "rejectattr":
		checkPicked(n, args, 1, "test", otherTests)
	}
}

// checkPicked checks the filter or test that the i-th argument names.
func checkPicked(n *node, args []*node, i int, what string, other map[string]bool) {
	switch {
	case len(args) > i && !isText(args[i]), n.call.dynArgs != nil:
		refusef(n.at, "%s %q with a %s that is not a literal", "filter", n.name, what)
	case len(args) > i:
		name := args[i].value.str()
		checkName(args[i].at, what, name, other)
		if what == "filter" && name == "format" || name == "int" && len(args) > 2 {
			refusef(args[i].at, "filter %q in %q", name, n.name)
		}
	}
}

func checkCall(n *node) {
	args := n.call.args
	switch {
	case n.a.kind == nodeName && n.a.name == "strftime_now" && len(args) == 1 && isText(args[0]):
		if _, verb := strftime(time.Time{}, args[0].value.str()); verb != "" {
			refusef(args[0].at, "%q of strftime_now", verb)
		}
	case n.a.kind != nodeGetattr:
	case n.a.name == "format" && isText(n.a.a) && len(n.call.kwargs) == 0 && n.call.dynArgs == nil:
		if !format(n, n.a.a.value.str(), braceField) {
			refusef(n.a.at, "method %q with fields other than {}", "format")
		}
	case otherMethods[n.a.name]:
		refusef(n.a.at, "method %q", n.a.name)
	case len(args) > 1 && (n.a.name == "startswith" || n.a.name == "endswith"):
		refusef(n.a.at, "method %q with bounds", n.a.name)
	}
}

// fieldReader reads the field at the start of s and returns its length, or 0 if s starts with
// plain text. literal is the text that the field stands for if it takes no argument.
type fieldReader func(s string) (size int, literal string, ok bool)

func percentField(s string) (size int, literal string, ok bool) {
	switch {
	case s[0] != '%':
		return 0, "", true
	case strings.HasPrefix(s, "%%"):
		return 2, "%", true
	}
	return 2, "", strings.HasPrefix(s, "%s")
}

func braceField(s string) (size int, literal string, ok bool) {
	switch {
	case s[0] != '{' && s[0] != '}':
		return 0, "", true
	case strings.HasPrefix(s, "{{") || strings.HasPrefix(s, "}}"):
		return 2, s[:1], true
	}
	return 2, "", strings.HasPrefix(s, "{}")
}

// format turns n, the formatting of a text whose fields are all plain, into the equivalent concatenation.
func format(n *node, text string, field fieldReader) bool {
	args := n.call.args
	var list []*node
	var plain []byte
	flush := func() {
		list = append(list, &node{kind: nodeConst, value: String(string(plain)), at: n.at})
		plain = plain[:0]
	}
	for i := 0; i < len(text); {
		size, literal, ok := field(text[i:])
		switch {
		case !ok || size == 2 && literal == "" && len(args) == 0:
			return false
		case size == 0:
			size = 1
			plain = append(plain, text[i])
		case literal != "":
			plain = append(plain, literal...)
		default:
			flush()
			list = append(list, args[0])
			args = args[1:]
		}
		i += size
	}
	if len(args) > 0 {
		return false
	}
	flush()
	*n = node{kind: nodeConcat, list: list, at: n.at}
	return true
}

// placeOf returns the position at which the nodes first load a name.
func placeOf(nodes []*node, name string) place {
	var at place
	for _, n := range nodes {
		n.walk(func(n *node) {
			if at.line == 0 && n.reads(name) {
				at = n.at
			}
		})
	}
	return at
}
