// Package decide is the request path: it implements extproc.Handler by one step per file, in this order: read the
// request, make its tokens, match them with the index, pick and book targets, wait for capacity, forward, and follow
// the request with a ticket. Each step returns a small value that later steps do not change.
package decide

import (
	"context"
	"encoding/binary"
	"maps"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/disagg"
	"github.com/kvlane/kvlane/internal/fleet"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/conv"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

// Options of a Decider.
type Options struct {
	Config  *config.Config
	Models  []*fleet.Model
	Metrics *observe.Metrics
	// Tracer makes spans; nil makes none.
	Tracer *observe.Tracer
	Log    zerolog.Logger
	// OnEndpoints gets the addresses that may be forwarded to, on each change: those that serve whole requests, and those of
	// prefill workers.
	OnEndpoints func(serve, prefill []string)
	// OnSuspect is called with a worker whose connection failed; may be nil.
	OnSuspect func(worker string)
	// Now is the clock; nil means time.Now.
	Now func() time.Time
}

// Decider implements extproc.Handler. It is safe for concurrent use.
type Decider struct {
	cfg        *config.Config                 // as of the start
	live       atomic.Pointer[config.Config]  // as of now; only keys that Reload applies differ from cfg
	objectives atomic.Pointer[map[string]int] // SetObjectives
	log        zerolog.Logger
	metrics    *observe.Metrics
	tracer     *observe.Tracer
	now        func() time.Time
	start      time.Time
	fleet      *fleet.Fleet
	decisions  *observe.Decisions
	onSuspect  func(string)
	cache      *conv.Cache
	legs       *disagg.Runner // nil without a connector
	cpu        *cpuLimit
	routed     []prometheus.Counter // by API
	scratch    chan *scratch        // free list
	responses  *fleet.Responses

	mu      sync.Mutex // guards the rest
	router  *routing.Router
	waiting waiting
	record  int // decisions still to be recorded with the router's state
	shadows []shadow
}

// New returns a Decider without workers.
func New(o Options) (*Decider, error) {
	legs, err := newLegs(o.Config)
	if err != nil {
		return nil, err
	}
	settings := rules(o.Config, legs)
	key, err := fleet.NewKey(&o.Config.Index)
	if err != nil {
		return nil, err
	}
	settings.HashSeed = hashSeed(key)
	if settings.Node == 0 && o.Config.Fleet.Mode != config.FleetOff {
		settings.Node = rand.Uint64() // replicas share conversations under the keys that they make
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	router, err := routing.New(settings)
	if err != nil {
		return nil, err
	}
	d := &Decider{
		cfg: o.Config, log: o.Log, metrics: o.Metrics, tracer: o.Tracer, now: o.Now, start: o.Now(), router: router, decisions: observe.NewDecisions(o.Config.Explain.Keep),
		onSuspect: o.OnSuspect, cache: conv.New(cacheBytes(o.Models)), legs: legs, cpu: newCPULimit(int64(o.Config.Limits.MaxBody)), routed: newRouted(o.Metrics),
	}
	for _, reason := range degradations {
		o.Metrics.Degraded.WithLabelValues(reason)
	}
	if d.responses, err = fleet.NewResponses(key); err != nil {
		return nil, err
	}
	router.UseQueue(&d.waiting.queue)
	d.live.Store(o.Config)
	d.shadows = shadows(o.Config)
	d.waiting.byID = map[uint64]*waiter{}
	o.Config.SetBounds(&d.waiting.queue)
	if d.onSuspect == nil {
		d.onSuspect = func(string) {}
	}
	d.scratch = make(chan *scratch, cap(d.cpu.all))
	d.fleet, err = fleet.New(fleet.Options{
		Config: o.Config, Cache: d.cache, Key: key, Models: o.Models, Metrics: o.Metrics, Log: o.Log, OnEndpoints: o.OnEndpoints,
		Update: d.book, Now: func() time.Time { return d.now() },
	})
	if err != nil {
		return nil, err
	}
	o.Metrics.Collect(d.collect)
	return d, nil
}

// SetObjectives sets the priorities of objectives, by name, besides those of the configuration. The caller does not change
// them afterwards.
func (d *Decider) SetObjectives(priorities map[string]int) { d.objectives.Store(&priorities) }

// Reload applies the keys of c that may change while Kvlane runs (config.Config.Changes). After an error nothing has
// changed. Requests that are being decided may see old and new values.
func (d *Decider) Reload(c *config.Config) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.router.SetConfig(rules(c, d.legs)); err != nil {
		return err
	}
	c.SetBounds(&d.waiting.queue)
	d.decisions.Resize(c.Explain.Keep)
	if d.legs != nil {
		boundLegs(d.legs, c)
	}
	d.shadows = shadows(c)
	d.live.Store(c)
	return nil
}

// hashSeed is the seed of the router's hashes: replicas that share the key share it.
func hashSeed(key kvindex.Key) uint64 {
	sum := fleet.Derived(key, "routing")
	return binary.LittleEndian.Uint64(sum[:])
}

// rules returns the router's settings, adapted to the connector.
func rules(c *config.Config, legs *disagg.Runner) routing.Config {
	rules := c.Routing.Config
	if c.Flow.Requests > 0 {
		rules.Hold, rules.KVTokens = c.Flow.Hold, c.Flow.KVTokens
	}
	rules.Unmet = routing.Unmet(c.SLO.Unmet)
	adapt(&rules.Disagg, legs)
	rules.DisaggOf = maps.Clone(rules.DisaggOf)
	for name, rule := range rules.DisaggOf {
		own := *rule
		adapt(&own, legs)
		rules.DisaggOf[name] = &own
	}
	return rules
}

// SetModels replaces the models, as Fleet.SetModels does.
func (d *Decider) SetModels(list []*fleet.Model) {
	d.cache.SetLimit(cacheBytes(list))
	d.fleet.SetModels(list)
}

// cacheBytes is the size in bytes of the cache that all models share: the sum of their cache_bytes, or the default for one
// model while there is none.
func cacheBytes(models []*fleet.Model) (n int64) {
	if len(models) == 0 {
		return int64(config.DefaultModel().CacheBytes)
	}
	for _, m := range models {
		n += int64(m.Config.CacheBytes)
	}
	return n
}

// newRouted returns the counters of requests that got a target, by API.
func newRouted(m *observe.Metrics) (out []prometheus.Counter) {
	for api := body.Unknown; api == body.Unknown || api.String() != body.Unknown.String(); api++ {
		out = append(out, m.Requests.WithLabelValues(api.String(), "routed"))
	}
	return out
}

// Update runs a change of the router under its lock.
func (d *Decider) Update(change func(r *routing.Router, now time.Duration)) { d.book(d.now(), change) }

// KeepAwake calls the router's Awake until ctx ends, so that pauses of this process are not taken for slow engines. It
// also offers free capacity to all waiting requests each time.
func (d *Decider) KeepAwake(ctx context.Context) {
	tick := time.NewTicker(routing.AwakeEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			d.mu.Lock()
			now := d.since(d.now())
			d.router.Awake(now)
			d.placeWaiting(now, true)
			d.mu.Unlock()
		}
	}
}

