package replay

import (
	"bytes"
	"cmp"
	"embed"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml"
)

// Scenario is a workload with its engines and the policies to compare, possibly in several
// cases, and with required results.
type Scenario struct {
	Name string `yaml:"-"`
	// Row is its number in the list of acceptance rows, "" if it is not one.
	Row      string   `yaml:"row"`
	Title    string   `yaml:"title"`
	Workload Source   `yaml:"workload"`
	Fleet    Shape    `yaml:"fleet"`
	Policies []string `yaml:"policies"`
	// Cases change workload, fleet or conditions; no cases means one without changes.
	Cases  []Case  `yaml:"cases"`
	Checks []Check `yaml:"checks"`
}

// Case is a scenario with changes.
type Case struct {
	Name string `yaml:"name"`
	// Workload replaces the scenario's if it is not empty; a field of Fleet if it is not zero.
	Workload   Source     `yaml:"workload"`
	Fleet      Shape      `yaml:"fleet"`
	Conditions Conditions `yaml:"conditions"`
}

// Source is the source of the requests; exactly one field is set.
type Source struct {
	Trace    *Trace   `yaml:"trace"`
	Skew     *Skew    `yaml:"skew"`
	OneShot  *OneShot `yaml:"one_shot"`
	Siblings *Burst   `yaml:"siblings"`
	Family   *Drawn   `yaml:"family"`
}

// Trace is the trace file that the user names, at Load times the recorded speed.
type Trace struct {
	Load float64 `yaml:"load"`
}

// Burst is the workload of Siblings.
type Burst struct {
	Background float64 `yaml:"background"`
}

// Drawn is a family of the gauntlet at Load times a fleet's capacity. Seconds, if set, replaces the family's own time.
type Drawn struct {
	Name    string  `yaml:"name"`
	Load    float64 `yaml:"load"`
	Seconds float64 `yaml:"seconds"`
}

// Shape is a fleet as written in files; zero fields are the defaults: one rank per worker,
// the engine's own capacity and budget.
type Shape struct {
	Workers  int     `yaml:"workers"`
	Ranks    int     `yaml:"ranks"`
	Coupled  bool    `yaml:"coupled"`
	Prefill  int     `yaml:"prefill"`
	Engine   string  `yaml:"engine"` // d70, ds or h100
	Capacity int     `yaml:"capacity"`
	Budget   int     `yaml:"budget"`
	PerToken float64 `yaml:"per_token"`
	// Device is the tokens of Capacity on the device, the rest is on the host; 0: all.
	Device     int  `yaml:"device"`
	KeepOutput bool `yaml:"keep_output"`
	Slow       int  `yaml:"slow"`
	SlowKnown  bool `yaml:"slow_known"`
	// Fail, Add and Hang are when the last worker is lost, is added, or hangs.
	Fail float64 `yaml:"fail"`
	Add  float64 `yaml:"add"`
	Hang float64 `yaml:"hang"`
}

//go:embed scenarios
var scenarioFiles embed.FS

// Scenarios lists the scenarios of the project by acceptance row.
func Scenarios() ([]*Scenario, error) {
	files, err := scenarioFiles.ReadDir("scenarios")
	if err != nil {
		return nil, err
	}
	var list []*Scenario
	for _, f := range files {
		s, err := LoadScenario(strings.TrimSuffix(f.Name(), ".yaml"))
		if err != nil {
			return nil, err
		}
		list = append(list, s)
	}
	slices.SortFunc(list, func(a, b *Scenario) int { return rowNumber(a.Row) - rowNumber(b.Row) })
	return list, nil
}

func rowNumber(row string) int {
	n, _ := strconv.Atoi(strings.TrimPrefix(row, "L")) // no number: first
	return n
}

// LoadScenario returns a scenario of the project by name, or reads a file whose name ends in .yaml.
func LoadScenario(name string) (*Scenario, error) {
	var text []byte
	var err error
	if strings.HasSuffix(name, ".yaml") {
		text, err = os.ReadFile(name)
	} else if text, err = scenarioFiles.ReadFile(path.Join("scenarios", name+".yaml")); err != nil {
		return nil, fmt.Errorf("no scenario %q (--scenario list shows them)", name)
	}
	if err != nil {
		return nil, fmt.Errorf("read scenario: %w", err)
	}
	return parseScenario(name, text)
}

func parseScenario(name string, text []byte) (_ *Scenario, err error) {
	defer func() {
		if recover() != nil { // by the decoder, on an empty list with a tag
			err = fmt.Errorf("scenario %s: a value cannot be read", name)
		}
	}()
	s := &Scenario{Name: name}
	if err := yaml.NewDecoder(bytes.NewReader(text), yaml.Strict()).Decode(s); err != nil {
		return nil, fmt.Errorf("scenario %s: %w", name, err)
	}
	if len(s.Cases) == 0 {
		s.Cases = []Case{{}}
	}
	return s, s.validate()
}

