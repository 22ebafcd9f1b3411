// Package steering lists the request headers that a client must not set: they choose
// where a request goes, which rank serves it, or where an engine finds its peer.
//
// Whoever takes headers off makes its list from this one: the Envoys of package envoy,
// the ext_proc server, and the prefill legs.
package steering

import "strings"

// Names that are set too, not only taken off.
const (
	// Rank is how vLLM and SGLang take a rank.
	Rank = "x-data-parallel-rank"
	// Sidecar names the prefill worker to llm-d's sidecar.
	Sidecar = "x-prefiller-host-port"
	// PrefillPick carries the pick of a prefill leg to Envoy's prefill listener.
	PrefillPick = "x-kvlane-endpoint"
)

// forbidden are for nobody in front of Kvlane.
var forbidden = []string{
	"x-gateway-destination-endpoint",
	"x-gateway-destination-endpoint-subset",
	PrefillPick,
	Sidecar,
	"x-prefiller-url", // older sidecars'
	"x-encoder-hosts-ports",
	"x-data-parallel-host-port",
	"x-kv-cache-source-host-port",
	Rank,
}

// overrides are what Kvlane may read (routing.trust_overrides) and SGLang's own
// (SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES). A trailing * stands for any ending.
var overrides = []string{"x-kvlane-*", "x-gateway-inference-objective", "x-override-*"}

// envoys are Envoy's own, which ext_proc may not change.
var envoys = []string{"x-envoy-original-path", "x-envoy-original-host", "x-envoy-original-dst-host"}

// AtEnvoy are the names that Envoy takes off before anything reads them.
func AtEnvoy() []string { return append(append([]string{}, forbidden...), envoys...) }

// AtKvlane are the names that Kvlane takes off behind its decision. A trailing *
// stands for any ending.
func AtKvlane() []string { return append(append([]string{}, forbidden...), overrides...) }

// Steers reports whether a header, in lower case, is one that Kvlane takes off.
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
