package decide

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"time"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/disagg"
	"github.com/kvlane/kvlane/internal/fleet"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

// usagePatience is how long an answer's usage waits for a concurrent prefill leg, which answers about when the decode
// engine has its blocks.
const usagePatience = 500 * time.Millisecond

// ticket follows a decided request and moves its reservation through the ledger's phases.
// It implements extproc.OutcomeTicket and extproc.EditTicket.
type ticket struct {
	d           *Decider
	entry       *observe.Entry
	reservation routing.ReservationID
	slot        kvindex.Slot
	endpoint    *fleet.Endpoint
	decided     time.Time
	// predicted is the number of cached tokens that the decision assumed.
	predicted int64
	// batch: vLLM reports the cached tokens of the last prompt only, SGLang's /generate those of each prompt.
	batch bool
	// credit is the index's speculative entries for the prompts sent to the decode target.
	credit []kvindex.Credit
	// stores reports that the prompt has at least one whole block that the target did not hold.
	stores bool
	// batches is the target's count of event batches when the request was decided.
	batches uint64

	// expects is counted when the request is answered, because an engine that refuses a prompt does not look it up.
	expects expects

	// prefillMatched is the number of cached tokens that the decision assumed for the prefill leg.
	prefillMatched int64
	// stopLeg cancels a concurrent prefill leg, nil if there is none. It is not called when the decode leg has
	// succeeded: its prefill leg has then answered, or is about to.
	stopLeg context.CancelFunc

	// legUsage is nil if the client gets the usage that the decode engine reports. impatient reports that it did not
	// arrive in time.
	legUsage  *disagg.LegUsage
	impatient bool
	editor    *body.UsageEditor

	usage  *body.UsageScanner
	answer observe.Answer
	first  bool
}

// expects holds the number of prompt tokens, and how many of them the decision assumed to be cached on the target that
// computes the prompt: the decode target if prefill is nil.
type expects struct {
	prompt, byEvents, speculative int64
	prefill                       *fleet.Counters
}

func (x *expects) count(decode *fleet.Counters) {
	c := cmp.Or(x.prefill, decode)
	c.Prompt.Add(float64(x.prompt))
	c.ByEvents.Add(float64(x.byEvents))
	c.Speculative.Add(float64(x.speculative))
}

func (t *ticket) ResponseHeaders(status int, served string) []extproc.Header {
	t.entry.SetStatus(status)
	if served != "" && served != t.endpoint.Address {
		t.moved(served)
	}
	worker := t.endpoint.Target.Worker
	t.d.fleet.CountResponse(t.endpoint.Member, status)
	if status/100 == 2 {
		t.expects.count(t.endpoint.Counters)
	}
	if status >= 400 {
		ended := (*routing.Router).Refused
		if status >= 500 {
			ended = (*routing.Router).Failed
		}
		t.d.book(t.d.now(), func(r *routing.Router, _ time.Duration) { ended(r, t.reservation) })
		t.d.fleet.Withdraw(t.credit) // events tell of what was computed nevertheless
	}
	if status == 502 || status == 503 || status == 504 {
		// Envoy's own answer when the connection failed, or an engine that fails.
		t.d.onSuspect(worker)
	}
	if !t.d.cfg.Envoy.FirstToken {
		// Without an observer the headers are the best available sign that the prefill is done.
		t.firstToken(t.d.now())
	}
	if !t.d.live.Load().Explain.Header {
		return nil
	}
	out := []extproc.Header{
		{Name: "x-kvlane-target", Value: t.entry.Target},
		{Name: "x-kvlane-matched-tokens", Value: strconv.FormatInt(t.predicted, 10)},
	}
	if t.entry.FirstTurn {
		out = append(out, extproc.Header{Name: "x-kvlane-first-turn", Value: "true"})
	}
	if t.entry.Prefill != "" {
		out = append(out, extproc.Header{Name: "x-kvlane-prefill", Value: t.entry.Prefill},
			extproc.Header{Name: "x-kvlane-prefill-matched-tokens", Value: strconv.FormatInt(t.prefillMatched, 10)})
	}
	return out
}

// moved rebooks the request to the worker that serves it: Envoy retried or used its fallback.
func (t *ticket) moved(served string) {
	t.d.metrics.Moved.WithLabelValues(t.endpoint.Target.Worker).Inc()
	t.d.fleet.ForgetGone(t.endpoint.Target.Worker)
	t.d.fleet.Withdraw(t.credit)
	t.d.onSuspect(t.endpoint.Target.Worker)
	f := t.d.fleet.View()
	slots := f.AtAddress(served)
	t.entry.SetServed(served)
	if len(slots) == 0 {
		return
	}
	// Without our header the engine chooses the rank. The least loaded one is the best guess.
	best, rebooked := slots[0], false
	t.d.book(t.d.now(), func(r *routing.Router, now time.Duration) {
		for _, s := range slots[1:] {
			if r.Load(s).Active < r.Load(best).Active {
				best = s
			}
		}
		rebooked = r.Rebook(now, t.reservation, best)
	})
	if rebooked {
		t.slot = best
		if p := f.Endpoint(best); p != nil {
			t.endpoint = p
			t.entry.SetTarget(p.Target.String())
		}
	}
	t.predicted, t.expects.byEvents, t.expects.speculative = 0, 0, 0
	t.answer.Expected = observe.Expected{Target: t.answer.Expected.Target}
}

