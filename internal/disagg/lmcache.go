package disagg

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// lmcache: the prefill engine computes the token ids, pushes the blocks to the receiver of the decode engine that the
// request names, and answers with the first token.
func lmcache() *Protocol {
	return &Protocol{apis: []body.API{body.Completions, body.Chat}, single: true, SendsIDs: true, refuses: lmcacheRefuses, edited: lmcacheEdited, prefill: lmcachePrefill, decode: lmcacheDecode}
}

func lmcacheRefuses(_ *body.Request, ids []uint32) string {
	if len(ids) == 0 {
		return "the token ids are not known"
	}
	return ""
}

// lmcacheEdited has the limits of the client's API, although the leg is a completion. The ids are made from the prompt
// and truncate_prompt_tokens, so these are valid.
func lmcacheEdited(api body.API) [3][]body.Edit {
	all := vllmEdited(api)
	if api == body.Chat {
		all[2] = chatOnly
	}
	return all
}

// chatOnly removes the fields of a chat request that have no meaning, or a different one, on the completions route.
var chatOnly = []body.Edit{
	remove("messages"), remove("tools"), remove("tool_choice"), remove("parallel_tool_calls"), remove("chat_template"),
	remove("chat_template_kwargs"), remove("add_generation_prompt"), remove("continue_final_message"), remove("documents"),
	remove("reasoning_effort"), remove("logprobs"), remove("top_logprobs"), remove("echo"),
}

func lmcachePrefill(_ context.Context, _ *Protocol, x *Exchange) (Leg, error) {
	spec, err := disaggSpec(x)
	if err != nil {
		return Leg{}, err
	}
	if len(x.IDs) == 0 {
		return Leg{}, fmt.Errorf("%w: no token ids that both workers share", errUnusable)
	}
	leg := Leg{Edits: vllmPrefill(body.Completions), grows: 8 * len(x.IDs)}
	if x.Request.API == body.Chat {
		leg.Edits = append(leg.Edits, chatOnly...)
	}
	leg.Path = completionsPath(x.Path)
	leg.Edits = append(leg.Edits, remove("truncate_prompt_tokens"), body.Set(body.AppendIDList(nil, x.IDs), "prompt"),
		set(`{"ret_first_tok":true}`, kvParams), body.Set(spec, kvParams, "disagg_spec"))
	return leg, nil
}

// completionsPath returns the completions route next to the request's own, because gateways may prefix the path.
func completionsPath(path string) string {
	path, _, _ = strings.Cut(path, "?")
	for _, route := range []string{"/v1/chat/completions", "/v1/completions"} {
		if prefix, ok := strings.CutSuffix(path, route); ok {
			return prefix + "/v1/completions"
		}
	}
	return "/v1/completions"
}

// disaggSpec names the decode engine's receiver. It is built for each request because it contains the request's id.
func disaggSpec(x *Exchange) ([]byte, error) {
	s := &x.Decode.Settings
	if s.ReceiverHost == "" || len(s.InitPorts) == 0 || len(s.AllocPorts) == 0 {
		return nil, unusable(&x.Decode, "receiver_host, receiver_init_ports and receiver_alloc_ports")
	}
	return json.Marshal(struct {
		ID    string `json:"req_id"`
		Host  string `json:"receiver_host"`
		Init  []int  `json:"receiver_init_port"`
		Alloc []int  `json:"receiver_alloc_port"`
		Query int    `json:"receiver_query_port,omitempty"`
	}{cmp.Or(x.ID, x.Unique.Text), s.ReceiverHost, s.InitPorts, s.AllocPorts, s.QueryPort})
}

// lmcacheDecode is the client's own request: the decode engine finds the prompt's blocks at its receiver and computes
// the last token of the prompt. With Append it starts after the prefill engine's token instead.
func lmcacheDecode(p *Protocol, x *Exchange, a *Answer) (Leg, error) {
	if a == nil {
		return Leg{}, errNoAnswer
	}
	raw := body.Member(a.member(kvParams), "first_tok")
	first, err := body.AppendIDs(nil, append(append([]byte{'['}, raw...), ']'))
	if err != nil || len(first) != 1 {
		return Leg{}, fmt.Errorf("%w: first_tok", ErrNoParameters)
	}
	if !p.options.Append {
		return Leg{}, nil
	}
	return appended(x, first[0])
}

// appended continues after the first token: the prompt grows by it, and the limits of the answer
// shrink by one. A missing limit stays missing.
func appended(x *Exchange, first uint32) (Leg, error) {
	r, ids := x.Request, body.AppendIDList(nil, append(slices.Clip(x.IDs), first))
	var edits []body.Edit
	if r.API == body.Chat {
		edits = append(edits, set(`{}`, kvParams), body.Set(ids, kvParams, "prompt_token_ids"))
	} else {
		edits = append(edits, body.Set(ids, "prompt"), remove(kvParams), remove("truncate_prompt_tokens"))
	}
	for _, f := range []body.Field{body.FieldMaxTokens, body.FieldMaxCompletionTokens} {
		n, ok := r.Int(f)
		switch {
		case ok && n > 1:
			edits = append(edits, setNumber(n-1, f.String()))
		case ok:
			// Only one token was requested, so nothing is left to decode.
			return Leg{}, nil
		}
	}
	if n, ok := number(r, "min_tokens"); ok && n > 1 {
		edits = append(edits, setNumber(n-1, "min_tokens"))
	}
	return Leg{Edits: edits, grows: len(ids)}, nil
}
