// Package decide joins the rooms on the road of a request: it implements
// extproc.Handler with internal/prompt, internal/model, kvindex and routing, in
// this order, and owns what lives across them: the mutex around the router, the
// fleet as of now, the tickets of running requests, and the journal of decisions.
package decide

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvlane/kvlane/internal/fleet"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/model"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/prompt"
	"github.com/kvlane/kvlane/internal/tokenizer"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

// Reasons for decisions that know less than they could (metric degraded_total).
const (
	degradedPartial     = "body not seen"
	degradedBody        = "body not read"
	degradedModel       = "model unknown"
	degradedTokenizer   = "no tokenizer"
	degradedSuspended   = "tokenizer differs from engine"
	degradedRefused     = "engine would refuse"
	degradedTokens      = "tokens unknown"
	degradedFront       = "prompt known in part"
	degradedShortPrompt = "shorter than a block"
	degradedDeadline    = "deadline"
)

// degradations are the reasons above that any installation can meet: their counters exist before the first case.
var degradations = []string{
	degradedPartial, degradedBody, degradedModel, degradedTokenizer, degradedSuspended, degradedRefused, degradedTokens, degradedFront, degradedShortPrompt,
	degradedDeadline,
}

// Options of a Decider.
type Options struct {
	Config  *config.Config
	Models  []*fleet.Model
	Metrics *observe.Metrics
	Log     zerolog.Logger
	// OnEndpoints gets the addresses that may be forwarded to, on each change: those that serve whole requests, and those of
	// prefill workers.
	OnEndpoints func(serve, prefill []string)
	// OnSuspect is told of a worker whose connection failed; may be nil.
	OnSuspect func(worker string)
	// Now is the clock; nil means time.Now.
	Now func() time.Time
}

// Decider implements extproc.Handler. It is safe for concurrent use.
type Decider struct {
	cfg       *config.Config
	log       zerolog.Logger
	metrics   *observe.Metrics
	now       func() time.Time
	start     time.Time
	fleet     *fleet.Fleet
	decisions *observe.Decisions
	onSuspect func(string)
	bodies    *prompt.Memo
	legs      *legs // nil without a connector
	cpu       *cpuLimit
	routed    []prometheus.Counter // by API

	mu      sync.Mutex
	router  *routing.Router
	waiting waiting
	record  int // decisions still to be recorded with the router's state

	scratch chan *scratch // free list
}

// scratch is the memory of one decision.
type scratch struct {
	request  prompt.Request
	ids      []uint32
	hashes   []kvindex.Hash
	matches  kvindex.Matches
	overlaps []routing.Overlap
	prefix   []uint64
	subset   routing.SlotSet
	exclude  []kvindex.Slot
}

// maxScratchIDs bounds what a decision's memory keeps between requests.
const maxScratchIDs = 1 << 18

func (d *Decider) takeScratch() *scratch {
	select {
	case s := <-d.scratch:
		return s
	default:
		return &scratch{}
	}
}

func (d *Decider) keepScratch(s *scratch) {
	select {
	case d.scratch <- s:
	default: // of a decision that gave its place back
	}
}

// bodyMemo is the memory for bodies that come again: a share of what the models may
// use, because both keep prompts.
func bodyMemo(served []*fleet.Model) int64 {
	var n int64
	for _, s := range served {
		n += int64(s.Config.CacheBytes) / 8
	}
	return n
}

// New returns a Decider without workers.
func New(o Options) (*Decider, error) {
	legs, err := newLegs(o.Config)
	if err != nil {
		return nil, err
	}
	rules := o.Config.Routing.Config
	legs.adapt(&rules.Disagg)
	rules.DisaggOf = maps.Clone(rules.DisaggOf)
	for name, rule := range rules.DisaggOf {
		own := *rule
		legs.adapt(&own)
		rules.DisaggOf[name] = &own
	}
	key, err := hashKey(o.Config)
	if err != nil {
		return nil, err
	}
	rules.HashSeed = routingSeed(key)
	router, err := routing.New(rules)
	if err != nil {
		return nil, err
	}
	d := &Decider{
		cfg: o.Config, log: o.Log, metrics: o.Metrics, now: o.Now, router: router, decisions: observe.NewDecisions(o.Config.Explain.Keep),
		onSuspect: o.OnSuspect, bodies: prompt.NewMemo(bodyMemo(o.Models)), legs: legs, cpu: newCPULimit(), routed: newRouted(o.Metrics),
	}
	for _, reason := range degradations {
		o.Metrics.Degraded.WithLabelValues(reason)
	}
	d.waiting = waiting{queue: routing.Queue{Max: o.Config.Routing.Wait.Requests}, patience: o.Config.Routing.Wait.Timeout.Std(), byID: map[uint64]*waiter{}}
	if d.now == nil {
		d.now = time.Now
	}
	d.start = d.now()
	d.scratch = make(chan *scratch, cap(d.cpu.all))
	d.fleet, err = fleet.New(fleet.Options{Config: o.Config, Key: key, Models: o.Models, Metrics: o.Metrics, Log: o.Log, OnEndpoints: o.OnEndpoints, Update: d.book, Now: func() time.Time { return d.now() }})
	if err != nil {
		return nil, err
	}
	o.Metrics.Collect(d.collect)
	return d, nil
}

