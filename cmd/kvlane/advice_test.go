package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/internal/config"
)

// The plugins of the guides of llm-d and GAIE, and what is nearest to them. What is named is a configuration that works.
func TestAdviceForPluginsOfTheGuides(t *testing.T) {
	const aware = "routing: {preset: kv-aware}"
	for name, guide := range map[string]struct{ plugins, more, want, also string }{
		"default of both charts":      {plugins: "queue-scorer kv-cache-utilization-scorer prefix-cache-scorer metrics-data-source core-metrics-extractor", want: aware},
		"payload-agnostic":            {plugins: "passthrough-parser active-request-scorer session-affinity-scorer", want: "routing: {preset: session}", also: "no counterpart is known of passthrough-parser"},
		"optimized-baseline":          {plugins: "token-load-scorer inflight-load-producer approx-prefix-cache-producer prefix-cache-affinity-filter", want: aware},
		"precise prefix cache":        {plugins: "token-producer endpoint-notification-source metrics-data-source core-metrics-extractor single-profile-handler decode-filter precise-prefix-cache-producer prefix-cache-scorer kv-cache-utilization-scorer queue-scorer no-hit-lru-scorer max-score-picker", want: aware},
		"precise prefix cache, 0.8":   {plugins: "tokenizer precise-prefix-cache-scorer kv-cache-utilization-scorer queue-scorer max-score-picker", want: aware},
		"lmetric":                     {plugins: "token-producer inflight-load-producer precise-prefix-cache-producer lmetric-scorer", want: aware},
		"tiered prefix cache":         {plugins: "no-hit-lru-scorer approx-prefix-cache-producer queue-scorer kv-cache-utilization-scorer prefix-cache-scorer", want: aware},
		"bursts of one prompt":        {plugins: "token-producer burst-prefix-cache-producer prefix-cache-scorer load-aware-scorer", want: aware},
		"P/D, always":                 {plugins: "always-disagg-pd-decider disagg-profile-handler prefill-filter decode-filter approx-prefix-cache-producer inflight-load-producer prefix-cache-affinity-filter token-load-scorer active-request-scorer max-score-picker", want: "routing: {preset: kv-aware, disagg: {mode: threshold, threshold: 0}}; disagg: {connector: sidecar}"},
		"P/D by uncached tokens":      {plugins: "disagg-profile-handler prefill-filter decode-filter prefix-cache-scorer queue-scorer", more: "- {type: prefix-based-pd-decider, parameters: {nonCachedTokens: 16}}\n", want: "routing: {preset: kv-aware, disagg: {mode: threshold, threshold: 16}}; disagg: {connector: sidecar}"},
		"wide-ep":                     {plugins: "disagg-headers-handler always-disagg-pd-decider disagg-profile-handler prefill-filter decode-filter prefix-cache-scorer queue-scorer active-request-scorer", want: "routing: {preset: kv-aware, disagg: {mode: threshold, threshold: 0}}; disagg: {connector: sidecar}"},
		"data parallel":               {plugins: "prefix-cache-scorer decode-filter max-score-picker data-parallel-profile-handler", want: aware, also: "workers.kubernetes.rank_per_port"},
		"predicted latency":           {plugins: "approx-prefix-cache-producer predicted-latency-producer prefix-cache-affinity-filter latency-scorer weighted-random-picker slo-headroom-tier-filter latency-slo-admitter", want: aware, also: "x-slo-ttft-ms"},
		"flow control":                {plugins: "queue-scorer kv-cache-utilization-scorer prefix-cache-scorer round-robin-fairness-policy fcfs-ordering-policy concurrency-detector", more: "featureGates: [flowControl]\n", want: aware + "; flow: {max_requests: 1000}"},
		"flow control by gate alone":  {plugins: "queue-scorer", more: "featureGates: [flowControl]\n", want: "routing: {preset: least-loaded}; flow: {max_requests: 1000}"},
		"load alone":                  {plugins: "queue-scorer kv-cache-utilization-scorer max-score-picker", want: "routing: {preset: least-loaded}"},
		"tokens in flight alone":      {plugins: "token-load-scorer active-request-scorer", want: "routing: {preset: load-balancing-tokens}"},
		"requests in flight alone":    {plugins: "active-request-scorer", want: "routing: {preset: load-balancing}"},
		"at random":                   {plugins: "random-picker", want: "routing: {preset: random}"},
		"plugins of somebody's own":   {plugins: "my-scorer max-score-picker my-scorer", want: aware, also: "no counterpart is known of my-scorer"},
		"the same, with known scorer": {plugins: "my-scorer session-affinity-filter", want: "routing: {preset: session}", also: "no counterpart is known of my-scorer"},
	} {
		text := "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n"
		for p := range strings.FieldsSeq(guide.plugins) {
			text += "- type: " + p + "\n"
		}
		text += guide.more
		want := "the nearest configuration is " + guide.want
		if guide.also != "" {
			want += "; "
		}
		got := advice([]byte(text), nil)
		if !strings.HasPrefix(got, want) || guide.also == "" && got != want || !strings.Contains(got, guide.also) {
			t.Errorf("%s: got %q, want %q and %q", name, got, want, guide.also)
		}
		working := "models: [{name: m, tokenizer: \"builtin:qwen3\"}]\nworkers: {kubernetes: {pools: [p]}}\nenvoy: {first_token: true}\n" + strings.ReplaceAll(guide.want, "; ", "\n")
		if _, err := config.Parse("kvlane.yaml", []byte(working)); err != nil {
			t.Errorf("%s: the advice is no configuration: %v", name, err)
		}
	}
	for _, text := range []string{"", "plugins: 3", "{", "plugins: []"} {
		if got := advice([]byte(text), nil); got != "it lists no plugins that could be read" {
			t.Errorf("%q: got %q", text, got)
		}
	}
}

func TestAdviceIsLogged(t *testing.T) {
	const text = "plugins: [{type: random-picker}]"
	file := filepath.Join(t.TempDir(), "epp.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, given := range [][]string{{"--config-file", file}, {"--config-text", text}} {
		f := flags("serve")
		k := kubernetesFlags(f)
		if err := f.Parse(given); err != nil {
			t.Fatal(err)
		}
		if len(k.ignored) != 1 || !strings.Contains(k.ignored[0], "preset: random}") {
			t.Errorf("%q: got the warnings %q, want one that names the preset", given, k.ignored)
		}
	}
	f := flags("serve")
	if k := kubernetesFlags(f); f.Parse([]string{"--config-file", file + "x"}) != nil || len(k.ignored) != 1 || !strings.Contains(k.ignored[0], "no such file") {
		t.Errorf("a file that is not there: got %q, want why", k.ignored)
	}
}
