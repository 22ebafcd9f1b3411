package chartgen

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/goccy/go-yaml"
)

// value is a key of values.yaml with the content of its comments.
type value struct {
	name, path string
	section    string // the "## " heading above it
	text       string
	rules      map[string]any // of the @schema comment
	fallback   any            // the default
	children   []*value
}

// open reports whether further keys are allowed; the documentation then shows the value as
// a whole.
func (v *value) open() bool { return v.rules["additionalProperties"] != nil || v.rules["$ref"] != nil }

// A key in block style; its value may follow it in flow style.
var keyLine = regexp.MustCompile(`^( *)([A-Za-z][A-Za-z0-9]*):( .*)?$`)

const schemaMark = "@schema "

// parseValues reads the keys in order. It understands what values.yaml uses: maps in
// block style, lists and leaves on one line, comments above keys.
func parseValues(text []byte) ([]*value, error) {
	var defaults map[string]any
	if err := yaml.Unmarshal(text, &defaults); err != nil {
		return nil, err
	}
	root := &value{fallback: defaults}
	stack := []*value{root} // by depth
	var section string
	var comment []string
	var rules map[string]any
	lines := bufio.NewScanner(bytes.NewReader(text))
	for n := 1; lines.Scan(); n++ {
		line := lines.Text()
		trimmed := strings.TrimSpace(line)
		switch {
		case trimmed == "":
			comment, rules = nil, nil
		case strings.HasPrefix(trimmed, "## "):
			section = strings.TrimPrefix(trimmed, "## ")
		case strings.HasPrefix(trimmed, "#"):
			said := strings.TrimPrefix(strings.TrimPrefix(trimmed, "#"), " ")
			schema, ok := strings.CutPrefix(said, schemaMark)
			if !ok {
				comment = append(comment, said)
				continue
			}
			if err := yaml.Unmarshal([]byte(schema), &rules); err != nil {
				return nil, fmt.Errorf("values.yaml:%d: %w", n, err)
			}
		default:
			m := keyLine.FindStringSubmatch(line)
			depth := 0
			if m != nil {
				depth = len(m[1])/2 + 1
			}
			if m == nil || depth > len(stack) {
				return nil, fmt.Errorf("values.yaml:%d: %q is not a key with its value behind it or below it", n, line)
			}
			parent := stack[depth-1]
			v := &value{name: m[2], path: join(parent.path, m[2]), section: section, text: strings.Join(comment, " "), rules: rules}
			v.fallback = parent.fallback.(map[string]any)[v.name]
			parent.children = append(parent.children, v)
			stack = append(stack[:depth], v)
			comment, rules = nil, nil
		}
	}
	return root.children, errors.Join(lines.Err(), documented(root.children))
}

// documented returns an error for the first value without a description.
func documented(values []*value) error {
	for _, v := range values {
		if len(v.children) > 0 && !v.open() {
			if err := documented(v.children); err != nil {
				return err
			}
		} else if v.text == "" {
			return fmt.Errorf("values.yaml: %s has no comment", v.path)
		}
	}
	return nil
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}
