package jinja

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"
)

// processorTime returns the time that this process has computed.
func processorTime(t *testing.T) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// longVars are texts, keys and lists that make single operations long.
func longVars() *Dict {
	const size = 512 << 10
	keyed := func(n int) Value {
		d := new(Dict)
		for i := range n {
			d.Set(fmt.Sprintf("%s%03d", strings.Repeat("k", size/n), i), Int(1))
		}
		return FromDict(d)
	}
	list := make([]Value, 99_999)
	for i := range list {
		list[i] = String("b")
	}
	vars := new(Dict)
	vars.Set("list", List(list))
	vars.Set("text", String(strings.Repeat("b", 99_999)))
	vars.Set("name", String(strings.Repeat("a", size)))
	vars.Set("zero", String("\x00"+strings.Repeat("a", size)))
	vars.Set("few", keyed(16))
	vars.Set("same", keyed(16))
	vars.Set("few_key", String(strings.Repeat("k", size/16)+"999"))
	vars.Set("many", keyed(40))
	vars.Set("many_key", String(strings.Repeat("k", size/40)+"999"))
	vars.Set("literal", String(strings.Repeat("k", 60_000)))
	return vars
}

// longTemplates are templates of at most 64 KiB whose steps could each be long.
func longTemplates() map[string]string {
	repeat := strings.Repeat
	loop := func(body string) string { return "{% for i in range(99999) %}" + body + "{% endfor %}" }
	literal := repeat("k", 60_000)
	names := make([]string, 1500)
	for i := range names {
		names[i] = fmt.Sprintf("p%d", i)
	}
	return map[string]string{
		"join": "{{ text | join('in', name) }}", "map": "{{ text | map(attribute=name) | list }}", "sort": "{{ text | sort(attribute=name) }}",
		"selectattr": "{{ list | selectattr(name) | list }}", "rejectattr": "{{ list | rejectattr(name, 'defined') | list }}",
		"unique": "{{ list | unique(attribute=name) | list }}", "subscript": "{% for c in text %}{% set z = c[name] %}{% endfor %}",
		"subscript of a list": "{% for c in text %}{% set z = [c][name] %}{% endfor %}", "in": loop("{% set z = many_key in many %}"),
		"in few": loop("{% set z = few_key in few %}"), "get": loop("{% set z = few.get(few_key) %}"), "zero": loop("{% set z = zero in many %}"),
		"equal dicts": loop("{% set z = few == same %}"), "dict": loop("{% set z = dict(many) %}"), "namespace": loop("{% set z = namespace(many) %}"),
		"member of a namespace": "{% set ns = namespace(few) %}" + loop("{% set z = ns[few_key] %}"),
		"literal":               loop("{% set z = literal == '" + literal + "' %}"), "literal name": loop("{% set z = many." + literal + " %}"),
		"literal key": loop("{% set z = many['" + literal + "'] %}"), "JSON keys": loop("{% set z = many | tojson %}"),
		"sets": loop(repeat("{%set a=1%}", 5800)), "members": "{% set ns = namespace() %}" + loop(repeat("{%set ns.a=1%}", 4500)),
		"ifs": loop(repeat("{%if a%}{%endif%}", 3700)), "elifs": loop("{%if 0%}" + repeat("{%elif a%}", 6000) + "{%endif%}"),
		"outputs": loop(repeat("{{a}}", 12_000)), "loops": loop(repeat("{%for a in x%}{%endfor%}", 2600)), "ors": loop("{% set a = 0" + repeat(" or 0", 1900) + " %}"),
		"without else": loop("{% set a = [" + repeat("1 if a,", 9000) + "] %}"), "macros": loop(repeat("{%macro m()%}{%endmacro%}", 2500)),
		"names of another scope": loop("{% if a %}{{ " + strings.Join(names, "}}{{") + " }}{% endif %}"),
		"keywords":               "{% macro m(" + strings.Join(names, ",") + ") %}{% endmacro %}" + loop("{{ m("+strings.Join(names, "=1,")+"=1) }}"),
		"condition of a loop":    "{% for i in range(99999) if 0" + repeat(" or 0", 1900) + " %}{% endfor %}",
	}
}

