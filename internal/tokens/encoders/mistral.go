package encoders

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/bpe"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// mistral is mistral-common 1.13 as vLLM uses it for folders in Mistral's format: normalization
// and encoding of the versions 1 to 15. Clients' texts never become special tokens.
type mistral struct {
	version  int
	settings *bpe.MistralSettings

	bos, eos, beginInst, endInst, beginTools, endTools, beginResults, endResults, toolCalls uint32
	beginSystem, endSystem, toolContent, args, callID, beginSettings, endSettings           uint32
	beginThink, endThink                                                                    uint32 // 0: none
}

func newMistral(tok *bpe.Tokenizer) (Encoder, error) {
	file := tok.Config().MistralFile
	m := &mistral{version: file.Version, settings: file.Settings}
	if !slices.Contains([]int{1, 2, 3, 7, 11, 13, 15}, m.version) || m.settings != nil && m.settings.Schema != nil {
		return nil, ErrMissing
	}
	for _, token := range []struct {
		since int
		name  string
		id    *uint32
	}{
		{1, "<s>", &m.bos}, {1, "</s>", &m.eos}, {2, "[INST]", &m.beginInst}, {2, "[/INST]", &m.endInst}, {2, "[AVAILABLE_TOOLS]", &m.beginTools},
		{2, "[/AVAILABLE_TOOLS]", &m.endTools}, {2, "[TOOL_RESULTS]", &m.beginResults}, {2, "[/TOOL_RESULTS]", &m.endResults},
		{2, "[TOOL_CALLS]", &m.toolCalls}, {7, "[SYSTEM_PROMPT]", &m.beginSystem}, {7, "[/SYSTEM_PROMPT]", &m.endSystem},
		{7, "[TOOL_CONTENT]", &m.toolContent}, {11, "[ARGS]", &m.args}, {11, "[CALL_ID]", &m.callID}, {15, "[MODEL_SETTINGS]", &m.beginSettings},
		{15, "[/MODEL_SETTINGS]", &m.endSettings}, {optional, "[THINK]", &m.beginThink}, {optional, "[/THINK]", &m.endThink},
	} {
		id, ok := tok.TokenID(token.name)
		if !ok && m.version >= token.since {
			return nil, fmt.Errorf("the tokenizer of a Mistral model has no token %q", token.name)
		}
		*token.id = id
	}
	return m, nil
}

const optional = math.MaxInt

func (m *mistral) Traits() Traits {
	return Traits{Name: "mistral", Messages: Original, Marked: true, ToolParser: true}
}

// mistralMessage is a message of one role; several of a user or the assistant are merged.
type mistralMessage struct {
	role     string
	contents [][]mistralChunk // of each merged message
	list     bool             // the content was a list of parts
	calls    []mistralCall
	id       string  // of a tool
	name     *string // of a tool
	prefix   bool
}

type mistralChunk struct{ kind, text string }

// Types of chunks; an image and audio have the caller's mark as their text.
const (
	chunkText  = "text"
	chunkThink = "thinking"
	chunkImage = "image"
	chunkAudio = "audio"
)

type mistralCall struct {
	id, name  string
	arguments jinja.Value
}

func (m *mistral) Append(dst []byte, c *Chat) ([]byte, error) {
	if len(c.Messages) == 0 {
		return dst, refuse("list index out of range")
	}
	switch last := roleOf(c.Messages[len(c.Messages)-1]) == "assistant"; {
	case c.Generate && last:
		return dst, refuse("Cannot set `add_generation_prompt` to True when the last message is from the assistant.")
	case c.Continue && !last:
		return dst, refuse("Cannot set `continue_final_message` to True when the last message is not from the assistant.")
	}
	messages := make([]mistralMessage, len(c.Messages))
	for i := range messages {
		err := c.stopped()
		if err != nil {
			return dst, err
		}
		msg, _ := c.Messages[i].AsDict()
		if messages[i], err = mistralParse(msg); err != nil {
			return dst, err
		}
		if one := &messages[i]; m.version < 3 || m.version < 7 && one.role != "user" {
			if err := one.only([]string{chunkText}); err != nil {
				return dst, err
			}
		}
	}
	messages[len(messages)-1].prefix = c.Continue
	if err := mistralOrder(messages); err != nil {
		return dst, err
	}
	effort, err := m.effort(c)
	if err != nil {
		return dst, err
	}
	w := &mistralWriter{mistral: m, writer: newWriter(dst, c), effort: effort}
	if m.version < 7 {
		w.system = w.systemPrompt(messages)
	}
	merged := m.merged(messages)
	if m.version == 2 {
		if err := severalResults(merged); err != nil {
			return dst, err
		}
	}
	w.write(merged)
	return w.dst, w.err
}

