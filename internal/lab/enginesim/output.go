package enginesim

import (
	"encoding/json"
	"maps"
	"net/http"
	"strings"
	"time"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// output collects the tokens of a call and writes them in the API's format.
type output struct {
	c       *call
	w       http.ResponseWriter
	flush   http.Flusher
	created int64
	name    string // id in the answer
	choices []choice
	seen    map[int]bool // prompts whose tokens are counted

	prompt, cached, generated int
	events                    int // numbered events sent so far
	// extra is added to the top level of the answer, perChoice to each choice.
	extra, perChoice object
}

type choice struct {
	text   strings.Builder
	ids    []uint32
	finish string
}

func newOutput(c *call, w http.ResponseWriter) *output {
	o := &output{c: c, w: w, created: time.Now().Unix(), choices: make([]choice, len(c.seqs)), seen: map[int]bool{}, extra: object{}, perChoice: object{}}
	o.name = o.answerID()
	if c.body.Stream {
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		o.flush, _ = w.(http.Flusher)
	}
	return o
}

func (o *output) answerID() string {
	if o.c.opts.Engine == SGLang {
		var rid string
		if json.Unmarshal(o.c.body.RID, &rid) == nil && rid != "" {
			return rid
		}
		return randomHex(16)
	}
	if o.c.api == body.Chat {
		return "chatcmpl-" + o.c.id
	}
	return "cmpl-" + o.c.id
}

func (o *output) token(t merged) {
	ch := &o.choices[t.seq]
	first := len(ch.ids) == 0
	ch.text.WriteString(t.text)
	ch.ids = append(ch.ids, t.id)
	if t.finish != "" && o.c.tool != nil {
		t.finish = "tool_calls"
	}
	ch.finish = t.finish
	o.generated++
	variants := len(o.c.seqs) / len(o.c.prompts)
	if p := t.seq / variants; first && !o.seen[p] {
		o.seen[p] = true
		o.prompt += o.c.seqs[t.seq].prompt
		o.cached += t.cached
	}
	if o.c.body.Stream {
		o.chunk(t, first)
	}
}

func (o *output) usage() object {
	cached := max(0, o.cached+o.c.faults.get().CachedTokensLie)
	u := object{
		"prompt_tokens": o.prompt, "completion_tokens": o.generated, "total_tokens": o.prompt + o.generated,
		"prompt_tokens_details": object{"cached_tokens": cached},
	}
	if o.c.transfer != nil && o.c.transfer.usage != nil {
		o.c.transfer.usage(u)
	}
	return u
}

func (o *output) object(chunk bool) string {
	switch {
	case o.c.api != body.Chat:
		return "text_completion"
	case chunk:
		return "chat.completion.chunk"
	default:
		return "chat.completion"
	}
}

func (o *output) head(chunk bool, choices []any) object {
	return object{"id": o.name, "object": o.object(chunk), "created": o.created, "model": o.c.modelName(), "choices": choices}
}

func (c *call) modelName() string {
	if c.body.Model == "" {
		return c.opts.Model
	}
	return c.body.Model
}

func (o *output) chunk(t merged, first bool) {
	if d, ok := dialects[o.c.api]; ok {
		d.chunk(o, t, first)
		return
	}
	if o.c.api == body.Generate {
		// SGLang's own stream carries the whole text so far in every chunk.
		o.event(o.generateAnswer(t.seq))
		return
	}
	base := object{"index": t.seq, "logprobs": nil, "finish_reason": orNil(t.finish)}
	if o.c.api == body.Chat {
		if first {
			head := o.head(true, []any{object{"index": t.seq, "delta": object{"role": "assistant", "content": ""}, "logprobs": nil, "finish_reason": nil}})
			if o.c.body.ReturnTokenIDs {
				head["prompt_token_ids"] = o.c.promptOfSeq(t.seq)
			}
			o.event(head)
		}
		base["delta"] = object{"content": t.text}
		switch {
		case o.c.tool != nil && t.finish == "":
			return
		case o.c.tool != nil:
			base["delta"] = object{"tool_calls": o.c.tool.chat(o.c.id)}
		}
	} else {
		base["text"] = t.text
		base["stop_reason"] = nil
		if first && o.c.body.ReturnTokenIDs {
			base["prompt_token_ids"] = o.c.promptOfSeq(t.seq)
		}
	}
	if o.c.body.ReturnTokenIDs {
		base["token_ids"] = []uint32{t.id}
	}
	o.event(o.head(true, []any{base}))
}

// promptOfSeq is the prompt of a sequence; the rank does not modify it.
func (c *call) promptOfSeq(i int) []uint32 {
	return c.prompts[i/(len(c.seqs)/len(c.prompts))]
}

func (o *output) event(v any) {
	raw, err := json.Marshal(v)
	if err != nil {
		return
	}
	_, _ = o.w.Write(append(append([]byte("data: "), raw...), "\n\n"...))
	if o.flush != nil {
		o.flush.Flush()
	}
}

func (o *output) generateAnswer(i int) object {
	ch := &o.choices[i]
	meta := object{
		"id": o.name, "prompt_tokens": len(o.c.promptOfSeq(i)), "completion_tokens": len(ch.ids),
		"cached_tokens": max(0, o.cached+o.c.faults.get().CachedTokensLie), "finish_reason": nil,
	}
	if ch.finish != "" {
		meta["finish_reason"] = object{"type": ch.finish, "length": len(ch.ids)}
	}
	return object{"text": ch.text.String(), "output_ids": ch.ids, "meta_info": meta}
}

// end writes what follows the last token.
func (o *output) end() {
	if d, ok := dialects[o.c.api]; ok {
		d.end(o)
		return
	}
	switch {
	case o.c.body.Stream:
		if o.c.api != body.Generate && o.c.body.StreamOptions != nil && o.c.body.StreamOptions.IncludeUsage {
			last := o.head(true, []any{})
			last["usage"] = o.usage()
			o.event(last)
		}
		_, _ = o.w.Write([]byte("data: [DONE]\n\n"))
	case o.c.api == body.Generate:
		if len(o.choices) == 1 {
			writeJSON(o.w, http.StatusOK, o.generateAnswer(0))
			return
		}
		var list []any
		for i := range o.choices {
			list = append(list, o.generateAnswer(i))
		}
		writeJSON(o.w, http.StatusOK, list)
	default:
		o.whole()
	}
}

func (o *output) whole() {
	var choices []any
	for i := range o.choices {
		ch := &o.choices[i]
		v := object{"index": i, "logprobs": nil, "finish_reason": ch.finish, "stop_reason": nil}
		if o.c.api == body.Chat {
			v["message"] = object{"role": "assistant", "content": ch.text.String(), "tool_calls": []any{}}
			if o.c.tool != nil {
				v["message"] = object{"role": "assistant", "content": nil, "tool_calls": o.c.tool.chat(o.c.id)}
			}
		} else {
			v["text"] = ch.text.String()
		}
		if o.c.body.ReturnTokenIDs {
			v["token_ids"] = ch.ids
			if o.c.api != body.Chat {
				v["prompt_token_ids"] = o.c.promptOfSeq(i)
			}
		}
		maps.Copy(v, o.perChoice)
		choices = append(choices, v)
	}
	answer := o.head(false, choices)
	answer["usage"] = o.usage()
	if o.c.body.ReturnTokenIDs && o.c.api == body.Chat {
		answer["prompt_token_ids"] = o.c.promptOfSeq(0)
	}
	maps.Copy(answer, o.extra)
	writeJSON(o.w, http.StatusOK, answer)
}
