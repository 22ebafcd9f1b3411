package encoders

import (
	"cmp"
	_ "embed"
	"fmt"
	"slices"
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/bpe"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// deepseekV4 is vllm/tokenizers/deepseek_v4.py, and deepseek_v41.py for version 4.1.
type deepseekV4 struct{ v41 bool }

func newDeepseekV4(*bpe.Tokenizer) (Encoder, error) { return deepseekV4{}, nil }

func newDeepseekV41(*bpe.Tokenizer) (Encoder, error) { return deepseekV4{v41: true}, nil }

func (d deepseekV4) Traits() Traits {
	if d.v41 {
		return Traits{Name: "deepseek_v41", Messages: Read}
	}
	return Traits{Name: "deepseek_v4", Messages: Parts}
}

// v4Message is a message after tool results have become parts of user messages.
type v4Message struct {
	role, content, reasoning string
	parts                    []v4Part // of a user
	task                     string
	calls, tools             []jinja.Value
	unread                   error // why vLLM refuses the message when it writes it, nil if it does not
}

// v4Part is a text, or the result of the tool call with this id.
type v4Part struct {
	text, id string
	result   bool
}

var v4Tasks = map[string]string{"action": "<｜action｜>", "query": "<｜query｜>", "authority": "<｜authority｜>", "domain": "<｜domain｜>",
	"title": "<｜title｜>", "read_url": "<｜read_url｜>"}

func (d deepseekV4) Append(dst []byte, c *Chat) ([]byte, error) {
	given := c.Messages
	if len(c.Tools) > 0 {
		given = slices.Clone(given)
		at := slices.IndexFunc(given, func(v jinja.Value) bool { return roleOf(v) == "system" })
		if at < 0 {
			given = append([]jinja.Value{withTools(nil, c.Tools)}, given...)
		} else {
			msg, _ := given[at].AsDict()
			given[at] = withTools(msg, c.Tools)
		}
	}
	w := &v4Writer{v41: d.v41, chat: c, dst: append(dst, dsBegin...), thinking: true, drop: true}
	_, hasThinking := c.Args.Get("thinking")
	if _, ok := c.Args.Get("enable_thinking"); ok || hasThinking {
		w.thinking = truth(c.Args, "thinking") || truth(c.Args, "enable_thinking")
	}
	if err := w.setEffort(member(c.Args, "reasoning_effort")); err != nil {
		return dst, err
	}
	if v, ok := c.Args.Get("drop_thinking"); ok {
		w.drop = v.Truth()
	}
	messages, err := v4Merged(c, given, d.v41)
	if err != nil {
		return dst, err
	}
	if slices.ContainsFunc(messages, func(m v4Message) bool { return len(m.tools) > 0 }) {
		w.drop = false
	}
	if w.thinking && w.drop {
		messages = v4Dropped(messages, d.v41)
	}
	w.last = v4LastUser(messages, d.v41)
	for i := range messages {
		if err := w.message(messages, i); err != nil {
			return w.dst, err
		}
	}
	return w.dst, nil
}

// setEffort reads the argument reasoning_effort.
func (w *v4Writer) setEffort(v jinja.Value) error {
	effort, isText := v.AsString()
	budget, isInt := v.AsInt()
	budget = cmp.Or(v41Efforts[effort], budget)
	switch {
	case isText && effort == "none":
		w.thinking = false
		return nil
	case w.v41 && v.IsNone():
		budget = v41Efforts["high"]
	case w.v41 && (isText || isInt && v.Kind() == jinja.KindInt) && budget >= 1 && budget <= 100:
	case w.v41:
		return refuse("DeepSeek V4.1 reasoning_effort must be low, high, xhigh, max, or an integer within [1, 100] in chat_template_kwargs")
	case effort == "max":
	case effort == "low", effort == "minimal", effort == "medium":
		effort = "low"
	default:
		effort = "high"
	}
	switch {
	case !w.thinking:
	case w.v41:
		w.effort = fmt.Sprintf(v41Effort, budget)
	default:
		w.effort = v4Efforts[effort]
	}
	return nil
}

// v4LastUser returns the index of the last message that opens a turn of the model, -1 if there is none.
func v4LastUser(messages []v4Message, v41 bool) int {
	i := len(messages) - 1
	for i >= 0 && messages[i].role != "user" && messages[i].role != "developer" && (!v41 || i == 0 || messages[i].role != "system") {
		i--
	}
	return i
}

// v4Dropped returns the messages without those of developers and unknown roles that precede the last
// user message. The reasoning before it is left out later, by the writer.
func v4Dropped(messages []v4Message, v41 bool) (out []v4Message) {
	last := v4LastUser(messages, v41)
	for i, m := range messages {
		switch m.role {
		case "user", "system", "latest_reminder", "direct_search_results", "assistant":
			out = append(out, m)
		default:
			if i >= last {
				out = append(out, m)
			}
		}
	}
	return out
}

// noTask is the task of a message whose task is missing, empty or not a text.
var noTask = map[bool]string{false: "?"}

// v4Merged merges tool results and texts of a user into one message each, with the results in the order of the calls.
func v4Merged(c *Chat, given []jinja.Value, v41 bool) (out []v4Message, err error) {
	order := map[string]int{}
	sort := func() { // the results of the last message
		if len(out) == 0 || len(order) == 0 {
			return
		}
		var results []v4Part
		parts := out[len(out)-1].parts
		for _, p := range parts {
			if p.result {
				results = append(results, p)
			}
		}
		slices.SortStableFunc(results, func(a, b v4Part) int { return cmp.Compare(order[a.id], order[b.id]) })
		for i := range parts {
			if parts[i].result {
				parts[i], results = results[0], results[1:]
			}
		}
	}
	for i := range given {
		if err = c.stopped(); err != nil {
			return nil, err
		}
		msg, _ := given[i].AsDict()
		m := v4Message{role: text(msg, "role"), reasoning: thought(msg), task: cmp.Or(text(msg, "task"), noTask[member(msg, "task").IsNone()])}
		m.tools, m.unread = toolsOf(msg)
		m.content = m.flatten(msg, v41)
		if v41 {
			if err = m.checkV41(msg); err != nil {
				return nil, err
			}
		}
		m.calls, _ = member(msg, "tool_calls").AsList()
		part := v4Part{text: m.content}
		switch m.role {
		case "tool":
			part.id, part.result = text(msg, "tool_call_id"), true
			m = v4Message{role: "user"}
		case "user":
			if !v41 {
				m.tools = nil
			}
		}
		if m.role == "user" && (v41 || m.unread == nil) { // version 4.1 drops the tools of a message that is appended
			last := len(out) - 1
			if last >= 0 && out[last].role == "user" && (part.result || out[last].task == "") {
				out[last].parts = append(out[last].parts, part)
				continue
			}
			m.parts = []v4Part{part}
		}
		sort()
		if m.role == "assistant" && len(m.calls) > 0 {
			order = callOrder(m.calls)
		}
		out = append(out, m)
	}
	sort()
	return out, nil
}

// callOrder returns the place of each call by its id. Calls without an id are left out.
func callOrder(calls []jinja.Value) map[string]int {
	order := map[string]int{}
	for n := range calls {
		call, _ := calls[n].AsDict()
		if id := text(call, "id"); id != "" {
			order[id] = n
		}
	}
	return order
}

// checkV41 refuses a message that vLLM refuses before reading the next one, and records in unread what it refuses
// later.
func (m *v4Message) checkV41(msg *jinja.Dict) error {
	parts, _ := member(msg, "content").AsList()
	for i := range parts {
		part, _ := parts[i].AsDict()
		said, has := part.Get("text")
		if _, isText := said.AsString(); m.unread != nil || has && !isText {
			return refuse("DeepSeek V4.1 supports text and image content only")
		}
	}
	if !slices.Contains(v41Roles, m.role) {
		return refuse("Invalid role: %s", m.role)
	}
	_, m.unread = toolsOf(msg)
	for i := range m.tools {
		if tool, _ := m.tools[i].AsDict(); member(tool, "function").IsNone() {
			m.unread = refuse("'function'")
		}
	}
	return nil
}

// flatten returns the texts of a message's parts.
func (m *v4Message) flatten(msg *jinja.Dict, v41 bool) string {
	v := member(msg, "content")
	if s, ok := v.AsString(); ok {
		return s
	}
	parts, _ := v.AsList()
	texts := make([]string, len(parts))
	for i := range parts {
		part, _ := parts[i].AsDict()
		texts[i] = text(part, "text")
		if kind := text(part, "type"); kind != "text" && m.role == "tool" && !v41 {
			texts[i] = "[Unsupported " + kind + "]"
		} else if kind != "text" && (!v41 || !slices.Contains(v41Parts, kind)) {
			m.unread = refuse("Unsupported content block type: '%s'", kind)
		}
	}
	return strings.Join(texts, "\n\n")
}

type v4Writer struct {
	v41            bool
	chat           *Chat
	dst            []byte
	thinking, drop bool
	effort         string
	last           int // index of the last user message
}

func (w *v4Writer) add(texts ...string) {
	for _, s := range texts {
		w.dst = append(w.dst, s...)
	}
}

func (w *v4Writer) message(messages []v4Message, i int) (err error) {
	if err = w.chat.stopped(); err != nil {
		return err
	}
	m := &messages[i]
	if m.unread != nil {
		return m.unread
	}
	if w.v41 && (m.role == "system" || i == 0 && w.effort != "") {
		w.add("<｜System｜>")
	}
	if i == 0 {
		w.add(w.effort)
	}
	switch m.role {
	case "system":
		w.add(m.content)
		err = w.tools(m)
	case "developer":
		if m.content == "" {
			return refuse("Invalid message for role `developer`")
		}
		w.add(dsUser, m.content)
		err = w.tools(m)
	case "user":
		w.user(m)
	case "latest_reminder":
		w.add("<｜latest_reminder｜>", m.content)
	case "assistant":
		if w.thinking && (i == 0 || messages[i-1].task == "") && (!w.drop || i > w.last) {
			w.add(m.reasoning, thinkEnd)
		}
		w.add(m.content)
		if len(m.calls) > 0 {
			w.dst, err = appendDSMLCalls(w.dst, w.chat, w.calls(), m.calls)
		}
		w.add(dsEnd)
	default:
		return refuse("Invalid role: %s", m.role)
	}
	if err != nil {
		return err
	}
	next := ""
	if i+1 < len(messages) {
		if next = messages[i+1].role; next != "assistant" && next != "latest_reminder" {
			return nil
		}
	}
	return w.opening(m, i, next)
}

// opening begins the answer to message i, or its task. next is the role of the message that follows, or "".
func (w *v4Writer) opening(m *v4Message, i int, next string) error {
	opening := thinkEnd
	switch {
	case m.task != "":
		task, ok := v4Tasks[m.task]
		if !ok {
			return refuse("Invalid task: '%s'", m.task)
		}
		if m.task == "action" {
			if w.thinking {
				opening = thinkStart
			}
			w.add(dsAssistant, opening)
		}
		w.add(task)
	case m.role == "user", m.role == "developer", m.role == "system" && (next == "" || next == "assistant") && (!w.v41 || i > 0):
		if w.thinking && (!w.drop || i >= w.last) {
			opening = thinkStart
		}
		w.add(dsAssistant, opening)
	}
	return nil
}

func (w *v4Writer) user(m *v4Message) {
	sep := dsUser
	for _, p := range m.parts {
		w.add(sep)
		if p.result {
			w.add("<tool_result>", p.text, "</tool_result>")
		} else {
			w.add(p.text)
		}
		sep = "\n\n"
	}
}

func (w *v4Writer) tools(m *v4Message) (err error) {
	if len(m.tools) > 0 {
		section := v4Tools
		if w.v41 {
			section = v41Tools
		}
		w.dst, err = appendDSMLTools(w.dst, w.chat, section, m.tools)
	}
	return err
}

var (
	v41Roles   = []string{"system", "developer", "user", "assistant", "tool"}
	v41Parts   = []string{"input_text", "output_text", "image"}
	v41Efforts = map[string]int64{"low": 50, "high": 75, "xhigh": 75, "max": 100}
	v41Tools   = strings.NewReplacer("DSML｜tool_calls>", "DSML｜ calls>", "DSML｜", "DSML｜ ").Replace(v4Tools)
)

const v41Effort = "Reasoning Effort: %d (range 1-100, the higher the value, the more thorough the reasoning)\n\n"

// calls returns the name of a block of calls.
func (w *v4Writer) calls() string {
	if w.v41 {
		return " calls"
	}
	return "tool_calls"
}

var v4Efforts = map[string]string{
	"high": `Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.

`,
	"max": `Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no assumption remains unchecked and no error remains undiscovered.

`,
}

//go:embed deepseek_v4_tools.txt
var v4Tools string
