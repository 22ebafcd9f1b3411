package shape

import (
	"bytes"
	"context"
	"errors"
	"slices"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/encoders"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// vLLM 0.32.0 for models whose prompts it encodes in code: vllm/renderers and vllm/entrypoints/openai/parser/harmony_utils.py.

// vllmEncoded follows /v1/chat/completions, or /tokenize, for a model with an encoder.
func (m *Model) vllmEncoded(in input, tools []jinja.Value, tokenize bool) (*plan, error) {
	p := &plan{encoder: m.encoder, stop: in.stop}
	form := m.encoder.Traits().Messages
	kind, message := shapeValidated, func(v jinja.Value) (jinja.Value, error) { return vllmValidated(in.stop, v) }
	if form != encoders.Validated {
		if form == encoders.Original {
			if err := withoutTemplate(in, tokenize); err != nil {
				return nil, err
			}
		}
		if in.Has(body.FieldChatTemplate) || in.Has(body.FieldChatTemplateKwargs) {
			if _, err := m.templateFor(in, false); err != nil && !errors.Is(err, ErrNoTemplate) {
				return nil, err
			}
		}
		shape := vllmShape{openai: form == encoders.Parts, references: form == encoders.Parts, original: form == encoders.Original || form == encoders.Read, read: form == encoders.Read, converted: in.origin == body.Responses, legacy: !tokenize, refuse: func(kind string) error { return m.refuseMedia(kind, in.profile) }, p: p}
		kind, message = shape.kind(), shape.message
	} else if raw := in.Raw(body.FieldChatTemplate); given(raw) && raw[0] != '"' {
		return nil, refuse("chat_template: input should be a valid string")
	}
	args, err := vllmArguments(in, tokenize)
	if err != nil {
		return nil, err
	}
	p.chat = &encoders.Chat{Tools: tools, Args: args, Now: m.options.Now()}
	if p.chat.Effort, err = vllmEffort(in); err != nil {
		return nil, err
	}
	if tokenize {
		p.chat.Effort = ""
	}
	if p.chat.Messages, err = m.shapeMessages(in, kind, p, message); err != nil {
		return nil, err
	}
	if err = asWritten(in, p.chat, form, tokenize); err != nil {
		return nil, err
	}
	if ids, err := m.forwardedIDs(in); err != nil || ids != nil && !p.hasMedia() {
		return &plan{ids: ids}, err
	}
	if form == encoders.Validated {
		return p, nil // nothing truncates the prompt
	}
	if v, has := args.Get("tools"); has {
		if p.chat.Tools, has = v.AsList(); !has {
			return nil, refuse("tools: input should be a valid list")
		}
	}
	for _, key := range [...]string{"messages", "conversation"} {
		if _, has := args.Get(key); has && m.encoder.Traits().Name != "inkling" { // whose renderer reads those that it knows
			return nil, refuse("apply_chat_template() got multiple values for keyword argument '%s'", key)
		}
	}
	if p.addSpecial, err = in.flag(body.FieldAddSpecialTokens, false); err != nil {
		return nil, err
	}
	if !tokenize {
		err = m.vllmTruncation(in, p)
	}
	return p, err
}

// asWritten finishes the messages for encoders that take them as the client wrote them.
func asWritten(in input, c *encoders.Chat, form encoders.Form, tokenize bool) (err error) {
	switch {
	case form != encoders.Original && form != encoders.Read || in.origin == body.Responses:
	case tokenize: // vLLM's /tokenize fails on most messages with calls or leaves them out, and reads thoughts in another way than chats
		called := func(v jinja.Value) bool { msg, _ := v.AsDict(); return !member(msg, "tool_calls").IsNone() }
		if bytes.Contains(in.Body, []byte("reasoning_content")) || slices.ContainsFunc(c.Messages, called) {
			return encoders.ErrMissing
		}
	case form == encoders.Original:
		c.Messages, err = withShortIDs(c.Messages)
	}
	return err
}

// withoutTemplate refuses fields that vLLM does not accept for a model in Mistral's format. The other APIs accept
// template arguments, some of which change the prompt.
func withoutTemplate(in input, tokenize bool) error {
	kwargs, err := in.dictOf(body.FieldChatTemplateKwargs)
	switch {
	case err != nil:
		return err
	case !tokenize && in.origin != body.Responses:
		if kwargs != nil || given(in.Raw(body.FieldChatTemplate)) {
			return refuse("chat_template is not supported for Mistral tokenizers. (parameter=chat_template)")
		}
	case kwargs.Len() > 0:
		return encoders.ErrMissing
	}
	return nil
}

// withShortIDs cuts the ids of calls to their last nine characters, as mistral-common requires. It refuses a result whose id is null.
func withShortIDs(messages []jinja.Value) ([]jinja.Value, error) {
	const most = 9
	short := func(v jinja.Value, key string) jinja.Value {
		d, _ := v.AsDict()
		if id := []rune(textAt(d, key)); len(id) > most {
			return with(d, key, jinja.String(string(id[len(id)-most:])))
		}
		return v
	}
	out := slices.Clone(messages)
	for i := range out {
		msg, _ := out[i].AsDict()
		switch textAt(msg, "role") {
		case roleTool:
			if id, has := msg.Get("tool_call_id"); has && id.IsNone() {
				return nil, refuse("object of type 'NoneType' has no len()")
			}
			out[i] = short(out[i], "tool_call_id")
		case roleAssistant:
			calls, ok := member(msg, "tool_calls").AsList()
			if !ok {
				continue
			}
			calls = slices.Clone(calls)
			for j := range calls {
				calls[j] = short(calls[j], "id")
			}
			out[i] = with(msg, "tool_calls", jinja.List(calls))
		}
	}
	return out, nil
}

// vllmArguments returns the chat template arguments that vLLM takes from a request: all except null and "auto".
func vllmArguments(in input, tokenize bool) (*jinja.Dict, error) {
	kwargs, err := in.dictOf(body.FieldChatTemplateKwargs)
	if err != nil {
		return nil, err
	}
	args := new(jinja.Dict)
	kwargs.Range(func(k, v jinja.Value) bool {
		if s, _ := v.AsString(); !v.IsNone() && s != "auto" {
			key, _ := k.AsString()
			args.Set(key, v)
		}
		return true
	})
	if tokenize {
		return args, nil
	}
	if level, err := vllmEffort(in); err != nil {
		return nil, err
	} else if level != "" {
		args.Set("reasoning_effort", jinja.String(level))
		if _, given := kwargs.Get("enable_thinking"); !given {
			args.Set("enable_thinking", jinja.Bool(level != "none"))
		}
	}
	documents, given, err := in.listOf(body.FieldDocuments)
	if list := jinja.List(documents); given && listsDicts(list) {
		args.Set("documents", list)
	} else if given {
		err = refuse("documents: input should be a list of valid dictionaries")
	}
	return args, err
}

// encoded appends the prompt of an encoder.
func (m *Model) encoded(ctx context.Context, dst []byte, p *plan) ([]byte, error) {
	env := jinja.RequestEnv(p.size)
	p.chat.Limit, p.chat.Stop = 2*env.MaxOutput, ctx.Done()
	out, err := p.encoder.Append(dst, p.chat)
	if refusal, ok := errors.AsType[*encoders.Refusal](err); ok {
		return dst, refuseWith(refusal.Status, refusal.Reason)
	}
	return out, err
}

// In caches, markedSpace distinguishes marked text from plain text, ownSpace the text for a tokenizer in Mistral's
// format from that for the folder's other one, and sglangSpace the text for SGLang.
const (
	markedSpace = 2
	ownSpace    = 4
	sglangSpace = 8
)

// vllmValidated converts a client's message as vLLM's request model does, to the form that encoders take. vLLM has two
// models for a message. OpenAI's, for known roles, reads a list of parts when they are used. vLLM's own reads them
// immediately and is used if it recognizes more members.
func vllmValidated(stop <-chan struct{}, v jinja.Value) (jinja.Value, error) {
	msg, role, content, err := vllmHead(v)
	if err != nil {
		return v, err
	}
	id, hasID, idOK := textOf(msg, "tool_call_id")
	if role == roleTool && !idOK {
		return v, refuse("messages.tool_call_id: input should be a valid string")
	}
	out := dict(kv{"role", jinja.String(role)}, kv{"call_id", jinja.String(id)})
	known := role == roleAssistant || role == roleDeveloper || role == roleSystem || role == roleUser || role == roleTool && hasID
	own, err := validatedOwn(stop, msg, known, true)
	if err != nil {
		return v, err
	}
	parts, _ := content.AsList()
	if err := validatedContent(out, content, known, readLate(msg, parts, known, own)); err != nil {
		return v, err
	}
	calls, err := validatedCalls(msg, role)
	if err != nil {
		return v, err
	}
	out.Set("calls", jinja.List(calls))
	out.Set("reasoning", firstOf(msg, "reasoning", "reasoning_content"))
	return jinja.FromDict(out), nil
}

// validatedOwn reports whether vLLM's own model accepts the members that OpenAI's lacks. If not, a message of an
// unknown role is refused. legacy: see vllmShape.
func validatedOwn(stop <-chan struct{}, msg *jinja.Dict, known, legacy bool) (bool, error) {
	if !known {
		if _, _, err := listIn(msg, "tool_calls", func(v jinja.Value) (jinja.Value, error) { return vllmCall(stop, v) }); err != nil {
			return false, err
		}
	}
	own := true
	for _, key := range [...]string{"reasoning", "reasoning_content", "task", "tool_call_id"} {
		_, _, ok := textOf(msg, key)
		own = own && (ok || key == "reasoning_content" && (!legacy || !member(msg, "reasoning").IsNone()))
	}
	tools := member(msg, "tools")
	items, ok := tools.AsList()
	own = own && (ok || tools.IsNone()) && !slices.ContainsFunc(items, func(v jinja.Value) bool {
		d, _ := v.AsDict()
		_, has, _ := textOf(dictAt(d, "function"), "name")
		return !has
	})
	_, named := msg.Get("name")
	if _, isText := member(msg, "name").AsString(); named && !isText {
		own = false
		if textAt(msg, "role") != roleTool { // OpenAI's model of a tool's message has no name
			return own, refuse("messages.name: input should be a valid string")
		}
	}
	_, hasContent := msg.Get("content")
	switch {
	case !own && (!known || !hasContent && textAt(msg, "role") != roleAssistant):
		return own, refuse("messages: input should be a valid message")
	case !own && textAt(msg, "role") == roleAssistant:
		return own, vllmWithoutContent(msg)
	}
	return own, nil
}

// readLate reports whether vLLM uses OpenAI's model of a message, which reads the parts of its content when they are used.
func readLate(msg *jinja.Dict, parts []jinja.Value, known, own bool) bool {
	if !known || !own {
		return known
	}
	if textAt(msg, "role") == roleAssistant && vllmWithoutContent(msg) != nil {
		return false
	}
	more := 0 // members that vLLM's own model recognizes in addition
	role := textAt(msg, "role")
	for _, key := range [...]string{"reasoning", "reasoning_content", "task", "tools", "tool_call_id", "name"} {
		if v, has := msg.Get(key); has && (key != "tool_call_id" || role != roleTool) && (key != "name" || role == roleTool) && (key != "reasoning_content" || !v.IsNone()) {
			more++
		}
	}
	calls, _ := member(msg, "tool_calls").AsList()
	if _, has := msg.Get("tool_calls"); len(calls) > 0 || role != roleAssistant && has {
		more++
	}
	if role == roleAssistant {
		for _, key := range [...]string{"audio", "function_call", "refusal"} {
			if v, has := msg.Get(key); has {
				d, _ := v.AsDict()
				more -= 1 + min(d.Len(), 2)
			}
		}
	}
	for i := range parts {
		_, bare := parts[i].AsString()
		d, isDict := parts[i].AsDict()
		if !bare && !isDict {
			return true
		}
		more += validatedFields(d)
	}
	return more <= 0
}

// knownParts are the types of parts that OpenAI's models of messages accept by role.
var knownParts = map[string][]string{roleUser: {"text", "image_url", "input_audio", "file"}, roleAssistant: {"text", "refusal"}, roleTool: {"text"},
	roleSystem: {"text"}, roleDeveloper: {"text"}}

// knownPart reports whether OpenAI's model of a role's message accepts a part.
func knownPart(part *jinja.Dict, role string) bool {
	kind := textAt(part, "type")
	return slices.Contains(knownParts[role], kind) && validatedFields(part) > 0 && (kind != "text" && kind != "refusal" || !member(part, kind).IsNone())
}

// validatedContent sets the members flat, texts and refused.
func validatedContent(out *jinja.Dict, content jinja.Value, known, late bool) error {
	flat, texts, refused := jinja.None(), []jinja.Value{}, jinja.None()
	parts, isList := content.AsList()
	if d, ok := content.AsDict(); ok {
		if !known {
			return refuse("messages.content: input should be a valid string or a list of parts")
		}
		parts, isList = nil, true // Python iterates over the keys
		if d.Len() > 0 {
			refused = jinja.String("content: input should be a valid dictionary")
		}
	}
	text, isText := content.AsString()
	switch {
	case isText:
		flat, texts = content, append(texts, jinja.String(text))
	case content.IsNone() || content.IsUndefined():
		texts = append(texts, jinja.String(""))
	case !isList:
		return refuse("messages.content: input should be a valid string or a list of parts")
	default:
		if slices.ContainsFunc(parts, func(v jinja.Value) bool { return v.Kind() != jinja.KindString && v.Kind() != jinja.KindDict }) && !known {
			return refuse("messages.content: input should be a valid list of parts")
		}
		if late {
			for i := range parts {
				d, _ := parts[i].AsDict()
				if !knownPart(d, textAt(out, "role")) {
					refused = jinja.String("content: input should be a valid dictionary")
				}
				texts = append(texts, jinja.String(textAt(d, "text")))
			}
			break
		}
		flat, texts, refused = validatedParts(parts)
	}
	out.Set("flat", flat)
	out.Set("texts", jinja.List(texts))
	out.Set("refused", refused)
	return nil
}

// validatedParts returns the joined text of parts, None if there is none, and their texts. An empty reason in refused
// means a server error.
func validatedParts(parts []jinja.Value) (flat jinja.Value, texts []jinja.Value, refused jinja.Value) {
	flat, refused = jinja.None(), jinja.None()
	joined, has := []byte(nil), false
	for i := range parts {
		if s, ok := parts[i].AsString(); ok {
			joined, has = append(joined, s...), true
			if refused.IsNone() {
				refused = jinja.String("")
			}
			continue
		}
		d, _ := parts[i].AsDict()
		v, present := d.Get("text")
		s, ok := v.AsString()
		switch {
		case ok:
			joined, has = append(joined, s...), true
		case present && !v.IsNone():
			flat = jinja.Bool(false) // the engine fails to join it
		}
		if present && !ok && refused.IsNone() {
			refused = jinja.String("text: input should be a valid string")
		}
		texts = append(texts, jinja.String(s))
	}
	if has && flat.IsNone() {
		flat = jinja.String(string(joined))
	}
	return flat, texts, refused
}

// ownParts maps the types of parts of vLLM's own model to the member that must be text; "" for none.
var ownParts = map[string]string{"text": "text", "refusal": "refusal", "thinking": "thinking", "tool_reference": "", "prompt_embeds": "data",
	"image_embeds": "", "audio_embeds": "", "video_embeds": ""}

// validatedFields returns how many members of a part vLLM's own part models recognize: the type, the member that it
// names and the first of an inner object, or one member of a part without a known type.
func validatedFields(part *jinja.Dict) int {
	kind := textAt(part, "type")
	if key, ok := ownParts[kind]; ok {
		if _, has, _ := textOf(part, key); has || key == "" {
			return 2
		}
	}
	switch inner := dictAt(part, kind); kind {
	case "image_url", "audio_url", "video_url":
		if _, has, _ := textOf(inner, "url"); has {
			return 3
		}
	case "input_audio":
		if _, has, _ := textOf(inner, "data"); has {
			return 3
		}
	case "file":
		if inner != nil {
			return 3
		}
		return 0
	}
	for _, key := range [...]string{"uuid", "image_url", "audio_url", "video_url"} {
		if _, has := part.Get(key); has {
			if _, _, ok := textOf(part, key); ok {
				return 1
			}
		}
	}
	return 0
}

// validatedCalls returns the tool calls of a message as objects {id, name, arguments}. A call of a
// custom tool has no name for the encoders.
func validatedCalls(msg *jinja.Dict, role string) (out []jinja.Value, err error) {
	v, has := msg.Get("tool_calls")
	if !has {
		return nil, nil
	}
	if v.IsNone() && role != roleAssistant {
		return nil, encoders.ErrMissing // refused, but for the first system message, of which only the content is read
	}
	calls, ok := v.AsList()
	if !ok && v.Truth() && role == roleAssistant {
		return nil, refuse("messages.tool_calls: input should be a valid list")
	}
	for i := range calls {
		call, _ := calls[i].AsDict()
		id, ok, _ := textOf(call, "id")
		name, arguments := jinja.None(), jinja.String("")
		kind := textAt(call, "type")
		inner, said := dictAt(call, kind), map[string]string{"function": "arguments", "custom": "input"}[kind]
		_, hasName, _ := textOf(inner, "name")
		_, hasSaid, _ := textOf(inner, said)
		ok = ok && said != "" && hasName && hasSaid
		if kind == "function" {
			name, arguments = member(inner, "name"), member(inner, said)
		}
		if !ok && role != roleAssistant {
			return nil, encoders.ErrMissing // OpenAI's model of such a message keeps them as they are
		} else if !ok {
			return nil, refuse("messages.tool_calls.%d: input should be a valid tool call", i)
		}
		out = append(out, object(kv{"id", jinja.String(id)}, kv{"name", name}, kv{"arguments", arguments}))
	}
	return out, nil
}
