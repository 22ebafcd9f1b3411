package shape

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/encoders"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// vllmShape converts a client's message to the one that vLLM passes to the template.
type vllmShape struct {
	openai bool // the template iterates over content parts
	// legacy: reasoning_content in the history is an alias of reasoning. /tokenize only supports the latter.
	legacy bool
	// references: the encoder gets tool_reference parts as they are.
	references bool
	// converted reports that the messages were made from a response's items, which no request model validates.
	converted bool
	// original reports that the encoder gets contents as the client wrote them.
	original bool
	// read reports that the engine refuses contents and calls that its request model has not read yet.
	read bool
	// refuse refuses a part of a kind that the model does not accept.
	refuse func(kind string) error
	p      *plan
}

func (s *vllmShape) kind() shapeKind {
	k := shapeKind(0)
	for _, trait := range [...]struct {
		has  bool
		kind shapeKind
	}{
		{s.openai, shapeOpenAI}, {s.legacy, shapeReasoning}, {s.references, shapeReferences}, {s.converted, shapeConverted}, {s.original, shapeOriginal},
	} {
		if trait.has {
			k |= trait.kind
		}
	}
	return k
}

// Roles of messages.
const (
	roleAssistant = "assistant"
	roleDeveloper = "developer"
	roleSystem    = "system"
	roleTool      = "tool"
	roleUser      = "user"
)

// messageHead returns a client's message and its role.
func messageHead(v jinja.Value) (*jinja.Dict, string, error) {
	msg, ok := v.AsDict()
	if !ok {
		return nil, "", refuse("messages: input should be a valid dictionary")
	}
	role, has, _ := textOf(msg, "role")
	if !has {
		return nil, "", refuse("messages.role: input should be a valid string")
	}
	return msg, role, nil
}

// vllmHead returns a client's message with its role and content, which only an assistant may leave null.
func vllmHead(v jinja.Value) (msg *jinja.Dict, role string, content jinja.Value, err error) {
	if msg, role, err = messageHead(v); err != nil {
		return nil, "", v, err
	}
	content, given := msg.Get("content")
	switch {
	case given && content.IsNone() && role != roleAssistant:
		err = refuse("messages.content: input should be a valid string")
	case role == roleAssistant && content.IsNone():
		err = vllmWithoutContent(msg)
	}
	return msg, role, content, err
}

func (s *vllmShape) message(v jinja.Value) (jinja.Value, error) {
	msg, role, content, err := vllmHead(v)
	if err != nil {
		return v, err
	}
	known := slices.Contains(vllmRoles, role) && (role != roleTool || member(msg, "tool_call_id").Kind() == jinja.KindString)
	own, err := validatedOwn(s.p.stop, msg, known, s.legacy)
	if err != nil {
		return v, err
	}
	if parts, ok := content.AsList(); ok && !s.converted && readLate(msg, parts, known, own) {
		for i := range parts {
			if part, _ := parts[i].AsDict(); !knownPart(part, role) {
				return v, refuse("messages.content.%d: input should be a valid part", i)
			}
		}
	}
	if s.read && !s.converted {
		parts, isList := content.AsList()
		_, isDict := content.AsDict()
		if (isList || isDict) && readLate(msg, parts, known, own) {
			return v, guess("cannot pickle 'pydantic_core._pydantic_core.ValidatorIterator' object") // other versions of pydantic may
		}
	}
	original := content
	if role == roleSystem {
		content = withoutBillingHeader(content)
	}
	out := jinja.NewDict(6)
	out.Set("role", jinja.String(role))
	body, err := s.content(content, role)
	if err != nil {
		return v, err
	}
	out.Set("content", body)
	if s.original {
		out.Set("content", withMarks(original))
		if parts, ok := original.AsList(); ok && !s.converted && readLate(msg, parts, known, own) {
			out.Set("content", jinja.List(nil)) // vLLM has read them once before, and then none are left
		}
	}
	switch role {
	case roleAssistant:
		if err := s.assistant(out, msg); err != nil {
			return v, err
		}
	case roleTool:
		if id, ok := msg.Get("tool_call_id"); ok {
			out.Set("tool_call_id", id)
		}
	}
	for _, key := range [...]string{"name", "task"} {
		if text, has, _ := textOf(msg, key); has {
			out.Set(key, jinja.String(text))
		}
	}
	if role == roleDeveloper || s.read {
		out.Set("tools", member(msg, "tools"))
	}
	if s.read {
		err = readMembers(out, msg)
	}
	return jinja.FromDict(out), err
}

