package decide

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/disagg"
	"github.com/kvlane/kvlane/internal/fleet"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/steering"
	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/shape"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

// maxReplans bounds how often a request is planned again because its decode target went away while the prefill leg ran.
const maxReplans = 2

// newLegs returns the runner of prefill legs, nil if there is no connector.
func newLegs(c *config.Config) (*disagg.Runner, error) {
	if c.Disagg.Connector == "" {
		return nil, nil
	}
	legs, err := disagg.NewRunner(c.Disagg.Connector,
		disagg.Options{Append: c.Disagg.FirstToken == "append", Trust: c.Disagg.Trust},
		disagg.RunnerOptions{Proxy: c.Envoy.Prefill, Header: steering.PrefillPick, Timeout: c.Disagg.Timeout.Std(), HeadStart: c.Disagg.HeadStart.Std(),
			Budget: legBudget(c.Envoy.MessageTimeout.Std())})
	if err != nil {
		return nil, err
	}
	boundLegs(legs, c)
	return legs, nil
}

// boundLegs derives two more bounds from limits.bodies_in_flight.bytes. The answers of prefill legs get a quarter of
// it, rounded up because 0 means unbounded. The bodies of legs, which are held besides those of their requests, get as
// much again.
func boundLegs(legs *disagg.Runner, c *config.Config) {
	legs.Answers.SetMost((int64(c.Limits.Bodies.Bytes) + 3) / 4)
	legs.Bodies.SetMost(int64(c.Limits.Bodies.Bytes))
}

// legBudget reserves a tenth of Envoy's message timeout, at most 5 s, for everything but the legs.
func legBudget(message time.Duration) time.Duration { return message - min(message/10, 5*time.Second) }

// adapt adjusts the rules to the protocol: without one nothing is split, and engines that
// cannot compute a prompt by themselves are not asked to.
func adapt(d *routing.Disagg, legs *disagg.Runner) {
	switch {
	case legs == nil:
		d.Mode = routing.ModeOff
	case legs.Protocol.Always && d.Mode != routing.ModeOff:
		d.Mode, d.Threshold = routing.ModeThreshold, 0
	}
}

// legRoom stands for the headers that a decode leg adds, with room to spare.
var legRoom = func() (d extproc.Decision) {
	for i := range 4 {
		d.Set = append(d.Set, extproc.Header{Name: "x-room-" + strconv.Itoa(i), Value: strings.Repeat("-", 256)})
	}
	return d
}()

// cannotSplit returns why the request cannot be split, "" if it can.
func (w *work) cannotSplit() string {
	if !w.in.known || w.idle {
		return "the body is not known, or not computed"
	}
	if engine, ok := w.engine(); ok && engine.CacheUse(w.in.body).NotLoaded {
		return "the decode engine would compute the prompt again"
	}
	if !w.d.legs.Protocol.Always {
		if why := w.refusedLater(); why != "" {
			return why
		}
	}
	return w.d.legs.Protocol.Refuses(w.in.body, w.tokens.whole())
}

// refusedLater returns why the request might be refused after its prefill leg, "" if it would not, as far as is known. The
// leg asks for one token, so it might fit the context; and the prefill engine would keep its blocks for nothing.
func (w *work) refusedLater() string {
	r, perToken := w.in.body, int64(1) // of a leg's transfer parameters, at most, with 4 KiB for the rest
	if w.d.legs.Protocol.SendsIDs {
		perToken = 9
	}
	most, _ := r.MaxTokens()
	switch {
	case w.tokens.refused:
		return "the engine would refuse it"
	case w.tokens.whole() == nil && w.in.model != nil && w.in.model.Tokens != nil && most > int64(cmp.Or(w.in.model.Tokens.MaxModelLen(), math.MaxInt)):
		return "it asks for more tokens than the context has"
	case !w.r.Fits(&legRoom):
		return "its headers leave no room for those of the decode leg"
	case int64(len(r.Body))+perToken*w.tokens.count+4<<10 > int64(w.d.live.Load().Limits.MaxBody):
		return "its body leaves no room for what the decode leg adds"
	}
	return ""
}

