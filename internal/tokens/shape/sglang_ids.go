package shape

import (
	"strconv"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// idFields are the fields in which SGLang's APIs take token ids; the first four take nothing else. Sources: protocol.py and
// io_struct.py of SGLang 0.5.23.
var idFields = [...]body.Field{body.FieldInputIDs, body.FieldStopTokenIDs, body.FieldLabelTokenIDs, body.FieldTokenIDsLogprob,
	body.FieldPrompt, body.FieldInput, body.FieldQuery, body.FieldItems}

// EndsSGLang refuses a request with an id that the tokenizer does not have, in whatever field and batch. SGLang 0.5.23
// compares no id with the model's vocabulary, and one beyond it ends the engine with all its requests.
func (m *Model) EndsSGLang(r *body.Request) error {
	for i, f := range idFields {
		if !m.areIDs(r.Raw(f), i < 4, 0) {
			return refuse("%s: token ids must be whole numbers from 0 to %d", f, m.idLimit-1)
		}
	}
	params, ok := r.Raw(body.FieldSamplingParams), true
	stops := func(params []byte) { ok = ok && m.areIDs(body.Member(params, "stop_token_ids"), true, 0) }
	stops(params)
	if body.EachItem(params, stops); !ok { // of a batch
		return refuse("stop_token_ids: token ids must be whole numbers from 0 to %d", m.idLimit-1)
	}
	return nil
}

// areIDs reports whether all numbers in raw are ids of the tokenizer. only: raw has nothing but them, lists and null. In a list
// of a list all are ids; pydantic makes ids of texts with digits there, too. No API takes deeper lists.
func (m *Model) areIDs(raw []byte, only bool, depth int) bool {
	switch {
	case len(raw) == 0 || raw[0] == 'n':
		return true
	case raw[0] == '[':
		ok := depth < 2
		body.EachItem(raw, func(item []byte) { ok = ok && m.areIDs(item, only || depth > 0, depth+1) })
		return ok
	case !only && raw[0] != '-' && (raw[0] < '0' || raw[0] > '9'):
		return true // a text, or an object
	}
	id, err := strconv.ParseUint(string(raw), 10, 32)
	return err == nil && id < uint64(m.idLimit)
}
