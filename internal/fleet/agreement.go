package fleet

import (
	"context"
	"crypto/rand"
	"errors"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/shape"
)

// maxComparisons bounds the engines that are queried concurrently, over all models.
const maxComparisons = 4

// agreement is the result of comparing a model's ids with those of each worker that serves it. A worker that differs is
// routed by load, because its blocks are indexed under ids that no prompt has; the others are routed by ids. If all
// differ, the model is routed by load.
type agreement struct {
	// checks is by worker name. Only SetWorkers, SetModels and Close replace it.
	checks    atomic.Pointer[map[string]*check]
	mu        sync.Mutex // serialises settle
	differing atomic.Pointer[differing]
}

// differing has the workers whose ids differ from ours.
type differing struct {
	workers map[string]bool
	all     bool
}

// check is the comparison of a model with one worker. Comparisons that fall due while the worker is unavailable are
// made when it is available again.
type check struct {
	checker    *shape.Checker
	address    string
	generation uint64
	ready      atomic.Bool
	failed     atomic.Value // text of the last failure to get the engine's ids
	stop       context.CancelFunc
	done       chan struct{}
}

// all returns the current checks by worker name. The map must not be changed.
func (a *agreement) all() map[string]*check {
	if m := a.checks.Load(); m != nil {
		return *m
	}
	return nil
}

// differs reports whether a worker's ids differ from ours.
func (a *agreement) differs(worker string) bool {
	d := a.differing.Load()
	return d != nil && d.workers[worker]
}

// settle recomputes differing. Call it after the state of a check has changed.
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
	if next.all = len(next.workers) == len(checks); len(next.workers) == 0 {
		next = nil
	}
	a.differing.Store(next)
}

// end stops all checks.
func (a *agreement) end() {
	for _, c := range a.replace(map[string]*check{}) {
		c.end()
	}
}

// replace installs next and returns the old checks that are not in it.
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

// compareAll starts comparing every model with every worker that serves it: when the worker appears, when it is
// available again, and as requests arrive.
func (f *Fleet) compareAll(v *View) {
	for _, s := range f.models.Load().list {
		if s.Tokens == nil || s.Config.Check.Disabled {
			continue
		}
		next := map[string]*check{}
		var started []*check
		for name, m := range v.members {
			if m.Engine != s.Engine.String() || !serves(m.Models, s) {
				continue
			}
			c := s.agreement.all()[name]
			if c == nil || c.generation != m.Generation || c.address != m.Address {
				if !m.Ready {
					continue
				}
				c = f.newCheck(s, m)
				started = append(started, c)
			} else if m.Ready && !c.ready.Load() {
				c.checker.Recheck()
			}
			c.ready.Store(m.Ready)
			next[name] = c
		}
		for _, c := range s.agreement.replace(next) {
			c.end()
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

func (f *Fleet) newCheck(s *Model, m *Member) *check {
	c, worker := &check{address: m.Address, generation: m.Generation, done: make(chan struct{})}, m.Name
	log := f.Log.With().Str("model", s.Config.Name).Str("worker", worker).Str("engine", m.Address).Logger()
	prompts := log.Sample(&zerolog.BurstSampler{Burst: 1, Period: time.Minute}) // clients may provoke differences
	tenant := ""
	if f.Config.Tenants.SaltHeader != "" {
		tenant = rand.Text() // what clients send is compared
	}
	c.checker = shape.NewChecker(s.Tokens, &shape.Oracle{Engine: s.Engine, URL: "http://" + m.Address, Timeout: s.Config.Check.Timeout.Std()}, shape.CheckerOptions{
		ModelName: s.Config.Name, Every: s.Config.Check.Every, Retry: s.Config.Check.Retry.Std(), Gate: f.comparing, Awake: c.ready.Load,
		MaxBody: int(s.Config.Check.MaxBody), Cache: f.Cache, Tenant: tenant,
		OnCheck: func(api body.API, diff *shape.Difference, err error) {
			outcome := "equal"
			switch {
			case diff != nil:
				outcome = "different"
				prompts.Warn().Stringer("difference", diff).Msg("the ids of a prompt differ from this worker's")
			case err != nil:
				if outcome = "failed"; !errors.Is(err, context.Canceled) && c.failed.Swap(err.Error()) != err.Error() { // once
					log.Warn().Err(err).Msg("not known whether the tokenizer is this worker's: it does not return the ids of a prompt")
				}
			}
			f.Metrics.TokenChecks.WithLabelValues(s.Config.Name, worker, api.String(), outcome).Inc()
		},
		OnState: func(state shape.State, diff *shape.Difference) {
			s.agreement.settle()
			switch {
			case diff == nil:
				log.Info().Stringer("state", state).Msg("tokenizer compared with the worker's")
			case s.Unfit() != nil:
				log.Error().Stringer("difference", diff).Msg("the tokenizer differs from every worker's: this model is routed by load")
			default:
				log.Error().Stringer("difference", diff).Msg("the tokenizer differs from this worker's: it is routed by load, the others by their caches")
			}
		},
	})
	return c
}

// recheck repeats the comparisons with a worker whose engine may have been replaced.
func (f *Fleet) recheck(worker string) {
	for _, s := range f.models.Load().list {
		if c := s.agreement.all()[worker]; c != nil {
			c.checker.Recheck()
		}
	}
}

// Sample offers a request for the comparison of model with the worker that serves the request.
func (f *Fleet) Sample(model *Model, m *Member, r *body.Request) {
	if c := model.agreement.all()[m.Name]; c != nil {
		c.checker.Offer(r)
	}
}

// Differs reports whether the ids that model makes are known to differ from the worker's.
func (m *Model) Differs(worker *Member) bool {
	return worker != nil && m.agreement.differs(worker.Name)
}

const worthIDs = 256 // tokens of a prompt, from which on its ids are sent by default; see docs/tokens.md

// TakesIDs reports whether the ids of a prompt of n tokens are sent to the worker (hand_ids). A comparison must have
// given the same answer with ids as without. Where comparisons are off, hand_ids: true sends those of chats and
// completions.
func (m *Model) TakesIDs(worker *Member, api body.API, n int) bool {
	hand := m.Config.HandIDs
	switch {
	case hand == nil && n < worthIDs, hand != nil && !*hand:
		return false
	case worker == nil || m.Config.Check.Disabled:
		return hand != nil && (api == body.Chat || api == body.Completions)
	}
	c := m.agreement.all()[worker.Name]
	return c != nil && c.checker.TakesIDs(api)
}

// SetDiffering marks workers as differing, as comparisons do. It is for tests.
func (m *Model) SetDiffering(workers ...string) {
	d := &differing{workers: map[string]bool{}}
	for _, w := range workers {
		d.workers[w] = true
	}
	m.agreement.differing.Store(d)
}
