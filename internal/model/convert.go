package model

import (
	"slices"
	"strings"

	"github.com/kvlane/kvlane/internal/prompt"
	"github.com/kvlane/kvlane/internal/tokenizer/jinja"
)

// converted reads a request of the Responses or the Anthropic API as the chat request that engines make of it.
func (m *Model) converted(req *prompt.Request, engine Engine) (*plan, error) {
	in := input{Request: req}
	var body *jinja.Dict
	var partial string
	var err error
	if req.API == prompt.Responses {
		body, partial, err = responsesChat(in)
	} else {
		body, err = messagesChat(in)
	}
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
	chat, err := prompt.Parse(prompt.Chat, raw)
	if err != nil {
		return nil, err
	}
	return m.chat(input{Request: chat}, engine)
}

func chatMessage(role string, content jinja.Value) *jinja.Dict {
	d := jinja.NewDict(4)
	d.Set("role", jinja.String(role))
	d.Set("content", content)
	return d
}

func functionCall(id, name string, arguments string) jinja.Value {
	f := jinja.NewDict(2)
	f.Set("name", jinja.String(name))
	f.Set("arguments", jinja.String(arguments))
	d := jinja.NewDict(3)
	d.Set("id", jinja.String(id))
	d.Set("type", jinja.String("function"))
	d.Set("function", jinja.FromDict(f))
	return jinja.FromDict(d)
}

func functionTool(name, description, parameters jinja.Value) jinja.Value {
	f := jinja.NewDict(3)
	f.Set("name", name)
	f.Set("description", description)
	f.Set("parameters", parameters)
	d := jinja.NewDict(2)
	d.Set("type", jinja.String("function"))
	d.Set("function", jinja.FromDict(f))
	return jinja.FromDict(d)
}

// responsesChat follows vLLM's vllm/entrypoints/openai/responses: instructions become the system message, items become
// messages, calls join the assistant's message before them.
func responsesChat(in input) (body *jinja.Dict, partial string, err error) {
	if in.Has(prompt.FieldPreviousResponseID) {
		return nil, "previous_response_id: only the engine knows the history", nil
	}
	if in.Has(prompt.FieldConversation) {
		return nil, "conversation: only the engine knows the history", nil
	}
	var list []jinja.Value
	if text := in.Text(prompt.FieldInstructions); text != "" {
		list = append(list, jinja.FromDict(chatMessage(roleSystem, jinja.String(text))))
	}
	v, err := in.value(prompt.FieldInput)
	if err != nil {
		return nil, "", err
	}
	if text, ok := v.AsString(); ok {
		list = append(list, jinja.FromDict(chatMessage(roleUser, jinja.String(text))))
	} else if items, ok := v.AsList(); ok {
		for i := range items {
			if list, err = responsesItem(list, items[i]); err != nil {
				return nil, "", err
			}
		}
	} else {
		return nil, "", refuse("input: input should be a valid string or list")
	}
	body = new(jinja.Dict)
	body.Set("messages", jinja.List(list))
	tools, _, err := in.listOf(prompt.FieldTools)
	if err != nil {
		return nil, "", err
	}
	var functions []jinja.Value
	for i := range tools {
		d, ok := tools[i].AsDict()
		if !ok {
			return nil, "", refuse("tools: input should be a valid dictionary")
		}
		if kind, _, _ := textOf(d, "type"); kind != "function" {
			return nil, "tools that the engine runs itself change the prompt", nil
		}
		functions = append(functions, functionTool(optional(d, "name"), optional(d, "description"), optional(d, "parameters")))
	}
	if functions != nil {
		body.Set("tools", jinja.List(functions))
		body.Set("tool_choice", jinja.String("none")) // shown all the same, and the parser's flags do not matter here
	}
	reasoning, err := in.value(prompt.FieldReasoning)
	if err != nil {
		return nil, "", err
	}
	if d, ok := reasoning.AsDict(); ok {
		if effort, has, _ := textOf(d, "effort"); has {
			body.Set("reasoning_effort", jinja.String(effort))
		}
	}
	return body, "", nil
}

func responsesItem(list []jinja.Value, v jinja.Value) ([]jinja.Value, error) {
	item, ok := v.AsDict()
	if !ok {
		return nil, refuse("input: input should be a valid dictionary")
	}
	kind, _, _ := textOf(item, "type")
	text := func(key string) string {
		s, _, _ := textOf(item, key)
		return s
	}
	switch kind {
	case "", "message":
		content := optional(item, "content")
		return append(list, jinja.FromDict(chatMessage(text("role"), content))), nil
	case "function_call":
		return appendCall(list, functionCall(text("call_id"), text("name"), text("arguments"))), nil
	case "function_call_output":
		msg := chatMessage(roleTool, optional(item, "output"))
		msg.Set("tool_call_id", jinja.String(text("call_id")))
		return append(list, jinja.FromDict(msg)), nil
	case "reasoning":
		msg := chatMessage(roleAssistant, jinja.None())
		msg.Set("reasoning", jinja.String(reasoningText(item)))
		return append(list, jinja.FromDict(msg)), nil
	default:
		return nil, refuse("input.type: unsupported item type '%s'", kind)
	}
}

