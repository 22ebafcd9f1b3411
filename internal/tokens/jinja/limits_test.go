package jinja

import (
	"errors"
	"strings"
	"sync"
	"testing"
)

// TestHostileTemplates: a template that would exhaust the machine ends with an error.
func TestHostileTemplates(t *testing.T) {
	deep := strings.Repeat
	for name, source := range map[string]string{
		"loops":           "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
		"output":          "{% for a in range(99999) %}{{ 'x' * 10000 }}{% endfor %}",
		"long text":       "{{ 'x' * 10 ** 12 }}",
		"doubling text":   "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
		"doubling list":   "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
		"doubling json":   "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
		"nested repr":     "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
		"nested equality": "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% set ns.y = [ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
		"recursive macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
		"replace":         "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
		"own namespace":   "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
		"parentheses":     "{{ " + deep("(", 100000) + deep(")", 100000) + " }}",
		"brackets":        "{{ " + deep("[", 100000) + " }}",
		"nots":            "{{ " + deep("not ", 100000) + "1 }}",
		"minuses":         "{{ " + deep("-", 100000) + "1 }}",
		"sum":             "{{ 1" + deep("+1", 100000) + " }}",
		"dots":            "{{ x" + deep(".x", 100000) + " }}",
		"filters":         "{{ x" + deep("|trim", 100000) + " }}",
		"ifs":             deep("{% if 1 %}", 100000),
		"elses":           "{{ 1" + deep(" if 1 else 1", 100000) + " }}",
		"and":             "{{ 1" + deep(" and 1", 100000) + " }}",
		"condition chain": "{{ 1" + deep(" if 1", 100000) + " }}",
	} {
		t.Run(name, func(t *testing.T) {
			tpl, err := Compile(source)
			var out []byte
			if err == nil {
				out, err = tpl.Render(nil, nil, Env{MaxSteps: 1e6, MaxMemory: 32 << 20, MaxOutput: 1 << 20})
			}
			var e *Error
			if !errors.As(err, &e) || e.Class == internalError || len(out) != 0 {
				t.Errorf("got %d bytes and %v", len(out), err)
			}
		})
	}
}

// TestConcurrentRendering shares one template between goroutines.
func TestConcurrentRendering(t *testing.T) {
	tpl, vars := conversation(t)
	want, err := tpl.Render(nil, vars, Env{})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 5 {
				if out, err := tpl.Render(nil, vars, Env{}); err != nil || string(out) != string(want) {
					t.Errorf("another text of %d bytes, %v", len(out), err)
				}
			}
		})
	}
	wg.Wait()
}

// conversation returns 81 messages and the template of Qwen3.
func conversation(t testing.TB) (*Template, *Dict) {
	t.Helper()
	message := func(role, content string) Value {
		d := NewDict(2)
		d.Set("role", String(role))
		d.Set("content", String(content))
		return FromDict(d)
	}
	messages := []Value{message("system", "Answer briefly.")}
	for range 40 {
		messages = append(messages,
			message("user", "A question: "+strings.Repeat("what of the sea and the sky? ", 26)),
			message("assistant", "An answer: "+strings.Repeat("they are wide and blue. ", 31)))
	}
	vars := NewDict(2)
	vars.Set("messages", List(messages))
	vars.Set("add_generation_prompt", Bool(true))
	return compileFile(t, "Qwen-Qwen3-0.6B.jinja"), vars
}

func BenchmarkConversation(b *testing.B) {
	tpl, vars := conversation(b)
	var out []byte
	b.ReportAllocs()
	for b.Loop() {
		var err error
		if out, err = tpl.Render(out[:0], vars, Env{}); err != nil {
			b.Fatal(err)
		}
	}
	b.SetBytes(int64(len(out)))
}

func BenchmarkParseJSON(b *testing.B) {
	_, vars := conversation(b)
	body, err := AppendJSON(nil, FromDict(vars), JSONOptions{})
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		if _, err := ParseJSON(body); err != nil {
			b.Fatal(err)
		}
	}
}

func TestContentFormat(t *testing.T) {
	for _, c := range []struct{ source, want string }{
		{"{% for m in messages %}{{ m.content }}{% endfor %}", "string"},
		{"{% for m in messages %}{% for c in m['content'] %}{% endfor %}{% endfor %}", "openai"},
		{"{% set ms = messages[1:] %}{% for m in ms %}{% for c in m.content | list %}{% endfor %}{% endfor %}", "openai"},
		{"{% macro r(content) %}{% for c in content %}{% endfor %}{% endmacro %}", "openai"},
		{"{% for a, b in messages %}{% for c in content %}{% endfor %}{% endfor %}", "string"},
		{"{% for m in other %}{% for c in m.content %}{% endfor %}{% endfor %}", "string"},
		{"{{ 'image' }}", "string"},
	} {
		tpl, err := Compile(c.source)
		if err != nil {
			t.Fatal(err)
		}
		if got := tpl.ContentFormat(); got != c.want {
			t.Errorf("%s: got %s, want %s", c.source, got, c.want)
		}
	}
}
