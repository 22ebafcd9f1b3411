package model

import (
	"strings"
	"time"

	"github.com/kvlane/kvlane/internal/prompt"
	"github.com/kvlane/kvlane/internal/tokenizer/jinja"
)

// SGLang 0.5.23's Anthropic API: python/sglang/srt/entrypoints/anthropic/serving.py, for a server without --reasoning-parser.

// sglangToolKind is _tool_discriminator: tools of other kinds than "custom" are run by Anthropic's servers.
func sglangToolKind(kind string) string {
	for _, family := range [...]string{"web_search", "computer", "bash", "text_editor"} {
		if strings.HasPrefix(kind, family+"_") {
			return family
		}
	}
	return "custom"
}

// sglangMessages is the chat request that SGLang makes of an Anthropic one, whose types have been checked.
func (m *Model) sglangMessages(in input) (body *jinja.Dict, err error) {
	messages, _, err := in.listOf(prompt.FieldMessages)
	if err != nil {
		return nil, err
	}
	c := &sglangAnthropic{merge: !m.inlineSystem}
	if err := c.system(in, messages); err != nil {
		return nil, err
	}
	for i := range messages {
		msg, _ := messages[i].AsDict()
		if err := c.message(msg); err != nil {
			return nil, err
		}
	}
	body = new(jinja.Dict)
	body.Set("messages", jinja.List(c.list))
	if kind := prompt.Text(prompt.Member(in.Get("thinking"), "type")); kind != "" && kind != "disabled" {
		return nil, &Refusal{Status: 400, Reason: "Anthropic thinking is not supported for models without a reasoning parser", Guessed: true}
	}
	if effort := prompt.Text(prompt.Member(in.Get("output_config"), "effort")); effort != "" {
		if effort == "xhigh" {
			effort = "max"
		}
		body.Set("reasoning_effort", jinja.String(effort))
		// Set behind the validators that would have thinking follow it.
		kwargs := jinja.NewDict(2)
		body.Set("chat_template_kwargs", jinja.FromDict(kwargs))
	}
	return body, sglangAnthropicTools(in, body)
}

// sglangAnthropicTools sets tools and tool_choice; tools that Anthropic's servers run are left out.
func sglangAnthropicTools(in input, body *jinja.Dict) error {
	tools, _, err := in.listOf(prompt.FieldTools)
	if err != nil {
		return err
	}
	var functions []jinja.Value
	named := false
	choice, err := in.dictOf(prompt.FieldToolChoice)
	if err != nil {
		return err
	}
	wanted, _, _ := textOf(choice, "name")
	for i := range tools {
		d, _ := tools[i].AsDict()
		kind, _, _ := textOf(d, "type")
		if sglangToolKind(kind) != "custom" {
			continue
		}
		schema, _ := optional(d, "input_schema").AsDict()
		if _, ok := schema.Get("type"); !ok {
			schema = schema.Clone()
			schema.Set("type", jinja.String("object"))
		}
		description, _, _ := textOf(d, "description")
		name, _, _ := textOf(d, "name")
		named = named || name == wanted
		f := jinja.NewDict(4)
		f.Set("name", jinja.String(name))
		f.Set("description", jinja.String(description))
		f.Set("parameters", jinja.FromDict(schema))
		strict := optional(d, "strict")
		if strict.IsNone() {
			strict = jinja.Bool(false) // shown
		}
		f.Set("strict", strict)
		tool := jinja.NewDict(3)
		tool.Set("type", jinja.String("function"))
		tool.Set("function", jinja.FromDict(f))
		if deferred := optional(d, "defer_loading"); !deferred.IsNone() {
			tool.Set("defer_loading", deferred)
		}
		functions = append(functions, jinja.FromDict(tool))
	}
	if functions != nil {
		body.Set("tools", jinja.List(functions))
	}
	kind, _, _ := textOf(choice, "type")
	switch {
	case kind == "none":
		body.Set("tool_choice", jinja.String("none"))
	case functions == nil && (kind == "any" || kind == "tool"):
		return refuse("tool_choice=%q requires at least one custom tool", kind)
	case functions == nil:
	case kind == "any":
		body.Set("tool_choice", jinja.String("required"))
	case kind == "tool" && !named:
		return refuse("tool_choice references tool %q but it is not in the forwarded tools list", wanted)
	case kind == "tool":
		fn := jinja.NewDict(1)
		fn.Set("name", jinja.String(wanted))
		d := jinja.NewDict(2)
		d.Set("type", jinja.String("function"))
		d.Set("function", jinja.FromDict(fn))
		body.Set("tool_choice", jinja.FromDict(d))
	default:
		body.Set("tool_choice", jinja.String("auto"))
	}
	return nil
}