// Fleet returns the workers that the decisions choose from.
func (d *Decider) Fleet() *fleet.Fleet { return d.fleet }

// Close ends all feeds, comparisons and prefill legs.
func (d *Decider) Close() {
	if d.legs != nil {
		d.legs.Close()
	}
	d.fleet.Close()
}

// Pages returns the debug pages.
func (d *Decider) Pages() *observe.Pages {
	return &observe.Pages{Decisions: d.decisions, Index: d.fleet.IndexPage, Workers: d.fleet.Workers, Warnings: d.fleet.Warnings, Status: d.Status, Record: func(n int) {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.record = n
	}}
}

const statusTenants = 20

// Status returns the fleet as of now, with its load.
func (d *Decider) Status() observe.Status {
	l := d.ledger()
	live := d.live.Load()
	s := observe.Status{Reservations: l.Reservations, Waiting: l.Waiting, WaitingMost: max(live.Routing.Wait.Requests, live.Flow.Requests),
		Queue: l.Classes, Pools: l.Pools, Workers: d.fleet.Status(l.Targets)}
	d.metrics.Totals(&s)
	d.mu.Lock()
	defer d.mu.Unlock()
	if live.Flow.Requests > 0 {
		s.Tenants = d.waiting.queue.Tenants(statusTenants)
	}
	return s
}