func reasoningText(item *jinja.Dict) string {
	for _, key := range [...]string{"content", "summary"} {
		v, _ := item.Get(key)
		if parts, ok := v.AsList(); ok && len(parts) > 0 {
			if d, ok := parts[0].AsDict(); ok {
				text, _, _ := textOf(d, "text")
				return text
			}
		}
	}
	return ""
}

// appendCall adds the call to the assistant's message at the end, or to a new one.
func appendCall(list []jinja.Value, call jinja.Value) []jinja.Value {
	if n := len(list); n > 0 {
		last, _ := list[n-1].AsDict()
		if role, _, _ := textOf(last, "role"); role == roleAssistant {
			calls, _ := last.Get("tool_calls")
			old, _ := calls.AsList()
			last = last.Clone()
			last.Set("tool_calls", jinja.List(append(slices.Clip(old), call)))
			list[n-1] = jinja.FromDict(last)
			return list
		}
	}
	msg := chatMessage(roleAssistant, jinja.None())
	msg.Set("tool_calls", jinja.List([]jinja.Value{call}))
	return append(list, jinja.FromDict(msg))
}

// messagesChat follows vLLM's vllm/entrypoints/anthropic/serving.py.
func messagesChat(in input) (*jinja.Dict, error) {
	var list []jinja.Value
	system, err := in.value(prompt.FieldSystem)
	if err != nil {
		return nil, err
	}
	if text := blocksText(system, ""); text != "" {
		list = append(list, jinja.FromDict(chatMessage(roleSystem, jinja.String(text))))
	}
	messages, present, err := in.listOf(prompt.FieldMessages)
	if err != nil {
		return nil, err
	}
	if !present {
		return nil, refuse("messages: Field required")
	}
	for i := range messages {
		msg, ok := messages[i].AsDict()
		if !ok {
			return nil, refuse("messages: input should be a valid dictionary")
		}
		if list, err = anthropicMessage(list, msg); err != nil {
			return nil, err
		}
	}
	body := new(jinja.Dict)
	body.Set("messages", jinja.List(list))
	tools, _, err := in.listOf(prompt.FieldTools)
	if err != nil {
		return nil, err
	}
	var functions []jinja.Value
	for i := range tools {
		if d, ok := tools[i].AsDict(); ok {
			functions = append(functions, functionTool(optional(d, "name"), optional(d, "description"), optional(d, "input_schema")))
		}
	}
	if functions != nil {
		body.Set("tools", jinja.List(functions))
		body.Set("tool_choice", jinja.String("none"))
	}
	return body, nil
}

// blocksText is the text of a string or of a list of text blocks.
func blocksText(v jinja.Value, sep string) string {
	if text, ok := v.AsString(); ok {
		return text
	}
	blocks, _ := v.AsList()
	var texts []string
	for i := range blocks {
		if d, ok := blocks[i].AsDict(); ok {
			if text, has, _ := textOf(d, "text"); has {
				texts = append(texts, text)
			}
		}
	}
	return strings.Join(texts, sep)
}

func anthropicMessage(list []jinja.Value, msg *jinja.Dict) ([]jinja.Value, error) {
	role, _, _ := textOf(msg, "role")
	if role != roleUser && role != roleAssistant {
		return nil, refuse("messages.role: Input should be 'user' or 'assistant'")
	}
	content, _ := msg.Get("content")
	blocks, ok := content.AsList()
	if !ok {
		if _, text := content.AsString(); !text {
			return nil, refuse("messages.content: Field required")
		}
		return append(list, jinja.FromDict(chatMessage(role, content))), nil
	}
	var parts, calls []jinja.Value
	var thoughts []string
	for i := range blocks {
		d, ok := blocks[i].AsDict()
		if !ok {
			return nil, refuse("messages.content: input should be a valid dictionary")
		}
		text := func(key string) string {
			s, _, _ := textOf(d, key)
			return s
		}
		switch kind, _, _ := textOf(d, "type"); kind {
		case "text":
			parts = append(parts, textPart(text("text")))
		case "image", "document":
			part := jinja.NewDict(1)
			part.Set("type", jinja.String("image_url"))
			parts = append(parts, jinja.FromDict(part))
		case "thinking":
			thoughts = append(thoughts, text("thinking"))
		case "tool_use":
			raw, err := jinja.AppendJSON(nil, optional(d, "input"), jinja.JSONOptions{})
			if err != nil {
				return nil, err
			}
			calls = append(calls, functionCall(text("id"), text("name"), string(raw)))
		case "tool_result":
			v, _ := d.Get("content")
			result := chatMessage(roleTool, jinja.String(blocksText(v, "\n")))
			result.Set("tool_call_id", jinja.String(text("tool_use_id")))
			list = append(list, jinja.FromDict(result))
		}
	}
	reasoning := strings.Join(thoughts, "")
	out := chatMessage(role, jinja.None())
	switch {
	case len(parts) == 1 && blocksText(jinja.List(parts), "") != "":
		out.Set("content", jinja.String(blocksText(jinja.List(parts), "")))
	case len(parts) > 0:
		out.Set("content", jinja.List(parts))
	case len(calls) == 0 && reasoning == "":
		return list, nil
	case role == roleUser:
		return list, nil
	}
	if calls != nil {
		out.Set("tool_calls", jinja.List(calls))
	}
	if reasoning != "" {
		out.Set("reasoning", jinja.String(reasoning))
	}
	return append(list, jinja.FromDict(out)), nil
}
