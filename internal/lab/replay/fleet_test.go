package replay

import (
	"reflect"
	"testing"
)

// fleetRun runs the default on conversations that come back, on four ranks with the given changes.
func fleetRun(t *testing.T, change func(*Fleet), policies ...string) []Row {
	t.Helper()
	f := Fleet{Workers: 4, Ranks: 1, Engine: Dense70B(200_000)}
	change(&f)
	w := Skew{Clients: 40, StartOver: 10, FirstMean: 3000, FirstSigma: 0.5, TurnMean: 800, TurnSigma: 0.5,
		OutputMean: 400, MinTurns: 5, MaxTurns: 10, Think: 1, Requests: 800, Decode: true}.Workload("fleet")
	report, err := Run(Options{Workload: w, Fleet: f, Policies: policies, Seeds: []uint64{1}})
	if err != nil {
		t.Fatal(err)
	}
	return report.Rows
}

func TestEnginesThatKeepAnswersHitMore(t *testing.T) {
	without := fleetRun(t, func(*Fleet) {}, "session")[0].Mean
	with := fleetRun(t, func(f *Fleet) { f.Engine.KeepOutput = true }, "session")[0].Mean
	if with.Hit < without.Hit+0.03 {
		t.Errorf("with kept answers: got hit rate %.3f, want at least 0.03 more than %.3f", with.Hit, without.Hit)
	}
}

func TestTheHostTierCosts(t *testing.T) {
	free := fleetRun(t, func(*Fleet) {}, "session")[0].Mean
	paid := fleetRun(t, func(f *Fleet) { f.Engine.Device, f.Engine.PerHostToken = 50_000, 1e-4 }, "session")[0].Mean
	ample := fleetRun(t, func(f *Fleet) { f.Engine.Device, f.Engine.PerHostToken = 10_000_000, 1e-4 }, "session")[0].Mean
	if paid.TTFT90 < 1.2*free.TTFT90 {
		t.Errorf("with a quarter of the cache on the device: got p90 %.3f, want 1.2 times %.3f at least", paid.TTFT90, free.TTFT90)
	}
	if ample.TTFT90 != free.TTFT90 {
		t.Errorf("with a device as large as the cache: got p90 %.3f, want %.3f", ample.TTFT90, free.TTFT90)
	}
}

// A slow worker gets fewer requests if its speed is known, and some under every preset.
func TestSlowWorkersGetTheirShare(t *testing.T) {
	for _, policy := range []string{"kv-aware", "kv-aware-trt", "kv-cache-aware", "greedy"} {
		row := fleetRun(t, func(f *Fleet) { f.Slow, f.SlowKnown = 2, true }, policy)[0].Mean
		if row.MinMean < 0.1 || row.MinMean > 0.95 {
			t.Errorf("%s: the least of the ranks got %.2f of the mean, want 0.1 to 0.95", policy, row.MinMean)
		}
	}
	fast, slow := fleetRun(t, func(*Fleet) {}, "round-robin")[0].Mean, fleetRun(t, func(f *Fleet) { f.Slow = 4 }, "round-robin")[0].Mean
	if slow.TTFT90 < 1.5*fast.TTFT90 {
		t.Errorf("at half the speed: got p90 %.3f, want 1.5 times %.3f at least", slow.TTFT90, fast.TTFT90)
	}
}

// turns are conversations of several turns after a common system prompt.
func turns() Workload {
	return Skew{Clients: 96, StartOver: 10, Shared: 1024, FirstMean: 3000, FirstSigma: 0.7, TurnMean: 800, TurnSigma: 0.7,
		OutputMean: 300, MinTurns: 2, MaxTurns: 8, Think: 1, Requests: 2000}.Workload("turns")
}

// Of what the default decides by on this load, replicas share all: without a delay they decide as one, request by request.
func TestReplicasWithoutDelayAreOne(t *testing.T) {
	if raceDetector {
		t.Skip("simulations of one goroutine each: run without the race detector")
	}
	run := func(c Conditions) []Result {
		report, err := Run(Options{Workload: turns(), Fleet: Fleet{Workers: 8, Ranks: 1, Engine: Dense70B(1_000_000)}, Policies: []string{"kv-aware"}, Seeds: []uint64{1, 2}, Conditions: c})
		if err != nil {
			t.Fatal(err)
		}
		runs := report.Rows[0].Runs
		for i := range runs {
			runs[i].TTFTError50, runs[i].TTFTError90, runs[i].ITLError50, runs[i].ITLError90 = 0, 0, 0, 0 // each replica predicts by its own requests
		}
		return runs
	}
	one := run(Conditions{})
	for _, c := range []struct {
		Conditions

		same bool
	}{
		{Conditions{Replicas: 3, ShareDelay: new(0.0)}, true},
		{Conditions{Replicas: 4, ShareDelay: new(0.0), Skew: 0.7}, true},
		{Conditions{Replicas: 3, ShareDelay: new(0.006)}, false},
	} {
		if got := run(c.Conditions); reflect.DeepEqual(got, one) != c.same {
			t.Errorf("%+v: got %+v, and with one replica %+v, want them equal: %v", c.Conditions, got, one, c.same)
		}
	}
}