// collect emits the router's and the fleet's series when the metrics are scraped.
func (d *Decider) collect(emit observe.Emit) {
	emit.Ledger(d.ledger())
	d.fleet.Collect(emit)
}

func (d *Decider) ledger() *observe.Ledger {
	d.mu.Lock()
	defer d.mu.Unlock()
	l := &observe.Ledger{Reservations: d.router.Live(), Waiting: d.waiting.queue.Len(), DoubleReleases: d.router.DoubleReleases(), StaleReports: d.router.StaleReports()}
	l.Classes, l.Pools = d.flow(d.since(d.now()))
	d.router.Targets(func(slot kvindex.Slot, info *routing.TargetInfo, load routing.Load) bool {
		l.Targets = append(l.Targets, observe.TargetLoad{Target: info.Target, Load: load, Suspect: d.router.Suspect(slot) != "", KVUsage: d.router.KVUsage(slot), Bound: d.router.BoundTo(slot)})
		return true
	})
	return l
}

// Decide implements extproc.Handler.
func (d *Decider) Decide(ctx context.Context, r *extproc.Request) extproc.Decision {
	began := r.Received
	if began.IsZero() {
		began = d.now()
	}
	j := job{d: d, r: r, began: began, clock: d.now()}
	r.Hold(true) // it may wait for a processor, and long prompts take time
	exact, cancel := d.withTimeout(ctx)
	defer cancel()
	j.cpu = d.cpu.place(ctx, exact, len(r.Body))
	defer j.cpu.release() // after a panic too
	j.s = d.takeScratch()
	return j.survive(ctx, func() (extproc.Decision, error) { return j.run(ctx, exact) })
}

// job is the state that all steps of one decision share. It belongs to the goroutine of Decide.
type job struct {
	d     *Decider
	r     *extproc.Request
	s     *scratch
	cpu   cpuPlace
	entry *observe.Entry
	api   body.API
	// began is when the request arrived, clock when the current stage began.
	began, clock time.Time
	// elsewhere is the time spent in prefill legs and waiting for capacity.
	elsewhere time.Duration
	degraded  string
	// idle: the engine computes no KV blocks, only builds or counts the prompt.
	idle bool
	// cacheReads bounds the prompt's tokens that the engine takes from its cache.
	cacheReads int64
	// stored is the answer that the request continues, reads or cancels, the zero value if there is none.
	stored fleet.Response
	// booked is the plan to be released if the decision panics or fails; nil for none.
	booked *routing.Plan
}

// survive runs steps. If they panic nothing stays booked; the panic propagates to the
// caller, see PanicReject. The scratch memory is then not reused.
func (j *job) survive(ctx context.Context, steps func() (extproc.Decision, error)) extproc.Decision {
	done := false
	defer func() {
		if done {
			return
		}
		j.d.metrics.Requests.WithLabelValues(j.api.String(), "unrouted").Inc()
		if j.booked != nil {
			j.release(j.booked)
		}
		j.d.tracer.Decided(j.entry, j.d.now(), true)
	}()
	decision, err := steps()
	if q, ok := err.(*waiter); ok { //nolint:errorlint // nothing wraps it
		done = true
		return q.postponed(ctx)
	}
	if err != nil {
		decision = j.answer(err)
	} else if decision.Reject == nil && j.degraded != "" {
		j.d.metrics.Degraded.WithLabelValues(j.degraded).Inc()
	}
	j.d.tracer.Decided(j.entry, j.clock, decision.Ticket == nil)
	done = true
	j.d.keepScratch(j.s)
	j.d.metrics.Observe(observe.StageTotal, j.d.now().Sub(j.began)-j.elsewhere)
	return decision
}

