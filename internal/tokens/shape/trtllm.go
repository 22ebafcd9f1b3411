package shape

import (
	"slices"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// trtllmChat follows /v1/chat/completions of trtllm-serve according to its sources (tensorrt_llm/serve/chat_utils.py).
// No recording confirms it, so a Checker should. Tools are dumped as in vLLM, and add_generation_prompt, documents,
// chat_template and chat_template_kwargs are passed on.
func (m *Model) trtllmChat(in input) (*plan, error) {
	list, haveTools, err := in.listOf(body.FieldTools)
	if err != nil {
		return nil, err
	}
	tools, err := converted(list, vllmTool)
	if err != nil {
		return nil, err
	}
	template, err := m.templateFor(in, haveTools)
	if err != nil {
		return nil, err
	}
	add, err := in.flag(body.FieldAddGenerationPrompt, true)
	if err != nil {
		return nil, err
	}
	p := &plan{template: template, stop: in.stop}
	if raw := in.Get("prompt_token_ids"); len(raw) > 0 && raw[0] == '[' {
		p.ids, err = laxIDs(raw)
		return p, err
	}
	shape := trtllmShape{p: p}
	shown, err := m.shapeMessages(in, shapeTRTLLM, p, shape.message)
	if err != nil {
		return nil, err
	}
	kwargs, err := in.dictOf(body.FieldChatTemplateKwargs)
	if err != nil {
		return nil, err
	}
	documents, err := in.value(body.FieldDocuments)
	if err != nil {
		return nil, err
	}
	p.vars = m.config.specialTokens()
	addMissing(p.vars, kwargs)
	p.vars.Set("messages", jinja.List(shown))
	p.vars.Set("tools", jinja.None())
	if haveTools {
		p.vars.Set("tools", jinja.List(tools))
	}
	p.vars.Set("documents", documents)
	p.vars.Set("add_generation_prompt", jinja.Bool(add))
	p.addSpecial, err = in.flag(body.FieldAddSpecialTokens, false)
	return p, err
}

// trtllmShape builds the message that TensorRT-LLM passes to the template.
type trtllmShape struct{ p *plan }

func (s *trtllmShape) message(v jinja.Value) (jinja.Value, error) {
	msg, role, err := messageHead(v)
	if err != nil {
		return v, err
	}
	content, err := s.content(member(msg, "content"))
	if err != nil {
		return v, err
	}
	out := chatMessage(role, content)
	switch role {
	case roleAssistant:
		if thought := firstOf(msg, "reasoning", "reasoning_content"); !thought.IsNone() {
			out.Set("reasoning_content", thought)
		}
		if calls := member(msg, "tool_calls"); !calls.IsNone() {
			list, err := trtllmCalls(s.p.stop, calls)
			if err != nil {
				return v, err
			}
			out.Set("tool_calls", list)
		}
	case roleTool:
		if id, ok := msg.Get("tool_call_id"); ok {
			out.Set("tool_call_id", id)
		}
	case roleSystem:
		if tools := member(msg, "tools"); !tools.IsNone() {
			out.Set("tools", tools)
		}
	}
	return jinja.FromDict(out), nil
}

// trtllmMedia are the types of image, audio and video parts.
var trtllmMedia = []string{"image_url", "video_url", "audio_url", "input_audio", "image_embeds"}

// content joins the texts with newlines; the position of media depends on the model.
func (s *trtllmShape) content(v jinja.Value) (jinja.Value, error) {
	if _, ok := v.AsString(); ok {
		return v, nil
	}
	parts, ok := v.AsList()
	if !ok && !v.IsNone() {
		return v, refuse("messages.content: input should be a valid string or a list of parts")
	}
	var texts []string
	media := false
	for i := range parts {
		text, bare := parts[i].AsString()
		if !bare {
			part, _ := parts[i].AsDict()
			kind := textAt(part, "type")
			switch {
			case slices.Contains(trtllmMedia, kind):
				s.p.cutAtMedia()
				media = true
				continue
			case kind != "text":
				return v, refuse("Unknown part type: %s", kind)
			}
			text = textAt(part, "text")
		}
		if text != "" {
			texts = append(texts, text)
		}
	}
	if media { // one mark is enough: the prompt is cut at the first
		texts = append([]string{mediaMark}, texts...)
	}
	return join(texts, "\n"), nil
}

// trtllmCalls parses the arguments of calls into objects; invalid JSON stays a text.
func trtllmCalls(stop <-chan struct{}, v jinja.Value) (jinja.Value, error) {
	calls, ok := v.AsList()
	if !ok {
		return v, refuse("messages.tool_calls: input should be a valid list")
	}
	out := make([]jinja.Value, 0, len(calls))
	for i := range calls {
		call, _ := calls[i].AsDict()
		function, ok := member(call, "function").AsDict()
		if !ok {
			return v, refuse("tool_calls[%d].function is required.", i)
		}
		arguments := member(function, "arguments")
		_, isDict := arguments.AsDict()
		text, isText := arguments.AsString()
		switch {
		case arguments.IsNone():
			arguments = jinja.FromDict(nil)
		case isText:
			read, err := jinja.ParseJSONInto(stop, nil, []byte(text), false)
			if err != nil {
				break
			}
			if _, ok := read.AsDict(); !ok {
				return v, refuse("tool_calls[%d].function.arguments must be a JSON object.", i)
			}
			arguments = read
		case !isDict:
			return v, refuse("tool_calls[%d].function.arguments must be an object.", i)
		}
		out = append(out, object(kv{"id", member(call, "id")},
			kv{"function", object(kv{"arguments", arguments}, kv{"name", member(function, "name")})}, kv{"type", jinja.String("function")}))
	}
	return jinja.List(out), nil
}
