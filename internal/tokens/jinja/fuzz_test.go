package jinja

import (
	"errors"
	"testing"
)

// fuzzEnv bounds the cost of every input.
var fuzzEnv = Env{Now: renderedAt, MaxOutput: 1 << 16, MaxSteps: 20000, MaxMemory: 1 << 20}

func FuzzRender(f *testing.F) {
	doc := readGolden(f, "testdata/golden.json.gz")
	cases, _ := field(f, doc, "cases").AsList()
	for _, c := range cases[:110] {
		d, _ := c.AsDict()
		f.Add(textField(f, d, "source"))
	}
	vars, _ := field(f, doc, "vars").AsDict()
	f.Fuzz(func(t *testing.T, source string) {
		tpl, err := Compile(source)
		if err == nil {
			_, err = tpl.Render(nil, vars, fuzzEnv)
			tpl.ContentFormat()
		}
		var e *Error
		if errors.As(err, &e) && e.Class == internalError {
			t.Fatal(err)
		}
	})
}

func FuzzParseJSON(f *testing.F) {
	for _, s := range []string{`{"a": [1, 2.5, -0, "x\u00e9\ud83d\ude00", null, true, false, NaN]}`, `"\ud800"`, "[[[[]]]]", "\"\xff\"", `{"a":1,"a":2}`, `["\n","a\\\\","\u00e9\"","a much longer text\t"]`, "1e999", "-", "{"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		v, err := ParseJSON(data)
		if err != nil {
			return
		}
		out, err := AppendJSON(nil, v, JSONOptions{})
		if err != nil {
			t.Fatal(err)
		}
		texts := make([]byte, 0, len(data)%32) // too small for some
		first, _ := ParseJSONInto(nil, &texts, data, false)
		again, err := ParseJSONInto(nil, &texts, out, false)
		if err != nil {
			t.Fatalf("%s: %v", out, err)
		}
		if in, err := AppendJSON(nil, first, JSONOptions{}); err != nil || string(in) != string(out) {
			t.Fatalf("with texts %s is %s, %v; want %s", data, in, err, out)
		}
		second, err := AppendJSON(nil, again, JSONOptions{})
		if err != nil || string(second) != string(out) {
			t.Fatalf("%s became %s, %v", out, second, err)
		}
	})
}
