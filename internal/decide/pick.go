package decide

import (
	"cmp"
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/fleet"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/tokens/shape"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

// book runs a change of the router under its lock, then places waiting requests. A panic leaves no lock held.
func (d *Decider) book(at time.Time, change func(r *routing.Router, now time.Duration)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := d.since(at)
	change(d.router, now)
	d.placeWaiting(now, false)
}

// since is a time on the router's clock.
func (d *Decider) since(t time.Time) time.Duration { return t.Sub(d.start) }

// release cancels a plan's reservation.
func (j *job) release(plan *routing.Plan) {
	j.booked = nil
	j.d.book(j.d.now(), func(r *routing.Router, now time.Duration) { r.Release(now, plan.Reservation) })
}

// work is a request to be placed. While it waits for capacity it is owned by the goroutine that holds Decider.mu.
type work struct {
	*job

	in     *input
	tokens *tokens
	query  routing.Query
	// replans counts how often the request was planned again because its decode target went away. It does not wait then,
	// because a prefill worker may hold its blocks until their lease ends.
	replans   int
	tried     []kvindex.Slot // prefill targets that have failed
	queued    *waiter        // nil unless it waits
	ex        *routing.Explanation
	explained bool
}

// placed is a plan with its targets' endpoints when it was booked, and the credit that the index gave them.
type placed struct {
	plan            routing.Plan
	at              time.Time
	decode, prefill *fleet.Endpoint
	credit          []kvindex.Credit
	prefillCredit   []kvindex.Credit
	one             [1]kvindex.Credit // memory of one of them: most requests have one prompt
}

// query builds the router's query from the request, its tokens and trusted headers.
func (j *job) query(w *work) {
	w.query = routing.Query{ID: j.r.ID, Model: w.in.name, Listed: w.in.listed, Conversation: j.ownConversation(w.in), PromptTokens: w.tokens.count, Prefix: j.s.prefix}
	if w.in.known && !j.idle {
		w.query.Sequences = w.in.body.Choices(w.in.model != nil && w.in.model.Engine == shape.TRTLLM)
	}
	if name, n := j.headers(j.d.cfg.Tenants.Name()); n == 1 {
		w.query.Owner = name
	}
	w.query.Final, w.query.Idle = j.final(w.in.body), j.idle
	if j.cacheReads == 0 {
		w.query.Conversation = "" // neither follows a binding nor moves it
	}
	w.query.Pin, w.query.Lookup = w.stored.Pin, !w.in.known && w.stored.Root != nil
	if j.d.legs != nil {
		if why := w.cannotSplit(); why != "" {
			w.query.Local = true
			j.entry.NotePrefill("not split: " + why)
		}
	}
	live := j.d.live.Load()
	if live.Flow.Requests > 0 && len(live.Flow.Bands) > 0 {
		w.query.Priority = live.Flow.Priority(w.in.modelName())
	}
	w.query.Whole = !live.Envoy.FirstToken || !w.in.known || !w.in.body.Stream() || j.idle
	w.query.TTFT = live.TTFT(w.in.modelName())
	if ms, err := strconv.Atoi(j.header(ttftHeader)); err == nil && ms > 0 && ms <= int(config.MaxTTFT.Milliseconds()) {
		w.query.TTFT = time.Duration(ms) * time.Millisecond
	}
	if w.query.Lookup { // it computes no first token and is not held
		w.query.TTFT, w.query.Waited = 0, -1
	}
	if live.Routing.Trusted || live.Routing.TrustedNames {
		if priority, ok := j.objective(); ok {
			w.query.Priority = priority
		}
	}
	if !live.Routing.Trusted {
		return
	}
	if v, ok := j.r.Header(pinHeader); ok {
		pin := j.target(strings.TrimSpace(v))
		w.query.Pin, w.stored.Pin = &routing.Pin{Worker: pin.Worker, Rank: pin.Rank}, nil
	}
	if v, ok := j.r.Header(excludeHeader); ok {
		w.query.Exclude = j.excluded(v)
	}
	if n, err := strconv.Atoi(j.header(priorityHeader)); err == nil {
		w.query.Priority = n
	}
}

// pick chooses and books targets, and explains the choice.
func (w *work) pick(ctx context.Context) (*placed, error) {
	d := w.d
	if w.queued == nil && d.decisions.Explains(d.fleet.View().NumSlots()) {
		w.ex, w.explained = d.decisions.Blank(), true
	}
	p, err := w.placeOrLocal(ctx)
	if w.queued != nil {
		return nil, w.queued
	}
	w.entry.Explain(w.ex)
	if err != nil {
		return nil, err
	}
	w.ex = nil
	if p.plan.Degraded == routing.DegradedNoDecode || p.plan.Degraded != "" && w.degraded == "" {
		w.degraded = string(p.plan.Degraded)
	}
	w.took(observe.StagePlan)
	if p.plan.Prefill != routing.NoSlot {
		return p, nil
	}
	if reason := w.impossible(p.decode); reason != "" {
		w.release(&p.plan)
		return nil, w.fail(400, "kvlane_cannot_disaggregate", "workers that only decode cannot serve "+reason)
	}
	return p, nil
}

// placeOrLocal places the request, without a prefill target if there is none and decode engines can compute prompts. If
// the request continues an answer whose worker cannot be used, another worker is chosen: it answers that it does not know
// the answer.
func (w *work) placeOrLocal(ctx context.Context) (*placed, error) {
	p, err := w.place(ctx)
	if w.stored.Pin != nil && isAbsent(err) {
		w.query.Pin, w.stored.Pin = nil, nil
		return w.placeOrLocal(ctx)
	}
	none, ok := errors.AsType[*routing.NoTargetError](err)
	if !ok || none.Pool != routing.Prefill || w.query.Local || w.d.legs == nil || w.d.legs.Protocol.Always {
		return p, err
	}
	w.query.Local, w.degraded = true, degradedNoPrefill
	w.entry.NotePrefill(err.Error())
	return w.place(ctx)
}

// place books targets, perhaps after waiting for capacity, and credits them with the prompt.
func (w *work) place(ctx context.Context) (*placed, error) {
	d := w.d
	var p *placed
	var err error
	if q := w.queued; q != nil {
		w.queued = nil
		p, err = d.waited(q)
	} else if p, w.queued, err = w.choose(); w.queued != nil {
		return nil, w.queued
	}
	if err != nil {
		return nil, err
	}
	w.booked = &p.plan
	if ctx.Err() != nil { // placed at the moment its client disconnected
		w.release(&p.plan)
		return nil, errClientGone
	}
	if !d.fleet.Still(p.plan.Decode, p.decode) { // the worker left between the pick and now
		w.release(&p.plan)
		return nil, &routing.NoTargetError{}
	}
	if err := w.mustSalt(p, p.decode); err != nil {
		return nil, err
	}
	if p.plan.Prefill != routing.NoSlot {
		p.prefillCredit = w.speculate(p, p.plan.Prefill)
	} else {
		p.credit = w.speculate(p, p.plan.Decode)
	}
	return p, nil
}

// try picks and books. The caller holds d.mu.
func (w *work) try(now time.Duration) (*placed, error) {
	d := w.d
	if w.r.HasSubset {
		w.s.subset.Reset()
		d.router.AddressSet(&w.s.subset, w.r.Subset)
		w.query.Subset = &w.s.subset
	}
	var p placed
	var err error
	w.shadow(now)
	if d.record == 0 && w.entry.Recorded == nil {
		p.plan, err = d.router.Pick(now, &w.query, w.s.overlaps, w.ex)
	} else {
		if w.entry.Recorded == nil {
			d.record--
		}
		w.entry.Recorded, err = d.router.PickRecorded(now, &w.query, w.s.overlaps, w.ex)
		p.plan = w.entry.Recorded.Plan
	}
	if err != nil {
		return nil, err
	}
	// The router forgets a target before the fleet reuses its slot: here both mean the same worker.
	w.compareShadows(&p.plan)
	v := d.fleet.View()
	p.at = d.start.Add(now)
	p.decode, p.prefill = v.Endpoint(p.plan.Decode), v.Endpoint(p.plan.Prefill)
	return &p, nil
}

// speculate credits a target with the prompts that are on their way there. Call it once for each placed, or copy of it.
func (w *work) speculate(p *placed, slot kvindex.Slot) []kvindex.Credit {
	if e := w.d.fleet.View().Endpoint(slot); w.d.cfg.Routing.Speculate <= 0 || e != nil && w.tokens.differ(e) {
		return nil
	}
	credit := p.one[:0]
	if len(w.s.hashes) > 0 {
		credit = append(credit, w.d.fleet.Speculate(slot, w.s.hashes, w.tokens.n, w.clock))
	}
	for _, o := range w.s.others {
		credit = append(credit, w.d.fleet.Speculate(slot, o.Hashes, o.Tokens, w.clock))
	}
	return credit
}

// ttftHeader is a request's target for the time to its first token in ms, which any client may set for its own.
const ttftHeader = "x-slo-ttft-ms"

// Headers that override a decision. They count only with routing.trust_overrides, and never reach a worker.
const (
	// pinHeader names a worker, or a target as "worker/rank".
	pinHeader = "x-kvlane-pin"
	// excludeHeader lists workers and targets.
	excludeHeader = "x-kvlane-exclude"
	// priorityHeader is a whole number; below 0 may be shed early.
	priorityHeader = "x-kvlane-priority"
	// objectiveHeader names an objective, which has a priority. The Gateway API inference extension
	// gave it the older name. They count with routing.trust_objectives too.
	objectiveHeader    = "x-llm-d-inference-objective"
	oldObjectiveHeader = "x-gateway-inference-objective"
)

// objective returns the priority of the objective that the request names. One that does not exist is none.
func (j *job) objective() (priority int, ok bool) {
	name := cmp.Or(j.header(objectiveHeader), j.header(oldObjectiveHeader))
	if name == "" {
		return 0, false
	}
	if priority, ok = j.d.live.Load().Routing.Objectives[name]; ok {
		return priority, true
	}
	if watched := j.d.objectives.Load(); watched != nil {
		priority, ok = (*watched)[name]
	}
	return priority, ok
}

// target reads "worker" or "worker/rank". A worker's own name may hold a slash.
func (j *job) target(text string) kvindex.Target {
	if at := strings.LastIndexByte(text, '/'); at >= 0 && j.d.fleet.View().Member(text) == nil {
		if n, err := strconv.ParseInt(text[at+1:], 10, 32); err == nil && n >= 0 {
			return kvindex.Target{Worker: text[:at], Rank: int32(n)}
		}
	}
	return kvindex.Target{Worker: text, Rank: kvindex.NoRank}
}

// excluded returns the slots of a list of workers and targets.
func (j *job) excluded(list string) []kvindex.Slot {
	v := j.d.fleet.View()
	out := j.s.exclude[:0]
	for name := range strings.SplitSeq(list, ",") {
		t := j.target(strings.TrimSpace(name))
		m := v.Member(t.Worker)
		if m == nil {
			continue
		}
		for _, slot := range m.Slots {
			if t.Rank == kvindex.NoRank || v.Endpoint(slot).Target.Rank == t.Rank {
				out = append(out, slot)
			}
		}
	}
	j.s.exclude = out
	return out
}
