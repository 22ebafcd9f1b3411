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

// hostile are short templates that ask for a lot, each with the operation that it is about.
func hostile() map[string]string {
	loop := func(body string) string {
		return "{% set ns = namespace(x='ab', l=[1], t='') %}{% for i in range(99999) %}" + body + "{% endfor %}"
	}
	all := map[string]string{
		"center":            "{{ 'a'.center(999999999) }}",
		"ljust":             "{{ 'a'.ljust(999999999) }}",
		"rjust wide fill":   "{{ 'a'.rjust(16000000, '\u4e00') }}",
		"zfill":             "{{ 'a'.zfill(999999999) }}",
		"zfill sign":        "{{ '-1'.zfill(16000000) ~ '+1'.zfill(16000000) }}",
		"center filter":     "{{ 'a' | center(999999999) }}",
		"expandtabs":        "{{ ('\t' * 1000000).expandtabs(1000) }}",
		"join":              "{{ (['a'*100000]*100000) | join('b'*10000) }}",
		"join method":       "{{ ('b'*10000).join(['a'*100000]*100000) }}",
		"join first":        "{{ ['', 'a'] | join('b'*30000000) }}",
		"join numbers":      "{{ (range(99999) | list * 100) | join('b'*1000) }}",
		"times":             "{{ 'x'*1000000000 }}",
		"times list":        "{{ ['x']*100000000 }}",
		"times tuple":       "{{ (('x',)*1000000)*1000 }}",
		"double concat":     loop("{% set ns.x = ns.x ~ ns.x %}"),
		"double plus":       loop("{% set ns.x = ns.x + ns.x %}"),
		"double list":       loop("{% set ns.l = ns.l + ns.l %}"),
		"double repr":       loop("{% set ns.l = [ns.l, ns.l] %}{% if i > 30 %}{{ ns.l }}{% endif %}"),
		"double json":       loop("{% set ns.l = [ns.l, ns.l] %}{% if i > 30 %}{{ ns.l | tojson }}{% endif %}"),
		"double equality":   "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}",
		"double order":      "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a < ns.b }}",
		"same parts":        "{% set a = ['x'] * 500000 %}{% for i in range(99999) %}{{ a == ['x'] * 500000 }}{% endfor %}",
		"quadratic text":    loop("{% set ns.x = ns.x ~ 'abcdefghij' %}"),
		"percent width":     "{{ '%999999999d' % 1 }}",
		"percent widths":    "{{ ('%1000000d' * 1000) % ((1,) * 1000) }}",
		"percent star":      "{{ ('%*d' * 1000) % ((1000000, 1) * 1000) }}",
		"percent precision": "{{ ('%.1000000d' * 1000) % ((1,) * 1000) }}",
		"percent float":     "{{ ('%.1000000f' * 1000) % ((1.5,) * 1000) }}",
		"percent text":      "{{ ('%s' * 100000) % (('a' * 100000,) * 100000) }}",
		"percent ascii":     "{{ '%a' % ('\u00e9' * 4000000) }}",
		"percent repr":      "{{ '%r' % ('\\x00' * 8000000) }}",
		"format width":      "{{ '{:999999999}'.format(1) }}",
		"format widths":     "{{ ('{:1000000}' * 1000).format(*([1] * 1000)) }}",
		"format float":      "{{ ('{:.1000000f}' * 1000).format(*([1.5] * 1000)) }}",
		"format text":       "{{ ('{0}' * 100000).format('a' * 100000) }}",
		"format fill":       "{{ ('{:\u4e00>1000000}' * 100).format(*('a' * 100)) }}",
		"format literal":    loop("{{ ('x' * 1000000).format() }}"),
		"format map":        "{{ ('{a}' * 100000).format_map({'a': 'a' * 100000}) }}",
		"format filter":     "{{ ('%s' * 100000) | format(*(['a' * 100000] * 100000)) }}",
		"json indent":       "{{ [[[[1]]]] | tojson(indent=999999999) }}",
		"json indent deep":  "{% set ns = namespace(x=1) %}{% for i in range(400) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson(indent=1000000) }}",
		"json indent text":  "{{ ([1] * 1000) | tojson(indent='a' * 1000000) }}",
		"json separators":   "{{ ([1] * 1000) | tojson(separators=('a' * 1000000, '')) }}",
		"json escapes":      "{{ ('\\x00' * 8000000) | tojson }}",
		"json ascii":        "{{ ('\u4e00' * 5000000) | tojson(ensure_ascii=true) }}",
		"json sort":         "{{ ([{'b': 1, 'a': 2}] * 900000) | tojson(sort_keys=true) }}",
		"range":             "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
		"range list":        "{% for a in range(99999) %}{% set x = range(99999) | list %}{% endfor %}",
		"range sum":         "{% for a in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
		"range in":          "{% for a in range(99999) %}{{ 99999 in range(0, 99999) }}{% endfor %}",
		"indent":            "{{ ('a\n' * 1000000) | indent(1000) }}",
		"indent width":      "{{ 'a\nb' | indent(999999999) }}",
		"indent other ends": "{{ ('a\x0b' * 3000000) | indent(1000) }}",
		"indent first":      "{{ 'a' | indent('x' * 10000000, true) }}",
		"replace":           "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
		"replace method":    "{{ ('a' * 1000000).replace('', 'b' * 1000) }}",
		"escape":            "{{ ('\"' * 16000000) | e }}",
		"escape twice":      "{% set ns = namespace(x='&' * 1000) %}{% for i in range(99999) %}{% set ns.x = ns.x | forceescape %}{% endfor %}",
		"markup plus":       "{{ ('a' | safe) + '\"' * 8000000 }}",
		"urlencode":         "{{ ('\u4e00' * 8000000) | urlencode }}",
		"urlencode pairs":   "{{ ([['a', '\u4e00' * 100000]] * 100000) | urlencode }}",
		"xmlattr":           "{{ {'a': '\"' * 8000000} | xmlattr }}",
		"batch":             "{{ [1] | batch(999999999, 'x') | list }}",
		"slice":             "{{ [1] | slice(999999999, 'x') | list }}",
		"slices":            "{{ (range(99999) | list * 5) | slice(2) | list | length }}{% for i in range(9999) %}{{ (range(99999) | list) | slice(1) | list | length }}{% endfor %}",
		"split":             "{{ ('a ' * 8000000).split(' ') | length }}",
		"split spaces":      "{{ ('a ' * 8000000).split() | length }}",
		"rsplit":            "{{ ('a ' * 8000000).rsplit(' ') | length }}",
		"rsplit spaces":     "{{ ('a ' * 8000000).rsplit() | length }}",
		"splitlines":        "{{ ('\n' * 16000000).splitlines() | length }}",
		"list of text":      "{{ ('a' * 16000000) | list | length }}",
		"slice text":        "{{ ('a' * 16000000)[::-1] }}",
		"reverse text":      "{{ ('\u4e00' * 5000000) | reverse }}",
		"upper":             "{{ ('\u0390' * 8000000) | upper }}",
		"title":             "{{ ('ab ' * 5000000).title() }}",
		"title filter":      "{{ ('Ab ' * 5000000) | title }}",
		"swapcase":          "{{ ('ab ' * 5000000).swapcase() }}",
		"casefold":          "{{ ('\u00df' * 8000000).casefold() }}",
		"capitalize":        "{{ ('\u00c4' * 8000000).capitalize() }}",
		"sort text":         "{{ (['A' * 1000000] * 100000) | sort }}",
		"sort keys":         "{{ (range(99999) | list * 3) | sort(attribute='real,imag,real,imag,real,imag') | length }}",
		"sort path":         "{{ [1] | sort(attribute='.' * 16000000) }}",
		"map path":          "{{ [1] * 100000 | int | map(attribute='real.real.real.real.real.real.real.real') | list | length }}",
		"dictsort":          "{% for i in range(9999) %}{{ dict(a='A' * 100000, b='B' * 100000) | dictsort(by='value') | length }}{% endfor %}",
		"groupby":           "{{ (range(99999) | list * 5) | groupby('real') | length }}",
		"unique":            "{{ range(99999) | map('string') | map('center', 200) | unique | list | length }}",
		"unique long":       "{% for i in range(9999) %}{{ ['a' * 1000000] | unique | list | length }}{% endfor %}",
		"tuple keys":        "{% set k = ('a' * 1000000,) * 999 %}{{ {k: 1, (k,): 2} }}{% for i in range(9999) %}{{ {k: i}[k] }}{% endfor %}",
		"dict of":           "{{ dict.fromkeys(range(99999)) }}{{ {}.fromkeys(range(99999) | list) | length }}{% for i in range(999) %}{{ {}.fromkeys(range(99999)) | length }}{% endfor %}",
		"dict copies":       "{% set d = {}.fromkeys(range(9999)) %}{% for i in range(99999) %}{{ d.copy() | length }}{{ dict(d) | length }}{% endfor %}",
		"list copies":       "{% set l = range(99999) | list %}{% for i in range(99999) %}{{ l.copy() | length }}{{ l[:] | length }}{% endfor %}",
		"varargs":           "{% macro m() %}{{ varargs | length }}{% endmacro %}{% set l = range(99999) | list %}{% for i in range(99999) %}{{ m(*l) }}{% endfor %}",
		"kwargs":            "{% macro m() %}{{ kwargs | length }}{% endmacro %}{% set ns = namespace(l=[]) %}{% for i in range(30000) %}{% set ns.l = ns.l + [('a' ~ i, i)] %}{% endfor %}{{ m(**dict(ns.l)) }}",
		"macro recursion":   "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
		"macro doubling":    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}xxxxxxxxxx{% endmacro %}{{ m(100) }}",
		"loop recursion":    "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
		"captures":          loop("{% set ns.t %}{{ ns.t }}{{ ns.t }}x{% endset %}"),
		"output":            "{% set x = 'x' * 1000000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
		"output numbers":    "{% for i in range(99999) %}{% for j in range(99999) %}{{ j }}{% endfor %}{% endfor %}",
		"cycler":            "{% set l = range(99999) | list %}{% for i in range(99999) %}{% set c = cycler(*l) %}{% endfor %}",
		"strftime":          "{{ strftime_now('%c' * 8000000) }}",
		"raise":             "{{ raise_exception('x' * 16000000) }}{{ raise_exception('x' * 31000000) }}",
		"unknown name":      "{{ ('x' * 8000000)['\u0001' * 8000000].y }}",
		"big power":         loop("{% set y = 3 ** 80000 %}"),
		"big product":       "{% set x = 3 ** 40000 %}" + loop("{% set y = x * x %}"),
		"big quotient":      "{% set x = 3 ** 80000 %}" + loop("{% set y = x // 7 %}{% set z = x / (x - 1) %}"),
		"big compare":       "{% set x = 3 ** 80000 %}" + loop("{{ x == x + 1 }}{{ x < 1.5 }}"),
		"big hex":           "{% set x = 3 ** 80000 %}" + loop("{{ '%x' % x }}"),
		"big read":          loop("{{ ('9' * 4000) | int }}"),
		"strip many":        "{{ ('a' * 4000000).strip('b' * 1000000 ~ 'a') }}",
		"scan contains":     "{% set x = 'a' * 16000000 %}" + loop("{{ 'b' in x }}"),
		"scan length":       "{% set x = 'a' * 16000000 %}" + loop("{{ x | length }}"),
		"scan count":        "{% set x = 'a' * 16000000 %}" + loop("{{ x.count('b') }}"),
		"scan find":         "{% set x = 'a' * 16000000 %}" + loop("{{ x.find('ab') }}{{ x[i] }}"),
		"scan compare":      "{% set x = 'a' * 10000000 %}{% set y = 'a' * 10000000 %}" + loop("{{ x == y }}{{ x < y }}"),
		"scan isalpha":      "{% set x = 'a' * 16000000 %}" + loop("{{ x.isalpha() }}{{ x is lower }}{{ x | wordcount }}"),
		"striptags":         "{{ ('<a>' * 1000000) | striptags }}",
		"truncate":          "{% set x = 'a b' * 3000000 %}" + loop("{{ x | truncate(100) | length }}"),
		"float":             loop("{{ ('1' * 1000000) | float }}"),
		"filter block":      loop("{% filter upper %}{{ 'x' * 100000 }}{% endfilter %}"),
		"call block":        "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}" + strings.Repeat("{% call m() %}", 40) + "x" + strings.Repeat("{% endcall %}", 40),
	}
	return all
}

// everyTextFunction are templates that ask every filter and method again and again for much text, and for characters that grow.
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

// TestHostileMemory: no short template makes one rendering allocate, dead or alive, more than four times its budget.
func TestHostileMemory(t *testing.T) {
	bounded(t, hostile(), RequestEnv(1000))
	// The same in the small, since there are hundreds.
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

// allocated is what this process has allocated so far.
func allocated() uint64 {
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return s.TotalAlloc
}

// TestLegitimateBudget: a conversation of ten megabytes fits the budget that its size gives, with every template at hand.
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
