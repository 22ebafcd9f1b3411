package decide

import (
	"errors"
	"slices"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/model"
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

	agreement agreement
}

// names are all that clients may send.
func (s *Served) names() []string {
	return slices.Concat([]string{s.Config.Name}, s.Config.Aliases, s.Config.Adapters)
}

// cacheName separates the caches of models.
func (s *Served) cacheName() string { return s.Config.Name }

// unfit says why the model cannot make ids itself, nil if it can.
func (s *Served) unfit() error {
	if s.Model == nil {
		return errNoTokenizer
	}
	if d := s.agreement.differing.Load(); d != nil && d.all {
		return errSuspended
	}
	return nil
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
