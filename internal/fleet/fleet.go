package fleet

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/tokens/conv"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
	"github.com/kvlane/kvlane/routing"
)

// Options of a Fleet.
type Options struct {
	Config *config.Config
	Models []*Model
	// Cache is the cache that requests use, so that comparisons with engines cover it too.
	Cache *conv.Cache
	// Key is the key of the block hash.
	Key     kvindex.Key
	Metrics *observe.Metrics
	Log     zerolog.Logger
	// OnEndpoints receives the addresses that Envoy may forward to: those of workers that serve whole requests, and
	// those of prefill workers. On each change it is called twice: first with the new addresses added, so that Envoy
	// knows an address before requests are placed there, then with the old ones removed.
	OnEndpoints func(serve, prefill []string)
	// Update runs a change of the router under its lock. now is the time at on the router's clock.
	Update func(at time.Time, change func(r *routing.Router, now time.Duration))
	// Now is the clock.
	Now func() time.Time
}

// Fleet knows the workers, the models that they serve, what they cache, and whether their
// tokenizers agree with ours, and keeps the router informed. It is safe for concurrent use.
type Fleet struct {
	Options

	index    *kvindex.Index
	models   atomic.Pointer[modelSet]
	changing sync.Mutex // serialises SetWorkers and SetModels
	// serve and prefill are the last addresses of OnEndpoints; under changing.
	serve, prefill []string
	view           atomic.Pointer[View]
	feeds          *feeds
	// otherBlocks reports whether an engine with a block size other than the index's was seen.
	otherBlocks atomic.Bool
	comparing   chan struct{} // semaphore of tokenizer comparisons
	catalog     catalog
	mismatches  mismatches
	listing     sync.WaitGroup // of askAll and askModels
	listGate    chan struct{}  // semaphore of queries for models
	listContext context.Context
	listStop    context.CancelFunc
}

// New returns a fleet without workers. Close ends it.
func New(o Options) (*Fleet, error) {
	index, err := kvindex.New(kvindex.Config{
		BlockSize: o.Config.Index.BlockSize, MaxBytes: int64(o.Config.Index.MaxBytes), Key: o.Key,
		SpeculativeTTL: o.Config.Routing.Speculate.Std(),
	})
	if err != nil {
		return nil, err
	}
	f := &Fleet{Options: o, index: index, comparing: make(chan struct{}, maxComparisons),
		listGate: make(chan struct{}, maxListing)}
	f.listContext, f.listStop = context.WithCancel(context.Background())
	f.catalog.listed = map[string]listed{}
	f.catalog.asker = workers.NewAsker(listTimeout)
	f.mismatches.byWorker, f.mismatches.next = map[string]map[string]mismatch{}, map[string]*Member{}
	f.view.Store(&View{members: map[string]*Member{}})
	f.models.Store(newModelSet(o.Models))
	f.Models = nil // SetModels replaces them, and their tokenizers are large
	f.feeds = newFeeds()
	return f, nil
}

// Close ends all feeds and comparisons.
func (f *Fleet) Close() {
	f.listStop()
	f.listing.Wait()
	f.catalog.asker.Close()
	f.feeds.close()
	for _, m := range f.models.Load().list {
		m.agreement.end()
	}
}

var roles = map[string]routing.Role{"both": routing.Both, "prefill": routing.Prefill, "decode": routing.Decode}

// SetWorkers replaces the list of workers. If a worker is gone or has another generation, its blocks, load and feed are
// dropped.
func (f *Fleet) SetWorkers(list []workers.Worker) {
	f.changing.Lock()
	defer f.changing.Unlock()
	f.setWorkers(list)
}

