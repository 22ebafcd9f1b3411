package main

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/fleet"
)

// reloadPoll is how often the configuration file is read; tests shorten it.
var reloadPoll = time.Second

// reload takes a changed configuration over, whole or not at all. load returns it. It gives up loading tokenizers when ctx ends.
func (s *service) reload(ctx context.Context, file string, load func() (*config.Config, []config.Problem, error)) {
	result := "taken"
	s.waits = false
	defer func() {
		if ctx.Err() == nil {
			s.metrics.Reloads.WithLabelValues(result).Inc()
		}
	}()
	next, warnings, err := load()
	var live []string
	served := s.models
	if err == nil {
		var restart config.ProblemsError
		if live, restart = s.config.Load().Changes(next); len(restart) > 0 {
			err = config.Place(file, restart)
		} else if len(live) > 0 {
			if served, err = s.reloadModels(ctx, next, live); err == nil {
				err = s.decider.Reload(next)
			}
			if problems, ok := errors.AsType[config.ProblemsError](err); ok {
				err = config.Place(file, problems)
			}
		}
	}
	if err != nil && ctx.Err() != nil {
		return
	}
	if err != nil {
		result = "rejected"
		s.rejected.Store(&err)
		s.log.Error().Err(err).Msg("configuration rejected: the running one stays")
		return
	}
	s.rejected.Store(nil)
	for _, w := range warnings {
		s.log.Warn().Msg(w.String())
	}
	if len(live) == 0 {
		result = "unchanged"
		s.log.Info().Msg("configuration read again: nothing has changed")
		return
	}
	if !slices.Equal(served, s.models) {
		s.models = served
		s.decider.SetModels(served)
	}
	s.server.SetBodies(next.Limits.Bodies.Count, int64(next.Limits.Bodies.Bytes))
	setLogLevel(next.Log.Level)
	s.config.Store(next)
	s.log.Info().Strs("keys", live).Int64("generation", s.generation.Add(1)).Msg("configuration taken")
}

// setLogLevel sets the level of all loggers of the process, which config has validated.
func setLogLevel(level string) {
	if l, err := zerolog.ParseLevel(level); err == nil {
		zerolog.SetGlobalLevel(l)
	}
}

// take uses models that were loaded for a configuration, unless it is another by now: their hub is asked again then.
func (s *service) take(c *config.Config, list []*fleet.Model) {
	if s.config.Load() == c {
		s.models = list
		s.decider.SetModels(list)
	}
}
