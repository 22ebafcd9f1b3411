package shape

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/encoders"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// harmonyResponse plans a response of gpt-oss: vllm/entrypoints/openai/responses/harmony.py. It returns
// encoders.ErrMissing, so that there are no ids, for items that vLLM's request model may read differently.
func (m *Model) harmonyResponse(in input) (*plan, error) {
	p := &plan{partial: engineHistory(in), encoder: m.encoder, chat: &encoders.Chat{Args: new(jinja.Dict), Now: m.options.Now()}}
	if p.partial != "" {
		return p, nil
	}
	if given(in.Get("previous_input_messages")) {
		return nil, encoders.ErrMissing
	}
	if kwargs, err := in.dictOf(body.FieldChatTemplateKwargs); err != nil || !member(kwargs, "chat_template").IsNone() {
		return nil, cmp.Or(err, in.profile.untrusted)
	}
	if n, asked := in.vllmMaxTokens(); asked && n < 1 {
		return nil, refuse("max_tokens must be at least 1, got %d. (parameter=max_tokens, value=%d)", n, n)
	}
	switch side := in.Get("truncation"); {
	case side == nil, body.Text(side) == "disabled":
	case given(side) && body.Text(side) != "auto":
		return nil, refuse("truncation: Input should be 'auto' or 'disabled'")
	default:
		m.truncateToContext(in, p)
	}
	reasoning, err := in.value(body.FieldReasoning)
	if err != nil {
		return nil, err
	}
	d, ok := reasoning.AsDict()
	effort, has, isText := textOf(d, "effort")
	summary, said, known := textOf(d, "summary")
	odd := false // a name that is half of a surrogate pair
	d.Range(func(k, _ jinja.Value) bool { name, _ := k.AsString(); odd = !utf8.ValidString(name); return !odd })
	if !ok && !reasoning.IsNone() || odd || !isText || has && !slices.Contains(efforts, effort) || !known || said && !slices.Contains([]string{"auto", "concise", "detailed"}, summary) {
		return nil, refuse("reasoning: Input should be valid")
	}
	p.chat.Effort = effort
	if p.chat.Messages, err = harmonyInput(in); err == nil {
		p.partial, err = harmonyTools(in, p.chat)
	}
	return p, err
}

// engineHistory returns why only the engine knows the messages before those of a response, "" if there are none.
func engineHistory(in input) string {
	for _, f := range [...]body.Field{body.FieldPreviousResponseID, body.FieldConversation} {
		if in.Has(f) {
			return f.String() + ": only the engine knows the history"
		}
	}
	return ""
}

// harmonyTools sets the tools of a response.
func harmonyTools(in input, chat *encoders.Chat) (partial string, err error) {
	tools, isList, err := in.listOf(body.FieldTools)
	if err == nil && !isList && in.Raw(body.FieldTools) != nil {
		err = refuse("tools: Input should be a valid list")
	}
	if err != nil {
		return "", err
	}
	for i := range tools {
		d, _ := tools[i].AsDict()
		if textAt(d, "type") != "function" {
			return "tools that the engine runs itself change the prompt", nil
		}
		tool, err := vllmTool(functionTool(d, member(d, "parameters")))
		if err != nil {
			return "", err
		}
		chat.Tools = append(chat.Tools, tool)
	}
	choice, err := in.value(body.FieldToolChoice)
	name, _ := choice.AsString()
	d, _ := choice.AsDict()
	others := slices.DeleteFunc(slices.Clone(chat.Tools), func(t jinja.Value) bool { return toolName(t) == textAt(d, "name") })
	switch {
	case err != nil, in.Raw(body.FieldToolChoice) == nil, name == "auto", name == "none", name == "required" && len(tools) > 0:
		return "", err
	case name == "required", textAt(d, "type") == "function" && len(others) != len(chat.Tools)-1: // none, or several
		return "", refuse("The tool of 'tool_choice' is not in 'tools'. (parameter=tool_choice)")
	case textAt(d, "type") != "function":
		return "", encoders.ErrMissing
	}
	return "", nil
}

// harmonyInput returns the encoder's messages for a response's instructions and items.
func harmonyInput(in input) ([]jinja.Value, error) {
	instructions, err := in.value(body.FieldInstructions)
	if err != nil {
		return nil, err
	}
	if _, ok := instructions.AsString(); !ok && !instructions.IsNone() {
		return nil, refuse("instructions: Input should be a valid string")
	}
	var h harmonyItems
	head := func(role string) {
		if !instructions.IsNone() || role != roleSystem && role != roleDeveloper { // else the first message has the instructions
			h.list = append(h.list, object(kv{"role", jinja.String(roleSystem)}, kv{"flat", instructions}))
		}
	}
	if raw := in.Raw(body.FieldInput); len(raw) > 0 && raw[0] == '[' {
		n := 0
		body.EachItem(raw, func(item []byte) {
			if n++; err == nil {
				_, err = shaped(in, nil, item, func(v jinja.Value) (jinja.Value, error) {
					if n == 1 {
						head(roleOf(v))
					}
					return v, h.add(v)
				})
			}
		})
		if n == 0 {
			head("")
		}
		return h.list, err
	}
	head("")
	v, err := in.value(body.FieldInput)
	text, isText := v.AsString()
	switch d, ok := v.AsDict(); {
	case err != nil:
	case isText:
		h.message(roleUser, "", text)
	case ok && d.Len() == 0:
		err = encoders.ErrMissing // an empty list for Python
	default:
		err = refuse("input: Input should be a valid string or list")
	}
	return h.list, err
}

type harmonyItems struct {
	list  []jinja.Value
	calls map[string]string // from a client's call_id to the unique id of the last such call in list, to which an output belongs
}