// Fleet returns the workers that the decisions choose from.
func (d *Decider) Fleet() *fleet.Fleet { return d.fleet }

// Close ends all feeds, comparisons and prefill legs.
func (d *Decider) Close() {
	d.legs.close()
	d.fleet.Close()
}

// Pages returns the debug pages.
func (d *Decider) Pages() *observe.Pages {
	return &observe.Pages{Decisions: d.decisions, Index: d.fleet.IndexPage, Workers: d.fleet.Workers, Record: func(n int) {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.record = n
	}}
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
	d.router.Targets(func(_ kvindex.Slot, info *routing.TargetInfo, load routing.Load) bool {
		l.Targets = append(l.Targets, observe.TargetLoad{Target: info.Target, Load: load})
		return true
	})
	return l
}

// newRouted are the counters of requests that got a target, by API.
func newRouted(m *observe.Metrics) (out []prometheus.Counter) {
	for api := prompt.Unknown; api == prompt.Unknown || api.String() != prompt.Unknown.String(); api++ {
		out = append(out, m.Requests.WithLabelValues(api.String(), "routed"))
	}
	return out
}

// since is a time as the router counts it.
func (d *Decider) since(t time.Time) time.Duration { return t.Sub(d.start) }

// book runs f with the router, which nobody else uses meanwhile, and places those who
// wait for room that f may have made. A panic in f goes on to the caller and leaves
// nothing locked.
func (d *Decider) book(at time.Time, f func(r *routing.Router, now time.Duration)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := d.since(at)
	f(d.router, now)
	d.serve(now)
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
	j.exact = exact
	j.cpu, _ = d.cpu.acquire(exact, len(r.Body)) // without a place the request is routed by load
	defer j.cpu.release()                        // after a panic too
	s := d.takeScratch()
	j.s, j.request = s, &s.request
	decision := j.survive(ctx)
	s.request = prompt.Request{Elements: s.request.Elements[:0]} // keep no body alive
	if cap(s.ids) > maxScratchIDs {
		s.ids, s.hashes, s.prefix = nil, nil, nil
	}
	d.keepScratch(s)
	d.metrics.Observe(observe.StageTotal, d.now().Sub(began)-j.legs)
	return decision
}

// survive is run that leaves nothing booked if it panics; the panic goes on to the
// caller, who sends the request on without us. The scratch memory is not used again.
func (j *job) survive(ctx context.Context) extproc.Decision {
	done := false
	defer func() {
		if done {
			return
		}
		api := prompt.Unknown
		if j.entry != nil {
			api = j.api
		}
		j.d.metrics.Requests.WithLabelValues(api.String(), "unrouted").Inc()
		if j.booked != nil {
			j.release(j.booked)
		}
	}()
	decision := j.run(ctx)
	done = true
	return decision
}

// job is one decision on its way.
type job struct {
	d     *Decider
	s     *scratch
	r     *extproc.Request
	began time.Time
	clock time.Time // start of the current stage
	entry *observe.Entry

	api      prompt.API
	request  *prompt.Request // not to be changed: others may share it
	served   *fleet.Model
	query    routing.Query
	degraded string
	ids      []uint32         // valid as long as the scratch memory
	known    tokenizer.Prefix // what is kept of the ids' conversation
	front    bool             // ids are only the front of the prompt
	parsed   bool
	own      bool // ids were made here

	cpu     cpuPlace
	exact   context.Context // ends when there is no more time for exact tokens
	legs    time.Duration   // spent in prefill legs and waiting for room
	tried   []kvindex.Slot  // prefill targets that have failed
	replans int
	booked  *routing.Plan // what is to be given back if nobody follows the request

	credit, prefillCredit kvindex.Credit // for the prompt on the plan's targets

	decodeAt, prefillAt *fleet.Endpoint // where the plan's targets were when it was made
}

