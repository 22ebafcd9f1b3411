package encoders

import (
	"cmp"
	"fmt"
	"math"
	"regexp"
	"regexp/syntax"
	"slices"
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// maxPattern and maxPatterns bound the bytes of a pattern and of all patterns of a request.
const (
	maxPattern  = 1 << 10
	maxPatterns = 16 << 10
)

// schemaChecker checks the schemas of a chat.
type schemaChecker struct {
	chat     *Chat
	patterns int // bytes of the patterns so far
}

// schema refuses what is not a JSON schema of draft 7, as Python's jsonschema does. It fails
// with ErrMissing for patterns that it cannot judge, and with ErrStopped.
func (c *schemaChecker) schema(v jinja.Value) (err error) {
	if err := c.chat.stopped(); err != nil {
		return err
	}
	d, ok := v.AsDict()
	if !ok && v.Kind() != jinja.KindBool {
		return refuse("Invalid tool schema: not an object or boolean")
	}
	d.Range(func(k, inner jinja.Value) bool {
		key, _ := k.AsString()
		if !c.member(key, inner, &err) && err == nil {
			err = refuse("Invalid tool schema: '%s' has a wrong value", key)
		}
		return err == nil
	})
	return err
}

// schemaForms are the forms that members of a schema have.
var schemaForms = func() map[string]string {
	out := map[string]string{"multipleOf": "positive", "items": "items", "patternProperties": "patterns", "dependencies": "dependencies",
		"required": "required", "type": "type", "pattern": "pattern"}
	for form, names := range map[string]string{
		"text": "$id $schema $ref $comment title description format contentMediaType contentEncoding", "bool": "readOnly uniqueItems",
		"list": "examples enum", "number": "maximum exclusiveMaximum minimum exclusiveMinimum",
		"count":  "maxLength minLength maxItems minItems maxProperties minProperties",
		"schema": "additionalItems contains additionalProperties propertyNames if then else not", "schemas": "allOf anyOf oneOf", "map": "definitions properties",
	} {
		for name := range strings.FieldsSeq(names) {
			out[name] = form
		}
	}
	return out
}()

// member reports whether the value of a keyword has the right form. It sets err if a schema in the value is wrong.
func (c *schemaChecker) member(key string, v jinja.Value, err *error) bool {
	s, isText := v.AsString()
	items, isList := v.AsList()
	d, isDict := v.AsDict()
	isNumber := v.Kind() == jinja.KindInt || v.Kind() == jinja.KindFloat
	each := func(check func(k string, v jinja.Value) error) bool {
		d.Range(func(k, inner jinja.Value) bool {
			name, _ := k.AsString()
			*err = check(name, inner)
			return *err == nil
		})
		return isDict
	}
	form := schemaForms[key]
	if form == "items" {
		form = map[bool]string{true: "schemas", false: "schema"}[isList]
	}
	switch form {
	case "text":
		return isText
	case "bool":
		return v.Kind() == jinja.KindBool
	case "list":
		return isList
	case "number":
		return isNumber
	case "positive":
		return isNumber && sign(v) > 0
	case "count":
		f, _ := v.AsFloat()
		return isNumber && sign(v) >= 0 && (v.Kind() == jinja.KindInt || f == math.Trunc(f) && !math.IsInf(f, 0))
	case "schema":
		*err = c.schema(v)
	case "schemas":
		for i := 0; i < len(items) && *err == nil; i++ {
			*err = c.schema(items[i])
		}
		return len(items) > 0
	case "map":
		return each(func(_ string, v jinja.Value) error { return c.schema(v) })
	case "patterns":
		return each(func(name string, v jinja.Value) error { return cmp.Or(c.pattern(name), c.schema(v)) })
	case "dependencies":
		return each(func(_ string, v jinja.Value) error {
			if list, ok := v.AsList(); ok && uniqueTexts(list, nil) {
				return nil
			}
			return c.schema(v)
		})
	case "required":
		return isList && uniqueTexts(items, nil)
	case "type":
		return isText && slices.Contains(schemaTypes, s) || len(items) > 0 && uniqueTexts(items, schemaTypes)
	case "pattern":
		*err = c.pattern(s)
		return isText
	}
	return true
}

var schemaTypes = []string{"array", "boolean", "integer", "null", "number", "object", "string"}

// uniqueTexts reports whether all items are distinct strings, and are among these if any are given.
func uniqueTexts(items []jinja.Value, of []string) bool {
	seen := make(map[string]bool, len(items))
	for i := range items {
		s, ok := items[i].AsString()
		if !ok || seen[s] || of != nil && !slices.Contains(of, s) {
			return false
		}
		seen[s] = true
	}
	return true
}

// sign returns the sign of a number; that of NaN is 1.
func sign(v jinja.Value) int {
	raw, _ := appendJSON(nil, v) // of a number: no error
	switch {
	case strings.Trim(string(raw), "-0.") == "":
		return 0
	case raw[0] == '-':
		return -1
	}
	return 1
}

// otherPattern matches regular expression syntax that Python refuses or interprets differently from Go.
var otherPattern = regexp.MustCompile(`\\[pPzCQx]|\(\?[^:P]`)

// pattern fails with ErrMissing if Python might not accept a pattern. It only parses the pattern:
// a compiled one may have millions of instructions.
func (c *schemaChecker) pattern(p string) error {
	if c.patterns += len(p); len(p) > maxPattern || c.patterns > maxPatterns {
		return fmt.Errorf("%w: long patterns in tools", ErrMissing)
	}
	if otherPattern.MatchString(p) {
		return fmt.Errorf("%w: the pattern %q in a tool", ErrMissing, p)
	}
	if _, err := syntax.Parse(p, syntax.Perl); err != nil {
		return fmt.Errorf("%w: the pattern %q in a tool", ErrMissing, p)
	}
	return nil
}
