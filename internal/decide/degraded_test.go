package decide

import (
	"testing"

	"github.com/kvlane/kvlane/routing"
)

// Each of the router's degradations has a name of its own in the metric.
func TestDegradationsOfTheRouter(t *testing.T) {
	for reason, want := range map[routing.Degradation]string{
		routing.DegradedNoPrefill: "no_prefill_target", routing.DegradedNoDecode: "no_decode_target", routing.DegradedModel: "model_unknown", routing.DegradedNoReport: "a_target_has_no_fresh_report",
	} {
		if got := degradedBy[reason]; got != want {
			t.Errorf("got %q for %q, want %q", got, reason, want)
		}
	}
}
