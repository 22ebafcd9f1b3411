package shape

import (
	"bytes"
	"math"
	"strconv"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// idFields are the fields in which SGLang's APIs take token ids, and what texts they take: none (-1), one (0) or a list (1).
// Sources: protocol.py and io_struct.py of SGLang 0.5.23.
var idFields = [...]struct {
	field body.Field
	texts int
}{{body.FieldInputIDs, -1}, {body.FieldStopTokenIDs, -1}, {body.FieldLabelTokenIDs, -1},
	{body.FieldTokenIDsLogprob, -1}, {body.FieldQuery, 0}, {body.FieldPrompt, 1}, {body.FieldInput, 1}, {body.FieldItems, 1}}

// maxSequences bounds n times the prompts of a request: by its issues SGLang 0.5.23 takes 4 kB for each before it looks at one.
const maxSequences = 1 << 16

// EndsSGLang refuses a request with an id that the tokenizer does not have, in whatever field and batch, and names the code.
// SGLang 0.5.23 compares no id with the model's vocabulary, and one beyond it ends the engine with all its requests. So do more
// logprobs of a token than the vocabulary has, n in millions, and numbers that it puts into tensors of 32 bits (its issue 17646).
func (m *Model) EndsSGLang(r *body.Request) (code string, err error) {
	for _, f := range idFields {
		if !m.areIDs(r.Raw(f.field), f.texts, 0) {
			return "kvlane_token_ids", refuse("%s: token ids must be whole numbers from 0 to %d", f.field, m.idLimit-1)
		}
	}
	for _, f := range [...]body.Field{body.FieldLogprobs, body.FieldTopLogprobs, body.FieldTopLogprobsNum} {
		if largest(r.Raw(f)) > float64(m.idLimit) {
			return "kvlane_too_many_logprobs", refuse("%s: the vocabulary has %d tokens", f, m.idLimit)
		}
	}
	params, n, ok := r.Raw(body.FieldSamplingParams), largest(r.Raw(body.FieldN)), true
	wide := max(largest(r.Raw(body.FieldTopK)), largest(r.Raw(body.FieldMinTokens)))
	look := func(params []byte) {
		n = max(n, largest(body.Member(params, "n")))
		wide = max(wide, largest(body.Member(params, "top_k")), largest(body.Member(params, "min_new_tokens")))
		ok = ok && m.areIDs(body.Member(params, "stop_token_ids"), -1, 0)
	}
	look(params)
	if body.EachItem(params, look); !ok { // of a batch
		return "kvlane_token_ids", refuse("stop_token_ids: token ids must be whole numbers from 0 to %d", m.idLimit-1)
	}
	if wide > math.MaxInt32 {
		return "kvlane_number_too_large", refuse("top_k and min_tokens have at most 31 bits")
	}
	if n > 1 && n*float64(batch(r)) > maxSequences {
		return "kvlane_too_many_answers", refuse("n: n times the prompts may be %d", maxSequences)
	}
	return "", nil
}

// batch is the number of the request's prompts, at least 1: SGLang takes a batch from any list of texts or of lists of ids, and
// copies lists of what belongs to them, such as sampling_params, n times.
func batch(r *body.Request) int {
	most := 1
	body.EachMember(r.Body, func(key, value []byte) {
		if body.IsKey(key, "messages") || body.IsKey(key, "tools") || body.IsKey(key, "input") {
			return
		}
		count, embeds := 0, body.IsKey(key, "input_embeds")
		body.EachItem(value, func(item []byte) {
			number := item[0] == '-' || item[0] >= '0' && item[0] <= '9'
			if !number && (!embeds || bytes.IndexByte(item[1:], '[') >= 0) { // one prompt's are a list of lists
				count++
			}
		})
		most = max(most, count)
	})
	return most
}

// largest is the greatest number that raw or an item of it is, see body.Number; 0 if there is none.
func largest(raw []byte) (most float64) {
	if len(raw) == 0 || raw[0] == '[' {
		body.EachItem(raw, func(item []byte) {
			if item[0] != '[' {
				most = max(most, largest(item))
			}
		})
		return most
	}
	return body.Number(raw)
}

// areIDs reports whether all numbers in raw are ids of the tokenizer. texts is the greatest depth of a text, -1 for none. pydantic
// makes ids of true and of texts with digits, where the other items of a list are numbers, too, so a list has one kind of items. No
// API takes lists of lists of lists.
func (m *Model) areIDs(raw []byte, texts, depth int) bool {
	switch {
	case len(raw) == 0 || raw[0] == 'n':
		return true
	case raw[0] == '[':
		ok, text, id := depth < 2, false, false
		body.EachItem(raw, func(item []byte) {
			ok = ok && m.areIDs(item, texts, depth+1)
			isText := item[0] == '"' || item[0] == '{'
			text, id = text || isText, id || !isText
		})
		return ok && (!text || !id)
	case raw[0] == '"':
		return depth <= texts
	case raw[0] == '{':
		return depth < 2 && texts >= 0
	}
	id, err := strconv.ParseUint(string(raw), 10, 32)
	return err == nil && id < uint64(m.idLimit)
}
