package jinja

import "testing"

func TestJSONRoundTrip(t *testing.T) {
	for in, want := range map[string]string{
		`{"b": 1, "a": [1.0, 1e5, 123456789012345678901234567890, null, true], "b": 2}`: `{"b": 2, "a": [1.0, 100000.0, 123456789012345678901234567890, null, true]}`,
		`"\ud83d\ude00 \u00e9\n<&>"`:                    `"😀 é\n<&>"`,
		"[NaN, -Infinity, 1e999, 1E-7, 1e16, -0.0, -0]": "[NaN, -Infinity, Infinity, 1e-07, 1e+16, -0.0, 0]",
	} {
		v, err := ParseJSON([]byte(in))
		if err != nil {
			t.Fatalf("%s: %v", in, err)
		}
		out, err := AppendJSON(nil, v, JSONOptions{})
		if err != nil || string(out) != want {
			t.Errorf("%s: %s, %v; want %s", in, out, err, want)
		}
	}
}
