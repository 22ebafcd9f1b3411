package jinja

import (
	"errors"
	"strings"
	"testing"
)

// TestUnsupported: constructs outside the subset are rejected at compile time, even in code that
// would not run, with their name and position.
func TestUnsupported(t *testing.T) {
	for _, c := range []struct{ source, want string }{
		{"{{ x }}\n  {{ y | groupby('k') }}", `line 2, column 10: filter "groupby"`},
		{"é{{ x | xmlattr }}", `line 1, column 9: filter "xmlattr"`},
		{"{% if false %}{{ x | round }}{% endif %}", `line 1, column 22: filter "round"`},
		{"{{ x | map('sum') }}", `line 1, column 12: filter "sum"`},
		{"{{ x | map(y) }}", `line 1, column 8: filter "map" with a filter that is not a literal`},
		{"{{ x | select('upper') }}", `line 1, column 15: test "upper"`},
		{"{{ x | selectattr('a', 'sameas', 1) }}", `line 1, column 24: test "sameas"`},
		{"{{ x | int(0, 16) }}", `line 1, column 15: this parameter of filter "int"`},
		{"{{ x | int(base=16) }}", `line 1, column 8: filter int with "base"`},
		{"{{ x | dictsort(true) }}", `line 1, column 17: this parameter of filter "dictsort"`},
		{"{{ x | format(1) }}", `line 1, column 8: filter "format" of anything but a literal with "%s"`},
		{"{{ '%d' | format(1) }}", `line 1, column 11: filter "format" of anything but a literal with "%s"`},
		{"{{ '%s' | format(1, 2) }}", `line 1, column 11: filter "format" of anything but a literal with "%s"`},
		{"{{ '%s' % x }}", `line 1, column 4: formatting with "%"`},
		{"{{ '{:>5}'.format(x) }}", `line 1, column 12: method "format" with fields other than {}`},
		{"{{ x.format(1) }}", `line 1, column 6: method "format"`},
		{"{{ x.zfill(3) }}", `line 1, column 6: method "zfill"`},
		{"{{ dict.fromkeys('ab') }}", `line 1, column 9: method "fromkeys"`},
		{"{{ x.bit_count() }}", `line 1, column 6: method "bit_count"`},
		{"{{ x.startswith('a', 1) }}", `line 1, column 6: method "startswith" with bounds`},
		{"{{ x.__class__ }}", `line 1, column 6: attribute "__class__"`},
		{"{% for x in l %}{{ loop.cycle(1) }}{% endfor %}", `line 1, column 25: method "cycle"`},
		{"{% for x in l recursive %}{% endfor %}", `line 1, column 15: a recursive loop`},
		{"{{ x is divisibleby 3 }}", `test "divisibleby"`},
		{"{{ 2 ** 3 }}", `line 1, column 6: operator "**"`},
		{"{{ f(**x) }}", `line 1, column 6: an argument with "**"`},
		{"{{ 0xff }}", `line 1, column 4: a number with a prefix`},
		{`{{ '\101' }}`, `line 1, column 4: the escape "\\1"`},
		{"{% macro m() %}{{ varargs }}{% endmacro %}", `line 1, column 19: "varargs" of a macro`},
		{"{% set c = cycler(1) %}", `line 1, column 12: global "cycler"`},
		{"{{ self.x() }}", `line 1, column 4: global "self"`},
		{"{{ strftime_now('%Y %U') }}", `line 1, column 17: "%U" of strftime_now`},
		{"{% with a = 1 %}{% endwith %}", `line 1, column 4: tag "with"`},
		{"{% block b %}{% endblock %}", `line 1, column 4: tag "block"`},
		{"\n\n  {%- include 'x' %}", `line 3, column 7: tag "include"`},
	} {
		_, err := Compile(c.source)
		e, ok := errors.AsType[*Error](err)
		if !ok || e.Class != Unsupported || !strings.HasSuffix(err.Error(), c.want+" is not supported") {
			t.Errorf("%s: got %v, want %s is not supported", c.source, err, c.want)
		}
	}
	for name := range filters {
		if otherFilters[name] {
			t.Errorf("filter %s is both in the subset and outside", name)
		}
	}
	for name := range tests {
		if otherTests[name] {
			t.Errorf("test %s is both in the subset and outside", name)
		}
	}
}

// TestUnsupportedValues: what depends on values is Unsupported at run time, never a Python error
// that an engine would not raise.
func TestUnsupportedValues(t *testing.T) {
	vars := new(Dict)
	vars.Set("s", String("a%s"))
	vars.Set("d", FromDict(nil))
	vars.Set("big", BigInt("123456789012345678901234567890"))
	for _, source := range []string{
		"{{ s % 1 }}", "{{ big + 1 }}", "{{ 9223372036854775807 + 1 }}", "{{ 9223372036854775807 * 3 }}", "{{ 2.5 // 2 }}",
		"{{ s.zfill }}", "{{ d.copy }}", "{{ d.items() == d.items() }}", "{{ {(1, 2): 3} }}", "{{ range(3) }}", "{{ range }}",
		"{% for x in [1] %}{% set l = loop %}{{ l.cycle }}{% endfor %}",
	} {
		tpl, err := Compile(source)
		if err != nil {
			t.Fatalf("%s: %v", source, err)
		}
		out, err := tpl.Render(nil, vars, Env{})
		if e, ok := errors.AsType[*Error](err); !ok || e.Class != Unsupported {
			t.Errorf("%s: got %q, %v; want that it is not supported", source, out, err)
		}
	}
}

// TestNilDict: a nil *Dict reads as an empty one.
func TestNilDict(t *testing.T) {
	var d *Dict
	if _, ok := d.Get("a"); ok || d.Len() != 0 || d.Clone().Len() != 0 {
		t.Error("got an entry in a nil Dict")
	}
	for range d.Range {
		t.Error("got an entry in a nil Dict")
	}
}
