package model

import (
	"slices"
	"strings"
	"time"

	"github.com/kvlane/kvlane/internal/prompt"
	"github.com/kvlane/kvlane/internal/tokenizer/jinja"
)

// messagesChat is the chat request that vLLM 0.32 makes of an Anthropic request (vllm/entrypoints/anthropic/serving.py).
// partial says why only the engine knows the prompt.
func (m *Model) messagesChat(in input) (body *jinja.Dict, partial string, err error) {
	messages, present, err := in.listOf(prompt.FieldMessages)
	if err != nil {
		return nil, "", err
	}
	if !present {
		return nil, "", refuse("messages: Field required")
	}
	c := &anthropicChat{merge: m.systemFirst}
	if err := c.system(in, messages); err != nil {
		return nil, "", err
	}
	for i := range messages {
		if err := c.message(messages[i]); err != nil {
			return nil, "", err
		}
	}
	if c.partial != "" {
		return nil, c.partial, nil
	}
	body = new(jinja.Dict)
	body.Set("messages", jinja.List(c.list))
	for _, f := range [...]prompt.Field{prompt.FieldChatTemplateKwargs, prompt.FieldKVTransferParams} {
		v, err := in.value(f)
		if err != nil {
			return nil, "", err
		}
		if !v.IsNone() {
			body.Set(f.String(), v)
		}
	}
	if err := anthropicEffort(in, body); err != nil {
		return nil, "", err
	}
	return body, "", anthropicTools(in, body)
}

// anthropicEffort is output_config.effort, or none where thinking is disabled.
func anthropicEffort(in input, body *jinja.Dict) error {
	for _, part := range [...]struct{ field, key string }{{"output_config", "effort"}, {"thinking", "type"}} {
		raw := prompt.Member(in.Body, part.field)
		if len(raw) == 0 || raw[0] != '{' {
			continue
		}
		v, err := parseField(part.field, raw)
		if err != nil {
			return err
		}
		d, _ := v.AsDict()
		text, has, _ := textOf(d, part.key)
		switch {
		case has && part.key == "effort":
			body.Set("reasoning_effort", jinja.String(text))
		case text == "disabled":
			body.Set("reasoning_effort", jinja.String("none"))
		}
	}
	return nil
}

// anthropicTools sets tools and tool_choice.
func anthropicTools(in input, body *jinja.Dict) error {
	tools, present, err := in.listOf(prompt.FieldTools)
	if err != nil {
		return err
	}
	choice, err := in.dictOf(prompt.FieldToolChoice)
	if err != nil {
		return err
	}
	chosen := jinja.String("auto")
	switch kind, _, _ := textOf(choice, "type"); kind {
	case "any":
		chosen = jinja.String("required")
	case "none":
		chosen = jinja.String("none")
	case "tool":
		fn := jinja.NewDict(1)
		fn.Set("name", optional(choice, "name"))
		named := jinja.NewDict(2)
		named.Set("type", jinja.String("function"))
		named.Set("function", jinja.FromDict(fn))
		chosen = jinja.FromDict(named)
	}
	if !present {
		return nil
	}
	functions := make([]jinja.Value, 0, len(tools))
	for i := range tools {
		d, ok := tools[i].AsDict()
		if !ok {
			return refuse("tools: input should be a valid dictionary")
		}
		schema, ok := optional(d, "input_schema").AsDict()
		if !ok {
			return refuse("tools.input_schema: Field required")
		}
		if _, ok := schema.Get("type"); !ok {
			schema = schema.Clone()
			schema.Set("type", jinja.String("object"))
		}
		functions = append(functions, functionTool(d, jinja.FromDict(schema)))
	}
	if len(functions) > 0 { // vLLM checks an empty list before it is there
		body.Set("tools", jinja.List(functions))
		body.Set("tool_choice", chosen)
	}
	return nil
}

// anthropicChat gathers chat messages.
type anthropicChat struct {
	list []jinja.Value
	// merge puts system messages among the turns into the first one.
	merge   bool
	partial string
}

