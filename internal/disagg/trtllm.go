package disagg

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

const disaggParams = "disaggregated_params"

var trtAPIs = []body.API{body.Chat, body.Completions}

// trtContextFirst is TensorRT-LLM's default: the context server answers with its first token and
// the parameters that the generation server needs.
func trtContextFirst() *Protocol {
	return &Protocol{Portable: true, apis: trtAPIs, single: true, arranged: trtArranged, local: trtLocal, edited: trtEdited,
		prefill: func(_ context.Context, p *Protocol, x *Exchange) (Leg, error) {
			return Leg{Edits: trtContext(x, setNumber(p.transferID(), disaggParams, "disagg_request_id"), setText("context_first", disaggParams, "schedule_style")),
				Headers: TRTSession(x.Conversation)}, nil
		},
		decode: trtDecode}
}

func trtEdited(body.API) [3][]body.Edit { return [3][]body.Edit{unstreamed} }

// trtArranged: a client that sets the request type is a router in front of Kvlane, or a benchmark of generation alone.
func trtArranged(r *body.Request) string {
	if body.Text(r.Member(body.FieldDisaggregatedParams, "request_type")) == "generation_only" {
		return "the client names its own context server"
	}
	return ""
}

// trtLocal removes a request type that would make the generation server only prefill, or wait. A
// benchmark's generation_only is intended and stays.
func trtLocal(r *body.Request) []body.Edit {
	if !r.Has(body.FieldDisaggregatedParams) || trtArranged(r) != "" {
		return nil
	}
	return []body.Edit{remove(disaggParams)}
}

// trtContext is the context server's request. The limits of the answer's length stay: the server
// stops after one token by itself, and reports whether the answer is complete.
func trtContext(x *Exchange, more ...body.Edit) []body.Edit {
	edits := append(make([]body.Edit, 0, 8), unstreamed...)
	edits = append(edits, set(`{"request_type":"context_only"}`, disaggParams))
	edits = append(edits, more...)
	return append(edits, trtRank(&x.Prefill)...)
}

// trtRank tells a leg's server the rank of its side.
func trtRank(s *Side) []body.Edit {
	if !s.ByHeader || s.Rank == NoRank {
		return nil
	}
	return []body.Edit{body.Set(fmt.Appendf(nil, `{"dp_rank":%d}`, s.Rank), disaggParams, "route_hint")}
}

// maxSession bounds the ids, in bytes, that TRTSession passes on.
const maxSession = 256

// TRTSession returns the header that tells TensorRT-LLM a request's conversation, nil for an id that does not belong in
// a header. The server writes it into conversation_params unless the body has them. Kvlane adds no body field, because
// servers refuse unknown ones (older ones conversation_params, newer ones disaggregated_params.conversation_id,
// TensorRT-LLM#17618) but ignore unknown headers.
func TRTSession(conversation string) []Header {
	if conversation == "" || len(conversation) > maxSession || strings.ContainsFunc(conversation, func(c rune) bool { return c <= ' ' || c > '~' }) {
		return nil
	}
	return []Header{{"x-session-id", conversation}}
}

var errOneChoice = errors.New("the context answer does not have exactly one choice")

// trtDecode builds the generation request from the context answer.
func trtDecode(_ *Protocol, x *Exchange, a *Answer) (Leg, error) {
	if a == nil {
		return Leg{}, errNoAnswer
	}
	choice, err := onlyChoice(a)
	if err != nil {
		return Leg{}, fmt.Errorf("%w: %w", ErrNoParameters, err)
	}
	params := a.member(disaggParams)
	if !isObject(params) {
		params = body.Member(choice, disaggParams)
	}
	if finish := body.Text(body.Member(choice, "finish_reason")); finish != "length" && finish != "not_finished" && finish != "" {
		return Leg{}, trtFinal(x.Request, a, choice)
	}
	if !isObject(params) {
		return Leg{}, ErrNoParameters
	}
	for _, name := range []string{"ctx_request_id", "disagg_request_id"} {
		if !present(body.Member(params, name)) {
			return Leg{}, fmt.Errorf("%w: %s", ErrNoParameters, name)
		}
	}
	edits := []body.Edit{body.Set(params, disaggParams), set(`"generation_only"`, disaggParams, "request_type"),
		set(`"context_first"`, disaggParams, "schedule_style")}
	edits = append(edits, trtRank(&x.Decode)...)
	if u := a.member("usage"); isObject(u) {
		edits = append(edits, body.Set(u, disaggParams, "ctx_usage"))
	}
	ids := a.member("prompt_token_ids")
	if !present(ids) {
		ids = body.Member(choice, "prompt_token_ids")
	}
	if present(ids) {
		field := "prompt_token_ids"
		if x.Request.API == body.Completions {
			field = "prompt"
		}
		edits = append(edits, body.Set(ids, field))
	}
	return Leg{Edits: edits, grows: len(params) + len(ids)}, nil
}