// engine returns the engine that the connector belongs to, else the model's; ok is false if neither is known.
func (w *work) engine() (e shape.Engine, ok bool) {
	e, err := shape.ParseEngine(config.ConnectorEngines[w.d.cfg.Disagg.Connector])
	if err != nil && w.in.model != nil {
		return w.in.model.Engine, true
	}
	return e, err == nil
}

// impossible returns why a decode worker cannot serve the request, "" if it can.
func (w *work) impossible(e *fleet.Endpoint) string {
	if w.d.legs == nil || !w.in.known || e.Member.Role != "decode" {
		return ""
	}
	return w.d.legs.Protocol.Impossible(w.in.body, w.tokens.ids)
}

// side converts an endpoint for the protocols.
func (w *work) side(e *fleet.Endpoint) disagg.Side {
	m := &e.Member.Worker
	s := disagg.Side{Worker: m.Name, Generation: m.Generation, Address: e.Address, Rank: disagg.NoRank, Ranks: m.Ranks, ByHeader: e.Rank != "",
		Settings: w.d.cfg.Disagg.Of(&m.Worker)}
	if e.Target.Rank != kvindex.NoRank {
		s.Rank = int(e.Target.Rank) - m.StartRank
	}
	return s
}

// legTime is how long a leg that starts now may take; zero or less if there is no time left.
func (w *work) legTime() time.Duration {
	l := w.d.legs
	if l.Budget <= 0 {
		return l.Timeout
	}
	return min(l.Timeout, l.Budget-w.d.now().Sub(w.began))
}

// leg is a prefill leg that was answered or is still running.
type leg struct {
	disagg.Result

	usage *disagg.LegUsage       // nil if clients get decode's
	abort <-chan *extproc.Reject // the answer to the client if the leg fails while decode waits for it
}

// split runs the prefill leg of a plan, or starts it, and makes the decode leg.
func (w *work) split(ctx context.Context, p *placed) (extproc.Decision, error) {
	d, l := w.d, w.d.legs
	w.cpu.release()
	overlaps := slices.Clone(w.s.overlaps) // another target may be picked
	w.slim()
	w.s.overlaps = overlaps
	w.r.Hold(true)
	x := &disagg.Exchange{Request: w.in.body, Path: w.r.Path, ID: w.r.ID, Conversation: w.in.conversation, Decode: w.side(p.decode)}
	defer x.End()
	for attempt := 1; ; attempt++ {
		at := p.prefill
		if !d.fleet.Still(p.plan.Prefill, at) {
			at = &fleet.Endpoint{}
		} else if err := w.mustSalt(p, at); err != nil {
			return extproc.Decision{}, err
		}
		done, f := w.prefill(ctx, x, p, at)
		if f == nil {
			return w.joined(ctx, p, x, done)
		}
		w.failed(p, at, f)
		switch {
		case f.Outcome == disagg.Ended:
			return extproc.Decision{}, w.prefillAnswer(p, f)
		case ctx.Err() != nil:
			d.metrics.Requests.WithLabelValues(w.entry.API, "unrouted").Inc()
			d.decisions.Add(w.entry)
			return extproc.Decision{Ticket: w.ticket(p)}, nil // the ticket's End releases
		case f.Outcome == disagg.Refused:
			w.release(&p.plan)
			w.tookLeg()
			return extproc.Decision{}, &answerError{Reject: rejectOf(f, w.api)}
		}
		if attempt < d.cfg.Disagg.Attempts && w.legTime() > 0 {
			if at.Member != nil && d.fleet.Still(p.plan.Prefill, at) {
				w.tried = append(w.tried, at.Member.Slots...) // its other ranks belong to the same process
			}
			if next := w.movePrefill(p); next != nil {
				p = next
				continue
			}
		}
		if l.Protocol.Always {
			w.release(&p.plan)
			return extproc.Decision{}, &answerError{Reject: rejectOf(f, w.api)}
		}
		return w.computeLocally(ctx, p)
	}
}