func (c *anthropicChat) add(msg *jinja.Dict) { c.list = append(c.list, jinja.FromDict(msg)) }

// system adds the system message: the field, and where they are merged the messages of that role.
func (c *anthropicChat) system(in input, messages []jinja.Value) error {
	v, err := in.value(prompt.FieldSystem)
	if err != nil {
		return err
	}
	text, isText := v.AsString()
	if !isText {
		text = systemText(v)
	}
	if c.merge {
		var all strings.Builder
		all.WriteString(text)
		for i := range messages {
			if msg, ok := messages[i].AsDict(); ok && roleOf(messages[i]) == roleSystem {
				all.WriteString(systemText(optional(msg, "content")))
			}
		}
		text = all.String()
	}
	if text != "" {
		c.add(chatMessage(roleSystem, jinja.String(text)))
	}
	return nil
}

// systemText joins the texts of a system message without those that begin with Claude Code's billing header.
func systemText(v jinja.Value) string {
	if text, ok := v.AsString(); ok {
		if strings.HasPrefix(text, billingHeader) {
			return ""
		}
		return text
	}
	blocks, _ := v.AsList()
	var b strings.Builder
	for i := range blocks {
		d, _ := blocks[i].AsDict()
		if kind, _, _ := textOf(d, "type"); kind == "text" {
			if text, _, _ := textOf(d, "text"); !strings.HasPrefix(text, billingHeader) {
				b.WriteString(text)
			}
		}
	}
	return b.String()
}

func (c *anthropicChat) message(v jinja.Value) error {
	msg, ok := v.AsDict()
	if !ok {
		return refuse("messages: input should be a valid dictionary")
	}
	role, _, _ := textOf(msg, "role")
	content := optional(msg, "content")
	blocks, isList := content.AsList()
	text, isText := content.AsString()
	switch {
	case role != roleUser && role != roleAssistant && role != roleSystem:
		return refuse("messages.role: Input should be 'user', 'assistant' or 'system'")
	case !isList && !isText:
		return refuse("messages.content: Input should be a valid string or list")
	case role == roleSystem:
		for i := range blocks {
			if d, ok := blocks[i].AsDict(); ok {
				if kind, _, _ := textOf(d, "type"); kind == "tool_addition" || kind == "tool_removal" {
					c.partial = "tools are added or removed among the messages"
				}
			}
		}
		if text := systemText(content); text != "" && !c.merge {
			c.add(chatMessage(roleSystem, jinja.String(text)))
		}
		return nil
	case isText:
		c.add(chatMessage(role, jinja.String(text)))
		return nil
	}
	return c.blocks(role, blocks)
}

// blocks adds the message of a list of content blocks; results of tools become messages in front of it.
func (c *anthropicChat) blocks(role string, blocks []jinja.Value) error {
	var parts, calls []jinja.Value
	var thoughts strings.Builder
	thought := false
	for i := range blocks {
		d, ok := blocks[i].AsDict()
		if !ok {
			return refuse("messages.content: input should be a valid dictionary")
		}
		kind, _, _ := textOf(d, "type")
		if !slices.Contains(anthropicBlocks, kind) {
			return refuse("messages.content.type: unknown block '%s'", kind)
		}
		for _, key := range [...]string{"text", "thinking", "id", "tool_use_id", "name"} {
			if _, _, ok := textOf(d, key); !ok {
				return refuse("messages.content.%s: Input should be a valid string", key)
			}
		}
		text := func(key string) string {
			s, _, _ := textOf(d, key)
			return s
		}
		switch kind {
		case "text":
			if s := text("text"); s != "" {
				parts = append(parts, textPart(s))
			}
		case "image":
			parts = append(parts, imagePart())
		case "thinking":
			if s, has, _ := textOf(d, "thinking"); has {
				thought = true
				thoughts.WriteString(s)
			}
		case "tool_use":
			arguments := optional(d, "input")
			if !arguments.Truth() {
				arguments = jinja.FromDict(nil)
			}
			raw, err := jinja.AppendJSON(nil, arguments, jinja.JSONOptions{})
			if err != nil {
				return err
			}
			calls = append(calls, functionCall(text("id"), text("name"), string(raw)))
		case "tool_result":
			if role == roleUser {
				c.toolResult(d)
			} else {
				result := optional(d, "content")
				if items, isList := result.AsList(); isList && len(items) > 0 {
					c.partial = "a tool's result in the assistant's message"
				}
				s, _ := result.AsString()
				parts = append(parts, textPart("Tool result: "+s))
			}
		}
	}
	msg := jinja.NewDict(4)
	msg.Set("role", jinja.String(role))
	if thought {
		msg.Set("reasoning", jinja.String(thoughts.String()))
	}
	if calls != nil {
		msg.Set("tool_calls", jinja.List(calls))
	}
	if len(parts) == 1 {
		if d, _ := parts[0].AsDict(); roleOfPart(d) == "text" {
			msg.Set("content", optional(d, "text"))
		}
	}
	if _, done := msg.Get("content"); !done && len(parts) > 0 {
		msg.Set("content", jinja.List(parts))
	}
	if _, has := msg.Get("content"); has || role != roleUser {
		c.add(msg)
	}
	return nil
}

