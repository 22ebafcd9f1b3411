// Command schemagen writes the JSON schema of the configuration.
package main

import (
	"encoding/json"
	"fmt"
	"log"
	"os"
	"path"
	"reflect"
	"regexp"
	"strings"
	"time"

	"github.com/invopop/jsonschema"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/routing"
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
	keysInComments(r.CommentMap)
	s := r.Reflect(&config.Config{})
	s.Title = "Kvlane configuration"
	presets(s.Definitions["Routing"])
	def := config.Default()
	seen := map[*jsonschema.Schema]bool{}
	describe(s, s, reflect.ValueOf(def), seen)
	for _, e := range config.Elements() {
		describe(s, s.Definitions[name(reflect.TypeOf(e))], reflect.ValueOf(e), seen)
	}
	text, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		log.Fatal(err)
	}
	if err := os.WriteFile(out, append(text, '\n'), 0o644); err != nil {
		log.Fatal(err)
	}
}

// presets lists the names that the keys of presets take.
func presets(section *jsonschema.Schema) {
	for _, key := range []string{"preset", "prefill_preset", "decode_preset"} {
		p, ok := section.Properties.Get(key)
		if !ok {
			log.Fatalf("routing has no key %s", key)
		}
		for _, preset := range routing.Presets() {
			p.Enum = append(p.Enum, preset)
		}
	}
}

// names are the values of the types that are chosen by name.
var names = map[reflect.Type][]any{
	reflect.TypeFor[routing.Level]():      {routing.Flat, routing.TwoPhase, routing.WorkerOnly},
	reflect.TypeFor[routing.StickyMode](): {routing.StickyOff, routing.StickyTarget, routing.StickyWorker},
	reflect.TypeFor[routing.Placement](): {routing.PlaceByCost, routing.PlaceNear, routing.PlaceRoundRobin,
		routing.PlaceLeastQueued, routing.PlaceLeastTokens},
	reflect.TypeFor[routing.Then]():       {routing.ThenQueue, routing.ThenWork, routing.ThenActive, routing.ThenNothing},
	reflect.TypeFor[routing.Ties]():       {routing.TiesRandom, routing.TiesLowest, routing.TiesRotate, routing.TiesCursor},
	reflect.TypeFor[routing.Seed]():       {routing.SeedRequest, routing.SeedConversation},
	reflect.TypeFor[routing.DisaggMode](): {routing.ModeOff, routing.ModeThreshold, routing.ModeConditional, routing.ModeCost},
}

// units describes the types that are written as text.
func units(t reflect.Type) *jsonschema.Schema {
	if values := names[t]; values != nil {
		return &jsonschema.Schema{Type: "string", Enum: values}
	}
	switch t {
	case reflect.TypeFor[config.Duration](), reflect.TypeFor[time.Duration]():
		return &jsonschema.Schema{Type: "string", Pattern: `^(0|([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+)$`}
	case reflect.TypeFor[config.Bytes]():
		return &jsonschema.Schema{OneOf: []*jsonschema.Schema{
			{Type: "integer", Minimum: "0"},
			{Type: "string", Pattern: `^[0-9]+ ?(KiB|MiB|GiB|Ki|Mi|Gi|kB|MB|GB|B)?$`},
		}}
	}
	return nil
}

// keysInComments replaces the names of Go fields by the configuration's keys, the only
// names that readers of the schema know.
func keysInComments(comments map[string]string) {
	keys := map[string]string{}
	collectKeys(reflect.TypeFor[config.Routing](), keys)
	word := regexp.MustCompile(`\b(?:Mode)?[A-Z][A-Za-z]*\b`)
	for at, text := range comments {
		text = word.ReplaceAllStringFunc(text, func(w string) string {
			if key, ok := keys[strings.TrimPrefix(w, "Mode")]; ok {
				return key
			}
			return w
		})
		comments[at] = strings.NewReplacer("kv cache", "KV cache", "kv transfer", "KV transfer").Replace(text)
	}
}

// collectKeys maps the names of fields to their keys, and names of modes to their values.
func collectKeys(t reflect.Type, keys map[string]string) {
	for f := range t.Fields() {
		if key := f.Tag.Get("yaml"); key != "" && key[0] != ',' && f.Name != "On" {
			keys[f.Name] = key
		}
		if f.Type.Kind() == reflect.Struct {
			collectKeys(f.Type, keys)
		}
	}
	for _, m := range names[reflect.TypeFor[routing.DisaggMode]()] {
		text := fmt.Sprint(m)
		keys[strings.ToUpper(text[:1])+text[1:]] = text
	}
}

// name distinguishes sections of different packages.
func name(t reflect.Type) string {
	if p := path.Base(t.PkgPath()); t.Name() != "" && p != "config" {
		return p + "." + t.Name()
	}
	return t.Name()
}

// describe sets the defaults of a section's properties, and of the sections in it. A section that several others hold keeps
// the defaults of its first place.
func describe(all, s *jsonschema.Schema, v reflect.Value, seen map[*jsonschema.Schema]bool) {
	if seen[s] {
		return
	}
	seen[s] = true
	fill(all, s, v, seen)
}

func fill(all, s *jsonschema.Schema, v reflect.Value, seen map[*jsonschema.Schema]bool) {
	for f, fv := range v.Fields() {
		key := f.Tag.Get("yaml")
		switch fv.Kind() {
		case reflect.Struct:
			if key == ",inline" {
				fill(all, s, fv, seen)
			} else if d := all.Definitions[name(fv.Type())]; d != nil {
				describe(all, d, fv, seen)
			}
		case reflect.Slice, reflect.Map, reflect.Pointer:
		default:
			if p, ok := s.Properties.Get(key); ok {
				p.Default = written(fv)
			}
		}
	}
}

// written is a default as a file would have it, nil for an empty text.
func written(v reflect.Value) any {
	switch d := v.Interface().(type) {
	case time.Duration:
		return short(d)
	case config.Duration:
		return short(d.Std())
	}
	if v.Kind() == reflect.String && v.IsZero() {
		return nil
	}
	return v.Interface()
}

// short is a duration without the zero parts that Go prints.
func short(d time.Duration) string {
	if d == 0 {
		return "0"
	}
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}