// sglangAnthropic gathers chat messages.
type sglangAnthropic struct {
	list []jinja.Value
	// merge puts system messages among the turns into the first one.
	merge bool
}

func (c *sglangAnthropic) add(msg *jinja.Dict) { c.list = append(c.list, jinja.FromDict(msg)) }

func (c *sglangAnthropic) system(in input, messages []jinja.Value) error {
	v, err := in.value(prompt.FieldSystem)
	if err != nil {
		return err
	}
	var texts []string
	if text, ok := v.AsString(); ok && strings.TrimFunc(text, pythonSpace) != "" {
		texts = append(texts, text)
	}
	texts = append(texts, blockTexts(v)...)
	for i := range messages {
		if c.merge && roleOf(messages[i]) == roleSystem {
			msg, _ := messages[i].AsDict()
			if text := strippedText(optional(msg, "content")); text != "" {
				texts = append(texts, text)
			}
		}
	}
	if texts != nil {
		c.add(chatMessage(roleSystem, jinja.String(strings.Join(texts, "\n"))))
	}
	return nil
}

// blockTexts are the texts of a list of blocks that are not empty.
func blockTexts(v jinja.Value) (texts []string) {
	blocks, _ := v.AsList()
	for i := range blocks {
		d, _ := blocks[i].AsDict()
		if kind, _, _ := textOf(d, "type"); kind == "text" {
			if text, _, _ := textOf(d, "text"); text != "" {
				texts = append(texts, text)
			}
		}
	}
	return texts
}

// strippedText is _extract_system_text.
func strippedText(v jinja.Value) string {
	if text, ok := v.AsString(); ok {
		return strings.TrimFunc(text, pythonSpace)
	}
	var texts []string
	blocks, _ := v.AsList()
	for i := range blocks {
		d, _ := blocks[i].AsDict()
		if kind, _, _ := textOf(d, "type"); kind != "text" {
			continue
		}
		text, _, _ := textOf(d, "text")
		if text = strings.TrimFunc(text, pythonSpace); text != "" {
			texts = append(texts, text)
		}
	}
	return strings.Join(texts, "\n")
}

func (c *sglangAnthropic) message(msg *jinja.Dict) error {
	role, _, _ := textOf(msg, "role")
	content := optional(msg, "content")
	if role == roleSystem && c.merge {
		return nil
	}
	if text, ok := content.AsString(); ok {
		c.add(chatMessage(role, jinja.String(text)))
		return nil
	}
	blocks, _ := content.AsList()
	var parts, calls []jinja.Value
	for i := range blocks {
		d, _ := blocks[i].AsDict()
		kind, _, _ := textOf(d, "type")
		switch kind {
		case "redacted_thinking":
			if role == roleAssistant {
				return refuse("Anthropic redacted_thinking history is not supported")
			}
		case "text":
			if text, has, _ := textOf(d, "text"); has {
				parts = append(parts, textPart(text))
			}
		case "image":
			if source, _ := optional(d, "source").AsDict(); hasImage(source) {
				parts = append(parts, imagePart())
			}
		case "search_result":
			if text := searchText(d); text != "" {
				parts = append(parts, textPart(text))
			}
		case "tool_use":
			raw, err := jinja.AppendJSON(nil, argumentsOf(d), jinja.JSONOptions{})
			if err != nil {
				return err
			}
			id, _, _ := textOf(d, "id")
			name, _, _ := textOf(d, "name")
			calls = append(calls, functionCall(id, name, string(raw)))
		case "tool_result":
			contents, text := sglangToolResult(optional(d, "content"))
			if role != roleUser {
				parts = append(parts, textPart("Tool result: "+text))
				continue
			}
			if len(parts) > 0 {
				c.add(chatMessage(roleUser, loneText(parts)))
				parts = nil
			}
			id, _, _ := textOf(d, "tool_use_id")
			if id == "" {
				id, _, _ = textOf(d, "id")
			}
			for _, v := range contents {
				result := chatMessage(roleTool, v)
				result.Set("tool_call_id", jinja.String(id))
				c.add(result)
			}
		}
	}
	out := jinja.NewDict(3)
	out.Set("role", jinja.String(role))
	if calls != nil {
		out.Set("tool_calls", jinja.List(calls))
	}
	switch {
	case len(parts) > 0:
		out.Set("content", loneText(parts))
	case calls != nil:
	case role == roleUser:
		return nil
	default:
		out.Set("content", jinja.String(""))
	}
	c.add(out)
	return nil
}

