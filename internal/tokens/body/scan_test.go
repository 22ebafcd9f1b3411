package body

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"
)

func TestSyntaxErrorsNameTheirPlace(t *testing.T) {
	for body, want := range map[string]string{
		`{"model":"echo",}`: "invalid JSON at byte 16 ($): a key was expected, not '}'",
		`{"a":{"b":1,2}}`:   "invalid JSON at byte 12 ($.a): a key was expected, not '2'",
		`{"a":é}`:           "invalid JSON at byte 5 ($.a): a value was expected, not 'é'",
		`{"a":tru}`:         "invalid JSON at byte 5 ($.a): true was expected",
	} {
		if _, err := Parse(Chat, []byte(body)); err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %s", body, err, want)
		}
	}
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
		{`{"n":Nan}`, "$.n", 5},
		{`{"n":-Inf}`, "$.n", 5},
		{`{"a":` + strings.Repeat("[[{\"k\":", 100) + `?`, "$.a[0][0].k[0][0].k[0]…[0].k[0][0].k[0][0].k", 705},
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

// TestPythonsJSON: extensions of Python's json beyond RFC 8259 are accepted, or at least not
// reported as syntax errors.
func TestPythonsJSON(t *testing.T) {
	const bom = "\xef\xbb\xbf"
	for body, want := range map[string]string{
		bom + `{"model":"m"}`:                         "m",
		bom + ` {"model":"m"} `:                       "m",
		`{"temperature":NaN,"model":"m"}`:             "m",
		`{"x":[Infinity,-Infinity,NaN],"model":"m"}`:  "m",
		`{"messages":[{"x":-Infinity}],"model":"m2"}`: "m2",
	} {
		req, err := Parse(Chat, []byte(body))
		if err != nil || req.Model() != want {
			t.Errorf("%q: %v", body, err)
			continue
		}
		edited, err := Apply(nil, req.Body, Set([]byte(`"other"`), "model"))
		if again, parseErr := Parse(Chat, edited); err != nil || parseErr != nil || again.Model() != "other" || len(edited) != len(body)+5-len(want) {
			t.Errorf("%q became %q: %v %v", body, edited, err, parseErr)
		}
		if got := string(Member([]byte(body), "model")); got != `"`+want+`"` {
			t.Errorf("%q: member %s", body, got)
		}
	}
	for text, unread := range map[string]bool{"\xed\xa0\x80": true, "é\xed\xbf\xbf": true, "\xed\xa0": false, "\xff\xed\xa0\x80": false, "\xed\x9f": false} {
		_, err := Parse(Chat, []byte(`{"x":["`+text+`"]}`))
		if _, ok := errors.AsType[*UnreadError](err); ok != unread || err == nil {
			t.Errorf("%q: got %v, want unread %v", text, err, unread)
		}
	}
	for _, text := range []string{`{"model":"m"}`, `{"mo`, `[`} {
		for name, order := range map[string]binary.AppendByteOrder{"little": binary.LittleEndian, "big": binary.BigEndian} {
			var wide, wider []byte
			for _, c := range text {
				wide, wider = order.AppendUint16(wide, uint16(c)), order.AppendUint32(wider, uint32(c))
			}
			for _, body := range [][]byte{wide, wider, append(order.AppendUint16(nil, 0xfeff), wide...), append(order.AppendUint32(nil, 0xfeff), wider...)} {
				_, err := Parse(Chat, body)
				if _, ok := errors.AsType[*UnreadError](err); !ok {
					t.Errorf("%s endian %q: %v", name, body, err)
				}
			}
		}
	}
}

func TestBodyMustBeObject(t *testing.T) {
	for _, body := range []string{`[]`, `1`, `"a"`, `null`} {
		if _, err := Parse(Chat, []byte(body)); err == nil || !strings.Contains(err.Error(), "object") {
			t.Errorf("%s: got %v, want an error about an object", body, err)
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
	for _, body := range [][]byte{deep(MaxDepth), []byte(`{"a":` + strings.Repeat("[", 10<<20)), []byte(`{"a":` + strings.Repeat(`{"b":[`, 10<<10))} {
		_, err := Parse(Chat, body)
		if unread, ok := errors.AsType[*UnreadError](err); !ok || !strings.HasPrefix(unread.Reason, "it is nested deeper than 512 at byte ") {
			t.Errorf("%.20s: got %v, want an UnreadError about the depth", body, err)
		}
	}
}

// validByReference is the reference: encoding/json plus the UTF-8 check that it lacks. Depth is
// tested elsewhere.
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
		err := Valid(b)
		if _, ok := errors.AsType[*UnreadError](err); ok || bytes.Contains(b, []byte("NaN")) || bytes.Contains(b, []byte("Infinity")) {
			return // TestPythonsJSON and TestDepthIsBounded
		}
		if _, ok := errors.AsType[*SyntaxError](err); err != nil && !ok {
			t.Fatalf("unexpected kind of error: %v", err)
		}
		b = bytes.TrimPrefix(b, []byte(byteOrderMark))
		if err == nil != validByReference(b) {
			t.Fatalf("%q: %v, reference says %v", b, err, validByReference(b))
		}
	})
}

// A data: URL ends at its quote wherever that is; with an escape, a control character or another letter it is read like any string.
func TestLongDataURLs(t *testing.T) {
	t.Parallel()
	for _, n := range []int{6, 4095, 4096, 4097, 8191, 8192, 8193, 20000} {
		url := "data:" + strings.Repeat("A", n-5)
		if got := plainURL([]byte(url + `",`)); got != n {
			t.Errorf("URL of %d bytes: got %d", n, got)
		}
		for _, odd := range []string{`\n`, "\n", "é"} {
			if got := plainURL([]byte(url + odd + `",`)); got != -1 {
				t.Errorf("URL of %d bytes and %q: got %d, want -1", n, odd, got)
			}
		}
		if got := plainURL([]byte(url)); got != -1 {
			t.Errorf("URL of %d bytes without an end: got %d, want -1", n, got)
		}
	}
}