// lap ends a stage.
func (j *job) lap(s observe.Stage) {
	now := j.d.now()
	j.d.metrics.Observe(s, now.Sub(j.clock))
	j.entry.Stages = append(j.entry.Stages, observe.StageTime{Stage: s.String(), Took: now.Sub(j.clock)})
	j.clock = now
}

// open begins the journal's entry. Strings of the request share memory with it; what
// outlives it is copied and cut.
func (j *job) open() {
	j.entry = observe.NewEntry(j.r, j.began)
	j.lap(observe.StageQueue)
	j.api, _ = prompt.Detect(j.r.Method, j.r.Path)
	j.entry.API = j.api.String()
}

func (j *job) run(ctx context.Context) extproc.Decision {
	d := j.d
	j.open()
	if reject := j.gone(ctx); reject != nil {
		return j.reject(reject)
	}
	j.query = routing.Query{ID: j.r.ID}
	if reject := j.parse(); reject != nil {
		return j.reject(reject)
	}
	if j.parsed {
		if reject := j.whose(ctx); reject != nil {
			return j.reject(reject)
		}
	}
	j.lap(observe.StageParse)
	if reject := j.gone(ctx); reject != nil {
		return j.reject(reject)
	}
	if reject := j.tokens(ctx); reject != nil {
		return j.reject(reject)
	}
	j.lap(observe.StageTokens)
	j.r.Hold(false) // what follows takes no time, unless it hangs
	if reject := j.gone(ctx); reject != nil {
		return j.reject(reject)
	}
	j.match()
	j.steer()
	if reject := j.gone(ctx); reject != nil {
		return j.reject(reject)
	}
	decision := j.pick(ctx)
	if decision.Reject != nil {
		return decision
	}
	if j.degraded != "" {
		d.metrics.Degraded.WithLabelValues(j.degraded).Inc()
	}
	return decision
}

// guarded reports whether no engine may hear what clients say of KV transfers: a body
// that may tell an engine where to fetch KV from has to be read then, because what
// cannot be read cannot be taken out.
func (j *job) guarded() bool { return j.d.legs != nil && !j.d.cfg.Disagg.Trust }

// unread refuses a body that has to be read and cannot be.
func (j *job) unread(reason string) *extproc.Reject {
	return &extproc.Reject{Status: 400, Body: j.failure(400, "with prefill and decode apart a request has to be read: "+reason), Details: "kvlane_unread_body"}
}

// parseUnknown reads the body of an API that Kvlane does not know, for body to clean:
// engines take the same fields on further paths (vLLM's /invocations).
func (j *job) parseUnknown() *extproc.Reject {
	if kind, ok := j.r.Header("content-type"); !j.guarded() || ok && !strings.Contains(strings.ToLower(kind), "json") {
		return nil
	}
	if j.r.Partial {
		return j.unread("its body is not here whole")
	}
	if len(j.r.Body) == 0 {
		return nil
	}
	req, err := prompt.Parse(prompt.Unknown, j.r.Body)
	if unread, ok := errors.AsType[*prompt.UnreadError](err); ok {
		return j.unread(unread.Reason)
	}
	if err == nil { // else no engine reads it either
		j.request = req
	}
	return nil
}

