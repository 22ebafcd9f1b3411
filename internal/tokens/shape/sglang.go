package shape

import (
	"errors"
	"slices"
	"strconv"
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/encoders"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// SGLang 0.5.23: python/sglang/srt/entrypoints/openai/protocol.py (validation), serving_chat.py (template arguments),
// parser/jinja_template_utils.py (content), and the recordings.

// sglangChat follows /v1/chat/completions. For tokenize it follows /v1/tokenize, which honours add_generation_prompt
// and, if the request contains that field, does not continue a final assistant message.
func (m *Model) sglangChat(in input) (*plan, error) {
	encoder, err := m.sglangEncoder()
	if err != nil {
		return nil, err
	}
	p := &plan{encoder: encoder, stop: in.stop}
	tools, err := sglangTools(in, encoder != nil)
	if err != nil {
		return nil, err
	}
	if p.template, err = m.sglangTemplate(in, tools != nil); err != nil && (encoder == nil || !errors.Is(err, ErrNoTemplate)) {
		return nil, err
	}
	shape := sglangShape{openai: encoder == nil && p.template.sglangOpenAI, p: p, refuse: func(kind string) error {
		if in.origin == body.CountTokens { // media are ignored there
			return nil
		}
		return m.refuseMedia(kind, in.profile)
	}}
	kind := shapeSGLang
	if shape.openai {
		kind |= shapeOpenAI
	}
	if encoder != nil {
		p.chat = &encoders.Chat{Tools: tools} // so that messages are cut at media
	}
	list, err := m.shapeMessages(in, kind, p, shape.message)
	if err != nil {
		return nil, err
	}
	if in.Has(body.FieldInputIDs) {
		p.chat = nil
		p.ids, err = laxIDs(in.Raw(body.FieldInputIDs))
		return p, err
	}
	if m.sglangRewrites(in, list, p.template) || m.sglangCompletes(in, p) {
		return nil, encoders.ErrMissing
	}
	cont, err := in.flag(body.FieldContinueFinalMessage, false)
	if err != nil {
		return nil, err
	}
	add, asGiven := true, in.API == body.Tokenize && in.Has(body.FieldAddGenerationPrompt)
	if asGiven {
		if add, err = in.flag(body.FieldAddGenerationPrompt, true); err != nil {
			return nil, err
		}
		if cont && !add {
			return nil, refuse("continue_final_message needs add_generation_prompt to open the assistant turn.")
		}
		if p.addSpecial, err = in.flag(body.FieldAddSpecialTokens, false); err != nil {
			return nil, err
		}
	}
	if !asGiven || cont {
		list, p.suffix = sglangLast(list, cont)
	}
	args, effort, err := sglangArguments(in)
	switch {
	case err != nil:
		return nil, err
	case encoder != nil && asGiven:
		return nil, refuse("add_generation_prompt is supported only with a Jinja chat template.")
	case encoder != nil:
		p.chat.Messages, p.chat.Args, p.addSpecial = list, args, true
		return p, nil
	}
	if p.vars, err = m.sglangVars(p.template, args, effort); err != nil {
		return nil, err
	}
	p.vars.Set("messages", jinja.List(list))
	p.vars.Set("tools", jinja.None())
	if tools != nil {
		p.vars.Set("tools", jinja.List(tools))
		for i := range tools {
			tool, _ := tools[i].AsDict()
			p.flat = append(p.flat, member(tool, "function"))
		}
	}
	p.vars.Set("add_generation_prompt", jinja.Bool(add))
	return p, nil
}

var mediaOff = strings.Fields("Gemma3ForConditionalGeneration Llama4ForConditionalGeneration Step3VLForConditionalGeneration") // without --enable-multimodal

// sglangCompletes reports whether the tokenizer adds its BOS to a rendered chat without media: SGLang passes it on as text
// if the model accepts media (OpenAIServingChat._engine_prompt).
func (m *Model) sglangCompletes(in input, p *plan) bool {
	before, after := m.sglang.Added()
	takes, known := m.takesMedia()
	return before+after > 0 && p.encoder == nil && p.partial == "" && in.API != body.Tokenize && in.origin != body.CountTokens &&
		takes && known && (m.options.Multimodal != nil || !slices.Contains(mediaOff, m.tok.Config().Architecture))
}

func (m *Model) sglangEncoder() (encoders.Encoder, error) {
	return encoders.ForSGLang(m.tok.Config(), len(m.templates) == 0, m.options.ChatTemplate != "")
}

// sglangTemplate returns the template in chat_template_kwargs, or else the model's own.
func (m *Model) sglangTemplate(in input, tools bool) (*template, error) {
	raw := in.Member(body.FieldChatTemplateKwargs, "chat_template")
	if raw != nil && !m.options.TrustTemplates {
		return nil, refuse("Request-supplied chat_template is not allowed. Start the server with --trust-request-chat-template to permit it.")
	}
	if source, ok := body.TextOf(raw); ok && source != "" {
		return m.requestTemplate(source, in.profile)
	}
	return m.ownTemplate(tools)
}

// sglangLast removes a final assistant message, which is then continued, or turns it into a user message; only text counts.
func sglangLast(list []jinja.Value, cont bool) ([]jinja.Value, string) {
	if len(list) == 0 {
		return list, ""
	}
	at := len(list) - 1
	last, _ := list[at].AsDict()
	text, has, _ := textOf(last, "content")
	if !has || textAt(last, "role") != roleAssistant {
		return list, ""
	}
	if cont {
		return list[:at], text
	}
	list[at] = jinja.FromDict(chatMessage(roleUser, jinja.String(text)))
	return list, ""
}

// sglangRewrites reports whether SGLang renders in code instead of the template (nil with an encoder), or changes a
// request to MiniMax-M3 in code: its thinking options, and the order of several results.
func (m *Model) sglangRewrites(in input, list []jinja.Value, t *template) bool {
	is := m.tok.Config().ModelType == "minimax_m3_vl"
	for i := 1; is && i < len(list); i++ {
		if roleOf(list[i]) == roleTool && roleOf(list[i-1]) == roleTool {
			return true
		}
	}
	return m.sglangInCode(t) || is && (given(in.Get("thinking")) || given(in.Raw(body.FieldReasoning)) || given(in.Raw(body.FieldReasoningEffort)) ||
		given(in.Member(body.FieldChatTemplateKwargs, "reasoning_effort")))
}

// sglangInCode reports whether SGLang renders in code instead of the folder's template. It does so for GLM-5.3,
// recognized by the template's text and the architecture, which GLM-5 to 5.2 share (parser/python_chat_template.py).
func (m *Model) sglangInCode(t *template) bool {
	has := func(text string) bool { return t != nil && strings.Contains(t.source, text) }
	return has("[gMASK]<sop>") && has("Reasoning Effort:") && has("<arg_key>") && !has("enable_thinking") && !t.fromRequest &&
		slices.Contains([]string{"GlmMoeDsaForCausalLM", "Glm5NextForConditionalGeneration"}, m.tok.Config().Architecture)
}

// sglangArguments returns chat_template_kwargs and reasoning_effort. An effort also sets thinking and enable_thinking,
// unless the kwargs do or the effort comes from a message.
func sglangArguments(in input) (args *jinja.Dict, effort jinja.Value, err error) {
	kwargs, err := in.dictOf(body.FieldChatTemplateKwargs)
	if err != nil {
		return nil, effort, err
	}
	args = kwargs.Clone()
	effort, thinking, err := sglangEffort(in)
	if !thinking.IsNone() && in.origin != body.Messages && in.origin != body.CountTokens {
		addMissing(args, thinks(thinking))
	}
	return args, effort, err
}

// sglangVars returns the special tokens, reasoning_effort and the arguments; a low effort sets low_effort for Nemotron 3.
func (m *Model) sglangVars(template *template, args *jinja.Dict, effort jinja.Value) (*jinja.Dict, error) {
	vars := m.config.specialTokens()
	vars.Set("documents", jinja.None())
	if !effort.IsNone() {
		vars.Set("reasoning_effort", effort)
	}
	if level, _ := effort.AsString(); level == "low" && strings.Contains(template.source, "low_effort") && strings.Contains(template.source, "truncate_history_thinking") {
		vars.Set("low_effort", jinja.Bool(true))
	}
	var refusal error
	args.Range(func(k, v jinja.Value) bool {
		switch key, _ := k.AsString(); key {
		case "add_generation_prompt", "tools", "tokenize", "return_dict", "conversation":
			refusal = refuseWith(500, "Internal server error: '"+key+"'")
			return false
		case "continue_final_message":
			if v.Truth() {
				refusal = refuse("continue_final_message and add_generation_prompt are not compatible.")
			}
		case "messages":
			refusal = refuse("jinja2.environment.Template.render() got multiple values for keyword argument 'messages'")
		case "chat_template":
		default:
			vars.Set(key, v)
		}
		return true
	})
	return vars, refusal
}

// thinks returns the arguments that turn a template's thinking on or off.
func thinks(on jinja.Value) *jinja.Dict { return dict(kv{"thinking", on}, kv{"enable_thinking", on}) }

var sglangEfforts, sglangYes = strings.Fields("none minimal low medium high xhigh ultra max"), strings.Fields("1 true yes y on")

// sglangEffort returns reasoning_effort, or the effort of reasoning.effort and reasoning.enabled,
// and the value that it implies for thinking (None: none).
func sglangEffort(in input) (effort, thinking jinja.Value, err error) {
	thinking = jinja.None()
	if effort, err = in.value(body.FieldReasoningEffort); err != nil {
		return effort, thinking, err
	}
	reasoning, err := in.value(body.FieldReasoning)
	if err != nil {
		return effort, thinking, err
	}
	if d, ok := reasoning.AsDict(); ok {
		if v := firstOf(d, "effort", "reasoning_effort"); !v.IsNone() {
			effort = v
		}
		enabled := firstOf(d, "enabled", "enable")
		if text, isText := enabled.AsString(); !isText && enabled.Truth() || isText && slices.Contains(sglangYes, strings.ToLower(strings.TrimSpace(text))) {
			thinking = jinja.Bool(true)
		}
	}
	if effort.IsNone() {
		return effort, thinking, nil
	}
	if level, ok := effort.AsString(); ok {
		if !slices.Contains(sglangEfforts, level) {
			n, err := strconv.ParseFloat(level, 64)
			if err != nil || n < 0 || n > 0.99 {
				return effort, thinking, refuse("reasoning_effort: input should be one of %s", strings.Join(sglangEfforts, ", "))
			}
			effort = jinja.Float(n)
		}
		return effort, jinja.Bool(level != "none"), nil
	}
	n, ok := effort.AsFloat()
	if i, isInt := effort.AsInt(); isInt {
		n, ok = float64(i), true
	}
	if !ok || n < 0 || n > 0.99 {
		return effort, thinking, refuse("reasoning_effort: input should be a number from 0 to 0.99")
	}
	return jinja.Float(n), jinja.Bool(true), nil
}

// sglangTools returns the tools that the template gets: none for tool_choice "none", and only the
// chosen one for a named choice, unless all is true.
func sglangTools(in input, all bool) ([]jinja.Value, error) {
	list, _, err := in.listOf(body.FieldTools)
	if err != nil {
		return nil, err
	}
	choice, err := in.value(body.FieldToolChoice)
	if err != nil {
		return nil, err
	}
	named := ""
	if text, ok := choice.AsString(); ok {
		if text != "none" && text != "auto" && text != "required" {
			return nil, refuse("tool_choice: input should be 'auto', 'required' or 'none'")
		}
	} else if !choice.IsNone() {
		if named, err = namedTool(choice); err != nil {
			return nil, err
		}
	}
	tools, err := converted(list, sglangTool)
	if err != nil {
		return nil, err
	}
	chosen := slices.DeleteFunc(slices.Clone(tools), func(tool jinja.Value) bool { return named != "" && toolName(tool) != named })
	switch text, _ := choice.AsString(); {
	case text == "none", text != "required" && named == "" && len(tools) == 0:
		return nil, nil
	case len(tools) == 0 && named == "":
		return nil, refuse("Tools cannot be empty if tool choice is set to required.")
	case len(tools) == 0:
		return nil, refuse("Tools cannot be empty if tool choice is set to a specific tool.")
	case len(chosen) == 0:
		return nil, refuse("Tool '%s' not found in tools list.", named)
	case all:
		return tools, nil
	}
	return chosen, nil
}

// sglangTool is Tool.model_dump(): type, function, defer_loading. The function keeps the declared keys in the request's
// order. An absent description or parameters is appended as null, the two flags only if they are set.
func sglangTool(v jinja.Value) (jinja.Value, error) {
	kind, function, deferred, err := declaredTool(v)
	if err != nil {
		return v, err
	}
	flags := map[string]jinja.Value{}
	for _, key := range [...]string{"strict", "defer_loading"} {
		if flags[key], err = laxFlag(function, key); err != nil {
			return v, err
		}
	}
	fn := jinja.NewDict(function.Len() + 2)
	function.Range(func(k, v jinja.Value) bool {
		key, _ := k.AsString()
		switch flag, is := flags[key]; {
		case is && !flag.IsNone():
			fn.Set(key, flag)
		case key == "parameters" && !v.IsNone():
			fn.Set(key, standardSchema(v))
		case key == "name" || key == "description" || key == "parameters":
			fn.Set(key, v)
		}
		return true
	})
	for _, key := range [...]string{"description", "parameters"} {
		if _, ok := fn.Get(key); !ok {
			fn.Set(key, jinja.None())
		}
	}
	if flags["defer_loading"].IsNone() && !deferred.IsNone() {
		fn.Set("defer_loading", deferred)
	}
	return object(kv{"type", jinja.String(kind)}, kv{"function", jinja.FromDict(fn)}, kv{"defer_loading", deferred}), nil
}

// sglangShape builds the message that SGLang passes to the template: the declared fields that are set, in their order.
type sglangShape struct {
	openai bool
	// refuse refuses a part of a kind that the model does not accept.
	refuse func(kind string) error
	p      *plan
}

var sglangRoles = []string{roleSystem, roleAssistant, roleTool, "function", roleDeveloper, "latest_reminder", "root"}

func (s *sglangShape) message(v jinja.Value) (jinja.Value, error) {
	msg, role, err := messageHead(v)
	if err != nil {
		return v, err
	}
	content, given := msg.Get("content")
	if role == roleUser {
		if !given || content.IsNone() {
			return v, refuse("messages.content: field required")
		}
	} else if role = strings.ToLower(role); !slices.Contains(sglangRoles, role) {
		return v, refuse("'role' must be one of 'system', 'assistant', 'tool', 'function', 'developer', 'latest_reminder', 'root' (case-insensitive).")
	}
	out := jinja.NewDict(6)
	out.Set("role", jinja.String(role))
	body, err := s.content(content, role)
	if err != nil {
		return v, err
	}
	out.Set("content", body)
	if role == roleUser {
		return jinja.FromDict(out), nil
	}
	for _, key := range [...]string{"tool_call_id", "name", "reasoning_content"} {
		text, has, ok := textOf(msg, key)
		if !ok {
			return v, refuse("messages.%s: input should be a valid string", key)
		}
		if has {
			out.Set(key, jinja.String(text))
		}
	}
	call := func(v jinja.Value) (jinja.Value, error) { return sglangCall(s.p.stop, v, role == roleAssistant) }
	if calls, given, err := listIn(msg, "tool_calls", call); err != nil {
		return v, err
	} else if given {
		out.Set("tool_calls", jinja.List(calls))
	}
	tools, given, err := listIn(msg, "tools", sglangTool)
	if given {
		out.Set("tools", jinja.List(tools))
	}
	return jinja.FromDict(out), err
}

// sglangCall is ToolCall.model_dump(), with the arguments of an assistant's call parsed.
func sglangCall(stop <-chan struct{}, v jinja.Value, assistant bool) (jinja.Value, error) {
	call, ok := v.AsDict()
	if !ok {
		return v, refuse("messages.tool_calls: input should be a valid dictionary")
	}
	function := dictAt(call, "function")
	if function == nil {
		return v, refuse("messages.tool_calls.function: field required")
	}
	if kind, ok := call.Get("type"); ok {
		if text, _ := kind.AsString(); text != "function" {
			return v, refuse("messages.tool_calls.type: input should be 'function'")
		}
	}
	arguments := member(function, "arguments")
	if text, isText := arguments.AsString(); isText {
		if assistant {
			read, err := jinja.ParseJSONInto(stop, nil, wideIntegers([]byte(text)), false)
			if err != nil {
				return v, refuse("Assistant tool call function.arguments must be valid JSON.")
			}
			if _, ok := read.AsDict(); !ok {
				return v, refuse("Assistant tool call function.arguments must be a JSON object.")
			}
			arguments = read
		}
	} else if _, isDict := arguments.AsDict(); !isDict && !arguments.IsNone() {
		return v, refuse("messages.tool_calls.function.arguments: input should be a valid string or dictionary")
	}
	return object(kv{"id", member(call, "id")}, kv{"index", member(call, "index")}, kv{"type", jinja.String("function")},
		kv{"function", object(kv{"name", member(function, "name")}, kv{"arguments", arguments})}), nil
}

// content is process_content_for_template_format and normalize_tool_content: texts are joined with a space.
func (s *sglangShape) content(v jinja.Value, role string) (jinja.Value, error) {
	if v.IsNone() || v.IsUndefined() {
		return jinja.String(""), nil
	}
	if _, ok := v.AsString(); ok {
		return v, nil
	}
	parts, ok := v.AsList()
	if !ok {
		return v, refuse("messages.content: input should be a valid string or list")
	}
	var texts []string
	wrapped := []jinja.Value{}
	onlyText := true
	for i := range parts {
		part, ok := parts[i].AsDict()
		if !ok {
			return v, refuse("messages.content: input should be a valid dictionary")
		}
		kind := textAt(part, "type")
		switch {
		case kind == "text" || kind == "input_text" && role != roleAssistant:
			text, has, _ := textOf(part, "text")
			if !has {
				return v, refuse("messages.content.text: input should be a valid string")
			}
			texts = append(texts, text)
			wrapped = append(wrapped, textPart(text))
		case kind == "image_url" || kind == "input_image" || kind == "video_url" || kind == "audio_url" || kind == "input_audio":
			if err := s.refuse(kind); err != nil {
				return v, err
			}
			onlyText = false
			s.p.cutAtMedia()
			texts = append(texts, mediaMark)
			wrapped = append(wrapped, textPart(mediaMark))
		case (kind == "thinking" || kind == "reasoning") && role == roleAssistant:
			// Accepted, but not passed to the template.
		case kind == "tool_reference":
			onlyText = false
			wrapped = append(wrapped, parts[i])
		default:
			return v, refuse("messages.content.type: input should be a known type of part")
		}
	}
	if !s.openai || role == roleTool && onlyText {
		return join(texts, " "), nil
	}
	return jinja.List(wrapped), nil
}
