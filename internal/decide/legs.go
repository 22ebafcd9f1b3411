package decide

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvlane/kvlane/internal/fleet"

	"github.com/kvlane/kvlane/envoy"
	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/disagg"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/prompt"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

// maxReplans bounds how often a request is planned anew because its decode target
// went away while the prefill leg ran.
const maxReplans = 2

const (
	degradedPrefill   = "prefill failed"
	degradedNoPrefill = "no prefill target"
)

// legs is what all prefill legs share.
type legs struct {
	protocol *disagg.Protocol
	sender   *disagg.Sender
	timeout  time.Duration
	attempts int
	// budget is how long a request may take from its arrival until its last leg is
	// given up, waiting for room included; 0: no bound. Envoy does not wait longer.
	budget time.Duration
	// headStart is how long a prefill leg that runs beside the decode leg may fail
	// before the decision is sent: a worker that refuses connections says so at once,
	// and then another one can be tried. The decode engine would wait for its blocks
	// meanwhile anyway.
	headStart time.Duration

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// newLegs returns nil if there is no connector.
func newLegs(c *config.Config) (*legs, error) {
	if c.Disagg.Connector == "" {
		return nil, nil
	}
	l := &legs{sender: disagg.NewSender(c.Envoy.Prefill, envoy.PrefillHeader), timeout: c.Disagg.Timeout.Std(), attempts: c.Disagg.Attempts,
		headStart: c.Disagg.HeadStart.Std(), budget: legBudget(c.Envoy.MessageTimeout.Std())}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	var err error
	l.protocol, err = disagg.New(c.Disagg.Connector, disagg.Options{Append: c.Disagg.FirstToken == "append", Trust: c.Disagg.Trust, Machine: machine(), Get: l.sender.Get})
	return l, err
}

// legBudget leaves a tenth of Envoy's patience, at most 5 s, for all that is no leg.
func legBudget(message time.Duration) time.Duration { return message - min(message/10, 5*time.Second) }

// legTime is how long a leg may take that starts now; 0 and less: there is no time for
// one.
func (j *job) legTime() time.Duration {
	l := j.d.legs
	if l.budget <= 0 {
		return l.timeout
	}
	return min(l.timeout, l.budget-j.d.now().Sub(j.began))
}

// machine tells replicas apart in the numbers that they give.
func machine() uint64 {
	h := fnv.New64a()
	name, _ := os.Hostname()
	fmt.Fprint(h, name, os.Getpid(), time.Now().UnixNano())
	return h.Sum64()
}

// adapt makes the rules fit the protocol: without one nothing is split, and engines
// that cannot compute a prompt by themselves get none.
func (l *legs) adapt(d *routing.Disagg) {
	switch {
	case l == nil:
		d.Mode = routing.ModeOff
	case l.protocol.Always && d.Mode != routing.ModeOff:
		d.Mode, d.Threshold = routing.ModeThreshold, 0
	}
}

func (l *legs) close() {
	if l == nil {
		return
	}
	l.cancel()
	l.wg.Wait()
	l.sender.Close()
}

// cannotSplit says why no leg may be made of the request, "" if it may.
func (j *job) cannotSplit() string {
	if !j.parsed {
		return "the body is not known"
	}
	ids := j.ids
	if j.front {
		ids = nil
	}
	return j.d.legs.protocol.Refuses(j.request, ids)
}

// impossible says why a decode worker cannot serve the request, "" if it may.
func (j *job) impossible(p *fleet.Endpoint) string {
	if j.d.legs == nil || !j.parsed || p.Member.Role != "decode" {
		return ""
	}
	return j.d.legs.protocol.Impossible(j.request, j.ids)
}

// withoutPrefill lets the request be planned as one that decode computes, because
// nobody is left to prefill it. False if that is not what err says, or if the
// engines cannot.
func (j *job) withoutPrefill(err error) bool {
	none, ok := errors.AsType[*routing.NoTargetError](err)
	if !ok || none.Pool != routing.Prefill || j.query.Local || j.d.legs == nil || j.d.legs.protocol.Always {
		return false
	}
	j.query.Local, j.degraded = true, degradedNoPrefill
	j.entry.NotePrefill(err.Error())
	return true
}

// side is a target as the protocols know it.
func (j *job) side(p *fleet.Endpoint) disagg.Side {
	w := &p.Member.Worker
	s := disagg.Side{Worker: w.Name, Generation: w.Generation, Address: p.Address, Rank: disagg.NoRank, Ranks: w.Ranks, ByHeader: p.Rank != "",
		Settings: j.d.cfg.Disagg.Of(&w.Worker)}
	if p.Target.Rank != kvindex.NoRank {
		s.Rank = int(p.Target.Rank) - w.StartRank
	}
	return s
}

// split runs the prefill leg of a plan, or starts it, and makes the decode leg.
func (j *job) split(ctx context.Context, plan *routing.Plan, decode *fleet.Endpoint) extproc.Decision {
	l := j.d.legs
	j.r.Hold(true)
	x := &disagg.Exchange{Request: j.request, Path: j.r.Path, ID: j.r.ID, Conversation: j.query.Conversation, Decode: j.side(decode)}
	for attempt := 1; ; attempt++ {
		prefill := j.prefillAt
		if !j.d.fleet.Still(plan.Prefill, prefill) {
			prefill = &fleet.Endpoint{}
		}
		x.IDs = j.ids
		if j.front || j.foreign(decode) || j.foreign(prefill) {
			x.IDs = nil
		}
		run := j.runLeg(ctx, x, plan, prefill)
		if run.failure == nil {
			return j.joined(ctx, plan, decode, x, run)
		}
		f := run.failure
		j.failed(prefill, f)
		switch {
		case f.Outcome == disagg.Ended:
			return j.final(plan, f)
		case ctx.Err() != nil:
			j.d.metrics.Requests.WithLabelValues(j.entry.API, "unrouted").Inc()
			j.d.decisions.Add(j.entry)
			return extproc.Decision{Ticket: j.ticket(plan, decode)} // its End releases
		case f.Outcome == disagg.Refused:
			j.release(plan)
			return j.refusedByPrefill(f)
		}
		if attempt < l.attempts && j.legTime() > 0 && j.movePrefill(plan, prefill) {
			continue
		}
		if l.protocol.Always {
			j.release(plan)
			return j.reject(rejectOf(f, j.api))
		}
		return j.computeLocally(ctx, plan, decode)
	}
}

// run is a prefill leg that has come to its end, or goes on in the background.
type run struct {
	leg     disagg.Leg // of the decode side
	failure *disagg.FailureError
	answer  *disagg.Answer
	// stop ends a leg that goes on; nil if none does.
	stop  context.CancelFunc
	usage *legUsage // nil if nobody wants to know
	// abort tells what the client is told if the leg fails while decode waits for it.
	abort <-chan *extproc.Reject
}

// runLeg makes the leg to one prefill target and, unless both run at once, waits
// for its answer.
func (j *job) runLeg(ctx context.Context, x *disagg.Exchange, plan *routing.Plan, p *fleet.Endpoint) (r run) {
	l := j.d.legs
	if p.Member == nil {
		return run{failure: &disagg.FailureError{Outcome: disagg.Unreachable, Err: errors.New("the worker is gone")}}
	}
	x.Begin(j.side(p), disagg.NewUnique())
	defer func() {
		if r.failure != nil {
			l.protocol.Failed(&x.Prefill)
		}
	}()
	if l.protocol.NoLeg {
		leg, err := l.protocol.Decode(x, nil)
		if err != nil {
			return run{failure: disagg.AsFailure(err)}
		}
		return run{leg: leg}
	}
	asking, cancel := context.WithTimeout(ctx, j.legTime())
	defer cancel()
	leg, err := l.protocol.Prefill(asking, x)
	if err != nil {
		return run{failure: disagg.AsFailure(err)}
	}
	leg.Edits = append(leg.Edits, j.rankEdits(p, false)...)
	body, err := leg.Body(asking, j.request)
	if err != nil {
		return run{failure: disagg.AsFailure(err)}
	}
	if body == nil {
		body = append([]byte(nil), j.r.Body...)
	}
	path := j.r.Path
	if leg.Path != "" {
		path = leg.Path
	}
	header := x.LegHeader(&leg, func(yield func(name, value string)) {
		for i := range j.r.Headers {
			yield(j.r.Headers[i].Name, j.r.Headers[i].Value)
		}
	})
	j.d.metrics.Picks.WithLabelValues(p.Target.Worker, observe.Rank(p.Target.Rank), "prefill").Inc()
	if l.protocol.AtOnce {
		return j.beside(ctx, x, plan, p, strings.Clone(path), header, body)
	}
	raw, err := l.sender.Send(asking, p.Address, path, header, body)
	if err != nil {
		return run{failure: disagg.AsFailure(err)}
	}
	answer, err := disagg.ParseAnswer(raw)
	if err != nil {
		return run{failure: disagg.AsFailure(err)}
	}
	if r.leg, err = l.protocol.Decode(x, answer); err != nil {
		if final, ok := errors.AsType[*disagg.FinalError](err); ok {
			return run{failure: &disagg.FailureError{Outcome: disagg.Ended, Err: final}}
		}
		return run{failure: disagg.AsFailure(err)}
	}
	r.answer, r.usage = answer, j.d.newLegUsage()
	r.usage.keep(raw)
	j.prefillDone(plan, p)
	if j.own {
		j.d.fleet.Sample(j.served, p.Member, j.request)
	}
	return r
}

// still says whether a slot is the same worker's as when p was found.
func (d *Decider) still(slot kvindex.Slot, p *fleet.Endpoint) bool {
	now := d.fleet.View().Endpoint(slot)
	return p != nil && now != nil && now.Target == p.Target && now.Member.Generation == p.Member.Generation
}

func (j *job) prefillDone(plan *routing.Plan, p *fleet.Endpoint) {
	d := j.d
	d.book(d.now(), func(r *routing.Router, now time.Duration) { r.PrefillDone(now, plan.Reservation) })
	d.metrics.Legs.WithLabelValues(p.Target.Worker, string(disagg.OK)).Inc()
	d.fleet.ForgetGone(p.Target.Worker)
}

// beside starts a leg that runs while the decode leg does.
func (j *job) beside(ctx context.Context, x *disagg.Exchange, plan *routing.Plan, p *fleet.Endpoint, path string, header http.Header, body []byte) run {
	d, l := j.d, j.d.legs
	leg, err := l.protocol.Decode(x, nil)
	if err != nil {
		return run{failure: disagg.AsFailure(err)}
	}
	running, stop := context.WithTimeout(l.ctx, l.timeout)
	early := make(chan error) // read until the head start is over
	late := make(chan struct{})
	abort := make(chan *extproc.Reject, 1)
	api := j.api
	entry, reservation, worker, address, usage := j.entry, plan.Reservation, p.Target.Worker, p.Address, d.newLegUsage()
	l.wg.Go(func() {
		defer stop()
		raw, err := l.sender.Send(running, address, path, header, body)
		usage.keep(raw)
		if err == nil {
			d.book(d.now(), func(r *routing.Router, now time.Duration) { r.PrefillDone(now, reservation) })
			d.metrics.Legs.WithLabelValues(worker, string(disagg.OK)).Inc()
			d.fleet.ForgetGone(worker)
		}
		select {
		case early <- err:
			return
		case <-late:
		}
		if err == nil {
			return
		}
		f := disagg.AsFailure(err)
		d.metrics.Legs.WithLabelValues(worker, string(f.Outcome)).Inc()
		d.fleet.ForgetGone(worker)
		if f.Outcome != disagg.Cancelled {
			abort <- rejectOf(f, api)
			entry.NotePrefill(fmt.Sprintf("%s: %v", worker, f))
			d.log.Warn().Str("request", entry.ID).Str("prefill", worker).Err(f).Msg("prefill leg failed beside the decode leg")
		}
	})
	wait := time.NewTimer(l.headStart)
	defer wait.Stop()
	select {
	case err := <-early:
		if err != nil {
			return run{failure: disagg.AsFailure(err)}
		}
		return run{leg: leg, usage: usage}
	case <-ctx.Done():
		stop()
		close(late)
		return run{failure: &disagg.FailureError{Outcome: disagg.Cancelled, Err: ctx.Err()}}
	case <-wait.C:
		close(late)
		return run{leg: leg, stop: stop, usage: usage, abort: abort}
	}
}

// failed makes a failed leg visible.
func (j *job) failed(p *fleet.Endpoint, f *disagg.FailureError) {
	d := j.d
	worker, name := p.Target.Worker, p.Target.String()
	if f.Outcome == disagg.Refused || f.Outcome == disagg.Unreachable {
		d.fleet.Withdraw(j.prefillCredit) // it computed nothing
	}
	d.metrics.Legs.WithLabelValues(worker, string(f.Outcome)).Inc()
	d.fleet.ForgetGone(worker)
	j.entry.NotePrefill(name + ": " + f.Error())
	if f.Outcome == disagg.Ended || f.Outcome == disagg.Cancelled || f.Outcome == disagg.Refused {
		return
	}
	d.log.Warn().Str("request", j.entry.ID).Str("prefill", name).Err(f).Msg("prefill leg failed")
	if f.Outcome == disagg.Unreachable && d.onSuspect != nil && worker != "" {
		d.onSuspect(worker)
	}
}

// movePrefill books the next prefill target; false if there is none. A worker that left
// needs no exclusion, and its slots may be another's by now.
func (j *job) movePrefill(plan *routing.Plan, failed *fleet.Endpoint) bool {
	d := j.d
	q := j.query
	if failed.Member != nil && d.fleet.Still(plan.Prefill, failed) {
		j.tried = append(j.tried, failed.Member.Slots...) // its other ranks are the same process
	}
	q.Exclude = j.tried
	var next routing.Plan
	var err error
	d.book(d.now(), func(r *routing.Router, now time.Duration) {
		if next, err = r.MovePrefill(now, plan.Reservation, &q, j.s.overlaps, nil); err == nil {
			j.prefillAt = d.fleet.View().Endpoint(next.Prefill)
		}
	})
	if err != nil {
		j.entry.NotePrefill(err.Error())
		return false
	}
	plan.Prefill, plan.Matched, plan.Miss = next.Prefill, next.Matched, next.Miss
	j.prefillCredit = j.speculate(plan.Prefill)
	return true
}

// computeLocally lets the decode target compute the prompt.
func (j *job) computeLocally(ctx context.Context, plan *routing.Plan, decode *fleet.Endpoint) extproc.Decision {
	d := j.d
	d.book(d.now(), func(r *routing.Router, now time.Duration) { r.ComputeLocally(now, plan.Reservation, plan.DecodeMiss) })
	plan.Prefill = routing.NoSlot
	plan.Miss, plan.Matched = plan.DecodeMiss, max(0, j.query.PromptTokens-plan.DecodeMiss)
	j.credit = j.speculate(plan.Decode)
	j.degraded = degradedPrefill
	j.entry.NotePrefill("computed on the decode target")
	j.leg()
	return j.forward(ctx, plan, decode)
}

// leg ends the stage of the prefill leg, which is no part of the decision's time.
func (j *job) leg() {
	before := j.clock
	j.lap(observe.StageLeg)
	j.legs += j.clock.Sub(before)
}

// joined forwards the decode leg of a prefill leg that has its answer or is on its
// way.
func (j *job) joined(ctx context.Context, plan *routing.Plan, decode *fleet.Endpoint, x *disagg.Exchange, r run) extproc.Decision {
	d := j.d
	j.leg()
	if now := d.fleet.View().Endpoint(plan.Decode); r.stop == nil && (!d.fleet.Still(plan.Decode, decode) || !now.Member.Ready) {
		return j.replan(ctx, plan, decode, x, r)
	}
	r.leg.Edits = append(r.leg.Edits, j.rankEdits(decode, plan.RankFree)...)
	body, err := r.leg.Body(ctx, j.request)
	if err != nil {
		if r.stop != nil {
			r.stop()
		}
		return j.unedited(ctx, plan, err)
	}
	j.credit = j.speculate(plan.Decode)
	j.entry.Prefill = j.prefillAt.Target.String()
	out := j.forward(ctx, plan, decode)
	if other := j.alternate(decode); other != "" {
		// Envoy takes it if the first refuses connections; its own fallback would not know
		// prefill workers from decode workers.
		out.Endpoint += "," + other
	}
	t, _ := out.Ticket.(*ticket)
	t.stopLeg, t.legUsage = r.stop, r.usage
	out.Abort = r.abort
	for _, h := range r.leg.Headers {
		out.Set = append(out.Set, extproc.Header(h))
	}
	if r.leg.Path != "" {
		out.Set = append(out.Set, extproc.Header{Name: ":path", Value: r.leg.Path})
	}
	out.Body = body
	return out
}

// alternate is another decode worker that the same leg would serve, the least busy
// one; "" if there is none, the leg is for one worker only, or whoever reads the pick
// takes no list.
func (j *job) alternate(chosen *fleet.Endpoint) string {
	d := j.d
	p := d.legs.protocol
	if !d.cfg.Envoy.Alternates || !p.Portable && !p.AtOnce || p.Named || j.r.HasSubset {
		return ""
	}
	best, least := "", int64(0)
	d.mu.Lock()
	defer d.mu.Unlock()
	for slot, o := range d.fleet.View().Endpoints {
		if o.Member.Name == chosen.Member.Name || o.Rank != chosen.Rank || o.Member.Role == "prefill" || !o.Member.Ready || o.Member.Draining ||
			!slices.Equal(o.Member.Models, chosen.Member.Models) {
			continue
		}
		if active := d.router.Load(slot).Active; best == "" || active < least {
			best, least = o.Address, active
		}
	}
	return best
}

// replan plans anew without the decode worker that went away. A prefill answer that
// serves any decode engine is used again.
func (j *job) replan(ctx context.Context, plan *routing.Plan, dead *fleet.Endpoint, x *disagg.Exchange, r run) extproc.Decision {
	d := j.d
	j.release(plan)
	if j.replans++; j.replans > maxReplans {
		return j.noTarget(&routing.NoTargetError{Pool: routing.Decode})
	}
	j.entry.NotePrefill("decode target " + dead.Target.String() + " went away; planned anew")
	slots := []kvindex.Slot{plan.Decode}
	if m := dead.Member; m != nil {
		slots = append(slots, m.Slots...)
	}
	for _, slot := range slots {
		// A slot of a worker that was taken off the list may be another's by now.
		if now := d.fleet.View().Endpoint(slot); now != nil && now.Target.Worker == dead.Target.Worker {
			j.query.Exclude = append(j.query.Exclude, slot)
		}
	}
	portable, prefilled := d.legs.protocol.Portable, j.prefillAt
	j.query.Local = portable
	next, p, err := j.place(ctx, nil)
	if j.withoutPrefill(err) {
		next, p, err = j.place(ctx, nil)
	}
	if err != nil {
		return j.noTarget(err)
	}
	switch {
	case portable:
		x.Decode = j.side(p)
		leg, err := d.legs.protocol.Decode(x, r.answer)
		if err != nil {
			return j.computeLocally(ctx, next, p)
		}
		j.prefillAt = prefilled
		next.Prefill, next.Matched, next.Miss = routing.NoSlot, plan.Matched, plan.Miss
		return j.joined(ctx, next, p, x, run{leg: leg, answer: r.answer, usage: r.usage})
	case next.Prefill != routing.NoSlot && j.legTime() <= 0 && !d.legs.protocol.Always:
		return j.computeLocally(ctx, next, p)
	case next.Prefill != routing.NoSlot:
		return j.split(ctx, next, p)
	default:
		return j.forward(ctx, next, p)
	}
}

func (j *job) release(plan *routing.Plan) {
	d := j.d
	j.booked = nil
	d.book(d.now(), func(r *routing.Router, now time.Duration) { r.Release(now, plan.Reservation) })
}

// final gives the prefill answer to the client.
func (j *job) final(plan *routing.Plan, f *disagg.FailureError) extproc.Decision {
	d := j.d
	j.release(plan)
	j.leg()
	final, _ := errors.AsType[*disagg.FinalError](f.Err)
	kind := "application/json"
	if final.Stream {
		kind = "text/event-stream; charset=utf-8"
	}
	j.entry.SetStatus(http.StatusOK)
	d.metrics.Requests.WithLabelValues(j.entry.API, "routed").Inc()
	d.decisions.Add(j.entry)
	return extproc.Decision{Reject: &extproc.Reject{Status: http.StatusOK, Body: final.Body, Details: "kvlane_prefill_answer",
		Headers: []extproc.Header{{Name: "content-type", Value: kind}}}}
}

// refusedByPrefill passes on what is the client's fault.
func (j *job) refusedByPrefill(f *disagg.FailureError) extproc.Decision {
	j.leg()
	return j.reject(rejectOf(f, j.api))
}

// rejectOf is the answer to a request whose prefill leg has failed for good: what is
// the client's fault as the worker said it, all else 503.
func rejectOf(f *disagg.FailureError, api prompt.API) *extproc.Reject {
	if f.Outcome != disagg.Refused {
		return &extproc.Reject{Status: http.StatusServiceUnavailable, Details: "kvlane_prefill_failed",
			Body: prompt.AppendFailure(nil, api, prompt.Failure{Status: http.StatusServiceUnavailable,
				Type: failureTypes[http.StatusServiceUnavailable], Message: "no worker could compute the prompt; try again"})}
	}
	r := &extproc.Reject{Status: f.Status, Body: f.Body, Details: "kvlane_prefill_refused"}
	if f.Status == http.StatusTooManyRequests || prompt.Valid(f.Body) != nil {
		r.Body = prompt.AppendFailure(nil, api, prompt.Failure{Status: f.Status, Type: "prefiller_error", Code: strconv.Itoa(f.Status),
			Message: "the prefill worker answered " + strconv.Itoa(f.Status) + " " + http.StatusText(f.Status)})
	}
	if v := f.Header.Get("Retry-After"); v != "" {
		r.Headers = append(r.Headers, extproc.Header{Name: "retry-after", Value: v})
	}
	return r
}
