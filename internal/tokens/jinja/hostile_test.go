package jinja

import (
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// hostile returns short templates that demand many resources, by the operation they test.
func hostile() map[string]string {
	loop := func(body string) string {
		return "{% set ns = namespace(x='ab', l=[1], t='') %}{% for i in range(99999) %}" + body + "{% endfor %}"
	}
	all := map[string]string{
		"join":              "{{ (['a'*100000]*100000) | join('b'*10000) }}",
		"join method":       "{{ ('b'*10000).join(['a'*100000]*100000) }}",
		"join first":        "{{ ['', 'a'] | join('b'*30000000) }}",
		"join numbers":      "{{ (range(99999) | list * 100) | join('b'*1000) }}",
		"times":             "{{ 'x'*1000000000 }}",
		"double concat":     loop("{% set ns.x = ns.x ~ ns.x %}"),
		"double plus":       loop("{% set ns.x = ns.x + ns.x %}"),
		"double list":       loop("{% set ns.l = ns.l + ns.l %}"),
		"double repr":       loop("{% set ns.l = [ns.l, ns.l] %}{% if i > 30 %}{{ ns.l }}{% endif %}"),
		"double json":       loop("{% set ns.l = [ns.l, ns.l] %}{% if i > 30 %}{{ ns.l | tojson }}{% endif %}"),
		"double equality":   "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}",
		"double order":      "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a < ns.b }}",
		"quadratic text":    loop("{% set ns.x = ns.x ~ 'abcdefghij' %}"),
		"json indent":       "{{ [[[[1]]]] | tojson(indent=999999999) }}",
		"json indent deep":  "{% set ns = namespace(x=1) %}{% for i in range(400) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson(indent=1000000) }}",
		"json indent text":  "{{ ([1] * 1000) | tojson(indent='a' * 1000000) }}",
		"json separators":   "{{ ([1] * 1000) | tojson(separators=('a' * 1000000, '')) }}",
		"json escapes":      "{{ ('\\x00' * 8000000) | tojson }}",
		"json ascii":        "{{ ('\u4e00' * 5000000) | tojson(ensure_ascii=true) }}",
		"range":             "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
		"range list":        "{% for a in range(99999) %}{% set x = range(99999) | list %}{% endfor %}",
		"range in":          "{% for a in range(99999) %}{{ 99999 in range(0, 99999) }}{% endfor %}",
		"indent":            "{{ ('a\n' * 1000000) | indent(1000) }}",
		"indent width":      "{{ 'a\nb' | indent(999999999) }}",
		"indent other ends": "{{ ('a\x0b' * 3000000) | indent(1000) }}",
		"indent first":      "{{ 'a' | indent('x' * 10000000, true) }}",
		"replace":           "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
		"replace method":    "{{ ('a' * 1000000).replace('', 'b' * 1000) }}",
		"markup plus":       "{{ ('a' | safe) + '\"' * 8000000 }}",
		"split":             "{{ ('a ' * 8000000).split(' ') | length }}",
		"split spaces":      "{{ ('a ' * 8000000).split() | length }}",
		"splitlines":        "{{ ('\n' * 16000000).splitlines() | length }}",
		"list of text":      "{{ ('a' * 16000000) | list | length }}",
		"slice text":        "{{ ('a' * 16000000)[::-1] }}",
		"reverse text":      "{{ ('\u4e00' * 5000000) | reverse }}",
		"upper":             "{{ ('\u0390' * 8000000) | upper }}",
		"dict copies":       "{% set d = dict(a=1, b=2) %}{% for i in range(99999) %}{{ dict(d) | length }}{% endfor %}",
		"list copies":       "{% set l = range(99999) | list %}{% for i in range(99999) %}{{ l[:] | length }}{% endfor %}",
		"same parts":        "{% set a = range(99999) | list %}{% for i in range(99999) %}{{ a == range(99999) | list }}{% endfor %}",
		"unique":            "{{ range(99999) | map('string') | map('indent', 200, true) | unique | list | length }}",
		"arguments":         "{% macro m(a) %}{% endmacro %}{% set l = range(99999) | list %}{% for i in range(99999) %}{{ m(*l[:1]) }}{% endfor %}",
		"dictsort":          "{% for i in range(9999) %}{{ dict(a='A' * 100000, b='B' * 100000) | dictsort | length }}{% endfor %}",
		"scan find":         "{% set x = 'a' * 16000000 %}" + loop("{{ x[i] }}"),
		"title":             "{{ ('ab ' * 5000000).title() }}",
		"title filter":      "{{ ('Ab ' * 5000000) | title }}",
		"capitalize":        "{{ ('\u00c4' * 8000000).capitalize() }}",
		"sort text":         "{{ (['A' * 1000000] * 100000) | sort }}",
		"sort path":         "{{ [1] | sort(attribute='.' * 16000000) }}",
		"unique long":       "{% for i in range(9999) %}{{ ['a' * 1000000] | unique | list | length }}{% endfor %}",
		"macro recursion":   "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
		"macro doubling":    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}xxxxxxxxxx{% endmacro %}{{ m(100) }}",
		"captures":          loop("{% set ns.t %}{{ ns.t }}{{ ns.t }}x{% endset %}"),
		"output":            "{% set x = 'x' * 1000000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
		"output numbers":    "{% for i in range(99999) %}{% for j in range(99999) %}{{ j }}{% endfor %}{% endfor %}",
		"strftime":          "{{ strftime_now('%c' * 8000000) }}",
		"raise":             "{{ raise_exception('x' * 16000000) }}{{ raise_exception('x' * 31000000) }}",
		"unknown name":      "{{ ('x' * 8000000)['\u0001' * 8000000].y }}",
		"big read":          loop("{{ ('9' * 4000) | int }}"),
		"strip many":        "{{ ('a' * 4000000).strip('b' * 1000000 ~ 'a') }}",
		"scan contains":     "{% set x = 'a' * 16000000 %}" + loop("{{ 'b' in x }}"),
		"scan length":       "{% set x = 'a' * 16000000 %}" + loop("{{ x | length }}"),
		"scan compare":      "{% set x = 'a' * 10000000 %}{% set y = 'a' * 10000000 %}" + loop("{{ x == y }}{{ x < y }}"),
		"filter block":      loop("{% filter upper %}{{ 'x' * 100000 }}{% endfilter %}"),
		"call block":        "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}" + strings.Repeat("{% call m() %}", 40) + "x" + strings.Repeat("{% endcall %}", 40),
	}
	return all
}

