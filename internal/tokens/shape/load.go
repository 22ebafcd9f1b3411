package shape

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"sync/atomic"
	"time"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/bpe"
	"github.com/kvlane/kvlane/internal/tokens/conv"
	"github.com/kvlane/kvlane/internal/tokens/encoders"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
	"github.com/kvlane/kvlane/internal/tokens/media"
)

// Options describes how a model's engine was started, which the model's files do not contain. The zero value is a stock engine.
type Options struct {
	// ChatTemplate replaces the model's own template (vLLM and SGLang --chat-template). "" keeps it.
	ChatTemplate string
	// ToolParser: vLLM runs with --enable-auto-tool-choice and --tool-call-parser. Without them it rejects tools.
	ToolParser bool
	// HideToolsWhenNone is vLLM's --exclude-tools-when-tool-choice-none.
	HideToolsWhenNone bool
	// TrustTemplates: requests may supply a chat_template (vLLM with --trust-request-chat-template). Without it none is
	// compiled: vLLM rejects such a request, and for the other engines the ids are unknown.
	TrustTemplates bool
	// Multimodal reports whether the engine's model accepts images, audio or video; if not, requests with them are
	// refused. nil: derived from config.json in the tokenizer's directory, or else from the chat template.
	Multimodal *bool
	// MaxModelLen is the engine's context length in tokens; longer prompts are refused as the engine would. 0: unknown, no limit.
	MaxModelLen int
	// Names are the base model's names in requests; every other name denotes an adapter. Empty: no adapters.
	Names []string
	// Now is the engine's clock and time zone, for templates that print the date. nil: time.Now.
	Now func() time.Time
}

// Model is one served model. It is safe for concurrent use.
type Model struct {
	tok       *bpe.Tokenizer
	sglang    *bpe.Tokenizer // as SGLang uses it
	config    config
	options   Options
	idLimit   int                  // largest id + 1
	templates map[string]*template // by transformers' names: default, tool_use, ...
	// encoder builds prompts as vLLM's own code for this model does; nil: vLLM uses a template or, with encoderMissing, code
	// that is not implemented here.
	encoder        encoders.Encoder
	encoderMissing bool
	// systemFirst: some template raises at a system message after the first turn.
	systemFirst bool
	// inlineSystem: the template prints a system message after the first turn.
	inlineSystem bool
	supplied     *templateCache
	context      atomic.Int64 // tokens, as the engine reports it; 0: unknown
	space        uint64       // separates this model's entries in a conv.Cache; a small number is added per kind of entry

	// family defines the tokens with which vLLM replaces images, nil if they are unknown. served is the value of vLLM's
	// --model, which is part of the images' hashes.
	family *media.Family
	served atomic.Pointer[string]
}

// Load reads a model directory: tokenizer.json and the tokenizer's other files, plain or gzipped (.gz). It fails if the tokenizer
// cannot be reproduced exactly or if a template does not compile. A model without a template still serves completions.
func Load(fsys fs.FS, options Options) (*Model, error) {
	tok, err := bpe.Load(fsys)
	if err != nil {
		return nil, err
	}
	m, err := New(tok, options)
	if err == nil {
		m.family, _ = media.Load(fsys, tok.TokenID) // without it, chats are matched up to the first image
	}
	return m, err
}

// New is Load for a tokenizer that is already loaded; several models may share one.
func New(tok *bpe.Tokenizer, options Options) (*Model, error) {
	sources := map[string]string{}
	for _, t := range tok.Config().Templates {
		sources[t.Name] = t.Source
	}
	if options.ChatTemplate != "" {
		sources = map[string]string{defaultTemplate: options.ChatTemplate}
	}
	if options.Now == nil {
		options.Now = time.Now
	}
	m := &Model{tok: tok, sglang: tok.ForSGLang(), config: newConfig(tok.Config()), options: options, idLimit: idLimit(tok), templates: map[string]*template{}}
	for name, source := range sources {
		t, err := compile(source)
		if err != nil {
			return nil, fmt.Errorf("chat template %q: %w", name, err)
		}
		m.templates[name] = t
		m.systemFirst = m.systemFirst || t.systemFirst()
		m.inlineSystem = m.inlineSystem || name == defaultTemplate && t.showsInlineSystem()
		m.config.media = m.config.media || !m.config.known && t.namesMedia
	}
	var err error
	m.encoder, err = encoders.ForVLLM(tok)
	if m.encoderMissing = errors.Is(err, encoders.ErrMissing); err != nil && !m.encoderMissing {
		return nil, fmt.Errorf("prompt encoder: %w", err)
	}
	if m.encoder != nil {
		traits := m.encoder.Traits()
		m.options.ToolParser = m.options.ToolParser || traits.ToolParser
		m.systemFirst = m.systemFirst || traits.Messages != encoders.Validated // vLLM has no template of theirs to look at
	}
	m.supplied, m.space = newTemplateCache(), conv.NewSpace()
	return m, nil
}

// Tokenizer returns the model's tokenizer.
func (m *Model) Tokenizer() *bpe.Tokenizer { return m.tok }

// Adapter returns the LoRA adapter that the request names, "" for the base model: by model name
// or, for SGLang, by lora_path or a model of the form base:adapter.
func (m *Model) Adapter(req *body.Request) string {
	if l := req.LoRA(); l != "" {
		return l
	}
	name := req.Model()
	if name == "" || len(m.options.Names) == 0 {
		return ""
	}
	for _, base := range m.options.Names {
		if name == base {
			return ""
		}
		if adapter, ok := strings.CutPrefix(name, base+":"); ok {
			return adapter
		}
	}
	return name
}

