package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"
)

// pluginKinds maps the plugins of llm-d's router (as of commit ebab687) and of GAIE (v1.5.0) to Kvlane's equivalent
// settings. If there are several presets, the first counts.
var pluginKinds = []pluginKind{
	{"preset: kv-aware", "prefix-cache-scorer precise-prefix-cache-scorer prefix-cache-affinity-filter approx-prefix-cache-producer precise-prefix-cache-producer " +
		"burst-prefix-cache-producer lmetric-scorer no-hit-lru-scorer " + latencyPlugins},
	{"preset: session", "session-affinity-scorer session-affinity-filter"},
	{"preset: load-balancing-tokens", "token-load-scorer"},
	{"preset: least-loaded", "queue-scorer kv-cache-utilization-scorer load-aware-scorer running-requests-size-scorer"},
	{"preset: load-balancing", "active-request-scorer"},
	{"preset: random", "random-picker"},
	{"disagg", "disagg-profile-handler pd-profile-handler always-disagg-pd-decider prefix-based-pd-decider disagg-headers-handler prefill-header-handler"},
	{"flow", "concurrency-detector utilization-detector round-robin-fairness-policy global-strict-fairness-policy program-aware-fairness " +
		"fcfs-ordering-policy edf-ordering-policy slo-deadline-ordering-policy static-usage-limit-policy"},
	{"ranks", "data-parallel-profile-handler"},
	{"slo", latencyPlugins},
	{"", "max-score-picker weighted-random-picker single-profile-handler decode-filter prefill-filter metrics-data-source core-metrics-extractor " +
		"endpoint-notification-source token-producer tokenizer inflight-load-producer session-id-producer models-data-source models-data-extractor " +
		"openai-parser anthropic-parser vllmhttp-parser sglanghttp-parser lora-affinity-scorer"},
}

type pluginKind struct{ kind, plugins string }

const latencyPlugins = "predicted-latency-producer latency-scorer slo-headroom-tier-filter latency-slo-admitter"

// advice returns Kvlane's settings that are nearest to an EndpointPickerConfig. If it is none, it returns err.
func advice(text []byte, err error) string {
	if err != nil {
		return err.Error()
	}
	var c struct {
		Gates   []string `yaml:"featureGates"`
		Plugins []struct {
			Type       string
			Parameters struct {
				NonCached int `yaml:"nonCachedTokens"`
			}
		}
	}
	if err := yaml.Unmarshal(text, &c); err != nil || len(c.Plugins) == 0 {
		return "it lists no plugins that could be read"
	}
	kinds, threshold := map[string]bool{"flow": slices.Contains(c.Gates, "flowControl")}, 0
	var unknown []string
	for _, p := range c.Plugins {
		found := false
		for _, k := range pluginKinds {
			if slices.Contains(strings.Fields(k.plugins), p.Type) {
				found, kinds[k.kind] = true, true
			}
		}
		if !found && !slices.Contains(unknown, p.Type) {
			unknown = append(unknown, p.Type)
		}
		threshold = max(threshold, p.Parameters.NonCached)
	}
	preset := func(k pluginKind) bool { return kinds[k.kind] && strings.HasPrefix(k.kind, "preset") }
	at := max(0, slices.IndexFunc(pluginKinds, preset)) // kv-aware if there is none
	said := "the nearest configuration is routing: {" + pluginKinds[at].kind
	if kinds["disagg"] {
		said += fmt.Sprintf(", disagg: {mode: threshold, threshold: %d}}; disagg: {connector: sidecar", threshold)
	}
	said += "}"
	if kinds["flow"] {
		said += "; flow: {max_requests: 1000}"
	}
	if kinds["ranks"] {
		said += "; workers.kubernetes.rank_per_port"
	}
	if kinds["slo"] {
		said += "; latency targets come in the header x-slo-ttft-ms"
	}
	if unknown != nil {
		said += "; no counterpart is known of " + strings.Join(unknown, ", ")
	}
	return said
}
