package decide

import (
	"context"
	"maps"
	"sync"
	"sync/atomic"

	"github.com/kvlane/kvlane/internal/model"
	"github.com/kvlane/kvlane/internal/prompt"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

// checksAtOnce bounds how many engines are asked at a time, over all models.
const checksAtOnce = 4

// agreement is what is known of a model's ids and those of each worker that serves it.
// A worker that differs is routed by load, and the others by ids as before: what it
// caches stands under ids that no prompt has. If all differ, so does the model.
type agreement struct {
	// checks has a worker's by its name. Only SetWorkers and Close change it, by
	// replacing it.
	checks    atomic.Pointer[map[string]*check]
	mu        sync.Mutex // of settle
	differing atomic.Pointer[differing]
}

// differing are the workers whose ids are others than ours; nil for none.
type differing struct {
	workers map[string]bool
	all     bool
}

// check is the comparison with one worker. It lives as long as the worker: what waits
// for an answer while the worker is away is asked when it is back.
type check struct {
	checker    *model.Checker
	address    string
	generation uint64
	ready      atomic.Bool
	stop       context.CancelFunc
	done       chan struct{}
}

// all are the checks as of now, not to be changed.
func (a *agreement) all() map[string]*check {
	if m := a.checks.Load(); m != nil {
		return *m
	}
	return nil
}

// differs says whether a worker's ids are others than ours.
func (a *agreement) differs(worker string) bool {
	d := a.differing.Load()
	return d != nil && d.workers[worker]
}

// settle takes in a change of a check's state.
func (a *agreement) settle() {
	a.mu.Lock()
	defer a.mu.Unlock()
	checks := a.all()
	next := &differing{workers: map[string]bool{}}
	for name, c := range checks {
		if !c.checker.Usable() {
			next.workers[name] = true
		}
	}
	if len(next.workers) == 0 {
		a.differing.Store(nil)
		return
	}
	next.all = len(next.workers) == len(checks)
	a.differing.Store(next)
}

// end stops all checks.
func (a *agreement) end() {
	none := map[string]*check{}
	for _, c := range a.replace(none) {
		c.end()
	}
}

// replace puts other checks in place and returns those that are not among them.
func (a *agreement) replace(next map[string]*check) map[string]*check {
	gone := maps.Clone(a.all())
	maps.DeleteFunc(gone, func(name string, c *check) bool { return next[name] == c })
	a.checks.Store(&next)
	a.settle()
	return gone
}

func (c *check) end() {
	c.stop()
	<-c.done
}

// compareAll compares every model with every worker that serves it: when the worker
// appears, when it is back, and as requests come.
func (d *Decider) compareAll(f *fleet) {
	for _, s := range d.served {
		if s.Model == nil || s.Config.Check.Disabled {
			continue
		}
		next := map[string]*check{}
		var started []*check
		for name, m := range f.members {
			if m.Engine != s.Engine.String() || !serves(m.Models, s) {
				continue
			}
			c := s.agreement.all()[name]
			if c == nil || c.generation != m.Generation || c.address != m.Address {
				if !m.Ready {
					continue
				}
				c = d.newCheck(s, m)
				started = append(started, c)
			} else if m.Ready && !c.ready.Load() {
				c.checker.Recheck()
			}
			c.ready.Store(m.Ready)
			next[name] = c
		}
		for name, c := range s.agreement.replace(next) {
			c.end()
			d.forgetGone(name)
		}
		for _, c := range started {
			ctx, stop := context.WithCancel(context.Background())
			c.stop = stop
			go func() {
				defer close(c.done)
				c.checker.Run(ctx)
			}()
		}
	}
}

func (d *Decider) newCheck(s *Served, m *member) *check {
	c := &check{address: m.Address, generation: m.Generation, done: make(chan struct{})}
	worker := m.Name
	log := d.log.With().Str("model", s.Config.Name).Str("worker", worker).Str("engine", m.Address).Logger()
	c.checker = model.NewChecker(s.Model, &model.Oracle{Engine: s.Engine, URL: "http://" + m.Address, Timeout: s.Config.Check.Timeout.Std()}, model.CheckerOptions{
		ModelName: s.Config.Name, Every: s.Config.Check.Every, Retry: s.Config.Check.Retry.Std(), Gate: d.checking, Awake: c.ready.Load,
		MaxBody: int(s.Config.Check.MaxBody),
		OnCheck: func(api prompt.API, diff *model.Difference, err error) {
			outcome := "equal"
			switch {
			case diff != nil:
				outcome = "different"
			case err != nil:
				outcome = "failed"
			}
			d.metrics.TokenChecks.WithLabelValues(s.Config.Name, worker, api.String(), outcome).Inc()
		},
		OnState: func(state model.State, diff *model.Difference) {
			s.agreement.settle()
			switch {
			case diff == nil:
				log.Info().Stringer("state", state).Msg("tokenizer compared with the worker's")
			case s.unfit() != nil:
				log.Error().Stringer("difference", diff).Msg("the tokenizer differs from every worker's: this model is routed by load")
			default:
				log.Error().Stringer("difference", diff).Msg("the tokenizer differs from this worker's: it is routed by load, the others by their caches")
			}
		},
	})
	return c
}

// recheck has a worker compared again whose engine may be another one.
func (d *Decider) recheck(worker string) {
	for _, s := range d.served {
		if c := s.agreement.all()[worker]; c != nil {
			c.checker.Recheck()
		}
	}
}

// sample lets the request be compared with the worker that serves it.
func (j *job) sample(p *place) {
	if !j.own {
		return
	}
	if c := j.served.agreement.all()[p.worker.Name]; c != nil && c.checker.Usable() {
		c.checker.Offer(j.request)
	}
}

// foreign says whether our ids mean nothing to a worker.
func (j *job) foreign(p *place) bool {
	return j.own && p.worker != nil && j.served.agreement.differs(p.worker.Name)
}

// dropForeign takes workers out of the overlaps to whom our ids mean nothing.
func (j *job) dropForeign(overlaps []routing.Overlap) []routing.Overlap {
	if !j.own || j.served.agreement.differing.Load() == nil {
		return overlaps
	}
	f := j.d.fleet.Load()
	kept := overlaps[:0]
	for _, o := range overlaps {
		if p := f.place(o.Slot); p == nil || !j.foreign(p) {
			kept = append(kept, o)
		}
	}
	return kept
}

// knows says whether a slot's worker caches under our ids.
func (j *job) knows(slot kvindex.Slot) bool {
	p := j.d.fleet.Load().place(slot)
	return p == nil || !j.foreign(p)
}

// collectAgreement is the scrape-time side of the comparisons.
func (d *Decider) collectAgreement(emit func(name, help string, value float64, labels ...string)) {
	for _, s := range d.served {
		for name, c := range s.agreement.all() {
			emit("tokenizer_state", "1 for what is known of a model's tokenizer and a worker's: unchecked, agrees or differs.", 1,
				"model", s.Config.Name, "worker", name, "state", c.checker.State().String())
		}
	}
}
