package replay

import (
	"fmt"
	"io"
	"math"
	"text/tabwriter"
)

// Check is one number that the default policy must reach, always against a policy run
// in the same simulator with the same seeds.
type Check struct {
	// Row is its number in the list of acceptance rows.
	Row      string  `json:"row"`
	What     string  `json:"what"`
	Measured float64 `json:"measured"`
	Bound    float64 `json:"bound"`
	// AtMost says that Measured must not exceed Bound; else it must reach it.
	AtMost bool `json:"atMost"`
}

// OK tells whether the check holds.
func (c *Check) OK() bool {
	if c.AtMost {
		return c.Measured <= c.Bound
	}
	return c.Measured >= c.Bound
}

// WriteChecks writes measured against bound, one line a check, and returns how many
// do not hold.
func WriteChecks(out io.Writer, checks []Check) (int, error) {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	failed := 0
	for i := range checks {
		c := &checks[i]
		relation, verdict := ">=", "ok"
		if c.AtMost {
			relation = "<="
		}
		if !c.OK() {
			verdict = "FAILED"
			failed++
		}
		fmt.Fprintf(w, "%s\t%s\t%.3f\t%s %.3f\t%s\n", c.Row, c.What, c.Measured, relation, c.Bound, verdict)
	}
	return failed, w.Flush()
}

// Acceptance runs the acceptance rows. Trace opens Mooncake's conversation trace; nil
// leaves out the rows that need it. Rows, if not empty, selects.
type Acceptance struct {
	Trace    func() (io.ReadCloser, error)
	Seeds    []uint64
	Rows     map[string]bool
	Progress func(policy string, seed uint64)
}

// bench runs policies on one workload and keeps the means.
type bench struct {
	a      *Acceptance
	w      Workload
	fleet  Fleet
	cond   Conditions
	done   map[string]*Result
	failed error
}

func (a *Acceptance) bench(w Workload) *bench {
	return &bench{a: a, w: w, fleet: w.Fleet, done: map[string]*Result{}}
}

// of returns a policy's means; zero after a failure, which run reports.
func (b *bench) of(policy string) *Result {
	if r := b.done[policy]; r != nil {
		return r
	}
	r := new(Result)
	report, err := Run(Options{Workload: b.w, Fleet: b.fleet, Policies: []string{policy}, Seeds: b.a.Seeds, Conditions: b.cond, Progress: b.a.Progress})
	if err != nil {
		b.failed = err
	} else {
		r = &report.Rows[0].Mean
	}
	b.done[policy] = r
	return r
}

// best is the least p90 among policies.
func (b *bench) best(policies ...string) float64 {
	least := math.Inf(1)
	for _, p := range policies {
		least = min(least, b.of(p).TTFT90)
	}
	return least
}

// others are the rules that the default is compared with: presets and modelled peers.
var others = []string{"session", "llm-d", "trt-plain", "kv-aware-trt", "conversation-rank", "compute-and-resident", "least-tokens"}

// acceptanceRow makes the checks of one row.
type acceptanceRow struct {
	name  string
	trace bool
	run   func(a *Acceptance) ([]Check, *bench)
}

// Run returns the checks in the order of their rows.
func (a *Acceptance) Run() ([]Check, error) {
	var checks []Check
	for _, row := range acceptanceRows {
		if (len(a.Rows) > 0 && !a.Rows[row.name]) || (row.trace && a.Trace == nil) {
			continue
		}
		got, b := row.run(a)
		if b.failed != nil {
			return nil, fmt.Errorf("%s: %w", row.name, b.failed)
		}
		for i := range got {
			got[i].Row = row.name
		}
		checks = append(checks, got...)
	}
	return checks, nil
}

func atMost(what string, measured, bound float64) Check {
	return Check{What: what, Measured: measured, Bound: bound, AtMost: true}
}

func atLeast(what string, measured, bound float64) Check {
	return Check{What: what, Measured: measured, Bound: bound}
}

