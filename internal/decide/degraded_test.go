package decide

import (
	"testing"

	"github.com/kvlane/kvlane/routing"
)

// The router's degradations have the names that the metric and the JSON of decisions show.
func TestDegradationsOfTheRouter(t *testing.T) {
	for reason, want := range map[routing.Degradation]string{
		routing.DegradedNoPrefill: "no_prefill_target", routing.DegradedNoDecode: "no_decode_target", routing.DegradedModel: "model_unknown", routing.DegradedNoReport: "a_target_has_no_fresh_report",
	} {
		if got := string(reason); got != want {
			t.Errorf("got %q for %q, want %q", got, reason, want)
		}
	}
}
