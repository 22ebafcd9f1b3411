package body

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"slices"
	"strconv"
	"strings"
	"unsafe"
)

// Form is the form in which a request carries its prompt.
type Form uint8

// The forms. A list of prompts is a batch, which is represented by its first prompt.
const (
	FormNone     Form = iota // no prompt, or one that Kvlane cannot read
	FormText                 // one string
	FormTexts                // a list of strings
	FormIDs                  // token ids
	FormIDLists              // a list of token id lists
	FormMessages             // chat messages
	FormItems                // items of the Responses API
	FormOther                // prompt embeddings, or a form that no engine accepts
)

// maxOthers bounds the kept fields without a Field constant; engines declare about a hundred.
const maxOthers = 1024

// maxElements bounds the element spans kept of a list; Count is not bounded by it.
const maxElements = 1 << 16

// Request is a checked body with the positions of its parts. All spans are offsets into Body, which the caller must
// keep unchanged; nothing else is referenced. A Request may be reused through its Parse method.
type Request struct {
	API  API
	Body []byte
	Form Form
	// Prompt is the value that carries the prompt: the list of messages, the string or the list of prompts.
	Prompt Span
	// Elements are the spans of Prompt's elements that are objects, arrays or strings: messages,
	// items, or prompts of a batch. At most 65,536 are kept; Count is the full number.
	Elements []Span
	// Count is the number of Prompt's elements (token ids included), 0 if it is not a list.
	Count int
	// LongInteger reports whether any integer in the body has more than LongestInteger digits.
	LongInteger bool
	// Repeats reports whether a field with a Field constant occurs more than once.
	Repeats bool

	fields [numFields]Span
	// others are the fields without a Field constant, at most maxOthers.
	others []place
}

// known is the part of a list that is not scanned again.
type known struct {
	start    int
	elements []Span
}

// place is the position of a top-level field: its key (including the quotes) and its value.
type place struct{ key, value Span }

// Parse checks that body is strict JSON and locates its fields. The error is a *SyntaxError, an *UnreadError, or
// reports that the body is not an object. Types are not checked: callers decide what an engine would reject.
func Parse(api API, body []byte) (*Request, error) {
	r := new(Request)
	return r, r.Parse(api, body)
}

// Parse is like the function Parse, but reuses r's memory.
func (r *Request) Parse(api API, body []byte) error { return r.Resume(api, body, 0, nil) }

// Resume is Parse for a body that begins like one that was parsed before. elements are the first ones of a list that
// starts at start; up to the end of the last of them both bodies must be equal. They are not scanned again: JSON is
// read forwards only, so the state at the end of an element depends only on the bytes before it.
func (r *Request) Resume(api API, body []byte, start int, elements []Span) error {
	k := known{start, elements}
	*r = Request{API: api, Body: body, Elements: r.Elements[:0], others: r.others[:0]}
	s := scanner{b: body}
	i := s.begin()
	if i < len(body) && body[i] != '{' {
		if err := Valid(body); err != nil {
			return err
		}
		return errors.New("the body must be a JSON object")
	}
	if i = r.members(&s, i, k); i >= 0 {
		if i = s.space(i); i != len(body) {
			i = s.fail(i, "nothing may follow the value")
		}
	}
	if i < 0 {
		return s.finish()
	}
	r.LongInteger = s.long
	r.classify()
	return nil
}

// members reads the outermost object and records the spans of its fields.
func (r *Request) members(s *scanner, i int, k known) int {
	read := func(key []byte, at int) int {
		if field, ok := fieldOf(key); ok && field == r.API.promptField() && at < len(s.b) && s.b[at] == '[' {
			return r.list(s, at, k)
		}
		return s.value(at)
	}
	return s.members(i, read, func(key, value Span) {
		if field, ok := fieldOf(key.Of(s.b)); ok {
			r.Repeats = r.Repeats || r.fields[field].Present()
			r.fields[field] = value // of duplicate keys the last one counts, as in every engine's reader
		} else if len(r.others) < maxOthers {
			r.others = append(r.others, place{key, value})
		}
	})
}

// list reads the list at i. If the known elements are from this list, it resumes after the last of them.
func (r *Request) list(s *scanner, i int, k known) int {
	r.Elements, r.Count = r.Elements[:0], 0
	each := func(e Span) {
		r.Count++
		if c := s.b[e.Start]; (c == '{' || c == '"' || c == '[') && len(r.Elements) < maxElements {
			r.Elements = append(r.Elements, e)
		}
	}
	if n := len(k.elements); n > 0 && i == k.start {
		r.Elements, r.Count = append(r.Elements, k.elements...), n
		s.depth++
		return s.elements(k.elements[n-1].End, n, each)
	}
	return s.array(i, each)
}