var anthropicBlocks = []string{"text", "image", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking"}

func roleOfPart(d *jinja.Dict) string {
	kind, _, _ := textOf(d, "type")
	return kind
}

func imagePart() jinja.Value {
	url := jinja.NewDict(1)
	url.Set("url", jinja.String("data:"))
	part := jinja.NewDict(2)
	part.Set("type", jinja.String("image_url"))
	part.Set("image_url", jinja.FromDict(url))
	return jinja.FromDict(part)
}

// toolResult adds a tool's message, its images as the user's, and a tool's message of its references.
func (c *anthropicChat) toolResult(d *jinja.Dict) {
	id, _, _ := textOf(d, "tool_use_id")
	content := optional(d, "content")
	text, _ := content.AsString()
	items, _ := content.AsList()
	var texts []string
	var images, references []jinja.Value
	for i := range items {
		item, _ := items[i].AsDict()
		switch kind, _, _ := textOf(item, "type"); kind {
		case "text":
			s, _, _ := textOf(item, "text")
			texts = append(texts, s)
		case "image":
			images = append(images, imagePart())
		case "tool_reference":
			name, _, _ := textOf(item, "tool_name")
			if name == "" {
				name, _, _ = textOf(item, "name")
			}
			if name != "" {
				reference := jinja.NewDict(2)
				reference.Set("type", jinja.String("tool_reference"))
				reference.Set("name", jinja.String(name))
				references = append(references, jinja.FromDict(reference))
			}
		}
	}
	if items != nil {
		text = strings.Join(texts, "\n")
	}
	result := func(content jinja.Value) {
		msg := jinja.NewDict(3)
		msg.Set("role", jinja.String(roleTool))
		msg.Set("tool_call_id", jinja.String(id))
		msg.Set("content", content)
		c.add(msg)
	}
	result(jinja.String(text))
	if images != nil {
		c.add(chatMessage(roleUser, jinja.List(images)))
	}
	if references != nil {
		result(jinja.List(references))
	}
}

// systemFirst tells what vLLM finds out by rendering: whether a template raises at a system message behind the first turn.
// Its environment there has no functions of transformers, so that a template which asks for the date raises too.
func (t *template) systemFirst() bool {
	if t.dated && !strings.Contains(t.source, "strftime_now is defined") {
		return true
	}
	turn := func(role string) jinja.Value { return jinja.FromDict(chatMessage(role, jinja.String("t"))) }
	vars := jinja.NewDict(2)
	vars.Set("messages", jinja.List([]jinja.Value{turn(roleSystem), turn(roleUser), turn(roleSystem), turn(roleUser)}))
	vars.Set("add_generation_prompt", jinja.Bool(false))
	_, err := t.compiled.Render(nil, vars, jinja.Env{Now: time.Unix(0, 0).UTC()})
	return err != nil
}