// mistralNext are the roles that may follow a role.
var mistralNext = map[string][]string{"system": {"user", "assistant", "system"}, "user": {"assistant", "system", "user"},
	"assistant": {"assistant", "user", "tool"}, "tool": {"assistant", "tool", "user"}}

// mistralOrder refuses orders of roles that mistral-common refuses. What else its validator refuses of texts, tools and calls is not
// judged here: the engine answers such a request with an error.
func mistralOrder(messages []mistralMessage) error {
	first, last := &messages[0], &messages[len(messages)-1]
	switch {
	case len(messages) == 1 && first.role != "user" && first.role != "system":
		return refuse("Conversation must start with a user message or system message")
	case len(messages) > 1 && last.role == "assistant" && !last.prefix:
		return refuse("Expected last role User or Tool (or Assistant with prefix) for serving but got assistant")
	}
	for i := 1; i < len(messages); i++ {
		if !slices.Contains(mistralNext[messages[i-1].role], messages[i].role) {
			return refuse("Unexpected role '%s' after role '%s'", messages[i].role, messages[i-1].role)
		}
	}
	return nil
}

// mistralParse reads a message, as the methods from_openai do.
func mistralParse(msg *jinja.Dict) (m mistralMessage, err error) {
	content, has := msg.Get("content")
	var chunks []mistralChunk
	said, isText := content.AsString()
	parts, isList := content.AsList()
	if d, ok := content.AsDict(); ok && d.Len() == 0 { // vLLM iterates over it
		isList = true
	}
	switch {
	case isText:
		chunks = []mistralChunk{{chunkText, said}}
	case isList:
		m.list = true
		for i := range parts {
			part, _ := parts[i].AsDict()
			if part == nil {
				return m, refuse("'str' object has no attribute 'get'")
			}
			kind := text(part, "type")
			if kind == "" {
				continue
			}
			key := cmp.Or(map[string]string{chunkThink: chunkThink}[kind], "text")
			s, ok := member(part, key).AsString()
			if !ok || !slices.Contains([]string{chunkText, chunkThink, chunkImage, chunkAudio}, kind) {
				return m, refuse("'%s' is not a valid ChunkTypes", kind)
			}
			chunks = append(chunks, mistralChunk{kind, s})
		}
	case has && !content.IsNone() && !content.IsUndefined():
		return m, refuse("Unknown content type")
	}
	m.role = text(msg, "role")
	accepted := []string{chunkText, chunkImage, chunkAudio}
	switch m.role {
	case "user":
	case "tool":
		if _, ok := msg.Get("tool_call_id"); !ok {
			return m, refuse("'tool_call_id'")
		}
		m.id = text(msg, "tool_call_id")
		if name, ok := member(msg, "name").AsString(); ok {
			m.name = &name
		}
	case "system", "developer":
		m.role, accepted = "system", []string{chunkText, chunkAudio, chunkThink}
	case "assistant":
		accepted = []string{chunkText, chunkThink}
		if chunks, err = m.assistant(msg, chunks); err != nil {
			return m, err
		}
	default:
		return m, refuse("Unknown message role: %s", m.role)
	}
	if m.role != "assistant" && (!has || content.IsNone()) {
		return m, refuse("content: input should be a valid string or list")
	}
	m.contents = [][]mistralChunk{chunks}
	return m, m.only(accepted)
}

