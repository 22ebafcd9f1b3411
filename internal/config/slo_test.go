package config

import (
	"strings"
	"testing"
	"time"
)

func TestProblemsAndWarningsOfTargets(t *testing.T) {
	for text, want := range map[string]string{
		"slo: {unmet: queue}": "slo.unmet: queue needs a queue",
		"slo: {unmet: queue}\nflow: {max_requests: 10}\nenvoy: {first_token: true}": "",
		"slo: {unmet: never}":                                  "slo.unmet: ",
		"slo: {ttft: 61m}":                                     "slo.ttft: 1h1m0s is more than 1h",
		"slo: {ttft: -1s}":                                     "slo.ttft: ",
		"models: [{name: m, slo: {ttft: 2h}}]":                 "models[0].slo.ttft: 2h0m0s is more than 1h",
		"slo: {ttft: 1s}\nenvoy: {first_token: true}":          "",
		"slo: {ttft: 1s}":                                      "slo: no first token is seen",
		"models: [{name: m, slo: {ttft: 1s}}]":                 "slo: no first token is seen",
		"slo: {unmet: refuse}\nenvoy: {first_token: true}":     "",
		"slo: {unmet: refuse}":                                 "slo: no first token is seen",
		"models: [{name: m, slo: {}}]\nslo: {}\nlog: {}\n#end": "",
	} {
		c, err := Parse("k.yaml", []byte(text+"\n"))
		got := ""
		if err != nil {
			got = err.Error()
		} else {
			var ps places
			var found ProblemsError
			c.warnSLO(ps.reporter(&found))
			for _, p := range found {
				got += p.Path + ": " + p.Message
			}
		}
		if want == "" && got != "" || !strings.Contains(got, want) {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
}

func TestTargetsOfModels(t *testing.T) {
	c, err := Parse("k.yaml", []byte("slo: {ttft: 3s}\nmodels: [{name: fast, slo: {ttft: 500ms}}, {name: other}]\n"))
	if err != nil {
		t.Fatal(err)
	}
	for model, want := range map[string]time.Duration{"fast": 500 * time.Millisecond, "other": 3 * time.Second, "": 3 * time.Second} {
		if got := c.TTFT(model); got != want {
			t.Errorf("%q: got %s, want %s", model, got, want)
		}
	}
}
