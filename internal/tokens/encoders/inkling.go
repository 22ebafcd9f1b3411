package encoders

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/bpe"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// inkling is vllm/renderers/inkling_encoding.py. vLLM tokenizes each text by itself with special tokens recognized, which
// gives the ids of the whole prompt as text.
type inkling struct {
	xml string // the token before tools
}

const (
	inkUser   = "<|message_user|>"
	inkModel  = "<|message_model|>"
	inkSystem = "<|message_system|>"
	inkTool   = "<|message_tool|>"
	inkText   = "<|content_text|>"
	inkThink  = "<|content_thinking|>"
	inkInvoke = "<|content_invoke_tool_json|>"
	inkEnd    = "<|end_message|>"
	inkSample = "<|content_model_end_sampling|>"
)

func newInkling(tok *bpe.Tokenizer) (Encoder, error) {
	e := inkling{xml: "<|content_xml|>"}
	if _, ok := tok.TokenID(e.xml); !ok {
		e.xml = "<|unused_200024|>"
	}
	for _, token := range []string{inkUser, inkModel, inkSystem, inkTool, inkText, inkThink, inkInvoke, inkEnd, inkSample, e.xml,
		"<|content_image|>", "<|content_audio_input|>", "<|audio_end|>"} {
		if _, ok := tok.TokenID(token); !ok {
			return nil, fmt.Errorf("the tokenizer of an Inkling model has no token %q", token)
		}
	}
	return e, nil
}

func (inkling) Traits() Traits { return Traits{Name: "inkling", Messages: Read} }

var inkRoles = map[string]string{"user": inkUser, "assistant": inkModel, "system": inkSystem, "developer": inkSystem, "tool": inkTool}

func (e inkling) Append(dst []byte, c *Chat) ([]byte, error) {
	if c.Continue {
		return dst, refuse("Inkling renderer does not support continue_final_message")
	}
	effort, err := inkEffort(member(c.Args, "reasoning_effort"))
	if err != nil {
		return dst, err
	}
	w := newWriter(dst, c)
	tools := slices.Clone(c.Tools)
	for i := range c.Messages {
		if msg, _ := c.Messages[i].AsDict(); text(msg, "role") == "developer" {
			own, err := toolsOf(msg)
			if err != nil {
				return dst, err
			}
			tools = append(tools, own...)
		}
	}
	if len(tools) > 0 {
		w.texts(inkSystem, "tool_declare", e.xml)
		w.inkTools(tools)
		w.text(inkEnd)
	}
	names := map[string]string{} // of tools by the ids of calls
	for i := range c.Messages {
		msg, _ := c.Messages[i].AsDict()
		role := text(msg, "role")
		if role != "system" && role != "developer" && effort != "" {
			w.texts(inkSystem, inkText, effort, inkEnd)
			effort = ""
		}
		if err := w.inkMessage(msg, role, names); err != nil {
			return w.dst, err
		}
	}
	if effort != "" {
		w.texts(inkSystem, inkText, effort, inkEnd)
	}
	if c.Generate {
		w.text(inkModel)
	}
	return w.dst, w.err
}

// inkEffort returns the prompt's text about the reasoning effort, "" if it has none.
func inkEffort(v jinja.Value) (string, error) {
	effort, isNumber := v.AsFloat()
	if n, isInt := v.AsInt(); isInt {
		effort, isNumber = float64(n), true
	}
	if name, isText := v.AsString(); isText {
		effort, isNumber = map[string]float64{"none": 0, "minimal": 0.1, "low": 0.2, "medium": 0.7, "high": 0.9, "xhigh": 0.99, "max": 0.99}[name]
	} else if v.IsNone() {
		effort, isNumber = 0.9, true
	}
	switch {
	case v.Kind() == jinja.KindInt && !isNumber: // an integer beyond int64
		effort = -1
		fallthrough
	case isNumber && !(effort >= 0 && effort <= 0.99): // refuses NaN
		return "", refuse("Inkling reasoning_effort must be in [0.0, 0.99], got %v", effort)
	case !isNumber:
		return "", nil
	}
	s := strings.TrimRight(strings.TrimRight(strconv.FormatFloat(effort, 'f', 2, 64), "0"), ".")
	if s == "0" || s == "-0" || s == "" {
		s = "0.0"
	}
	return "Thinking effort level: " + s, nil
}