// trace prepares a row on the trace.
func (a *Acceptance) trace(load float64, fleet Fleet) *bench {
	b := a.bench(Workload{})
	in, err := a.Trace()
	if err != nil {
		b.failed = err
		return b
	}
	defer in.Close()
	b.w, b.failed = ReadMooncake(in, load, -1)
	b.fleet = fleet
	return b
}

func eight(capacity int) Fleet { return Fleet{Workers: 8, Ranks: 1, Engine: Dense70B(capacity)} }

func eightByEight() Fleet {
	e := ExpertRank(600_000)
	e.Budget = 2048
	return Fleet{Workers: 8, Ranks: 8, Coupled: true, Engine: e}
}

var acceptanceRows = []acceptanceRow{
	{"L1", false, func(a *Acceptance) ([]Check, *bench) {
		b := a.bench(ConversationSkew())
		trt, kv, bind := b.of("trt-plain"), b.of("kv-aware"), b.of("conversation-rank")
		return []Check{
			atLeast("trt-plain: CV", trt.CV, 0.35),
			atMost("trt-plain: emptiest rank of the mean", trt.MinMean, 0.20),
			atMost("kv-aware: CV", kv.CV, 0.12),
			atMost("kv-aware: max/min", kv.MaxMin, 1.5),
			atLeast("kv-aware: hit rate against trt-plain", kv.Hit-trt.Hit, -0.005),
			atMost("kv-aware: TTFT p95 of trt-plain's", kv.TTFT95/trt.TTFT95, 0.88),
			atLeast("kv-aware: throughput of trt-plain's", kv.Throughput/trt.Throughput, 1.04),
			atMost("conversation-rank: CV", bind.CV, 0.06),
			atMost("conversation-rank: max/min", bind.MaxMin, 1.2),
		}, b
	}},
	{"L2", false, func(a *Acceptance) ([]Check, *bench) {
		b := a.bench(ConversationSkew())
		b.fleet.Engine.Capacity = 700_000
		trt, kv := b.of("trt-plain"), b.of("kv-aware")
		return []Check{
			atLeast("kv-aware: hit rate over trt-plain", kv.Hit-trt.Hit, 0.05),
			atLeast("kv-aware: throughput of trt-plain's", kv.Throughput/trt.Throughput, 1.5),
		}, b
	}},
	{"L3", false, func(a *Acceptance) ([]Check, *bench) {
		b := a.bench(StarvedRanks())
		first, gated, trt, kv := b.of("trt-plain-lowest"), b.of("trt-gate-lowest"), b.of("trt-gate"), b.of("kv-aware")
		return []Check{
			atMost("trt-plain, lowest index: min/mean", first.MinMean, 0.01),
			atMost("the gate alone: min/mean", gated.MinMean, 0.01),
			atLeast("gate and random ties: min/mean", trt.MinMean, 0.50),
			atLeast("kv-aware: min/mean", kv.MinMean, 0.80),
			atLeast("kv-aware: hit rate against trt-plain, lowest", kv.Hit-first.Hit, -0.005),
			atMost("kv-aware: p90 of trt-plain's, lowest", kv.TTFT90/first.TTFT90, 0.92),
		}, b
	}},
	{"L4", true, func(a *Acceptance) ([]Check, *bench) {
		var checks []Check
		var b *bench
		for _, tc := range []struct{ load, oracle float64 }{{2.5, 1.25}, {3, 1.5}} {
			if b = a.trace(tc.load, eight(3_000_000)); b.failed != nil {
				return nil, b
			}
			kv := b.of("kv-aware")
			checks = append(checks,
				atMost(fmt.Sprintf("x%g: p90 of the best other", tc.load), kv.TTFT90/b.best(others...), 0.85),
				atMost(fmt.Sprintf("x%g: p90 of the oracle's", tc.load), kv.TTFT90/b.of("oracle").TTFT90, tc.oracle),
				atLeast(fmt.Sprintf("x%g: hit rate of the ceiling", tc.load), kv.Hit/kv.Ceiling, 0.80))
			if b.failed != nil {
				return nil, b
			}
		}
		return checks, b
	}},
	{"L5", true, func(a *Acceptance) ([]Check, *bench) {
		var checks []Check
		var b *bench
		for _, capacity := range []int{500_000, 3_000_000} {
			if b = a.trace(1, eight(capacity)); b.failed != nil {
				return nil, b
			}
			kv := b.of("kv-aware")
			checks = append(checks, atMost(fmt.Sprintf("%d tokens: p90 of the best of all", capacity),
				kv.TTFT90/b.best(append([]string{"min-wait", "load-balancing", "kv-aware"}, others...)...), 1.08))
			if capacity == 3_000_000 {
				checks = append(checks, atLeast("hit rate of the ceiling", kv.Hit/kv.Ceiling, 0.88))
			}
		}
		return checks, b
	}},
	{"L6", true, func(a *Acceptance) ([]Check, *bench) {
		b := a.trace(2.2, eight(500_000))
		if b.failed != nil {
			return nil, b
		}
		return []Check{atMost("p90 of the best other", b.of("kv-aware").TTFT90/b.best(append([]string{"min-wait", "load-balancing"}, others...)...), 0.88)}, b
	}},
	{"L7", true, func(a *Acceptance) ([]Check, *bench) {
		b := a.trace(4, eightByEight())
		if b.failed != nil {
			return nil, b
		}
		kv, session, trt := b.of("kv-aware"), b.of("session"), b.of("kv-aware-trt")
		checks := []Check{
			atMost("x4: p90 of session's", kv.TTFT90/session.TTFT90, 0.9),
			atMost("x4: p90 of kv-aware-trt's", kv.TTFT90/trt.TTFT90, 0.65),
			atMost("x4: ITL p50 of session's", kv.ITL50/session.ITL50, 0.65),
			atMost("x4: CV", kv.CV, 0.15),
		}
		if b.failed != nil {
			return nil, b
		}
		if b = a.trace(1, eightByEight()); b.failed != nil {
			return nil, b
		}
		return append(checks, atMost("x1: CV", b.of("kv-aware").CV, 0.15), atLeast("x1: CV of trt-plain", b.of("trt-plain").CV, 0.5)), b
	}},
	{"L8", true, func(a *Acceptance) ([]Check, *bench) {
		b := a.trace(2.5, eight(3_000_000))
		if b.failed != nil {
			return nil, b
		}
		perfect := b.of("kv-aware").TTFT90
		var checks []Check
		for _, tc := range []struct {
			what  string
			cond  Conditions
			bound float64
		}{
			{"events 50 ms late: p90", Conditions{EventDelay: 0.05}, 1.03},
			{"events 500 ms late: p90", Conditions{EventDelay: 0.5}, 1.03},
			{"1 % of the batches lost: p90", Conditions{EventLoss: 0.01}, 1.08},
			{"1 % of the batches lost, replayed after 1 s: p90", Conditions{EventLoss: 0.01, EventReplay: 1}, 1.02},
		} {
			c := *b
			c.cond, c.done = tc.cond, map[string]*Result{}
			checks = append(checks, atMost(tc.what, c.of("kv-aware").TTFT90/perfect, tc.bound))
			b.failed = c.failed
		}
		return checks, b
	}},
	{"L9", true, func(a *Acceptance) ([]Check, *bench) {
		b := a.trace(2.5, eight(3_000_000))
		if b.failed != nil {
			return nil, b
		}
		perfect := b.of("kv-aware").TTFT90
		var checks []Check
		for _, n := range []int{2, 4} {
			for _, tc := range []struct {
				what         string
				share        bool
				delay, bound float64
			}{
				{"nothing shared (no bound)", false, 0, math.Inf(1)},
				{"bookings shared within 10 ms", true, 0.01, 1.10},
				{"bookings shared within 100 ms", true, 0.1, 1.25},
			} {
				c := *b
				c.cond, c.done = Conditions{Replicas: n, Share: tc.share, ShareDelay: tc.delay}, map[string]*Result{}
				checks = append(checks, atMost(fmt.Sprintf("%d replicas, %s: p90", n, tc.what), c.of("kv-aware").TTFT90/perfect, tc.bound))
				b.failed = c.failed
			}
		}
		return checks, b
	}},
	{"L10", false, func(a *Acceptance) ([]Check, *bench) {
		one := a.bench(OneShot{Tenants: 50, System: 8000, Own: 1000, Output: 250, PerSecond: 40, Capacity: 300_000}.Workload("50 tenants"))
		checks := []Check{atMost("50 tenants: p90", one.of("kv-aware").TTFT90, 1), atLeast("50 tenants: p90 of least-tokens", one.of("least-tokens").TTFT90, 100)}
		if one.failed != nil {
			return nil, one
		}
		three := a.bench(OneShot{Tenants: 150, System: 6000, Own: 1200, Output: 250, PerSecond: 30, Capacity: 200_000}.Workload("150 tenants"))
		checks = append(checks, atMost("150 tenants: p90", three.of("kv-aware").TTFT90, 1), atLeast("150 tenants: p90 of least-tokens", three.of("least-tokens").TTFT90, 100))
		if three.failed != nil {
			return nil, three
		}
		two := a.bench(OneShot{Tenants: 50, System: 8000, Own: 1000, Output: 250, PerSecond: 60, Capacity: 300_000}.Workload("overload"))
		kv := two.of("kv-aware").Throughput
		return append(checks, atLeast("overload: throughput of least-tokens'", kv/two.of("least-tokens").Throughput, 2),
			atLeast("overload: throughput of greedy's", kv/two.of("greedy").Throughput, 1.02)), two
	}},
	{"L11", false, func(a *Acceptance) ([]Check, *bench) {
		b := a.bench(OneShot{Tenants: 1, System: 8000, Own: 500, Output: 200, PerSecond: 70, Capacity: 500_000}.Workload("hot prefix"))
		kv := b.of("kv-aware")
		return []Check{
			atMost("p90 of least-tokens'", kv.TTFT90/b.of("least-tokens").TTFT90, 1.3),
			atMost("CV", kv.CV, 0.05),
			atLeast("p90 without the price of a request", b.of("kv-aware-no-active").TTFT90/kv.TTFT90, 10),
		}, b
	}},
	{"L12", false, func(a *Acceptance) ([]Check, *bench) {
		b := a.bench(Siblings(0.3))
		kv, without := b.of("kv-aware"), b.of("kv-aware-no-credit")
		return []Check{
			atMost("prefix computed, times", kv.Copies, 2),
			atLeast("prefix computed without credit, times", without.Copies, 6),
			atMost("others' p95 of that without credit", kv.Others95/without.Others95, 0.7),
		}, b
	}},
	{"L13", false, func(a *Acceptance) ([]Check, *bench) {
		b := a.bench(OneShot{Tenants: 1, System: 0, Own: 6000, Output: 250, PerSecond: 19, Capacity: 500_000}.Workload("no reuse"))
		kv := b.of("kv-aware").TTFT90
		return []Check{
			atMost("p90 of least-tokens'", kv/b.of("least-tokens").TTFT90, 1.1),
			atMost("p90 of load-balancing's", kv/b.of("load-balancing").TTFT90, 1),
			atMost("p90 of round-robin's", kv/b.of("round-robin").TTFT90, 1),
		}, b
	}},
	{"L14", true, func(a *Acceptance) ([]Check, *bench) {
		b := a.trace(1.4, eight(500_000))
		var checks []Check
		for _, prefill := range []int{3, 4, 5} {
			if b.failed != nil {
				return nil, b
			}
			c := *b
			c.fleet.Prefill, c.done = prefill, map[string]*Result{}
			best := math.Inf(1)
			for _, rule := range []string{"pools-threshold-0", "pools-threshold-1024", "pools-threshold-4096", "pools-threshold-8192", "pools-threshold-16384"} {
				best = min(best, c.of(rule).E2E90)
			}
			shape := fmt.Sprintf("%d prefill, %d decode", prefill, 8-prefill)
			checks = append(checks, atMost(shape+": end-to-end p90 of the best threshold's", c.of("pools").E2E90/best, 1.1),
				atMost(shape+": TTFT p90 of threshold 4096's", c.of("pools").TTFT90/c.of("pools-threshold-4096").TTFT90, 0.95))
			b.failed = c.failed
		}
		return checks, b
	}},
}
