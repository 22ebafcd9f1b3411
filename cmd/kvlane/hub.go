package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"strings"
	"time"

	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/hub"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/tokens/models"
)

// hubPatience bounds the wait for the model hub. It is below the chart's probes.startupSeconds. If the hub has not answered by
// then at startup, it is queried again after retryFirst, with the interval doubled each time, up to retryLast.
var hubPatience, retryFirst, retryLast = 90 * time.Second, 30 * time.Second, 10 * time.Minute

// openTokenizer returns the files of a tokenizer: of a folder, of the binary, or of the model hub.
func openTokenizer(ctx context.Context, io streams, name string) (fs.FS, error) {
	if !strings.HasPrefix(name, hub.Prefix) {
		return models.Open(name)
	}
	defer during(io.err, "fetching tokenizer "+name)()
	return openHub(ctx, hub.FromEnvironment(), name)
}

func openHub(ctx context.Context, cache hub.Cache, tokenizer string) (*hub.Snapshot, error) {
	name, err := hub.Parse(tokenizer)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, hubPatience)
	defer cancel()
	s, err := resolve(ctx, cache, name)
	certificates := "SSL_CERT_FILE (certificate authorities), the certificate of " + cache.Endpoint
	err = observe.Certificate(err, certificates)
	_, local := errors.AsType[*fs.PathError](err)
	_, remote := errors.AsType[net.Error](err) // *url.Error, and the end of ctx
	switch {
	case err == nil:
		if s.Stale != nil {
			s.Stale = hubError{observe.Certificate(s.Stale, certificates)}
		}
		return s, nil
	case cache.Offline:
		err = fmt.Errorf("%w, and HF_HUB_OFFLINE is set", err)
	case local:
		err = fmt.Errorf("%w: make %s (HF_HUB_CACHE) writable", err, cache.Folder)
	case errors.Is(err, hub.ErrUnavailable), remote && !errors.Is(err, hub.ErrRefused):
		err = fmt.Errorf("%w: make %s (HF_ENDPOINT) reachable, or copy the files to %s (HF_HUB_CACHE)", err, cache.Endpoint, cache.Folder)
	}
	return nil, hubError{err}
}

// resolve is cache.Resolve that returns once ctx is cancelled, even while a file of the cache folder cannot be read.
func resolve(ctx context.Context, cache hub.Cache, name hub.Name) (*hub.Snapshot, error) {
	var s *hub.Snapshot
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		s, err = cache.Resolve(ctx, name)
	}()
	select {
	case <-done:
	case <-ctx.Done():
		if errors.Is(ctx.Err(), context.Canceled) {
			return nil, ctx.Err()
		}
		<-done // at a deadline Resolve returns the files of before
	}
	return s, err
}

// hubError explains why a model hub's files are not available, and what to do.
type hubError struct{ error }

// Error clips what may be the hub's text.
func (e hubError) Error() string { return observe.ClipTo(e.error.Error(), observe.MaxText) }

func (e hubError) Unwrap() error { return e.error }

// hubAway reports whether an error is that of a model hub which may answer later.
func hubAway(err error) bool {
	_, ok := errors.AsType[hubError](err)
	return ok && !errors.Is(err, hub.ErrRefused)
}

// checkLock returns an error if the files do not have the hash of tokenizer_lock.
func checkLock(m config.Model, s *hub.Snapshot) error {
	if m.TokenizerLock == "" || m.TokenizerLock == s.Lock() {
		return nil
	}
	return hubError{fmt.Errorf("%w: %s (commit %s) has files of hash %s, tokenizer_lock is %s", hub.ErrRefused, s.Name, s.Commit, s.Lock(), m.TokenizerLock)}
}

// awaitTokenizer is openTokenizer for the service: it retries until ctx ends, unless the error cannot go away by itself.
func awaitTokenizer(ctx context.Context, m config.Model, waits *loading, log zerolog.Logger) (fs.FS, error) {
	if !strings.HasPrefix(m.Tokenizer, hub.Prefix) {
		return models.Open(m.Tokenizer)
	}
	defer during(log.With().Str("level", "info").Logger(), "fetching tokenizer "+m.Tokenizer)()
	cache := hub.FromEnvironment()
	defer waits.Delete(m.Name)
	waits.Store(m.Name, fmt.Sprintf("model %s: tokenizer %s is being fetched from %s (HF_ENDPOINT)", m.Name, m.Tokenizer, cache.Endpoint))
	for wait := time.Second; ; wait = min(2*wait, 15*time.Second) {
		s, err := openHub(ctx, cache, m.Tokenizer)
		if err == nil {
			if s.Stale != nil {
				log.Warn().Str("model", m.Name).Str("commit", s.Commit).Err(s.Stale).Msg("the model hub did not answer: the tokenizer is the last one downloaded")
			} else if !s.Fixed() && m.TokenizerLock == "" {
				log.Warn().Str("model", m.Name).Str("commit", s.Commit).Str("tokenizer_lock", s.Lock()).Msg("the tokenizer's revision can move: name the commit, or set tokenizer_lock")
			}
			return s, checkLock(m, s)
		}
		if errors.Is(err, hub.ErrRefused) || ctx.Err() != nil {
			return nil, err
		}
		log.Warn().Str("model", m.Name).Err(err).Dur("retry_in_ms", wait).Msg("the model hub did not answer")
		waits.Store(m.Name, fmt.Sprintf("model %s: the model hub did not answer: %s; it is asked again within %s", m.Name, observe.ClipTo(err.Error(), observe.MaxText), wait))
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(wait):
		}
	}
}

// checkHub is openTokenizer for the command check, which downloads only if live. note is a warning: how to pin the revision, or
// why the tokenizer was not checked; then files is nil.
func checkHub(ctx context.Context, m config.Model, live bool) (files fs.FS, note string, err error) {
	if !strings.HasPrefix(m.Tokenizer, hub.Prefix) {
		files, err = models.Open(m.Tokenizer)
		return files, "", err
	}
	cache := hub.FromEnvironment()
	cache.Offline = cache.Offline || !live
	s, err := openHub(ctx, cache, m.Tokenizer)
	switch {
	case err != nil && !live:
		return nil, fmt.Sprintf("%s is not in %s, so it is not checked: --live downloads it", m.Tokenizer, cache.Folder), nil
	case err != nil:
		return nil, "", err
	case s.Stale != nil:
		note = fmt.Sprintf("the model hub did not answer (%v): checked is the last one downloaded", s.Stale)
	case m.TokenizerLock == "" && !s.Fixed():
		note = fmt.Sprintf("the revision can move: write tokenizer: %s%s@%s, or tokenizer_lock: %s", hub.Prefix, s.Repository, s.Commit, s.Lock())
	}
	return s, note, checkLock(m, s)
}