// run is the request path. An error is the answer to the client, see answer.
func (j *job) run(ctx, exact context.Context) (extproc.Decision, error) {
	none := extproc.Decision{}
	j.entry = observe.NewEntry(j.r, j.began)
	j.d.tracer.Start(j.entry, j.r)
	j.api, j.idle = body.Detect(j.r.Method, j.r.Path)
	j.entry.API = j.api.String()
	if err := j.lap(ctx, observe.StageQueue); err != nil {
		return none, err
	}
	in, err := j.read(ctx, exact)
	if err != nil {
		return none, err
	}
	if err := j.lap(ctx, observe.StageParse); err != nil {
		return none, err
	}
	t, err := j.tokens(ctx, exact, in)
	if err != nil {
		return none, err
	}
	if err := j.lap(ctx, observe.StageTokens); err != nil {
		return none, err
	}
	if t.count += j.stored.Tokens; j.stored.Tokens > 0 {
		j.entry.PromptTokens = t.count
	}
	j.r.Hold(false) // the rest is quick unless it hangs
	j.match(in, t)
	if err := ctx.Err(); err != nil {
		return none, errClientGone
	}
	w := &work{job: j, in: in, tokens: t}
	j.query(w)
	return w.conclude(ctx)
}

// conclude is the rest of the request path. If its error is a *waiter, call it again when the waiter has left the queue.
func (w *work) conclude(ctx context.Context) (extproc.Decision, error) {
	p, err := w.pick(ctx)
	if err != nil {
		return extproc.Decision{}, err
	}
	if p.plan.Prefill != routing.NoSlot {
		return w.split(ctx, p)
	}
	return w.forward(ctx, p)
}

// lap ends a stage, and the decision if the client has disconnected: stages may take seconds for a long prompt.
func (j *job) lap(ctx context.Context, s observe.Stage) error {
	j.took(s)
	if ctx.Err() != nil {
		return errClientGone
	}
	return nil
}

// took records a stage that ends now.
func (j *job) took(s observe.Stage) {
	now := j.d.now()
	j.d.metrics.Observe(s, now.Sub(j.clock))
	j.entry.Stages = append(j.entry.Stages, observe.StageTime{Stage: s.String(), Took: now.Sub(j.clock)})
	j.clock = now
}

// scratch is memory that decisions reuse one after the other.
type scratch struct {
	turn     *conv.Turn
	ids      []uint32
	hashes   []kvindex.Hash
	others   []other // not reused
	matches  kvindex.Matches
	overlaps []routing.Overlap
	prefix   []uint64
	subset   routing.SlotSet
	exclude  []kvindex.Slot
	// waited is set if the memory is only what a waiting request keeps, see work.slim.
	waited bool
}

// maxScratchIDs bounds the ids and hashes that scratch memory keeps between requests.
const maxScratchIDs = 1 << 18

func newScratch() *scratch { return &scratch{turn: &conv.Turn{}} }

func (d *Decider) takeScratch() *scratch {
	select {
	case s := <-d.scratch:
		return s
	default:
		return newScratch()
	}
}

func (d *Decider) keepScratch(s *scratch) {
	if s.waited {
		return
	}
	s.turn.Reset() // keep no body alive
	if max(cap(s.ids), d.cfg.Index.BlockSize*cap(s.prefix)) > maxScratchIDs {
		s.ids, s.hashes, s.prefix = nil, nil, nil
	}
	select {
	case d.scratch <- s:
	default: // more are in use than the free list holds: a decision released its place early
	}
}
