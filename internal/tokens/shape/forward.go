package shape

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// ForwardIDs returns the edits that add a prompt's ids to its body, or put them in the place of its text, so that the engine
// does not tokenize again: kv_transfer_params.prompt_token_ids of chats for vLLM, input_ids of chats for SGLang, and the
// prompt of completions for both. There are none if the engine has no such field, if the ids are not the whole prompt, if
// one is out of vocabulary (SGLang crashes on such ids), or if the answer would contain the prompt.
func (m *Model) ForwardIDs(req *body.Request, engine Engine, res Result) []body.Edit {
	field := engine.profile().idsField
	if field == nil || res.Partial != "" || len(res.IDs) == 0 || m.checkIDs(res.IDs) != nil ||
		engine.CacheUse(req).Reads != EntireCache || isTrue(req, body.FieldEcho) {
		return nil
	}
	switch req.API {
	case body.Chat:
	case body.Completions:
		if req.Form != body.FormText || beams(req) || req.Has(body.FieldTruncatePromptTokens) || req.Has(body.FieldPromptEmbeds) || given(req.Get("suffix")) {
			return nil
		}
		field = []string{body.FieldPrompt.String()}
	default:
		return nil
	}
	return []body.Edit{body.Set(AppendIDs(make([]byte, 0, 7*len(res.IDs)+2), res.IDs), field...)}
}

// probeQuestion is a request of which an engine computes one token.
const probeQuestion = `,"max_tokens":1,"temperature":0}`

// probe reports whether the engine takes ids of an API: its answer with them equals that without them, and one id more is
// one token more.
func (c *Checker) probe(ctx context.Context, api body.API) bool {
	question := plainQuestions[0]
	path, field := "/v1/completions", "prompt"
	if api == body.Chat {
		path, field, question = "/v1/chat/completions", "messages", chatQuestions[0]
	}
	raw := fmt.Appendf(nil, `{"model":%s,%q:%s`+probeQuestion, strconv.Quote(c.options.ModelName), field, question)
	req, err := body.Parse(api, raw)
	if err != nil {
		return false
	}
	ours, err := c.ours(ctx, req)
	if err != nil {
		return false
	}
	ids := slices.Clip(ours.IDs)
	ask := func(ids []uint32) (choices []byte, n int64) {
		sent := raw
		if ids != nil {
			if sent, err = body.Apply(nil, raw, c.model.ForwardIDs(req, c.oracle.Engine, Result{IDs: ids})...); err != nil {
				return nil, 0
			}
		}
		answer, err := post(ctx, c.oracle.Client, c.oracle.Timeout, strings.TrimRight(c.oracle.URL, "/")+path, sent)
		if err != nil {
			return nil, 0
		}
		n, _ = laxInt(body.Member(body.Member(answer, "usage"), "prompt_tokens"))
		return body.Member(answer, "choices"), n
	}
	want, n := ask(nil)
	got, same := ask(ids)
	_, more := ask(append(ids, ids[len(ids)-1:]...))
	return len(want) > 0 && bytes.Equal(got, want) && n == int64(len(ids)) && same == n && more == n+1
}

// TakesIDs reports whether the engine was found to take the ids of an API.
func (c *Checker) TakesIDs(api body.API) bool {
	return api == body.Chat && c.takesChats.Load() || api == body.Completions && c.takesPrompts.Load()
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
