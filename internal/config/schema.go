package config

import (
	"encoding/json"
	"fmt"
	"reflect"

	"github.com/invopop/jsonschema"
)

//go:generate go run ../../cmd/kvlane schema --out ../../docs/config.schema.json

// Schema returns the JSON schema of the file, made from the Go types, with the
// defaults of Default.
func Schema() ([]byte, error) {
	r := jsonschema.Reflector{FieldNameTag: "yaml", RequiredFromJSONSchemaTags: true, ExpandedStruct: true}
	s := r.Reflect(&Config{})
	s.Title = "Kvlane configuration"
	defs := map[string]any{
		"Model": defaultModel(), "Worker": defaultWorker(),
	}
	def := Default()
	describe(s, reflect.ValueOf(def))
	for _, section := range reflect.VisibleFields(reflect.TypeFor[Config]()) {
		if section.Type.Kind() == reflect.Struct {
			defs[section.Type.Name()] = reflect.ValueOf(def).FieldByIndex(section.Index).Interface()
		}
	}
	defs["Health"] = def.Workers.Health
	defs["Check"] = defaultModel().Check
	for name, value := range defs {
		d, ok := s.Definitions[name]
		if !ok {
			return nil, fmt.Errorf("schema: no definition of %s", name)
		}
		describe(d, reflect.ValueOf(value))
	}
	out, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("schema: %w", err)
	}
	return append(out, '\n'), nil
}

// describe sets the defaults of a section's scalar properties.
func describe(s *jsonschema.Schema, v reflect.Value) {
	for f, fv := range v.Fields() {
		p, ok := s.Properties.Get(f.Tag.Get("yaml"))
		if !ok || fv.IsZero() {
			continue
		}
		switch fv.Kind() {
		case reflect.Struct, reflect.Slice, reflect.Map, reflect.Pointer:
		default:
			p.Default = fv.Interface()
		}
	}
}
