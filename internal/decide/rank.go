package decide

import (
	"context"
	"net/http"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/disagg"
	"github.com/kvlane/kvlane/internal/fleet"
	"github.com/kvlane/kvlane/internal/model"
	"github.com/kvlane/kvlane/internal/prompt"
	"github.com/kvlane/kvlane/routing"
)

// rankEdits are the changes of a body whose engine takes a rank from it: the picked
// rank in place of the client's, or none at all where the engine chooses (unset is not
// 0). SGLang's /generate reads no header; its other APIs let the header win, but not in
// every version, so a client's field never stays as it is.
func (j *job) rankEdits(p *fleet.Endpoint, free bool) []prompt.Edit {
	if !j.parsed || p.Member.Engine != model.SGLang.String() {
		return nil
	}
	picked := p.Rank != "" && !free
	if !j.request.Span(prompt.FieldRoutedDPRank).Present() && !j.request.Span(prompt.FieldDataParallelRank).Present() && (!picked || j.api != prompt.Generate) {
		return nil
	}
	edits := []prompt.Edit{prompt.Delete(prompt.FieldDataParallelRank.String())}
	if !picked {
		return append(edits, prompt.Delete(prompt.FieldRoutedDPRank.String()))
	}
	return append(edits, prompt.Set([]byte(p.Rank), prompt.FieldRoutedDPRank.String()))
}

// body is that of a request that is not split, nil if it goes on as it came.
func (j *job) body(ctx context.Context, p *fleet.Endpoint, free bool) ([]byte, error) {
	if !j.parsed && (j.api != prompt.Unknown || !j.guarded()) || j.request == nil {
		return nil, nil
	}
	edits := j.rankEdits(p, free)
	switch {
	case j.d.legs != nil:
		edits = append(edits, j.d.legs.protocol.Local(j.request)...)
	case !j.d.cfg.Disagg.Trust:
		edits = append(edits, disagg.CleanID(j.request)...)
	}
	if p.Member.Engine == model.TRTLLM.String() && j.request.Member(prompt.FieldDisaggregatedParams, "route_hint") != nil {
		edits = append(edits, prompt.Delete(prompt.FieldDisaggregatedParams.String(), "route_hint"))
	}
	leg := disagg.Leg{Edits: edits}
	body, err := leg.Body(ctx, j.request)
	if err != nil || j.foreign(p) {
		return body, err
	}
	return j.handIDs(ctx, body), nil
}

// unedited gives a plan back and answers a request whose body could not be edited. It
// must not go on as it is: what a client says of transfers may still be in it.
func (j *job) unedited(ctx context.Context, plan *routing.Plan, err error) extproc.Decision {
	j.release(plan)
	j.d.fleet.Withdraw(j.credit)
	if reject := j.gone(ctx); reject != nil {
		return j.reject(reject)
	}
	// The request was parsed, so it is an object, and objects can be edited.
	j.d.log.Error().Err(err).Str("request", j.r.ID).Msg("body not edited")
	return j.reject(&extproc.Reject{Status: http.StatusInternalServerError, Body: j.failure(http.StatusInternalServerError, "the request could not be prepared"),
		Details: "kvlane_body_not_edited"})
}
