package shape

import (
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/encoders"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// converted plans a Responses or Anthropic request as the chat request that engines convert it to.
func (m *Model) converted(in input) (*plan, error) {
	convert := m.anthropicChat
	switch {
	case in.API == body.Responses && in.profile == profiles[SGLang]:
		convert = m.sglangResponse
	case in.API == body.Responses:
		convert = m.responsesChat
	}
	body, partial, err := convert(in)
	if err != nil {
		return nil, err
	}
	if partial != "" {
		return &plan{partial: partial}, nil
	}
	raw, err := jinja.AppendJSON(nil, jinja.FromDict(body), jinja.JSONOptions{})
	if err != nil {
		return nil, err
	}
	return m.asChat(in, raw)
}

func chatMessage(role string, content jinja.Value) *jinja.Dict {
	return dict(kv{"role", jinja.String(role)}, kv{"content", content})
}

func functionCall(id, name string, arguments string) jinja.Value {
	return object(kv{"id", jinja.String(id)}, kv{"type", jinja.String("function")},
		kv{"function", object(kv{"name", jinja.String(name)}, kv{"arguments", jinja.String(arguments)})})
}

// functionTool returns the chat form of a flat tool; the name of its parameters member depends on the API.
func functionTool(flat *jinja.Dict, parameters jinja.Value) jinja.Value {
	return object(kv{"type", jinja.String("function")}, kv{"function", object(kv{"name", member(flat, "name")},
		kv{"description", member(flat, "description")}, kv{"parameters", parameters}, kv{"strict", member(flat, "strict")},
		kv{"defer_loading", member(flat, "defer_loading")})})
}

// responsesChat follows vLLM's vllm/entrypoints/openai/responses: instructions become the system
// message, items become messages, and calls are added to the preceding assistant message.
func (m *Model) responsesChat(in input) (fields *jinja.Dict, partial string, err error) {
	if partial := engineHistory(in); partial != "" {
		return nil, partial, nil
	}
	var list []jinja.Value
	instructions := in.Raw(body.FieldInstructions)
	text, ok := body.TextOf(instructions)
	if given(instructions) && !ok {
		return nil, "", m.refuseSurrogates(in, "instructions")
	}
	if text != "" {
		list = append(list, jinja.FromDict(chatMessage(roleSystem, jinja.String(text))))
	}
	v, err := in.value(body.FieldInput)
	if err != nil {
		return nil, "", err
	}
	if text, ok := v.AsString(); ok {
		list = append(list, jinja.FromDict(chatMessage(roleUser, jinja.String(text))))
	} else if items, ok := v.AsList(); ok {
		for i := range items {
			item, _ := items[i].AsDict()
			if in.profile != profiles[VLLM] && (strings.HasPrefix(textAt(item, "type"), "custom_") || textAt(item, "namespace") != "") {
				return nil, "calls of custom tools and of namespaces", nil
			}
			if list, err = responsesItem(list, items[i]); err != nil {
				return nil, "", err
			}
		}
	} else if d, ok := v.AsDict(); !ok || d.Len() > 0 || in.profile != profiles[VLLM] { // Python takes {} for an empty list
		return nil, "", refuse("input: input should be a valid string or list")
	}
	fields = new(jinja.Dict)
	fields.Set("messages", jinja.List(list))
	if unfinished(v) {
		fields.Set("continue_final_message", jinja.Bool(true))
		fields.Set("add_generation_prompt", jinja.Bool(false))
	}
	tools, _, err := in.listOf(body.FieldTools)
	if err != nil {
		return nil, "", err
	}
	var functions []jinja.Value
	for i := range tools {
		d, ok := tools[i].AsDict()
		if !ok {
			return nil, "", refuse("tools: input should be a valid dictionary")
		}
		if kind := textAt(d, "type"); in.profile != profiles[VLLM] && kind != "function" {
			return nil, "tools that the engine runs itself change the prompt", nil
		}
		functions = append(functions, shownTools(d)...)
	}
	if functions != nil {
		fields.Set("tools", jinja.List(functions))
		fields.Set("tool_choice", jinja.String("none")) // the tools are shown anyway, and the parser's flags do not matter here
	}
	if err := in.copyTo(fields, body.FieldChatTemplateKwargs, body.FieldKVTransferParams); err != nil {
		return nil, "", err
	}
	if n, asked := in.vllmMaxTokens(); asked {
		fields.Set("max_tokens", jinja.Int(n))
	}
	fields.Set("add_special_tokens", jinja.Bool(true)) // unlike for a chat
	if raw := in.Get("truncation"); raw != nil && body.Text(raw) != "disabled" {
		fields.Set("truncate_prompt_tokens", jinja.Int(-1))
	}
	reasoning, err := in.value(body.FieldReasoning)
	if err != nil {
		return nil, "", err
	}
	if d, ok := reasoning.AsDict(); ok {
		if effort, has, _ := textOf(d, "effort"); has {
			fields.Set("reasoning_effort", jinja.String(effort))
		}
	}
	return fields, "", nil
}

func responsesItem(list []jinja.Value, v jinja.Value) ([]jinja.Value, error) {
	item, ok := v.AsDict()
	if !ok {
		return nil, refuse("input: input should be a valid dictionary")
	}
	kind := textAt(item, "type")
	text := func(key string) string { return textAt(item, key) }
	switch kind {
	case "", "message":
		if _, has := item.Get("content"); !has && text("id") != "" { // the engine may read it as a reference to an item
			return nil, encoders.ErrMissing
		}
		role := text("role")
		if role != roleAssistant {
			return append(list, jinja.FromDict(chatMessage(role, member(item, "content")))), nil
		}
		said, err := assistantText(item)
		if err != nil {
			return nil, err
		}
		return joinAssistant(list, "content", said), nil
	case "function_call":
		name := text("name")
		if space := text("namespace"); space != "" {
			name = nameIn(space, name)
		}
		return appendCall(list, functionCall(text("call_id"), name, text("arguments"))), nil
	case "custom_tool_call":
		said, err := jinja.AppendJSON(nil, object(kv{"input", jinja.String(text("input"))}), jinja.JSONOptions{})
		return appendCall(list, functionCall(text("call_id"), text("name"), string(said))), err
	case "function_call_output", "custom_tool_call_output":
		msg := chatMessage(roleTool, member(item, "output"))
		msg.Set("tool_call_id", jinja.String(text("call_id")))
		return append(list, jinja.FromDict(msg)), nil
	case "reasoning":
		return joinAssistant(list, "reasoning", jinja.String(reasoningText(item))), nil
	default:
		return nil, refuse("input.type: unsupported item type '%s'", kind)
	}
}

// shownTools returns the functions by which vLLM shows a tool to the model: those of a namespace with longer names, a custom tool
// as a function of one text, and no tool that the engine runs itself (vllm/tool_parsers/utils.py).
func shownTools(tool *jinja.Dict) (list []jinja.Value) {
	switch textAt(tool, "type") {
	case "function":
		return []jinja.Value{functionTool(tool, member(tool, "parameters"))}
	case "custom":
		return []jinja.Value{functionTool(tool, customParameters)}
	case "namespace":
		inner, _ := member(tool, "tools").AsList()
		for i := range inner {
			if f, _ := inner[i].AsDict(); textAt(f, "type") == "function" {
				f = f.Clone()
				f.Set("name", jinja.String(nameIn(textAt(tool, "name"), textAt(f, "name"))))
				list = append(list, functionTool(f, member(f, "parameters")))
			}
		}
	}
	return list
}

// nameIn returns the name by which vLLM shows a function of a namespace.
func nameIn(space, name string) string { return space + "__" + name }

var customParameters, _ = jinja.ParseJSON([]byte(`{"type": "object", "properties": {"input": {"type": "string", "description": ` +
	`"The freeform text payload for this tool."}}, "required": ["input"], "additionalProperties": false}`))

// unfinished reports whether the last item is a message or a thought that the model continues.
func unfinished(input jinja.Value) bool {
	items, _ := input.AsList()
	if len(items) == 0 {
		return false
	}
	last, _ := items[len(items)-1].AsDict()
	kind := textAt(last, "type")
	status := textAt(last, "status")
	return (kind == "" || kind == "message" || kind == "reasoning") && (status == "in_progress" || status == "incomplete")
}

// assistantText returns the first text of an assistant item.
func assistantText(item *jinja.Dict) (jinja.Value, error) {
	content := member(item, "content")
	if text, ok := content.AsString(); ok {
		if !member(item, "id").IsNone() && !member(item, "status").IsNone() {
			return jinja.String(text), refuse("input.content: Input should be a valid list") // output items need a list of parts
		}
		return content, nil
	}
	parts, _ := content.AsList()
	if len(parts) == 0 {
		return content, refuse("input.content: Input should be a valid string or list")
	}
	part, _ := parts[0].AsDict()
	return member(part, "text"), nil
}

// joinAssistant sets a member of the final assistant message if that lacks it, else appends a new message with it.
func joinAssistant(list []jinja.Value, key string, v jinja.Value) []jinja.Value {
	if n := len(list); n > 0 && roleOf(list[n-1]) == roleAssistant {
		last, _ := list[n-1].AsDict()
		if member(last, key).IsNone() {
			list[n-1] = with(last, key, v)
			return list
		}
	}
	return append(list, object(kv{"role", jinja.String(roleAssistant)}, kv{key, v}))
}

func reasoningText(item *jinja.Dict) string {
	for _, key := range [...]string{"content", "summary"} {
		if parts, _ := member(item, key).AsList(); len(parts) > 0 {
			if d, ok := parts[0].AsDict(); ok {
				return textAt(d, "text")
			}
		}
	}
	return ""
}

// appendCall adds the call to the final assistant message, or to a new one. All calls of the
// message were added here, so their list may grow in place.
func appendCall(list []jinja.Value, call jinja.Value) []jinja.Value {
	if n := len(list); n > 0 && roleOf(list[n-1]) == roleAssistant {
		last, _ := list[n-1].AsDict()
		old, _ := member(last, "tool_calls").AsList()
		list[n-1] = with(last, "tool_calls", jinja.List(append(old, call)))
		return list
	}
	msg := chatMessage(roleAssistant, jinja.None())
	msg.Set("tool_calls", jinja.List([]jinja.Value{call}))
	return append(list, jinja.FromDict(msg))
}

// blocksText returns the text of a string, or the joined texts of a list of text blocks.
func blocksText(v jinja.Value, sep string) string {
	if text, ok := v.AsString(); ok {
		return text
	}
	return strings.Join(appendTexts(nil, v), sep)
}

// appendTexts appends the texts of a list of text blocks.
func appendTexts(texts []string, v jinja.Value) []string {
	blocks, _ := v.AsList()
	for i := range blocks {
		d, _ := blocks[i].AsDict()
		if text, has, _ := textOf(d, "text"); has {
			texts = append(texts, text)
		}
	}
	return texts
}