// Replicas that share within the delay that was measured between real ones (docs/benchmarks.md) route as one, wherever
// requests arrive; those that share nothing do not. These are means over 16 runs: the CV of one run varies by a third.
func TestReplicasSpreadAsOne(t *testing.T) {
	if raceDetector {
		t.Skip("simulations of one goroutine each: run without the race detector")
	}
	var seeds []uint64
	for seed := range uint64(16) {
		seeds = append(seeds, seed+1)
	}
	run := func(c Conditions) Result {
		report, err := Run(Options{Workload: turns(), Fleet: Fleet{Workers: 8, Ranks: 1, Engine: Dense70B(1_000_000)}, Policies: []string{"session"}, Seeds: seeds, Conditions: c})
		if err != nil {
			t.Fatal(err)
		}
		return report.Rows[0].Mean
	}
	one := run(Conditions{})
	for _, c := range []struct {
		name string
		Conditions

		asOne bool
	}{
		{"3 replicas, 6 ms", Conditions{Replicas: 3, ShareDelay: new(0.006)}, true},
		{"4 replicas, 6 ms, 70 % of the requests at one", Conditions{Replicas: 4, ShareDelay: new(0.006), Skew: 0.7}, true},
		{"4 replicas, nothing shared", Conditions{Replicas: 4}, false},
	} {
		got := run(c.Conditions)
		hit, cv, p90 := got.Hit/one.Hit, got.CV/one.CV, got.TTFT90/one.TTFT90
		t.Logf("%s, of one replica's: hit rate %.3f, CV %.3f, TTFT p90 %.3f", c.name, hit, cv, p90)
		if asOne := hit >= 0.95 && cv <= 1.05 && p90 <= 1.05; asOne != c.asOne {
			t.Errorf("%s: got hit rate %.3f, CV %.3f and TTFT p90 %.3f of one replica's, want within 5 %%: %v", c.name, hit, cv, p90, c.asOne)
		}
	}
}

// Conversations that begin at different replicas faster than these hear of each other are spread nearly as by one replica.
func TestConversationsThatBeginTogether(t *testing.T) {
	if raceDetector {
		t.Skip("simulations of one goroutine each: run without the race detector")
	}
	var seeds []uint64
	for seed := range uint64(24) {
		seeds = append(seeds, seed+1)
	}
	cv := func(over float64, c Conditions) float64 {
		w := Skew{Clients: 80, StartOver: over, Shared: 320, FirstMean: 400, FirstSigma: 0.1, TurnMean: 100, TurnSigma: 0.1,
			OutputMean: 20, MinTurns: 6, MaxTurns: 6, Think: 0.01, Requests: 480}.Workload("together")
		report, err := Run(Options{Workload: w, Fleet: Fleet{Workers: 8, Ranks: 1, Engine: Dense70B(1_000_000)}, Policies: []string{"kv-aware"}, Seeds: seeds, Conditions: c})
		if err != nil {
			t.Fatal(err)
		}
		return report.Rows[0].Mean.CV
	}
	for _, replicas := range []int{3, 4} {
		one, several := 0.0, 0.0
		for _, over := range []float64{0, 0.02, 0.05, 0.1} { // seconds
			one += cv(over, Conditions{})
			several += cv(over, Conditions{Replicas: replicas, ShareDelay: new(0.006)})
		}
		if ratio := several / one; ratio > 1.3 {
			t.Errorf("%d replicas: got a CV of requests per engine of %.2f times one's, want at most 1.3", replicas, ratio)
		} else {
			t.Logf("%d replicas: the CV of requests per engine is %.2f times one's", replicas, ratio)
		}
	}
}

// Conversations that begin all the time, several within the delay of sharing, where most targets are busy: replicas do not all
// place them at the few that are idle.
func TestConversationsThatBeginAllTheTime(t *testing.T) {
	if raceDetector {
		t.Skip("simulations of one goroutine each: run without the race detector")
	}
	p90 := func(c Conditions) float64 {
		w := Skew{Clients: 192, StartOver: 0.5, Shared: 320, FirstMean: 3000, FirstSigma: 1, OutputMean: 5, MinTurns: 1, MaxTurns: 1, Think: 0.2, Requests: 2500}.Workload("begin")
		report, err := Run(Options{Workload: w, Fleet: Fleet{Workers: 64, Ranks: 1, Engine: Dense70B(1_000_000)}, Policies: []string{"kv-aware"}, Seeds: []uint64{1, 2, 3}, Conditions: c})
		if err != nil {
			t.Fatal(err)
		}
		return report.Rows[0].Mean.TTFT90
	}
	one := p90(Conditions{})
	for _, replicas := range []int{4, 8} {
		ratio := p90(Conditions{Replicas: replicas, ShareDelay: new(0.006)}) / one
		t.Logf("%d replicas: TTFT p90 is %.2f times one's", replicas, ratio)
		if ratio > 1.25 {
			t.Errorf("%d replicas: got a TTFT p90 of %.2f times one's, want at most 1.25", replicas, ratio)
		}
	}
}