// TakesMessages reports whether the prompt of the API's requests is usually a list of messages.
func (a API) TakesMessages() bool { return a.promptField() == FieldMessages }

// promptField returns the field that usually carries the prompt; the spans of its elements are kept.
func (a API) promptField() Field {
	switch a {
	case Chat, Messages, CountTokens, Tokenize:
		return FieldMessages
	case Completions:
		return FieldPrompt
	case Responses, Embeddings, Classify, Pooling:
		return FieldInput
	case Generate:
		return FieldInputIDs
	case VLLMGenerate:
		return FieldTokenIDs
	default:
		return numFields
	}
}

func (r *Request) classify() {
	field := r.API.promptField()
	if r.API == Tokenize && !r.Has(FieldMessages) {
		field = FieldPrompt
	}
	if r.API == Generate && !r.Has(FieldInputIDs) {
		field = FieldText
	}
	if r.API.Pools() && !r.Has(FieldInput) && r.Has(FieldMessages) {
		field = FieldMessages
	}
	if field == numFields {
		return
	}
	if r.Prompt = r.fields[field]; !r.Prompt.Present() {
		if r.Has(FieldPromptEmbeds) || r.Has(FieldInputEmbeds) {
			r.Form = FormOther
		}
		return
	}
	if field != r.API.promptField() {
		r.Elements, r.Count = r.Elements[:0], 0
		if r.Body[r.Prompt.Start] == '[' {
			s := scanner{b: r.Body}
			r.list(&s, r.Prompt.Start, known{})
		}
	}
	r.Form = r.form(field)
}

func (r *Request) form(field Field) Form {
	switch c := r.Body[r.Prompt.Start]; {
	case c == 'n':
		r.Prompt = Span{}
		return FormNone
	case field == FieldMessages:
		if c == '[' {
			return FormMessages
		}
		return FormOther
	case c == '"':
		return FormText
	case c != '[':
		return FormOther
	case len(r.Elements) == 0:
		if r.API == Responses {
			return FormItems
		}
		return FormIDs
	case r.API == Responses:
		return FormItems
	}
	switch r.Body[r.Elements[0].Start] {
	case '"':
		return FormTexts
	case '[':
		return FormIDLists
	default:
		return FormOther
	}
}

// Memory returns the memory in use besides Body, in bytes.
func (r *Request) Memory() int {
	return int(unsafe.Sizeof(*r)) + cap(r.Elements)*int(unsafe.Sizeof(Span{})) + cap(r.others)*int(unsafe.Sizeof(place{}))
}

// Span returns the position of a top-level field's value, the zero Span if the field is absent.
func (r *Request) Span(f Field) Span { return r.fields[f] }

// Raw returns the value of a top-level field as written, nil if it is absent.
func (r *Request) Raw(f Field) []byte {
	if s := r.fields[f]; s.Present() {
		return s.Of(r.Body)
	}
	return nil
}

// Has reports whether a top-level field is present and not null.
func (r *Request) Has(f Field) bool {
	s := r.fields[f]
	return s.Present() && r.Body[s.Start] != 'n'
}

// Get returns the value of the top-level field with this key as written, nil if it is absent. It
// also finds fields without a Field constant. Of duplicate keys the last one counts.
func (r *Request) Get(name string) []byte {
	if f, ok := fieldByName[name]; ok {
		return r.Raw(f)
	}
	for i := range slices.Backward(r.others) {
		if o := &r.others[i]; IsKey(o.key.Of(r.Body), name) {
			return o.value.Of(r.Body)
		}
	}
	return nil
}

// Text returns the decoded text of a field, "" if it is absent or not a string.
func (r *Request) Text(f Field) string { return Text(r.Raw(f)) }

// Bool returns the value of a boolean field, or absent if it is missing or not a boolean.
func (r *Request) Bool(f Field, absent bool) bool {
	raw := r.Raw(f)
	return string(raw) == "true" || absent && string(raw) != "false"
}

// Int returns the value of an integer field; ok is false if it is absent or not a 64-bit integer.
func (r *Request) Int(f Field) (n int64, ok bool) { return integer(r.Raw(f)) }

func integer(raw []byte) (int64, bool) {
	if len(raw) == 0 || len(raw) > 20 {
		return 0, false
	}
	n, err := strconv.ParseInt(string(raw), 10, 64)
	return n, err == nil
}

// Model returns the requested model or adapter name.
func (r *Request) Model() string { return r.Text(FieldModel) }

