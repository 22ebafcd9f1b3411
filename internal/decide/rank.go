package decide

import (
	"github.com/kvlane/kvlane/internal/disagg"
	"github.com/kvlane/kvlane/internal/fleet"
	"github.com/kvlane/kvlane/internal/model"
	"github.com/kvlane/kvlane/internal/prompt"
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
func (j *job) body(p *fleet.Endpoint, free bool) []byte {
	if !j.parsed {
		return nil
	}
	edits := j.rankEdits(p, free)
	if j.d.legs != nil {
		edits = append(edits, j.d.legs.protocol.Local(j.request)...)
	}
	if p.Member.Engine == model.TRTLLM.String() && j.request.Member(prompt.FieldDisaggregatedParams, "route_hint") != nil {
		edits = append(edits, prompt.Delete(prompt.FieldDisaggregatedParams.String(), "route_hint"))
	}
	leg := disagg.Leg{Edits: edits}
	body, err := leg.Body(j.request)
	if err != nil { // the request was parsed: it is an object
		j.d.log.Error().Err(err).Str("request", j.r.ID).Msg("body not edited")
	}
	if j.foreign(p) {
		return body
	}
	return j.handIDs(body)
}
