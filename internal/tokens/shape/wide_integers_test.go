package shape

import (
	"testing"

	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// Of types that become equal the first stays, however many there are.
func TestTypesStayInOrder(t *testing.T) {
	v, err := jinja.ParseJSON([]byte(`{"type":["int","b","a","integer","b",1,1,"c"]}`))
	if err != nil {
		t.Fatal(err)
	}
	out, err := jinja.AppendJSON(nil, standardSchema(v), jinja.JSONOptions{})
	if want := `{"type": ["integer", "b", "a", 1, 1, "c"]}`; err != nil || string(out) != want {
		t.Errorf("%s (%v), want %s", out, err, want)
	}
}

// As in orjson, integers that exceed 64 bits become floats, and nothing else changes.
func TestWideIntegersBecomeFloats(t *testing.T) {
	for in, want := range map[string]string{
		`{"a":18446744073709551616,"b":[-9223372036854775809,1]}`: `{"a":18446744073709551616.0,"b":[-9223372036854775809.0,1]}`,
		`["18446744073709551616",1.5e3,-0,18446744073709551615]`:  `["18446744073709551616",1.5e3,-0,18446744073709551615]`,
		`99999999999999999999`: `99999999999999999999.0`,
		`"\\"`:                 `"\\"`,
		`1e400`:                `1e400`, `18446744073709551616.5`: `18446744073709551616.5`, `-Infinity`: `-Infinity`, `"\"18446744073709551616"`: `"\"18446744073709551616"`,
		`["a\\\\",18446744073709551616,"\\\"",18446744073709551616]`: `["a\\\\",18446744073709551616.0,"\\\"",18446744073709551616.0]`,
		`"`: `"`, `"\`: `"\`, `-`: `-`, ``: ``,
	} {
		if got := wideIntegers([]byte(in)); string(got) != want {
			t.Errorf("%s: got %s, want %s", in, got, want)
		}
	}
}
