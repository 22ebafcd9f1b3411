package enginesim

import (
	"fmt"
	"slices"
	"strings"
)

// chat is a conversation to render.
type chat struct {
	messages   []object
	tools      []any
	generate   bool   // add the head of the answer
	unfinished bool   // continue_final_message: end inside the last message
	thinking   bool   // false writes an empty thought in front of the answer
	effort     string // reasoning_effort, "" if not given
	prefix     string // text behind the head of the answer (SGLang's continue_final_message)
}

// parseChat reads what the template sees of a chat request, with the engine's reading of messages and tools
// (TensorRT-LLM is taken to read as vLLM does).
func parseChat(engine EngineKind, body *requestBody) (*chat, error) {
	c := &chat{generate: true, unfinished: body.ContinueFinalMessage, thinking: true, effort: body.ReasoningEffort}
	if body.AddGenerationPrompt != nil {
		c.generate = *body.AddGenerationPrompt
	}
	if engine == SGLang {
		c.generate, c.unfinished = true, false // chat does not read the one and has its own way for the other
	}
	if c.generate && c.unfinished {
		return nil, badRequest("continue_final_message and add_generation_prompt are not compatible.")
	}
	if _, ok := body.ChatTemplateKwargs["messages"]; ok {
		return nil, badRequest("jinja2.environment.Template.render() got multiple values for keyword argument 'messages'")
	}
	if v, ok := body.ChatTemplateKwargs["enable_thinking"]; ok {
		c.thinking = v != false
	} else if body.ReasoningEffort == "none" {
		c.thinking = false
	}
	list, err := parseOrdered(body.Messages)
	if err != nil {
		return nil, badRequest("messages: " + err.Error())
	}
	messages, ok := list.([]any)
	if !ok {
		return nil, badRequest("messages: Input should be a valid list")
	}
	if len(messages) == 0 {
		return nil, badRequest("Messages cannot be empty.")
	}
	for i, m := range messages {
		message, ok := m.(object)
		if !ok {
			return nil, badRequest(fmt.Sprintf("messages.%d: Input should be a valid dictionary", i))
		}
		normal, err := normalMessage(engine, message)
		if err != nil {
			return nil, fmt.Errorf("messages.%d: %w", i, err)
		}
		c.messages = append(c.messages, normal)
	}
	if engine == SGLang {
		c.sglangLast(body.ContinueFinalMessage)
	}
	if body.Tools != nil && (engine != SGLang || string(body.ToolChoice) != `"none"`) {
		if err := c.readTools(engine, body); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// sglangLast: a last message of the assistant begins the answer if it is to be continued, and is rendered as the user's
// if not.
func (c *chat) sglangLast(unfinished bool) {
	n := len(c.messages) - 1
	if c.messages[n].text("role") != "assistant" {
		return
	}
	if unfinished {
		c.prefix = c.messages[n].text("content")
		c.messages = c.messages[:n]
		return
	}
	c.messages[n] = object{{"role", "user"}, {"content", c.messages[n].text("content")}}
}

// partSeparator stands between the text parts of a message: vLLM's newline, SGLang's blank.
func partSeparator(engine EngineKind) string {
	if engine == SGLang {
		return " "
	}
	return "\n"
}

// normalMessage gives role, content as one string, reasoning, and tool calls with parsed arguments.
func normalMessage(engine EngineKind, m object) (object, error) {
	role, ok := m.get("role")
	if name, isText := role.(string); !ok || !isText || name == "" {
		return nil, badRequest("role: Field required")
	}
	if role == "developer" && engine != SGLang {
		role = "system"
	}
	out := object{{"role", role}}
	content, present := m.get("content")
	switch v := content.(type) {
	case string:
		out = append(out, member{"content", v})
	case nil:
		if present && role == "user" {
			return nil, badRequest("content: Input should be a valid string")
		}
		out = append(out, member{"content", ""})
	case []any:
		var texts []string
		for _, p := range v {
			part, ok := p.(object)
			if !ok {
				return nil, badRequest("content: Input should be a valid dictionary")
			}
			switch part.text("type") {
			case "text", "input_text", "output_text":
				texts = append(texts, part.text("text"))
			case "refusal":
				if engine == SGLang {
					return nil, badRequest("content: unknown part type refusal")
				}
				texts = append(texts, part.text("refusal"))
			case "thinking":
				texts = append(texts, part.text("thinking"))
			default:
				return nil, badRequest("content: unknown part type " + part.text("type"))
			}
		}
		out = append(out, member{"content", strings.Join(texts, partSeparator(engine))})
	default:
		return nil, badRequest("content: Input should be a valid string")
	}
	for _, key := range [2]string{"reasoning", "reasoning_content"} {
		if v, ok := m.get(key); ok && v != nil {
			out = append(out, member{"reasoning_content", v})
			break
		}
	}
	calls, err := normalCalls(m)
	if err != nil {
		return nil, err
	}
	if calls != nil {
		out = append(out, member{"tool_calls", calls})
	}
	return out, nil
}

func normalCalls(m object) ([]any, error) {
	v, ok := m.get("tool_calls")
	if !ok || v == nil || m.text("role") != "assistant" {
		return nil, nil
	}
	list, ok := v.([]any)
	if !ok {
		return nil, badRequest("tool_calls: Input should be a valid list")
	}
	var out []any
	for _, item := range list {
		call, _ := item.(object)
		fn, _ := call.get("function")
		function, ok := fn.(object)
		if !ok {
			return nil, badRequest("tool_calls.function: Field required")
		}
		raw, _ := function.get("arguments")
		text, isText := raw.(string)
		if !isText && raw != nil {
			return nil, badRequest("tool_calls.function.arguments: Input should be a valid string")
		}
		arguments, err := parseOrdered([]byte(text))
		if _, isObject := arguments.(object); err != nil || !isObject {
			arguments = object{}
		}
		out = append(out, object{{"name", function.text("name")}, {"arguments", arguments}})
	}
	return out, nil
}

// readTools re-serialises tools as vLLM's request model does: type, function{name, description, parameters}, absent ones
// as null, other keys behind.
func (c *chat) readTools(engine EngineKind, body *requestBody) error {
	v, err := parseOrdered(body.Tools)
	if err != nil {
		return badRequest("tools: " + err.Error())
	}
	if v == nil {
		return nil
	}
	list, ok := v.([]any)
	if !ok {
		return badRequest("tools: Input should be a valid list")
	}
	if len(list) == 0 && engine != SGLang {
		return badRequest("`tools` must not be an empty array. Either provide at least one tool or omit the field entirely. (parameter=tools)")
	}
	for _, item := range list {
		tool, _ := item.(object)
		fn, _ := tool.get("function")
		function, ok := fn.(object)
		if !ok {
			return badRequest("tools.function: Field required")
		}
		kind := tool.text("type")
		if kind == "" {
			kind = "function"
		}
		if engine == SGLang {
			c.tools = append(c.tools, object{{"type", kind}, {"function", padded(function, "description", "parameters")}, {"defer_loading", nil}})
			continue
		}
		f := ordered(function, "name", "description", "parameters")
		c.tools = append(c.tools, append(object{{"type", kind}, {"function", f}}, others(tool, "type", "function")...))
	}
	return nil
}

// padded keeps the order and puts absent keys behind, as null: SGLang's request model.
func padded(o object, keys ...string) object {
	out := append(object{}, o...)
	for _, key := range keys {
		if _, ok := o.get(key); !ok {
			out = append(out, member{key, nil})
		}
	}
	return out
}

func ordered(o object, keys ...string) object {
	var out object
	for _, key := range keys {
		v, _ := o.get(key)
		out = append(out, member{key, v})
	}
	return append(out, others(o, keys...)...)
}

func others(o object, keys ...string) object {
	var out object
next:
	for _, m := range o {
		for _, key := range keys {
			if m.key == key {
				continue next
			}
		}
		out = append(out, m)
	}
	return out
}

// render writes the prompt text in the format of the model family.
func (t *Tokenizer) render(c *chat) (string, error) {
	text, err := t.format.write(c)
	if err != nil {
		return "", err
	}
	text += c.prefix
	if c.unfinished {
		last := strings.TrimSpace(c.messages[len(c.messages)-1].text("content"))
		if at := strings.LastIndex(text, last); at >= 0 {
			text = text[:at+len(last)]
		}
	}
	return text, nil
}

// writeQwen is Qwen3's chat template, tools and reasoning included.
func writeQwen(c *chat) (string, error) {
	var b strings.Builder
	var first object
	if len(c.messages) > 0 {
		first = c.messages[0]
	}
	if len(c.tools) > 0 {
		b.WriteString("<|im_start|>system\n")
		if first.text("role") == "system" {
			b.WriteString(first.text("content") + "\n\n")
		}
		b.WriteString("# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>")
		for _, tool := range c.tools {
			b.WriteByte('\n')
			pyJSON(&b, tool)
		}
		b.WriteString("\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n")
	} else if first.text("role") == "system" {
		b.WriteString("<|im_start|>system\n" + first.text("content") + "<|im_end|>\n")
	}
	lastQuery := len(c.messages) - 1
	for i, v := range slices.Backward(c.messages) {
		content := v.text("content")
		if v.text("role") == "user" && (!strings.HasPrefix(content, "<tool_response>") || !strings.HasSuffix(content, "</tool_response>")) {
			lastQuery = i
			break
		}
	}
	for i, m := range c.messages {
		role, content := m.text("role"), m.text("content")
		switch {
		case role == "user" || role == "system" && i > 0:
			b.WriteString("<|im_start|>" + role + "\n" + content + "<|im_end|>\n")
		case role == "assistant":
			qwenAssistant(&b, m, i > lastQuery, i == len(c.messages)-1)
		case role == "tool":
			if i == 0 || c.messages[i-1].text("role") != "tool" {
				b.WriteString("<|im_start|>user")
			}
			b.WriteString("\n<tool_response>\n" + content + "\n</tool_response>")
			if i == len(c.messages)-1 || c.messages[i+1].text("role") != "tool" {
				b.WriteString("<|im_end|>\n")
			}
		}
	}
	if c.generate {
		b.WriteString("<|im_start|>assistant\n")
		if !c.thinking {
			b.WriteString("<think>\n\n</think>\n\n")
		}
	}
	return b.String(), nil
}

func qwenAssistant(b *strings.Builder, m object, current, last bool) {
	content := m.text("content")
	reasoning := m.text("reasoning_content")
	if _, given := m.get("reasoning_content"); !given && strings.Contains(content, "</think>") {
		before, _, _ := strings.Cut(content, "</think>")
		before = strings.TrimRight(before, "\n")
		if at := strings.LastIndex(before, "<think>"); at >= 0 {
			before = before[at+len("<think>"):]
		}
		reasoning = strings.TrimLeft(before, "\n")
		content = strings.TrimLeft(content[strings.LastIndex(content, "</think>")+len("</think>"):], "\n")
	}
	b.WriteString("<|im_start|>assistant\n")
	if current && (last || reasoning != "") {
		b.WriteString("<think>\n" + strings.Trim(reasoning, "\n") + "\n</think>\n\n" + strings.TrimLeft(content, "\n"))
	} else {
		b.WriteString(content)
	}
	calls, _ := m.get("tool_calls")
	list, _ := calls.([]any)
	for i, item := range list {
		call := item.(object)
		if i > 0 || content != "" {
			b.WriteByte('\n')
		}
		b.WriteString("<tool_call>\n{\"name\": \"" + call.text("name") + "\", \"arguments\": ")
		arguments, _ := call.get("arguments")
		pyJSON(b, arguments)
		b.WriteString("}\n</tool_call>")
	}
	b.WriteString("<|im_end|>\n")
}

// promptOf renders and encodes a chat request.
func (t *Tokenizer) promptOf(engine EngineKind, body *requestBody) ([]int32, error) {
	c, err := parseChat(engine, body)
	if err != nil {
		return nil, err
	}
	text, err := t.render(c)
	if err != nil {
		return nil, err
	}
	return t.Encode(text, false), nil
}
