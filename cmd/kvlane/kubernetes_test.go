package main

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/telemetry"
)

// A request that the gate refuses is one of all requests too: shares of
// kvlane_requests_total are what alerts go by.
func TestRefusedPoolsAreCountedAsRequests(t *testing.T) {
	m := telemetry.New("test")
	d := (&kubernetes{}).gate(nil, m).Decide(t.Context(), &extproc.Request{Method: "POST", Path: "/v1/chat/completions"})
	if d.Reject == nil || d.Reject.Status != 503 {
		t.Fatalf("without a pool: %+v", d)
	}
	if n := testutil.ToFloat64(m.Rejected.WithLabelValues("503", "kvlane_other_pool")); n != 1 {
		t.Errorf("rejected %v", n)
	}
	if n := testutil.ToFloat64(m.Requests.WithLabelValues("chat", "rejected")); n != 1 {
		t.Errorf("requests rejected %v", n)
	}
}
