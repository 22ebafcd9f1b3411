package replay

import (
	"errors"
	"fmt"
	"time"
)

// Options is what to compare.
type Options struct {
	Workload   Workload
	Fleet      Fleet
	Policies   []string
	Seeds      []uint64
	Conditions Conditions
	// Progress, if not nil, is called before every run; run counts from 1 to runs.
	Progress func(policy string, seed uint64, run, runs int)
}

// Run simulates every policy with every seed, one after the other.
func Run(o Options) (*Report, error) {
	if o.Fleet.Workers < 1 || o.Fleet.Ranks < 1 {
		return nil, errors.New("replay: a fleet needs a rank")
	}
	if len(o.Seeds) == 0 || len(o.Policies) == 0 {
		return nil, errors.New("replay: nothing to run: policies and seeds are needed")
	}
	report := &Report{Workload: o.Workload.Name, Ranks: o.Fleet.Workers * o.Fleet.Ranks, Seeds: o.Seeds}
	for _, name := range o.Policies {
		policy, err := PolicyByName(name)
		if err != nil {
			return nil, fmt.Errorf("replay: %w", err)
		}
		row := Row{Policy: name}
		for i, seed := range o.Seeds {
			if o.Progress != nil {
				o.Progress(name, seed, len(report.Rows)*len(o.Seeds)+i+1, len(o.Policies)*len(o.Seeds))
			}
			began := time.Now()
			s, err := newSimulation(&o.Workload, o.Fleet, &policy, o.Conditions, seed)
			if err != nil {
				return nil, fmt.Errorf("replay: %w", err)
			}
			if err := s.run(); err != nil {
				return nil, fmt.Errorf("replay: %s, seed %d: %w", name, seed, err)
			}
			row.Seconds += time.Since(began).Seconds() / float64(len(o.Seeds))
			row.Runs = append(row.Runs, s.summarise())
		}
		row.conclude()
		report.Rows = append(report.Rows, row)
	}
	return report, nil
}
