package replay

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/kvlane/kvlane/internal/lab/cpu"
)

// Options are the policies to compare and the conditions.
type Options struct {
	Workload   Workload
	Fleet      Fleet
	Policies   []string
	Seeds      []uint64
	Conditions Conditions
	// Progress, if not nil, is called before every run, never concurrently; run counts from 1 to runs.
	Progress func(policy string, seed uint64, run, runs int)
}

// Run simulates every policy with every seed, with as many concurrent runs as there are
// processors. The report does not depend on that number.
func Run(o Options) (*Report, error) {
	if o.Fleet.Workers < 1 || o.Fleet.Ranks < 1 {
		return nil, errors.New("a fleet needs a rank")
	}
	if len(o.Seeds) == 0 || len(o.Policies) == 0 {
		return nil, errors.New("nothing to run: policies and seeds are needed")
	}
	policies, empty := make([]Policy, len(o.Policies)), o.Workload
	empty.Generate = func(uint64) []Request { return nil }
	for i, name := range o.Policies {
		var err error
		if policies[i], err = PolicyByName(name); err != nil {
			return nil, err
		}
		if _, err := newSimulation(&empty, o.Fleet, &policies[i], o.Conditions, o.Seeds[0]); err != nil { // finds an invalid policy before the runs of others take minutes
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	runs := make([]outcome, len(policies)*len(o.Seeds))
	next := make(chan int)
	var progress sync.Mutex
	var workers sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), len(runs)) {
		workers.Go(func() {
			// The goroutine keeps its thread during the run, so that the thread's processor time is the run's.
			runtime.LockOSThread()
			for n := range next {
				policy, seed := &policies[n/len(o.Seeds)], o.Seeds[n%len(o.Seeds)]
				if o.Progress != nil {
					progress.Lock()
					o.Progress(policy.Name, seed, n+1, len(runs))
					progress.Unlock()
				}
				runs[n] = o.once(policy, seed)
			}
		})
	}
	for n := range runs {
		next <- n
	}
	close(next)
	workers.Wait()

	report := &Report{Workload: o.Workload.Name, Ranks: o.Fleet.Workers * o.Fleet.Ranks, Seeds: o.Seeds}
	for i := range policies {
		row := Row{Policy: policies[i].Name}
		for _, r := range runs[i*len(o.Seeds) : (i+1)*len(o.Seeds)] {
			if r.err != nil {
				return nil, r.err
			}
			row.Seconds += r.took.Seconds() / float64(len(o.Seeds))
			row.Runs = append(row.Runs, r.result)
		}
		row.conclude()
		report.Rows = append(report.Rows, row)
	}
	return report, nil
}

// outcome is the result of one run.
type outcome struct {
	result Result
	took   time.Duration
	err    error
}

func (o *Options) once(policy *Policy, seed uint64) outcome {
	began := cpu.Thread()
	s, err := newSimulation(&o.Workload, o.Fleet, policy, o.Conditions, seed)
	if err != nil {
		return outcome{err: err}
	}
	if err := s.run(); err != nil {
		return outcome{err: fmt.Errorf("%s, seed %d: %w", policy.Name, seed, err)}
	}
	return outcome{result: s.summarise(), took: cpu.Thread() - began}
}