func (s *Scenario) validate() error {
	for i := range s.Cases {
		if n := s.source(&s.Cases[i]).count(); n != 1 {
			return fmt.Errorf("scenario %s: %d workloads, want one of trace, skew, one_shot, siblings and family", s.Name, n)
		}
		if err := s.source(&s.Cases[i]).validate(); err != nil {
			return fmt.Errorf("scenario %s: %w", s.Name, err)
		}
		if _, err := s.fleet(&s.Cases[i]); err != nil {
			return fmt.Errorf("scenario %s: %w", s.Name, err)
		}
	}
	for _, name := range s.Policies {
		if _, err := PolicyByName(name); err != nil {
			return fmt.Errorf("scenario %s: %w", s.Name, err)
		}
	}
	for i := range s.Checks {
		if err := s.Checks[i].validate(s); err != nil {
			return fmt.Errorf("scenario %s, check %d: %w", s.Name, i+1, err)
		}
	}
	return nil
}

// Case returns a case by name; "" means the first.
func (s *Scenario) Case(name string) (*Case, bool) {
	if name == "" {
		return &s.Cases[0], true
	}
	i := slices.IndexFunc(s.Cases, func(c Case) bool { return c.Name == name })
	if i < 0 {
		return nil, false
	}
	return &s.Cases[i], true
}

// NeedsTrace reports whether a case cannot run without a trace file.
func (s *Scenario) NeedsTrace() bool {
	return slices.ContainsFunc(s.Cases, func(c Case) bool { return s.source(&c).Trace != nil })
}

func (s *Scenario) source(c *Case) *Source {
	if c.Workload.count() > 0 {
		return &c.Workload
	}
	return &s.Workload
}

// validate bounds a workload, so that a simulation ends and fits into memory.
func (w *Source) validate() error {
	type bound struct {
		key              string
		value, low, high float64
	}
	const tiny = 1e-6
	var bounds []bound
	switch {
	case w.Trace != nil:
		bounds = []bound{{"trace.load", w.Trace.Load, tiny, 1000}}
	case w.Family != nil:
		if err := isFamily(w.Family.Name); err != nil {
			return fmt.Errorf("workload.family.name: %w", err)
		}
		bounds = []bound{{"family.load", w.Family.Load, tiny, 10}, {"family.seconds", w.Family.Seconds, 0, 1e4}}
	case w.Siblings != nil:
		bounds = []bound{{"siblings.background", w.Siblings.Background, tiny, 10}}
	case w.OneShot != nil:
		o := w.OneShot
		bounds = []bound{{"one_shot.tenants", float64(o.Tenants), 1, 1e6}, {"one_shot.system", float64(o.System), 0, maxPrompt},
			{"one_shot.own", o.Own, 1, maxPrompt}, {"one_shot.output", o.Output, 1, maxPrompt}, {"one_shot.per_second", o.PerSecond, tiny, 10_000}}
	case w.Skew != nil:
		k := w.Skew
		bounds = []bound{{"skew.clients", float64(k.Clients), 1, 1e5}, {"skew.start_over", k.StartOver, 0, 1e5}, {"skew.shared", float64(k.Shared), 0, maxPrompt},
			{"skew.first_mean", k.FirstMean, 1, maxPrompt}, {"skew.first_sigma", k.FirstSigma, 0, 3}, {"skew.turn_mean", k.TurnMean, 1, maxPrompt},
			{"skew.turn_sigma", k.TurnSigma, 0, 3}, {"skew.output_mean", k.OutputMean, 1, maxPrompt}, {"skew.min_turns", float64(k.MinTurns), 1, 1e4},
			{"skew.max_turns", float64(k.MaxTurns), float64(k.MinTurns), 1e4}, {"skew.think", k.Think, 0, 1e5}, {"skew.requests", float64(k.Requests), 1, 1e6}}
	}
	for _, b := range bounds {
		if !(b.value >= b.low && b.value <= b.high) { // false for NaN, too
			return fmt.Errorf("workload.%s: %v is not within %v to %v", b.key, b.value, b.low, b.high)
		}
	}
	return nil
}

func (w *Source) count() int {
	n := 0
	for _, set := range []bool{w.Trace != nil, w.Skew != nil, w.OneShot != nil, w.Siblings != nil, w.Family != nil} {
		if set {
			n++
		}
	}
	return n
}

// TraceReader makes a workload of a trace at load times its recorded speed.
type TraceReader func(load float64) (Workload, error)

