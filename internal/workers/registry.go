// Package workers maintains the list of workers: it joins its sources, checks the engines'
// health, reads their load, and notifies the rest of Kvlane.
package workers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/internal/config"
)

// Worker is one engine as the rest of Kvlane sees it.
type Worker struct {
	config.Worker

	// Ready reports that the last checks succeeded: the worker may be picked.
	Ready bool
	// Draining reports that its source is removing the worker: it gets no new picks, and running requests end normally.
	Draining bool
	// Reason is why it is not ready, "" if it is.
	Reason string
	// Generation distinguishes successive workers with the same name or address: the new one inherits nothing.
	Generation uint64
}

// RankLoad is the load that an engine reports for one rank.
type RankLoad struct {
	// Rank is kvindex.NoRank (-1) where the engine does not label its series.
	Rank             int32
	Running, Waiting float64
	// KVUsage is 0 to 1.
	KVUsage float64
}

// EngineCache is what an engine's /metrics page reports about its cache and its ranks.
type EngineCache struct {
	// BlockSize is in tokens; 0 if it is not reported.
	BlockSize        int
	PrefixCachingOff bool
	// FirstRank is the lowest of the Ranks ranks on the page; both are 0 if its series name no rank.
	FirstRank, Ranks int
	// NoLoad is why the engine has no such page, "" if it has.
	NoLoad string
}

// Entry is a worker as a source lists it.
type Entry struct {
	config.Worker

	Draining bool
	// Unready is why the source considers the worker not ready, regardless of its health check; "" if it does not.
	Unready string
	// Identity changes with the process behind the same name and address (a pod's UID); "" where the source cannot know.
	Identity string
}

// Options of a Registry.
type Options struct {
	Health config.Health
	// Scrape is the interval of load reports; 0 reads none.
	Scrape time.Duration
	Log    zerolog.Logger
	// OnChange receives all workers, sorted by name, whenever one of them changed. Calls do not overlap.
	OnChange func([]Worker)
	// OnLoad receives a worker's load reports and when their measurement began. Calls for different workers may overlap.
	OnLoad func(worker string, at time.Time, loads []RankLoad)
	// OnCache is called when what a worker's engine reports about its cache has changed, at
	// most once a minute; may be nil.
	OnCache func(worker string, cache EngineCache)
	// OnCheck is called with the outcome of each check ("ok", "failed"); may be nil.
	OnCheck func(worker, outcome string)
}

// Registry joins sources. It is safe for concurrent use.
type Registry struct {
	opts Options
	ctx  context.Context
	stop context.CancelFunc
	wg   sync.WaitGroup

	mu         sync.Mutex
	sources    map[string][]Entry
	tracked    map[string]*tracked
	warned     map[string]bool // names that several sources list, for which a warning was logged
	stuck      map[string]trouble
	generation uint64
	notify     chan struct{}
	untold     int // number of changes for which OnChange has not returned yet
}

// trouble is why a source could not be read; its last list then stays.
type trouble struct {
	text   string
	logged time.Time
}

// source records that a source could not be read, with err and a text for the log, or that it was read (nil). It logs the first of
// several failures in a row, then at most one per minute.
func (r *Registry) source(name, text string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		delete(r.stuck, name)
		return
	}
	now := r.stuck[name]
	if now.text = fmt.Sprintf("%s: %s: %v", name, text, err); time.Since(now.logged) >= warnEvery {
		now.logged = time.Now()
		r.opts.Log.Warn().Str("source", name).Err(err).Msg(text)
	}
	r.stuck[name] = now
}

// Stuck returns why sources cannot be read, sorted.
func (r *Registry) Stuck() (why []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range r.stuck {
		why = append(why, t.text)
	}
	slices.Sort(why)
	return why
}

// tracked is one worker with its checker.
type tracked struct {
	entry    Entry
	worker   Worker
	failures int
	checked  bool
	again    bool      // the first check, with its short timeout, timed out; another one runs
	warned   time.Time // of the last failed check
	cache    EngineCache
	reported time.Time // of the last call of OnCache: a page that alternates cannot fill the log
	down     string    // why the checks consider it not ready, "" if they do not
	cancel   context.CancelFunc
	kick     chan struct{}
	told     bool          // OnChange was last called with it as ready
	first    chan struct{} // it has become ready: its load is read immediately
}

// New returns a registry that runs until Close.
func New(opts Options) *Registry {
	ctx, stop := context.WithCancel(context.Background())
	r := &Registry{
		opts: opts, ctx: ctx, stop: stop,
		sources: map[string][]Entry{}, tracked: map[string]*tracked{}, warned: map[string]bool{}, stuck: map[string]trouble{}, notify: make(chan struct{}, 1),
	}
	r.wg.Go(r.announce)
	return r
}

// Close stops all checks and waits for them.
func (r *Registry) Close() {
	r.stop()
	r.wg.Wait()
}

