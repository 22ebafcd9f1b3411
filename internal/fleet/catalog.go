package fleet

import (
	"cmp"
	"context"
	"encoding/json"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvlane/kvlane/internal/workers"
)

const (
	// listAgain is the TTL of the workers' lists: after it, an unknown name refreshes them.
	listAgain = 2 * time.Second
	// listTimeout bounds one GET /v1/models, and the time that a request waits for all workers' answers.
	listTimeout = 2 * time.Second
	// shownFor is the TTL of the lists for the answer to a client's GET /v1/models.
	shownFor = 15 * time.Second
	// maxListing bounds the workers that are queried concurrently.
	maxListing = 16
	// maxList bounds the answer to a client in bytes: one engine may list megabytes, which the connection to Envoy carries
	// before all later decisions.
	maxList = 1 << 20
)

// catalog holds the names that workers list in GET /v1/models in addition to the models that they declare, such as
// adapters that were loaded later. Workers are queried when a request names an unknown model.
type catalog struct {
	asker *workers.Asker

	mu    sync.Mutex // guards all below, and orders the calls of tellRouter
	names map[string]bool
	// listed is what each worker listed, by its name; an entry counts while the worker's generation is the same.
	listed map[string]listed
	asked  time.Time
	// silent reports that a worker did not answer, so that it may serve any name.
	silent bool
	asking chan struct{} // closed when all have answered; nil while no query runs
	// changes counts the changes of listed; shown is the last answer to clients.
	changes uint64
	shown   *Catalog

	showing sync.Mutex // held while shown is built; locked before mu
}

type listed struct {
	generation uint64
	names      []string
	models     []workers.Listed
	served     map[string]served // by model
}

// served is what an engine reports about a model: its context length in tokens, 0 if the entries for its names
// disagree, and the value of the engine's --model, "" if unknown.
type served struct {
	context int
	base    string
}

// declare sets sglang and three other fields: names (the models that workers list in their configuration), split (no
// model is served by all workers) and open (a worker lists none, so it serves any model).
func (v *View) declare(base func(name string) string) {
	v.names, v.sglang = map[string]bool{}, map[string]bool{}
	var common map[string]bool
	for _, m := range v.members {
		if len(m.Models) == 0 {
			if v.open = true; m.Engine == "sglang" {
				v.sglang[""] = true
			}
			continue
		}
		mine := map[string]bool{}
		for _, name := range m.Models {
			v.names[name] = true
			mine[base(name)] = true
			if m.Engine == "sglang" {
				v.sglang[base(name)] = true
			}
		}
		if common == nil {
			common = mine
		} else {
			maps.DeleteFunc(common, func(name string, _ bool) bool { return !mine[name] })
		}
	}
	v.split = !v.open && common != nil && len(common) == 0
}

