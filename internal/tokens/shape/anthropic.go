package shape

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// anthropicRules defines how an engine converts an Anthropic request to a chat: vLLM 0.32
// (vllm/entrypoints/anthropic/serving.py) and SGLang 0.5.23 (python/sglang/srt/entrypoints/anthropic/serving.py).
type anthropicRules struct {
	// options copies the fields other than messages and tools. encoded: see anthropicChat.
	options func(in input, body *jinja.Dict, encoded bool) error
	// mergeSystem reports whether system messages after the first turn are merged into the system
	// prompt. If not, and systemTurns is set, they stay ordinary messages.
	mergeSystem func(m *Model) bool
	systemTurns bool
	// separator joins the texts of the system prompt. Each text first passes through systemBlock (from the system field) or
	// systemMessage (from a message); empty results are dropped. blankSystem keeps a system field of only white space.
	separator                  string
	systemBlock, systemMessage func(text string) string
	blankSystem                bool
	// blocks are the supported types of content blocks; others are rejected. nil: others are ignored.
	blocks []string
	// emptyText: an empty text block becomes a part of its message.
	emptyText bool
	// hasImage reports whether an image block becomes a part.
	hasImage func(block *jinja.Dict) bool
	// reasoning: thinking blocks become the message's reasoning, and redacted ones are ignored.
	reasoning bool
	// result adds a tool result to the conversation, or to the parts of the message that has it.
	result func(c *anthropicChat, role string, block *jinja.Dict, parts []jinja.Value) []jinja.Value
	// customTools: tools that Anthropic's servers execute are omitted.
	customTools bool
	// tool converts a tool to a chat tool; schema has a type.
	tool func(tool *jinja.Dict, schema jinja.Value) jinja.Value
}

