package shape

import (
	"strconv"
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// idFields are the fields in which SGLang's APIs take token ids; the first four take nothing else. Sources: protocol.py and
// io_struct.py of SGLang 0.5.23.
var idFields = [...]body.Field{body.FieldInputIDs, body.FieldStopTokenIDs, body.FieldLabelTokenIDs, body.FieldTokenIDsLogprob,
	body.FieldPrompt, body.FieldInput, body.FieldQuery, body.FieldItems}

// maxSequences bounds n times the prompts of a request: by its issues SGLang 0.5.23 takes 4 kB for each before it looks at one.
const maxSequences = 1 << 16

// EndsSGLang refuses a request with an id that the tokenizer does not have, in whatever field and batch. SGLang 0.5.23
// compares no id with the model's vocabulary, and one beyond it ends the engine with all its requests. So do more logprobs of
// a token than the vocabulary has, and n in millions.
func (m *Model) EndsSGLang(r *body.Request) error {
	for i, f := range idFields {
		if !m.areIDs(r.Raw(f), i < 4, 0) {
			return refuse("%s: token ids must be whole numbers from 0 to %d", f, m.idLimit-1)
		}
	}
	for _, f := range [...]body.Field{body.FieldLogprobs, body.FieldTopLogprobs, body.FieldTopLogprobsNum} {
		if above(r.Raw(f), m.idLimit) {
			return refuse("%s: the vocabulary has %d tokens", f, m.idLimit)
		}
	}
	most, params := maxSequences, r.Raw(body.FieldSamplingParams)
	if r.Form == body.FormTexts || r.Form == body.FormIDLists {
		most = max(most/max(r.Count, 1), 1)
	}
	bad := above(r.Raw(body.FieldN), most)
	look := func(params []byte) {
		bad = bad || above(body.Member(params, "n"), most) || !m.areIDs(body.Member(params, "stop_token_ids"), true, 0)
	}
	look(params)
	if body.EachItem(params, look); bad { // of a batch
		return refuse("n times the prompts may be %d, and stop_token_ids are whole numbers from 0 to %d", maxSequences, m.idLimit-1)
	}
	return nil
}

// above reports whether raw, or an item of it, is a number above most, or a text that pydantic takes for one.
func above(raw []byte, most int) bool {
	if len(raw) == 0 || raw[0] == '[' {
		found := false
		body.EachItem(raw, func(item []byte) { found = found || item[0] != '[' && above(item, most) })
		return found
	}
	text, ok := body.TextOf(raw)
	if !ok {
		text = string(raw)
	}
	v, _ := strconv.ParseFloat(strings.ReplaceAll(strings.TrimSpace(text), "_", ""), 64)
	return v > float64(most)
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
