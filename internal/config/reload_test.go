package config

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

func TestWhatARunningKvlaneTakes(t *testing.T) {
	const base = "models: [{name: m, tokenizer: \"builtin:qwen3\"}]\nworkers: {static: [{name: w, address: \"10.0.0.1:8000\"}]}\n"
	for more, want := range map[string]struct{ live, restart []string }{
		"":                                       {},
		"# a comment\n":                          {},
		"drain: 20s\n":                           {}, // the default
		"log: {level: debug, decisions: true}\n": {live: []string{"log.level", "log.decisions"}},
		"routing: {policy: {cost: {miss: 5}}, objectives: {a: 1}}\n":        {live: []string{"routing.objectives", "routing.policy.cost.miss"}},
		"limits: {refuse_early: true, bodies_in_flight: {count: 5}}\n":      {live: []string{"limits.bodies_in_flight.count", "limits.refuse_early"}},
		"limits: {requests_per_address: 5}\n":                               {live: []string{"limits.requests_per_address"}},
		"limits: {max_body: 1MiB, max_streams: 5}\nexplain: {keep: 5}\n":    {[]string{"explain.keep"}, []string{"limits.max_body", "limits.max_streams"}},
		"routing: {speculate: 1s}\ndrain: 1s\nlisten: {address: \"h:1\"}\n": {nil, []string{"listen.address", "routing.speculate", "drain"}},
	} {
		before, err := Parse("k.yaml", []byte(base))
		if err != nil {
			t.Fatal(err)
		}
		after, err := Parse("k.yaml", []byte(base+more))
		if err != nil {
			t.Fatal(err)
		}
		compare(t, more, before, after, want.live, want.restart)
	}
	for text, want := range map[string]struct{ live, restart []string }{
		strings.Replace(base, "name: m,", "name: m, disagg: {threshold: 7},", 1):            {live: []string{"models[0].disagg.threshold"}},
		strings.Replace(base, "builtin:qwen3", "hf:Org/Model@v2", 1):                        {live: []string{"models[0].tokenizer"}},
		strings.Replace(base, "name: m,", "name: m, hand_ids: true,", 1):                    {restart: []string{"models[0].hand_ids"}},
		strings.Replace(base, "name: m,", "name: m, check: {every: 7},", 1):                 {live: []string{"models[0].check.every"}},
		strings.Replace(base, "name: m,", "name: n,", 1):                                    {live: []string{"models[0]", "models"}},
		strings.Replace(base, "10.0.0.1", "10.0.0.2", 1):                                    {restart: []string{"workers.static[0].address"}},
		"workers: {static: [{name: w, address: \"10.0.0.1:8000\"}]}\n":                      {live: []string{"models"}},
		strings.Replace(base, "[{name: m,", "[{name: first}, {name: m, hand_ids: true,", 1): {live: []string{"models[0]"}, restart: []string{"models[1].hand_ids"}},
		strings.Replace(base, "[{name: m,", "[{name: first, cache_bytes: 0}, {name: m,", 1): {live: []string{"models[0]"}},
	} {
		before, _ := Parse("k.yaml", []byte(base))
		after, err := Parse("k.yaml", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		compare(t, text, before, after, want.live, want.restart)
	}
}

// Models are told by their names, not by their places. Pods are asked for their models if there are several: then it needs a restart.
func TestReloadOfModels(t *testing.T) {
	const kubernetes = ", workers: {kubernetes: {pool: p}}"
	for _, c := range []struct {
		before, after, more string
		live, restart       []string
	}{
		{before: "a b", after: "b a"},
		{before: "a b", after: "b", live: []string{"models"}},
		{before: "a", after: "b a", live: []string{"models[0]"}},
		{before: "", after: "a b", live: []string{"models[0]", "models[1]"}},
		{before: "a b", after: "b a c", more: kubernetes, live: []string{"models[2]"}},
		{before: "a", after: "b", more: kubernetes, live: []string{"models[0]", "models"}},
		{before: "a", after: "a b", more: kubernetes, restart: []string{"models"}},
		{before: "a b", after: "b", more: kubernetes, restart: []string{"models"}},
	} {
		of := func(names string) *Config {
			entries := ""
			for name := range strings.FieldsSeq(names) {
				entries += fmt.Sprintf("{name: %s, max_model_len: %d},", name, name[0])
			}
			out, err := Parse("k.yaml", []byte("{models: ["+entries+"]"+c.more+"}"))
			if err != nil {
				t.Fatal(err)
			}
			return out
		}
		before, after := of(c.before), of(c.after)
		compare(t, c.before+" to "+c.after+c.more, before, after, c.live, c.restart)
	}
}

// A queue that is switched on or off needs a restart, a longer one does not.
func TestReloadOfTheQueue(t *testing.T) {
	for _, c := range []struct {
		before, after int
		live, restart []string
	}{
		{before: 0, after: 5, restart: []string{"routing.wait.max_requests"}},
		{before: 5, after: 0, restart: []string{"routing.wait.max_requests"}},
		{before: 5, after: 6, live: []string{"routing.wait.max_requests"}},
	} {
		before, after := Default(), Default()
		before.Routing.Wait.Requests, after.Routing.Wait.Requests = c.before, c.after
		compare(t, fmt.Sprint(c.before, " to ", c.after), &before, &after, c.live, c.restart)
	}
}

func compare(t *testing.T, name string, before, after *Config, live, restart []string) {
	t.Helper()
	gotLive, problems := before.Changes(after)
	var gotRestart []string
	for _, p := range problems {
		gotRestart = append(gotRestart, p.Path)
	}
	if !slices.Equal(gotLive, live) || !slices.Equal(gotRestart, restart) {
		t.Errorf("%q: got %v and, for a restart, %v, want %v and %v", name, gotLive, gotRestart, live, restart)
	}
}

// Each key in the lists exists.
func TestReloadableKeysExist(t *testing.T) {
	for _, key := range slices.Concat(reloadable, fixed) {
		for name := range strings.SplitSeq(strings.ReplaceAll(key, "[]", ""), ".") {
			if !strings.Contains(string(Schema()), `"`+name+`": {`) {
				t.Errorf("got no key %s in the schema, want one", key)
			}
		}
	}
}
