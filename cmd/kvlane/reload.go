package main

import (
	"bytes"
	"os"
	"time"

	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/internal/config"
)

// reloadPoll is how often the configuration file is read.
const reloadPoll = time.Second

// fileWatch notices that a file has changed. A content counts once it was read twice in a
// row: a file that is just being written may be incomplete.
type fileWatch struct {
	file        string
	last, taken []byte
	missing     bool // the last read failed
}

func watchFile(file string) *fileWatch {
	text, _ := os.ReadFile(file)
	return &fileWatch{file: file, last: text, taken: text}
}

// changed reads the file, and reports whether its content is new and complete. A file that
// cannot be read counts as unchanged; the first failure in a row is the error.
func (w *fileWatch) changed() (bool, error) {
	text, err := os.ReadFile(w.file)
	if before := w.missing; err != nil {
		if w.missing = true; before {
			err = nil
		}
		return false, err
	}
	w.missing = false
	same := bytes.Equal(text, w.last)
	w.last = text
	if !same || bytes.Equal(text, w.taken) {
		return false, nil
	}
	w.taken = text
	return true, nil
}

// reload takes a changed configuration over, whole or not at all. load returns it.
func (s *service) reload(file string, load func() (*config.Config, []config.Problem, error)) {
	result := "taken"
	defer func() { s.metrics.Reloads.WithLabelValues(result).Inc() }()
	next, warnings, err := load()
	var live []string
	if err == nil {
		var restart config.ProblemsError
		if live, restart = s.config.Load().Changes(next); len(restart) > 0 {
			err = config.Place(file, restart)
		} else if len(live) > 0 {
			err = s.decider.Reload(next)
		}
	}
	if err != nil {
		result = "rejected"
		s.log.Error().Err(err).Msg("configuration rejected: the running one stays")
		return
	}
	for _, w := range warnings {
		s.log.Warn().Msg(w.String())
	}
	if len(live) == 0 {
		result = "unchanged"
		s.log.Info().Msg("configuration read again: nothing has changed")
		return
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