// parse reads the body's fields. A body that is not JSON is refused, as is a
// compressed one: no engine would take it. What an engine may read and we do not
// is routed by load, unless it may name transfers that only we may name.
func (j *job) parse() *extproc.Reject {
	switch {
	case j.api == prompt.Unknown:
		return j.parseUnknown()
	case j.r.Partial && j.guarded():
		return j.unread("its body is not here whole")
	case j.r.Partial:
		j.degraded = degradedPartial
		return nil
	}
	if coding, ok := j.r.Header("content-encoding"); ok && coding != "" && !strings.EqualFold(coding, "identity") {
		text := "the request's body is compressed (content-encoding: " + observe.Clip(coding) + "), and engines do not decompress: send it as it is, " +
			"or let a decompressor filter stand before Kvlane"
		return &extproc.Reject{Status: 415, Body: j.failure(415, text), Details: "kvlane_compressed_body"}
	}
	req, err := j.d.bodies.ParseInto(&j.s.request, j.api, j.r.Body)
	if unread, ok := errors.AsType[*prompt.UnreadError](err); ok {
		if j.guarded() {
			return j.unread(unread.Reason)
		}
		j.degraded, j.entry.Refusal = degradedBody, unread.Reason
		return nil
	}
	if err != nil {
		return &extproc.Reject{Status: 400, Body: j.failure(400, err.Error()), Details: "kvlane_invalid_json"}
	}
	j.parsed, j.request = true, req
	name := req.Model()
	j.entry.Model = observe.Clip(name)
	j.query.Model = name
	j.query.Conversation = j.conversation()
	j.entry.Conversation = observe.Clip(j.query.Conversation)
	j.served = j.d.fleet.Model(name)
	return nil
}

// conversation is the id in the body, else in the first header that has one.
func (j *job) conversation() string {
	if id, _ := j.request.ConversationID(prompt.ConversationFields); id != "" {
		return id
	}
	for _, name := range j.d.cfg.Routing.Headers {
		if v, ok := j.r.Header(name); ok {
			if v = strings.TrimSpace(v); v != "" {
				return v
			}
		}
	}
	return ""
}

// tokens makes the prompt's ids, or says why there are none.
func (j *job) tokens(ctx context.Context) *extproc.Reject {
	if !j.parsed {
		j.query.PromptTokens = routing.EstimateTokens(len(j.r.Body))
		return nil
	}
	req := j.request
	if j.served == nil {
		j.degraded = degradedModel
		j.query.PromptTokens = estimateTokens(req)
		return nil
	}
	res, err := j.result(ctx, req)
	refusal, refused := errors.AsType[*model.Refusal](err)
	switch {
	case err == nil:
	case refused:
		j.degraded = degradedRefused
		j.entry.Refusal = observe.Clip(refusal.Error())
		if j.d.cfg.Limits.RefuseEarly && !refusal.Guessed {
			return &extproc.Reject{Status: refusal.Status, Body: j.failure(refusal.Status, observe.ClipTo(refusal.Reason, observe.MaxText)), Details: "kvlane_engine_would_refuse"}
		}
		j.query.PromptTokens = estimateTokens(req)
		return nil
	case errors.Is(err, fleet.ErrNoTokenizer):
		j.degraded = degradedTokenizer
		j.query.PromptTokens = estimateTokens(req)
		return nil
	case errors.Is(err, fleet.ErrSuspended):
		j.degraded = degradedSuspended
		j.query.PromptTokens = estimateTokens(req)
		return nil
	case j.own && j.exact.Err() != nil:
		j.own, j.degraded = false, degradedDeadline
		j.entry.Refusal = "no tokens within " + j.d.cfg.Limits.DecisionTimeout.Std().String() + " (limits.decision_timeout)"
		j.query.PromptTokens = estimateTokens(req)
		return nil
	default:
		j.degraded = degradedTokens
		j.entry.Refusal = observe.Clip(err.Error())
		j.query.PromptTokens = estimateTokens(req)
		return nil
	}
	j.ids, j.known, j.front = res.IDs, res.Prefix, res.Partial != ""
	if !req.Kept() && cap(res.IDs) > cap(j.s.ids) {
		j.s.ids = res.IDs
	}
	if j.front {
		j.degraded = degradedFront
		j.entry.Refusal = observe.Clip(res.Partial)
		j.query.PromptTokens = max(estimateTokens(req), int64(len(res.IDs)))
	} else {
		j.query.PromptTokens = int64(len(res.IDs))
	}
	j.entry.PromptTokens, j.entry.Assumed = j.query.PromptTokens, observe.Clip(res.Assumed)
	return nil
}

// result makes the prompt's ids, in the scratch memory where they are not kept. A remote
// renderer has its own timeout and takes no processor: the decision's does not end it.
func (j *job) result(ctx context.Context, req *prompt.Request) (model.Result, error) {
	why := j.served.Unfit()
	if why == nil {
		j.own = true
		return j.served.Tokens.PromptInto(j.exact, j.s.ids, req, j.served.Engine)
	}
	if j.served.Remote == nil {
		return model.Result{}, why
	}
	j.cpu.release()
	return j.served.Remote.Prompt(ctx, req)
}