// Stream reports whether the client wants a streamed response.
func (r *Request) Stream() bool { return r.Bool(FieldStream, false) }

// CacheSalt returns the salt that separates this request's KV blocks from those of other requests, "" if there is none.
// SGLang accepts a list for a batch; the first element counts.
func (r *Request) CacheSalt() string { return Text(FirstItem(r.Raw(FieldCacheSalt))) }

// LoRA returns the adapter in SGLang's lora_path, "" if there is none. For the other engines the model name selects the adapter.
func (r *Request) LoRA() string { return Text(FirstItem(r.Raw(FieldLoraPath))) }

// Member returns the value of a member of an object field as written, nil if it is absent.
func (r *Request) Member(f Field, name string) []byte { return Member(r.Raw(f), name) }

// Member returns the value of the member of raw, a checked JSON value, that has this key; nil if
// raw is not an object or lacks the key. Of duplicate keys the last one counts.
func Member(raw []byte, name string) (found []byte) {
	EachMember(raw, func(key, value []byte) {
		if IsKey(key, name) {
			found = value
		}
	})
	return found
}

// NamesShared reports whether the client names data that engines share between clients, regardless of the salt: a session of
// SGLang, or media by a uuid or a hash. vLLM accepts a uuid without the media; SGLang stores processed media by their hash.
func (r *Request) NamesShared() (found bool) {
	var parameters []byte // of SGLang's /vertex_generate
	if r.API == Unknown {
		parameters = Member(r.Body, "parameters")
	}
	for _, f := range [...]Field{FieldFeatures, FieldContentParts, FieldMMHashes, FieldMMContentHashes, FieldSessionParams} {
		found = found || r.Has(f) || isSet(Member(parameters, f.String()))
	}
	named := func(name string) bool { return bytes.Contains(r.Body, []byte(name)) }
	if !slices.ContainsFunc(mediumNames[:], named) && !named(`\u00`) {
		return found
	}
	EachMember(r.Body, func(_, field []byte) { found = found || namesPart(field, 0, r.API == Generate) }) // messages, input, documents, queries and more
	return found
}

// maxBatch is the nesting depth of lists in a batch of messages.
const maxBatch = 2

// namesPart reports whether a message or input, possibly nested in lists, has a part that names its medium. If bare, it
// may be such a part itself.
func namesPart(raw []byte, lists int, bare bool) (found bool) {
	found = bare && namesMedium(raw)
	if lists < maxBatch {
		EachItem(raw, func(item []byte) { found = found || namesPart(item, lists+1, bare) })
	}
	for _, name := range [...]string{"content", "output", "image_data", "video_data", "audio_data"} {
		EachItem(Member(raw, name), func(part []byte) { found = found || namesMedium(part) || namesMedium(Member(part, "image_url")) })
	}
	return found
}

// mediumNames are the members that name a part's medium: vLLM's, and SGLang's hashes of the raw or processed bytes.
var mediumNames = [...]string{"uuid", "content_hash", "hash", "pad_value", "pad_values", "identity"}

func namesMedium(part []byte) bool {
	return slices.ContainsFunc(mediumNames[:], func(name string) bool { return isSet(Member(part, name)) })
}

// NamesMediumAtLength reports whether the body has, wherever it is, a uuid of more than most bytes as written, or such a hash of a
// medium in vLLM's features.
func (r *Request) NamesMediumAtLength(most int) (long bool) {
	EachMember(r.Member(FieldFeatures, "mm_hashes"), func(_, hashes []byte) {
		EachItem(hashes, func(hash []byte) { long = long || len(hash) > most })
	})
	if long || len(r.Body) <= most || !bytes.Contains(r.Body, []byte("uuid")) && !bytes.Contains(r.Body, []byte(`\u00`)) {
		return long
	}
	s, uuid := scanner{b: r.Body}, false // uuid: the last key was this
	for i := 0; i < len(s.b); i++ {
		if s.b[i] != '"' {
			continue
		}
		end := s.str(i)
		text := s.b[i:end]
		i = end - 1
		if uuid && len(text) > most {
			return true
		}
		colon := s.space(end)
		uuid = colon < len(s.b) && s.b[colon] == ':' && IsKey(text, "uuid")
	}
	return false
}

// isSet reports whether a member exists and is not null.
func isSet(raw []byte) bool { return len(raw) > 0 && raw[0] != 'n' }