// onlyChoice returns the choice of an answer that must have exactly one.
func onlyChoice(a *Answer) ([]byte, error) {
	list := items(a.member("choices"))
	if len(list) != 1 {
		return nil, errOneChoice
	}
	return list[0], nil
}

// trtFinal returns the context answer as the client's answer, without disaggregated_params; a
// client that requested a stream receives it as one.
func trtFinal(r *body.Request, a *Answer, choice []byte) error {
	whole, err := body.Apply(nil, choice, remove(disaggParams), remove("prompt_token_ids"))
	dst, edits := []byte(nil), []body.Edit{remove(disaggParams), remove("prompt_token_ids")}
	if r.Stream() {
		dst = []byte("data: ")
		if err == nil && r.API == body.Chat {
			// The text is in "delta" in a chunk, in "message" in an answer.
			whole, err = body.Apply(nil, whole, body.Set(body.Member(whole, "message"), "delta"), remove("message"))
			edits = append(edits, set(`"chat.completion.chunk"`, "object"))
		}
		if string(r.Member(body.FieldStreamOptions, "include_usage")) != "true" {
			edits = append(edits, remove("usage"))
		}
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNoParameters, err)
	}
	data, err := body.Apply(dst, a.raw, append(edits, body.Set(append(append([]byte{'['}, whole...), ']'), "choices"))...)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNoParameters, err)
	}
	if !r.Stream() {
		return &FinalError{Body: data}
	}
	return &FinalError{Body: append(data, "\n\ndata: [DONE]\n\n"...), Stream: true}
}

// trtGenerationFirst runs both legs concurrently: the generation server fetches from the context
// server that its request names.
func trtGenerationFirst() *Protocol {
	return &Protocol{AtOnce: true, apis: trtAPIs, single: true, arranged: trtArranged, local: trtLocal, edited: trtEdited, pages: newPages(),
		prefill: func(ctx context.Context, p *Protocol, x *Exchange) (Leg, error) {
			if err := p.fetchPage(ctx, &x.Prefill, x.Prefill.Address, "/server_info", true); err != nil {
				return Leg{}, err
			}
			return Leg{Edits: trtContext(x, setNumber(x.number(p), disaggParams, "disagg_request_id"),
				setText("generation_first", disaggParams, "schedule_style")), Headers: TRTSession(x.Conversation)}, nil
		},
		decode: func(p *Protocol, x *Exchange, _ *Answer) (Leg, error) {
			info, id := body.Member(p.page(&x.Prefill), disaggParams), x.number(p)
			edits := []body.Edit{set(`{"request_type":"generation_only","schedule_style":"generation_first"}`, disaggParams),
				setNumber(id, disaggParams, "ctx_request_id"), setNumber(id, disaggParams, "disagg_request_id")}
			for _, name := range []string{"ctx_info_endpoint", "encoded_opaque_state"} {
				value := body.Member(info, name)
				if list := items(value); len(list) > 0 {
					value = list[0]
				}
				if present(value) {
					edits = append(edits, body.Set(value, disaggParams, name))
				}
			}
			if len(edits) == 3 {
				return Leg{}, unusable(&x.Prefill, "disaggregated_params at /server_info")
			}
			return Leg{Edits: append(edits, trtRank(&x.Decode)...)}, nil
		}}
}
