package decide

import (
	"context"
	"slices"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/disagg"
	"github.com/kvlane/kvlane/internal/fleet"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/shape"
	"github.com/kvlane/kvlane/routing"
)

// forward turns a plan for one engine into mutations.
func (w *work) forward(ctx context.Context, p *placed) (extproc.Decision, error) {
	body, err := w.body(ctx, p)
	if err != nil {
		return extproc.Decision{}, w.unedited(ctx, p, err)
	}
	out, t := w.decision(p)
	out.Body = body
	return w.routed(p, out, t)
}

// unedited releases a plan whose request could not be edited. The request must not be
// forwarded as it is: the client's own transfer parameters may still be in it.
func (w *work) unedited(ctx context.Context, p *placed, err error) error {
	w.release(&p.plan)
	w.d.fleet.Withdraw(p.credit)
	if ctx.Err() != nil {
		return errClientGone
	}
	// The request was parsed, so it is an object, and objects can be edited.
	w.d.log.Error().Err(err).Str("request", w.r.ID).Msg("body not edited")
	return w.fail(500, "kvlane_body_not_edited", "the request could not be prepared")
}

// decision sends the request to the plan's decode target.
func (w *work) decision(p *placed) (extproc.Decision, *ticket) {
	d, e, plan := w.d, p.decode, &p.plan
	t := w.ticket(p)
	out := extproc.Decision{Endpoint: e.Address, Ticket: t}
	if w.in.known && w.in.model != nil {
		d.fleet.Sample(w.in.model, e.Member, w.in.body)
	}
	if w.degraded == "" && w.tokens.differ(e) {
		w.degraded = degradedSuspended
	}
	if e.SetRank != nil && !plan.RankFree {
		out.Set = e.SetRank
	}
	if e.Member.Engine == shape.TRTLLM.String() {
		for _, h := range disagg.TRTSession(w.in.conversation) {
			out.Set = append(slices.Clip(out.Set), extproc.Header(h))
		}
	}
	return out, t
}

// routed counts and logs a decision. If the decision's headers do not fit in the request, it undoes the decision and fails.
func (w *work) routed(p *placed, out extproc.Decision, t *ticket) (extproc.Decision, error) {
	d, e, plan := w.d, p.decode, &p.plan
	if !w.r.Fits(&out) {
		if t.stopLeg != nil {
			t.stopLeg()
		}
		w.release(plan)
		d.fleet.Withdraw(p.credit)
		return extproc.Decision{}, w.fail(431, "kvlane_too_many_headers", "the request has too many or too large headers: "+
			"no room is left for those that route it (at most 100 headers and 60 KiB in all); send fewer")
	}
	w.entry.Target, w.entry.Endpoint, w.entry.Engine = e.Name, e.Address, e.Member.Engine
	w.entry.Matched, w.entry.Miss, w.entry.Via = plan.Matched, plan.Miss, string(plan.Via)
	w.entry.Degraded = w.degraded
	t.expects.prompt = w.tokens.count
	t.expects.byEvents, t.expects.speculative = matched(plan, w.s.overlaps)
	if plan.Prefill != routing.NoSlot {
		t.expects.prefill = p.prefill.Counters
	}
	e.Counters.Picks.Inc()
	d.routed[w.api].Inc()
	if w.entry.FirstTurn = plan.FirstTurn; plan.FirstTurn {
		d.metrics.FirstTurns.WithLabelValues(w.entry.API).Inc()
	}
	w.log()
	return out, nil
}

// matched divides a plan's matched tokens into those known from events and those expected from prompts sent before.
func matched(plan *routing.Plan, overlaps []routing.Overlap) (byEvents, speculative int64) {
	slot := plan.Decode
	if plan.Prefill != routing.NoSlot {
		slot = plan.Prefill
	}
	for i := range overlaps {
		if o := &overlaps[i]; o.Slot == slot {
			for _, n := range o.Tokens {
				byEvents += int64(n)
			}
		}
	}
	byEvents = min(byEvents, plan.Matched)
	return byEvents, plan.Matched - byEvents
}

// body returns the edited body of a request that is not split, nil if it is forwarded unchanged.
func (w *work) body(ctx context.Context, p *placed) ([]byte, error) {
	r := w.in.body
	if r == nil {
		return nil, nil
	}
	edits := w.edits(p.decode, p.plan.RankFree)
	switch {
	case w.d.legs != nil:
		edits = append(edits, w.d.legs.Protocol.Local(r)...)
	case !w.d.cfg.Disagg.Trust:
		edits = append(edits, disagg.Clean(r)...)
	}
	if p.decode.Member.Engine == shape.TRTLLM.String() && r.Member(body.FieldDisaggregatedParams, "route_hint") != nil {
		edits = append(edits, body.Delete(body.FieldDisaggregatedParams.String(), "route_hint"))
	}
	leg := disagg.Leg{Edits: append(edits, w.responseEdits(p.decode)...)} // the name of the answer wins over its removal
	body, err := leg.Body(ctx, r)
	if err != nil || w.tokens.differ(p.decode) {
		return body, err
	}
	return w.forwardIDs(ctx, p.decode.Member, body), nil
}

// edits returns the edits of every request to an engine.
func (w *work) edits(e *fleet.Endpoint, free bool) []body.Edit {
	return append(w.rankEdits(e, free), w.saltEdits(e)...)
}

