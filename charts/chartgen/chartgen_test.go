package chartgen

import (
	"encoding/json"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const sample = `# A file.

## First

# How many.
# @schema {minimum: 1}
pods: 2
image:
  # Its name.
  name: kvlane

## Second

# As in a pod.
# @schema {additionalProperties: true}
security:
  user: 1
# List of x|y.
# @schema {items: {type: string}}
words: []
`

func TestParseValues(t *testing.T) {
	values, err := parseValues([]byte(sample))
	if err != nil {
		t.Fatal(err)
	}
	var paths []string
	for _, v := range values {
		paths = append(paths, v.section+" "+v.path+": "+v.text)
		for _, c := range v.children {
			paths = append(paths, v.section+" "+c.path+": "+c.text)
		}
	}
	want := []string{"First pods: How many.", "First image: ", "First image.name: Its name.", "Second security: As in a pod.", "Second security.user: ", "Second words: List of x|y."}
	if !reflect.DeepEqual(paths, want) {
		t.Errorf("got %q", paths)
	}
	table := string(readme(values))
	for _, row := range []string{"### First", "| `pods` | `2` | How many. |", "| `image.name` | `\"kvlane\"` | Its name. |", "| `security` | `{\"user\":1}` | As in a pod. |", "| `words` | `[]` | List of x\\|y. |"} {
		if !strings.Contains(table, row+"\n") {
			t.Errorf("no row %s", row)
		}
	}
	if strings.Contains(table, "image` |") {
		t.Error("a section without a comment needs no row")
	}
}

// A list of choices is complete; it includes the one that the sentence names.
func TestChoices(t *testing.T) {
	enum := map[string]any{"enum": []any{"", "none", "istio"}}
	for text, want := range map[string]string{
		"`none` needs nothing.":        "One of `none`, `istio`.",
		"Which.":                       "One of `none`, `istio`.",
		"`none`, or `istio` for Istio": "",
	} {
		if got := choices(&value{text: text, rules: enum}); got != want {
			t.Errorf("%s: %q", text, got)
		}
	}
}

func TestValuesSchema(t *testing.T) {
	values, err := parseValues([]byte(sample))
	if err != nil {
		t.Fatal(err)
	}
	out, err := valuesSchema(values, []byte(`{"$defs": {"Model": {"properties": {"check": {"$ref": "#/$defs/Check"}}}}, "properties": {"models": {"$ref": "#/$defs/Model"}}}`))
	if err != nil {
		t.Fatal(err)
	}
	var s struct {
		AdditionalProperties bool           `json:"additionalProperties"`
		Properties           map[string]any `json:"properties"`
		Defs                 map[string]any `json:"$defs"`
	}
	if err := json.Unmarshal(out, &s); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{
		"pods":     map[string]any{"type": "integer", "minimum": 1.0, "description": "How many."},
		"image":    map[string]any{"type": "object", "additionalProperties": false, "properties": map[string]any{"name": map[string]any{"type": "string", "description": "Its name."}}},
		"security": map[string]any{"type": "object", "additionalProperties": true, "description": "As in a pod."},
		"words":    map[string]any{"type": "array", "items": map[string]any{"type": "string"}, "description": "List of x|y."},
	}
	if s.AdditionalProperties || !reflect.DeepEqual(s.Properties, want) {
		t.Errorf("got %v", s.Properties)
	}
	kvlane, _ := s.Defs["kvlane"].(map[string]any)
	if !strings.Contains(string(out), `"$ref": "#/$defs/kvlane/Check"`) || kvlane["Config"] == nil {
		t.Errorf("definitions of kvlane.yaml: %s", out)
	}
}

func TestParseValuesRefuses(t *testing.T) {
	for name, c := range map[string]struct{ text, want string }{
		"no comment":      {"# One.\na: 1\nb: 2\n", "b has no comment"},
		"block list":      {"# List.\na:\n- 1\n", `values.yaml:3: "- 1" is not a key`},
		"bad rules":       {"# One.\n# @schema {minimum: [}\na: 1\n", "values.yaml:2:"},
		"not YAML":        {"a: [\n", "sequence"},
		"flow over lines": {"# One.\na: {\n    b: 1}\n", "values.yaml:3"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := parseValues([]byte(c.text)); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

func TestBootstrapHelperRefuses(t *testing.T) {
	var all strings.Builder
	for _, r := range replacements {
		all.WriteString(r.old + "\n")
	}
	out, err := bootstrapHelper(all.String())
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range replacements {
		if !strings.Contains(string(out), r.with) {
			t.Errorf("%q was not put in", r.with)
		}
	}
	if _, err := bootstrapHelper(strings.Replace(all.String(), "{{.Admin}}", "", 1)); err == nil || !strings.Contains(err.Error(), "no \"{{.Admin}}\" any more") {
		t.Errorf("a use that is gone: %v", err)
	}
}

// Each alert's runbook_url is an anchor of the troubleshooting page: a heading with its name.
func TestAlertsHaveARunbook(t *testing.T) {
	found := func(file, pattern string) (names []string) {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(pattern).FindAllSubmatch(content, -1) {
			names = append(names, string(m[1]))
		}
		return names
	}
	alerts := found("../kvlane/templates/prometheusrule.yaml", `"name" "(\w+)"`)
	runbooks := found("../../docs/troubleshooting.md", `(?m)^### (Kvlane\w+)$`)
	if len(alerts) < 10 || !slices.Equal(alerts, runbooks) {
		t.Errorf("got the headings %v, want the alerts in their order: %v", runbooks, alerts)
	}
	if n := len(found("../kvlane/templates/prometheusrule.yaml", `(docs/troubleshooting\.md#%s" \.root\.Chart\.Home \(lower \.name\))`)); n != 1 {
		t.Errorf("got %d lines with a runbook_url, want one in the template of every alert", n)
	}
}

// The tables of docs/kubernetes.md for users of other charts name values that this chart has.
func TestTablesOfOtherChartsNameValues(t *testing.T) {
	content, err := os.ReadFile("../kvlane/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	values, err := parseValues(content)
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	var note func([]*value)
	note = func(values []*value) {
		for _, v := range values {
			known[v.path] = true
			note(v.children)
		}
	}
	note(values)
	page, err := os.ReadFile("../../docs/kubernetes.md")
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile("`(\\.?[a-zA-Z]+(?:\\.[a-zA-Z]+)*)(?:: [^`]+)?`")
	rows := 0
	for _, table := range regexp.MustCompile(`(?m)^\| [^|]+ \| this chart \|\n\|---\|---\|\n((?:\|.*\n)+)`).FindAllStringSubmatch(string(page), -1) {
		for row := range strings.Lines(table[1]) {
			columns := strings.Split(strings.TrimSpace(row), " | ")
			rows++
			text, parent := regexp.MustCompile(`\([^)]*\)|\bor .*|;? with .*`).ReplaceAllString(columns[1], ""), ""
			if same := strings.Contains(text, "the same names"); same {
				text = columns[0]
				if strings.Contains(columns[1], "at the top level") { // theirs are below a key, which ours are not
					text = regexp.MustCompile("`[a-zA-Z]+\\.").ReplaceAllString(text, "`")
					text = strings.ReplaceAll(text, "`.", "`")
				}
			}
			for _, m := range named.FindAllStringSubmatch(text, -1) {
				path := m[1]
				if rest, below := strings.CutPrefix(path, "."); below {
					path = parent + "." + rest
				} else {
					parent, _, _ = strings.Cut(path, ".")
				}
				if strings.HasPrefix(path, "config.") { // Kvlane's own configuration, with a schema of its own
					path = "config"
				}
				if !known[path] {
					t.Errorf("%s: got %s, which the chart does not have", strings.TrimSpace(row), path)
				}
			}
		}
	}
	if rows < 20 {
		t.Errorf("got %d rows of tables, want more", rows)
	}
}