// Set replaces the list of a source. A name that several sources list belongs to the configuration ("static"), else to
// the first source by name; the other entries are ignored with a warning.
func (r *Registry) Set(source string, list []Entry) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sources[source] = list
	want, owner := map[string]Entry{}, map[string]string{}
	for _, s := range slices.SortedFunc(maps.Keys(r.sources), staticFirst) {
		for _, e := range r.sources[s] {
			if first, taken := owner[e.Name]; !taken {
				want[e.Name], owner[e.Name] = e, s
			} else if key := s + "\x00" + e.Name; s == source && !r.warned[key] {
				r.warned[key] = true
				r.opts.Log.Warn().Str("worker", e.Name).Str("source", s).Str("address", e.Address).Str("owner", first).Msg("worker left out: another source has its name")
			}
		}
	}
	for name, t := range r.tracked {
		e, ok := want[name]
		if ok && sameProcess(t.entry, e) {
			continue
		}
		t.cancel()
		delete(r.tracked, name)
		if !ok {
			r.opts.Log.Info().Str("worker", name).Str("address", t.entry.Address).Str("source", source).Msg("worker removed")
		} else {
			r.opts.Log.Info().Str("worker", name).Str("address", e.Address).Str("source", owner[name]).Msg("worker replaced: the state of the old one is dropped")
		}
	}
	for name, e := range want {
		if t, ok := r.tracked[name]; ok {
			if t.entry.Unready != "" && e.Unready == "" {
				// The source has just reported it ready, which is newer than our last check.
				t.down, t.failures, t.checked = "", 0, true
				Poke(t.kick)
			}
			t.entry = e
			t.worker.Worker, t.worker.Draining = e.Worker, e.Draining
			t.settle(r.opts.Health.Every > 0)
			continue
		}
		r.generation++
		ctx, cancel := context.WithCancel(r.ctx)
		t := &tracked{entry: e, cancel: cancel, kick: make(chan struct{}, 1), first: make(chan struct{}, 1)}
		t.worker = Worker{Worker: e.Worker, Draining: e.Draining, Generation: r.generation}
		t.settle(r.opts.Health.Every > 0)
		r.tracked[name] = t
		r.wg.Go(func() { r.watch(ctx, t) })
	}
	r.changed()
}

// staticFirst orders sources: the configuration, then by name.
func staticFirst(a, b string) int {
	return strings.Compare(strings.TrimPrefix(a, staticSource), strings.TrimPrefix(b, staticSource))
}

// settle combines the results of the last checks with the source's. Without checks the source alone decides.
func (t *tracked) settle(checks bool) {
	switch {
	case t.entry.Unready != "":
		t.worker.Ready, t.worker.Reason = false, t.entry.Unready
	case !checks:
		t.worker.Ready, t.worker.Reason = true, ""
	case !t.checked:
		t.worker.Ready, t.worker.Reason = false, "not checked yet"
	default:
		t.worker.Ready, t.worker.Reason = t.down == "", t.down
	}
}

// sameProcess reports whether two entries mean the same process.
func sameProcess(a, b Entry) bool {
	return a.Address == b.Address && a.Identity == b.Identity && a.Engine == b.Engine &&
		a.Ranks == b.Ranks && a.StartRank == b.StartRank && a.RankBy == b.RankBy && a.Events == b.Events && a.BlockSize == b.BlockSize
}

// Suspect triggers an immediate check of a worker, because a request to it failed.
func (r *Registry) Suspect(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if t, ok := r.tracked[name]; ok {
		Poke(t.kick)
	}
}

// Poke sends without blocking, as one pending signal is enough.
func Poke(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Workers returns all workers, sorted by name.
func (r *Registry) Workers() []Worker {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.list()
}

func (r *Registry) list() []Worker {
	out := make([]Worker, 0, len(r.tracked))
	for _, name := range slices.Sorted(maps.Keys(r.tracked)) {
		out = append(out, r.tracked[name].worker)
	}
	return out
}

// Settled reports whether every worker has been checked at least once and OnChange has returned with the results.
func (r *Registry) Settled() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range r.tracked {
		if (!t.checked || t.again) && r.opts.Health.Every > 0 {
			return false
		}
	}
	return r.untold == 0
}

// changed triggers a call of OnChange. The caller holds the lock.
func (r *Registry) changed() {
	r.untold++
	Poke(r.notify) // one that is pending already will see this change
}

func (r *Registry) announce() {
	Paced(r.ctx, r.notify, func() {
		r.mu.Lock()
		list, told := r.list(), r.untold
		r.mu.Unlock()
		r.opts.OnChange(list)
		r.mu.Lock()
		r.untold -= told
		for i := range list {
			if t := r.tracked[list[i].Name]; t != nil && t.worker.Generation == list[i].Generation {
				if list[i].Ready && !t.told && r.opts.Scrape > 0 {
					Poke(t.first)
				}
				t.told = list[i].Ready
			}
		}
		r.mu.Unlock()
	})
}

// Paced calls do for each signal of due, until ctx ends. After a call it pauses for nine times the time
// that do took, at most a second, so that a large fleet that changes constantly uses a tenth of a
// processor. Signals during that time are combined into one, if due has a buffer of one.
func Paced(ctx context.Context, due <-chan struct{}, do func()) {
	rest := time.NewTimer(0)
	defer rest.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-rest.C:
		}
		select {
		case <-ctx.Done():
			return
		case <-due:
		}
		began := time.Now()
		do()
		rest.Reset(min(9*time.Since(began), time.Second))
	}
}