// setWorkers also forgets a worker's blocks if they belong to another model than before. The caller holds changing.
func (f *Fleet) setWorkers(list []workers.Worker) {
	old := f.View()
	next := &View{members: make(map[string]*Member, len(list)), byAddress: map[string][]kvindex.Slot{}}
	listed := make(map[string]*workers.Worker, len(list))
	for i := range list {
		listed[list[i].Name] = &list[i]
	}
	for name, m := range old.members {
		if w := listed[name]; w == nil || w.Generation != m.Generation {
			f.drop(m)
		}
	}
	for _, w := range list {
		m := old.members[w.Name]
		if m == nil || m.Generation != w.Generation {
			added, err := f.add(w)
			if err != nil {
				f.Log.Error().Err(err).Str("worker", w.Name).Msg("worker left out")
				continue
			}
			m = added
			f.checkMember(m)
		} else {
			m = &Member{Worker: w, Slots: m.Slots, feed: m.feed, counters: m.counters, answered: m.answered, blockSize: m.blockSize, model: m.model}
			f.relabel(m)
		}
		next.enter(m)
		asks := len(w.Models) > 0 || f.Config.Workers.Health.Every > 0 // without health checks only to verify a configured list
		if before := old.members[w.Name]; asks && w.Ready && (before == nil || !before.Ready || before.Generation != w.Generation) {
			f.checkModels(m)
		}
	}
	next.declare(f.base)
	serve, prefill := next.addresses(list)
	// Both before the router is updated: a request placed on a new worker looks up its endpoint, and Envoy must know it.
	f.forwardTo(slices.Concat(f.serve, serve), slices.Concat(f.prefill, prefill))
	f.view.Store(next)
	f.forgetMismatches(next)
	f.catalog.mu.Lock()
	f.catalog.current(next) // a name that only removed workers listed is unknown now
	f.tellRouter(next)
	f.catalog.mu.Unlock()
	f.compareAll(next)
	gone := maps.Clone(old.members)
	if maps.DeleteFunc(gone, func(name string, _ *Member) bool { return next.members[name] != nil }); len(gone) > 0 {
		f.Metrics.ForgetWorkers(func(name string) bool { return gone[name] != nil })
	}
	f.forwardTo(serve, prefill) // after it was told of what has gone
	f.serve, f.prefill = serve, prefill
}

func (f *Fleet) forwardTo(serve, prefill []string) {
	if f.OnEndpoints != nil {
		f.OnEndpoints(serve, prefill)
	}
}

// enter adds a worker to a view under construction.
func (v *View) enter(m *Member) {
	v.members[m.Name] = m
	all := endpoints(&m.Worker.Worker)
	for i, slot := range m.Slots {
		for int(slot) >= len(v.endpoints) {
			v.endpoints = append(v.endpoints, Endpoint{})
		}
		e := all[i]
		e.Member, e.Counters, e.Name = m, m.counters[i], e.Target.String()
		v.endpoints[slot] = e
		v.byAddress[e.Address] = append(v.byAddress[e.Address], slot)
	}
}

// addresses returns the addresses that requests may be forwarded to, in the order of list: those of workers that serve
// whole requests, and those of prefill workers.
func (v *View) addresses(list []workers.Worker) (serve, prefill []string) {
	for i := range list {
		m := v.members[list[i].Name]
		if m == nil || !m.Ready || m.Draining {
			continue
		}
		for _, slot := range m.Slots {
			address := v.endpoints[slot].Address
			if roles[m.Role] == routing.Prefill {
				prefill = append(prefill, address)
			} else {
				serve = append(serve, address)
			}
		}
	}
	return serve, prefill
}

// add allocates the slots of a new worker and starts its feed.
func (f *Fleet) add(w workers.Worker) (*Member, error) {
	all := endpoints(&w.Worker)
	m := &Member{Worker: w, answered: f.Metrics.Responses.WithLabelValues(w.Name, "2xx"), blockSize: new(atomic.Int32), model: f.cacheModel(w.Models)}
	m.blockSize.Store(int32(w.BlockSize))
	f.sawBlocks(int32(w.BlockSize))
	resume := make([]*feed.Cursor, len(all))
	for i, e := range all {
		slot, cursor, err := f.addSlot(e.Target, &w.Worker)
		if err != nil {
			f.drop(m)
			return nil, err
		}
		m.Slots = append(m.Slots, slot)
		m.counters = append(m.counters, newCounters(f.Metrics, e.Target))
		resume[i] = cursor
	}
	m.feed = f.startFeed(m, all, resume)
	return m, nil
}

// relabel clears a worker's blocks and restarts its feed if the blocks belong to another model than before. The worker
// keeps serving, and its load stays.
func (f *Fleet) relabel(m *Member) {
	model := f.cacheModel(m.Models)
	if model == m.model {
		return
	}
	m.feed.stop()
	m.model = model
	f.feeds.snapshot.RLock()
	for _, slot := range m.Slots {
		f.index.Relabel(slot, model)
	}
	f.feeds.snapshot.RUnlock()
	all := endpoints(&m.Worker.Worker)
	m.feed = f.startFeed(m, all, make([]*feed.Cursor, len(all)))
	f.checkMember(m)
}

