package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/fleet"
	"github.com/kvlane/kvlane/internal/hub"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/bpe"
	"github.com/kvlane/kvlane/internal/tokens/encoders"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
	"github.com/kvlane/kvlane/internal/tokens/models"
	"github.com/kvlane/kvlane/internal/tokens/shape"
)

// loadModels loads the tokenizers of the configuration. If old is not nil, it holds the models loaded before, and only those
// whose hub did not answer are loaded. A tokenizer that cannot be reproduced exactly, or whose hub does not answer within
// hubPatience, is left out and the reason logged: its model is routed by load. A folder that cannot be read is an error.
func loadModels(ctx context.Context, c *config.Config, old []*fleet.Model, waits *loading, metrics *observe.Metrics, log zerolog.Logger) ([]*fleet.Model, error) {
	ctx, cancel := context.WithTimeout(ctx, hubPatience)
	defer cancel()
	list := make([]*fleet.Model, 0, len(c.Models))
	for i := range c.Models {
		if old != nil && !old[i].Away {
			list = append(list, old[i])
			continue
		}
		s, err := newModel(ctx, c.Models[i], waits, metrics, log)
		switch {
		case err == nil:
		case errors.Is(ctx.Err(), context.Canceled):
			return nil, err
		case errors.Is(err, models.ErrUnknown), errors.Is(err, fs.ErrNotExist) && !strings.HasPrefix(c.Models[i].Tokenizer, hub.Prefix):
			return nil, config.ProblemsError{partProblem(c, i, err)}
		default:
			refuse(c, i, s, err, log)
		}
		list = append(list, s)
	}
	return list, nil
}

func askedAgain() string { return fmt.Sprintf("the hub is asked again, at least every %s", retryLast) }

// refuse records and logs why a model has no tokenizer.
func refuse(c *config.Config, i int, s *fleet.Model, err error, log zerolog.Logger) {
	again := "it is read again when Kvlane starts or its keys change"
	if s.Away = hubAway(err); s.Away {
		again = askedAgain()
	}
	s.Refused = partProblem(c, i, err).Message + "; " + again
	instead := "this model is routed by load"
	if s.Remote != nil {
		instead = "check.renderer computes all its ids"
	}
	log.Error().Str("model", s.Config.Name).Str("error", s.Refused).Msg("tokenizer refused: " + instead)
}

// loading holds, by model, what its tokenizer waits for. It is safe for concurrent use.
type loading struct{ sync.Map }

func (l *loading) warnings() (list []observe.Warning) {
	for _, text := range l.Range {
		list = append(list, observe.Warning{Reason: "loading", Text: text.(string)}) //nolint:forcetypeassert // only these are stored
	}
	return list
}

// newModel loads a model. If its tokenizer or template fails, it returns the model without them, with the error.
func newModel(ctx context.Context, m config.Model, waits *loading, metrics *observe.Metrics, log zerolog.Logger) (*fleet.Model, error) {
	engine, _ := shape.ParseEngine(m.Engine) // checked with the configuration
	s := &fleet.Model{Config: m, Engine: engine}
	if m.Check.Renderer != "" {
		s.Remote = shape.NewRemote(m.Check.Renderer, m.Check.Timeout.Std(), func(err error) {
			metrics.Renders.WithLabelValues(m.Name, renderOutcome(err)).Inc()
		})
	}
	if m.Tokenizer == "" {
		return s, nil
	}
	log.Info().Str("model", m.Name).Str("tokenizer", m.Tokenizer).Msg("loading tokenizer")
	begin := time.Now()
	files, err := awaitTokenizer(ctx, m, waits, log)
	if err == nil {
		s.Tokens, err = loadModel(m, files)
	}
	if err != nil {
		return s, err
	}
	if m.Check.Disabled {
		log.Warn().Str("model", m.Name).Msg("check.disabled: the model's ids are never compared with an engine's; if they differ, it goes unnoticed")
	}
	log.Info().Str("model", m.Name).Dur("took_ms", time.Since(begin)).Msg("tokenizer loaded")
	return s, nil
}

// away reports whether a model waits for a hub that did not answer.
func away(list []*fleet.Model) bool {
	return slices.ContainsFunc(list, func(m *fleet.Model) bool { return m.Away })
}

// reloadModels returns the models of a configuration, with those loaded that are new or whose keys have changed.
func (s *service) reloadModels(ctx context.Context, c *config.Config, keys []string) ([]*fleet.Model, error) {
	ctx, cancel := context.WithTimeout(ctx, hubPatience)
	defer cancel()
	list := make([]*fleet.Model, len(c.Models))
	for i := range list {
		if at := slices.IndexFunc(s.models, func(m *fleet.Model) bool { return m.Config.Name == c.Models[i].Name }); at >= 0 && !config.Retokenizes(i, keys) {
			list[i] = s.models[at]
			continue
		}
		m, err := newModel(ctx, c.Models[i], &s.loading, s.metrics, s.log)
		if err != nil {
			why := partProblem(c, i, err)
			if s.waits = hubAway(err); s.waits {
				why.Message += "; " + askedAgain()
			}
			return nil, config.ProblemsError{why}
		}
		list[i] = m
	}
	return list, nil
}

