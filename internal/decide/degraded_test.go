package decide

import "testing"

// Each of the router's degradations has a name of its own in the metric.
func TestDegradationsOfTheRouter(t *testing.T) {
	for reason, want := range map[string]string{
		"no prefill target": degradedNoPrefill, "unknown model": degradedModel, "a target has no fresh report": "a_target_has_no_fresh_report",
	} {
		if got := degradedBy(reason); got != want {
			t.Errorf("got %q for %q, want %q", got, reason, want)
		}
	}
}