// drop removes a worker with everything known about it.
func (f *Fleet) drop(m *Member) {
	m.feed.stop()
	f.Update(f.Now(), func(r *routing.Router, _ time.Duration) {
		for _, slot := range m.Slots {
			r.RemoveTarget(slot)
		}
	})
	for _, slot := range m.Slots {
		f.dropSlot(slot)
	}
}

// tellRouter passes the current targets to the router, 64 workers at a time because decisions wait meanwhile. They are
// in the router's order, so that adding thousands takes linear time. The caller holds catalog.mu.
func (f *Fleet) tellRouter(v *View) {
	for names := range slices.Chunk(slices.Sorted(maps.Keys(v.members)), 64) {
		f.Update(f.Now(), func(r *routing.Router, _ time.Duration) {
			for _, name := range names {
				m := v.members[name]
				models := m.Models
				if l := f.catalog.listed[name]; len(models) > 0 && l.generation == m.Generation {
					models = slices.Compact(slices.Sorted(slices.Values(slices.Concat(models, l.names))))
				}
				for _, slot := range m.Slots {
					e := &v.endpoints[slot]
					r.SetTarget(slot, routing.TargetInfo{
						Target: e.Target, Role: roles[m.Role], Models: models, Ready: m.Ready, Draining: m.Draining,
						Speed: m.Speed, Zone: m.Labels["zone"], Address: e.Address,
					})
				}
			}
		})
	}
}

// Load passes the loads that an engine reports for its ranks to the router. at is when their measurement began.
func (f *Fleet) Load(worker string, at time.Time, loads []workers.RankLoad) {
	v := f.View()
	m := v.members[worker]
	if m == nil {
		return
	}
	f.Update(f.Now(), func(r *routing.Router, now time.Duration) {
		for _, l := range loads {
			report := routing.Report{At: now - f.Now().Sub(at), Running: int64(l.Running), Waiting: int64(l.Waiting), KVUsage: l.KVUsage}
			if l.Rank == kvindex.NoRank || len(loads) == 1 && len(m.Slots) > 1 {
				r.ReportWorker(now, worker, report)
				continue
			}
			for _, slot := range m.Slots {
				if rank := v.endpoints[slot].Target.Rank; rank == l.Rank || rank == kvindex.NoRank && len(loads) == 1 {
					r.Report(now, slot, report)
				}
			}
		}
	})
}

// ForgetGone deletes a worker's metrics if it has left, so that series do not accumulate in fleets whose workers are
// replaced under new names. A request that ends after its worker left creates the series again, so call ForgetGone
// after counting for a worker.
func (f *Fleet) ForgetGone(worker string) {
	if f.View().members[worker] == nil {
		f.Metrics.ForgetWorker(worker)
	}
}

// Workers returns the rows of the debug page, sorted by name.
func (f *Fleet) Workers() []observe.WorkerRow {
	rows := []observe.WorkerRow{}
	warnings := map[string][]string{}
	for _, w := range f.Warnings() {
		warnings[w.Worker] = append(warnings[w.Worker], w.Text)
	}
	for _, m := range f.View().members {
		rows = append(rows, observe.WorkerRow{Name: m.Name, Address: m.Address, Engine: m.Engine, Role: m.Role, Reason: m.Reason,
			Models: m.Models[:min(len(m.Models), observe.MaxShown)], More: max(0, len(m.Models)-observe.MaxShown), Ranks: m.Ranks, Ready: m.Ready, Draining: m.Draining, Warnings: warnings[m.Name]})
	}
	slices.SortFunc(rows, func(a, b observe.WorkerRow) int { return strings.Compare(a.Name, b.Name) })
	return rows
}

// Collect emits the fleet's series when the metrics are scraped.
func (f *Fleet) Collect(emit observe.Emit) {
	for _, m := range f.View().members {
		emit.WorkerReady(m.Name, m.Role, m.Ready && !m.Draining)
	}
	emit.Warnings(f.Warnings())
	f.Expire(f.Now())
	emit.Index(f.index.Stats(), f.feeds.warmed.Load())
	emit.Feeds(f.FeedStatus())
	for _, m := range f.models.Load().list {
		for worker, c := range m.agreement.all() {
			emit.Tokenizer(m.Config.Name, worker, c.checker.State().String())
		}
	}
}

// IndexPage returns the index and its feeds for the debug page.
func (f *Fleet) IndexPage() observe.IndexPage {
	f.Expire(f.Now())
	return observe.NewIndexPage(f.index.Stats(), f.FeedStatus(), f.feeds.warmed.Load())
}
