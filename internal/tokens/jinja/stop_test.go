package jinja

import (
	"errors"
	"strings"
	"testing"
)

// A stopped rendering ends at the next check of the stop channel, wherever it is; one that is not
// stopped has as many steps as without a stop channel.
func TestAStopEndsARendering(t *testing.T) {
	gone := make(chan struct{})
	close(gone)
	list := make([]Value, 100_000)
	for i := range list {
		list[i] = String("x")
	}
	vars := new(Dict)
	vars.Set("list", List(list))
	vars.Set("text", String(strings.Repeat("text ", 1<<20)))
	for name, source := range map[string]string{
		"loop":    "{% for x in list %}{{ x }}{% endfor %}",
		"filter":  "{{ list | map('upper') | join }}",
		"macro":   "{% macro m(x) %}{{ x }}{% endmacro %}{% for x in list %}{{ m(x) }}{% endfor %}",
		"text":    "{% for x in list %}{{ text | length }}{% endfor %}",
		"replace": "{{ text | replace('t', 'ttt') | length }}",
	} {
		tpl, err := Compile(source)
		if err != nil {
			t.Fatal(err)
		}
		env := Env{MaxSteps: 1 << 34}
		if name == "text" {
			env.MaxSteps = 3 << 17
		}
		want, errWant := tpl.Render(nil, vars, env)
		env.Stop = make(chan struct{})
		got, err := tpl.Render(nil, vars, env)
		if string(got) != string(want) || (err == nil) != (errWant == nil) {
			t.Errorf("%s: %d bytes and %v, without a stop %d bytes and %v", name, len(got), err, len(want), errWant)
		}
		env.Stop = gone
		got, err = tpl.Render([]byte("before"), vars, env)
		if e, ok := errors.AsType[*Error](err); !ok || e.Class != "Stopped" || string(got) != "before" {
			t.Errorf("%s: got %v, %.20q, want Stopped and dst unchanged", name, err, got)
		}
	}
}

// The reading of JSON ends soon after the stop channel is closed, wherever it is.
func TestTheReadingOfJSONStops(t *testing.T) {
	over := make(chan struct{})
	close(over)
	const many = 1 << 12
	for name, text := range map[string]string{
		"values":      `[` + strings.Repeat("1,", many) + `1]`,
		"members":     `{"a":1` + strings.Repeat(`,"b":{"a":1}`, many) + `}`,
		"equal keys":  `{"a":1` + strings.Repeat(`,"a":1`, many) + `}`,
		"some levels": strings.Repeat(`[`, 100) + strings.Repeat("1,", many) + `1` + strings.Repeat(`]`, 100),
	} {
		if _, err := ParseJSONInto(make(chan struct{}), nil, []byte(text), false); err != nil {
			t.Errorf("%s: got %v, want no error", name, err)
		}
		if _, err := ParseJSONInto(over, nil, []byte(text), false); !errors.Is(err, ErrStopped) {
			t.Errorf("%s: got %v, want ErrStopped", name, err)
		}
	}
}
