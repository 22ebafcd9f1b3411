package chartgen

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"strings"
)

//go:embed readme.md
var prose string

const valuesMark = "<!-- values -->"

// readme is the prose with a table of each section's values.
func readme(values []*value) []byte {
	var b strings.Builder
	section := ""
	var rows func(values []*value)
	rows = func(values []*value) {
		for _, v := range values {
			if v.section != section {
				section = v.section
				fmt.Fprintf(&b, "\n### %s\n\n| value | default | meaning |\n|---|---|---|\n", section)
			}
			if len(v.children) > 0 && !v.open() {
				if v.text != "" {
					fmt.Fprintf(&b, "| `%s` | | %s |\n", v.path, cell(v.text))
				}
				rows(v.children)
				continue
			}
			fmt.Fprintf(&b, "| `%s` | %s | %s |\n", v.path, code(v.fallback), cell(strings.TrimSpace(v.text+" "+choices(v))))
		}
	}
	rows(values)
	return []byte(strings.Replace(prose, valuesMark, strings.TrimSpace(b.String()), 1))
}

// choices lists the values of an enumeration, if its description does not name them all.
func choices(v *value) string {
	enum, _ := v.rules["enum"].([]any)
	var names []string
	told := true
	for _, e := range enum {
		if s := fmt.Sprint(e); s != "" {
			names = append(names, "`"+s+"`")
			told = told && strings.Contains(v.text, s)
		}
	}
	if told {
		return ""
	}
	return "One of " + strings.Join(names, ", ") + "."
}

func code(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		return ""
	}
	return "`" + cell(string(text)) + "`"
}

func cell(s string) string { return strings.ReplaceAll(s, "|", `\|`) }