// Every operation is charged in proportion to its work: the steps between two looks at the stop channel take no more than 20 times
// those of a plain loop.
func TestStepsAreShort(t *testing.T) {
	vars := longVars()
	env := Env{MaxSteps: stepsAtOnce, MaxMemory: 64 << 20, MaxOutput: 64 << 20}
	cost := func(source string) time.Duration {
		tpl, err := Compile(source)
		if err != nil {
			t.Fatal(err)
		}
		before := processorTime(t)
		_, err = tpl.Render(nil, vars, env)
		took := processorTime(t) - before
		if e, ok := errors.AsType[*Error](err); err != nil && (!ok || e.Class != "ResourceLimit") {
			t.Errorf("%.100s: got %v, want an end by the limits", source, err)
		}
		return took
	}
	const plain = "{% for i in range(99999) %}{% set a = i %}{% endfor %}"
	cost(plain)
	one := max(cost(plain), cost(plain), 2*time.Millisecond)
	for name, source := range longTemplates() {
		t.Run(name, func(t *testing.T) {
			got := cost(source)
			t.Logf("%.0f times", float64(got)/float64(one))
			if got > 20*one {
				t.Errorf("%d steps took %v of a processor, those of a plain loop %v", env.MaxSteps, got, one)
			}
		})
	}
}

func TestNoNameIsLonger(t *testing.T) {
	var tables []map[string]bool
	for _, table := range otherAttributes {
		tables = append(tables, table)
	}
	own := map[string]bool{}
	for name := range strMethods {
		own[name] = true
	}
	for name := range dictMethods {
		own[name] = true
	}
	for name := range loopAttributes {
		own[name] = true
	}
	for _, table := range append(tables, own, listMutators, dictMutators) {
		for name := range table {
			if len(name) > longestName {
				t.Errorf("%s has more than %d bytes, so it is not found", name, longestName)
			}
		}
	}
}

// A template of 64 KiB nests no calls so deeply that the stack reaches Go's limit, which ends the process.
func TestTreesAndGeneratorsAreShallow(t *testing.T) {
	for _, link := range []string{".a", "[1]", "|d", " or a", "-a", "()"} {
		text := "m()"
		for len(text) < 60_000 {
			text = "(" + text + strings.Repeat(link, 1900) + ")"
		}
		if _, err := Compile("{% macro m() %}{{ " + text + " }}{% endmacro %}{{ m() }}"); err == nil || !strings.Contains(err.Error(), "nested too deeply") {
			t.Errorf("%s: got %v, want an error of the depth", link, err)
		}
	}
	for n, want := range map[int]string{500: "[1]", 1000: "RecursionError"} {
		for _, filter := range []string{"map('int')", "select", "unique", "rejectattr('a')"} {
			tpl, err := Compile(fmt.Sprintf("{%% set ns = namespace(x=[1]) %%}{%% for i in range(%d) %%}{%% set ns.x = ns.x | %s %%}{%% endfor %%}{{ ns.x | list }}", n, filter))
			if err != nil {
				t.Fatal(err)
			}
			if out, err := tpl.Render(nil, nil, Env{}); string(out) != want && (err == nil || !strings.HasPrefix(err.Error(), want)) {
				t.Errorf("%s, %d times: got %q, %v, want %s", filter, n, out, err, want)
			}
		}
	}
	// What a macro's stack takes is charged while it runs.
	tpl, err := Compile("{% macro m(n) %}{{ (m(n + 1) if n else 0)" + strings.Repeat("|d", 1900) + " }}{% endmacro %}{% for i in range(999) %}{{ m(0) }}{% endfor %}{{ m(1) }}")
	if err != nil {
		t.Fatal(err)
	}
	if out, err := tpl.Render(nil, nil, Env{MaxMemory: 8 << 20}); err == nil || !strings.Contains(err.Error(), "too much memory") {
		t.Errorf("got %d bytes and %v, want a limit of the memory", len(out), err)
	}
}
