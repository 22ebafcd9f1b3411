package replay

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A simulation has to end: values with which it would not are refused by their key.
func TestWorkloadsAreBounded(t *testing.T) {
	for text, want := range map[string]string{
		"one_shot: {tenants: 20, system: 2000, own: 100, output: 100, per_second: -12}":  "workload.one_shot.per_second: -12",
		"one_shot: {tenants: 20, system: 2000, own: 100, output: 100, per_second: .nan}": "workload.one_shot.per_second: NaN",
		"one_shot: {system: 2000, own: 100, output: 100, per_second: 12}":                "workload.one_shot.tenants: 0",
		"siblings: {background: 0}": "workload.siblings.background: 0",
		"skew: {clients: 2, first_mean: 10, turn_mean: 10, output_mean: 10, min_turns: 3, max_turns: 2, requests: 5}": "workload.skew.max_turns: 2",
		"trace: {load: -1}":                                 "workload.trace.load: -1",
		"family: {name: agents}":                            "workload.family.load: 0",
		"family: {name: agent, load: 1}":                    "workload.family.name: no family",
		"family: {name: agents, load: 1, seconds: 1000000}": "workload.family.seconds: 1e+06",
	} {
		file := filepath.Join(t.TempDir(), "s.yaml")
		if err := os.WriteFile(file, []byte("workload: {"+text+"}\nfleet: {workers: 2, engine: d70}\npolicies: [kv-aware]\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := LoadScenario(file); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}
