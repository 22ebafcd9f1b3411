package config

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path"
	"strings"
	"testing"

	"github.com/invopop/jsonschema"
)

var update = flag.Bool("update", false, "write the schema and the reference page")

const referenceIntro = `<!-- Written by 'make generate' from the JSON schema. -->

# Configuration

Every key of the configuration file, which is YAML or JSON. [Operating](../operating.md#running-it-standalone) explains
how to write, check and reload it. A duration is like ` + "`300ms`, `2s` or `1m30s`" + `, a size like ` + "`1048576`, `16MiB` or `2GB`" + `.
` + "`[]`" + ` stands for an element of a list, ` + "`NAME`" + ` for any name. All keys are optional unless their meaning says otherwise.

`

// page writes the keys of the schema.
type page struct {
	strings.Builder
	defs  jsonschema.Definitions
	first map[string]string // of each definition, the path under which it is written
}

// section writes the rows of a section and of those in it.
func (p *page) section(at string, s *jsonschema.Schema) {
	for pair := s.Properties.Oldest(); pair != nil; pair = pair.Next() {
		key, v := strings.TrimPrefix(at+"."+pair.Key, "."), pair.Value
		meaning := v.Description
		inner, suffix := v, ""
		switch {
		case v.Items != nil:
			inner, suffix = v.Items, "[]"
		case v.Type == "object" && v.AdditionalProperties != nil:
			inner, suffix = v.AdditionalProperties, ".NAME"
		}
		name := path.Base(inner.Ref)
		def := p.defs[name]
		if inner.Ref == "" || def.Properties == nil {
			p.row(key, p.kind(v), v, meaning)
			continue
		}
		if first, written := p.first[name]; written {
			p.row(key+suffix, "section", v, meaning+" Keys and bounds as in `"+first+"`.")
			continue
		}
		p.first[name] = key + suffix
		p.row(key+suffix, "section", v, meaning)
		p.section(key+suffix, def)
	}
}

func (p *page) row(key, kind string, v *jsonschema.Schema, meaning string) {
	if v.Ref != "" && p.defs[path.Base(v.Ref)] != nil {
		v = p.defs[path.Base(v.Ref)]
	}
	standard := ""
	if v.Default != nil {
		standard = fmt.Sprintf("`%v`", v.Default)
	}
	var bounds []string
	for _, b := range []struct{ text, value string }{
		{"from ", string(v.Minimum)}, {"more than ", string(v.ExclusiveMinimum)}, {"to ", string(v.Maximum)},
	} {
		if b.value != "" {
			bounds = append(bounds, b.text+b.value)
		}
	}
	for _, e := range v.Enum {
		if e != "" {
			bounds = append(bounds, fmt.Sprintf("`%v`", e))
		}
	}
	fmt.Fprintf(p, "| `%s` | %s | %s | %s | %s |\n", key, kind, standard, strings.Join(bounds, ", "), strings.NewReplacer("|", `\|`, "\n", " ").Replace(strings.TrimSpace(meaning)))
}

// kind is the type of a value.
func (p *page) kind(v *jsonschema.Schema) string {
	switch {
	case v.Ref != "":
		return p.kind(p.defs[path.Base(v.Ref)])
	case len(v.OneOf) > 0:
		return "size"
	case v.Items != nil:
		return "list of " + p.kind(v.Items)
	case v.Type == "object":
		return "map to " + p.kind(v.AdditionalProperties)
	case strings.Contains(v.Pattern, "ns|us"):
		return "duration"
	case v.Type == "boolean":
		return "bool"
	}
	return v.Type
}

func TestReferenceOfConfiguration(t *testing.T) {
	var s jsonschema.Schema
	if err := json.Unmarshal(Schema(), &s); err != nil {
		t.Fatal(err)
	}
	p := page{defs: s.Definitions, first: map[string]string{}}
	p.WriteString(referenceIntro)
	const head = "| key | type | default | bounds | meaning |\n|---|---|---|---|---|\n"
	var plain jsonschema.Schema // keys that are not sections
	plain.Properties = jsonschema.NewProperties()
	for pair := s.Properties.Oldest(); pair != nil; pair = pair.Next() {
		inner := pair.Value
		if inner.Items != nil {
			inner = inner.Items
		}
		if inner.Ref == "" || p.defs[path.Base(inner.Ref)].Properties == nil {
			plain.Properties.Set(pair.Key, pair.Value)
			continue
		}
		fmt.Fprintf(&p, "## %s\n\n%s\n\n%s", pair.Key, pair.Value.Description, head)
		suffix := ""
		if pair.Value.Items != nil {
			suffix = "[]"
		}
		p.section(pair.Key+suffix, p.defs[path.Base(inner.Ref)])
		p.WriteString("\n")
	}
	fmt.Fprintf(&p, "## Other keys\n\n%s", head)
	p.section("", &plain)
	const file = "../../docs/reference/configuration.md"
	if *update {
		if err := os.WriteFile(file, []byte(p.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != p.String() {
		t.Errorf("docs/reference/configuration.md is not current: run 'make generate' (%v)", err)
	}
}