// assistant reads the calls of a message, and puts its reasoning before its content.
func (m *mistralMessage) assistant(msg *jinja.Dict, chunks []mistralChunk) ([]mistralChunk, error) {
	calls, _ := member(msg, "tool_calls").AsList()
	for i := range calls {
		call, _ := calls[i].AsDict()
		f := dictAt(call, "function")
		m.calls = append(m.calls, mistralCall{text(call, "id"), text(f, "name"), member(f, "arguments")})
	}
	v := member(msg, "reasoning")
	if v.IsNone() {
		return chunks, nil
	}
	thought, ok := v.AsString()
	if !ok || slices.ContainsFunc(chunks, func(c mistralChunk) bool { return c.kind == chunkThink }) {
		return nil, refuse("Message cannot have both thinking chunks in `content` and a top-level `reasoning` field.")
	}
	m.list = true
	return append([]mistralChunk{{chunkThink, thought}}, chunks...), nil
}

// only refuses chunks of types other than these.
func (m *mistralMessage) only(kinds []string) error {
	for _, c := range m.contents[0] {
		if !slices.Contains(kinds, c.kind) {
			return refuse("Unexpected content chunk types in %s message: ['%s']", m.role, c.kind)
		}
	}
	return nil
}

// said reports whether the content of a parsed message is true in Python: it is not empty.
func (m *mistralMessage) said() bool {
	c := m.contents[0]
	return len(c) > 0 && (m.list || c[0].text != "")
}

// systemPrompt joins the system messages, whose text the versions before 7 put into a user message.
func (w *mistralWriter) systemPrompt(messages []mistralMessage) string {
	var texts []string
	for i := range messages {
		if m := &messages[i]; m.role == "system" && m.said() {
			texts = append(texts, textOf(w.joined(m, "\n\n")))
		}
	}
	return strings.Join(texts, "\n\n")
}

// merged merges neighbours of one role, and sorts the results of tools by their calls.
func (m *mistral) merged(messages []mistralMessage) (out []mistralMessage) {
	var latest []string // ids of calls
	for from := 0; from < len(messages); {
		to := from + 1
		for to < len(messages) && messages[to].role == messages[from].role {
			to++
		}
		group := messages[from:to]
		from = to
		switch role := group[0].role; role {
		case "system":
			if m.version >= 7 {
				out = append(out, group...)
			}
		case "tool":
			if m.version >= 11 {
				group = sortedResults(group, latest)
			}
			out, latest = append(out, group...), nil
		default:
			one := mistralMessage{role: role}
			for i := range group {
				one.contents, one.calls = append(one.contents, group[i].contents...), append(one.calls, group[i].calls...)
				one.prefix = one.prefix || group[i].prefix
			}
			for _, call := range one.calls {
				latest = append(latest, call.id)
			}
			out = append(out, one)
		}
	}
	if len(out) == 0 || m.version < 7 && out[0].role != "user" {
		out = append([]mistralMessage{{role: "user"}}, out...)
	}
	return out
}

// sortedResults returns results in the order of the latest calls; those of other calls come last.
func sortedResults(results []mistralMessage, calls []string) []mistralMessage {
	place := map[string]int{}
	for i, id := range calls {
		place[id] = i
	}
	at := func(r *mistralMessage) int {
		if i, ok := place[r.id]; ok {
			return i
		}
		return len(calls)
	}
	out := slices.Clone(results)
	slices.SortStableFunc(out, func(a, b mistralMessage) int { return cmp.Compare(at(&a), at(&b)) })
	return out
}

// joined returns the content of m with neighbouring texts joined: by two line feeds between
// messages, and by sep within one. Empty texts are dropped.
func (w *mistralWriter) joined(m *mistralMessage, sep string) (out []mistralChunk) {
	var pieces []string // the texts since the last other chunk, and their separators
	end := func() {
		if len(pieces) > 0 {
			out, pieces = append(out, mistralChunk{chunkText, strings.Join(pieces, "")}), pieces[:0]
		}
	}
	for _, chunks := range m.contents {
		between := "\n\n"
		for _, c := range chunks {
			if w.text(""); w.err != nil {
				return nil
			}
			switch {
			case c.kind != chunkText:
				end()
				out = append(out, c)
			case c.text == "":
			case len(pieces) == 0:
				pieces, between = append(pieces, c.text), sep
			default:
				pieces, between = append(pieces, between, c.text), sep
			}
		}
	}
	end()
	return out
}

// textOf returns the text of chunks that are texts, and were joined to at most one.
func textOf(chunks []mistralChunk) string {
	if len(chunks) == 0 {
		return ""
	}
	return chunks[0].text
}

