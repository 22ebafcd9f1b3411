package enginesim

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// This file holds the request APIs other than OpenAI's completions and chat: Anthropic messages, OpenAI responses and vLLM's
// tokens-in-tokens-out.

// dialect is how an API that is not OpenAI's completions or chat writes its answer.
type dialect struct {
	chunk func(o *output, t merged, first bool)
	end   func(o *output)
}

var dialects = map[body.API]dialect{
	body.Messages:     {messagesChunk, messagesEnd},
	body.Responses:    {responsesChunk, responsesEnd},
	body.VLLMGenerate: {inferenceChunk, inferenceEnd},
}

// named writes a named event, as in the streams of these APIs.
func (o *output) named(v object) {
	_, _ = fmt.Fprintf(o.w, "event: %s\n", v["type"])
	o.event(v)
}

// messagesUsage: input_tokens excludes tokens read from the cache and those newly written to it.
func (o *output) messagesUsage() object {
	cached := max(0, o.cached+o.c.faults.get().CachedTokensLie)
	size := o.c.opts.BlockSize
	created := max(0, o.prompt/size*size-cached)
	return object{"input_tokens": o.prompt - cached - created, "cache_read_input_tokens": cached, "cache_creation_input_tokens": created, "output_tokens": o.generated}
}

func (o *output) message(content []any, stop any) object {
	return object{
		"id": "msg_" + o.c.id, "type": "message", "role": "assistant", "model": o.c.modelName(), "content": content,
		"stop_reason": stop, "stop_sequence": nil, "usage": o.messagesUsage(),
	}
}

func messagesChunk(o *output, t merged, first bool) {
	if first {
		o.named(object{"type": "message_start", "message": o.message([]any{}, nil)})
		block := object{"type": "text", "text": ""}
		if o.c.tool != nil {
			block = o.c.tool.block(o.c.id, object{})
		}
		o.named(object{"type": "content_block_start", "index": 0, "content_block": block})
	}
	if o.c.tool == nil {
		o.named(object{"type": "content_block_delta", "index": 0, "delta": object{"type": "text_delta", "text": t.text}})
	}
}

func messagesEnd(o *output) {
	content, reason := object{"type": "text", "text": o.choices[0].text.String()}, "max_tokens"
	if o.c.tool != nil {
		content, reason = o.c.tool.block(o.c.id, o.c.tool.arguments), "tool_use"
	}
	if !o.c.body.Stream {
		o.write(o.message([]any{content}, reason))
		return
	}
	if o.c.tool != nil {
		arguments, _ := json.Marshal(o.c.tool.arguments) //nolint:errchkjson // made of plain values
		o.named(object{"type": "content_block_delta", "index": 0, "delta": object{"type": "input_json_delta", "partial_json": string(arguments)}})
	}
	o.named(object{"type": "content_block_stop", "index": 0})
	o.named(object{"type": "message_delta", "delta": object{"stop_reason": reason, "stop_sequence": nil}, "usage": o.messagesUsage()})
	o.named(object{"type": "message_stop"})
}

// storedResponses are the answers that an engine's process keeps by their ids, as vLLM's with
// VLLM_ENABLE_RESPONSES_API_STORE.
type storedResponses struct {
	sync.Map
	kept atomic.Int64
}

type storedResponse struct {
	answer object
	ids    []uint32 // of the prompt and the answer
}

func (s *storedResponses) find(id string) (*storedResponse, error) {
	if r, ok := s.Load(id); ok {
		return r.(*storedResponse), nil //nolint:forcetypeassert // only keep stores
	}
	return nil, &apiError{http.StatusNotFound, "invalid_request_error", "response_id", "Response with id '" + id + "' not found."}
}

func (o *output) keep() {
	if o.c.body.Store == nil || *o.c.body.Store {
		if o.c.stored.kept.Add(1)%4096 == 0 { // bounded
			o.c.stored.Clear()
		}
		answer := o.response("completed")
		o.c.stored.Store(answer["id"], &storedResponse{answer, slices.Concat(o.c.prompts[0], o.choices[0].ids)})
	}
}

// history returns the tokens of the answer that the request continues, and the body without its id.
func (c *call) history() (raw []byte, ids []uint32, err error) {
	if c.api != body.Responses || c.body.PreviousResponseID == "" {
		return c.raw, nil, nil
	}
	r, err := c.stored.find(c.body.PreviousResponseID)
	if err != nil {
		return nil, nil, err
	}
	raw, err = body.Apply(nil, c.raw, body.Delete(body.FieldPreviousResponseID.String()))
	return raw, slices.Clone(r.ids), err
}

