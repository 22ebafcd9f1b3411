package replay

import "testing"

// TestPredictionsAndTargets holds what the predicted times are for, on seeds that no constant was
// chosen on: at 80 % load nine of ten first tokens come within 20 % of the prediction, and at 95 %
// a router that refuses what it cannot serve in time serves more requests in time.
func TestPredictionsAndTargets(t *testing.T) {
	if raceDetector {
		t.Skip("4 simulations: 'make test' runs them without the race detector")
	}
	g := Gauntlet{Quick: true, Seeds: []uint64{101}, Families: []string{"chat"}, Rules: []Rule{{Policy: "kv-aware"}, {Policy: "kv-aware-slo-refuse"}}}
	o, err := g.Run()
	if err != nil {
		t.Fatal(err)
	}
	usual := &o.Cells[0].Rows[0].Mean
	if usual.TTFTError50 == 0 || usual.TTFTError90 > 0.2 {
		t.Errorf("%s: got errors of the predicted time to the first token of %.3f and %.3f at p90, want above 0 and at most 0.2", o.Cells[0].Workload, usual.TTFTError50, usual.TTFTError90)
	}
	plain, refuse := &o.Cells[1].Rows[0].Mean, &o.Cells[1].Rows[1].Mean
	t.Logf("%s: goodput %.2f, with refusals %.2f, refused %.0f", o.Cells[1].Workload, plain.Goodput, refuse.Goodput, refuse.Refused)
	if refuse.Goodput < 1.2*plain.Goodput || refuse.Refused == 0 {
		t.Errorf("%s: got a goodput of %.2f with refusals (%.0f), want at least 1.2 of %.2f", o.Cells[1].Workload, refuse.Goodput, refuse.Refused, plain.Goodput)
	}
}
