package disagg

import (
	"context"
	"fmt"
	"sync"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// maxFound bounds the pages that are kept; with more workers than that they are
// asked again now and then.
const maxFound = 4096

// found keeps the page that each worker gave of itself, until the worker changes or
// a leg fails.
type found struct {
	mu    sync.Mutex
	pages map[string]foundPage
}

type foundPage struct {
	generation uint64
	text       []byte
}

func newFound() *found { return &found{pages: map[string]foundPage{}} }

// known is the page of a worker, nil if there is none.
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

// learn reads a worker's page unless one is kept.
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

// Failed says that a leg to a prefill worker has failed: what it said of itself may
// have changed.
func (p *Protocol) Failed(s *Side) {
	if p.found != nil {
		p.found.forget(s)
	}
}