// responseEdits returns the edit that names an answer which the engine may store. Without tenants
// a client may choose the name; with them every answer gets one, lest it replace another's.
func (w *work) responseEdits(e *fleet.Endpoint) []body.Edit {
	r, tenants := w.in.body, w.d.cfg.Tenants.SaltHeader != ""
	if w.api != body.Responses || !w.in.known || !tenants && (string(r.Get("store")) == "false" || r.Has(body.FieldRequestID)) {
		return nil
	}
	tenant, _ := w.tenant() // an error has been answered before
	return []body.Edit{body.Set([]byte(`"`+w.d.responses.ID(tenant, w.stored.Root, w.tokens.count, e)+`"`), body.FieldRequestID.String())}
}

// rankEdits returns the edits of a body whose engine reads a rank from it: the picked rank in place of the client's, or
// no rank where the engine chooses (unset is not 0). SGLang's /generate reads no header; its other APIs prefer the
// header, but not in every version, so a client's field is always removed or replaced.
func (w *work) rankEdits(e *fleet.Endpoint, free bool) []body.Edit {
	if !w.in.known || e.Member.Engine != shape.SGLang.String() {
		return nil
	}
	picked := e.Rank != "" && !free
	if !w.in.body.Span(body.FieldRoutedDPRank).Present() && !w.in.body.Span(body.FieldDataParallelRank).Present() && (!picked || w.api != body.Generate) {
		return nil
	}
	edits := []body.Edit{body.Delete(body.FieldDataParallelRank.String())}
	if !picked {
		return append(edits, body.Delete(body.FieldRoutedDPRank.String()))
	}
	return append(edits, body.Set([]byte(e.Rank), body.FieldRoutedDPRank.String()))
}

// forwardIDs adds the token ids to the request, so that the engine does not tokenize again.
// edited is the body as edited so far, nil if unchanged; so is the result.
func (w *work) forwardIDs(ctx context.Context, to *fleet.Member, edited []byte) []byte {
	m, ids := w.in.model, w.tokens.whole()
	// By default only where the engine has no connector that might read what carries the ids.
	if !w.in.known || m == nil || m.Tokens == nil || len(ids) == 0 || m.Config.HandIDs == nil && w.d.legs != nil || !m.TakesIDs(to, w.api, len(ids)) {
		return edited
	}
	edits := m.Tokens.ForwardIDs(w.in.body, m.Engine, shape.Result{IDs: ids})
	if edits == nil {
		return edited
	}
	from := edited
	if from == nil {
		from = w.in.body.Body
	}
	out, err := body.ApplyContext(ctx, make([]byte, 0, len(from)+8*len(ids)), from, edits...)
	if err != nil || len(out) > int(w.d.cfg.Limits.MaxBody) { // the engine tokenizes the unchanged request; Envoy answers 413 to a longer one
		w.d.log.Debug().Err(err).Str("request", w.r.ID).Msg("token ids not forwarded")
		return edited
	}
	return out
}

// ticket returns the ticket that follows a plan's request.
func (w *work) ticket(p *placed) *ticket {
	plan := &p.plan
	t := &ticket{d: w.d, entry: w.entry, reservation: plan.Reservation, slot: plan.Decode, endpoint: p.decode, decided: w.clock, credit: p.credit,
		predicted: plan.Matched, batch: w.tokens.batch, stores: len(w.s.hashes) > 0 && !w.tokens.batch && w.cacheReads >= w.tokens.count && plan.DecodeMiss > int64(w.d.cfg.Index.BlockSize), batches: p.decode.Counters.Batches.Load(), answer: w.d.metrics.Answer(w.entry, w.metricModel())}
	if !w.query.Whole {
		t.answer.Expected = observe.Expected{From: p.at, First: plan.TTFT, PerToken: plan.PerToken, Target: w.query.TTFT}
	}
	if plan.Prefill != routing.NoSlot {
		// The decode engine's usage reports what it had cached itself.
		t.predicted, t.prefillMatched = max(0, w.tokens.count-plan.DecodeMiss), plan.Matched
	}
	return t
}

// metricModel is the model's name in metrics: the configured one, else the one that workers list, else "".
func (w *work) metricModel() string {
	switch {
	case w.in.model != nil:
		return w.in.model.Config.Name
	case w.in.name != "" && w.d.fleet.Known(w.d.fleet.View(), w.in.name):
		return w.in.name
	}
	return ""
}

// alternate returns the address of the least busy other decode worker that the same leg would serve; "" if there is
// none, the leg is bound to one worker, or the data plane that reads the pick accepts no list.
func (w *work) alternate(chosen *fleet.Endpoint) string {
	d := w.d
	p := d.legs.Protocol
	if !d.cfg.Envoy.Alternates || !p.Portable && !p.AtOnce || p.Named || w.r.HasSubset {
		return ""
	}
	best, least := "", int64(0)
	d.mu.Lock()
	defer d.mu.Unlock()
	for slot, e := range d.fleet.View().Endpoints {
		if !e.Replaces(chosen) || w.unsalted(e) != "" {
			continue
		}
		if active := d.router.Load(slot).Active; best == "" || active < least {
			best, least = e.Address, active
		}
	}
	return best
}