// firstCheck bounds a worker's first check, so that a wrong address that drops packets is reported
// early. A check with the configured timeout follows immediately: the engine may be slow.
const firstCheck = 1500 * time.Millisecond

// watch checks one worker and reads its load until ctx ends.
func (r *Registry) watch(ctx context.Context, t *tracked) {
	timeout := cmp.Or(max(r.opts.Health.Timeout.Std(), 0), time.Second)
	p := &prober{timeout: min(timeout, firstCheck)}
	defer p.close()
	slot := rand.Int64N(slots)
	health := newTurns(r.opts.Health.Every.Std(), slot)
	defer health.Stop()
	scrape := newTurns(r.opts.Scrape, slot)
	defer scrape.Stop()
	again := r.opts.Health.Every > 0 && r.check(ctx, t, p, timeout > firstCheck)
	p.timeout = timeout
	if again {
		r.check(ctx, t, p, false)
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-health.C:
			health.next()
			r.check(ctx, t, p, false)
		case <-t.kick:
			if r.opts.Health.Every > 0 {
				r.check(ctx, t, p, false)
			}
		case <-t.first:
			t.reported = time.Time{} // it may be another engine than before
			r.scrape(ctx, t, p)
		case <-scrape.C:
			scrape.next()
			r.scrape(ctx, t, p)
		}
	}
}

// slots is the number of points in an interval over which the workers of a fleet are spread. Workers of one slot are checked
// at the same time, and a worker's health and load right after each other, because waking up is most of the cost.
const slots = 10

var started = time.Now()

// turns is a timer that fires at phase plus multiples of every after started, so that workers are checked in turn.
type turns struct {
	*time.Timer

	every, phase time.Duration
}

// newTurns returns the turns of a slot; an interval of 0 has none.
func newTurns(every time.Duration, slot int64) turns {
	t := turns{time.NewTimer(time.Hour), every, every * time.Duration(slot) / slots}
	t.Stop()
	t.next()
	return t
}

func (t turns) next() {
	if t.every > 0 {
		t.Reset(t.until(time.Since(started)))
	}
}

// until is the time from now to the next turn to check, more than 0.
func (t turns) until(now time.Duration) time.Duration { return t.every - (now+t.every-t.phase)%t.every }

// check checks a worker's health. early reports that p has the shorter first timeout; check then reports whether it
// timed out.
func (r *Registry) check(ctx context.Context, t *tracked, p *prober, early bool) (again bool) {
	r.mu.Lock()
	address := t.entry.Address
	r.mu.Unlock()
	err := p.health(ctx, address)
	if ctx.Err() != nil {
		return false
	}
	failure := fmt.Sprintf("%.512s", err) // it may quote what the worker sent
	r.mu.Lock()
	defer r.mu.Unlock()
	before := t.worker
	first := !t.checked
	timeout, ok := errors.AsType[net.Error](err)
	t.checked, t.again = true, early && ok && timeout.Timeout()
	if err == nil {
		t.failures, t.down = 0, ""
	} else {
		t.failures++
		if first || t.failures >= r.opts.Health.Failures || errors.Is(err, syscall.ECONNREFUSED) || t.down != "" {
			t.down = failure
		}
	}
	t.settle(true)
	if r.opts.OnCheck != nil {
		r.opts.OnCheck(t.worker.Name, map[bool]string{true: "ok", false: "failed"}[err == nil])
	}
	flipped, now := before.Ready != t.worker.Ready, time.Now()
	switch {
	case err != nil && (flipped || now.Sub(t.warned) >= warnEvery):
		t.warned = now
		r.opts.Log.Warn().Str("worker", t.worker.Name).Str("address", address).Bool("ready", t.worker.Ready).Str("error", failure).Msg("health check failed")
		r.changed() // the reason may be a new one
	case flipped:
		r.opts.Log.Info().Str("worker", t.worker.Name).Str("address", address).Bool("ready", t.worker.Ready).Str("reason", t.worker.Reason).Msg("worker changed")
		r.changed()
	case first:
		r.changed()
	}
	return t.again
}

// warnEvery is the shortest interval of a worker's warnings while it stays not ready.
const warnEvery = time.Minute

func (r *Registry) scrape(ctx context.Context, t *tracked, p *prober) {
	r.mu.Lock()
	w := t.worker
	r.mu.Unlock()
	if !w.Ready || r.opts.OnLoad == nil {
		return
	}
	began := time.Now()
	loads, err := p.loads(ctx, w.Address, w.Engine)
	if ctx.Err() != nil {
		return
	}
	if err == nil {
		r.opts.OnLoad(w.Name, began, loads)
	} else {
		r.opts.Log.Debug().Str("worker", w.Name).Err(err).Msg("no load report")
	}
	if now := time.Now(); r.opts.OnCache != nil && p.cache != t.cache && now.Sub(t.reported) >= warnEvery {
		t.cache, t.reported = p.cache, now // only this goroutine uses them
		r.opts.OnCache(w.Name, t.cache)
	}
}