// base returns the configured model that a name stands for, the name itself if there is none.
func (f *Fleet) base(name string) string {
	if s := f.models.Load().byName[name]; s != nil {
		return s.Config.Name
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

// OpenToAll reports whether requests for any model may be placed: a worker declares no models, or none does.
func (v *View) OpenToAll() bool { return v.open || len(v.names) == 0 }

// Split reports whether no model is served by all workers.
func (v *View) Split() bool { return v.split }

// Declares reports whether a worker declares the name.
func (v *View) Declares(name string) bool { return v.names[name] }

// Names returns the declared names, sorted.
func (v *View) Names() []string { return slices.Sorted(maps.Keys(v.names)) }

// List queries all ready workers for their models, unless the last answers are fresh, and
// waits for the answers, at most listTimeout. It reports whether all of them answered.
func (f *Fleet) List(ctx context.Context) bool { return f.list(ctx, listAgain) }

func (f *Fleet) list(ctx context.Context, ttl time.Duration) bool {
	c := &f.catalog
	c.mu.Lock()
	done := c.asking
	if done == nil {
		if f.Now().Sub(c.asked) < ttl {
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

// Catalog is an answer to GET /v1/models. It is not changed.
type Catalog struct {
	// JSON is the list, sorted by name, of at most maxList bytes: a longer one has names only. It is nil if that does not suffice,
	// or no worker has listed a model.
	JSON   []byte
	Models map[string]workers.Listed
	// Whole reports whether all ready workers have answered.
	Whole bool

	view    *View
	changes uint64
}

// Listed returns the models that ready workers serve, adapters included. For a worker that
// has not answered they are those of its configuration.
func (f *Fleet) Listed(ctx context.Context) *Catalog {
	f.list(ctx, shownFor)
	c := &f.catalog
	c.showing.Lock()
	defer c.showing.Unlock()
	v := f.View()
	c.mu.Lock()
	if c.shown != nil && c.shown.view == v && c.shown.changes == c.changes {
		defer c.mu.Unlock()
		return c.shown
	}
	shown := &Catalog{view: v, changes: c.changes, Whole: !c.silent, Models: map[string]workers.Listed{}}
	lists := maps.Clone(c.listed)
	c.mu.Unlock()
	shown.fill(lists)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shown = shown
	return shown
}

func (s *Catalog) fill(lists map[string]listed) {
	answered := false
	for _, name := range slices.Sorted(maps.Keys(s.view.members)) {
		m := s.view.members[name]
		if !m.Ready || m.Draining {
			continue
		}
		l, ok := lists[name]
		if ok = ok && l.generation == m.Generation; ok {
			answered = true
		} else {
			l.models = nil
			for _, id := range m.Models {
				l.models = append(l.models, workers.Listed{ID: id, Object: "model", OwnedBy: m.Engine})
			}
		}
		for _, model := range l.models {
			if known, ok := s.Models[model.ID]; !ok || known.Created == nil && model.Created != nil {
				s.Models[model.ID] = model
			}
		}
	}
	if !answered || len(s.Models) == 0 {
		return
	}
	var out []workers.Listed
	for _, id := range slices.Sorted(maps.Keys(s.Models)) {
		out = append(out, s.Models[id])
	}
	text, err := json.Marshal(map[string]any{"object": "list", "data": out})
	if len(text) > maxList {
		for i := range out {
			out[i] = workers.Listed{ID: out[i].ID, Object: "model"}
		}
		text, err = json.Marshal(map[string]any{"object": "list", "data": out})
	}
	if err == nil && len(text) <= maxList { // all fields were parsed
		s.JSON = text
	}
}

// askFor queries a worker for its models and stores them. It waits while maxListing workers are being queried.
func (f *Fleet) askFor(ctx context.Context, m *Member) (l listed, err error) {
	select {
	case f.listGate <- struct{}{}:
	case <-ctx.Done():
		return l, ctx.Err()
	}
	defer func() { <-f.listGate }()
	list, err := f.catalog.asker.Models(ctx, "http://"+m.Address)
	if err != nil {
		return l, err
	}
	l = listed{generation: m.Generation, models: list, served: f.served(list)}
	for i := range list {
		l.names = append(l.names, list[i].ID)
	}
	c := &f.catalog
	c.mu.Lock()
	defer c.mu.Unlock()
	c.listed[m.Name] = l
	c.changes++
	return l, nil
}

// served returns what a worker's model list reports about the configured models, by their configured names.
func (f *Fleet) served(list []workers.Listed) map[string]served {
	out, models := map[string]served{}, f.models.Load()
	for i := range list {
		m := models.byName[list[i].ID]
		if m == nil {
			continue
		}
		s, known := out[m.Config.Name]
		if m.Config.EngineModel == "" {
			s.base = firstNamed(s.base, list[i].Base())
		}
		if n := list[i].Context(); !known {
			s.context = n
		} else if n != s.context {
			s.context = 0
		}
		out[m.Config.Name] = s
	}
	return out
}

// firstNamed returns the alphabetically first of two names; "" stands for no name.
func firstNamed(a, b string) string {
	if a == "" || b != "" && b < a {
		return b
	}
	return a
}

// learnContexts sets each model's context length, if all its engines report the same, and the engines' --model: if they
// differ, the alphabetically first. The caller holds the catalog's lock.
func (f *Fleet) learnContexts(models []*Model) {
	all := map[string]served{}
	for _, l := range f.catalog.listed {
		for name, s := range l.served {
			if known, ok := all[name]; ok {
				if s.base = firstNamed(known.base, s.base); s.context != known.context {
					s.context = 0
				}
			}
			all[name] = s
		}
	}
	for _, m := range models {
		if m.Tokens != nil {
			m.Tokens.SetMaxModelLen(all[m.Config.Name].context)
			m.Tokens.SetEngineModel(cmp.Or(m.Config.EngineModel, all[m.Config.Name].base))
		}
	}
}

// askAll queries every ready worker and updates the router if the lists changed.
func (f *Fleet) askAll(done chan struct{}) {
	v := f.View()
	ctx, cancel := context.WithTimeout(f.listContext, listTimeout)
	defer cancel()
	var silent atomic.Bool
	var wg sync.WaitGroup
	for _, m := range v.members {
		if !m.Ready {
			continue
		}
		wg.Go(func() {
			if _, err := f.askFor(ctx, m); err != nil {
				silent.Store(true)
				f.Log.Debug().Str("worker", m.Name).Err(err).Msg("no list of models")
			}
		})
	}
	wg.Wait()
	c := &f.catalog
	c.mu.Lock()
	defer c.mu.Unlock()
	v, c.silent = f.View(), silent.Load()
	c.current(v)
	f.learnContexts(f.models.Load().list)
	c.changes++
	f.tellRouter(v)
	c.asked, c.asking = f.Now(), nil
	close(done)
}

// current drops the lists of workers that are gone or replaced, so that the next request for an unknown name queries the
// workers again. The caller holds mu.
func (c *catalog) current(v *View) {
	maps.DeleteFunc(c.listed, func(name string, l listed) bool {
		m := v.members[name]
		gone := m == nil || m.Generation != l.generation
		if gone {
			c.asked = time.Time{}
		}
		return gone
	})
	c.names = map[string]bool{}
	for _, l := range c.listed {
		for _, name := range l.names {
			c.names[name] = true
		}
	}
}
