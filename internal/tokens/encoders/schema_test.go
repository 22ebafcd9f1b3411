package encoders

import (
	"errors"
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
		if err := checkSchema(v); (err == nil) != want || errors.Is(err, ErrMissing) {
			t.Errorf("%s: got error %v, want valid: %v", schema, err, want)
		}
	}
	for _, p := range []string{`(?=a)`, `\\p{L}`, `(?<n>a)`, `a(`} { // Python accepts the first only
		d := jinja.NewDict(1)
		d.Set("pattern", jinja.String(p))
		if err := checkSchema(jinja.FromDict(d)); !errors.Is(err, ErrMissing) {
			t.Errorf("pattern %s: got %v, want ErrMissing", p, err)
		}
	}
}
