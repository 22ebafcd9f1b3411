package steering

import (
	"slices"
	"testing"
)

// The names are spelled out here once more: every entrance follows the lists of this package, so a name that
// is lost there is lost everywhere.
func TestLists(t *testing.T) {
	hops := []string{
		"x-data-parallel-host-port", "x-data-parallel-rank", "x-encoder-hosts-ports", "x-gateway-destination-endpoint",
		"x-gateway-destination-endpoint-subset", "x-kv-cache-source-host-port", "x-kvlane-endpoint", "x-prefiller-host-port", "x-prefiller-url",
	}
	for what, c := range map[string]struct{ got, want []string }{
		"at Envoy":  {AtEnvoy(), slices.Concat(hops, []string{"x-envoy-original-path", "x-envoy-original-host", "x-envoy-original-dst-host"})},
		"at Kvlane": {AtKvlane(), slices.Concat(hops, []string{"x-body-compressed", "x-gateway-inference-objective", "x-kvlane-*", "x-llm-d-inference-objective", "x-override-*", "x-slo-ttft-ms"})},
	} {
		slices.Sort(c.got)
		slices.Sort(c.want)
		if !slices.Equal(c.got, c.want) {
			t.Errorf("%s: got %q, want %q", what, c.got, c.want)
		}
	}
	for _, name := range append(hops, "x-kvlane-pin", "x-kvlane-", "x-override-temperature", "x-slo-ttft-ms", "x-body-compressed") {
		if !Steers(name) {
			t.Errorf("got %s as a header that does not steer, want one that does", name)
		}
	}
	for _, name := range []string{"x-data-parallel-ranks", "x-data-parallel", "x-kvlane", "x-slo-ttft-ms2", "x-request-id", "authorization", ""} {
		if Steers(name) {
			t.Errorf("got %q as a header that steers, want none", name)
		}
	}
}
