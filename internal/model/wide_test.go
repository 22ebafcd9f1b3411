package model

import (
	"strings"
	"testing"

	"github.com/kvlane/kvlane/internal/tokenizer/jinja"
)

func TestWideIntegers(t *testing.T) {
	for text, want := range map[string]bool{
		`1`: false, `18446744073709551615`: false, `18446744073709551616`: true, `-9223372036854775808`: false, `-9223372036854775809`: true,
		`1e400`: false, `18446744073709551616.0`: false, `-Infinity`: false, `"18446744073709551616"`: false, `"\"18446744073709551616"`: false,
		`{"18446744073709551616":"\\\\","b":[1,{"c":[99999999999999999999]}]}`: true,
		`[[1,2],{"a":null,"b":true}]`:                                          false,
		`"`:                                                                    false, `"\`: false, `-`: false, ``: false,
		strings.Repeat(`{"a":`, 300) + strings.Repeat("1", 1<<20) + strings.Repeat("}", 300): true,
	} {
		if got := hasWideInteger([]byte(text)); got != want {
			t.Errorf("%.60s: %v", text, got)
		}
	}
}

// Of types that become equal the first stays, whatever their number.
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

// As orjson: what 64 bits do not hold is a float, and nothing else changes.
func TestWideIntegersBecomeFloats(t *testing.T) {
	for in, want := range map[string]string{
		`{"a":18446744073709551616,"b":[-9223372036854775809,1]}`: `{"a":18446744073709551616.0,"b":[-9223372036854775809.0,1]}`,
		`["18446744073709551616",1.5e3,-0,18446744073709551615]`:  `["18446744073709551616",1.5e3,-0,18446744073709551615]`,
		`99999999999999999999`: `99999999999999999999.0`,
		`"\\"`:                 `"\\"`,
	} {
		if got := wideIntegers([]byte(in)); string(got) != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}
