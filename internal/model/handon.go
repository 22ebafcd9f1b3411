package model

import (
	"strconv"

	"github.com/kvlane/kvlane/internal/prompt"
)

// HandOn is the edit that makes a chat request carry its ids, so that the engine does not tokenize again: vLLM takes
// kv_transfer_params.prompt_token_ids, SGLang input_ids. ok is false where the engine has no such field, where the ids are
// not all of the prompt, or where one lies beyond the vocabulary (which would end an SGLang process).
func (m *Model) HandOn(req *prompt.Request, engine Engine, res Result) (edit prompt.Edit, ok bool) {
	if req.API != prompt.Chat || res.Partial != "" || len(res.IDs) == 0 || m.checkIDs(res.IDs) != nil {
		return edit, false
	}
	raw := AppendIDs(make([]byte, 0, 7*len(res.IDs)+2), res.IDs)
	switch engine {
	case VLLM:
		return prompt.Set(raw, prompt.FieldKVTransferParams.String(), "prompt_token_ids"), true
	case SGLang:
		return prompt.Set(raw, prompt.FieldInputIDs.String()), true
	default:
		return edit, false
	}
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
