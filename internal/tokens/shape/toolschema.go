package shape

import (
	"slices"
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// Before rendering, SGLang replaces types of databases and programming languages in a tool's parameters
// (function_call/utils.py, normalize_json_schema_types).

var schemaTypes = []string{"null", "boolean", "object", "array", "number", "string", "integer"}

var schemaAliases = map[string]string{"str": "string", "text": "string", "varchar": "string", "char": "string", "enum": "string", "uuid": "string",
	"date": "string", "datetime": "string", "time": "string", "timestamp": "string", "binary": "string", "blob": "string", "bytea": "string", "bytes": "string",
	"varbinary": "string", "bool": "boolean", "bigint": "integer", "smallint": "integer", "tinyint": "integer", "double": "number", "decimal": "number",
	"real": "number", "numeric": "number", "arr": "array", "tuple": "array", "set": "array", "map": "object"}

var schemaPrefixes = []struct{ prefix, kind string }{{"int", "integer"}, {"uint", "integer"}, {"long", "integer"}, {"short", "integer"}, {"unsigned", "integer"},
	{"num", "number"}, {"float", "number"}, {"list", "array"}, {"dict", "object"}}

// schemaType is _normalize_single_type.
func schemaType(v jinja.Value) jinja.Value {
	name, ok := v.AsString()
	if !ok || slices.Contains(schemaTypes, name) {
		return v
	}
	base, _, _ := strings.Cut(name, "(")
	base = strings.ToLower(strings.TrimFunc(base, pythonSpace))
	if slices.Contains(schemaTypes, base) {
		return jinja.String(base)
	}
	if kind := schemaAliases[base]; kind != "" {
		return jinja.String(kind)
	}
	for _, p := range schemaPrefixes {
		if rest, ok := strings.CutPrefix(base, p.prefix); ok && (rest == "" || strings.ContainsRune("0123456789[<( \t", rune(rest[0]))) {
			return jinja.String(p.kind)
		}
	}
	return v
}

// Keywords of JSON Schema, grouped by the form of their value.
var (
	schemaMaps  = []string{"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
	schemaLists = []string{"anyOf", "oneOf", "allOf", "prefixItems"}
	subSchemas  = []string{"items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames", "unevaluatedItems",
		"unevaluatedProperties"}
)

// standardSchema returns a schema with its types replaced, or the same value if nothing changes.
func standardSchema(v jinja.Value) jinja.Value {
	if items, ok := v.AsList(); ok {
		return standardSchemas(v, items)
	}
	d, ok := v.AsDict()
	if !ok {
		return v
	}
	out := d
	set := func(key string, old, now jinja.Value) {
		if old != now {
			if out == d {
				out = d.Clone()
			}
			out.Set(key, now)
		}
	}
	if kind, ok := d.Get("type"); ok {
		if items, isList := kind.AsList(); isList {
			set("type", kind, uniqueTypes(kind, items))
		} else {
			set("type", kind, schemaType(kind))
		}
	}
	for _, key := range schemaMaps {
		if nested, _ := member(d, key).AsDict(); nested != nil {
			set(key, member(d, key), standardMembers(nested))
		}
	}
	for _, key := range schemaLists {
		if items, ok := member(d, key).AsList(); ok {
			set(key, member(d, key), standardSchemas(member(d, key), items))
		}
	}
	for _, key := range subSchemas {
		if nested, ok := d.Get(key); ok {
			set(key, nested, standardSchema(nested))
		}
	}
	if out == d {
		return v
	}
	return jinja.FromDict(out)
}

// standardSchemas is standardSchema for the items of the list v.
func standardSchemas(v jinja.Value, items []jinja.Value) jinja.Value {
	var out []jinja.Value
	for i := range items {
		if now := standardSchema(items[i]); now != items[i] {
			if out == nil {
				out = slices.Clone(items)
			}
			out[i] = now
		}
	}
	if out == nil {
		return v
	}
	return jinja.List(out)
}

// standardMembers is standardSchema for each member of d.
func standardMembers(d *jinja.Dict) jinja.Value {
	out := d
	d.Range(func(k, v jinja.Value) bool {
		if now := standardSchema(v); now != v {
			if out == d {
				out = d.Clone()
			}
			if key, ok := k.AsString(); ok {
				out.Set(key, now)
			}
		}
		return true
	})
	return jinja.FromDict(out)
}

// uniqueTypes is _normalize_type_list: it keeps the first of types that become equal.
func uniqueTypes(v jinja.Value, items []jinja.Value) jinja.Value {
	out := make([]jinja.Value, 0, len(items))
	seen := make(map[string]bool, len(items))
	changed := false
	for i := range items {
		now := schemaType(items[i])
		changed = changed || now != items[i]
		if name, isText := now.AsString(); isText {
			if seen[name] {
				changed = true
				continue
			}
			seen[name] = true
		}
		out = append(out, now)
	}
	if !changed {
		return v
	}
	return jinja.List(out)
}
