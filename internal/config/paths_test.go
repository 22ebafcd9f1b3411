package config

import (
	"slices"
	"strings"
	"testing"
)

func TestServedPaths(t *testing.T) {
	for text, want := range map[string]string{
		"":                               "default",
		"[default, /health, /v1/files*]": "default /health /v1/files*",
		"[/*]":                           "/*",
		"[]":                             "no path is served",
		"[health]":                       "neither",
		"[/a?b=c]":                       "neither",
		"['/a|/.*']":                     "neither",
		"[/a/*/b]":                       "neither",
		"['/a''']":                       "neither",
	} {
		yaml := "envoy: {}\n"
		if text != "" {
			yaml = "envoy: {paths: " + text + "}\n"
		}
		c, err := Parse("k.yaml", []byte(yaml))
		if strings.Contains(want, "e") && !strings.HasPrefix(want, "default") {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("paths %s: got error %v, want one with %q", text, err, want)
			}
		} else if err != nil || !slices.Equal(c.Envoy.Paths, strings.Fields(want)) {
			t.Errorf("paths %s: got %q, %v, want %s", text, c.Envoy.Paths, err, want)
		}
	}
}

func TestShadowPresets(t *testing.T) {
	for text, want := range map[string]string{
		"{routing: {shadow: [least-loaded, session-hash]}}":   "",
		"{routing: {shadow: [nothing]}}":                      "no preset",
		"{routing: {shadow: [kv-aware, kv-aware]}}":           "twice",
		"{routing: {shadow: [a, b, c, d, e]}}":                "at most 4",
		"{routing: {shadow: [kv-aware]}, explain: {keep: 0}}": "explain.keep",
	} {
		_, err := Parse("k.yaml", []byte(text))
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got error %v, want one with %q", text, err, want)
		}
	}
}