// readMembers adds the members that vLLM's encoders read in addition to those of a template.
func readMembers(out, msg *jinja.Dict) error {
	if _, has, none := textOf(msg, "name"); !has && !none && member(msg, "name").Truth() {
		return encoders.ErrMissing // printed as Python does
	}
	out.Set("task", member(msg, "task"))
	for _, key := range [...]string{"response_format", "wo_eos", "content_blocks"} {
		if _, has := msg.Get(key); has {
			return encoders.ErrMissing
		}
	}
	return nil
}

// assistant adds tool calls and reasoning.
func (s *vllmShape) assistant(out, msg *jinja.Dict) error {
	calls, _, err := listIn(msg, "tool_calls", func(v jinja.Value) (jinja.Value, error) { return vllmCall(s.p.stop, v) })
	// vLLM takes an empty text or object for an empty list.
	if v := member(msg, "tool_calls"); err != nil && (v.Truth() || v.Kind() != jinja.KindString && v.Kind() != jinja.KindDict) {
		return err
	}
	if len(calls) > 0 {
		out.Set("tool_calls", jinja.List(calls))
	}
	thought, _ := msg.Get("reasoning")
	if s.legacy && (thought.IsNone() || thought.IsUndefined()) {
		thought, _ = msg.Get("reasoning_content")
	}
	if !thought.IsNone() && !thought.IsUndefined() {
		out.Set("reasoning", thought)
		out.Set("reasoning_content", thought)
	}
	return nil
}

// withMarks returns a content with marks in place of media, as for encoders.Original.
func withMarks(content jinja.Value) jinja.Value {
	parts, ok := content.AsList()
	if !ok {
		return content
	}
	out := slices.Clone(parts)
	for i := range out {
		part, _ := out[i].AsDict()
		if kind := map[string]string{"image_url": "image", "audio_url": "audio", "input_audio": "audio"}[textAt(part, "type")]; kind != "" {
			out[i] = object(kv{"type", jinja.String(kind)}, kv{"text", jinja.String(mediaMark)})
		}
	}
	return jinja.List(out)
}

// vllmWithoutContent checks an assistant message whose content is null: it must match the
// assistant's declared type, because the fallback type requires content.
func vllmWithoutContent(msg *jinja.Dict) error {
	if v, ok := msg.Get("tool_calls"); ok && v.IsNone() {
		return refuse("messages.tool_calls: Input should be iterable")
	}
	if _, _, ok := textOf(msg, "refusal"); !ok {
		return refuse("messages.refusal: Input should be a valid string")
	}
	for _, at := range [...][2]string{{"function_call", "name"}, {"function_call", "arguments"}, {"audio", "id"}} {
		if _, has, _ := textOf(dictAt(msg, at[0]), at[1]); !has && !member(msg, at[0]).IsNone() {
			return refuse("messages.%s.%s: Input should be a valid string", at[0], at[1])
		}
	}
	return nil
}

// billingHeader starts a line that Claude Code puts before its system prompt. It differs in each request, so vLLM drops it.
const billingHeader = "x-anthropic-billing-header"

// withoutBillingHeader drops that line from a text or from each text part.
func withoutBillingHeader(content jinja.Value) jinja.Value {
	if text, _ := content.AsString(); strings.HasPrefix(text, billingHeader) {
		_, text, _ = strings.Cut(text, "\n")
		return jinja.String(text)
	}
	parts, ok := content.AsList()
	if !ok {
		return content
	}
	kept := make([]jinja.Value, 0, len(parts))
	for _, v := range parts {
		text, isText := v.AsString()
		part, _ := v.AsDict()
		if textAt(part, "type") == "text" {
			text, isText, _ = textOf(part, "text")
		}
		if isText && strings.HasPrefix(text, billingHeader) {
			_, text, _ = strings.Cut(text, "\n")
			if text == "" {
				continue
			}
			if v = jinja.String(text); part != nil {
				v = with(part, "text", v)
			}
		}
		kept = append(kept, v)
	}
	return jinja.List(kept)
}

