package fleet

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kvlane/kvlane/internal/workers"
)

const (
	// listAgain is the TTL of the workers' lists: after it, an unknown name refreshes them.
	listAgain = 2 * time.Second
	// listTimeout bounds one GET /v1/models.
	listTimeout = 2 * time.Second
	// maxListing bounds the workers that are queried concurrently.
	maxListing = 16
	// maxListed bounds the names kept per worker.
	maxListed = 1024
)

// catalog has the names that workers list in GET /v1/models beyond the models that they
// declare: adapters that were loaded later. Workers are queried when a request names an
// unknown model.
type catalog struct {
	asker *workers.Asker

	mu    sync.Mutex // guards all below, and orders the calls of tellRouter
	names map[string]bool
	// listed has each worker's names with its generation.
	listed map[string]listed
	asked  time.Time
	// silent reports that a worker did not answer, so that it may serve any name.
	silent bool
	asking chan struct{} // closed when all have answered; nil while no query runs
}

type listed struct {
	generation uint64
	names      []string
}

// declare sets names (the models that workers list in their configuration), split (no model
// is served by all of them), and open (a worker lists none, which means that it serves
// any).
func (v *View) declare(base func(name string) string) {
	v.names = map[string]bool{}
	var common map[string]bool
	for _, m := range v.members {
		if len(m.Models) == 0 {
			v.open = true
			continue
		}
		mine := map[string]bool{}
		for _, name := range m.Models {
			v.names[name] = true
			mine[base(name)] = true
		}
		if common == nil {
			common = mine
		} else {
			maps.DeleteFunc(common, func(name string, _ bool) bool { return !mine[name] })
		}
	}
	v.split = !v.open && common != nil && len(common) == 0
}

// base returns the configured model that a name stands for, or the name.
func (f *Fleet) base(name string) string {
	if s := f.models[name]; s != nil {
		return s.CacheName()
	}
	return name
}

// Known reports whether a worker lists the name.
func (f *Fleet) Known(v *View, name string) bool {
	if v.names[name] {
		return true
	}
	f.catalog.mu.Lock()
	defer f.catalog.mu.Unlock()
	return f.catalog.names[name]
}

// OpenToAll reports whether requests for any model may be placed: no worker declares
// its models, or one does not.
func (v *View) OpenToAll() bool { return v.open || len(v.names) == 0 }

// Split reports whether no model is served by all workers.
func (v *View) Split() bool { return v.split }

// Declares reports whether a worker declares the name.
func (v *View) Declares(name string) bool { return v.names[name] }

// Names returns the declared names, sorted.
func (v *View) Names() []string { return slices.Sorted(maps.Keys(v.names)) }

// List queries all ready workers for their models, unless the last answers are fresh, and
// waits for the answers. It reports whether all of them answered.
func (f *Fleet) List(ctx context.Context) bool {
	c := &f.catalog
	c.mu.Lock()
	done := c.asking
	if done == nil {
		if f.Now().Sub(c.asked) < listAgain {
			defer c.mu.Unlock()
			return !c.silent
		}
		done = make(chan struct{})
		c.asking = done
		f.listing.Go(func() { f.askAll(done) })
	}
	c.mu.Unlock()
	select {
	case <-done:
	case <-ctx.Done():
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.silent
}

// askFor queries a worker for its models, when fewer than maxListing are queried.
func (f *Fleet) askFor(m *Member) ([]string, error) {
	f.listGate <- struct{}{}
	defer func() { <-f.listGate }()
	return f.catalog.asker.Models(f.listContext, "http://"+m.Address)
}

// askAll queries every ready worker and updates the router if the lists changed.
func (f *Fleet) askAll(done chan struct{}) {
	v := f.View()
	answers := map[string]listed{}
	silent := false
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, m := range v.members {
		if !m.Ready {
			continue
		}
		wg.Go(func() {
			names, err := f.askFor(m)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				silent = true
				f.Log.Debug().Str("worker", m.Name).Err(err).Msg("no list of models")
				return
			}
			answers[m.Name] = listed{m.Generation, names[:min(len(names), maxListed)]}
		})
	}
	wg.Wait()
	c := &f.catalog
	c.mu.Lock()
	defer c.mu.Unlock()
	c.names, c.listed, c.silent = map[string]bool{}, answers, silent
	for _, l := range answers {
		for _, name := range l.names {
			c.names[name] = true
		}
	}
	f.tellRouter(f.View())
	c.asked, c.asking = f.Now(), nil
	close(done)
}