// prefill makes one attempt at the prefill leg. Its worker may be gone (at.Member is nil).
func (w *work) prefill(ctx context.Context, x *disagg.Exchange, p *placed, at *fleet.Endpoint) (leg, *disagg.FailureError) {
	d := w.d
	if at.Member == nil {
		return leg{}, &disagg.FailureError{Outcome: disagg.Unreachable, Err: fmt.Errorf("the worker is gone")}
	}
	x.Begin(w.side(at), disagg.NewUnique())
	x.IDs = w.tokens.whole()
	if w.tokens.differ(p.decode) || w.tokens.differ(at) {
		x.IDs = nil
	}
	var usage *disagg.LegUsage
	if d.cfg.Disagg.Usage == config.UsageOfPrefill && !d.legs.Protocol.NoLeg {
		usage = disagg.NewLegUsage()
	}
	abort := make(chan *extproc.Reject, 1)
	worker, api, entry, reservation := at.Target.Worker, w.api, w.entry, p.plan.Reservation
	ended := func() {
		d.book(d.now(), func(r *routing.Router, now time.Duration) { r.PrefillDone(now, reservation) })
		d.countLeg(worker, disagg.OK)
	}
	result, f := d.legs.Run(ctx, &disagg.Call{
		Exchange: x, Body: w.r.Body, Edits: w.edits(at, false), Within: w.legTime(),
		Headers: func(yield func(name, value string)) {
			for i := range w.r.Headers {
				if h := &w.r.Headers[i]; !d.cfg.Tenants.Owns(h.Name) {
					yield(h.Name, h.Value)
				}
			}
		},
		Sent: func() { d.metrics.Picks.WithLabelValues(worker, observe.Rank(at.Target.Rank), "prefill").Inc() },
		Ended: func(u *disagg.Usage) {
			usage.Keep(u)
			if u != nil {
				ended()
			}
		},
		Late: func(f *disagg.FailureError) {
			d.countLeg(worker, f.Outcome)
			d.legFailed(reservation, f)
			if f.Outcome != disagg.Cancelled {
				abort <- rejectOf(f, api)
				entry.NotePrefill(fmt.Sprintf("%s: %v", worker, f))
				d.log.Warn().Str("request", entry.ID).Str("prefill", worker).Err(f).Msg("prefill leg failed while decode ran")
			}
		},
	})
	if f != nil {
		return leg{}, f
	}
	if result.Answer != nil {
		if usage != nil {
			usage.Keep(result.Answer.Usage())
		}
		ended()
		if w.in.known && w.in.model != nil {
			d.fleet.Sample(w.in.model, at.Member, w.in.body)
		}
	}
	return leg{result, usage, abort}, nil
}

func (d *Decider) countLeg(worker string, outcome disagg.Outcome) {
	d.metrics.Legs.WithLabelValues(worker, string(outcome)).Inc()
	d.fleet.ForgetGone(worker)
}

// legFailed reports a failed leg to the router. The target is not blamed if it refused the prompt, if its answer was
// final, or if Kvlane had no memory left for the leg or its answer.
func (d *Decider) legFailed(id routing.ReservationID, f *disagg.FailureError) {
	d.book(d.now(), func(r *routing.Router, now time.Duration) {
		switch f.Outcome {
		case disagg.Cancelled:
		case disagg.Ended, disagg.Refused, disagg.NoRoom:
			r.PrefillDone(now, id)
		default:
			r.PrefillFailed(id)
		}
	})
}

