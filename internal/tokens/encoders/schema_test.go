package encoders

import (
	"errors"
	"runtime"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// TestCheckSchema: the answers are those of jsonschema 4.26, Draft7Validator.check_schema.
func TestCheckSchema(t *testing.T) {
	t.Parallel()
	for schema, want := range map[string]bool{
		`true`: true, `{}`: true, `{"x": 1}`: true, `[]`: false, `{"type": "object", "properties": {"a": true}}`: true,
		`{"type": "objectx"}`: false, `{"type": []}`: false, `{"type": ["string", "string"]}`: false, `{"type": ["string", "null"]}`: true,
		`{"required": []}`: true, `{"required": ["a", "a"]}`: false, `{"required": "a"}`: false, `{"enum": []}`: true, `{"enum": "x"}`: false,
		`{"anyOf": []}`: false, `{"anyOf": [{"type": 5}]}`: false, `{"items": [{}]}`: true, `{"items": []}`: false, `{"items": 5}`: false,
		`{"minLength": 2.0}`: true, `{"minLength": 1.5}`: false, `{"minLength": -1}`: false, `{"minLength": true}`: false, `{"minLength": -0.0}`: true,
		`{"multipleOf": 0}`: false, `{"multipleOf": 1e-5}`: true, `{"multipleOf": 1e30}`: true, `{"maximum": "5"}`: false, `{"not": {"title": 5}}`: false,
		`{"dependencies": {"a": ["b"], "c": {}}}`: true, `{"dependencies": {"a": ["b", "b"]}}`: false, `{"properties": []}`: false,
		`{"properties": {"a": {"properties": {"b": {"type": 1}}}}}`: false, `{"pattern": "^[a-z]+$"}`: true, `{"pattern": 5}`: false,
		`{"patternProperties": {"^x": {}}}`: true, `{"patternProperties": {"^x": 5}}`: false, `{"readOnly": 1}`: false,
	} {
		v, err := jinja.ParseJSON([]byte(schema))
		if err != nil {
			t.Fatal(err)
		}
		if err := (&schemaChecker{chat: new(Chat)}).schema(v); (err == nil) != want || errors.Is(err, ErrMissing) {
			t.Errorf("%s: got error %v, want valid: %v", schema, err, want)
		}
	}
	for _, p := range []string{`(?=a)`, `\\p{L}`, `(?<n>a)`, `a(`} { // Python accepts the first only
		d := jinja.NewDict(1)
		d.Set("pattern", jinja.String(p))
		if err := (&schemaChecker{chat: new(Chat)}).schema(jinja.FromDict(d)); !errors.Is(err, ErrMissing) {
			t.Errorf("pattern %s: got %v, want ErrMissing", p, err)
		}
	}
}

// TestPatternsCostLittle: patterns with a repetition cost no more memory than their length is
// worth, those that are long are not judged, and a stop ends the check.
func TestPatternsCostLittle(t *testing.T) {
	schema := func(patterns int, pattern string) jinja.Value {
		return parsed(t, `{"anyOf": [`+strings.Repeat(`{"pattern": "`+pattern+`"},`, patterns)+`true]}`)
	}
	check := func(v jinja.Value) error { return (&schemaChecker{chat: new(Chat)}).schema(v) }
	repeated := schema(10, "^(?:"+strings.Repeat("[a-z]{1000}", 80)+")$")
	if got := allocated(func() {
		if err := check(repeated); err != nil {
			t.Errorf("got %v, want no error", err)
		}
	}); got > 4<<20 {
		t.Errorf("got %d bytes allocated for patterns of 9 KB, want at most 4 MiB", got)
	}
	for _, c := range []struct {
		patterns, size int
		judged         bool
	}{{1, maxPattern, true}, {1, maxPattern + 1, false}, {16, maxPattern, true}, {17, maxPattern, false}} {
		if err := check(schema(c.patterns, strings.Repeat("a", c.size))); (err == nil) != c.judged || err != nil && !errors.Is(err, ErrMissing) {
			t.Errorf("%d patterns of %d bytes: got %v, want judged: %v", c.patterns, c.size, err, c.judged)
		}
	}
	if err := (&schemaChecker{chat: stopping()}).schema(schema(1, "a")); !errors.Is(err, ErrStopped) {
		t.Errorf("stopped: got %v, want ErrStopped", err)
	}
}

// allocated returns the bytes that do allocates. No other goroutine may allocate meanwhile.
func allocated(do func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	do()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}
