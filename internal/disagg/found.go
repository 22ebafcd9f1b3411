package disagg

import (
	"context"
	"fmt"

	lru "github.com/hashicorp/golang-lru/v2"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// maxFound limits the pages that are kept; with more workers than that, pages are fetched again from time to time.
const maxFound = 4096

// found caches the page that each worker publishes about itself, until the worker changes or a leg to it fails.
type found struct {
	pages *lru.Cache[string, foundPage]
}

type foundPage struct {
	generation uint64
	text       []byte
}

func newFound() *found {
	pages, _ := lru.New[string, foundPage](maxFound) // fails only for a size below 1
	return &found{pages}
}

// known returns the cached page of a worker, nil if there is none.
func (f *found) known(s *Side) []byte {
	if p, ok := f.pages.Get(s.Worker); ok && p.generation == s.Generation {
		return p.text
	}
	return nil
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
	p.found.pages.Add(s.Worker, foundPage{s.Generation, text})
	return nil
}

// Failed reports that a leg to a prefill worker has failed, and drops the worker's cached page,
// which may be outdated.
func (p *Protocol) Failed(s *Side) {
	if p.found != nil {
		p.found.pages.Remove(s.Worker)
	}
}
