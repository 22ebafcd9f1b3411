package disagg

import (
	"context"
	"fmt"
	"sync"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// maxFound limits the pages that are kept; with more workers than that, pages are fetched again
// from time to time.
const maxFound = 4096

// found caches the page that each worker publishes about itself, until the worker changes or a
// leg to it fails.
type found struct {
	mu    sync.Mutex
	pages map[string]foundPage
}

type foundPage struct {
	generation uint64
	text       []byte
}

func newFound() *found { return &found{pages: map[string]foundPage{}} }

// known returns the cached page of a worker, nil if there is none.
func (f *found) known(s *Side) []byte {
	f.mu.Lock()
	defer f.mu.Unlock()
	if p, ok := f.pages[s.Worker]; ok && p.generation == s.Generation {
		return p.text
	}
	return nil
}

func (f *found) keep(s *Side, text []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.pages) >= maxFound {
		clear(f.pages)
	}
	f.pages[s.Worker] = foundPage{s.Generation, text}
}

func (f *found) forget(s *Side) {
	f.mu.Lock()
	delete(f.pages, s.Worker)
	f.mu.Unlock()
}

// learn fetches a worker's page unless it is cached.
func (p *Protocol) learn(ctx context.Context, s *Side, address, path string, api bool) error {
	if p.found.known(s) != nil {
		return nil
	}
	text, err := p.options.Get(ctx, address, path, api)
	if err == nil {
		err = body.Valid(text)
	}
	if err != nil {
		return fmt.Errorf("ask %s: %w", s.Worker, err)
	}
	p.found.keep(s, text)
	return nil
}

// Failed reports that a leg to a prefill worker has failed, and drops the worker's cached page,
// which may be outdated.
func (p *Protocol) Failed(s *Side) {
	if p.found != nil {
		p.found.forget(s)
	}
}