var vllmAnthropic = anthropicRules{
	options:       vllmAnthropicOptions,
	mergeSystem:   func(m *Model) bool { return m.systemFirst },
	systemBlock:   withoutBilling,
	systemMessage: withoutBilling,
	blankSystem:   true,
	blocks:        []string{"text", "image", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking"},
	hasImage:      func(block *jinja.Dict) bool { return dictAt(block, "source").Len() > 0 },
	reasoning:     true,
	result:        vllmToolResult,
	tool:          functionTool,
}

// sglangAnthropic is for a server without --reasoning-parser.
var sglangAnthropic = anthropicRules{
	options:       sglangAnthropicOptions,
	mergeSystem:   func(m *Model) bool { return !m.inlineSystem },
	systemTurns:   true,
	separator:     "\n",
	systemBlock:   func(text string) string { return text },
	systemMessage: func(text string) string { return strings.TrimFunc(text, pythonSpace) },
	emptyText:     true,
	hasImage:      hasImage,
	result:        sglangToolResult,
	customTools:   true,
	tool:          sglangAnthropicTool,
}

// anthropicChat collects the chat messages of an Anthropic request.
type anthropicChat struct {
	*anthropicRules

	list    []jinja.Value
	merge   bool
	encoded bool // SGLang has an encoder for the model, which takes thoughts, and runs with --reasoning-parser if they are asked for
	partial string
}

// anthropicChat returns the body of the equivalent chat request. partial is the reason why only
// the engine knows the whole prompt, "" if there is none.
func (m *Model) anthropicChat(in input) (fields *jinja.Dict, partial string, err error) {
	messages, present, err := in.listOf(body.FieldMessages)
	if err != nil {
		return nil, "", err
	}
	if !present {
		return nil, "", refuse("messages: Field required")
	}
	rules := &in.profile.anthropic
	c := &anthropicChat{anthropicRules: rules, merge: rules.mergeSystem(m)}
	if in.profile == profiles[SGLang] {
		encoder, _ := m.sglangEncoder()
		c.encoded = encoder != nil
	}
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
	fields = dict(kv{"messages", jinja.List(c.list)})
	if err := rules.options(in, fields, c.encoded); err != nil {
		return nil, "", err
	}
	return fields, "", c.tools(in, fields)
}

func (c *anthropicChat) add(msg *jinja.Dict) { c.list = append(c.list, jinja.FromDict(msg)) }

// system adds the system message: the system field and, if mergeSystem, the messages of that role.
func (c *anthropicChat) system(in input, messages []jinja.Value) error {
	v, err := in.value(body.FieldSystem)
	if err != nil {
		return err
	}
	texts := blockTexts(v, c.systemBlock)
	if text, ok := v.AsString(); ok && (c.blankSystem || strings.TrimFunc(text, pythonSpace) != "") {
		texts = []string{text}
	}
	for i := range messages {
		if msg, _ := messages[i].AsDict(); c.merge && textAt(msg, "role") == roleSystem {
			texts = append(texts, c.systemTexts(member(msg, "content"))...)
		}
	}
	if text := strings.Join(texts, c.separator); text != "" {
		c.add(chatMessage(roleSystem, jinja.String(text)))
	}
	return nil
}

// systemTexts returns the texts of a system message's content.
func (c *anthropicChat) systemTexts(content jinja.Value) []string {
	if text, ok := content.AsString(); ok {
		if text = c.systemMessage(text); text == "" {
			return nil
		}
		return []string{text}
	}
	return blockTexts(content, c.systemMessage)
}

// blockTexts returns the texts of a list of blocks after clean, without empty ones.
func blockTexts(v jinja.Value, clean func(string) string) (texts []string) {
	blocks, _ := v.AsList()
	for i := range blocks {
		if d, _ := blocks[i].AsDict(); textAt(d, "type") == "text" {
			if text := clean(textAt(d, "text")); text != "" {
				texts = append(texts, text)
			}
		}
	}
	return texts
}

// withoutBilling drops a text that starts with Claude Code's billing header.
func withoutBilling(text string) string {
	if strings.HasPrefix(text, billingHeader) {
		return ""
	}
	return text
}

func (c *anthropicChat) message(v jinja.Value) error {
	msg, _ := v.AsDict()
	role, content := textAt(msg, "role"), member(msg, "content")
	blocks, isList := content.AsList()
	text, isText := content.AsString()
	switch {
	case role != roleUser && role != roleAssistant && role != roleSystem:
		return refuse("messages.role: Input should be 'user', 'assistant' or 'system'")
	case !isList && !isText:
		return refuse("messages.content: Input should be a valid string or list")
	case role == roleSystem && (c.merge || !c.systemTurns):
		for i := range blocks {
			d, _ := blocks[i].AsDict()
			if kind := textAt(d, "type"); kind == "tool_addition" || kind == "tool_removal" {
				c.partial = "tools are added or removed among the messages"
			}
		}
		if text := strings.Join(c.systemTexts(content), c.separator); text != "" && !c.merge {
			c.add(chatMessage(roleSystem, jinja.String(text)))
		}
		return nil
	case isText:
		c.add(chatMessage(role, jinja.String(text)))
		return nil
	}
	return c.content(role, blocks)
}

// thoughtsAs has the field of thoughts and what stands between them, by anthropicChat.encoded.
var thoughtsAs = map[bool]struct{ field, between string }{true: {"reasoning_content", "\n"}, false: {"reasoning", ""}}

// content adds the message of a list of content blocks. Tool results become separate messages.
func (c *anthropicChat) content(role string, blocks []jinja.Value) error {
	var parts, calls []jinja.Value
	var thoughts []string
	for i := range blocks {
		d, _ := blocks[i].AsDict()
		kind := textAt(d, "type")
		if c.blocks != nil && !slices.Contains(c.blocks, kind) {
			return refuse("messages.content.type: unknown block '%s'", kind)
		}
		switch kind {
		case "text":
			if text, has, _ := textOf(d, "text"); text != "" || has && c.emptyText {
				parts = append(parts, textPart(text))
			}
		case "image":
			if c.hasImage(d) {
				parts = append(parts, imagePart())
			}
		case "search_result":
			if text := searchText(d); text != "" {
				parts = append(parts, textPart(text))
			}
		case "thinking":
			if text, has, _ := textOf(d, "thinking"); has && c.reasoning || text != "" && c.encoded && role == roleAssistant {
				thoughts = append(thoughts, text)
			}
		case "redacted_thinking":
			if !c.reasoning && role == roleAssistant {
				return refuse("Anthropic redacted_thinking history is not supported")
			}
		case "tool_use":
			arguments := member(d, "input")
			if !arguments.Truth() {
				arguments = jinja.FromDict(nil)
			}
			raw, err := jinja.AppendJSON(nil, arguments, jinja.JSONOptions{EnsureASCII: true})
			if err != nil {
				return err
			}
			calls = append(calls, functionCall(textAt(d, "id"), textAt(d, "name"), string(raw)))
		case "tool_result":
			parts = c.result(c, role, d, parts)
		}
	}
	msg := dict(kv{"role", jinja.String(role)})
	if thoughts != nil {
		as := thoughtsAs[c.encoded]
		msg.Set(as.field, join(thoughts, as.between))
	}
	if calls != nil {
		msg.Set("tool_calls", jinja.List(calls))
	}
	if parts != nil {
		msg.Set("content", loneText(parts))
	}
	if parts != nil || role != roleUser {
		c.add(msg)
	}
	return nil
}

// loneText returns the text of a single text part, or else the list.
func loneText(parts []jinja.Value) jinja.Value {
	if len(parts) == 1 {
		if d, _ := parts[0].AsDict(); textAt(d, "type") == "text" {
			return member(d, "text")
		}
	}
	return jinja.List(parts)
}

func imagePart() jinja.Value {
	return object(kv{"type", jinja.String("image_url")}, kv{"image_url", object(kv{"url", jinja.String("data:")})})
}

// hasImage reports whether an image block has a source that names an image.
func hasImage(block *jinja.Dict) bool {
	source := dictAt(block, "source")
	if textAt(source, "type") == "base64" {
		return textAt(source, "data") != ""
	}
	return textAt(source, "url") != ""
}

// referencePart returns the part of a tool reference; ok is false if it names no tool.
func referencePart(d *jinja.Dict) (part jinja.Value, ok bool) {
	name := cmp.Or(textAt(d, "tool_name"), textAt(d, "name"))
	return object(kv{"type", jinja.String("tool_reference")}, kv{"name", jinja.String(name)}), name != ""
}

func toolMessage(id string, content jinja.Value) *jinja.Dict {
	return dict(kv{"role", jinja.String(roleTool)}, kv{"tool_call_id", jinja.String(id)}, kv{"content", content})
}

// vllmToolResult adds a tool result in a user message before that message: a tool message, a user
// message with the result's images, and a tool message with its references.
func vllmToolResult(c *anthropicChat, role string, d *jinja.Dict, parts []jinja.Value) []jinja.Value {
	text, items := textAt(d, "content"), []jinja.Value(nil)
	if list, ok := member(d, "content").AsList(); ok {
		items = list
	}
	if role != roleUser {
		if len(items) > 0 {
			c.partial = "a tool's result in the assistant's message"
		}
		return append(parts, textPart("Tool result: "+text))
	}
	var texts []string
	var images, references []jinja.Value
	for i := range items {
		item, _ := items[i].AsDict()
		switch textAt(item, "type") {
		case "text":
			texts = append(texts, textAt(item, "text"))
		case "image":
			images = append(images, imagePart())
		case "tool_reference":
			if part, ok := referencePart(item); ok {
				references = append(references, part)
			}
		}
	}
	id := textAt(d, "tool_use_id")
	c.add(toolMessage(id, jinja.String(text+strings.Join(texts, "\n"))))
	if images != nil {
		c.add(chatMessage(roleUser, jinja.List(images)))
	}
	if references != nil {
		c.add(toolMessage(id, jinja.List(references)))
	}
	return parts
}

// sglangToolResult adds a tool result in a user message after the preceding parts: a tool message
// for each run of parts of the same kind.
func sglangToolResult(c *anthropicChat, role string, d *jinja.Dict, parts []jinja.Value) []jinja.Value {
	contents, text := resultContents(member(d, "content"))
	if role != roleUser {
		return append(parts, textPart("Tool result: "+text))
	}
	if parts != nil {
		c.add(chatMessage(roleUser, loneText(parts)))
	}
	id := cmp.Or(textAt(d, "tool_use_id"), textAt(d, "id"))
	for _, v := range contents {
		c.add(toolMessage(id, v))
	}
	return nil
}

// resultContents returns the contents of the tool messages for a result, and the result's text.
func resultContents(content jinja.Value) (contents []jinja.Value, text string) {
	items, isList := content.AsList()
	if !isList {
		text, _ = content.AsString()
		return []jinja.Value{jinja.String(text)}, text
	}
	var texts []string
	var group []jinja.Value
	references := false // the current group consists of references
	add := func(part jinja.Value, reference bool) {
		if group != nil && references != reference {
			contents, group = append(contents, loneText(group)), nil
		}
		group, references = append(group, part), reference
	}
	for i := range items {
		d, _ := items[i].AsDict()
		s := textAt(d, "text")
		switch textAt(d, "type") {
		case "search_result":
			s = searchText(d)
			fallthrough
		case "text":
			if s != "" {
				texts = append(texts, s)
				add(textPart(s), false)
			}
		case "image":
			if hasImage(d) {
				add(imagePart(), false)
			}
		case "tool_reference":
			if part, ok := referencePart(d); ok {
				add(part, true)
			}
		}
	}
	if group == nil {
		return []jinja.Value{jinja.String("")}, ""
	}
	return append(contents, loneText(group)), strings.Join(texts, "\n")
}

// searchText is vLLM's _text_from_search_result.
func searchText(d *jinja.Dict) string {
	source := textAt(d, "source")
	if inner := dictAt(d, "source"); inner != nil {
		if source = textAt(inner, "url"); source == "" {
			source = textAt(inner, "text")
		}
	}
	var lines []string
	if title := textAt(d, "title"); title != "" {
		lines = append(lines, "Title: "+title)
	}
	if source != "" {
		lines = append(lines, "Source: "+source)
	}
	if content, ok := member(d, "content").AsString(); ok {
		lines = append(lines, "Content: "+content)
	} else if texts := blockTexts(member(d, "content"), func(text string) string { return text }); texts != nil {
		lines = append(lines, "Content: "+strings.Join(texts, "\n"))
	}
	return strings.Join(lines, "\n")
}

// vllmAnthropicOptions copies the options that vLLM passes on. The effort is
// output_config.effort, or none if thinking is disabled.
func vllmAnthropicOptions(in input, fields *jinja.Dict, _ bool) error {
	if err := in.copyTo(fields, body.FieldChatTemplateKwargs, body.FieldKVTransferParams); err != nil {
		return err
	}
	effort, ok := body.TextOf(body.Member(in.Get("output_config"), "effort"))
	if body.Text(body.Member(in.Get("thinking"), "type")) == "disabled" {
		effort, ok = "none", true
	}
	if ok {
		fields.Set("reasoning_effort", jinja.String(effort))
	}
	return nil
}

func sglangAnthropicOptions(in input, fields *jinja.Dict, encoded bool) error {
	switch kind := body.Text(body.Member(in.Get("thinking"), "type")); {
	case kind == "":
	case encoded:
		fields.Set("chat_template_kwargs", object(kv{"thinking", jinja.Bool(kind != "disabled")}))
	case kind != "disabled":
		return guess("Anthropic thinking is not supported for models without a reasoning parser")
	}
	if effort := body.Text(body.Member(in.Get("output_config"), "effort")); effort != "" {
		if effort == "xhigh" {
			effort = "max"
		}
		fields.Set("reasoning_effort", jinja.String(effort))
	}
	return nil
}

// tools sets tools and tool_choice.
func (c *anthropicChat) tools(in input, fields *jinja.Dict) error {
	tools, _, err := in.listOf(body.FieldTools)
	if err != nil {
		return err
	}
	choice, err := in.dictOf(body.FieldToolChoice)
	if err != nil {
		return err
	}
	functions := make([]jinja.Value, 0, len(tools))
	for i := range tools {
		d, _ := tools[i].AsDict()
		if c.customTools && slices.ContainsFunc(sglangServerTools, func(prefix string) bool { return strings.HasPrefix(textAt(d, "type"), prefix) }) {
			continue
		}
		schema := dictAt(d, "input_schema")
		if schema == nil {
			return refuse("tools.input_schema: Field required")
		}
		if _, ok := schema.Get("type"); !ok {
			schema = schema.Clone()
			schema.Set("type", jinja.String("object"))
		}
		functions = append(functions, c.tool(d, jinja.FromDict(schema)))
	}
	if len(functions) == 0 { // engines check an empty list before adding to it
		return nil
	}
	chosen := jinja.String("auto")
	switch textAt(choice, "type") {
	case "any":
		chosen = jinja.String("required")
	case "none":
		chosen = jinja.String("none")
	case "tool":
		chosen = object(kv{"type", jinja.String("function")}, kv{"function", object(kv{"name", member(choice, "name")})})
	}
	fields.Set("tools", jinja.List(functions))
	fields.Set("tool_choice", chosen)
	return nil
}

// sglangServerTools are prefixes of the types of tools that Anthropic's servers execute (SGLang's _tool_discriminator).
var sglangServerTools = []string{"web_search_", "computer_", "bash_", "text_editor_"}

// sglangAnthropicTool includes strict and description even if the request lacks them.
func sglangAnthropicTool(d *jinja.Dict, schema jinja.Value) jinja.Value {
	strict := member(d, "strict")
	if strict.IsNone() {
		strict = jinja.Bool(false)
	}
	return object(kv{"type", jinja.String("function")}, kv{"function", object(kv{"name", jinja.String(textAt(d, "name"))},
		kv{"description", jinja.String(textAt(d, "description"))}, kv{"parameters", schema}, kv{"strict", strict})},
		kv{"defer_loading", member(d, "defer_loading")})
}

// turns returns a conversation that has the system message late after its first turn. Engines render it once to detect
// how a template handles that.
func turns(late string) *jinja.Dict {
	turn := func(role, text string) jinja.Value { return jinja.FromDict(chatMessage(role, jinja.String(text))) }
	return dict(kv{"messages", jinja.List([]jinja.Value{turn(roleSystem, "t"), turn(roleUser, "t"), turn(roleSystem, late), turn(roleUser, "t")})},
		kv{"add_generation_prompt", jinja.Bool(false)})
}

// systemFirst reports whether a template raises at a system message after the first turn. vLLM's environment for this
// check lacks the functions of transformers, so a template that asks for the date raises too.
func (t *template) systemFirst() bool {
	if t.dated && !strings.Contains(t.source, "strftime_now is defined") {
		return true
	}
	_, err := t.compiled.Render(nil, turns("t"), jinja.Env{Now: time.Unix(0, 0).UTC()})
	return err != nil
}

// showsInlineSystem reports whether a template prints a system message after the first turn, as SGLang detects it.
func (t *template) showsInlineSystem() bool {
	const sentinel = "__sglang_inline_system_sentinel__"
	out, err := t.compiled.Render(nil, turns(sentinel), jinja.Env{Now: time.Unix(0, 0).UTC()})
	return err == nil && strings.Contains(string(out), sentinel)
}