func (w *writer) inkMessage(msg *jinja.Dict, role string, names map[string]string) error {
	start, ok := inkRoles[role]
	if !ok {
		return refuse("unsupported Inkling message role '%s'", role)
	}
	parts, err := inkParts(member(msg, "content"), role == "tool")
	if err != nil {
		return err
	}
	if role == "tool" {
		w.texts(start, cmp.Or(text(msg, "name"), names[text(msg, "tool_call_id")]), inkText)
		for _, p := range parts {
			w.text(p.text)
		}
		w.text(inkEnd)
		return w.err
	}
	if role == "assistant" {
		thought := member(msg, "reasoning")
		s, isText := thought.AsString()
		switch {
		case !isText && thought.Truth():
			return refuse("assistant reasoning_content must be a string for Inkling rendering")
		case s != "":
			w.texts(start, inkThink, s, inkEnd)
		}
	}
	for _, p := range parts {
		w.texts(start, p.token, p.text, inkEnd)
	}
	if role != "assistant" {
		return w.err
	}
	calls, _ := member(msg, "tool_calls").AsList()
	for i := range calls {
		call, _ := calls[i].AsDict()
		f := dictAt(call, "function")
		name := text(f, "name")
		if id := text(call, "id"); id != "" {
			names[id] = name
		}
		w.texts(start, name, inkInvoke, `{"name":`)
		w.dumps(jinja.String(name))
		w.text(`,"args":`)
		w.inkJSON(member(f, "arguments"))
		w.texts("}", inkEnd)
	}
	w.text(inkSample)
	return w.err
}

// inkPart is a content part and the token that precedes it. For an image or audio, its text is the caller's placeholder.
type inkPart struct{ token, text string }

var inkKinds = map[string]string{"": inkText, "text": inkText, "input_text": inkText, "image": "<|content_image|>", "audio": "<|content_audio_input|>"}

func inkParts(content jinja.Value, tool bool) (out []inkPart, err error) {
	if s, ok := content.AsString(); ok {
		if s != "" {
			out = append(out, inkPart{inkText, s})
		}
		return out, nil
	}
	parts, _ := content.AsList()
	for i := range parts {
		p := inkPart{token: inkText}
		var ok bool
		if p.text, ok = parts[i].AsString(); !ok {
			part, _ := parts[i].AsDict()
			p = inkPart{inkKinds[text(part, "type")], text(part, "text")}
		}
		if p.token == "" || tool && p.token != inkText {
			return nil, refuse("unsupported content part type")
		}
		out = append(out, p)
	}
	return out, nil
}

func (w *writer) inkTools(tools []jinja.Value) {
	list := make([]jinja.Value, len(tools))
	for i := range tools {
		tool, _ := tools[i].AsDict()
		f := dictAt(tool, "function")
		if _, named := f.Get("name"); !named && w.err == nil {
			w.err = refuse("expected mapping with a name")
		}
		d := jinja.NewDict(4)
		or := func(key string, v, standard jinja.Value) {
			if !v.Truth() {
				v = standard
			}
			d.Set(key, v)
		}
		or("description", member(f, "description"), jinja.String(""))
		d.Set("name", member(f, "name"))
		or("parameters", member(f, "parameters"), jinja.FromDict(nil))
		d.Set("type", jinja.String("function"))
		if kind, has := tool.Get("type"); has {
			d.Set("type", kind)
		}
		list[i] = jinja.FromDict(d)
	}
	w.inkJSON(jinja.List(list))
}

// inkJSON appends v as JSON with sorted keys and without spaces.
func (w *writer) inkJSON(v jinja.Value) {
	if w.text(""); w.err != nil {
		return
	}
	var err error
	if w.dst, err = jinja.AppendJSON(w.dst, v, jinja.JSONOptions{Separators: true, ItemSeparator: ",", KeySeparator: ":", SortKeys: true, DenyNaN: true}); err != nil {
		w.err = refuse("%v", err)
	} else if len(w.dst) > w.limit {
		w.err = ErrLimit
	}
}
