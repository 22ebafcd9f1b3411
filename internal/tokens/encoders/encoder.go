package encoders

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvlane/kvlane/internal/tokens/bpe"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// Encoder turns conversations into prompts. It is safe for concurrent use.
type Encoder interface {
	// Traits describes how to prepare a Chat.
	Traits() Traits
	// Append appends the prompt. The error is a *Refusal if the engine refuses the conversation, and
	// ErrStopped once Chat.Stop is closed.
	Append(dst []byte, c *Chat) ([]byte, error)
}

// Traits describes an encoder.
type Traits struct {
	Name string
	// Messages is the form in which the encoder takes messages.
	Messages Form
	// Marked: the prompt is text for bpe.Marked.
	Marked bool
	// Dated: the prompt contains the date.
	Dated bool
	// ToolParser: vLLM accepts tools for such a model without a tool parser.
	ToolParser bool
}

// Form is a form of messages.
type Form uint8

// Forms of messages.
const (
	// Joined: contents are text; the texts of several parts are joined by line feeds.
	Joined Form = iota
	// Parts: contents are lists of parts, except those of tools.
	Parts
	// Validated: messages are as vLLM's request model leaves them, see Harmony.
	Validated
	// Original: contents are as the client wrote them, in messages that vLLM's chat parser accepts. A part that is an
	// image or video has the type image, and audio the type audio; their text is the caller's mark.
	Original
	// Read: as Original, without contents that vLLM's request model leaves for later.
	Read
)

// Chat is a conversation.
type Chat struct {
	Messages []jinja.Value
	Tools    []jinja.Value
	// Args are the request's arguments for the chat template; never nil.
	Args *jinja.Dict
	// Effort is the request's reasoning_effort, "" if it has none.
	Effort string
	Now    time.Time
	// Continue: the model continues the last message. Generate: it begins a new one.
	Continue, Generate bool
	// Limit is the maximum size of the prompt in bytes.
	Limit int
	// Stop ends the work once it is closed; nil means never.
	Stop <-chan struct{}
}

// stopped returns ErrStopped once Stop is closed.
func (c *Chat) stopped() error {
	select {
	case <-c.Stop:
		return ErrStopped
	default:
		return nil
	}
}

// Refusal is the error for a conversation that the engine refuses.
//
//nolint:errname // it is what the engine does
type Refusal struct {
	Status int
	Reason string
}

func (r *Refusal) Error() string { return r.Reason }

func refuse(format string, args ...any) error {
	return &Refusal{Status: 400, Reason: fmt.Sprintf(format, args...)}
}

// ErrLimit is returned for a prompt above Chat.Limit.
var ErrLimit = errors.New("the prompt is too long to be built here")

// ErrStopped is returned for a prompt whose Chat.Stop was closed.
var ErrStopped = errors.New("the encoding of the prompt was stopped")

// ErrMissing is returned for a chat whose prompt the engine builds in a way that is not implemented here.
var ErrMissing = errors.New("the engine builds this prompt in a way that Kvlane does not follow")

// entry is a row of the table of encoders.
type entry struct {
	make func(tok *bpe.Tokenizer) (Encoder, error) // nil: missing
	// A model uses the encoder if its config.json has the type or one of the architectures.
	modelType     string
	architectures []string
}

// table lists the encoders that vLLM chooses by itself, in this order.
var table = []entry{
	{make: newHarmony, modelType: "gpt_oss"},
	{make: newDeepseekV32, architectures: []string{"DeepseekV32ForCausalLM"}},
	{make: newDeepseekV4, architectures: []string{"DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration"}},
	{make: newDeepseekV41, architectures: []string{"DeepseekV41ForCausalLM"}},
	{make: newInkling, architectures: []string{"InklingForCausalLM", "InklingForConditionalGeneration"}},
	{architectures: []string{"KimiK3ForConditionalGeneration", "MoonshotKimiaForCausalLM"}},
}

