package disagg

import (
	"context"
	"fmt"

	lru "github.com/hashicorp/golang-lru/v2"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// maxPages limits the pages that are kept; with more workers than that, pages are fetched again from time to time.
const maxPages = 4096

// workerPage is the page that a worker publishes about itself, kept until the worker changes or a leg to it fails.
type workerPage struct {
	generation uint64
	text       []byte
}

func newPages() *lru.Cache[string, workerPage] {
	pages, _ := lru.New[string, workerPage](maxPages) // fails only for a size below 1
	return pages
}

// page returns the cached page of a worker, nil if there is none.
func (p *Protocol) page(s *Side) []byte {
	if page, ok := p.pages.Get(s.Worker); ok && page.generation == s.Generation {
		return page.text
	}
	return nil
}

// fetchPage fetches a worker's page unless it is cached.
func (p *Protocol) fetchPage(ctx context.Context, s *Side, address, path string, api bool) error {
	if p.page(s) != nil {
		return nil
	}
	text, err := p.options.Get(ctx, address, path, api)
	if err == nil {
		err = body.Valid(text)
	}
	if err != nil {
		return fmt.Errorf("ask %s: %w", s.Worker, err)
	}
	p.pages.Add(s.Worker, workerPage{s.Generation, text})
	return nil
}

// Failed reports that a leg to a prefill worker has failed, and drops the worker's cached page, which may be outdated.
func (p *Protocol) Failed(s *Side) {
	if p.pages != nil {
		p.pages.Remove(s.Worker)
	}
}