func renderOutcome(err error) string {
	_, refused := errors.AsType[*shape.Refusal](err)
	switch {
	case err == nil:
		return "ok"
	case refused:
		return "refused"
	case errors.Is(err, shape.ErrBreakerOpen):
		return "breaker_open"
	default:
		return "failed"
	}
}

func loadModel(m config.Model, files fs.FS) (*shape.Model, error) {
	o := shape.Options{
		ToolParser: m.ToolParser, HideToolsWhenNone: m.HideTools, TrustTemplates: m.TrustTemplates,
		Multimodal: m.Multimodal, MaxModelLen: m.MaxModelLen,
	}
	if len(m.Adapters) > 0 {
		o.Names = append([]string{m.Name}, m.Aliases...)
	}
	if m.ChatTemplate != "" {
		text, err := config.ReadFile(m.ChatTemplate)
		if err != nil {
			return nil, &templateError{m.ChatTemplate, err}
		}
		o.ChatTemplate = string(text)
	}
	loaded, err := modelOf(m.Tokenizer, files, o)
	if syntax, ok := errors.AsType[*jinja.Error](err); ok && m.ChatTemplate != "" {
		return nil, &templateError{m.ChatTemplate, syntax}
	}
	if err == nil && m.EngineModel != "" {
		loaded.SetEngineModel(m.EngineModel)
	}
	return loaded, err
}

// templateError is an error in the file of chat_template.
type templateError struct {
	file string
	err  error
}

func (e *templateError) Unwrap() error { return e.err }

func (e *templateError) Error() string {
	if syntax, ok := errors.AsType[*jinja.Error](e.err); ok && syntax.Class == jinja.Unsupported {
		return fmt.Sprintf("%s: %v", e.file, e.err)
	} else if ok && syntax.Line > 0 {
		return fmt.Sprintf("%s:%d: %v", e.file, syntax.Line, e.err)
	}
	return e.err.Error()
}

// partProblem names the key of a model whose file could not be loaded, and the remedy.
func partProblem(c *config.Config, i int, err error) config.Problem {
	key, missing, broken := "tokenizer", "name a folder with tokenizer.json, hf:Org/Model, or builtin:qwen3", "correct the file, or copy the model's folder again"
	if _, ok := errors.AsType[*templateError](err); ok {
		key, missing, broken = "chat_template", "name the template that the engine runs with, or leave the key out", "mend the template"
	}
	advice := broken
	_, unavailable := errors.AsType[hubError](err)
	switch {
	case unavailable:
		return config.Problem{Path: fmt.Sprintf("models[%d].%s", i, key), Message: err.Error()}
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, models.ErrUnknown):
		advice = missing
	case inexact(err):
		advice = fmt.Sprintf("%q is routed by load", c.Models[i].Name)
	}
	return config.Problem{Path: fmt.Sprintf("models[%d].%s", i, key), Message: fmt.Sprintf("%v: %s", err, advice)}
}

// modelOf loads a model; its errors name its tokenizer.
func modelOf(dir string, files fs.FS, o shape.Options) (*shape.Model, error) {
	m, err := shape.Load(files, o)
	if err != nil {
		return nil, fmt.Errorf("tokenizer %s: %w", dir, err)
	}
	return m, nil
}

// checkParts loads the models. broken are the problems that keep serve from starting. notExact are the others:
// tokenizers that cannot be reproduced exactly, and warnings about the hub.
func checkParts(ctx context.Context, c *config.Config, live bool) (broken, notExact config.ProblemsError) {
	for i := range c.Models {
		m := c.Models[i]
		if m.Tokenizer == "" {
			continue
		}
		files, note, err := checkHub(ctx, m, live)
		if note != "" {
			notExact = append(notExact, config.Problem{Path: fmt.Sprintf("models[%d].tokenizer", i), Message: note})
		}
		if files != nil && err == nil {
			err = checkModel(m, files)
		}
		if inexact(err) {
			notExact = append(notExact, partProblem(c, i, err))
		} else if err != nil {
			broken = append(broken, partProblem(c, i, err))
		}
	}
	return broken, notExact
}

// checkModel loads a model. Its error is encoders.ErrMissing if the model's engine builds chats in a way that is not known here.
func checkModel(m config.Model, files fs.FS) error {
	loaded, err := loadModel(m, files)
	if err != nil {
		return err
	}
	engine, _ := shape.ParseEngine(m.Engine)
	chat, _ := body.Parse(body.Chat, []byte(`{"model":"a","messages":[{"role":"user","content":"Hello"}]}`))
	if _, err = loaded.Prompt(chat, engine); errors.Is(err, encoders.ErrMissing) {
		return fmt.Errorf("chats with %s have no token ids: %w", engine, err)
	}
	return nil
}

// inexact reports whether an error is about a tokenizer or a chat template that is intact
// but cannot be reproduced exactly.
func inexact(err error) bool {
	_, template := errors.AsType[*jinja.Error](err)
	return template || errors.Is(err, bpe.ErrUnsupported) || errors.Is(err, encoders.ErrMissing)
}
