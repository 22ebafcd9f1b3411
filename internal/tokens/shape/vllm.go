package shape

import (
	"slices"
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/encoders"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// vLLM 0.32.0: vllm/entrypoints/openai/chat_completion/protocol.py (validation), vllm/entrypoints/chat_utils.py (messages),
// vllm/renderers/hf.py (template arguments), and the recordings.

// vllmChat follows /v1/chat/completions, or /tokenize, which reads fewer fields and refuses less.
func (m *Model) vllmChat(in input) (*plan, error) {
	tokenize := in.API == body.Tokenize
	add, err := in.flag(body.FieldAddGenerationPrompt, true)
	if err != nil {
		return nil, err
	}
	cont, err := in.flag(body.FieldContinueFinalMessage, false)
	if err != nil {
		return nil, err
	}
	encoded := m.encoder != nil && (!tokenize || !m.encodes(encoders.Validated))
	if cont && add && (!encoded || given(in.Raw(body.FieldAddGenerationPrompt))) {
		return nil, refuse("continue_final_message and add_generation_prompt are not compatible. Use continue_final_message when you want " +
			"the model to continue the final message, and add_generation_prompt when you want to add a header that will prompt it to start " +
			"a new assistant message instead.")
	}
	tools, haveTools, err := m.vllmTools(in, tokenize)
	if err != nil {
		return nil, err
	}
	if m.encoderMissing {
		return nil, encoders.ErrMissing
	}
	if encoded {
		if !haveTools {
			tools = nil
		}
		p, err := m.vllmEncoded(in, tools, tokenize)
		if err == nil && p.chat != nil {
			p.chat.Generate, p.chat.Continue = add, cont
		}
		return p, err
	}
	template, err := m.templateFor(in, haveTools)
	if err != nil {
		return nil, err
	}
	p := &plan{template: template, images: m.imagesOf(in), stop: in.stop}
	shape := vllmShape{openai: template.openAI, legacy: !tokenize, converted: in.origin == body.Responses, refuse: func(kind string) error { return m.refuseMedia(kind, in.profile) }, p: p}
	list, err := m.shapeMessages(in, shape.kind(), p, shape.message)
	if err != nil {
		return nil, err
	}
	if ids, err := m.forwardedIDs(in); err != nil || ids != nil && !p.hasMedia() {
		return &plan{ids: ids}, err
	}
	if !template.namesDeveloper {
		list = withoutDeveloper(list)
	}
	if cont {
		final, err := markContinued(list)
		if err != nil {
			return nil, err
		}
		p.final = &final
	}
	if p.vars, err = m.vllmVars(in, template, tokenize); err != nil {
		return nil, err
	}
	p.vars.Set("messages", jinja.List(list))
	if _, given := p.vars.Get("tools"); !given {
		p.vars.Set("tools", jinja.None())
		if haveTools {
			p.vars.Set("tools", jinja.List(tools))
		}
	}
	p.vars.Set("add_generation_prompt", jinja.Bool(add))
	if p.addSpecial, err = in.flag(body.FieldAddSpecialTokens, false); err != nil {
		return nil, err
	}
	if !tokenize {
		err = m.vllmTruncation(in, p)
	}
	return p, err
}

// vllmVars returns the special tokens and the variables that the request passes to the template,
// with vLLM's precedence: fields set in the request win over chat_template_kwargs.
func (m *Model) vllmVars(in input, template *template, tokenize bool) (*jinja.Dict, error) {
	args, err := vllmArguments(in, tokenize)
	if err != nil {
		return nil, err
	}
	vars := m.config.specialTokens()
	vars.Set("documents", jinja.None())
	refusal := error(nil)
	args.Range(func(k, v jinja.Value) bool {
		switch key, _ := k.AsString(); key {
		case "chat_template", "tokenize", "add_generation_prompt", "continue_final_message": // set by the engine, or read elsewhere
		case "tools", "documents": // they take precedence over the request's tools
			if !listsDicts(v) {
				refusal = refuse("%s should be a list of dicts", key)
			} else if key == "tools" && !v.Truth() {
				v = jinja.List(nil)
			}
			vars.Set(key, v)
		case "messages":
			refusal = refuse("jinja2.environment.Template.render() got multiple values for keyword argument 'messages'")
		case "conversation", "self", "tokenizer", "model_config":
			refusal = refuse("apply_chat_template() got multiple values for keyword argument '%s'", key)
		case "return_assistant_tokens_mask":
			if v.Truth() {
				refusal = refuse("`return_assistant_tokens_mask=True` requires `return_dict=True` and `tokenize=True`")
			}
		default:
			if template.variables[key] {
				vars.Set(key, v)
			}
		}
		return refusal == nil
	})
	return vars, refusal
}

// listsDicts reports whether a template's argument is a list of dicts, or something else that is empty.
func listsDicts(v jinja.Value) bool {
	items, isList := v.AsList()
	if isList {
		return !slices.ContainsFunc(items, func(item jinja.Value) bool { return item.Kind() != jinja.KindDict })
	}
	return (v.Kind() == jinja.KindString || v.Kind() == jinja.KindDict) && !v.Truth()
}

// vllmEffort returns reasoning_effort, "" if it is not given.
func vllmEffort(in input) (string, error) {
	v, err := in.value(body.FieldReasoningEffort)
	level, _ := v.AsString()
	if err == nil && !v.IsNone() && !slices.Contains(efforts, level) {
		err = refuse("reasoning_effort: input should be one of %s", strings.Join(efforts, ", "))
	}
	return level, err
}

var efforts = []string{"none", "minimal", "low", "medium", "high", "xhigh", "max"}

// vllmTools checks tools and tool_choice and converts the tools to the form of pydantic's dump.
func (m *Model) vllmTools(in input, tokenize bool) (tools []jinja.Value, have bool, err error) {
	list, have, err := in.listOf(body.FieldTools)
	if err != nil {
		return nil, false, err
	}
	if have && len(list) == 0 && !tokenize {
		return nil, false, refuse("`tools` must not be an empty array. Either provide at least one tool or omit the field entirely. (parameter=tools)")
	}
	choice, err := in.value(body.FieldToolChoice)
	if err != nil {
		return nil, false, err
	}
	if tools, err = converted(list, vllmTool); err != nil {
		return nil, false, err
	}
	if tokenize {
		return tools, have, nil
	}
	if in.Raw(body.FieldToolChoice) == nil && have {
		choice = jinja.String("auto")
	}
	if choice.IsNone() {
		return tools, have, nil
	}
	name, isText := choice.AsString()
	if isText && name == "none" {
		return tools, have && !m.options.HideToolsWhenNone, nil
	}
	if !have {
		return nil, false, refuse("When using `tool_choice`, `tools` must be set. (parameter=tool_choice)")
	}
	if isText {
		return tools, true, m.vllmToolChoice(name)
	}
	if in.origin == body.Messages && (m.encodes(encoders.Original) || m.encoder != nil && m.encoder.Traits().Name == "inkling") { // their tool parsers compare no names
		return tools, true, nil
	}
	return tools, true, m.vllmNamedTool(choice, tools)
}

func (m *Model) vllmToolChoice(name string) error {
	switch {
	case name != "auto" && name != "required":
		return refuse("Invalid value for `tool_choice`: %s! Only named tools, \"none\", \"auto\" or \"required\" are supported.", name)
	case m.options.ToolParser:
		return nil
	case name == "auto":
		return refuse(`"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set`)
	default:
		return refuse(`tool_choice="required" requires --tool-call-parser to be set`)
	}
}

func (m *Model) vllmNamedTool(choice jinja.Value, tools []jinja.Value) error {
	name, err := namedTool(choice)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(tools, func(t jinja.Value) bool { return toolName(t) == name }) {
		return refuse("The tool specified in `tool_choice` does not match any of the specified `tools` (parameter=tool_choice)")
	}
	if !m.options.ToolParser {
		return refuse(`tool_choice=function "%s" requires --tool-call-parser to be set`, name)
	}
	return nil
}

// vllmTool is ChatCompletionToolsParam.model_dump(): the declared fields in their order, null
// where absent, except for the two flags; other fields are dropped.
func vllmTool(v jinja.Value) (jinja.Value, error) {
	kind, function, deferred, err := declaredTool(v)
	switch {
	case err != nil:
		return v, err
	case kind != "function":
		return v, refuse("tools.type: input should be 'function'")
	case !member(function, "parameters").IsNone() && dictAt(function, "parameters") == nil:
		return v, refuse("tools.function.parameters: input should be a valid dictionary")
	}
	fn := jinja.NewDict(5)
	for _, key := range [...]string{"name", "description", "parameters"} {
		fn.Set(key, member(function, key))
	}
	for _, key := range [...]string{"strict", "defer_loading"} {
		flag, err := laxFlag(function, key)
		if err != nil {
			return v, err
		}
		if key == "defer_loading" && flag.IsNone() {
			flag = deferred
		}
		if !flag.IsNone() {
			fn.Set(key, flag)
		}
	}
	out := dict(kv{"type", jinja.String(kind)}, kv{"function", jinja.FromDict(fn)})
	if !deferred.IsNone() {
		out.Set("defer_loading", deferred)
	}
	return jinja.FromDict(out), nil
}

// declaredTool returns the fields of a client's tool that both engines declare: its type, its function, which has a
// name, and the flag defer_loading or None.
func declaredTool(v jinja.Value) (kind string, function *jinja.Dict, deferred jinja.Value, err error) {
	tool, ok := v.AsDict()
	if !ok {
		return "", nil, v, refuse("tools: input should be a valid dictionary")
	}
	kind = "function"
	if given, has := tool.Get("type"); has {
		if kind, ok = given.AsString(); !ok {
			return "", nil, v, refuse("tools.type: input should be a valid string")
		}
	}
	if function = dictAt(tool, "function"); function == nil {
		return "", nil, v, refuse("tools.function: field required")
	}
	for _, key := range [...]string{"name", "description"} {
		if _, has, ok := textOf(function, key); !ok || key == "name" && !has {
			return "", nil, v, refuse("tools.function.%s: input should be a valid string", key)
		}
	}
	deferred, err = laxFlag(tool, "defer_loading")
	return kind, function, deferred, err
}

// laxFlag returns a boolean or None, read in pydantic's lax mode.
func laxFlag(d *jinja.Dict, key string) (jinja.Value, error) {
	v, ok := d.Get(key)
	if !ok || v.IsNone() {
		return jinja.None(), nil
	}
	raw, err := jinja.AppendJSON(nil, v, jinja.JSONOptions{})
	if err != nil {
		return v, err
	}
	b, ok := laxBool(raw)
	if !ok {
		return v, refuse("tools.%s: Input should be a valid boolean", key)
	}
	return jinja.Bool(b), nil
}

// addMissing adds to out the entries of d that it lacks.
func addMissing(out, d *jinja.Dict) {
	d.Range(func(k, v jinja.Value) bool {
		if key, ok := k.AsString(); ok {
			if _, there := out.Get(key); !there {
				out.Set(key, v)
			}
		}
		return true
	})
}

func toolName(tool jinja.Value) string {
	d, _ := tool.AsDict()
	return textAt(dictAt(d, "function"), "name")
}

func namedTool(choice jinja.Value) (string, error) {
	d, ok := choice.AsDict()
	if !ok {
		return "", refuse("tool_choice: input should be a valid dictionary")
	}
	function := dictAt(d, "function")
	if function == nil {
		return "", refuse("Invalid value for `function` in `tool_choice`! (parameter=tool_choice.function)")
	}
	name := textAt(function, "name")
	if name == "" {
		return "", refuse("Invalid `name` in `function` in `tool_choice`! (parameter=tool_choice.function.name)")
	}
	return name, nil
}

// vllmTruncation reads truncate_prompt_tokens. -1 means the maximum that the model accepts. By default a generating
// model keeps the tail and a pooling model the head (get_tokenizer in vllm/tokenizers/registry.py).
func (m *Model) vllmTruncation(in input, p *plan) error {
	side := in.Text(body.FieldTruncationSide)
	p.sided = in.Has(body.FieldTruncationSide)
	if p.sided && side != "left" && side != "right" {
		return refuse("truncation_side: Input should be 'left' or 'right'")
	}
	if !in.Has(body.FieldTruncatePromptTokens) {
		return nil
	}
	n, ok := laxInt(in.Raw(body.FieldTruncatePromptTokens))
	switch {
	case !ok || n < -1 || n == 0 && in.API != body.Tokenize:
		return refuse("truncate_prompt_tokens: input should be an integer, -1 or at least 1")
	case n == -1:
		m.truncateToContext(in, p)
	case m.MaxModelLen() > 0 && n > int64(m.MaxModelLen()):
		return refuse("truncate_prompt_tokens: larger than the model's context of %d tokens", m.MaxModelLen())
	default:
		p.keep = int(min(n, unknownLength))
	}
	if p.keep != unknownLength && (side == "right" || side == "" && in.origin.Pools()) {
		p.keep = -p.keep
	}
	return nil
}

// unknownLength is the value of plan.keep if it is unknown; no prompt is that long.
const unknownLength = 1 << 30

// truncateToContext plans the tail of a prompt that is longer than the context.
func (m *Model) truncateToContext(in input, p *plan) {
	if p.keep = m.MaxModelLen(); p.keep == 0 {
		p.keep, p.partial = unknownLength, "the context length, to which the prompt is truncated, is not known"
	} else if wanted, asked := in.vllmMaxTokens(); asked && wanted != 0 && !in.origin.Pools() {
		p.keep-- // leaves room for one token
	}
}

// forwardedIDs returns the ids that an earlier router put into kv_transfer_params. vLLM uses them
// instead of the messages, unless those contain more than text or are echoed.
func (m *Model) forwardedIDs(in input) ([]uint32, error) {
	raw := in.Member(body.FieldKVTransferParams, "prompt_token_ids")
	if echo, _ := laxBool(in.Get("echo")); echo || !given(raw) {
		return nil, nil
	}
	ids, err := body.AppendIDs(nil, raw)
	if err != nil || len(ids) == 0 {
		return nil, refuse("`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers.")
	}
	return ids, m.checkIDs(ids)
}

// vllmLength refuses a prompt of n tokens that leaves no room in the engine's context, and a request for more output
// tokens than the whole context. In between, the engine truncates the output.
func (m *Model) vllmLength(in input, n int) error {
	context := int64(m.MaxModelLen())
	if context == 0 {
		return nil
	}
	room := context - int64(n)
	if !in.API.Pools() && in.API != body.VLLMGenerate {
		harmony := m.encodes(encoders.Validated) && in.API.TakesMessages() // its output is cut
		if wanted, asked := in.vllmMaxTokens(); asked && wanted > context && !harmony {
			return refuse("max_tokens=%d cannot be greater than max_model_len=%d. Please request fewer output tokens.", wanted, context)
		}
		if least, _ := laxInt(in.Raw(body.FieldMinTokens)); least > max(room, 0) && (in.origin == body.Chat || in.origin == body.Completions) {
			return refuse("min_tokens must be less than or equal to max_tokens=%d, got %d.", room, least) // max_tokens is cut to the room
		}
		if echo, _ := laxBool(in.Get("echo")); !echo || in.API != body.Completions {
			room--
		}
	}
	if room < 0 {
		return refuse("This model's maximum context length is %d tokens. However, your prompt contains %d input tokens.", context, n)
	}
	return nil
}

// vllmMaxTokens returns the number of tokens to generate, from the field that the API gives precedence.
func (in input) vllmMaxTokens() (n int64, asked bool) {
	fields := []body.Field{body.FieldMaxTokens}
	switch in.API {
	case body.Chat:
		fields = []body.Field{body.FieldMaxCompletionTokens, body.FieldMaxTokens}
	case body.Responses:
		fields = []body.Field{body.FieldMaxOutputTokens}
	default:
	}
	for _, f := range fields {
		if n, ok := laxInt(in.Raw(f)); ok {
			return n, true
		}
	}
	const byDefault = 16
	return byDefault, in.API == body.Completions
}
