package replay

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
)

// Check is one required result: a figure of a policy, alone or relative to other policies
// of the same simulator with the same seeds.
type Check struct {
	// Case is empty in scenarios of one case.
	Case   string `yaml:"case"`
	What   string `yaml:"what"`
	Policy string `yaml:"policy"`
	Figure string `yaml:"figure"`
	// Over names policies: the figure is divided by the lowest of theirs, in OverCase and as OverFigure if these are
	// set. Minus names a policy whose figure is subtracted.
	Over       []string `yaml:"over"`
	OverCase   string   `yaml:"over_case"`
	OverFigure string   `yaml:"over_figure"`
	Minus      string   `yaml:"minus"`
	// AtMost and AtLeast are the bounds; without one the figure is only shown.
	AtMost  *float64 `yaml:"at_most"`
	AtLeast *float64 `yaml:"at_least"`
}

func (c *Check) validate(s *Scenario) error {
	for _, name := range []string{c.Case, c.OverCase} {
		if _, ok := s.Case(name); !ok {
			return fmt.Errorf("no case %q", name)
		}
	}
	for _, name := range []string{c.Figure, c.OverFigure} {
		if _, ok := new(Row).figure(name); name != "" && !ok {
			return fmt.Errorf("no figure %q", name)
		}
	}
	for _, name := range append([]string{c.Policy, c.Minus}, c.Over...) {
		if name == "" && name != c.Policy {
			continue
		}
		if _, err := PolicyByName(name); err != nil {
			return err
		}
	}
	if c.Figure == "" || (c.AtMost != nil && c.AtLeast != nil) {
		return fmt.Errorf("check %q needs a figure and at most one bound", c.What)
	}
	return nil
}

// Outcome is a check with its measured figure.
type Outcome struct {
	Row      string
	What     string
	Measured float64
	AtMost   *float64
	AtLeast  *float64
}

// OK reports whether the bound holds.
func (o *Outcome) OK() bool {
	return (o.AtMost == nil || o.Measured <= *o.AtMost) && (o.AtLeast == nil || o.Measured >= *o.AtLeast)
}

// cells returns row, check, measured, bound and verdict.
func (o *Outcome) cells() []string {
	bound, verdict := "no bound", ""
	switch {
	case o.AtMost != nil:
		bound, verdict = fmt.Sprintf("<= %.3f", *o.AtMost), "ok"
	case o.AtLeast != nil:
		bound, verdict = fmt.Sprintf(">= %.3f", *o.AtLeast), "ok"
	}
	if !o.OK() {
		verdict = "FAILED"
	}
	return []string{o.Row, o.What, fmt.Sprintf("%.3f", o.Measured), bound, verdict}
}

// WriteOutcomes writes measured figures and bounds, one line per check, and returns the number of failed checks.
func WriteOutcomes(out io.Writer, outcomes []Outcome) (int, error) {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	failed := 0
	for i := range outcomes {
		if !outcomes[i].OK() {
			failed++
		}
		fmt.Fprintln(w, strings.Join(outcomes[i].cells(), "\t"))
	}
	return failed, w.Flush()
}

// Acceptance runs the checks of scenarios.
type Acceptance struct {
	Scenarios []*Scenario
	// Trace makes the workload of the scenarios that need one; without it they are skipped.
	Trace TraceReader
	Seeds []uint64
	// Progress, if not nil, is called before every run, Done after every scenario.
	Progress func(scenario, policy string, seed uint64)
	Done     func([]Outcome)
}

// AcceptanceScenarios returns the project's scenarios that are acceptance rows, all or the named ones.
func AcceptanceScenarios(rows ...string) ([]*Scenario, error) {
	all, err := Scenarios()
	if err != nil {
		return nil, err
	}
	for _, row := range rows {
		if !slices.ContainsFunc(all, func(s *Scenario) bool { return s.Row == row }) {
			return nil, fmt.Errorf("no acceptance row %q", row)
		}
	}
	return slices.DeleteFunc(all, func(s *Scenario) bool { return s.Row == "" || (len(rows) > 0 && !slices.Contains(rows, s.Row)) }), nil
}

// Run returns the outcomes, in the order of the scenarios, and the rows that were skipped because there is no trace.
func (a *Acceptance) Run() (outcomes []Outcome, without []string, err error) {
	for _, s := range a.Scenarios {
		if s.NeedsTrace() && a.Trace == nil {
			without = append(without, cmp.Or(s.Row, s.Name))
			continue
		}
		b := bench{a: a, s: s, options: map[string]*Options{}, done: map[string]*Row{}}
		for i := range s.Checks {
			o, err := b.check(&s.Checks[i])
			if err != nil {
				return nil, nil, fmt.Errorf("%s: %w", s.Row, err)
			}
			outcomes = append(outcomes, o)
		}
		if a.Done != nil {
			a.Done(outcomes[len(outcomes)-len(s.Checks):])
		}
	}
	return outcomes, without, nil
}

// bench runs policies on the cases of one scenario and keeps the means.
type bench struct {
	a       *Acceptance
	s       *Scenario
	options map[string]*Options
	done    map[string]*Row
}

func (b *bench) check(c *Check) (Outcome, error) {
	v, err := b.figure(c.Case, c.Policy, c.Figure)
	if err != nil {
		return Outcome{}, err
	}
	if len(c.Over) > 0 {
		least := math.Inf(1)
		for _, policy := range c.Over {
			of, err := b.figure(cmp.Or(c.OverCase, c.Case), policy, cmp.Or(c.OverFigure, c.Figure))
			if err != nil {
				return Outcome{}, err
			}
			least = min(least, of)
		}
		v /= least
	}
	if c.Minus != "" {
		of, err := b.figure(c.Case, c.Minus, c.Figure)
		if err != nil {
			return Outcome{}, err
		}
		v -= of
	}
	what := c.What
	if c.Case != "" {
		what = c.Case + ": " + what
	}
	return Outcome{Row: cmp.Or(b.s.Row, b.s.Name), What: what, Measured: v, AtMost: c.AtMost, AtLeast: c.AtLeast}, nil
}

// figure returns a figure of a policy, which it runs unless it was run before.
func (b *bench) figure(at, policy, figure string) (float64, error) {
	key := at + "\x00" + policy
	row := b.done[key]
	if row == nil {
		o := b.options[at]
		if o == nil {
			c, _ := b.s.Case(at)
			made, err := b.s.Options(c, b.a.Trace)
			if err != nil {
				return 0, err
			}
			o = &made
			o.Seeds = b.a.Seeds
			b.options[at] = o
		}
		o.Policies = []string{policy}
		if b.a.Progress != nil {
			o.Progress = func(policy string, seed uint64, _, _ int) { b.a.Progress(o.Workload.Name, policy, seed) }
		}
		report, err := Run(*o)
		if err != nil {
			return 0, err
		}
		row = &report.Rows[0]
		b.done[key] = row
	}
	v, _ := row.figure(figure)
	return v, nil
}

// WriteScenarios lists scenarios with their cases.
func WriteScenarios(out io.Writer, list []*Scenario) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, s := range list {
		var cases []string
		for i := range s.Cases {
			if s.Cases[i].Name != "" {
				cases = append(cases, s.Cases[i].Name)
			}
		}
		needs := ""
		if s.NeedsTrace() {
			needs = "trace"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", s.Name, s.Row, needs, s.Title, strings.Join(cases, " | "))
	}
	return w.Flush()
}
