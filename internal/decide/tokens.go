package decide

import (
	"context"
	"errors"

	"github.com/kvlane/kvlane/internal/fleet"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/tokens/conv"
	"github.com/kvlane/kvlane/internal/tokens/shape"
)

// tokens holds a prompt's token ids, as far as they are known.
type tokens struct {
	// ids are valid as long as the scratch memory. They are nil if unknown, and once the request has waited unless
	// they will be forwarded. n is their number.
	ids []uint32
	n   int
	// partial reports that ids cover only the beginning of the prompt.
	partial bool
	// others are the further prompts of a batch, as far as their ids were made.
	batch  bool
	others []shape.Other
	// media are the prompt's images; some of the ids are placeholders for each.
	media []conv.Medium
	// made is the model whose tokenizer made the ids, nil if a renderer did.
	made *fleet.Model
	// count is the length of the prompt, estimated where ids are not known.
	count int64
	// refused reports that the engine refuses the request.
	refused bool
}

// whole returns the ids of the whole prompt, nil if they are unknown or include images.
func (t *tokens) whole() []uint32 {
	if t.partial || t.media != nil {
		return nil
	}
	return t.ids
}

// differ reports whether the worker's tokenizer is known to differ from the one that made the ids.
func (t *tokens) differ(e *fleet.Endpoint) bool { return t.made != nil && t.made.Differs(e.Member) }

// refusedTokens bounds the load that is booked for a prompt that the engine probably refuses without computing it.
const refusedTokens = 1000

// tokens computes the prompt's ids, or records why there are none: the request is then routed by load.
func (j *job) tokens(ctx, exact context.Context, in *input) (*tokens, error) {
	switch {
	case j.idle:
		return &tokens{}, nil
	case !in.known:
		return &tokens{count: j.api.EstimateTokens(j.r.Body)}, nil
	}
	if m := j.d.fleet.SGLang(in.model); m != nil && m.Tokens != nil {
		if code, err := m.Tokens.EndsSGLang(in.body); err != nil {
			return nil, j.fail(400, code, err.Error())
		}
	}
	if in.model == nil {
		j.degraded = degradedModel
		return &tokens{count: in.body.EstimateTokens()}, nil
	}
	t := &tokens{}
	res, err := j.ids(ctx, exact, in, t)
	if err != nil {
		refusal, refused := errors.AsType[*shape.Refusal](err)
		refused = refused && !refusal.Guessed
		if t.count = in.body.EstimateTokens(); refused {
			t.count = min(t.count, refusedTokens)
		}
		return &tokens{count: t.count, refused: refused}, j.withoutIDs(t.made != nil && exact.Err() != nil, err)
	}
	t.ids, t.n, t.media, t.partial, t.count = res.IDs, len(res.IDs), res.Media, res.Partial != "", int64(len(res.IDs))
	if !j.s.turn.Kept() && cap(res.IDs) > cap(j.s.ids) {
		j.s.ids = res.IDs
	}
	if t.partial {
		j.degraded, j.entry.Refusal = degradedFront, observe.Clip(res.Partial)
	}
	if t.batch = res.Prompts > 1; t.batch && t.made != nil && !t.partial {
		t.others = t.made.Tokens.Others(exact, t.ids, j.s.turn, t.made.Engine)
		for _, o := range t.others {
			t.count += int64(len(o.IDs))
		}
	}
	if t.partial || res.Prompts > 1+len(t.others) { // the load is that of the whole prompt, and of all prompts
		t.count = max(in.body.EstimateTokens(), t.count)
	}
	j.entry.PromptTokens, j.entry.Assumed = t.count, observe.Clip(res.Assumed)
	return t, nil
}

// ids computes the ids, in the scratch memory unless they are cached. A remote renderer has its own timeout and takes
// no CPU time here, so the decision's deadline does not apply to it.
func (j *job) ids(ctx, exact context.Context, in *input, t *tokens) (shape.Result, error) {
	why := in.model.Unfit()
	if why == nil {
		t.made = in.model
		return in.model.Tokens.PromptInto(exact, j.s.ids, j.s.turn, in.model.Engine)
	}
	if in.model.Remote == nil {
		return shape.Result{}, why
	}
	j.cpu.release()
	return in.model.Remote.Prompt(ctx, in.body)
}

// withoutIDs records why a prompt has no ids. It returns an error only for a request that the engine would refuse, with
// limits.refuse_early. late reports that the decision's deadline ended our own tokenizer.
func (j *job) withoutIDs(late bool, err error) error {
	refusal, refused := errors.AsType[*shape.Refusal](err)
	switch {
	case refused:
		j.degraded, j.entry.Refusal = degradedRefused, observe.Clip(refusal.Error())
		if j.d.live.Load().Limits.RefuseEarly && !refusal.Guessed {
			return j.fail(refusal.Status, "kvlane_engine_would_refuse", observe.ClipTo(refusal.Reason, observe.MaxText))
		}
	case errors.Is(err, fleet.ErrNoTokenizer):
		j.degraded = degradedTokenizer
	case errors.Is(err, fleet.ErrSuspended):
		j.degraded = degradedSuspended
	case late:
		j.degraded = degradedDeadline
		j.entry.Refusal = "no tokens within " + j.d.live.Load().Limits.DecisionTimeout.Std().String() + " (limits.decision_timeout)"
	default:
		j.degraded, j.entry.Refusal = degradedTokens, observe.Clip(err.Error())
	}
	return nil
}
