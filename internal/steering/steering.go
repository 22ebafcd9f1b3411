// Package steering lists the request headers that a client must not set: they choose where
// a request goes, which rank serves it, or where an engine finds its peer.
//
// All code that removes headers derives its list from this one: the Envoy configurations of
// package envoy, the ext_proc server, and the prefill legs.
package steering

import "strings"

// Headers that Kvlane also sets.
const (
	// Rank is the header from which vLLM and SGLang read a rank.
	Rank = "x-data-parallel-rank"
	// Sidecar names the prefill worker to llm-d's sidecar.
	Sidecar = "x-prefiller-host-port"
	// PrefillPick carries the pick of a prefill leg to Envoy's prefill listener.
	PrefillPick = "x-kvlane-endpoint"
)

// forbidden are headers that no hop in front of Kvlane may set.
var forbidden = []string{
	"x-gateway-destination-endpoint",
	"x-gateway-destination-endpoint-subset",
	PrefillPick,
	Sidecar,
	"x-prefiller-url", // older sidecars
	"x-encoder-hosts-ports",
	"x-data-parallel-host-port",
	"x-kv-cache-source-host-port",
	Rank,
}

// overrides are headers that Kvlane (x-slo-ttft-ms of any client, the others with routing.trust_overrides or trust_objectives) and SGLang (with
// SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES) read. A trailing * matches any suffix.
var overrides = []string{"x-kvlane-*", "x-gateway-inference-objective", "x-llm-d-inference-objective", "x-slo-ttft-ms", "x-override-*", "x-body-compressed"}

// envoys are Envoy's own, which ext_proc may not change.
var envoys = []string{"x-envoy-original-path", "x-envoy-original-host", "x-envoy-original-dst-host"}

// AtEnvoy returns the names that Envoy removes before any filter reads them.
func AtEnvoy() []string { return append(append([]string{}, forbidden...), envoys...) }

// AtKvlane returns the names that Kvlane removes after its decision. A trailing * matches any suffix.
func AtKvlane() []string { return append(append([]string{}, forbidden...), overrides...) }

// Steers reports whether Kvlane removes a header; name is in lower case.
func Steers(name string) bool {
	for _, list := range [][]string{forbidden, overrides} {
		for _, s := range list {
			if prefix, any := strings.CutSuffix(s, "*"); name == s || any && strings.HasPrefix(name, prefix) {
				return true
			}
		}
	}
	return false
}