func argumentsOf(d *jinja.Dict) jinja.Value {
	if v := optional(d, "input"); v.Truth() {
		return v
	}
	return jinja.FromDict(nil)
}

// loneText is the text of a single text part, or the list.
func loneText(parts []jinja.Value) jinja.Value {
	if len(parts) == 1 {
		if d, _ := parts[0].AsDict(); roleOfPart(d) == "text" {
			return optional(d, "text")
		}
	}
	return jinja.List(parts)
}

func hasImage(source *jinja.Dict) bool {
	kind, _, _ := textOf(source, "type")
	key := "url"
	if kind == "base64" {
		key = "data"
	}
	text, _, _ := textOf(source, key)
	return text != ""
}

// searchText is _text_from_search_result.
func searchText(d *jinja.Dict) string {
	var lines []string
	if title, _, _ := textOf(d, "title"); title != "" {
		lines = append(lines, "Title: "+title)
	}
	source := optional(d, "source")
	if inner, ok := source.AsDict(); ok {
		text, _, _ := textOf(inner, "url")
		if text == "" {
			text, _, _ = textOf(inner, "text")
		}
		if text != "" {
			lines = append(lines, "Source: "+text)
		}
	} else if text, _ := source.AsString(); text != "" {
		lines = append(lines, "Source: "+text)
	}
	content := optional(d, "content")
	var texts []string
	if text, ok := content.AsString(); ok {
		texts = append(texts, text)
	}
	texts = append(texts, blockTexts(content)...)
	if texts != nil {
		lines = append(lines, "Content: "+strings.Join(texts, "\n"))
	}
	return strings.Join(lines, "\n")
}

// sglangToolResult is the contents of the tool messages that a result becomes, and its text.
func sglangToolResult(content jinja.Value) (contents []jinja.Value, text string) {
	items, isList := content.AsList()
	if !isList {
		text, _ = content.AsString()
		return []jinja.Value{jinja.String(text)}, text
	}
	var texts []string
	var groups [][]jinja.Value
	references := false // the last group is of references
	add := func(part jinja.Value, reference bool) {
		if len(groups) == 0 || references != reference {
			groups = append(groups, nil)
		}
		groups[len(groups)-1] = append(groups[len(groups)-1], part)
		references = reference
	}
	for i := range items {
		d, _ := items[i].AsDict()
		switch kind, _, _ := textOf(d, "type"); kind {
		case "text":
			if s, _, _ := textOf(d, "text"); s != "" {
				texts = append(texts, s)
				add(textPart(s), false)
			}
		case "image":
			if source, _ := optional(d, "source").AsDict(); hasImage(source) {
				add(imagePart(), false)
			}
		case "tool_reference":
			name, _, _ := textOf(d, "tool_name")
			if name == "" {
				name, _, _ = textOf(d, "name")
			}
			if name != "" {
				reference := jinja.NewDict(2)
				reference.Set("type", jinja.String("tool_reference"))
				reference.Set("name", jinja.String(name))
				add(jinja.FromDict(reference), true)
			}
		case "search_result":
			if s := searchText(d); s != "" {
				texts = append(texts, s)
				add(textPart(s), false)
			}
		}
	}
	for _, group := range groups {
		contents = append(contents, loneText(group))
	}
	if contents == nil {
		contents = []jinja.Value{jinja.String("")}
	}
	return contents, strings.Join(texts, "\n")
}

// showsInlineSystem tells what SGLang finds out by rendering: whether a template prints a system message behind the first
// turn.
func (t *template) showsInlineSystem() bool {
	const sentinel = "__sglang_inline_system_sentinel__"
	turn := func(role, text string) jinja.Value { return jinja.FromDict(chatMessage(role, jinja.String(text))) }
	vars := jinja.NewDict(2)
	vars.Set("messages", jinja.List([]jinja.Value{turn(roleSystem, "t"), turn(roleUser, "t"), turn(roleSystem, sentinel), turn(roleUser, "t")}))
	vars.Set("add_generation_prompt", jinja.Bool(false))
	out, err := t.compiled.Render(nil, vars, jinja.Env{Now: time.Unix(0, 0).UTC()})
	return err == nil && strings.Contains(string(out), sentinel)
}