// ForVLLM returns the encoder that vLLM uses for a model, nil if it uses a chat template. It fails
// with ErrMissing if there is none here, and if the tokenizer lacks a token that it needs.
func ForVLLM(tok *bpe.Tokenizer) (Encoder, error) {
	config := tok.Config()
	for _, e := range table {
		switch {
		case (e.modelType == "" || e.modelType != config.ModelType) && !slices.Contains(e.architectures, config.Architecture):
		case e.make == nil:
			return nil, ErrMissing
		default:
			return e.make(tok)
		}
	}
	if own := tok.Mistral(); own != nil {
		return newMistral(own)
	}
	return nil, nil //nolint:nilnil // no encoder is a result
}

// conversationTypes are the model types that SGLang renders by its own conversation template, which it prefers to the
// folder's template but not to that of its flag.
var conversationTypes = strings.Fields("internvl_chat deepseek_vl_v2 multi_modality phi4mm minicpmv minicpmo moss_vl deepseek-ocr unlimited-ocr paddleocr_vl whisper")

// ForSGLang returns the encoder that SGLang 0.5.23 uses for a model, nil if it uses a template, and fails with ErrMissing
// if there is none here. bare: the model has no template; given: the engine was started with one.
func ForSGLang(config *bpe.Config, bare, given bool) (Encoder, error) {
	for _, name := range [...]string{"DeepseekV4", "KimiK3", "InklingForConditionalGeneration"} {
		if strings.Contains(config.Architecture, name) {
			return nil, ErrMissing
		}
	}
	switch {
	case config.ModelType == "deepseek_v41", !given && slices.Contains(conversationTypes, config.ModelType):
		return nil, ErrMissing
	case bare && strings.Contains(config.Architecture, "DeepseekV3"):
		return deepseekV32{sglang: true}, nil
	default:
		return nil, nil //nolint:nilnil // no encoder is a result
	}
}

// member returns the value of a key, None if d lacks it. d may be nil.
func member(d *jinja.Dict, key string) jinja.Value {
	if v, ok := d.Get(key); ok {
		return v
	}
	return jinja.None()
}

// text returns the text under a key, "" if d has none.
func text(d *jinja.Dict, key string) string {
	s, _ := member(d, key).AsString()
	return s
}

func dictAt(d *jinja.Dict, key string) *jinja.Dict {
	inner, _ := member(d, key).AsDict()
	return inner
}

// writer appends marked text up to a limit. After an error it appends nothing.
type writer struct {
	chat  *Chat
	dst   []byte
	limit int
	err   error
}

func newWriter(dst []byte, c *Chat) *writer {
	return &writer{chat: c, dst: dst, limit: len(dst) + c.Limit}
}

func (w *writer) text(s string) {
	if w.err == nil {
		w.err = w.chat.stopped()
	}
	if w.err == nil && len(w.dst)+len(s) > w.limit {
		w.err = ErrLimit
	}
	if w.err == nil {
		w.dst = append(w.dst, s...)
	}
}

func (w *writer) texts(all ...string) {
	for _, s := range all {
		w.text(s)
	}
}

// dumps appends v as Python's json.dumps(ensure_ascii=False).
func (w *writer) dumps(v jinja.Value) {
	if w.text(""); w.err != nil {
		return
	}
	if w.dst, w.err = appendJSON(w.dst, v); w.err == nil && len(w.dst) > w.limit {
		w.err = ErrLimit
	}
}

// part appends a text that is tokenized by itself.
func (w *writer) part(s string) {
	w.text(s)
	w.dst = bpe.AppendPart(w.dst)
}

func (w *writer) token(id uint32) { w.dst = bpe.AppendToken(w.dst, id) }

// appendJSON appends v as Python's json.dumps(ensure_ascii=False).
func appendJSON(dst []byte, v jinja.Value) ([]byte, error) {
	return jinja.AppendJSON(dst, v, jinja.JSONOptions{})
}