// MaxTokens returns the maximum number of tokens to generate, from the field that the API gives
// precedence; ok is false if the request sets none.
func (r *Request) MaxTokens() (n int64, ok bool) {
	limits := [][]byte{r.Raw(FieldMaxTokens)}
	switch r.API { //nolint:exhaustive // the others have max_tokens
	case Generate, VLLMGenerate:
		limits = [][]byte{r.Member(FieldSamplingParams, "max_new_tokens"), r.Member(FieldSamplingParams, "max_tokens")}
	case Responses:
		limits = [][]byte{r.Raw(FieldMaxOutputTokens)}
	case Chat:
		limits = [][]byte{r.Raw(FieldMaxCompletionTokens), r.Raw(FieldMaxTokens)}
	}
	for _, raw := range limits {
		if n, ok = integer(raw); ok {
			return n, true
		}
	}
	return 0, false
}

// Number returns the number that raw is, or that it has as a text: all engines read numbers in requests with pydantic, which
// takes "3", " +3.0" and "1_0" too. It returns 0 for anything else.
func Number(raw []byte) (v float64) {
	if text, ok := TextOf(raw); ok {
		v, _ = strconv.ParseFloat(strings.ReplaceAll(strings.TrimSpace(text), "_", ""), 64)
	} else if len(raw) > 0 {
		v, _ = strconv.ParseFloat(string(raw), 64)
	}
	if math.IsNaN(v) { // it would hide larger ones
		return 0
	}
	return v
}

// Choices returns the number of sequences that the engine will generate: the prompts of a batch times n, or best_of if
// it is larger and bestOf. Only TensorRT-LLM reads best_of: vLLM has none, and SGLang's takes no part.
func (r *Request) Choices(bestOf bool) int64 {
	most := 1.0
	switch r.API { //nolint:exhaustive // engines ignore these fields elsewhere
	case Chat, Completions:
		if most = Number(r.Raw(FieldN)); bestOf {
			most = max(most, Number(r.Raw(FieldBestOf)))
		}
	case Generate, VLLMGenerate: // SGLang wants the same n in all items of a list
		most = Number(Member(FirstItem(r.Raw(FieldSamplingParams)), "n"))
	}
	n := int64(min(max(most, 1), 1<<16)) // a client chose it
	if (r.Form == FormTexts || r.Form == FormIDLists) && r.Count > 1 {
		n *= int64(r.Count)
	}
	return n
}

// ConversationFields are the body fields that may contain a conversation id, by descending precedence: TensorRT-LLM's
// own, then the session fields of the engines and of OpenAI's APIs. A dot separates object levels. They take precedence
// over headers. A trajectory is Dynamo's name for a chain of requests within a session (documentation 1.2).
var ConversationFields = []string{"conversation_params.conversation_id", "disaggregated_params.conversation_id", "session_id",
	"vllm_xargs.session_id", "nvext.agent_context.trajectory_id", "nvext.agent_context.session_id", "conversation.id", "conversation"}

// LooseConversationFields count only if no header has an id: subagents may use their parent's value (Codex,
// prompt_cache_key), and a run may consist of several conversations (LiteLLM's metadata.session_id).
var LooseConversationFields = []string{"prompt_cache_key", "metadata.session_id"}

// ConversationID returns the first non-blank text among the given body fields, trimmed, and the name of its field.
func (r *Request) ConversationID(fields []string) (id, field string) {
	for _, name := range fields {
		outer, inner, nested := strings.Cut(name, ".")
		raw := r.Get(outer)
		for nested && raw != nil {
			outer, inner, nested = strings.Cut(inner, ".")
			raw = Member(raw, outer)
		}
		if id = strings.TrimSpace(Text(raw)); id != "" {
			return id, name
		}
	}
	return "", ""
}

// SessionOfUser returns the session that Claude Code puts into Anthropic's metadata.user_id: a JSON object as text, or
// in older versions user_..._account_..._session_ID. "" if there is none.
func SessionOfUser(id string) string {
	var user struct {
		Session string `json:"session_id"`
	}
	const longest = 4 << 10 // Claude Code's have about 200 bytes
	if strings.HasPrefix(id, "{") && len(id) <= longest && json.Unmarshal([]byte(id), &user) == nil {
		return user.Session
	}
	_, session, _ := strings.Cut(id, "_session_")
	return session
}

// FirstPrompt returns the request's only prompt, or the first of a batch.
func (r *Request) FirstPrompt() []byte {
	if (r.Form == FormTexts || r.Form == FormIDLists) && len(r.Elements) > 0 {
		return r.Elements[0].Of(r.Body)
	}
	return r.Prompt.Of(r.Body)
}

func hasEscape(raw []byte) bool { return bytes.IndexByte(raw, '\\') >= 0 }