func (t *ticket) ResponseBody(chunk []byte, last bool) {
	if t.usage == nil {
		t.answer.Streamed = body.LooksLikeSSE(chunk)
		t.usage = body.NewUsageScanner(t.answer.Streamed)
	}
	_, _ = t.usage.Write(chunk)
	if last {
		t.observed()
	}
}

func (t *ticket) EditsBody() bool { return t.legUsage != nil && t.entry.Succeeded() }

// EditBody replaces the usage with that of the prefill leg.
func (t *ticket) EditBody(chunk []byte, last bool) (out []byte, changed, holds bool) {
	if t.editor == nil {
		if len(chunk) == 0 {
			return nil, false, false
		}
		t.editor = body.NewUsageEditor(body.LooksLikeSSE(chunk), t.completeUsage)
	}
	out, changed = t.editor.Edit(chunk, last)
	return out, changed, t.editor.Holds()
}

// completeUsage appends the edited usage object to dst.
func (t *ticket) completeUsage(dst, usage []byte) []byte {
	patience := usagePatience
	if t.impatient {
		patience = 0
	}
	if !t.legUsage.Wait(patience) {
		t.impatient = true
		return append(dst, usage...)
	}
	return t.legUsage.Edit(dst, usage)
}

// observed records predicted and reported cached tokens.
func (t *ticket) observed() {
	if t.usage == nil {
		return
	}
	u, ok := t.usage.Usage()
	t.usage = nil
	if !ok {
		return
	}
	t.answer.Usage(u.Prompt, u.Cached, u.Completion)
	t.entry.SetOutput(u.Completion)
	if u.Cached < 0 || t.batch {
		return
	}
	worker := t.endpoint.Target.Worker
	t.d.metrics.Predicted.WithLabelValues(worker).Add(float64(t.predicted))
	t.d.metrics.Observed.WithLabelValues(worker).Add(float64(u.Cached))
	t.entry.SetCached(u.Cached)
}

func (t *ticket) FirstToken(at time.Time) {
	t.firstToken(at)
	t.answer.FirstToken(at)
	t.d.metrics.FirstToken.WithLabelValues(t.endpoint.Target.Worker).Observe(at.Sub(t.decided).Seconds())
}

func (t *ticket) firstToken(at time.Time) {
	if t.first {
		return
	}
	t.first = true
	t.d.book(at, func(r *routing.Router, now time.Duration) {
		if t.d.legs != nil && t.d.legs.Protocol.NoLeg && t.entry.Succeeded() {
			r.PrefillDone(now, t.reservation) // the engine's sidecar waited for it
		}
		r.FirstToken(now, t.reservation)
	})
}

func (t *ticket) End(at time.Time) {
	t.observed()
	t.d.book(at, func(r *routing.Router, now time.Duration) {
		r.Generated(now, t.reservation, t.answer.Output())
		r.Release(now, t.reservation)
	})
	t.d.fleet.ForgetGone(t.endpoint.Target.Worker)
	t.answer.End(at)
	if t.stopLeg != nil && !t.entry.Succeeded() {
		t.stopLeg()
	}
	if t.stores && t.entry.Succeeded() {
		// If any batch came since the decision, its events may be this request's: the feed is alive.
		t.endpoint.Member.Finished(t.slot, t.endpoint.Target, t.endpoint.Counters.Batches.Load() == t.batches)
	}
}

// brokenOff lists Envoy's response flags of an answer that the engine broke off.
var brokenOff = []string{"upstream_connection_termination", "upstream_remote_reset", "upstream_protocol_error"}

func (t *ticket) Outcome(o extproc.Outcome) {
	t.entry.SetOutcome(o)
	for _, flag := range o.Flags {
		t.d.metrics.Flags.WithLabelValues(t.endpoint.Target.Worker, flag).Inc()
	}
	// Failures before the answer were counted by their status. A disconnected client is no sign of a bad engine.
	broken := o.Status < 500 && slices.ContainsFunc(o.Flags, func(flag string) bool { return slices.Contains(brokenOff, flag) })
	if broken {
		t.d.onSuspect(t.endpoint.Target.Worker)
	}
	last := &t.endpoint.Counters.Broken
	now := t.d.fleet.View().Endpoint(t.slot)
	if (broken || last.Load() && o.Status < 500 && len(o.Flags) == 0) && now != nil && now.Counters == t.endpoint.Counters { // who takes its name inherits nothing
		t.d.book(t.d.now(), func(r *routing.Router, _ time.Duration) { last.Store(r.BrokenOff(t.slot, t.endpoint.Target, broken)) })
	}
	if !o.FirstToken.IsZero() {
		t.answer.FirstToken(o.FirstToken)
		t.d.metrics.FirstToken.WithLabelValues(t.endpoint.Target.Worker).Observe(o.FirstToken.Sub(t.decided).Seconds())
	}
	t.d.fleet.ForgetGone(t.endpoint.Target.Worker)
	if t.d.live.Load().Log.Decisions {
		t.d.log.Info().Str("request", t.entry.ID).Int("status", o.Status).Strs("flags", o.Flags).Str("details", o.Details).
			Str("upstream", o.Upstream).Uint64("received", o.BytesReceived).Uint64("sent", o.BytesSent).
			Dur("took_ms", o.Duration).Msg("ended")
	}
}

var (
	_ extproc.OutcomeTicket = (*ticket)(nil)
	_ extproc.EditTicket    = (*ticket)(nil)
)