// template is a compiled chat template with the properties that profiles use.
type template struct {
	source         string
	compiled       *jinja.Template
	variables      map[string]bool
	namesDeveloper bool // it handles the developer role itself
	openAI         bool // vLLM passes it lists of content parts, not joined texts
	sglangOpenAI   bool // SGLang does
	namesMedia     bool // it supports more than text
	dated          bool // it prints the date or time
	fromRequest    bool // a request supplied it
}

func compile(source string) (*template, error) {
	compiled, err := jinja.Compile(source)
	if err != nil {
		return nil, err
	}
	t := &template{source: source, compiled: compiled, variables: map[string]bool{}, namesDeveloper: strings.Contains(source, `"developer"`) ||
		strings.Contains(source, `'developer'`),
		openAI: compiled.ContentFormat() == "openai", dated: strings.Contains(source, "strftime_now")}
	t.sglangOpenAI = t.openAI
	for _, name := range compiled.UndeclaredVariables() {
		t.variables[name] = true
	}
	for _, word := range [...]string{"image", "audio", "video", "vision"} {
		if strings.Contains(source, word) { // SGLang's own heuristic
			t.sglangOpenAI, t.namesMedia = true, true
		}
	}
	return t, nil
}

const (
	defaultTemplate = "default"
	toolTemplate    = "tool_use"
)

// ErrNoTemplate is returned for a chat with a model that has no template. It is not a Refusal:
// engines have built-in encoders for some models, so only the ids are unknown.
var ErrNoTemplate = errors.New("the model has no chat template")

// ErrUntrustedTemplate is returned for a request-supplied template that Options do not trust if
// the engine is not known to reject it.
var ErrUntrustedTemplate = errors.New("the request supplies a chat template, and such templates are not trusted")

// ownTemplate returns the model's template; models with several have a separate one for tools.
func (m *Model) ownTemplate(tools bool) (*template, error) {
	if tools {
		if t, ok := m.templates[toolTemplate]; ok {
			return t, nil
		}
	}
	if t, ok := m.templates[defaultTemplate]; ok {
		return t, nil
	}
	return nil, ErrNoTemplate
}

// templateFor returns the template that the request supplies, or else the model's own.
func (m *Model) templateFor(in input, tools bool) (*template, error) {
	source := ""
	if in.Has(body.FieldChatTemplateKwargs) {
		kwargs, err := in.dictOf(body.FieldChatTemplateKwargs)
		if err != nil {
			return nil, err
		}
		text, has, ok := textOf(kwargs, "chat_template")
		switch {
		case (has || !ok) && (!m.options.TrustTemplates || !in.profile.templateInKwargs):
			return nil, in.profile.untrusted
		case !ok:
			return nil, refuse("chat_template: input should be a valid string")
		}
		source = text
	}
	if in.Has(body.FieldChatTemplate) {
		text, ok := body.TextOf(in.Raw(body.FieldChatTemplate))
		switch {
		case !m.options.TrustTemplates:
			return nil, in.profile.untrusted
		case !ok:
			return nil, refuse("chat_template: input should be a valid string")
		case text != "":
			source = text
		}
	}
	if source == "" {
		return m.ownTemplate(tools)
	}
	return m.requestTemplate(source, in.profile)
}

// requestTemplate compiles a template that a request supplies.
func (m *Model) requestTemplate(source string, engine *profile) (*template, error) {
	if t, ok := m.supplied.Get(source); ok {
		return t, nil
	}
	t, err := compileRequestTemplate(source)
	if err != nil {
		return nil, asRefusal(err, engine)
	}
	m.supplied.Add(source, t)
	return t, nil
}

// takesMedia reports whether the model accepts more than text, and whether that is certain.
func (m *Model) takesMedia() (takes, known bool) {
	if given := m.options.Multimodal; given != nil {
		return *given, true
	}
	return m.config.media, m.config.known
}

// refuseMedia refuses a non-text part of a message, unless the model accepts such parts.
func (m *Model) refuseMedia(kind string, engine *profile) error {
	takes, known := m.takesMedia()
	if takes {
		return nil
	}
	return &Refusal{Status: 400, Reason: engine.textOnly(kind), Guessed: !known}
}

// asRefusal converts an error that a template raised to the engine's answer. Errors of our Jinja engine alone stay
// errors: an internal error, a limit, or an unsupported construct.
func asRefusal(err error, engine *profile) error {
	raised, ok := errors.AsType[*jinja.Error](err)
	if !ok || raised.Class == jinja.Unsupported || raised.Class == "InternalError" || raised.Class == "ResourceLimit" {
		return err
	}
	return engine.raised(raised)
}

// config is the part of the tokenizer's files that templates use.
type config struct {
	special *jinja.Dict
	// media: the model accepts more than text; known: its config.json determines that.
	media, known bool
}

// specialTokens returns a fresh dict of the named special tokens, which transformers passes to every template.
func (c *config) specialTokens() *jinja.Dict { return c.special.Clone() }

// newConfig lists the special tokens in transformers' order.
func newConfig(c *bpe.Config) config {
	special := new(jinja.Dict)
	for _, name := range [...]string{"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"} {
		if token, ok := c.SpecialToken(name); ok {
			special.Set(name, jinja.String(token))
		}
	}
	if c.ExtraSpecial != nil {
		extra := make([]jinja.Value, 0, len(c.ExtraSpecial))
		for _, token := range c.ExtraSpecial {
			extra = append(extra, jinja.String(token))
		}
		special.Set("additional_special_tokens", jinja.List(extra))
	}
	return config{special: special, media: c.Media, known: c.HasModel}
}
