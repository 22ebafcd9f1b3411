package kube

import (
	"fmt"
	"maps"
	"sync"
	"testing"

	"github.com/kvlane/kvlane/internal/config"
)

func objectiveText(pool, priority string) string {
	return fmt.Sprintf(`{"spec": {"poolRef": {"name": %q}%s}}`, pool, priority)
}

// The priorities of InferenceObjectives follow the API server: those of the pools that are served, of the groups that are
// configured, the first group first.
func TestObjectivesAreWatched(t *testing.T) {
	api, c := newAPIServer(t)
	api.put(poolsPath, "llm", poolText)
	api.put(objectivesPath, "gold", objectiveText("llm", `, "priority": 5`))
	api.put(objectivesPath, "unset", objectiveText("llm", ""))
	api.put(objectivesPath, "strange", objectiveText("other", `, "priority": 9`))
	api.put(oldObjectivesPath, "gold", objectiveText("llm", `, "priority": 1`))
	api.put(oldObjectivesPath, "batch", objectiveText("llm", `, "priority": -2`))
	var mu sync.Mutex
	got := map[string]int{}
	set := func(priorities map[string]int) {
		mu.Lock()
		defer mu.Unlock()
		got = priorities
	}
	want := func(want map[string]int) {
		t.Helper()
		waitFor(t, func() bool {
			mu.Lock()
			defer mu.Unlock()
			return maps.Equal(got, want)
		})
	}
	start(t, c, config.Kubernetes{Pools: []string{"llm"}, Objectives: []string{"llm-d.ai", "inference.networking.x-k8s.io"}}, Options{SetObjectives: set})
	want(map[string]int{"gold": 5, "unset": 0, "batch": -2})
	api.put(objectivesPath, "gold", objectiveText("llm", `, "priority": 6`))
	api.remove(objectivesPath, "unset")
	want(map[string]int{"gold": 6, "batch": -2})
	api.cutWatches()
	api.remove(objectivesPath, "gold")
	want(map[string]int{"gold": 1, "batch": -2})
}

// A selector has no pool: every objective of the namespace counts.
func TestObjectivesOfASelector(t *testing.T) {
	api, c := newAPIServer(t)
	api.put(objectivesPath, "gold", objectiveText("any", `, "priority": 5`))
	api.put(oldObjectivesPath, "batch", objectiveText("any", `, "priority": -2`))
	taken := make(chan map[string]int, 9)
	start(t, c, config.Kubernetes{Selector: map[string]string{"app": "llm"}, Ports: []int{8000}, Objectives: []string{"llm-d.ai"}},
		Options{SetObjectives: func(priorities map[string]int) { taken <- priorities }})
	if got, want := <-taken, (map[string]int{"gold": 5}); !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