func (h *harmonyItems) message(role, channel string, texts ...string) {
	msg := dict(kv{"role", jinja.String(role)}, kv{"channel", jinja.String(channel)})
	values := make([]jinja.Value, len(texts))
	for i := range texts {
		values[i] = jinja.String(texts[i])
	}
	if len(texts) > 0 {
		msg.Set("flat", join(texts, ""))
	}
	msg.Set("texts", jinja.List(values))
	h.list = append(h.list, jinja.FromDict(msg))
}

// plainItem reports whether the members listed in texts are strings, and each other member is listed in others, or has
// no effect on the prompt and is a string or, if null is set, null.
func plainItem(d *jinja.Dict, null bool, texts []string, others ...string) bool {
	ok := !slices.ContainsFunc(texts, func(key string) bool { return member(d, key).Kind() != jinja.KindString })
	d.Range(func(k, v jinja.Value) bool {
		key, _ := k.AsString()
		text, isText := v.AsString()
		switch {
		case slices.Contains(texts, key), slices.Contains(others, key):
		case !isText && (!v.IsNone() || !null):
			ok = false
		case key == "status":
			ok = ok && (!isText || text == "completed" || text == "in_progress" || text == "incomplete")
		case key == "phase":
			ok = ok && (!isText || text == "commentary" || text == "final_answer")
		case key != "id" && key != "namespace" && key != "encrypted_content":
			ok = false
		}
		return ok
	})
	return ok
}

func (h *harmonyItems) add(v jinja.Value) error {
	item, _ := v.AsDict()
	kind, typed, _ := textOf(item, "type")
	if _, has := item.Get("type"); has && !typed {
		return encoders.ErrMissing
	}
	id := textAt(item, "call_id")
	switch kind {
	case "", "message":
		return h.addMessage(item, kind)
	case "reasoning":
		return h.addReasoning(item)
	case "function_call":
		if !plainItem(item, true, []string{"type", "call_id", "name", "arguments"}) {
			return encoders.ErrMissing
		}
		if h.calls == nil {
			h.calls = map[string]string{}
		}
		h.calls[id] = strconv.Itoa(len(h.list))
		call := object(kv{"id", jinja.String(h.calls[id])}, kv{"name", member(item, "name")}, kv{"arguments", member(item, "arguments")})
		h.list = append(h.list, object(kv{"role", jinja.String(roleAssistant)}, kv{"calls", jinja.List([]jinja.Value{call})}))
	case "function_call_output":
		if !plainItem(item, true, []string{"type", "call_id", "output"}) {
			return encoders.ErrMissing
		}
		own, called := h.calls[id]
		if !called {
			return refuse("No call message found for %s", id)
		}
		h.list = append(h.list, object(kv{"role", jinja.String(roleTool)}, kv{"call_id", jinja.String(own)}, kv{"flat", member(item, "output")}))
	case "additional_tools": // the engine may read it as instructions
		return encoders.ErrMissing
	default:
		return refuse("Unknown input type: %s", kind)
	}
	return nil
}

func (h *harmonyItems) addMessage(item *jinja.Dict, kind string) error {
	role, channel, parts := textAt(item, "role"), "", "input_text"
	content := member(item, "content")
	text, isText := content.AsString()
	_, hasID := item.Get("id")
	_, hasStatus := item.Get("status")
	asList := role == roleAssistant && kind != "" && isText && hasID && hasStatus // vLLM iterates over the text's characters
	switch {
	case asList && text != "":
		return encoders.ErrMissing
	case role == roleAssistant:
		channel = "final"
		if kind != "" {
			parts = "output_text"
		}
	case role != roleSystem && role != roleDeveloper && role != roleUser:
		return encoders.ErrMissing
	}
	texts, ok := itemTexts(content, parts)
	if !ok || !plainItem(item, false, []string{"role"}, "type", "content") {
		return encoders.ErrMissing
	}
	if asList {
		texts = nil
	}
	if role == roleUser || channel != "" || len(h.list) == 0 || strings.Join(texts, "") != "" {
		h.message(role, channel, texts...)
	}
	return nil
}

func (h *harmonyItems) addReasoning(item *jinja.Dict) error {
	summary, isList := member(item, "summary").AsList()
	_, ok := itemTexts(jinja.List(summary), "summary_text")
	content := member(item, "content")
	if content.IsNone() {
		content = jinja.List(nil)
	}
	texts, known := itemTexts(content, "reasoning_text")
	_, isText := content.AsString()
	if id, has := item.Get("id"); !isList || !ok || !known || isText || has && id.IsNone() || !plainItem(item, true, []string{"type"}, "summary", "content") {
		return encoders.ErrMissing
	}
	if len(texts) > 0 {
		h.message(roleAssistant, "analysis", strings.Join(texts, "\n"))
	}
	return nil
}

// itemTexts returns a text, or the texts of parts that all have type kind. A refusal part of an assistant has the text "".
func itemTexts(content jinja.Value, kind string) (texts []string, ok bool) {
	if text, ok := content.AsString(); ok {
		return []string{text}, true
	}
	parts, ok := content.AsList()
	for i := range parts {
		part, _ := parts[i].AsDict()
		text, has, _ := textOf(part, "text")
		_, refused, _ := textOf(part, "refusal")
		notes, annotated := part.Get("annotations")
		list, _ := notes.AsList()
		switch of := textAt(part, "type"); {
		case kind == "output_text" && of == "refusal" && refused:
			text = ""
		case of != kind || !has || !member(part, "logprobs").IsNone() || annotated && (notes.Kind() != jinja.KindList || len(list) > 0):
			return nil, false
		}
		texts = append(texts, text)
	}
	return texts, ok
}
