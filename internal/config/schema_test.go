package config

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/invopop/jsonschema"

	"github.com/kvlane/kvlane/routing"
)

// TestSchema makes the schema from the Go types, their comments and Default. With -update it writes the file.
func TestSchema(t *testing.T) {
	t.Chdir("../..") // comments are read from the folder of a package's path
	r := jsonschema.Reflector{FieldNameTag: "yaml", RequiredFromJSONSchemaTags: true, ExpandedStruct: true, Namer: sectionName, Mapper: writtenAsText}
	if err := r.AddGoComments("github.com/kvlane/kvlane", "./routing"); err != nil {
		t.Fatal(err)
	}
	keysInComments(r.CommentMap)
	s := r.Reflect(&Config{})
	s.Title = "Kvlane configuration"
	listPresets(t, s.Definitions["Routing"])
	seen := map[*jsonschema.Schema]bool{}
	describeSection(s, s, reflect.ValueOf(Default()), seen)
	// Elements of lists are not in Default.
	for _, e := range []any{DefaultModel(), defaultWorker(), DefaultModel().Check, defaultDNS()} {
		describeSection(s, s.Definitions[sectionName(reflect.TypeOf(e))], reflect.ValueOf(e), seen)
	}
	text, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if text = append(text, '\n'); bytes.Equal(text, Schema()) {
		return
	}
	if !*update {
		t.Fatal("schema.json is not that of the types: run make generate")
	}
	if err := os.WriteFile("internal/config/schema.json", text, 0o644); err != nil {
		t.Fatal(err)
	}
}

// listPresets lists the names that the keys of presets take.
func listPresets(t *testing.T, section *jsonschema.Schema) {
	t.Helper()
	for _, key := range []string{"preset", "prefill_preset", "decode_preset"} {
		p, ok := section.Properties.Get(key)
		if !ok {
			t.Fatalf("routing has no key %s", key)
		}
		for _, preset := range routing.Presets() {
			p.Enum = append(p.Enum, preset)
		}
	}
}

// chosen are the values of the types that are chosen by name.
var chosen = map[reflect.Type][]any{
	reflect.TypeFor[routing.Level]():      {routing.Flat, routing.TwoPhase, routing.WorkerOnly},
	reflect.TypeFor[routing.StickyMode](): {routing.StickyOff, routing.StickyTarget, routing.StickyWorker},
	reflect.TypeFor[routing.Placement](): {routing.PlaceByCost, routing.PlaceNear, routing.PlaceRoundRobin,
		routing.PlaceLeastQueued, routing.PlaceLeastTokens},
	reflect.TypeFor[routing.Then]():       {routing.ThenQueue, routing.ThenWork, routing.ThenActive, routing.ThenNothing},
	reflect.TypeFor[routing.Ties]():       {routing.TiesRandom, routing.TiesLowest, routing.TiesRotate, routing.TiesCursor},
	reflect.TypeFor[routing.Seed]():       {routing.SeedRequest, routing.SeedConversation},
	reflect.TypeFor[routing.DisaggMode](): {routing.ModeOff, routing.ModeThreshold, routing.ModeConditional, routing.ModeCost},
}

// writtenAsText describes the types that are written as text.
func writtenAsText(t reflect.Type) *jsonschema.Schema {
	if values := chosen[t]; values != nil {
		return &jsonschema.Schema{Type: "string", Enum: values}
	}
	switch t {
	case reflect.TypeFor[Duration](), reflect.TypeFor[time.Duration]():
		return &jsonschema.Schema{Type: "string", Pattern: `^(0|([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+)$`}
	case reflect.TypeFor[Bytes]():
		return &jsonschema.Schema{OneOf: []*jsonschema.Schema{
			{Type: "integer", Minimum: "0"},
			{Type: "string", Pattern: `^[0-9]+ ?(KiB|MiB|GiB|Ki|Mi|Gi|kB|MB|GB|B)?$`},
		}}
	}
	return nil
}

// keysInComments replaces the names of Go fields by the configuration's keys, the only
// chosen that readers of the schema know.
func keysInComments(comments map[string]string) {
	keys := map[string]string{}
	collectKeys(reflect.TypeFor[Routing](), keys)
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
	for _, m := range chosen[reflect.TypeFor[routing.DisaggMode]()] {
		text := fmt.Sprint(m)
		keys[strings.ToUpper(text[:1])+text[1:]] = text
	}
}

// sectionName distinguishes sections of different packages.
func sectionName(t reflect.Type) string {
	if p := path.Base(t.PkgPath()); t.Name() != "" && p != "config" {
		return p + "." + t.Name()
	}
	return t.Name()
}

// describeSection sets the defaults of a section's properties, and of the sections in it. A section that several others hold keeps
// the defaults of its first place.
func describeSection(all, s *jsonschema.Schema, v reflect.Value, seen map[*jsonschema.Schema]bool) {
	if seen[s] {
		return
	}
	seen[s] = true
	fillSection(all, s, v, seen)
}

func fillSection(all, s *jsonschema.Schema, v reflect.Value, seen map[*jsonschema.Schema]bool) {
	for f, fv := range v.Fields() {
		key := f.Tag.Get("yaml")
		switch fv.Kind() {
		case reflect.Struct:
			if key == ",inline" {
				fillSection(all, s, fv, seen)
			} else if d := all.Definitions[sectionName(fv.Type())]; d != nil {
				describeSection(all, d, fv, seen)
			}
		case reflect.Slice, reflect.Map, reflect.Pointer:
		default:
			if p, ok := s.Properties.Get(key); ok {
				p.Default = defaultText(fv)
			}
		}
	}
}

// defaultText is a default as a file would have it, nil for an empty text.
func defaultText(v reflect.Value) any {
	switch d := v.Interface().(type) {
	case time.Duration:
		return shortDuration(d)
	case Duration:
		return shortDuration(d.Std())
	}
	if v.Kind() == reflect.String && v.IsZero() {
		return nil
	}
	return v.Interface()
}

// shortDuration is a duration without the zero parts that Go prints.
func shortDuration(d time.Duration) string {
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
