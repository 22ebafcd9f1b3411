package encoders

import (
	"bytes"
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/bpe"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// harmony is the format of gpt-oss: vllm/entrypoints/openai/parser/harmony_utils.py on top of
// oss-harmony 0.0.11. Clients' texts never become special tokens.
//
// Its messages are objects with these members:
//
//	role        one of system, developer, user, assistant, tool
//	flat        the joined text of the content, or null if it has none
//	texts       the content's texts, each of which is tokenized by itself
//	refused     the reason why the engine refuses texts when it reads them, or null
//	reasoning   the reasoning of the assistant, or null
//	calls       of the assistant and others: {id, name, arguments}
//	call_id     of a tool
//	channel     of a response's item, which has texts only
type harmony struct {
	start, message, end, call, channel uint32
}

func newHarmony(tok *bpe.Tokenizer) (Encoder, error) {
	h := new(harmony)
	for name, id := range map[string]*uint32{"<|start|>": &h.start, "<|message|>": &h.message, "<|end|>": &h.end, "<|call|>": &h.call,
		"<|channel|>": &h.channel} {
		var ok bool
		if *id, ok = tok.TokenID(name); !ok {
			return nil, fmt.Errorf("the tokenizer of a gpt-oss model has no token %q", name)
		}
	}
	return h, nil
}

func (h *harmony) Traits() Traits {
	return Traits{Name: "harmony", Messages: Validated, Marked: true, Dated: true, ToolParser: true}
}

// harmonySpecial matches Harmony's special tokens. The numbers 200000 to 201088 are reserved if they are
// not among harmonyNamed, which the expression matches too.
var harmonySpecial = regexp.MustCompile(`<\|(?:startoftext|endoftext|return|constrain|channel|start|end|message|call|reserved_(200\d\d\d|2010[0-8]\d))\|>`)

var harmonyNamed = []string{"200002", "200003", "200005", "200006", "200007", "200008", "200012", "201089"}

func hasHarmonySpecial(name string) bool {
	return slices.ContainsFunc(harmonySpecial.FindAllStringSubmatch(name, -1), func(m []string) bool { return !slices.Contains(harmonyNamed, m[1]) })
}

// harmonyMessage is a message of the prompt.
type harmonyMessage struct {
	author, channel, recipient string
	texts                      []string
	toolCall                   bool
}

func (h *harmony) Append(dst []byte, c *Chat) ([]byte, error) {
	switch c.Effort {
	case "", "low", "medium", "high":
	default:
		return dst, refuse("reasoning_effort=%q is not supported by Harmony. Supported values are: high, medium, low.", c.Effort)
	}
	messages := c.Messages
	var instructions *string
	if len(messages) > 0 {
		first, _ := messages[0].AsDict()
		if role := text(first, "role"); role == "system" || role == "developer" {
			var err error
			if instructions, err = harmonyFlat(first); err != nil {
				return dst, err
			}
			messages = messages[1:]
		}
	}
	parsed, err := harmonyMessages(c, messages)
	if err != nil {
		return dst, err
	}
	w := &harmonyWriter{harmony: h, writer: newWriter(dst, c)}
	w.system(c)
	if instructions != nil && *instructions != "" || len(c.Tools) > 0 {
		w.developer(instructions, c.Tools)
	}
	final := len(parsed) - 1
	for final >= 0 && (parsed[final].author != "assistant" || parsed[final].channel != "final") {
		final--
	}
	for i := range parsed {
		if i < final && parsed[i].channel == "analysis" {
			continue // reasoning before the last answer
		}
		if w.write(&parsed[i]); w.err != nil {
			return w.dst, w.err
		}
	}
	w.token(h.start)
	w.part("assistant")
	return w.dst, w.err
}

// harmonyFlat returns the joined text of a message's content, nil if it has none.
func harmonyFlat(msg *jinja.Dict) (*string, error) {
	v := member(msg, "flat")
	if s, ok := v.AsString(); ok {
		return &s, nil
	}
	if !v.IsNone() {
		return nil, &Refusal{Status: 500, Reason: "sequence item 0: expected str instance"}
	}
	return nil, nil //nolint:nilnil // no text is a result
}

func harmonyMessages(c *Chat, messages []jinja.Value) (out []harmonyMessage, err error) {
	names := map[string]string{}
	for i := range messages {
		msg, _ := messages[i].AsDict()
		calls, _ := member(msg, "calls").AsList()
		for j := range calls {
			call, _ := calls[j].AsDict()
			name, ok := member(call, "name").AsString()
			if !ok {
				name = "None"
			}
			names[text(call, "id")] = name
		}
	}
	for i := range messages {
		if err = c.stopped(); err != nil {
			return nil, err
		}
		msg, _ := messages[i].AsDict()
		if out, err = harmonyParse(out, msg, names); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func harmonyParse(out []harmonyMessage, msg *jinja.Dict, names map[string]string) ([]harmonyMessage, error) {
	role := text(msg, "role")
	if channel := text(msg, "channel"); channel != "" {
		return append(out, harmonyMessage{author: role, channel: channel, texts: textsOf(msg)}), nil
	}
	calls, _ := member(msg, "calls").AsList()
	thought := member(msg, "reasoning")
	if _, ok := thought.AsString(); !ok && thought.Truth() && role == "assistant" {
		return nil, refuse("1 validation error for Message: content.0 should be a valid dictionary or instance of Content")
	}
	think := func() {
		if s, _ := thought.AsString(); s != "" {
			out = append(out, harmonyMessage{author: role, channel: "analysis", texts: []string{s}})
		}
	}
	switch {
	case role == "assistant" && len(calls) > 0:
		said, err := harmonyFlat(msg)
		if err != nil {
			return nil, err
		}
		if said != nil && *said != "" {
			out = append(out, harmonyMessage{author: role, channel: "commentary", texts: []string{*said}})
		}
		think()
		for i := range calls {
			call, _ := calls[i].AsDict()
			name := text(call, "name")
			if hasHarmonySpecial(name) {
				return nil, &Refusal{Status: 500, Reason: "Encountered text corresponding to disallowed special token"}
			}
			out = append(out, harmonyMessage{author: role + " to=functions." + name, channel: "commentary json", texts: []string{text(call, "arguments")},
				toolCall: true})
		}
		return out, nil
	case role == "tool":
		said, err := harmonyFlat(msg)
		if err != nil {
			return nil, err
		}
		m := harmonyMessage{author: "functions." + names[text(msg, "call_id")], channel: "commentary", recipient: " to=assistant", texts: []string{""}}
		if said != nil {
			m.texts[0] = *said
		}
		return append(out, m), nil
	}
	if role == "assistant" {
		think()
	}
	if reason := member(msg, "refused"); !reason.IsNone() {
		if s, _ := reason.AsString(); s != "" {
			return nil, refuse("%s", s)
		}
		return nil, &Refusal{Status: 500, Reason: "'str' object has no attribute 'get'"}
	}
	texts := textsOf(msg)
	switch role {
	case "assistant":
		if len(texts) > 0 && texts[0] != "" {
			out = append(out, harmonyMessage{author: role, channel: "final", texts: texts})
		}
	case "system", "developer":
		said, err := harmonyFlat(msg)
		if err != nil {
			return nil, err
		}
		if said != nil {
			out = append(out, harmonyMessage{author: "developer", texts: []string{"# Instructions\n\n" + *said}})
		}
	case "user":
		out = append(out, harmonyMessage{author: role, texts: texts})
	default:
		return nil, refuse("1 validation error for Author: role should be 'user', 'assistant', 'system', 'developer' or 'tool'")
	}
	return out, nil
}

func textsOf(msg *jinja.Dict) []string {
	items, _ := member(msg, "texts").AsList()
	texts := make([]string, len(items))
	for i := range items {
		texts[i], _ = items[i].AsString()
	}
	return texts
}

// harmonyWriter writes messages. After an error it appends nothing.
type harmonyWriter struct {
	*harmony
	*writer
}

func (w *harmonyWriter) write(m *harmonyMessage) {
	w.token(w.start)
	w.part(m.author)
	if m.channel != "" {
		w.token(w.channel)
		w.part(m.channel)
		if m.recipient != "" {
			w.part(m.recipient)
		}
	}
	w.token(w.message)
	for _, s := range m.texts {
		w.part(s)
	}
	if m.toolCall {
		w.token(w.call)
	} else {
		w.token(w.end)
	}
}

func (w *harmonyWriter) system(c *Chat) {
	w.token(w.start)
	w.part("system")
	w.token(w.message)
	w.texts("You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\nCurrent date: ", c.Now.Format("2006-01-02"),
		"\n\nReasoning: ", cmp.Or(c.Effort, "medium"), "\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message.")
	if len(c.Tools) > 0 {
		w.text("\nCalls to these tools must go to the commentary channel: 'functions'.")
	}
	w.token(w.end)
}

func (w *harmonyWriter) developer(instructions *string, tools []jinja.Value) {
	w.token(w.start)
	w.part("developer")
	w.token(w.message)
	if instructions != nil {
		w.texts("# Instructions\n\n", *instructions)
		if len(tools) > 0 {
			w.text("\n\n")
		}
	}
	if len(tools) > 0 {
		w.text("# Tools\n\n## functions\n\nnamespace functions {\n\n")
		for i := range tools {
			tool, _ := tools[i].AsDict()
			w.tool(dictAt(tool, "function"))
		}
		w.text("} // namespace functions")
	}
	w.token(w.end)
}

func (w *harmonyWriter) tool(f *jinja.Dict) {
	w.comment("", text(f, "description"))
	parameters := member(f, "parameters")
	w.texts("type ", text(f, "name"), " = (")
	if d, ok := parameters.AsDict(); ok {
		w.text("_: ")
		w.schema(d, "", 0)
	}
	w.text(") => any;\n\n")
}

// comment writes the lines of a text as comments.
func (w *harmonyWriter) comment(indent, s string) {
	for s != "" && w.err == nil {
		line, rest, found := strings.Cut(s, "\n")
		if found {
			line = strings.TrimSuffix(line, "\r")
		}
		w.texts(indent, "// ", line, "\n")
		s = rest
	}
}

// harmonyDepth bounds the nested schemas of a tool's parameters. oss-harmony's JSON reader bounds levels of JSON, no less.
const harmonyDepth = 118

// schema writes a JSON schema as a TypeScript type. d is nil unless the schema is an object.
func (w *harmonyWriter) schema(d *jinja.Dict, indent string, depth int) {
	if depth > harmonyDepth {
		w.err = refuse("invalid conversation JSON")
	}
	if w.err != nil {
		return
	}
	if variants, ok := member(d, "oneOf").AsList(); ok {
		for i := range variants {
			variant, _ := variants[i].AsDict()
			w.texts("\n", indent, " | ")
			w.nullable(variant, indent+"   ", depth)
			w.trailing(variant, false)
		}
		return
	}
	kind := member(d, "type")
	if kinds, ok := kind.AsList(); ok {
		wrote := false
		for i := range kinds {
			if s, ok := kinds[i].AsString(); ok {
				if wrote {
					w.text(" | ")
				}
				if s == "integer" {
					s = "number"
				}
				w.text(s)
				wrote = true
			}
		}
		if wrote {
			return
		}
	}
	name, _ := kind.AsString()
	switch name {
	case "object":
		w.object(d, indent, depth)
	case "string":
		values, _ := member(d, "enum").AsList()
		wrote := false
		for i := range values {
			if s, ok := values[i].AsString(); ok {
				if wrote {
					w.text(" | ")
				}
				w.texts(`"`, s, `"`)
				wrote = true
			}
		}
		if !wrote {
			w.text("string")
		}
	case "number", "integer":
		w.text("number")
	case "boolean":
		w.text("boolean")
	case "array":
		items, ok := d.Get("items")
		if !ok {
			w.text("Array<any>")
			return
		}
		item, _ := items.AsDict()
		w.schema(item, indent, depth+1)
		w.text("[]")
	default:
		w.text("any")
	}
}

// nullable writes a schema and its "nullable".
func (w *harmonyWriter) nullable(d *jinja.Dict, indent string, depth int) {
	from := len(w.dst)
	w.schema(d, indent, depth+1)
	if null, ok := member(d, "nullable").AsBool(); ok && null && w.err == nil && !bytes.Contains(w.dst[from:], []byte("null")) {
		w.text(" | null")
	}
}

// trailing writes the description and the default of a variant as a comment after it.
func (w *harmonyWriter) trailing(d *jinja.Dict, bare bool) {
	sep := " // "
	if s, ok := member(d, "description").AsString(); ok {
		w.texts(sep, s)
		sep = " "
	}
	if v, ok := d.Get("default"); ok {
		w.text(sep)
		w.defaultOf(d, v, bare)
	}
}

// defaultOf writes a default. Strings are quoted, unless bare is set and they are an enum's; quotes in them are escaped
// only in enums.
func (w *harmonyWriter) defaultOf(d *jinja.Dict, v jinja.Value, bare bool) {
	w.text("default: ")
	s, isText := v.AsString()
	enum, _ := member(d, "enum").AsList()
	switch {
	case isText && len(enum) == 0:
		w.texts(`"`, s, `"`)
	case isText && bare:
		w.text(s)
	default:
		w.json(v)
	}
}

func (w *harmonyWriter) object(d *jinja.Dict, indent string, depth int) {
	if s, ok := member(d, "description").AsString(); ok {
		w.texts(indent, "// ", s, "\n")
	}
	w.text("{\n")
	required := map[string]bool{}
	names, _ := member(d, "required").AsList()
	for i := range names {
		if s, ok := names[i].AsString(); ok {
			required[s] = true
		}
	}
	dictAt(d, "properties").Range(func(k, v jinja.Value) bool {
		key, _ := k.AsString()
		if !required[key] {
			key += "?"
		}
		w.property(key, v, indent, depth)
		return w.err == nil
	})
	w.texts(indent, "}")
}

func (w *harmonyWriter) property(key string, v jinja.Value, indent string, depth int) {
	d, _ := v.AsDict()
	if s, ok := member(d, "title").AsString(); ok {
		w.texts(indent, "// ", s, "\n", indent, "//\n")
	}
	oneOf, hasOneOf := d.Get("oneOf")
	description, described := member(d, "description").AsString()
	if !hasOneOf && described {
		w.texts(indent, "// ", description, "\n")
	}
	if examples, _ := member(d, "examples").AsList(); len(examples) > 0 {
		w.texts(indent, "// Examples:\n")
		for i := range examples {
			if s, ok := examples[i].AsString(); ok {
				w.texts(indent, "// - \"", s, "\"\n")
			}
		}
	}
	preset, hasPreset := d.Get("default")
	if variants, ok := oneOf.AsList(); ok {
		w.variants(key, d, variants, indent, depth)
		return
	}
	w.texts(indent, key, ": ")
	w.nullable(d, indent+"    ", depth)
	w.text(",")
	if !hasOneOf && hasPreset {
		w.text(" // ")
		w.defaultOf(d, preset, true)
	}
	w.text("\n")
}

// variants writes a property with oneOf.
func (w *harmonyWriter) variants(key string, d *jinja.Dict, variants []jinja.Value, indent string, depth int) {
	description, described := member(d, "description").AsString()
	above := false // the description is written above
	if described {
		above = true
		if len(variants) > 0 {
			first, _ := variants[0].AsDict()
			s, ok := member(first, "description").AsString()
			above = !ok || s != description
		}
		if above {
			w.texts(indent, "// ", description, "\n")
		}
	}
	if preset, ok := d.Get("default"); ok {
		w.texts(indent, "// ")
		w.defaultOf(d, preset, true)
		w.text("\n")
	}
	w.texts(indent, key, ":\n")
	for i := range variants {
		variant, _ := variants[i].AsDict()
		w.texts(indent, " | ")
		w.nullable(variant, indent+"   ", depth)
		shown := variant
		s, has := member(variant, "description").AsString()
		if has && (i == 0 && above || described && s == description) {
			shown = variant.Clone()
			shown.Delete("description")
		}
		w.trailing(shown, true)
		w.text("\n")
	}
	w.texts(indent, ",\n")
}

// json writes a value as serde_json prints it.
func (w *harmonyWriter) json(v jinja.Value) {
	if w.err != nil {
		return
	}
	if items, ok := v.AsList(); ok {
		sep := "["
		for i := range items {
			w.text(sep)
			w.json(items[i])
			sep = ","
		}
		w.text(strings.TrimSuffix(sep, ",") + "]")
		return
	}
	if d, ok := v.AsDict(); ok {
		sep := "{"
		d.Range(func(k, v jinja.Value) bool {
			w.text(sep)
			w.json(k)
			w.text(":")
			w.json(v)
			sep = ","
			return w.err == nil
		})
		w.text(strings.TrimSuffix(sep, ",") + "}")
		return
	}
	raw, err := jinja.AppendJSON(nil, v, jinja.JSONOptions{})
	printed := string(raw)
	if err == nil && (v.Kind() == jinja.KindFloat || v.Kind() == jinja.KindInt) {
		printed, err = serdeNumber(v, printed)
	}
	if err != nil {
		w.err = err
	}
	w.text(printed)
}

// serdeNumber writes a number, printed by Python as raw, as serde_json 1.0.149 does. That rounds more than once, so the numbers
// are left out where its result need not be the nearest float: those with more than 15 digits or large exponents.
func serdeNumber(v jinja.Value, raw string) (string, error) {
	missing := fmt.Errorf("%w: the number %s in a tool", ErrMissing, raw)
	if v.Kind() == jinja.KindInt {
		_, signed := strconv.ParseInt(raw, 10, 64)
		if _, unsigned := strconv.ParseUint(raw, 10, 64); signed != nil && unsigned != nil {
			return "", missing
		}
		return raw, nil
	}
	f, _ := v.AsFloat()
	mantissa, exponent, _ := strings.Cut(strconv.FormatFloat(f, 'e', -1, 64), "e")
	digits := len(strings.Replace(strings.TrimPrefix(mantissa, "-"), ".", "", 1))
	exp, err := strconv.Atoi(exponent)
	switch {
	case err != nil, digits > 15, exp-digits < -23, exp > 22, exp == 15 && digits > 13: // Python writes a zero more
		return "", missing
	case exp < -5 || exp > 15:
		return fmt.Sprintf("%se%+d", mantissa, exp), nil
	case exp >= digits-1:
		return strconv.FormatFloat(f, 'f', 1, 64), nil
	}
	return strconv.FormatFloat(f, 'f', -1, 64), nil
}