// mistralWriter writes messages. After an error it appends nothing.
type mistralWriter struct {
	*mistral
	*writer

	system string // before version 7
	effort string // since version 15, "" if the prompt names none
}

func (w *mistralWriter) write(messages []mistralMessage) {
	user := func(m mistralMessage) bool { return m.role == "user" }
	first, last := slices.IndexFunc(messages, user), len(messages)-1
	for last >= 0 && !user(messages[last]) {
		last--
	}
	w.token(w.bos)
	for i := range messages {
		if w.err != nil {
			return
		}
		switch m := &messages[i]; m.role {
		case "user":
			w.user(m, i == first, i == last)
		case "tool":
			w.result(m, i < last)
		case "assistant":
			w.assistant(m, i < last)
		default:
			w.token(w.beginSystem)
			w.chunks(m)
			w.token(w.endSystem)
		}
	}
}

// chunks writes a content. Of one with an image or audio, which precedes the texts, it writes only the placeholder.
func (w *mistralWriter) chunks(m *mistralMessage) {
	sep := "\n\n"
	if w.version >= 15 {
		sep = ""
	}
	joined := w.joined(m, sep)
	if at := slices.IndexFunc(joined, func(c mistralChunk) bool { return c.kind == chunkImage || c.kind == chunkAudio }); at >= 0 {
		w.part(joined[at].text) // its tokens are not known here, so what follows is not either
		return
	}
	for _, c := range joined {
		switch {
		case c.kind == chunkText && len(joined) == 1 && m.role == "assistant":
			w.part(strings.TrimRight(c.text, " "))
		case c.kind == chunkText:
			w.part(c.text)
		case w.version < 13 || w.beginThink == 0 || w.endThink == 0:
			w.refuse("Think not implemented for tokenizer < V13.")
		default:
			w.token(w.beginThink)
			w.text(c.text)
			w.token(w.endThink)
		}
	}
}

// has reports whether is returns true for a chunk.
func (m *mistralMessage) has(is func(c mistralChunk) bool) bool {
	return slices.ContainsFunc(m.contents, func(c []mistralChunk) bool { return slices.ContainsFunc(c, is) })
}

func (w *mistralWriter) refuse(reason string) {
	if w.err == nil {
		w.err = refuse("%s", reason)
	}
}

func (w *mistralWriter) user(m *mistralMessage, first, last bool) {
	if w.version == 1 {
		w.texts("[INST] ")
		if first && w.system != "" {
			w.texts(w.system, "\n\n")
		}
		w.texts(textOf(w.joined(m, "\n\n")), " [/INST]")
		w.part("")
		return
	}
	if w.version < 13 && last || w.version >= 13 && first {
		if len(w.chat.Tools) > 0 {
			w.token(w.beginTools)
			w.dumps(mistralTools(w.chat.Tools))
			w.token(w.endTools)
		}
		if w.effort != "" {
			w.token(w.beginSettings)
			w.dumps(mistralObject("reasoning_effort", jinja.String(w.effort)))
			w.token(w.endSettings)
		}
	}
	w.token(w.beginInst)
	if last && w.system != "" {
		w.texts(w.system, "\n\n")
	}
	w.chunks(m)
	w.token(w.endInst)
}

// mistralTools returns tools with the members that mistral-common knows, strict excepted.
func mistralTools(tools []jinja.Value) jinja.Value {
	out := make([]jinja.Value, len(tools))
	for i := range tools {
		tool, _ := tools[i].AsDict()
		f := dictAt(tool, "function")
		parameters := dictAt(f, "parameters")
		if parameters == nil {
			parameters = jinja.NewDict(0)
		}
		out[i] = mistralObject("type", jinja.String("function"), "function", mistralObject("name", jinja.String(text(f, "name")),
			"description", jinja.String(text(f, "description")), "parameters", jinja.FromDict(parameters)))
	}
	return jinja.List(out)
}

// mistralObject returns an object of names and values.
func mistralObject(members ...any) jinja.Value {
	d := jinja.NewDict(len(members) / 2)
	for i := 0; i+1 < len(members); i += 2 {
		name, _ := members[i].(string)
		v, _ := members[i+1].(jinja.Value)
		d.Set(name, v)
	}
	return jinja.FromDict(d)
}