// everyTextFunction returns templates that call every filter and method repeatedly with long
// text, and with characters that grow.
func everyTextFunction() map[string]string {
	all := map[string]string{}
	for _, x := range []string{"'Ab c_' * 60000", "'\u0390\u00df \u4e00' * 60000", "'\\x00\\n<&' * 60000"} {
		for name := range filters {
			all[fmt.Sprintf("filter %s of %s", name, x)] = fmt.Sprintf("{%% set x = %s %%}{%% for i in range(99999) %%}{{ (x | %s) is none }}{%% endfor %%}", x, name)
		}
		for name := range strMethods {
			all[fmt.Sprintf("method %s of %s", name, x)] = fmt.Sprintf("{%% set x = %s %%}{%% for i in range(99999) %%}{{ x.%s() is none }}{%% endfor %%}", x, name)
		}
	}
	return all
}

// TestHostileMemory: a short template never makes a rendering allocate, live or dead, more than
// four times its budget.
func TestHostileMemory(t *testing.T) {
	bounded(t, hostile(), RequestEnv(1000))
	// With smaller budgets, because there are hundreds.
	bounded(t, everyTextFunction(), Env{MaxSteps: 1 << 17, MaxMemory: 4 << 20, MaxOutput: 1 << 20})
}

func bounded(t *testing.T, templates map[string]string, env Env) {
	for name, source := range templates {
		t.Run(name, func(t *testing.T) {
			tpl, err := Compile(source)
			if err != nil {
				t.Fatal(err)
			}
			before := allocated()
			out, err := tpl.Render(nil, nil, env)
			if got, limit := allocated()-before, uint64(4*env.MaxMemory); got > limit {
				t.Errorf("allocated %d KB, at most %d allowed", got>>10, limit>>10)
			}
			e, ok := errors.AsType[*Error](err)
			if err != nil && (!ok || e.Class == internalError) {
				t.Errorf("%d bytes and %v", len(out), err)
			}
			if ok && len(e.Message) > env.MaxMemory/2 {
				t.Errorf("the message has %d bytes", len(e.Message))
			}
		})
	}
}

// allocated returns the bytes that this process has allocated so far.
func allocated() uint64 {
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return s.TotalAlloc
}

// TestLegitimateBudget: with every template, a conversation of ten megabytes fits the budget
// derived from its size.
func TestLegitimateBudget(t *testing.T) {
	message := func(role, content string) Value {
		d := NewDict(2)
		d.Set("role", String(role))
		d.Set("content", String(content))
		return FromDict(d)
	}
	for _, size := range []int{20, 2_000, 5_000_000} {
		var messages []Value
		total := 0
		for total < 10_000_000 {
			messages = append(messages, message("user", strings.Repeat("a word \u00e9\n", size/10+1)), message("assistant", strings.Repeat("<b>\"yes\" ", size/9+1)))
			total += 2*size + 64
		}
		files, err := filepath.Glob(filepath.Join("testdata", "templates", "*"))
		if err != nil || len(files) == 0 {
			t.Fatal(files, err)
		}
		for _, file := range files {
			name := filepath.Base(file)
			tpl := compileFile(t, name)
			vars := NewDict(4)
			vars.Set("messages", List(slices.Clone(messages)))
			vars.Set("add_generation_prompt", Bool(true))
			vars.Set("bos_token", String("<s>"))
			vars.Set("eos_token", String("</s>"))
			out, err := tpl.Render(nil, vars, RequestEnv(total))
			if e, ok := errors.AsType[*Error](err); ok && (e.Class == "ResourceLimit" || e.Class == internalError) {
				t.Errorf("%s: %d messages of %d bytes: %v", name, len(messages), size, err)
			}
			t.Logf("%s: %d messages of %d bytes: %d bytes, %v", name, len(messages), size, len(out), err)
		}
	}
}
