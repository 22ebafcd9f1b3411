// Command schemagen writes the JSON schema of the configuration.
package main

import (
	"encoding/json"
	"log"
	"os"
	"path"
	"reflect"
	"time"

	"github.com/invopop/jsonschema"

	"github.com/kvlane/kvlane/internal/config"
)

const (
	module = "github.com/kvlane/kvlane"
	root   = "../.."
	out    = "internal/config/schema.json"
)

func main() {
	log.SetFlags(0)
	if err := os.Chdir(root); err != nil {
		log.Fatal(err)
	}
	r := jsonschema.Reflector{FieldNameTag: "yaml", RequiredFromJSONSchemaTags: true, ExpandedStruct: true, Namer: name, Mapper: units}
	if err := r.AddGoComments(module, "./routing"); err != nil {
		log.Fatal(err)
	}
	s := r.Reflect(&config.Config{})
	s.Title = "Kvlane configuration"
	def := config.Default()
	describe(s, s, reflect.ValueOf(def))
	for _, e := range config.Elements() {
		describe(s, s.Definitions[name(reflect.TypeOf(e))], reflect.ValueOf(e))
	}
	text, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		log.Fatal(err)
	}
	if err := os.WriteFile(out, append(text, '\n'), 0o644); err != nil {
		log.Fatal(err)
	}
}

// units describes the types that are written as text.
func units(t reflect.Type) *jsonschema.Schema {
	switch t {
	case reflect.TypeFor[config.Duration](), reflect.TypeFor[time.Duration]():
		return &jsonschema.Schema{Type: "string", Pattern: `^(0|([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+)$`}
	case reflect.TypeFor[config.Bytes]():
		return &jsonschema.Schema{OneOf: []*jsonschema.Schema{
			{Type: "integer", Minimum: "0"},
			{Type: "string", Pattern: `^[0-9]+ ?(KiB|MiB|GiB|kB|MB|GB|B)?$`},
		}}
	}
	return nil
}

// name tells the sections of packages apart.
func name(t reflect.Type) string {
	if p := path.Base(t.PkgPath()); t.Name() != "" && p != "config" {
		return p + "." + t.Name()
	}
	return t.Name()
}

// describe sets the defaults of a section's properties, and of the sections in it.
func describe(all, s *jsonschema.Schema, v reflect.Value) {
	for f, fv := range v.Fields() {
		key := f.Tag.Get("yaml")
		switch fv.Kind() {
		case reflect.Struct:
			if key == ",inline" {
				describe(all, s, fv)
			} else if d := all.Definitions[name(fv.Type())]; d != nil {
				describe(all, d, fv)
			}
		case reflect.Slice, reflect.Map, reflect.Pointer:
		default:
			// A section that several others hold keeps the defaults of its first place.
			if p, ok := s.Properties.Get(key); ok && !fv.IsZero() && p.Default == nil {
				p.Default = fv.Interface()
			}
		}
	}
}