// storedResponse answers with a stored response; one that has ended cannot be cancelled.
func (s *service) storedResponse(w http.ResponseWriter, r *http.Request) {
	stored, err := s.stored.find(r.PathValue("id"))
	if err == nil && r.Method == http.MethodPost {
		err = badRequest("Cannot cancel a synchronous response.")
	}
	if err != nil {
		s.writeError(w, err)
		return
	}
	writeJSON(w, http.StatusOK, stored.answer)
}

// numbered is named with the sequence number that the responses API gives each event of a stream.
func (o *output) numbered(kind string, v object) {
	v["type"], v["sequence_number"] = kind, o.events
	o.events++
	o.named(v)
}

func (o *output) response(status string) object {
	out := object{
		"id": cmp.Or(o.c.body.RequestID, "resp_"+o.c.id), "object": "response", "created_at": o.created, "status": status, "model": o.c.modelName(), "output": []any{},
		"parallel_tool_calls": true, "tool_choice": "auto", "tools": []any{}, "error": nil, "incomplete_details": nil, "usage": nil,
	}
	if status != "in_progress" {
		out["output"] = []any{o.outputItem(status)}
		out["usage"] = object{
			"input_tokens": o.prompt, "output_tokens": o.generated, "total_tokens": o.prompt + o.generated,
			"input_tokens_details": object{"cached_tokens": max(0, o.cached+o.c.faults.get().CachedTokensLie)},
		}
	}
	return out
}

// outputItem is the single message of an answer.
func (o *output) outputItem(status string) object {
	content := []any{}
	if status != "in_progress" {
		content = append(content, outputText(o.choices[0].text.String()))
	}
	return object{"id": "msg_" + o.c.id, "type": "message", "role": "assistant", "status": status, "content": content}
}

func outputText(text string) object {
	return object{"type": "output_text", "text": text, "annotations": []any{}, "logprobs": []any{}}
}

// place locates an event in the answer; key and value are its content.
func (o *output) place(key string, value any) object {
	return object{"item_id": "msg_" + o.c.id, "output_index": 0, "content_index": 0, key: value}
}

func responsesChunk(o *output, t merged, first bool) {
	if first {
		o.numbered("response.created", object{"response": o.response("in_progress")})
		o.numbered("response.in_progress", object{"response": o.response("in_progress")})
		o.numbered("response.output_item.added", object{"output_index": 0, "item": o.outputItem("in_progress")})
		o.numbered("response.content_part.added", o.place("part", outputText("")))
	}
	delta := o.place("delta", t.text)
	delta["logprobs"] = []any{}
	o.numbered("response.output_text.delta", delta)
}

func responsesEnd(o *output) {
	o.keep()
	if o.c.body.Stream {
		text := o.choices[0].text.String()
		done := o.place("text", text)
		done["logprobs"] = []any{}
		o.numbered("response.output_text.done", done)
		o.numbered("response.content_part.done", o.place("part", outputText(text)))
		o.numbered("response.output_item.done", object{"output_index": 0, "item": o.outputItem("completed")})
		o.numbered("response.completed", object{"response": o.response("completed")})
		return
	}
	o.write(o.response("completed"))
}

func inferenceChunk(o *output, t merged, _ bool) {
	o.event(object{"request_id": o.c.id, "choices": []any{object{"index": t.seq, "token_ids": []uint32{t.id}, "finish_reason": orNil(t.finish), "logprobs": nil}}})
}

func inferenceEnd(o *output) {
	if o.c.body.Stream {
		_, _ = o.w.Write([]byte("data: [DONE]\n\n"))
		return
	}
	var choices []any
	for i := range o.choices {
		choices = append(choices, object{"index": i, "token_ids": o.choices[i].ids, "finish_reason": o.choices[i].finish, "logprobs": nil})
	}
	o.write(object{"request_id": o.c.id, "choices": choices, "prompt_logprobs": nil, "kv_transfer_params": nil})
}

// write sends a whole answer with the connector's additions.
func (o *output) write(answer object) {
	maps.Copy(answer, o.extra)
	writeJSON(o.w, http.StatusOK, answer)
}