// match hashes the ids and asks the index.
func (j *job) match() {
	d, s := j.d, j.s
	s.hashes, s.overlaps, s.prefix = s.hashes[:0], s.overlaps[:0], s.prefix[:0]
	if len(j.ids) == 0 {
		return
	}
	block := d.cfg.Index.BlockSize
	seed := d.fleet.Index().Hasher().Seed(j.served.CacheName(), j.adapter(), j.salt())
	j.hash(seed, block)
	j.lap(observe.StageHash)
	if len(s.hashes) == 0 {
		if j.degraded == "" {
			j.degraded = degradedShortPrompt
		}
		return
	}
	d.fleet.Expire(j.clock)
	j.overlap()
	if skip := d.cfg.Routing.PrefixSkip; skip > 0 {
		s.prefix = routing.PrefixBlocks(s.prefix[:0], j.ids, block, skip)
	}
	j.query.Prefix = s.prefix
	j.lap(observe.StageIndex)
}

// hashed are the block hashes of ids that are kept beside a body. The first id's
// address tells that they are of these very ids, which nobody changes: the ids of
// a body can change with the date, or with who makes them.
type hashed struct {
	first  *uint32
	tokens int
	hashes []uint64
}

// hash computes the block hashes, as far as they are not kept beside the body or
// beside the ids of the conversation's earlier turns.
func (j *job) hash(seed kvindex.Hash, block int) {
	s, ids := j.s, j.ids
	key := tokenizer.ValuesKey{Seed: uint64(seed), Stride: block}
	if v, ok := j.request.Attached(key); ok {
		if kept, ok := v.(*hashed); ok && kept.first == &ids[0] && kept.tokens == len(ids) {
			s.prefix = append(s.prefix, kept.hashes...)
			s.hashes = appendConverted(s.hashes, s.prefix)
			return
		}
	}
	s.prefix = j.known.Values(s.prefix, key)
	s.prefix = s.prefix[:min(len(s.prefix), len(ids)/block)]
	s.hashes = appendConverted(s.hashes, s.prefix)
	known, parent := len(s.hashes), seed
	if known > 0 {
		parent = s.hashes[known-1]
	}
	s.hashes = j.d.fleet.Index().Hasher().AppendHashes(s.hashes, parent, ids[known*block:], block)
	s.prefix = appendConverted(s.prefix, s.hashes[known:])
	if known < len(s.hashes) {
		j.known.SetValues(key, s.prefix)
	}
	if j.request.Kept() {
		j.request.Attach(key, &hashed{&ids[0], len(ids), slices.Clone(s.prefix)}, int64(8*len(s.prefix))+64)
	}
}

func appendConverted[To, From ~uint64](dst []To, src []From) []To {
	dst = slices.Grow(dst, len(src))
	for _, v := range src {
		dst = append(dst, To(v))
	}
	return dst
}

// adapter is the LoRA adapter that the request names, "" for the base model.
func (j *job) adapter() string {
	if j.served.Tokens == nil {
		return ""
	}
	return j.served.Tokens.Adapter(j.request)
}

// salt is what separates this request's blocks from others'. SGLang's extra_key does
// so in the engine but leaves no mark in its events: with one, only what was sent
// with the same one counts.
func (j *job) salt() string {
	salt := j.request.CacheSalt()
	if extra := j.request.Raw(prompt.FieldExtraKey); len(extra) > 0 && extra[0] != 'n' {
		return "extra_key\x00" + string(extra) + "\x00" + salt
	}
	return salt
}

// overlap asks the index what the targets hold of the prompt.
func (j *job) overlap() {
	p := fleet.Prompt{Hashes: j.s.hashes, Tokens: len(j.ids)}
	if j.own {
		p.Made = j.served
	}
	j.s.overlaps = j.d.fleet.AppendOverlaps(j.s.overlaps[:0], &p, &j.s.matches)
}

// foreign reports whether the worker's tokenizer is known to differ from the one
// that made the ids.
func (j *job) foreign(p *fleet.Endpoint) bool { return j.own && j.served.Differs(p.Member) }

