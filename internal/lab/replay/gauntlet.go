package replay

import (
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

// Gauntlet runs all rules on all families of workloads, fleets and loads.
type Gauntlet struct {
	// Quick takes fewer cells on a smaller fleet. HeldOut adds the families that are for judging only.
	Quick, HeldOut bool
	Rules          []Rule
	Seeds          []uint64
	// Families limits the families by name; none means all.
	Families []string
	// Trace, if not nil, is one more family. TraceName identifies its content, so that results of another trace are not reused.
	Trace     TraceReader
	TraceName string
	// Results is a folder with a file for each cell that has been run by this binary with the
	// same rules and seeds; these are not run again. "" keeps none.
	Results string
	// Progress, if not nil, is called before every cell, from 1 to cells, and not
	// concurrently; known cells are read from Results.
	Progress func(cell string, number, cells int, known bool)
}

// cell is a workload at a load on a fleet.
type cell struct {
	name     string
	fleet    Fleet
	workload func() (Workload, error)
}

// gauntletCapacity is the KV cache of a rank in tokens: a device's and some of its host's.
const gauntletCapacity = 1_000_000

// fleetShape is a variant of the gauntlet's fleet.
type fleetShape struct {
	name   string
	change func(f *Fleet)
}

var fleetShapes = []fleetShape{
	{"4 ranks", func(f *Fleet) { f.Workers = 4 }},
	{"64 ranks", func(f *Fleet) { f.Workers = 64 }},
	{"4x4 coupled", func(f *Fleet) { f.Workers, f.Ranks, f.Coupled = 4, 4, true }},
	{"two speeds", func(f *Fleet) { f.Slow = f.Workers / 2 }},
	{"one lost", func(f *Fleet) { f.Change.Lost = 160 }},
	{"one added", func(f *Fleet) { f.Change.Added = 160 }},
	{"tight memory", func(f *Fleet) { f.Engine.Capacity = 400_000 }},
}

// shaped are the families that run on all shapes; the others run on one.
var shaped = []string{"chat", "agents", "mix"}

// cells lists what is run, in order.
func (g *Gauntlet) cells() ([]cell, error) {
	base := Fleet{Workers: 16, Ranks: 1, Engine: Dense70B(gauntletCapacity)}
	loads := []float64{0.5, 0.8, 0.95, 1.1}
	if g.Quick {
		base.Workers, loads = 8, []float64{0.8, 0.95}
	}
	for _, name := range g.Families {
		if err := isFamily(name); err != nil {
			return nil, err
		}
	}
	var out []cell
	for i := range families {
		f := &families[i]
		if (f.heldOut && !g.HeldOut) || (len(g.Families) > 0 && !slices.Contains(g.Families, f.name)) {
			continue
		}
		d := sync.OnceValue(func() demand { return f.demand(&base.Engine) })
		at := func(fleet Fleet, load float64, shape string) {
			out = append(out, cell{name: fmt.Sprintf("%s %.0f %%%s", f.name, 100*load, shape), fleet: fleet,
				workload: func() (Workload, error) { return f.workload(&fleet, d(), load), nil }})
		}
		for _, load := range loads {
			at(base, load, "")
		}
		if g.Quick || !slices.Contains(shaped, f.name) {
			continue
		}
		for _, shape := range fleetShapes {
			fleet := base
			shape.change(&fleet)
			at(fleet, 0.8, ", "+shape.name)
		}
	}
	if g.Trace == nil {
		return out, nil
	}
	w, err := g.Trace(1)
	if err != nil {
		return nil, err
	}
	full := traceCapacity(&w, &base)
	for _, load := range loads {
		out = append(out, cell{name: fmt.Sprintf("trace %.0f %%", 100*load), fleet: base, workload: func() (Workload, error) { return g.Trace(load * full) }})
	}
	return out, nil
}

// traceCapacity returns how much faster than recorded a trace must arrive to keep a fleet busy, at the hit rate of one
// cache with a quarter to half of the fleet's memory: the rest holds copies and running requests. Two generations of
// blocks approximate LRU.
func traceCapacity(w *Workload, fleet *Fleet) float64 {
	requests := w.Generate(0)
	slices.SortFunc(requests, func(a, b Request) int { return cmp.Compare(a.At, b.At) })
	ranks := fleet.Workers * fleet.Ranks
	fresh, old := map[uint64]bool{}, map[uint64]bool{}
	work := 0.0
	for i := range requests {
		r := &requests[i]
		known := 0
		for known < len(r.Blocks) && (fresh[r.Blocks[known]] || old[r.Blocks[known]]) {
			known++
		}
		work += fleet.Engine.cost(r, min(known*w.BlockSize, r.Prompt-1))
		if len(fresh) > ranks*fleet.Engine.Capacity/w.BlockSize/4 {
			fresh, old = map[uint64]bool{}, fresh
		}
		for _, b := range r.Blocks {
			fresh[b] = true
		}
	}
	return float64(ranks) * max(requests[len(requests)-1].At-requests[0].At, 1e-3) / work
}

// Outcomes is what the gauntlet measured.
type Outcomes struct {
	Rules []Rule    `json:"rules"`
	Seeds []uint64  `json:"seeds"`
	Cells []*Report `json:"cells"`
}

// Run runs the cells one after the other, the rules and seeds of a cell concurrently. The
// outcomes do not depend on which cells were known.
func (g *Gauntlet) Run() (*Outcomes, error) {
	cells, err := g.cells()
	if err != nil {
		return nil, err
	}
	out := &Outcomes{Rules: g.Rules, Seeds: g.Seeds}
	policies := make([]string, len(g.Rules))
	for i := range g.Rules {
		policies[i] = g.Rules[i].Policy
	}
	var binary [sha256.Size]byte
	if g.Results != "" {
		if binary, err = hashOfBinary(); err != nil {
			return nil, err
		}
	}
	for n, c := range cells {
		key := sha256.Sum256(fmt.Append(nil, binary, c.name, c.fleet, policies, g.Seeds, g.TraceName))
		path := filepath.Join(g.Results, fmt.Sprintf("%s-%x.json", strings.NewReplacer(" ", "-", "%", "", ",", "").Replace(c.name), key[:6]))
		var report *Report
		if g.Results != "" {
			if report, err = readReport(path); err != nil {
				return nil, err
			}
		}
		if g.Progress != nil {
			g.Progress(c.name, n+1, len(cells), report != nil)
		}
		if report == nil {
			if report, err = c.run(policies, g.Seeds); err != nil {
				return nil, fmt.Errorf("%s: %w", c.name, err)
			}
			if g.Results != "" {
				if err := keepReport(path, report); err != nil {
					return nil, err
				}
			}
		}
		out.Cells = append(out.Cells, report)
	}
	return out, nil
}

func (c *cell) run(policies []string, seeds []uint64) (*Report, error) {
	w, err := c.workload()
	if err != nil {
		return nil, err
	}
	w.Name = c.name
	return Run(Options{Workload: w, Fleet: c.fleet, Policies: policies, Seeds: seeds})
}

// hashOfBinary distinguishes builds: another rule or engine gives other figures.
func hashOfBinary() ([sha256.Size]byte, error) {
	path, err := os.Executable()
	if err != nil {
		return [sha256.Size]byte{}, err
	}
	content, err := os.ReadFile(path)
	return sha256.Sum256(content), err
}

// readReport returns nil without a file.
func readReport(path string) (*Report, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // not run yet
	}
	r := new(Report)
	if err == nil {
		err = json.Unmarshal(text, r)
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return r, nil
}

// keepReport writes a file that is whole or absent.
func keepReport(path string, r *Report) error {
	if err := writeFile(path+".tmp", r.WriteJSON); err != nil {
		return err
	}
	return os.Rename(path+".tmp", path)
}

// Standing compares a rule with the best rule of each cell. Neither bounds nor rules that refused requests in the cell
// can be the best, because serving fewer requests makes them faster. Where such a rule is ahead, it counts as equal.
type Standing struct {
	Rule Rule
	// Means has one entry for each figure of compared, in its order: the geometric mean, over all cells,
	// of the rule's figure divided by that of the cell's best rule. A rule that is best everywhere has 1.
	Means []float64
	// Worst is the greatest ratio of TTFT p90, in cell At, whose best rule is Best.
	Worst    float64
	At, Best string
	// Refused is the refused requests, a mean over the seeds of each cell.
	Refused float64
}

// compared lists the figures of Standing.Means, TTFT p90 first; for high ones more is better.
var compared = []struct {
	name string
	high bool
	of   func(*Result) float64
}{
	{"TTFT p90", false, func(r *Result) float64 { return r.TTFT90 }},
	{"TTFT p50", false, func(r *Result) float64 { return r.TTFT50 }},
	{"TTFT p99", false, func(r *Result) float64 { return r.TTFT99 }},
	{"ITL p50", false, func(r *Result) float64 { return r.ITL50 }},
	{"throughput", true, func(r *Result) float64 { return r.Throughput }},
	{"goodput", true, func(r *Result) float64 { return r.Goodput }},
}

// Standings orders the rules by their geometric mean of TTFT p90.
func (o *Outcomes) Standings() []Standing {
	out := make([]Standing, len(o.Rules))
	for i := range out {
		out[i] = Standing{Rule: o.Rules[i], Means: make([]float64, len(compared))}
	}
	for n := range compared {
		figure := &compared[n]
		for _, c := range o.Cells {
			best := -1
			for i := range c.Rows {
				v := figure.of(&c.Rows[i].Mean)
				if !o.Rules[i].Bound && c.Rows[i].Mean.Refused == 0 && (best < 0 || (v < figure.of(&c.Rows[best].Mean)) != figure.high) {
					best = i
				}
			}
			best = max(best, 0) // none counts
			for i := range c.Rows {
				if n == 0 {
					out[i].Refused += c.Rows[i].Mean.Refused
				}
				const least = 1e-6 // no goodput at all
				ratio := max(figure.of(&c.Rows[i].Mean), least) / max(figure.of(&c.Rows[best].Mean), least)
				if c.Rows[i].Mean.Refused > 0 && (ratio < 1) != figure.high {
					ratio = 1
				}
				s := &out[i]
				s.Means[n] += math.Log(ratio) / float64(len(o.Cells))
				if n == 0 && ratio > s.Worst {
					s.Worst, s.At, s.Best = ratio, c.Workload, c.Rows[best].Policy
				}
			}
		}
	}
	for i := range out {
		for n := range compared {
			out[i].Means[n] = math.Exp(out[i].Means[n])
		}
	}
	slices.SortStableFunc(out, func(a, b Standing) int { return cmp.Compare(a.Means[0], b.Means[0]) })
	return out
}

// The aim for the default: its geometric mean of TTFT p90 against that of the best rule, and its
// ratio to the best rule of any cell.
const aimMean, aimWorst = 1.02, 1.25

// Bound returns how far the default is from the aim: its geometric mean of TTFT p90 divided by
// that of the best rule, and its worst cell. It is false without the default.
func (o *Outcomes) Bound() (mean float64, own Standing, ok bool) {
	best := 0.0
	for _, s := range o.Standings() {
		if best == 0 && !s.Rule.Bound {
			best = s.Means[0]
		}
		if isDefault(s.Rule.Policy) {
			return s.Means[0] / best, s, true
		}
	}
	return 0, Standing{}, false
}
