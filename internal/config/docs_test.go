package config

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/invopop/jsonschema"
)

// key is a key of the schema.
type key struct{ path, standard, description string }

// keysByEnd returns the keys of the schema that have a default, by each end of their paths: limits.max_body and max_body are the same key.
func keysByEnd(t *testing.T) map[string][]key {
	t.Helper()
	var s jsonschema.Schema
	if err := json.Unmarshal(Schema(), &s); err != nil {
		t.Fatal(err)
	}
	byEnd := map[string][]key{}
	var walk func(at string, section *jsonschema.Schema, depth int)
	walk = func(at string, section *jsonschema.Schema, depth int) {
		for pair := section.Properties.Oldest(); pair != nil && depth < 8; pair = pair.Next() {
			v, here := pair.Value, strings.TrimPrefix(at+"."+pair.Key, ".")
			for end, more := here, v.Default != nil; more; _, end, more = strings.Cut(end, ".") {
				byEnd[end] = append(byEnd[end], key{here, fmt.Sprint(v.Default), v.Description})
			}
			for _, inner := range []*jsonschema.Schema{v, v.Items, v.AdditionalProperties} {
				if inner == nil {
					continue
				}
				if def := s.Definitions[path.Base(inner.Ref)]; def != nil && def.Properties != nil {
					walk(here, def, depth+1)
				}
			}
		}
	}
	walk("", &s, 0)
	return byEnd
}

// A default in the text of a page has one of these forms, with the key in code and a number, its unit, on or off:
// (`limits.max_body`, 32 MiB), `limits.max_body` (32 MiB; …), `check.every` of them (1,000 by default), `access_log: false`, default.
var (
	spaces   = regexp.MustCompile(`\s+`)
	anyValue = "(\\d[\\d,.^]*(?: ?(?:ms|s|min|h|%|[KMG]i?B))?|on|off)"
	defaults = []*regexp.Regexp{
		regexp.MustCompile("`([a-z_][a-z_.\\[\\]]*)`(?:,| \\() ?" + anyValue + `(?: by default)? ?[),;|]`),
		regexp.MustCompile("`([a-z_][a-z_.\\[\\]]*)`[^`.|()]{0,40}\\(" + anyValue + " by default[,)]"),
		regexp.MustCompile("`([a-z_][a-z_.\\[\\]]*): ([^`]+)`(?:, | \\()(?:the )?default[,);]"),
	}
)

// rows returns keys and defaults of the rows of tables whose second column is the default. The chart's values are others.
func rows(text string) (list [][]string) {
	column := ""
	for line := range strings.Lines(text) {
		cells := strings.Split(strings.TrimSuffix(strings.TrimSpace(line), " |"), " | ")
		switch {
		case !strings.HasPrefix(line, "|"):
			column = ""
		case column == "" && len(cells) > 1:
			column = cells[0] + cells[1]
		case strings.HasSuffix(column, "default") && column != "| valuedefault" && len(cells) > 1:
			if m := regexp.MustCompile("^\\| `([a-z_.]+)`$").FindStringSubmatch(cells[0]); m != nil {
				list = append(list, []string{strings.Join(cells[:2], " | "), m[1], cells[1]})
			}
		}
	}
	return list
}

// same reports whether two texts stand for one value: 5m and 300 s, 1GiB and 1 GiB, 100000 and 100,000, [1 0.5] and 1, 0.5.
func same(a, b string) bool {
	if list, ok := strings.CutPrefix(a, "["); ok {
		return list == strings.ReplaceAll(b, ",", "")+"]"
	}
	if x, ok := amount(a); ok {
		y, ok := amount(b)
		return ok && math.Abs(x-y) <= 1e-9*math.Abs(x)
	}
	return a == b
}

// amount is the number of a text: of seconds, of bytes, or without a unit. on and true are 1, off and false 0.
func amount(text string) (float64, bool) {
	text = strings.NewReplacer(" ", "", ",", "", "min", "m", "on", "1", "true", "1", "off", "0", "false", "0").Replace(text)
	if base, power, ok := strings.Cut(text, "^"); ok {
		x, err := strconv.ParseFloat(base, 64)
		y, wrong := strconv.ParseFloat(power, 64)
		return math.Pow(x, y), err == nil && wrong == nil
	}
	if x, err := strconv.ParseFloat(text, 64); err == nil {
		return x, true
	}
	if d, err := time.ParseDuration(text); err == nil {
		return d.Seconds(), true
	}
	if percent, ok := strings.CutSuffix(text, "%"); ok {
		x, err := strconv.ParseFloat(percent, 64)
		return x / 100, err == nil
	}
	for i, unit := range []string{"KiB", "MiB", "GiB"} {
		if number, ok := strings.CutSuffix(text, unit); ok {
			x, err := strconv.ParseFloat(number, 64)
			return x * math.Pow(1024, float64(i+1)), err == nil
		}
	}
	return 0, false
}

// wrongDefaults returns the defaults of a page that are not those of the schema, and how many it has. Where 0 stands for a value
// that depends on the engine, the key's description has that value.
func wrongDefaults(text string, keys map[string][]key) (wrong []string, seen int) {
	text = regexp.MustCompile("(?ms)^```.*?^```").ReplaceAllString(text, "")
	found := rows(text)
	for _, form := range defaults {
		found = append(found, form.FindAllStringSubmatch(spaces.ReplaceAllString(text, " "), -1)...)
	}
	for _, m := range found {
		all := keys[strings.ReplaceAll(m[1], "[]", "")]
		if len(all) == 0 {
			continue // not a key
		}
		seen++
		if !slices.ContainsFunc(all, func(k key) bool {
			return same(k.standard, m[2]) || k.standard == "0" && strings.Contains(k.description, m[2])
		}) {
			wrong = append(wrong, fmt.Sprintf("%s is %s, the page has %q", all[0].path, all[0].standard, m[0]))
		}
	}
	return wrong, seen
}

// Pages that are written by hand have the defaults of the configuration.
func TestDefaultsInPages(t *testing.T) {
	keys, all := keysByEnd(t), 0
	var pages []string
	for _, pattern := range []string{"../../*.md", "../../docs/*.md", "../../charts/kvlane/README.md"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		pages = append(pages, found...)
	}
	for _, page := range pages {
		if base := filepath.Base(page); base == "CHANGELOG.md" || base == "lab-notes.md" || base == "gauntlet.md" {
			continue // what was, and what was tried
		}
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		wrong, seen := wrongDefaults(string(text), keys)
		all += seen
		for _, w := range wrong {
			t.Errorf("%s: %s", page, w)
		}
	}
	if t.Logf("%d defaults", all); all < 30 {
		t.Errorf("got %d defaults in all pages, want at least 30: the forms above fit no more", all)
	}
	planted := "| constant | default |\n|---|---|\n| `cost.miss` | 5 | x |\n| `cost.tiers` | 1, 0.9, 0.5, 0.5 |\n\n" +
		"| value | default |\n|---|---|\n| `cost.miss` | 4 |\n\n" +
		"(`limits.max_body`, 33 MiB) `envoy.upload_timeout` (1\nmin) `check.every` of all (2,000 by default), `access_log: true`, default, " +
		"`side_channel_port` (5600) `side_channel_port` (5601) `limits.max_body`, 48 times\n```\n`drain`, 3 s;\n```\n"
	wrong, seen := wrongDefaults(planted, keys)
	if len(wrong) != 5 || seen != 8 {
		t.Errorf("got %d of %d defaults wrong, want 5 of 8: %q", len(wrong), seen, wrong)
	}
}
