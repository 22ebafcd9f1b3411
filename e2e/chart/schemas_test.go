package chart

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/goccy/go-yaml"
)

// schemaFolder is where schemas writes; TestMain removes it.
var schemaFolder string

// schemas makes strict JSON schemas for kubeconform, once, from the OpenAPI document of the Kubernetes API server and from CRDs,
// which build.sh fetches, and returns their folder.
//
// A file is {kind}-{first label of the group}-{version}.json and holds all definitions that it needs. Objects take no fields
// beyond those of their properties, as kubectl's server-side validation has it.
var schemas = sync.OnceValues(func() (folder string, err error) {
	if schemaFolder, err = os.MkdirTemp("", "kvlane-schemas-"); err != nil {
		return "", err
	}
	if err := builtin(schemaFolder, filepath.Join(tools, "schemas", "swagger.json")); err != nil {
		return "", err
	}
	crds, err := filepath.Glob(filepath.Join(tools, "schemas", "crds", "*"))
	if err == nil && len(crds) == 0 {
		err = errors.New("no CRDs: run build.sh")
	}
	for _, file := range crds {
		if err := custom(schemaFolder, file); err != nil {
			return "", fmt.Errorf("%s: %w", file, err)
		}
	}
	return schemaFolder, err
})

// schema is any JSON value in a schema.
type schema = map[string]any

// builtin writes the kinds of the API server.
func builtin(out, swagger string) error {
	text, err := os.ReadFile(swagger)
	if err != nil {
		return err
	}
	var doc struct {
		Definitions map[string]schema `json:"definitions"`
	}
	if err := json.Unmarshal(text, &doc); err != nil {
		return fmt.Errorf("%s: %w", swagger, err)
	}
	for name, d := range doc.Definitions {
		switch {
		case strings.HasSuffix(name, "resource.Quantity"):
			doc.Definitions[name] = anyOf("string", "number")
		case strings.HasSuffix(name, "intstr.IntOrString"):
			doc.Definitions[name] = anyOf("string", "integer")
		default:
			doc.Definitions[name] = strict(d, false).(schema)
		}
	}
	for name, d := range doc.Definitions {
		kinds, _ := d["x-kubernetes-group-version-kind"].([]any)
		for _, k := range kinds {
			id := k.(schema)
			whole := schema{"$ref": "#/definitions/" + name, "definitions": closure(doc.Definitions, name)}
			if err := writeSchema(out, id["kind"].(string), id["group"].(string), id["version"].(string), whole); err != nil {
				return err
			}
		}
	}
	return nil
}

// custom writes the kinds of a file of CRDs.
func custom(out, file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	for docs := yaml.NewDecoder(f); ; {
		var crd struct {
			Kind string `yaml:"kind"`
			Spec struct {
				Group string `yaml:"group"`
				Names struct {
					Kind string `yaml:"kind"`
				} `yaml:"names"`
				Versions []struct {
					Name   string `yaml:"name"`
					Schema struct {
						Schema schema `yaml:"openAPIV3Schema"`
					} `yaml:"schema"`
				} `yaml:"versions"`
			} `yaml:"spec"`
		}
		switch err := docs.Decode(&crd); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		if crd.Kind != "CustomResourceDefinition" {
			continue
		}
		for _, v := range crd.Spec.Versions {
			s := strict(v.Schema.Schema, false).(schema)
			properties := s["properties"].(schema)
			properties["metadata"] = schema{"type": "object"}
			properties["apiVersion"], properties["kind"] = schema{"type": "string"}, schema{"type": "string"}
			if err := writeSchema(out, crd.Spec.Names.Kind, crd.Spec.Group, v.Name, s); err != nil {
				return err
			}
		}
	}
}

// strict closes every object that names its properties. In the branches of
// oneOf, anyOf and allOf properties only repeat those of the object around them.
func strict(v any, branch bool) any {
	switch v := v.(type) {
	case []any:
		for i := range v {
			v[i] = strict(v[i], branch)
		}
		return v
	case schema:
		if v["x-kubernetes-int-or-string"] == true || v["format"] == "int-or-string" {
			return anyOf("string", "integer")
		}
		for key, part := range v {
			v[key] = strict(part, key == "oneOf" || key == "anyOf" || key == "allOf" || key == "not")
		}
		_, named := v["properties"].(schema)
		_, said := v["additionalProperties"]
		if named && !said && !branch && v["x-kubernetes-preserve-unknown-fields"] != true {
			v["additionalProperties"] = false
		}
		return v
	}
	return v
}

func anyOf(types ...string) schema {
	list := make([]any, len(types))
	for i, t := range types {
		list[i] = schema{"type": t}
	}
	return schema{"anyOf": list}
}

// closure is name with all definitions that it refers to.
func closure(all map[string]schema, name string) map[string]schema {
	need := map[string]schema{}
	for todo := []string{name}; len(todo) > 0; {
		next := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		if _, done := need[next]; done {
			continue
		}
		need[next] = all[next]
		todo = append(todo, references(all[next])...)
	}
	return need
}

func references(v any) []string {
	var found []string
	switch v := v.(type) {
	case []any:
		for _, part := range v {
			found = append(found, references(part)...)
		}
	case schema:
		if ref, ok := v["$ref"].(string); ok {
			found = append(found, ref[strings.LastIndexByte(ref, '/')+1:])
		}
		for _, key := range slices.Sorted(maps.Keys(v)) {
			found = append(found, references(v[key])...)
		}
	}
	return found
}

func writeSchema(out, kind, group, version string, s schema) error {
	label, _, _ := strings.Cut(group, ".")
	parts := slices.DeleteFunc([]string{kind, label, version}, func(s string) bool { return s == "" })
	text, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(out, strings.ToLower(strings.Join(parts, "-"))+".json"), text, 0o600)
}
