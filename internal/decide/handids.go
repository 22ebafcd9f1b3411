package decide

import (
	"context"

	"github.com/kvlane/kvlane/internal/model"
	"github.com/kvlane/kvlane/internal/prompt"
)

// handIDs makes a request carry its token ids, so that the engine does not
// tokenize again. body is the body as edited so far, nil if it is unchanged; so is
// the result.
func (j *job) handIDs(ctx context.Context, body []byte) []byte {
	if !j.parsed || j.served == nil || j.served.Tokens == nil || !j.served.Config.HandIDs || j.front || len(j.ids) == 0 {
		return body
	}
	edit, ok := j.served.Tokens.HandOn(j.request, j.served.Engine, model.Result{IDs: j.ids})
	if !ok {
		return body
	}
	from := body
	if from == nil {
		from = j.request.Body
	}
	out, err := prompt.ApplyContext(ctx, make([]byte, 0, len(from)+8*len(j.ids)), from, edit)
	if err != nil { // the request goes on as it is, and is tokenized again
		j.d.log.Debug().Err(err).Str("request", j.r.ID).Msg("ids not handed on")
		return body
	}
	return out
}
