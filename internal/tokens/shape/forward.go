package shape

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// ForwardIDs returns the edits that add a prompt's ids to its body, or replace its text with them, so that the engine does
// not tokenize again. They set kv_transfer_params.prompt_token_ids of chats, messages and responses for vLLM, input_ids of
// chats for SGLang, and the prompt of completions for both. It returns no edits if the engine has no such field, if the ids
// are not the whole prompt, if one is out of vocabulary (SGLang crashes on such ids), or if the answer would contain the
// prompt.
func (m *Model) ForwardIDs(req *body.Request, engine Engine, res Result) []body.Edit {
	field := engine.profile().idsField
	if field == nil || res.Partial != "" || len(res.IDs) == 0 || m.checkIDs(res.IDs) != nil ||
		engine.CacheUse(req).Reads != EntireCache || isTrue(req, body.FieldEcho) {
		return nil
	}
	takes := false
	switch req.API {
	case body.Chat:
		takes = !given(req.Get("return_prompt_text")) // vLLM returns the text that it rendered
	case body.Messages, body.Responses:
		takes = engine == VLLM
	case body.Completions:
		field = []string{body.FieldPrompt.String()}
		takes = req.Form == body.FormText && !beams(req) && !req.Has(body.FieldTruncatePromptTokens) && !req.Has(body.FieldPromptEmbeds) && !given(req.Get("suffix"))
	}
	if !takes {
		return nil
	}
	return []body.Edit{body.Set(body.AppendIDList(make([]byte, 0, 7*len(res.IDs)+2), res.IDs), field...)}
}

// probes are requests for one token: an API, its path, and the member of the answer that must not change with ids.
var probes = [...]struct {
	api          body.API
	path, answer string
	question     string
}{
	{body.Chat, "/v1/chat/completions", "choices", `"max_tokens":1,"messages":` + chatQuestions[0]},
	{body.Completions, "/v1/completions", "choices", `"max_tokens":1,"prompt":` + plainQuestions[0]},
	{body.Messages, "/v1/messages", "stop_reason", `"max_tokens":1,"messages":` + chatQuestions[0]},        // the contents of these two
	{body.Responses, "/v1/responses", "status", `"max_output_tokens":1,"store":false,"input":"Be brief."`}, // may have random ids
}

// probe finds out for which APIs the engine uses forwarded ids: its answer must be the same with and without them, and
// its usage must count one more prompt token if one more id is sent. apis has a bit, 1 << API, for each API to query;
// unanswered has the bits of those that got no answer.
func (c *Checker) probe(ctx context.Context, apis uint32) (unanswered uint32) {
	taken := c.taken.Load() &^ apis
	for _, p := range probes {
		if apis&(1<<p.api) == 0 {
			continue
		}
		raw := fmt.Appendf(nil, `{"model":%s,"temperature":0,%s}`, strconv.Quote(c.options.ModelName), p.question)
		req, err := body.Parse(p.api, raw)
		if err != nil {
			continue
		}
		ours, err := c.ours(ctx, req)
		if err != nil || c.model.ForwardIDs(req, c.oracle.Engine, ours) == nil {
			continue
		}
		ids := slices.Clip(ours.IDs)
		var answers [3][]byte
		var counts [3]int64
		for i, ids := range [...][]uint32{nil, ids, append(ids, ids[len(ids)-1:]...)} {
			sent, err := body.Apply(nil, raw, c.model.ForwardIDs(req, c.oracle.Engine, Result{IDs: ids})...)
			if err != nil {
				break
			}
			answer, err := post(ctx, c.oracle.Timeout, strings.TrimRight(c.oracle.URL, "/")+p.path, sent)
			if err != nil {
				_, refused := errors.AsType[*Refusal](err)
				if !refused && !errors.Is(err, errNoEndpoint) {
					unanswered |= 1 << p.api
				}
				break
			}
			scan := body.NewUsageScanner(false)
			_, _ = scan.Write(answer)
			usage, _ := scan.Usage()
			answers[i], counts[i] = body.Member(answer, p.answer), usage.Prompt
		}
		n := int64(len(ids))
		if len(answers[0]) > 0 && bytes.Equal(answers[1], answers[0]) && counts == [3]int64{n, n, n + 1} {
			taken |= 1 << p.api
		}
	}
	c.taken.Store(taken)
	return unanswered
}

// TakesIDs reports whether ids may be forwarded for an API: a probe found that the engine uses them, and no prompt in service
// has differed since Recheck. The first call for an API makes Run probe it.
func (c *Checker) TakesIDs(api body.API) bool {
	bit := uint32(1) << api
	if !c.Usable() || c.differed.Load() {
		return false
	}
	if c.wanted.Load()&bit == 0 && c.wanted.Or(bit)&bit == 0 && c.State() == Agrees {
		c.Recheck()
	}
	return c.taken.Load()&bit != 0
}