// pick chooses, books and says it.
func (j *job) pick(ctx context.Context) extproc.Decision {
	d := j.d
	var ex *routing.Explanation
	if d.decisions.Explains(d.fleet.View().NumSlots()) {
		ex = d.decisions.Blank()
	}
	if d.legs != nil {
		j.query.Local = j.cannotSplit() != ""
	}
	plan, p, err := j.place(ctx, ex)
	if j.withoutPrefill(err) {
		plan, p, err = j.place(ctx, ex)
	}
	j.entry.Explain(ex)
	if err != nil {
		return j.noTarget(err)
	}
	if plan.Degraded != "" && j.degraded == "" {
		j.degraded = plan.Degraded
	}
	j.lap(observe.StagePlan)
	if plan.Prefill != routing.NoSlot {
		j.cpu.release()
		return j.split(ctx, plan, p)
	}
	if reason := j.impossible(p); reason != "" {
		j.release(plan)
		return j.reject(&extproc.Reject{Status: http.StatusBadRequest, Details: "kvlane_cannot_disaggregate",
			Body: j.failure(http.StatusBadRequest, "workers that prefill apart cannot serve "+reason)})
	}
	return j.forward(ctx, plan, p)
}

// place books a plan and finds where its decode target is.
func (j *job) place(ctx context.Context, ex *routing.Explanation) (*routing.Plan, *fleet.Endpoint, error) {
	d := j.d
	plan, w, err := j.choose(ex)
	if w != nil {
		j.cpu.release()
		plan, err = d.wait(ctx, w)
		now := d.now()
		j.entry.Waited = now.Sub(j.clock)
		j.legs += j.entry.Waited
		j.clock = now
	}
	if err != nil {
		return nil, nil, err
	}
	j.booked = &plan
	if ctx.Err() != nil { // placed at the moment its client went away
		j.release(&plan)
		return nil, nil, errClientGone
	}
	p := j.decodeAt
	if !d.fleet.Still(plan.Decode, p) { // the worker left between the pick and now
		j.release(&plan)
		return nil, nil, &routing.NoTargetError{}
	}
	if plan.Prefill != routing.NoSlot {
		j.credit, j.prefillCredit = kvindex.Credit{}, j.speculate(plan.Prefill)
	} else {
		j.credit = j.speculate(plan.Decode)
	}
	return &plan, p, nil
}

// choose picks under the lock, which a panic must not leave locked.
func (j *job) choose(ex *routing.Explanation) (routing.Plan, *waiter, error) {
	j.d.mu.Lock()
	defer j.d.mu.Unlock()
	return j.d.choose(j, ex)
}

// speculate credits a target with the prompt that is on its way there.
func (j *job) speculate(slot kvindex.Slot) kvindex.Credit {
	if len(j.s.hashes) == 0 || j.d.cfg.Routing.Speculate <= 0 || j.foreignSlot(slot) {
		return kvindex.Credit{}
	}
	return j.d.fleet.Speculate(slot, j.s.hashes, j.clock)
}

// foreignSlot is foreign for the worker of a slot.
func (j *job) foreignSlot(slot kvindex.Slot) bool {
	e := j.d.fleet.View().Endpoint(slot)
	return e != nil && j.foreign(e)
}

// ticket follows a plan.
func (j *job) ticket(plan *routing.Plan, p *fleet.Endpoint) *ticket {
	t := &ticket{d: j.d, entry: j.entry, reservation: plan.Reservation, slot: plan.Decode, place: p, decided: j.clock, credit: j.credit,
		predicted: plan.Matched, stores: len(j.s.hashes) > 0 && plan.DecodeMiss > int64(j.d.cfg.Index.BlockSize), batches: p.Counters.Batches.Load()}
	if plan.Prefill != routing.NoSlot {
		// The decode engine's usage tells what it had itself.
		t.predicted, t.prefillMatched = max(0, j.query.PromptTokens-plan.DecodeMiss), plan.Matched
	}
	return t
}