// Options returns what to run for a case; the caller sets policies and seeds.
func (s *Scenario) Options(c *Case, trace TraceReader) (Options, error) {
	fleet, err := s.fleet(c)
	if err != nil {
		return Options{}, err
	}
	name := s.Name
	if c.Name != "" {
		name += "/" + c.Name
	}
	o := Options{Fleet: fleet, Policies: s.Policies, Conditions: c.Conditions}
	switch w := s.source(c); {
	case w.Skew != nil:
		o.Workload = w.Skew.Workload(name)
	case w.OneShot != nil:
		o.Workload = w.OneShot.Workload(name)
	case w.Siblings != nil:
		o.Workload = Siblings(name, w.Siblings.Background, &fleet)
	case w.Family != nil:
		f := families[slices.IndexFunc(families, func(f family) bool { return f.name == w.Family.Name })]
		f.name, f.seconds = name, cmp.Or(w.Family.Seconds, f.seconds)
		o.Workload = f.workload(&fleet, f.demand(&fleet.Engine), w.Family.Load)
	case trace == nil:
		return Options{}, UsageError{errors.New("needs a trace (--trace FILE), or a workload of the project (--scenario NAME; list shows them)")}
	default:
		if o.Workload, err = trace(w.Trace.Load); err != nil {
			return Options{}, err
		}
		o.Workload.Name = name
	}
	return o, nil
}

// engines are the engine models by name.
var engines = map[string]func(capacity int) Engine{"d70": Dense70B, "ds": ExpertRank, "h100": H100x4}

const defaultCapacity = 3_000_000

// perHostToken is 320 KB of KV cache per token over 50 GB/s.
const perHostToken = 6.4e-6

// mostRanks bounds a fleet.
const mostRanks = 100_000

func (s *Scenario) fleet(c *Case) (Fleet, error) {
	f := Fleet{Ranks: 1, Engine: Dense70B(defaultCapacity)}
	for _, shape := range []*Shape{&s.Fleet, &c.Fleet} {
		if err := shape.change(&f); err != nil {
			return Fleet{}, err
		}
	}
	if f.Workers < 1 || f.Prefill < 0 || f.Prefill >= f.Workers {
		return Fleet{}, fmt.Errorf("%d workers, %d of them for prefill", f.Workers, f.Prefill)
	}
	return f, nil
}

// change overwrites a fleet with the fields that are set.
func (shape *Shape) change(f *Fleet) error {
	if shape.Engine != "" {
		model := engines[shape.Engine]
		if model == nil {
			return fmt.Errorf("no engine %q: d70, ds or h100", shape.Engine)
		}
		f.Engine = model(f.Engine.Capacity)
	}
	for _, field := range []struct {
		name string
		to   *int
		from int
		most int
	}{
		{"workers", &f.Workers, shape.Workers, mostRanks}, {"ranks", &f.Ranks, shape.Ranks, mostRanks}, {"prefill", &f.Prefill, shape.Prefill, mostRanks},
		{"capacity", &f.Engine.Capacity, shape.Capacity, 1 << 40}, {"budget", &f.Engine.Budget, shape.Budget, 1 << 40},
		{"device", &f.Engine.Device, shape.Device, 1 << 40}, {"slow", &f.Slow, shape.Slow, mostRanks},
	} {
		switch {
		case field.from < 0 || field.from > field.most:
			return fmt.Errorf("%s %d: want 1 to %d", field.name, field.from, field.most)
		case field.from > 0:
			*field.to = field.from
		}
	}
	if shape.PerToken > 0 {
		f.Engine.PerToken = shape.PerToken
	}
	if shape.Device > 0 {
		f.Engine.PerHostToken = perHostToken
	}
	for _, field := range []struct {
		to   *float64
		from float64
	}{{&f.Change.Lost, shape.Fail}, {&f.Change.Added, shape.Add}, {&f.Change.Hung, shape.Hang}} {
		switch {
		case !(field.from >= 0 && field.from <= mostSeconds):
			return fmt.Errorf("fail, add, hang: %v is not within 0 to %v", field.from, float64(mostSeconds))
		case field.from > 0:
			*field.to = field.from
		}
	}
	f.Coupled = f.Coupled || shape.Coupled
	f.Engine.KeepOutput = f.Engine.KeepOutput || shape.KeepOutput
	f.SlowKnown = f.SlowKnown || shape.SlowKnown
	if c := f.Change; max(c.Lost*c.Added, c.Lost*c.Hung, c.Added*c.Hung) > 0 || (c.Lost+c.Added+c.Hung > 0 && (f.Prefill > 0 || f.Workers == 1)) {
		return errors.New("a worker is lost, is added or hangs, one of these, in a fleet with other workers and without a prefill pool")
	}
	if f.Workers*f.Ranks > mostRanks {
		return fmt.Errorf("%d workers with %d ranks each: a fleet has %d ranks at most", f.Workers, f.Ranks, mostRanks)
	}
	return nil
}