// vllmCall returns a tool call of the history: its declared keys in their order, others dropped, the arguments as an object.
func vllmCall(stop <-chan struct{}, v jinja.Value) (jinja.Value, error) {
	call, ok := v.AsDict()
	if !ok {
		return v, refuse("messages.tool_calls: input should be a valid dictionary")
	}
	id, has, _ := textOf(call, "id")
	if !has {
		return v, refuse("messages.tool_calls.id: input should be a valid string")
	}
	if kind, has, _ := textOf(call, "type"); !has || kind != "function" {
		return v, refuse("messages.tool_calls.type: input should be 'function'")
	}
	function := dictAt(call, "function")
	if function == nil {
		return v, refuse("messages.tool_calls.function: field required")
	}
	name, hasName, _ := textOf(function, "name")
	text, hasText, _ := textOf(function, "arguments")
	if !hasName || !hasText {
		return v, refuse("messages.tool_calls.function: name and arguments should be valid strings")
	}
	arguments, err := jinja.ParseJSONInto(stop, nil, []byte(text), false)
	if errors.Is(err, jinja.ErrLoneSurrogate) || errors.Is(err, jinja.ErrJSONDepth) || errors.Is(err, jinja.ErrIntDigits) {
		return v, fmt.Errorf("%w: the arguments of a call: %w", encoders.ErrMissing, err)
	}
	if _, ok := arguments.AsDict(); err != nil || !ok || strings.HasPrefix(text, "\ufeff") {
		arguments = jinja.FromDict(nil)
	}
	return object(kv{"id", jinja.String(id)}, kv{"function", object(kv{"arguments", arguments}, kv{"name", jinja.String(name)})},
		kv{"type", jinja.String("function")}), nil
}

// content flattens the parts, or wraps them if the template iterates over parts.
func (s *vllmShape) content(v jinja.Value, role string) (jinja.Value, error) {
	flatten, kept := role == roleTool, false // a tool's parts are kept if some are not texts
	before := s.p.images.count()
	var texts []string
	var front []string // media precede the texts
	wrapped := []jinja.Value{}
	add := func(text string) {
		if s.openai {
			wrapped = append(wrapped, textPart(text))
		} else if text == "" {
			return // not a part of the joined text
		}
		texts = append(texts, text)
	}
	if text, ok := v.AsString(); ok {
		if !s.openai || flatten {
			return v, nil
		}
		add(text)
	} else if parts, ok := v.AsList(); ok {
		for i := range parts {
			text, bare := parts[i].AsString()
			if bare { // if the message's type allows them
				add(text)
				continue
			}
			if hasNoText(parts[i], !s.openai) {
				continue
			}
			if d, _ := parts[i].AsDict(); s.openai && textAt(d, "type") == "tool_reference" {
				wrapped = append(wrapped, object(kv{"type", jinja.String("tool_reference")}, kv{"name", member(d, "name")}))
				kept = true
				continue
			}
			text, media, err := s.part(parts[i], s.read && !flatten || s.references && !slices.Contains(vllmRoles, role))
			if err != nil {
				return v, err
			}
			switch {
			case media && !s.openai:
				front = s.before(front, parts[i], flatten)
			case media && !flatten && !s.p.isCut() && s.p.images.add(parts[i]):
				wrapped = append(wrapped, object(kv{"type", jinja.String("image")}))
			case media:
				s.p.cutAtMedia()
				add(mediaMark)
				kept = true
			default:
				add(text)
			}
		}
	} else if d, ok := v.AsDict(); !v.IsNone() && !v.IsUndefined() && (!ok || d.Len() > 0) { // Python iterates over an empty dict
		return v, refuse("messages.content: input should be a valid string or a list of parts")
	}
	if s.openai && (!flatten || kept) {
		return jinja.List(wrapped), nil
	}
	return s.flat(front, texts, before), nil
}

// flat joins texts after the placeholders of media. The message's images are those from index before on.
func (s *vllmShape) flat(front, texts []string, before int) jinja.Value {
	if own := s.p.images.front(); own != "" && len(front) > 0 && strings.Contains(strings.Join(texts, "\n"), own) {
		s.p.images.list = s.p.images.list[:before] // vLLM takes those in the text for some of the images
		s.p.cutAtMedia()
		front = []string{mediaMark}
	}
	return join(append(front, texts...), "\n")
}