// failed logs and counts a failed leg, and withdraws its credit.
func (w *work) failed(p *placed, at *fleet.Endpoint, f *disagg.FailureError) {
	d := w.d
	worker, name := at.Target.Worker, at.Target.String()
	if f.Outcome == disagg.Refused || f.Outcome == disagg.Unreachable || f.Unsent {
		d.fleet.Withdraw(p.prefillCredit) // it computed nothing
	}
	d.countLeg(worker, f.Outcome)
	d.legFailed(p.plan.Reservation, f)
	w.entry.NotePrefill(name + ": " + f.Error())
	if f.Outcome == disagg.Ended || f.Outcome == disagg.Cancelled || f.Outcome == disagg.Refused {
		return
	}
	d.log.Warn().Str("request", w.entry.ID).Str("prefill", name).Err(f).Msg("prefill leg failed")
	if f.Outcome == disagg.Unreachable && worker != "" {
		d.onSuspect(worker)
	}
}

// movePrefill books the next prefill target; nil if there is none. A worker that left needs
// no exclusion, and its slots may already be reused.
func (w *work) movePrefill(p *placed) *placed {
	d := w.d
	q := w.query
	q.Exclude = w.tried
	next := *p
	var plan routing.Plan
	var err error
	d.book(d.now(), func(r *routing.Router, now time.Duration) {
		if plan, err = r.MovePrefill(now, p.plan.Reservation, &q, w.s.overlaps, nil); err == nil {
			next.prefill = d.fleet.View().Endpoint(plan.Prefill)
		}
	})
	if err != nil {
		w.entry.NotePrefill(err.Error())
		return nil
	}
	next.plan.Prefill, next.plan.Matched, next.plan.Miss = plan.Prefill, plan.Matched, plan.Miss
	next.prefillCredit = w.speculate(&next, plan.Prefill)
	return &next
}

// computeLocally lets the decode target compute the prompt.
func (w *work) computeLocally(ctx context.Context, p *placed) (extproc.Decision, error) {
	d := w.d
	d.book(d.now(), func(r *routing.Router, now time.Duration) {
		r.ComputeLocally(now, p.plan.Reservation, p.plan.DecodeMiss)
	})
	local := *p
	local.plan.Prefill = routing.NoSlot
	local.plan.Miss, local.plan.Matched = p.plan.DecodeMiss, max(0, w.tokens.count-p.plan.DecodeMiss)
	local.credit = w.speculate(&local, p.plan.Decode)
	w.degraded = degradedPrefill
	w.entry.NotePrefill("computed on the decode target")
	w.tookLeg()
	return w.forward(ctx, &local)
}

// tookLeg ends the stage of the prefill leg, which is not part of the decision's time.
func (w *work) tookLeg() {
	before := w.clock
	w.took(observe.StageLeg)
	w.elsewhere += w.clock.Sub(before)
}

// joined forwards the decode leg after its prefill leg was answered, or while that is still running.
func (w *work) joined(ctx context.Context, p *placed, x *disagg.Exchange, l leg) (extproc.Decision, error) {
	d := w.d
	w.tookLeg()
	if now := d.fleet.View().Endpoint(p.plan.Decode); l.Stop == nil && (!d.fleet.Still(p.plan.Decode, p.decode) || !now.Member.Ready) {
		return w.replan(ctx, p, x, l)
	}
	// The connector's own request id wins.
	l.Decode.Edits = slices.Concat(w.responseEdits(p.decode), l.Decode.Edits, w.edits(p.decode, p.plan.RankFree))
	body, err := l.Decode.Body(ctx, w.in.body)
	if err != nil {
		if l.Stop != nil {
			l.Stop()
		}
		return extproc.Decision{}, w.unedited(ctx, p, err)
	}
	joined := *p
	joined.credit = w.speculate(&joined, p.plan.Decode)
	w.entry.Prefill = p.prefill.Target.String()
	out, t := w.decision(&joined)
	if other := w.alternate(p.decode); other != "" {
		// Envoy uses it if the first refuses connections; its own fallback cannot tell prefill workers from decode workers.
		out.Endpoint += "," + other
	}
	t.stopLeg, t.legUsage = l.Stop, l.usage
	out.Body = body
	if l.Stop != nil {
		out.Abort = l.abort
	}
	for _, h := range l.Decode.Headers {
		out.Set = append(out.Set, extproc.Header(h))
	}
	if l.Decode.Path != "" {
		out.Set = append(out.Set, extproc.Header{Name: ":path", Value: l.Decode.Path})
	}
	return w.routed(&joined, out, t)
}

