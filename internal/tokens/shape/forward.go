package shape

import (
	"strconv"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// ForwardIDs returns the edit that adds a chat's ids to its body, so that the engine does not
// tokenize again: kv_transfer_params.prompt_token_ids for vLLM, input_ids for SGLang. ok is false
// if the engine has no such field, if the ids are not the whole prompt, or if one is out of
// vocabulary (SGLang crashes on such ids).
func (m *Model) ForwardIDs(req *body.Request, engine Engine, res Result) (edit body.Edit, ok bool) {
	field := engine.profile().idsField
	if field == nil || req.API != body.Chat || res.Partial != "" || len(res.IDs) == 0 || m.checkIDs(res.IDs) != nil {
		return edit, false
	}
	return body.Set(AppendIDs(make([]byte, 0, 7*len(res.IDs)+2), res.IDs), field...), true
}

// AppendIDs appends ids as a JSON array.
func AppendIDs(dst []byte, ids []uint32) []byte {
	dst = append(dst, '[')
	for i, id := range ids {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendUint(dst, uint64(id), 10)
	}
	return append(dst, ']')
}
