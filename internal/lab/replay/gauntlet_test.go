package replay

import (
	"bytes"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// TestGauntletResumes runs a gauntlet whole, and again with a cell missing: the tables must be
// the same, and only that cell is run.
func TestGauntletResumes(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	dir := filepath.Join(t.TempDir(), "results")
	args := []string{"--gauntlet", "--quick", "--families", "rl", "--policies", "kv-aware,lmetric,oracle", "--seeds", "1", "--results", dir}
	run := func(processors int, want ...string) string {
		t.Helper()
		runtime.GOMAXPROCS(processors)
		var out, progress bytes.Buffer
		if err := Command(args, &out, &progress); err != nil {
			t.Fatal(err)
		}
		for i, line := range strings.Split(strings.TrimSpace(progress.String()), "\n") {
			if i >= len(want) || !strings.HasPrefix(line, want[i]) {
				t.Errorf("progress line %d: got %q, want %q", i, line, want)
			}
		}
		return out.String()
	}
	first := run(1, "1/2 rl 80 % (", "2/2 rl 95 % (")
	files, err := filepath.Glob(filepath.Join(dir, "rl-95*.json"))
	if err != nil || len(files) != 1 {
		t.Fatalf("got files %v (%v), want one of the cell at 95 %%", files, err)
	}
	if err := os.Remove(files[0]); err != nil {
		t.Fatal(err)
	}
	if second := run(4, "1/2 rl 80 %, known (", "2/2 rl 95 % ("); second != first {
		t.Errorf("after a resume got\n%s\nwant\n%s", second, first)
	}
	for _, want := range []string{"Its worst cell:", "| lmetric |", "## rl 80 % (8 ranks)", "arXiv 2603.15202"} {
		if !strings.Contains(first, want) {
			t.Errorf("got no %q in\n%s", want, first)
		}
	}
	if err := os.WriteFile(files[0], []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Command(args, io.Discard, io.Discard); err == nil {
		t.Error("got no error for a cell's file that is cut off, want one")
	}
}

func TestGauntletFlags(t *testing.T) {
	for _, args := range []string{"--quick", "--results x", "--gauntlet --families none", "--gauntlet --workers 3", "--gauntlet --sweep", "--gauntlet --policies best"} {
		if err := Command(strings.Fields(args), io.Discard, io.Discard); err == nil {
			t.Errorf("%s: got no error, want one", args)
		}
	}
}

// TestGauntletBound holds the aim for the default in the quick gauntlet, without agents and with
// the strongest rules. docs/gauntlet.md tells where the aim is missed.
func TestGauntletBound(t *testing.T) {
	if raceDetector {
		t.Skip("80 simulations: 'make test' runs them without the race detector")
	}
	g := Gauntlet{Quick: true, Seeds: []uint64{1}, Families: []string{"chat", "tenants", "batch", "rl", "mix"}}
	for _, r := range Rules() {
		if slices.Contains([]string{"kv-aware", "session", "min-wait", "llm-d", "dynamo-agentic", "lmetric", "preble-e2", "kv-aware-trt"}, r.Policy) {
			g.Rules = append(g.Rules, r)
		}
	}
	o, err := g.Run()
	if err != nil {
		t.Fatal(err)
	}
	mean, own, ok := o.Bound()
	if !ok {
		t.Fatal("got no default among the rules")
	}
	for _, line := range o.verdict() {
		t.Log(line)
	}
	if mean > aimMean || own.Worst > aimWorst {
		t.Errorf("got a geometric mean of %.3f and %.2f in %s, want at most %.2f and %.2f", mean, own.Worst, own.At, aimMean, aimWorst)
	}
}

// The page shows names as text.
func TestGauntletPage(t *testing.T) {
	row := Row{Policy: "<script>", Mean: Result{TTFT90: 2, Jain: 0.5}}
	own := Row{Policy: "kv-aware", Mean: Result{TTFT90: 1}}
	o := Outcomes{Rules: []Rule{{Policy: row.Policy, Source: "<img>"}, {Policy: own.Policy}}, Seeds: []uint64{1}, Cells: []*Report{{Workload: "a & b", Rows: []Row{row, own}}}}
	var page bytes.Buffer
	if err := o.WriteHTML(&page); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"<script", "<img", "a & b"} {
		if strings.Contains(page.String(), bad) {
			t.Errorf("got %q in the page, want it escaped", bad)
		}
	}
	if !strings.Contains(page.String(), "geometric mean of TTFT p90 1.000 of the best") {
		t.Errorf("got no verdict in %s", page.String())
	}
}

// TestStandings compares two rules over two cells. The oracle, which bounds both, has no place among them.
func TestStandings(t *testing.T) {
	cell := func(name string, a, b, oracle float64) *Report {
		r := &Report{Workload: name}
		for _, v := range []float64{a, b, oracle} {
			r.Rows = append(r.Rows, Row{Mean: Result{TTFT50: 1, TTFT90: v, TTFT99: 1, ITL50: 1, Throughput: 100 / v, Goodput: 0}})
		}
		r.Rows[1].Policy = "b"
		return r
	}
	o := Outcomes{Rules: []Rule{{Policy: "kv-aware"}, {Policy: "b"}, {Policy: "oracle", Bound: true}}, Cells: []*Report{cell("one", 2, 1, 0.5), cell("two", 1, 8, 0.5)}}
	mean, own, ok := o.Bound()
	if !ok || mean != 1 || own.Worst != 2 || own.At != "one" || own.Best != "b" {
		t.Errorf("got %v, worst %v in %q of %q, want the best with 2 in cell one of b", mean, own.Worst, own.At, own.Best)
	}
	if got := own.Means[4]; got < 0.7 || got > 0.71 { // throughput: 0.5 and 1
		t.Errorf("got throughput %v of the best, want 0.707", got)
	}
	if got := own.Means[5]; got != 1 {
		t.Errorf("got goodput %v where no rule had any, want 1", got)
	}
}

// A rule that refuses requests is not the best of a cell, whatever the times of those it served.
func TestStandingsWithRefusals(t *testing.T) {
	rows := []Row{{Policy: "kv-aware", Mean: Result{TTFT90: 2}}, {Policy: "b", Mean: Result{TTFT90: 1, Refused: 3}}, {Policy: "c", Mean: Result{TTFT90: 3}}}
	o := Outcomes{Rules: []Rule{{Policy: "kv-aware"}, {Policy: "b"}, {Policy: "c"}}, Cells: []*Report{{Workload: "one", Rows: rows}}}
	if mean, own, ok := o.Bound(); !ok || mean != 1 || own.Worst != 1 || own.Best != "kv-aware" {
		t.Errorf("got %v and %v of %q, want 1 and 1 of the default's own", mean, own.Worst, own.Best)
	}
	if s := o.Standings()[1]; s.Rule.Policy != "b" || s.Means[0] != 1 || s.Refused != 3 {
		t.Errorf("got %s second with a mean of %v and %v refused, want b with 1 and 3", s.Rule.Policy, s.Means[0], s.Refused)
	}
}

// Bounds alone have standings too.
func TestStandingsOfBounds(t *testing.T) {
	o := Outcomes{Rules: []Rule{{Policy: "oracle", Bound: true}}, Cells: []*Report{{Rows: []Row{{Mean: Result{TTFT90: 2}}}}}}
	if got := o.Standings(); len(got) != 1 || got[0].Means[0] != 1 {
		t.Errorf("got %+v, want one with a mean of 1", got)
	}
}

// TestAgentStatistics compares the generated agents with the published statistics.
func TestAgentStatistics(t *testing.T) {
	g := &sessions{rng: rand.New(rand.NewPCG(1, 2))}
	var turns, last, gaps, outputs []float64
	spawned := 0
	for range 600 {
		first := agent(g)[0]
		n, prompt, subs := 0, 0, false
		var all func(t *turn)
		all = func(t *turn) {
			if t.Conversation == first.Conversation {
				n, prompt = n+1, t.Prompt
			} else {
				subs = true
			}
			if t != first {
				gaps = append(gaps, t.gap)
			}
			outputs = append(outputs, float64(t.Output))
			for _, next := range t.next {
				if next.before--; next.before == 0 {
					all(next)
				}
			}
		}
		all(first)
		turns, last = append(turns, float64(n)), append(last, float64(prompt))
		if subs {
			spawned++
		}
	}
	for _, v := range [][]float64{turns, last, gaps} {
		slices.Sort(v)
	}
	sum := 0.0
	for _, v := range outputs {
		sum += v
	}
	under := func(limit float64) float64 {
		n, _ := slices.BinarySearch(gaps, limit)
		return float64(n) / float64(len(gaps))
	}
	for _, c := range []struct {
		what           string
		got, low, high float64
	}{
		{"turns, median", percentile(turns, 0.5), 36, 50},
		{"context at the end, median", percentile(last, 0.5), 110_000, 170_000},
		{"output of a turn, mean", sum / float64(len(outputs)), 400, 490},
		{"part with subagents", float64(spawned) / 600, 0.37, 0.51},
		{"gaps below 1 s", under(1), 0.84, 0.88},
		{"gaps below 10 s", under(10), 0.93, 0.97},
	} {
		if c.got < c.low || c.got > c.high {
			t.Errorf("%s: got %.3g, want %.3g to %.3g", c.what, c.got, c.low, c.high)
		}
	}
}

// TestReadingStatistics compares generated questions about documents with the published lengths.
func TestReadingStatistics(t *testing.T) {
	g := &sessions{rng: rand.New(rand.NewPCG(1, 2))}
	documents := map[uint64]float64{}
	questions, answers := 0.0, 0.0
	for range 20_000 {
		for t := reading(g); len(t) > 0; t = t[0].next {
			questions, answers = questions+1, answers+float64(t[0].Output)
			if t[0].before == 0 {
				documents[t[0].Blocks[0]] = float64(t[0].Prompt)
			}
		}
	}
	mean, squares := 0.0, 0.0
	for _, length := range documents {
		mean, squares = mean+length, squares+length*length
	}
	n := float64(len(documents))
	mean /= n
	for _, c := range []struct {
		what           string
		got, low, high float64
	}{
		{"documents that were read", n, 770, 776},
		{"length, mean", mean, 23_000, 24_000},
		{"length, deviation", math.Sqrt(squares/n - mean*mean), 5_900, 6_300},
		{"questions of a reader", questions / 20_000, 8, 8.7},
		{"answer, mean", answers / questions, 15, 17},
	} {
		if c.got < c.low || c.got > c.high {
			t.Errorf("%s: got %.6g, want %.6g to %.6g", c.what, c.got, c.low, c.high)
		}
	}
}

// Families that are held out are run only on purpose.
func TestHeldOut(t *testing.T) {
	for _, judging := range []bool{false, true} {
		cells, err := (&Gauntlet{Quick: true, HeldOut: judging}).cells()
		if err != nil {
			t.Fatal(err)
		}
		held := slices.ContainsFunc(cells, func(c cell) bool { return strings.HasPrefix(c.name, "completion") })
		if ordinary := slices.ContainsFunc(cells, func(c cell) bool { return strings.HasPrefix(c.name, "reading") }); held != judging || !ordinary {
			t.Errorf("held out %v: got completion %v and reading %v", judging, held, ordinary)
		}
	}
}

// Agents whose contexts are twice the memory: admitted whole they do not evict each other's, and
// where contexts fill half of it they lose at most 1 % of the default's figures, on every seed.
func TestProgramsAdmittedWhole(t *testing.T) {
	f := &families[1]
	fleet := Fleet{Workers: 3, Ranks: 1, Engine: Dense70B(400_000)}
	d := f.demand(&fleet.Engine)
	run := func(sessions float64, seeds ...uint64) []Row {
		t.Helper()
		report, err := Run(Options{Workload: f.workload(&fleet, d, sessions*d.work/3/d.lasts), Fleet: fleet, Seeds: seeds, Policies: []string{"kv-aware", "kv-aware-programs"}})
		if err != nil {
			t.Fatal(err)
		}
		return report.Rows
	}
	rows := run(32, 1)
	plain, whole := rows[0].Mean, rows[1].Mean
	if whole.Throughput < 1.5*plain.Throughput || whole.TTFT50 > plain.TTFT50/5 || whole.Jain < 0.95 {
		t.Errorf("got %.0f tokens/s, p50 %.2f s, Jain %.2f, want 1.5 times %.0f, a fifth of %.2f, 0.95", whole.Throughput, whole.TTFT50, whole.Jain, plain.Throughput, plain.TTFT50)
	}
	seeds := []uint64{1, 2, 3, 101, 102, 103}
	rows = run(6, seeds...)
	for i := range seeds {
		if ample, same := rows[0].Runs[i], rows[1].Runs[i]; same.Throughput < 0.99*ample.Throughput || same.TTFT90 > 1.01*ample.TTFT90 {
			t.Errorf("with ample memory, seed %d: got %.0f tokens/s and p90 %.2f s, want at most 1 %% worse than %.0f and %.2f",
				seeds[i], same.Throughput, same.TTFT90, ample.Throughput, ample.TTFT90)
		}
	}
}