// effort returns the reasoning effort in the prompt, "" for none. Model settings exist since version 15 and precede the
// first user message; they are checked even if the chat has none.
func (m *mistral) effort(c *Chat) (string, error) {
	switch {
	case m.version < 15, m.settings != nil && m.settings.Effort == nil:
		return "", nil
	case m.settings == nil:
		return "", refuse("model_settings_builder must not be None")
	}
	if effort := cmp.Or(c.Effort, m.settings.Effort.Default); slices.Contains(m.settings.Effort.Values, effort) {
		return effort, nil
	}
	return "", refuse("reasoning_effort is not one of the model's")
}

// readable returns the value that text encodes in JSON, or text itself if it is not JSON.
func readable(stop <-chan struct{}, s string) (jinja.Value, error) {
	v, err := jinja.ParseJSONInto(stop, nil, []byte(s), false)
	switch {
	case errors.Is(err, jinja.ErrIntDigits):
		err = refuse("%v", err)
	case errors.Is(err, jinja.ErrLoneSurrogate), errors.Is(err, jinja.ErrJSONDepth):
		err = fmt.Errorf("%w: the result of a tool: %w", ErrMissing, err)
	case err != nil, strings.HasPrefix(s, "\ufeff"):
		v, err = jinja.String(s), nil
	}
	return v, err
}

func (w *mistralWriter) result(m *mistralMessage, past bool) {
	if w.version < 7 {
		if w.version == 1 {
			w.refuse("Tools not implemented for tokenizer V1")
		}
		v, err := readable(w.chat.Stop, cmp.Or(textOf(w.joined(m, "\n\n")), "{}"))
		if w.err == nil {
			w.err = err
		}
		if w.version == 2 && past || w.err != nil {
			return
		}
		w.token(w.beginResults)
		if w.version == 2 {
			name := jinja.None()
			if m.name != nil {
				name = jinja.String(*m.name)
			}
			w.dumps(jinja.List([]jinja.Value{mistralObject("name", name, "content", v)}))
		} else {
			w.dumps(mistralObject("content", v, "call_id", jinja.String(m.id)))
		}
		w.token(w.endResults)
		return
	}
	w.token(w.beginResults)
	if w.version < 13 {
		w.text(m.id)
		w.token(w.toolContent)
	}
	w.chunks(m)
	w.token(w.endResults)
}

func (w *mistralWriter) assistant(m *mistralMessage, past bool) {
	said := m.has(func(c mistralChunk) bool { return c.kind != chunkText || c.text != "" })
	switch {
	case !said && len(m.calls) == 0:
		w.refuse("Invalid assistant message")
	case w.version == 1 && len(m.calls) > 0:
		w.refuse("Tools not implemented for tokenizer V1")
	case w.version == 2 && said && len(m.calls) > 0:
		w.refuse("Cannot have tool calls and content defined in the same assistant message")
	case w.version == 2 && past && len(m.calls) > 0:
		return
	case w.version == 1:
		w.part(textOf(w.joined(m, "\n\n")))
	case said:
		w.chunks(m)
	}
	switch {
	case len(m.calls) == 0:
	case w.version < 11:
		calls := make([]jinja.Value, len(m.calls))
		for i, call := range m.calls {
			calls[i] = mistralObject("name", jinja.String(call.name), "arguments", call.arguments)
			if d, _ := calls[i].AsDict(); w.version > 2 {
				d.Set("id", jinja.String(call.id))
			}
		}
		w.token(w.toolCalls)
		w.dumps(jinja.List(calls))
	default:
		for _, call := range m.calls {
			w.token(w.toolCalls)
			w.text(call.name)
			if w.version < 13 {
				w.token(w.callID)
				w.text(call.id)
			}
			w.token(w.args)
			w.dumps(call.arguments)
		}
	}
	if !m.prefix {
		w.token(w.eos)
	}
}

// severalResults refuses more than one result for a turn with calls after the last user message, which version 2 cannot express.
func severalResults(messages []mistralMessage) error {
	results := 0
	for i, m := range slices.Backward(messages) {
		switch m.role {
		case "tool":
			results++
		case "assistant":
			if results > 1 && len(messages[i].calls) > 0 {
				return refuse("Tokenizer v2 does not support multiple tool results for one assistant turn.")
			}
			results = 0
		default:
			return nil
		}
	}
	return nil
}
