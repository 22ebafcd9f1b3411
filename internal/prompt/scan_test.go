package prompt

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"
)

func TestSyntaxErrorsNameTheirPlace(t *testing.T) {
	for _, c := range []struct {
		body, path string
		offset     int
	}{
		{``, "$", 0},
		{`{`, "$", 1},
		{`{"model":"m"`, "$", 12},
		{`{"model":"m",}`, "$", 13},
		{`{"messages":[{"role":"user","content":"a` + "\n" + `"}]}`, "$.messages[0].content", 40},
		{`{"messages":[{},{"a":[1,2,tru]}]}`, "$.messages[1].a[2]", 26},
		{`{"n":01}`, "$.n", 5},
		{`{"n":1.}`, "$.n", 7},
		{`{"n":-}`, "$.n", 6},
		{`{"n":1e}`, "$.n", 7},
		{`{"n":NaN}`, "$.n", 5},
		{`{"a":"\x"}`, "$.a", 6},
		{`{"a":"\u12g4"}`, "$.a", 6},
		{`{"a":"` + "\xff" + `"}`, "$.a", 6},
		{`{"a":1} x`, "$", 8},
		{`{"a" 1}`, "$", 5},
		{`{a:1}`, "$", 1},
		{`{"a":[1 2]}`, "$.a", 8},
	} {
		_, err := Parse(Chat, []byte(c.body))
		var syntax *SyntaxError
		if !errors.As(err, &syntax) {
			t.Errorf("%q: got %v", c.body, err)
			continue
		}
		if syntax.Offset != c.offset || syntax.Path != c.path {
			t.Errorf("%q: byte %d %s, want byte %d %s (%v)", c.body, syntax.Offset, syntax.Path, c.offset, c.path, err)
		}
	}
}

func TestBodyMustBeObject(t *testing.T) {
	for _, body := range []string{`[]`, `1`, `"a"`, `null`} {
		if _, err := Parse(Chat, []byte(body)); err == nil || !strings.Contains(err.Error(), "object") {
			t.Errorf("%s: %v", body, err)
		}
	}
}

func TestDepthIsBounded(t *testing.T) {
	deep := func(n int) []byte {
		return []byte(`{"a":` + strings.Repeat("[", n) + strings.Repeat("]", n) + `}`)
	}
	if _, err := Parse(Chat, deep(MaxDepth-1)); err != nil {
		t.Errorf("deepest allowed: %v", err)
	}
	if _, err := Parse(Chat, deep(MaxDepth)); err == nil {
		t.Error("one deeper was accepted")
	}
	if _, err := Parse(Chat, []byte(`{"a":`+strings.Repeat("[", 10<<20))); err == nil {
		t.Error("ten million brackets were accepted")
	}
}

// validByReference is what encoding/json accepts, without the two liberties it takes: invalid UTF-8 and nothing about depth.
func validByReference(b []byte) bool { return json.Valid(b) && utf8.Valid(b) }

func TestValidAgreesWithReference(t *testing.T) {
	pieces := []string{`{`, `}`, `[`, `]`, `,`, `:`, `"`, `\`, `\u0041`, `\ud83d\ude42`, "é", "🙂", "\xff", "\n", "\x01", " ", "true", "nul", "null",
		"-", "0", "12", ".5", "e", "E+3", `"key"`, `"a\"b"`, "abcdefghijklmnopqrstuvwxyz"}
	rapid.Check(t, func(t *rapid.T) {
		text := strings.Join(rapid.SliceOfN(rapid.SampledFrom(pieces), 0, 12).Draw(t, "pieces"), "")
		if got, want := Valid([]byte(text)) == nil, validByReference([]byte(text)); got != want {
			t.Fatalf("%q: %v, reference says %v", text, got, want)
		}
	})
}

func TestRunStopsAtTheFirstByteThatMatters(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := rapid.SliceOfN(rapid.Byte(), 0, 70).Draw(t, "bytes")
		from := rapid.IntRange(0, len(b)).Draw(t, "from")
		want := from
		for want < len(b) && b[want] != '"' && b[want] != '\\' && b[want] >= 0x20 {
			want++
		}
		var high uint64
		if got := run(b, from, &high); got != want {
			t.Fatalf("%q from %d: %d, want %d", b, from, got, want)
		}
		for _, c := range b[from:want] {
			if c >= 0x80 && high&highs == 0 {
				t.Fatalf("%q: byte %x went unnoticed", b, c)
			}
		}
	})
}

func FuzzValid(f *testing.F) {
	for _, s := range []string{`{"a":[1,2.5e3,"x\n",null,true,{}]}`, `"\ud800"`, `[[[[]]]]`, `{"a":"` + "\xc3\x28" + `"}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var syntax *SyntaxError
		err := Valid(b)
		if err != nil && !errors.As(err, &syntax) {
			t.Fatalf("unexpected kind of error: %v", err)
		}
		if err == nil != validByReference(b) && !strings.Contains(syntaxReason(err), "nested deeper") {
			t.Fatalf("%q: %v, reference says %v", b, err, validByReference(b))
		}
	})
}

func syntaxReason(err error) string {
	if syntax, ok := errors.AsType[*SyntaxError](err); ok {
		return syntax.Reason
	}
	return ""
}
