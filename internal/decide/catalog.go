package decide

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/prompt"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/routing"
)

const (
	// listAgain is how long what workers list is believed: a name that nobody knew is
	// asked for again after it.
	listAgain = 2 * time.Second
	// listTimeout bounds one question for models.
	listTimeout = 2 * time.Second
	// listAtOnce bounds how many workers are asked at a time.
	listAtOnce = 16
	// maxListed bounds the names of one worker that are kept.
	maxListed = 1024
	// maxNamed bounds the names that an answer to a client lists.
	maxNamed = 20
)

// catalog is what workers that declare their models list beyond that in GET
// /v1/models: adapters that were loaded since. They are asked when a request names a
// model that nobody knows.
type catalog struct {
	asker *workers.Asker

	mu    sync.Mutex // of all below, and of who tells the router what workers serve
	names map[string]bool
	// listed has a worker's names with its generation.
	listed map[string]listed
	asked  time.Time
	// silent says that a worker did not answer: it may know the name.
	silent bool
	asking chan struct{} // closed when the answers are there; nil if nobody asks
}

type listed struct {
	generation uint64
	names      []string
}

// declared says which names workers list in their configuration. split says that no
// model is served by all of them; open that a worker lists none, which means any.
func (f *fleet) declare(base func(name string) string) {
	f.names = map[string]bool{}
	var common map[string]bool
	for _, m := range f.members {
		if len(m.Models) == 0 {
			f.open = true
			continue
		}
		mine := map[string]bool{}
		for _, name := range m.Models {
			f.names[name] = true
			mine[base(name)] = true
		}
		if common == nil {
			common = mine
		} else {
			maps.DeleteFunc(common, func(name string, _ bool) bool { return !mine[name] })
		}
	}
	f.split = !f.open && common != nil && len(common) == 0
}

// base is the configured model that a name stands for, or the name.
func (d *Decider) base(name string) string {
	if s := d.models[name]; s != nil {
		return s.cacheName()
	}
	return name
}

// known says whether a worker lists the name.
func (d *Decider) known(f *fleet, name string) bool {
	if f.names[name] {
		return true
	}
	d.catalog.mu.Lock()
	defer d.catalog.mu.Unlock()
	return d.catalog.names[name]
}

// whose finds out who serves the model that the request names. A name that nobody
// lists is refused: any worker would be a worker of another model.
func (j *job) whose(ctx context.Context) *extproc.Reject {
	d, f := j.d, j.d.fleet.Load()
	if d.cfg.Limits.UnknownModel == "route" || f.open || len(f.names) == 0 {
		return nil
	}
	name := j.request.Model()
	if name == "" {
		if !f.split {
			return nil
		}
		return &extproc.Reject{Status: 400, Details: "kvlane_model_missing", Body: prompt.AppendFailure(nil, j.api, prompt.Failure{Status: 400,
			Type: failureTypes[400], Param: "model", Message: `you must provide a "model": ` + served(f) + " are served here"})}
	}
	if d.known(f, name) {
		return nil
	}
	if s := j.served; s != nil {
		for _, other := range s.names() {
			if f.names[other] {
				j.query.Model = other // an alias or an adapter that workers do not list
				return nil
			}
		}
	}
	if base, _, adapter := strings.Cut(name, ":"); adapter && d.known(f, base) { // SGLang's base:adapter
		j.query.Model = base
		return nil
	}
	j.leave()
	d.list(ctx)
	if !j.sit(ctx) {
		return j.gone(ctx)
	}
	if d.known(f, name) {
		return nil
	}
	d.catalog.mu.Lock()
	silent := d.catalog.silent
	d.catalog.mu.Unlock()
	switch {
	case ctx.Err() != nil || silent:
		return nil
	case j.served != nil:
		return &extproc.Reject{Status: 503, Details: "kvlane_model_not_served", Body: j.failure(503, fmt.Sprintf("no worker serves the model `%s` at the moment", clip(name)))}
	}
	return &extproc.Reject{Status: 404, Details: "kvlane_model_not_found", Body: prompt.AppendFailure(nil, j.api, prompt.Failure{Status: 404,
		Type: failureTypes[404], Param: "model", Code: "model_not_found", Message: fmt.Sprintf("The model `%s` does not exist: %s are served here", clip(name), served(f))})}
}

// served lists names for clients.
func served(f *fleet) string {
	names := slices.Sorted(maps.Keys(f.names))
	more := ""
	if len(names) > maxNamed {
		names, more = names[:maxNamed], ", ..."
	}
	return "`" + strings.Join(names, "`, `") + "`" + more
}

// list has all workers asked for their models, unless that was done just now, and
// waits for the answers.
func (d *Decider) list(ctx context.Context) {
	c := &d.catalog
	c.mu.Lock()
	done := c.asking
	if done == nil {
		if d.now().Sub(c.asked) < listAgain {
			c.mu.Unlock()
			return
		}
		done = make(chan struct{})
		c.asking = done
		d.listing.Go(func() { d.askAll(done) })
	}
	c.mu.Unlock()
	select {
	case <-done:
	case <-ctx.Done():
	}
}

// askAll asks every ready worker and tells the router what is new.
func (d *Decider) askAll(done chan struct{}) {
	f := d.fleet.Load()
	answers := map[string]listed{}
	silent := false
	var mu sync.Mutex
	var wg sync.WaitGroup
	gate := make(chan struct{}, listAtOnce)
	for _, m := range f.members {
		if !m.Ready {
			continue
		}
		gate <- struct{}{}
		wg.Go(func() {
			defer func() { <-gate }()
			names, err := d.catalog.asker.Models(d.listContext, "http://"+m.Address)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				silent = true
				d.log.Debug().Str("worker", m.Name).Err(err).Msg("no list of models")
				return
			}
			answers[m.Name] = listed{m.Generation, names[:min(len(names), maxListed)]}
		})
	}
	wg.Wait()
	c := &d.catalog
	c.mu.Lock()
	defer c.mu.Unlock()
	c.names, c.listed, c.silent = map[string]bool{}, answers, silent
	for _, l := range answers {
		for _, name := range l.names {
			c.names[name] = true
		}
	}
	d.tellRouter(d.fleet.Load())
	c.asked, c.asking = d.now(), nil
	close(done)
}

// tellRouter tells the router all targets as of now. The caller holds catalog.mu.
func (d *Decider) tellRouter(f *fleet) {
	d.book(d.now(), func(r *routing.Router, _ time.Duration) {
		for _, m := range f.members {
			models := m.Models
			if l := d.catalog.listed[m.Name]; len(models) > 0 && l.generation == m.Generation {
				models = slices.Concat(models, l.names)
				slices.Sort(models)
				models = slices.Compact(models)
			}
			for _, slot := range m.slots {
				p := &f.places[slot]
				r.SetTarget(slot, routing.TargetInfo{
					Target: p.target, Role: roles[m.Role], Models: models, Ready: m.Ready, Draining: m.Draining,
					Speed: m.Speed, Zone: m.Labels["zone"], Address: p.address,
				})
			}
		}
	})
}
