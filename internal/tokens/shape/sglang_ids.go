package shape

import (
	"strconv"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// idFields are the fields in which SGLang's APIs take token ids; true: nothing but ids. Sources: protocol.py and io_struct.py
// of SGLang 0.5.23.
var idFields = map[string]bool{"input_ids": true, "stop_token_ids": true, "label_token_ids": true, "token_ids_logprob": true,
	"prompt": false, "input": false, "query": false, "items": false}

// EndsSGLang refuses a request with an id that the tokenizer does not have, in whatever field and batch. SGLang 0.5.23
// compares no id with the model's vocabulary, and one beyond it ends the engine with all its requests. raw is an object.
// The cost is in proportion to raw.
func (m *Model) EndsSGLang(raw []byte) (err error) {
	body.EachMember(raw, func(key, value []byte) {
		for name, only := range idFields {
			if body.IsKey(key, name) && !m.areIDs(value, only, 0) {
				err = refuse("%s: token ids must be whole numbers from 0 to %d", name, m.idLimit-1)
			}
		}
		if !body.IsKey(key, "sampling_params") {
			return
		}
		stops := func(params []byte) {
			body.EachMember(params, func(key, value []byte) {
				if body.IsKey(key, "stop_token_ids") && !m.areIDs(value, true, 0) {
					err = refuse("stop_token_ids: token ids must be whole numbers from 0 to %d", m.idLimit-1)
				}
			})
		}
		stops(value)
		body.EachItem(value, stops) // of a batch
	})
	return err
}

// areIDs reports whether all numbers in raw are ids of the tokenizer. only: raw has nothing but them, lists and null. In a list
// of a list all are ids; pydantic makes ids of texts with digits there, too. No API takes deeper lists.
func (m *Model) areIDs(raw []byte, only bool, depth int) bool {
	switch {
	case raw[0] == '[':
		ok := depth < 2
		body.EachItem(raw, func(item []byte) { ok = ok && m.areIDs(item, only || depth > 0, depth+1) })
		return ok
	case raw[0] == 'n':
		return true
	case !only && raw[0] != '-' && (raw[0] < '0' || raw[0] > '9'):
		return true // a text, or an object
	}
	id, err := strconv.ParseUint(string(raw), 10, 32)
	return err == nil && id < uint64(m.idLimit)
}
