package chartgen

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"strings"
)

// definitions are the schemas that @schema comments refer to, in addition to those of
// kvlane.yaml.
const definitions = `{
  "port": {"type": "integer", "minimum": 1, "maximum": 65535},
  "resources": {"type": "object", "additionalProperties": false, "properties": {
    "requests": {"type": "object", "additionalProperties": {"type": ["string", "number"]}},
    "limits": {"type": "object", "additionalProperties": {"type": ["string", "number"]}},
    "claims": {"type": "array", "items": {"type": "object"}}}},
  "tokenizerVolume": {"type": "object", "additionalProperties": false, "required": ["name", "mountPath"], "minProperties": 3, "properties": {
    "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"},
    "mountPath": {"type": "string", "pattern": "^/[^:]+$"},
    "subPath": {"type": "string"},
    "persistentVolumeClaim": {"type": "object"}, "configMap": {"type": "object"}, "image": {"type": "object"},
    "hostPath": {"type": "object"}, "nfs": {"type": "object"}, "csi": {"type": "object"}}}
}`

// valuesSchema returns values.schema.json: closed except where values.yaml opens it.
func valuesSchema(values []*value, config []byte) ([]byte, error) {
	defs := map[string]any{}
	if err := json.Unmarshal([]byte(definitions), &defs); err != nil {
		return nil, err
	}
	kvlane, err := configSchemas(config)
	if err != nil {
		return nil, fmt.Errorf("schema of kvlane.yaml: %w", err)
	}
	defs["kvlane"] = kvlane
	root := object(values)
	root["$schema"] = "https://json-schema.org/draft/2020-12/schema"
	root["$defs"] = defs
	root["title"] = "Values of the chart kvlane"
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(root); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// configSchemas are the definitions of kvlane.yaml by name, the whole file as "Config".
func configSchemas(text []byte) (map[string]any, error) {
	text = bytes.ReplaceAll(text, []byte(`"#/$defs/`), []byte(`"#/$defs/kvlane/`))
	var file map[string]any
	if err := json.Unmarshal(text, &file); err != nil {
		return nil, err
	}
	defs, ok := file["$defs"].(map[string]any)
	if !ok {
		return nil, fmt.Errorf("has no $defs")
	}
	defs["Config"] = map[string]any{"type": "object", "additionalProperties": false, "properties": file["properties"]}
	return defs, nil
}

func object(values []*value) map[string]any {
	properties := map[string]any{}
	for _, v := range values {
		properties[v.name] = v.schema()
	}
	return map[string]any{"type": "object", "additionalProperties": false, "properties": properties}
}

func (v *value) schema() map[string]any {
	s := map[string]any{}
	switch {
	case v.rules["$ref"] != nil:
	case len(v.children) > 0 && !v.open():
		s = object(v.children)
	default:
		if s["type"] = typeOf(v.fallback); s["type"] == "object" {
			s["additionalProperties"] = false
		}
	}
	if v.text != "" {
		s["description"] = strings.ReplaceAll(v.text, "`", "'")
	}
	maps.Copy(s, v.rules)
	return s
}

func typeOf(v any) string {
	switch v.(type) {
	case bool:
		return "boolean"
	case int, int64, uint64:
		return "integer"
	case float64:
		return "number"
	case []any:
		return "array"
	case map[string]any:
		return "object"
	}
	return "string"
}