// forward turns a plan into mutations.
func (j *job) forward(ctx context.Context, plan *routing.Plan, p *fleet.Endpoint) extproc.Decision {
	d := j.d
	var body []byte
	if plan.Prefill == routing.NoSlot && j.entry.Prefill == "" {
		var err error
		if body, err = j.body(ctx, p, plan.RankFree); err != nil {
			return j.unedited(ctx, plan, err)
		}
	}
	out := extproc.Decision{Endpoint: p.Address, Body: body, Ticket: j.ticket(plan, p)}
	if j.own {
		j.d.fleet.Sample(j.served, p.Member, j.request)
	}
	if j.degraded == "" && j.foreign(p) {
		j.degraded = degradedSuspended
	}
	if p.SetRank != nil && !plan.RankFree {
		out.Set = p.SetRank
	}
	j.entry.Target, j.entry.Endpoint = p.Name, p.Address
	j.entry.Matched, j.entry.Miss, j.entry.Via = plan.Matched, plan.Miss, string(plan.Via)
	j.entry.Degraded = j.degraded
	byEvents, speculative := j.matched(plan)
	p.Counters.Picks.Inc()
	p.Counters.Prompt.Add(float64(j.query.PromptTokens))
	p.Counters.ByEvents.Add(float64(byEvents))
	p.Counters.Speculative.Add(float64(speculative))
	d.routed[j.api].Inc()
	d.decisions.Add(j.entry)
	if d.cfg.Log.Decisions {
		j.write()
	}
	return out
}

// matched divides a plan's matched tokens into those that events told of and those
// that only prompts sent before will leave.
func (j *job) matched(plan *routing.Plan) (byEvents, speculative int64) {
	slot := plan.Decode
	if plan.Prefill != routing.NoSlot {
		slot = plan.Prefill
	}
	for i := range j.s.overlaps {
		if o := &j.s.overlaps[i]; o.Slot == slot {
			for _, n := range o.Tokens {
				byEvents += int64(n)
			}
		}
	}
	byEvents = min(byEvents, plan.Matched)
	return byEvents, plan.Matched - byEvents
}

// noTarget answers a request that cannot be placed. The client is told what it can do;
// the counts and names are for the journal and the log.
func (j *job) noTarget(err error) extproc.Decision {
	j.entry.Refusal = observe.Clip(err.Error())
	if full, ok := errors.AsType[*routing.CapacityError](err); ok {
		seconds := strconv.Itoa(int(full.RetryAfter.Round(time.Second).Seconds()))
		return j.reject(&extproc.Reject{Status: 429, Body: j.failure(429, "all workers that could serve this request are busy; try again in "+seconds+" s"),
			Headers: []extproc.Header{{Name: "retry-after", Value: seconds}}, Details: "kvlane_capacity_exhausted"})
	}
	if errors.Is(err, errClientGone) {
		return j.reject(&extproc.Reject{Status: 499, Details: "kvlane_client_gone"})
	}
	return j.reject(&extproc.Reject{Status: 503, Body: j.failure(503, "no worker can serve this request at the moment"), Details: "kvlane_no_eligible_worker"})
}

func (j *job) reject(r *extproc.Reject) extproc.Decision {
	j.entry.Rejected, j.entry.Reason = r.Status, r.Details
	j.d.metrics.Rejected.WithLabelValues(strconv.Itoa(r.Status), r.Details).Inc()
	j.d.metrics.Requests.WithLabelValues(j.entry.API, "rejected").Inc()
	j.d.decisions.Add(j.entry)
	if j.d.cfg.Log.Decisions {
		j.write()
	}
	return extproc.Decision{Reject: r}
}

// failureTypes are OpenAI's names for what went wrong.
var failureTypes = map[int]string{400: "invalid_request_error", 404: "invalid_request_error", 413: "invalid_request_error", 415: "invalid_request_error", 429: "rate_limit_error", 500: "internal_server_error", 503: "service_unavailable_error"}

// failure is an error body in the shape that the API's clients expect.
func (j *job) failure(status int, message string) []byte {
	return prompt.AppendFailure(nil, j.api, prompt.Failure{Status: status, Type: failureTypes[status], Message: message})
}

// write logs the decision as one line.
func (j *job) write() {
	e := j.entry
	line := j.d.log.Info().Str("request", e.ID).Str("api", e.API).Str("model", e.Model)
	if e.Rejected != 0 {
		line.Int("status", e.Rejected).Str("reason", e.Reason).Str("detail", e.Refusal).Msg("rejected")
		return
	}
	if e.Prefill != "" {
		line.Str("prefill", e.Prefill)
	}
	line.Str("target", e.Target).Str("endpoint", e.Endpoint).Str("via", e.Via).Int64("prompt_tokens", e.PromptTokens).
		Int64("matched_tokens", e.Matched).Str("degraded", e.Degraded).Dur("took", j.clock.Sub(j.began)).Msg("routed")
}