// replan plans again without the decode worker that went away. A prefill answer that serves
// any decode engine is reused.
func (w *work) replan(ctx context.Context, dead *placed, x *disagg.Exchange, l leg) (extproc.Decision, error) {
	d := w.d
	w.release(&dead.plan)
	if w.replans++; w.replans > maxReplans {
		return extproc.Decision{}, &routing.NoTargetError{Pool: routing.Decode}
	}
	w.entry.NotePrefill("decode target " + dead.decode.Target.String() + " went away; planned anew")
	for _, slot := range append([]kvindex.Slot{dead.plan.Decode}, dead.decode.Member.Slots...) {
		// The slot of a worker that was removed may already be reused.
		if now := d.fleet.View().Endpoint(slot); now != nil && now.Target.Worker == dead.decode.Target.Worker {
			w.query.Exclude = append(w.query.Exclude, slot)
		}
	}
	portable := d.legs.Protocol.Portable
	w.query.Local = portable
	p, err := w.placeOrLocal(ctx)
	switch {
	case err != nil:
		return extproc.Decision{}, err
	case portable && p.plan.Degraded != routing.DegradedNoDecode:
		x.Decode = w.side(p.decode)
		if l.Decode, err = d.legs.Protocol.Decode(x, l.Answer); err != nil {
			return w.computeLocally(ctx, p)
		}
		again := *p
		again.prefill = dead.prefill
		again.plan.Prefill, again.plan.Matched, again.plan.Miss = dead.plan.Prefill, dead.plan.Matched, dead.plan.Miss
		return w.joined(ctx, &again, x, l)
	case p.plan.Prefill != routing.NoSlot && w.legTime() <= 0 && !d.legs.Protocol.Always:
		return w.computeLocally(ctx, p)
	case p.plan.Prefill != routing.NoSlot:
		return w.split(ctx, p)
	default:
		return w.forward(ctx, p)
	}
}

// prefillAnswer gives the prefill answer to the client.
func (w *work) prefillAnswer(p *placed, f *disagg.FailureError) error {
	w.release(&p.plan)
	w.tookLeg()
	answer, _ := f.Err.(*disagg.FinalError) //nolint:errorlint // what the outcome Ended holds
	kind := "application/json"
	if answer.Stream {
		kind = "text/event-stream; charset=utf-8"
	}
	return &answerError{outcome: "routed", Reject: &extproc.Reject{Status: http.StatusOK, Body: answer.Body, Details: "kvlane_prefill_answer",
		Headers: []extproc.Header{{Name: "content-type", Value: kind}}}}
}

// rejectOf answers a request whose prefill leg has failed: with the worker's answer to a client's fault, else 503.
func rejectOf(f *disagg.FailureError, api body.API) *extproc.Reject {
	if f.Outcome != disagg.Refused {
		return rejection(api, "kvlane_prefill_failed", body.Failure{Status: http.StatusServiceUnavailable,
			Message: "no worker could compute the prompt; try again"})
	}
	r := &extproc.Reject{Status: f.Status, Body: f.Body, Details: "kvlane_prefill_refused"}
	if f.Status == http.StatusTooManyRequests || body.Valid(f.Body) != nil {
		r.Body = body.AppendFailure(nil, api, body.Failure{Status: f.Status, Type: "prefiller_error", Code: strconv.Itoa(f.Status),
			Message: "the prefill worker answered " + strconv.Itoa(f.Status) + " " + http.StatusText(f.Status)})
	}
	if v := f.Header.Get("Retry-After"); v != "" {
		r.Headers = append(r.Headers, extproc.Header{Name: "retry-after", Value: v})
	}
	return r
}
