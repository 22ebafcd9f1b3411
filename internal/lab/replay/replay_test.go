package replay

import (
	"bytes"
	"compress/gzip"
	"io"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/routing"
)

// traceVariable names the environment variable with the path of Mooncake's
// conversation trace, gzipped JSON lines.
const traceVariable = "KVLANE_MOONCAKE_TRACE"

func openTrace() (io.ReadCloser, error) {
	f, err := os.Open(os.Getenv(traceVariable))
	if err != nil {
		return nil, err
	}
	return gzip.NewReader(f)
}

func readTrace(load float64) (Workload, error) {
	in, err := openTrace()
	if err != nil {
		return Workload{}, err
	}
	defer in.Close()
	return ReadMooncake(in, load, -1)
}

func needTrace(t testing.TB) {
	t.Helper()
	if os.Getenv(traceVariable) == "" {
		t.Skipf("%s is not set: the trace is not part of the project", traceVariable)
	}
}

func TestMooncakeConversations(t *testing.T) {
	needTrace(t)
	in, err := openTrace()
	if err != nil {
		t.Fatal(err)
	}
	w, err := ReadMooncake(in, 1, -1)
	if err != nil {
		t.Fatal(err)
	}
	requests := w.Generate(1)
	turns := map[string]int{}
	for i := range requests {
		turns[requests[i].Conversation]++
	}
	long := 0
	for _, n := range turns {
		if n > 1 {
			long++
		}
	}
	if len(requests) != 12031 || len(turns) != 8026 || long != 2059 {
		t.Errorf("%d requests, %d conversations, %d with several turns", len(requests), len(turns), long)
	}
}

// TestAcceptance runs the rows that need no trace and little time, with one seed; all of
// them, with five, if the environment variable KVLANE_REPLAY_ACCEPTANCE is set.
func TestAcceptance(t *testing.T) {
	rows, seeds := []string{"L3", "L11", "L18", "L19"}, []uint64{1}
	a := Acceptance{}
	if os.Getenv("KVLANE_REPLAY_ACCEPTANCE") != "" {
		rows, seeds = nil, []uint64{1, 2, 3, 4, 5}
		if os.Getenv(traceVariable) != "" {
			a.Trace = readTrace
		}
	}
	var err error
	if a.Scenarios, err = AcceptanceScenarios(rows...); err != nil {
		t.Fatal(err)
	}
	a.Seeds = seeds
	outcomes, without, err := a.Run()
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	failed, err := WriteOutcomes(&b, outcomes)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("\n%swithout a trace: %v", b.String(), without)
	if failed > 0 {
		t.Errorf("%d of %d checks do not hold", failed, len(outcomes))
	}
}

// TestSameSeedSameBytes runs every policy twice under bad conditions, with an open and a
// closed loop, on one processor and on all.
func TestSameSeedSameBytes(t *testing.T) {
	fleet := Fleet{Workers: 8, Ranks: 1, Engine: Dense70B(50_000)}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	for _, w := range []Workload{
		OneShot{Tenants: 5, System: 2000, Own: 500, Output: 50, PerSecond: 1}.Workload("open"),
		Skew{Clients: 6, StartOver: 5, Shared: 512, FirstMean: 800, FirstSigma: 0.5, TurnMean: 200, TurnSigma: 0.5, OutputMean: 50, MinTurns: 2, MaxTurns: 6, Think: 1, Requests: 80}.Workload("closed"),
	} {
		var out [2]bytes.Buffer
		for i := range out {
			runtime.GOMAXPROCS(1 + 3*i)
			report, err := Run(Options{Workload: w, Fleet: fleet, Policies: policyNames(), Seeds: []uint64{7, 8},
				Conditions: Conditions{EventDelay: 0.2, EventLoss: 0.05, Replicas: 2, ShareDelay: new(0.05)}})
			if err != nil {
				t.Fatal(err)
			}
			for _, write := range []func(io.Writer) error{report.WriteJSON, report.WriteTable, report.WriteHTML} {
				if err := write(&out[i]); err != nil {
					t.Fatal(err)
				}
			}
		}
		if !bytes.Equal(out[0].Bytes(), out[1].Bytes()) {
			t.Errorf("%s: the reports differ", w.Name)
		}
	}
}

func TestBadInput(t *testing.T) {
	for name, trace := range map[string]string{
		"no JSON":         "x\n",
		"nothing":         "",
		"empty prompt":    `{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}`,
		"negative output": `{"timestamp": 0, "input_length": 1, "output_length": -1, "hash_ids": []}`,
	} {
		if _, err := ReadMooncake(strings.NewReader(trace), 1, 0); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}
	w := OneShot{Tenants: 1, Own: 100, Output: 5, PerSecond: 1}.Workload("small")
	fleet := Fleet{Workers: 1, Ranks: 1, Engine: Dense70B(50_000)}
	for name, o := range map[string]Options{
		"no rank":        {Workload: w, Policies: []string{"random"}, Seeds: []uint64{1}},
		"no seed":        {Workload: w, Fleet: fleet, Policies: []string{"random"}},
		"unknown policy": {Workload: w, Fleet: fleet, Policies: []string{"best"}, Seeds: []uint64{1}},
	} {
		if _, err := Run(o); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}
}

// policyNames lists the names that PolicyByName accepts.
func policyNames() []string {
	return slices.Sorted(slices.Values(slices.Concat(routing.Presets(), slices.Collect(maps.Keys(variants)), slices.Collect(maps.Keys(poolRules)))))
}
