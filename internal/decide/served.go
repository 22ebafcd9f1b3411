package decide

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/model"
	"github.com/kvlane/kvlane/internal/prompt"
)

var (
	errNoTokenizer = errors.New("the model has no tokenizer")
	errSuspended   = errors.New("the tokenizer differs from the engine's")
)

// Served is a model of the configuration with what makes its ids.
type Served struct {
	Config config.Model
	Engine model.Engine
	// Model is nil where there is no tokenizer.
	Model *model.Model
	// Remote makes ids where Model cannot; may be nil.
	Remote *model.Remote

	checker atomic.Pointer[model.Checker]
	// oracle is the address that checker asks, stop ends it. Only SetWorkers and Close
	// use them.
	oracle string
	stop   context.CancelFunc
	wg     sync.WaitGroup
}

// names are all that clients may send.
func (s *Served) names() []string {
	return slices.Concat([]string{s.Config.Name}, s.Config.Aliases, s.Config.Adapters)
}

// cacheName separates the caches of models.
func (s *Served) cacheName() string { return s.Config.Name }

// State is the agreement with the engine.
func (s *Served) State() model.State {
	if c := s.checker.Load(); c != nil {
		return c.State()
	}
	return model.Unchecked
}

// unfit says why the model cannot make ids itself, nil if it can.
func (s *Served) unfit() error {
	if s.Model == nil {
		return errNoTokenizer
	}
	if c := s.checker.Load(); c != nil && !c.Usable() {
		return errSuspended
	}
	return nil
}

// local makes the prompt's ids, in dst's memory where they are not kept.
func (s *Served) local(dst []uint32, req *prompt.Request) (model.Result, error) {
	if c := s.checker.Load(); c != nil {
		c.Offer(req)
	}
	return s.Model.PromptInto(dst, req, s.Engine)
}

// compareWith lets a checker ask the engine at address; "" ends it.
func (s *Served) compareWith(address string, d *Decider) {
	if address == s.oracle || s.Model == nil || s.Config.Check.Disabled {
		return
	}
	s.endCheck()
	s.oracle = address
	if address == "" {
		return
	}
	log := d.log.With().Str("model", s.Config.Name).Str("engine", address).Logger()
	c := model.NewChecker(s.Model, &model.Oracle{Engine: s.Engine, URL: "http://" + address, Timeout: s.Config.Check.Timeout.Std()}, model.CheckerOptions{
		ModelName: s.Config.Name, Every: s.Config.Check.Every, Retry: s.Config.Check.Retry.Std(),
		OnCheck: func(diff *model.Difference, err error) {
			outcome := "equal"
			switch {
			case diff != nil:
				outcome = "different"
			case err != nil:
				outcome = "failed"
			}
			d.metrics.TokenChecks.WithLabelValues(s.Config.Name, outcome).Inc()
		},
		OnState: func(state model.State, diff *model.Difference) {
			if diff != nil {
				log.Error().Stringer("difference", diff).Msg("the tokenizer differs from the engine's: this model is routed by load")
				return
			}
			log.Info().Stringer("state", state).Msg("tokenizer compared with the engine's")
		},
	})
	ctx, stop := context.WithCancel(context.Background())
	s.stop = stop
	s.checker.Store(c)
	s.wg.Go(func() { c.Run(ctx) })
}

func (s *Served) endCheck() {
	if s.stop != nil {
		s.stop()
		s.wg.Wait()
		s.stop = nil
	}
	s.checker.Store(nil)
}

// chooseOracles gives every model an engine to compare itself with: the first
// ready one that serves it, and the same one for as long as it stays.
func (d *Decider) chooseOracles(f *fleet) {
	for _, s := range d.served {
		address, current := "", false
		for _, m := range f.members {
			if !m.Ready || m.Engine != s.Engine.String() || !serves(m.Models, s) {
				continue
			}
			current = current || m.Address == s.oracle
			if address == "" || m.Address < address {
				address = m.Address
			}
		}
		if !current {
			s.compareWith(address, d)
		}
	}
}

func serves(names []string, s *Served) bool {
	return len(names) == 0 || slices.ContainsFunc(names, func(n string) bool { return slices.Contains(s.names(), n) })
}

// cacheModel is the name under which the index knows the caches of a worker: the
// configured model that it serves, so that an alias or an adapter in its list
// means the same cache as in a request.
func (d *Decider) cacheModel(served []string) string {
	for _, name := range served {
		if s := d.models[name]; s != nil {
			return s.cacheName()
		}
	}
	if len(served) > 0 {
		return served[0]
	}
	if s := d.servedBy(""); s != nil {
		return s.cacheName()
	}
	return ""
}

// servedBy finds a model by the name that a client sent; "" means the only one.
func (d *Decider) servedBy(name string) *Served {
	if s := d.models[name]; s != nil || name != "" {
		return s
	}
	if len(d.served) == 1 {
		return d.served[0]
	}
	return nil
}