// before appends to front the placeholder that vLLM puts before a message's texts for a medium, if they contain none.
func (s *vllmShape) before(front []string, part jinja.Value, flatten bool) []string {
	if own := s.p.images.front(); own != "" && !flatten && !s.p.isCut() && s.p.images.add(part) {
		return append(front, own)
	}
	s.p.cutAtMedia()
	return append(front, mediaMark)
}

// vllmRoles are the roles with a declared type. Messages of other roles accept strings as parts.
var vllmRoles = []string{roleAssistant, roleDeveloper, roleSystem, roleTool, roleUser}

func textPart(text string) jinja.Value {
	return object(kv{"type", jinja.String("text")}, kv{"text", jinja.String(text)})
}

// vllmTextParts maps the types of text parts to the key of their text.
var vllmTextParts = map[string]string{"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking",
	"tool_reference": "name"}

// hasNoText reports whether vLLM skips a part: it lacks the text that its type declares or, where texts are joined, has
// one that is false in Python, such as {}.
func hasNoText(v jinja.Value, joined bool) bool {
	part, _ := v.AsDict()
	kind := textAt(part, "type")
	key, ok := vllmTextParts[kind]
	text := member(part, key)
	return ok && (text.IsNone() || joined && kind != "tool_reference" && !text.Truth())
}

// part returns the text of a part, or reports that it is media. unread: the text is not read here, so
// a value of another type is not refused.
func (s *vllmShape) part(v jinja.Value, unread bool) (text string, media bool, err error) {
	part, ok := v.AsDict()
	if !ok {
		return "", false, refuse("messages.content: input should be a valid dictionary")
	}
	kind, has, _ := textOf(part, "type")
	if !has {
		for _, key := range [...]string{"image_url", "audio_url", "video_url", "image_embeds", "audio_embeds"} {
			if _, ok := part.Get(key); ok {
				return "", true, s.refuse(key)
			}
		}
		return "", false, refuse("messages.content.type: field required")
	}
	if key, ok := vllmTextParts[kind]; ok {
		text, has, _ := textOf(part, key)
		if !has && !unread {
			return "", false, refuse("messages.content.%s: input should be a valid string", key)
		}
		return text, false, nil
	}
	if slices.Contains(vllmMedia, kind) {
		return "", true, s.refuse(kind)
	}
	return "", false, refuse("Unsupported chat content part type: '%s'.", kind)
}

// vllmMedia are the types of parts that vLLM reads as an image, audio or video.
var vllmMedia = []string{"image_url", "input_image", "image_embeds", "audio_url", "input_audio", "audio_embeds", "video_url", "video_embeds",
	"prompt_embeds"}

// withoutDeveloper does what vLLM's Hugging Face renderer does for templates that do not mention the developer role: developer
// messages become system messages and, unless a single one is then at the beginning, all of them are merged there.
func withoutDeveloper(list []jinja.Value) []jinja.Value {
	if !slices.ContainsFunc(list, func(v jinja.Value) bool { return roleOf(v) == roleDeveloper }) {
		return list
	}
	var texts []string
	converted := make([]jinja.Value, 0, len(list))
	others := make([]jinja.Value, 1, len(list)+1)
	join := false
	for i := range list {
		role := roleOf(list[i])
		if role != roleDeveloper && role != roleSystem {
			converted, others = append(converted, list[i]), append(others, list[i])
			continue
		}
		join = join || i > 0
		msg, _ := list[i].AsDict()
		msg = msg.Clone()
		msg.Set("role", jinja.String(roleSystem))
		if role == roleDeveloper {
			msg.Delete("tools")
		}
		converted = append(converted, jinja.FromDict(msg))
		content, _ := msg.Get("content")
		if text := blocksText(content, "\n"); text != "" {
			texts = append(texts, text)
		}
	}
	if !join {
		return converted
	}
	others[0] = jinja.FromDict(chatMessage(roleSystem, jinja.String(strings.Join(texts, "\n\n"))))
	return others
}

func roleOf(v jinja.Value) string {
	msg, _ := v.AsDict()
	return textAt(msg, "role")
}
