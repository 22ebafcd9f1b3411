package main

import (
	"context"
	"errors"
	"os"
	"slices"
	"time"

	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/internal/config"
)

// reloadPoll is how often the configuration file is read; tests shorten it.
var reloadPoll = time.Second

// keepCurrent reloads the configuration when the file has changed or SIGHUP arrives, and loads models whose hub did not answer
// before. It returns nil when ctx ends, or the error of a server that failed.
func (s *service) keepCurrent(ctx context.Context, a *serveFlags, watch *config.FileWatch, hangUp <-chan os.Signal) error {
	poll := time.NewTicker(reloadPoll)
	defer poll.Stop()
	wait := retryFirst
	retry := time.NewTimer(wait)
	defer retry.Stop()
	loaded := make(chan func(), 1)
	reload := func() {
		if s.reload(ctx, a.file, a.load); s.waits || away(s.models) {
			retry.Reset(wait)
		}
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-s.failed:
			return err
		case <-hangUp:
			wait = retryFirst
			reload()
		case <-poll.C:
			if _, changed, err := watch.Changed(); (changed || err != nil && a.file != "") && ctx.Err() == nil {
				wait = retryFirst
				reload()
			}
		case <-retry.C:
			if s.waits {
				wait = min(2*wait, retryLast)
				reload()
			}
			if c, list := s.config.Load(), s.models; away(list) {
				retry.Stop() // until they are loaded
				go func() {
					if more, err := loadModels(ctx, c, list, &s.loading, s.metrics, s.log); err == nil {
						list = more
					}
					loaded <- func() {
						if s.config.Load() == c { // else the hub is asked again
							s.models = list
							s.decider.SetModels(list)
						}
					}
				}()
			}
		case take := <-loaded:
			take()
			wait = min(2*wait, retryLast)
			retry.Reset(wait)
		}
	}
}

// reload applies the configuration that load returns, as a whole or not at all. It gives up loading tokenizers when ctx ends.
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
	s.server.SetPerAddress(next.Limits.PerAddress)
	setLogLevel(next.Log.Level)
	s.config.Store(next)
	s.log.Info().Strs("keys", live).Int64("generation", s.generation.Add(1)).Msg("configuration taken")
}

// setLogLevel sets the level of all loggers of the process; config has validated it.
func setLogLevel(level string) {
	if l, err := zerolog.ParseLevel(level); err == nil {
		zerolog.SetGlobalLevel(l)
	}
}
