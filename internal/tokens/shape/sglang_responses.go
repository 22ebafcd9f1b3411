package shape

import (
	"encoding/json"
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// sglangResponse follows SGLang 0.5.23's serving_responses.py: items become messages, and consecutive items of the assistant
// become one.
func (m *Model) sglangResponse(in input) (fields *jinja.Dict, partial string, err error) {
	if partial := engineHistory(in); partial != "" {
		return nil, partial, nil
	}
	var t sglangTurns
	if text, ok := body.TextOf(in.Raw(body.FieldInstructions)); !ok && given(in.Raw(body.FieldInstructions)) {
		return nil, "", m.refuseSurrogates(in, "instructions")
	} else if text != "" {
		t.list = append(t.list, chatMessage(roleSystem, jinja.String(text)))
	}
	v, err := in.value(body.FieldInput)
	if err != nil {
		return nil, "", err
	}
	items, isList := v.AsList()
	if _, isText := v.AsString(); isText {
		items = []jinja.Value{jinja.FromDict(chatMessage(roleUser, v))}
	} else if !isList {
		return nil, "", refuse("input: input should be a valid string or list")
	}
	for i := range items {
		msg, known, err := sglangItem(in.stop, items[i])
		switch {
		case err != nil:
			return nil, "", err
		case !known:
			return nil, "an input item whose form in the engine's prompt is unknown", nil
		case msg != nil:
			t.add(msg)
		}
	}
	t.finish()
	list := t.list
	if !m.inlineSystem {
		list = systemFirst(list)
	}
	messages := make([]jinja.Value, len(list))
	for i, msg := range list {
		messages[i] = jinja.FromDict(msg)
	}
	fields = dict(kv{"messages", jinja.List(messages)}, kv{"tool_choice", jinja.String("none")})
	if partial, err = sglangResponseTools(in, fields); err != nil || partial != "" {
		return nil, partial, err
	}
	kwargs, err := in.value(body.FieldChatTemplateKwargs)
	if err != nil {
		return nil, "", err
	}
	if d, _ := kwargs.AsDict(); !kwargs.IsNone() {
		if _, has := d.Get("chat_template"); has {
			return nil, "a template supplied by the request, which the engine uses here without --trust-request-chat-template", nil
		}
		fields.Set("chat_template_kwargs", kwargs)
	}
	reasoning, err := in.value(body.FieldReasoning)
	if d, ok := reasoning.AsDict(); ok {
		effort, has := d.Get("effort")
		if !has {
			effort = jinja.String("medium")
		}
		if !effort.IsNone() {
			fields.Set("reasoning_effort", effort)
		}
		if textAt(d, "reasoning_effort") == "none" && !member(d, "effort").Truth() {
			existing, _ := kwargs.AsDict()
			merged := existing.Clone()
			addMissing(merged, thinks(jinja.Bool(false)))
			fields.Set("chat_template_kwargs", jinja.FromDict(merged))
		}
	}
	return fields, "", err
}

// sglangResponseTools sets the tools of a response, and the choice of them.
func sglangResponseTools(in input, fields *jinja.Dict) (partial string, err error) {
	tools, _, err := in.listOf(body.FieldTools)
	if err != nil {
		return "", err
	}
	var functions []jinja.Value
	for i := range tools {
		d, _ := tools[i].AsDict()
		switch textAt(d, "type") {
		case "function":
			f := dict(kv{"name", member(d, "name")}, kv{"description", member(d, "description")}, kv{"parameters", member(d, "parameters")},
				kv{"strict", jinja.Bool(false)})
			if strict, has := d.Get("strict"); has {
				f.Set("strict", strict)
			}
			functions = append(functions, object(kv{"type", jinja.String("function")}, kv{"function", jinja.FromDict(f)}))
		case "web_search", "web_search_preview", "code_interpreter", "file_search": // the template does not see them
		default:
			return "a tool whose form in the engine's prompt is unknown", nil
		}
	}
	if functions != nil {
		fields.Set("tools", jinja.List(functions))
		fields.Delete("tool_choice")
		choice, err := in.value(body.FieldToolChoice)
		if err != nil {
			return "", err
		}
		if d, ok := choice.AsDict(); ok {
			name := member(d, "name")
			if !name.Truth() {
				name = member(dictAt(d, "function"), "name")
			}
			choice = jinja.None()
			if kind := textAt(d, "type"); (kind == "function" || kind == "custom") && name.Truth() {
				choice = object(kv{"type", jinja.String("function")}, kv{"function", object(kv{"name", name})})
			}
		}
		if !choice.IsNone() {
			fields.Set("tool_choice", choice)
		}
	}
	return "", nil
}

// sglangItem returns the message of an item, nil for a thought without text. known is false if the engine's message for such an
// item is not implemented here.
func sglangItem(stop <-chan struct{}, v jinja.Value) (msg *jinja.Dict, known bool, err error) {
	item, ok := v.AsDict()
	if !ok {
		return nil, true, refuse("input: input should be a valid dictionary")
	}
	switch kind := textAt(item, "type"); kind {
	case "function_call":
		arguments, isText := member(item, "arguments").AsString()
		if _, isDict := member(item, "arguments").AsDict(); isDict {
			return nil, false, nil
		}
		parsed, err := jinja.ParseJSONInto(stop, nil, []byte(arguments), false)
		strict := map[string]any{} // refuses NaN, too large numbers and a byte order mark, as the engine's parser does
		if _, isDict := parsed.AsDict(); !isText || err != nil || !isDict || json.Unmarshal([]byte(arguments), &strict) != nil {
			arguments = "{}"
		}
		id := member(item, "call_id")
		if !id.Truth() {
			id = member(item, "id")
		}
		name, named := member(item, "name").AsString()
		if !named {
			return nil, false, nil
		}
		called, _ := id.AsString()
		return dict(kv{"role", jinja.String(roleAssistant)}, kv{"tool_calls", jinja.List([]jinja.Value{functionCall(called, name, arguments)})}), true, nil
	case "function_call_output":
		output := member(item, "output")
		if _, isList := output.AsList(); isList {
			output = jinja.String(blocksText(output, ""))
		}
		msg := chatMessage(roleTool, output)
		msg.Set("tool_call_id", member(item, "call_id"))
		return msg, true, nil
	case "reasoning":
		var texts []string
		for _, key := range [...]string{"summary", "content"} {
			parts, _ := member(item, key).AsList()
			for i := range parts {
				d, _ := parts[i].AsDict()
				if text := textAt(d, "text"); text != "" {
					texts = append(texts, text)
				}
			}
			if texts != nil {
				return dict(kv{"role", jinja.String(roleAssistant)}, kv{"reasoning_content", jinja.String(strings.Join(texts, "\n"))}), true, nil
			}
		}
		return nil, member(item, "encrypted_content").IsNone(), nil
	case "", "message":
	default:
		if kind == "custom_tool_call" || kind == "custom_tool_call_output" {
			return nil, false, nil
		}
		return nil, true, refuse("Unsupported Responses API input item type: '%s'", kind)
	}
	msg = jinja.NewDict(item.Len())
	item.Range(func(k, v jinja.Value) bool {
		if key, _ := k.AsString(); key != "id" && key != "status" && key != "type" && !v.IsNone() {
			msg.Set(key, v)
		}
		return true
	})
	content := member(item, "content")
	developer := textAt(item, "role") == roleDeveloper
	if text, ok := content.AsString(); ok && developer {
		content = jinja.String(developerLabel + "\n" + text)
	} else if parts, ok := content.AsList(); ok {
		content = sglangParts(parts, developer)
	}
	if developer {
		msg.Set("role", jinja.String(roleSystem))
	}
	if !content.IsNone() {
		msg.Set("content", content)
	}
	return msg, true, nil
}

const developerLabel = "Developer instructions:"

// sglangParts returns the chat form of a message's parts. developer: the first text gets developerLabel as a prefix.
func sglangParts(parts []jinja.Value, developer bool) jinja.Value {
	out := make([]jinja.Value, 0, len(parts)+1)
	for i := range parts {
		d, _ := parts[i].AsDict()
		text, isText := member(d, "text").AsString()
		if developer && isText {
			developer = false
			d = d.Clone()
			text = developerLabel + "\n" + text
			d.Set("text", jinja.String(text))
		}
		switch kind := textAt(d, "type"); {
		case kind == "input_text" || kind == "output_text":
			out = append(out, textPart(text))
		case d != nil:
			out = append(out, jinja.FromDict(d))
		default:
			out = append(out, parts[i])
		}
	}
	if developer {
		out = append([]jinja.Value{textPart(developerLabel)}, out...)
	}
	return jinja.List(out)
}

// sglangTurns collects messages. The parts that several items add to one assistant message are joined once, when it is
// complete: joining at each item would take quadratic time.
type sglangTurns struct {
	list           []*jinja.Dict
	content, calls []jinja.Value
	thoughts       []string
}

// add appends a message, or merges an assistant's message into the one before it.
func (t *sglangTurns) add(msg *jinja.Dict) {
	if !t.continues(msg) {
		t.finish()
		t.list = append(t.list, msg)
		t.content, t.calls, t.thoughts = nil, nil, nil
	}
	last := t.list[len(t.list)-1]
	if phase := member(msg, "phase"); !phase.IsNone() {
		last.Set("phase", phase)
	}
	added := member(msg, "content")
	if text, isText := added.AsString(); !added.IsNone() && (!isText || text != "") {
		if t.content = append(t.content, added); len(t.content) == 1 {
			last.Set("content", added)
		}
	}
	if added, _ := member(msg, "tool_calls").AsList(); len(added) > 0 {
		if t.calls = append(t.calls, added...); len(t.calls) == len(added) {
			last.Set("tool_calls", jinja.List(added))
		}
	}
	if added := textAt(msg, "reasoning_content"); added != "" {
		if t.thoughts = append(t.thoughts, added); len(t.thoughts) == 1 {
			last.Set("reasoning_content", jinja.String(added))
		}
	}
}

func (t *sglangTurns) continues(msg *jinja.Dict) bool {
	if n := len(t.list); n == 0 || textAt(msg, "role") != roleAssistant || textAt(t.list[n-1], "role") != roleAssistant {
		return false
	}
	last := t.list[len(t.list)-1]
	_, thought := last.Get("reasoning_content")
	return textAt(last, "phase") == textAt(msg, "phase") || thought && last.Len() == 2
}

// finish joins the parts of the last message: texts only become one text, others a list of parts that begins with the
// joined texts before the first other part.
func (t *sglangTurns) finish() {
	if len(t.list) == 0 {
		return
	}
	last := t.list[len(t.list)-1]
	if len(t.content) > 1 {
		var texts []string
		var parts []jinja.Value
		for i, v := range t.content {
			if text, ok := v.AsString(); ok && len(texts) == i {
				texts = append(texts, text)
				continue
			}
			if i > 0 && len(texts) == i {
				parts = append(parts, textPart(strings.Join(texts, "\n\n")))
			}
			parts = append(parts, asParts(v)...)
		}
		if last.Set("content", jinja.List(parts)); len(texts) == len(t.content) {
			last.Set("content", jinja.String(strings.Join(texts, "\n\n")))
		}
	}
	if len(t.calls) > 0 {
		last.Set("tool_calls", jinja.List(t.calls))
	}
	if len(t.thoughts) > 1 {
		last.Set("reasoning_content", jinja.String(strings.Join(t.thoughts, "\n")))
	}
}

func asParts(v jinja.Value) []jinja.Value {
	if parts, ok := v.AsList(); ok {
		return parts
	}
	if s, _ := v.AsString(); s != "" {
		return []jinja.Value{textPart(s)}
	}
	return nil
}

// systemFirst merges the system messages into one at the beginning.
func systemFirst(list []*jinja.Dict) []*jinja.Dict {
	var texts []string
	others := make([]*jinja.Dict, 1, len(list)+1)
	for _, msg := range list {
		if textAt(msg, "role") != roleSystem {
			others = append(others, msg)
		} else if text, ok := member(msg, "content").AsString(); ok {
			texts = append(texts, text)
		} else {
			texts = appendTexts(texts, member(msg, "content"))
		}
	}
	if texts == nil {
		return others[1:]
	}
	others[0] = chatMessage(roleSystem, jinja.String(strings.Join(texts, "\n\n")))
	return others
}
