package shape

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"unsafe"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/bpe"
	"github.com/kvlane/kvlane/internal/tokens/conv"
	"github.com/kvlane/kvlane/internal/tokens/encoders"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// Result is what an engine will compute for a request.
type Result = conv.Prompt

// result is a Result under construction.
type result struct {
	Result

	dated   bool     // the text contains the date or time
	scratch []uint32 // empty; its capacity may be used for the ids
}

// Prompt computes the ids of a request, without a cache. The error is a *Refusal if the engine would refuse the
// request; after any other error the ids are unknown, and the request should be routed by load.
func (m *Model) Prompt(req *body.Request, engine Engine) (Result, error) {
	return m.PromptInto(context.Background(), nil, conv.New(0).Turn(req), engine)
}

// PromptInto is Prompt through the turn's cache: parts that equal those of earlier requests are not computed again. It
// may store the ids in dst's memory: the result's IDs are valid until dst is reused. Ids that are cached or come from
// the request do not use dst. Rendering and tokenizing end soon after ctx does, with its error; refusals that need
// neither are detected before. If ctx has already ended, only a cached result of the whole request is returned.
func (m *Model) PromptInto(ctx context.Context, dst []uint32, turn *conv.Turn, engine Engine) (Result, error) {
	space := m.space + uint64(engine)
	if res, ok := turn.Result(space); ok {
		return res, nil
	}
	if turn.Kept() {
		dst = nil
	}
	res, err := m.compute(ctx, dst[:0], turn, engine, false)
	if err == nil && !res.dated && res.Media == nil {
		turn.Keep(space, &res.Result)
	}
	return res.Result, err
}

// RenderPrompt is Prompt with Result.Text set.
func (m *Model) RenderPrompt(req *body.Request, engine Engine) (Result, error) {
	res, err := m.compute(context.Background(), nil, conv.New(0).Turn(req), engine, true)
	return res.Result, err
}

func (m *Model) compute(ctx context.Context, dst []uint32, turn *conv.Turn, engine Engine, withText bool) (result, error) {
	req := turn.Request
	res := result{Result: Result{Prompts: 1}, scratch: dst}
	late := func(err error) error { // the context's error if it has ended, else err
		if ctx.Err() != nil {
			return fmt.Errorf("tokenizing the prompt: %w", ctx.Err())
		}
		return err
	}
	if err := late(nil); err != nil {
		return res, err
	}
	if req.Form == body.FormTexts || req.Form == body.FormIDLists {
		res.Prompts = max(req.Count, 1)
	}
	in := input{Request: req, turn: turn, profile: engine.profile(), origin: req.API, stop: ctx.Done()}
	p, assumed, err := m.plan(in)
	if err != nil {
		return res, late(err)
	}
	res.Assumed, res.Partial, res.IDs = assumed, p.partial, p.ids
	if p.ids == nil {
		if err := m.encode(ctx, turn, &res, p, withText); err != nil {
			return res, late(err)
		}
	}
	m.truncate(turn, &res.Result, p)
	if !p.limited {
		return res, nil
	}
	if res.Partial == "" && len(res.IDs) == 0 {
		return res, refuse("The decoder prompt cannot be empty")
	}
	return res, in.profile.length(m, in, len(res.IDs))
}

// truncate cuts a prompt as the request specifies.
func (m *Model) truncate(turn *conv.Turn, res *Result, p *plan) {
	n, before, after := max(p.keep, -p.keep), 0, 0
	if p.ids == nil && p.addSpecial && !p.sided { // the engine's tokenizer truncates the text, and keeps the special tokens that it adds
		before, after = m.tokenizer(p.profile).Added()
	}
	switch ids := res.IDs; {
	case n == 0, res.Partial == "" && len(ids) <= n:
	case before+after > n:
		res.IDs, res.Partial = nil, "the prompt is truncated to less than the tokenizer adds"
	case p.keep < 0 && res.Partial != "":
		res.IDs = ids[:min(len(ids), n-after)]
	case res.Partial != "":
		res.IDs = nil // the prompt's beginning depends on its length
	default: // a copy, because the cache counts what it keeps
		head, tail := before, n-before
		if p.keep < 0 {
			head, tail = n-after, after
		}
		res.IDs = append(slices.Clone(ids[:head]), ids[len(ids)-tail:]...)
		turn.Cut()
	}
}

// plainLength refuses a prompt of n tokens that, together with the requested output tokens, does not fit the context.
func (m *Model) plainLength(in input, n int) error {
	wanted := int64(0)
	if !in.API.Pools() {
		wanted, _ = in.MaxTokens()
		wanted = max(wanted, 1)
	}
	if limit := int64(m.MaxModelLen()); limit > 0 && int64(n) > limit-wanted {
		return refuse("This model's maximum context length is %d tokens. However, your request has %d input tokens and wants %d more.",
			limit, n, wanted)
	}
	return nil
}

// SetMaxModelLen sets the context length, in tokens, that the engine reports; 0: unknown. It is used if Options.MaxModelLen is
// 0. It is safe for concurrent use.
func (m *Model) SetMaxModelLen(n int) { m.context.Store(int64(n)) }

// MaxModelLen returns the context length in tokens, 0 if it is not known. It is safe for concurrent use.
func (m *Model) MaxModelLen() int {
	if n := m.options.MaxModelLen; n > 0 {
		return n
	}
	return int(m.context.Load())
}

// tooLong refuses a text that cannot fit the engine's context, however it is tokenized. Tokenizing it could take
// seconds, for a request that every engine refuses.
func (m *Model) tooLong(p *plan, text string) error {
	most := m.MaxModelLen()
	if most == 0 || !p.limited || p.keep != 0 || len(text) <= most {
		return nil
	}
	if n := m.tokenizer(p.profile).MinTokens(text); n > most {
		return refuse("This model's maximum context length is %d tokens. However, your prompt contains at least %d input tokens.", most, n)
	}
	return nil
}

func (m *Model) plan(in input) (p *plan, assumed string, err error) {
	if in.LongInteger && !in.profile.longIntegers {
		return nil, "", refuse("There was an error parsing the body")
	}
	chat := in.Form == body.FormMessages
	switch in.API {
	case body.Chat:
		p, err = in.profile.chat(m, in)
		assumed = in.profile.assumed
	case body.Tokenize, body.Embeddings, body.Classify, body.Pooling, body.Completions, body.Generate, body.VLLMGenerate:
		if in.API == body.Classify || in.API == body.Pooling {
			assumed = "the " + in.API.String() + " API as embeddings"
		}
		switch {
		case assumed != "" && (in.profile != profiles[VLLM] || in.Form == body.FormNone): // other engines have other field names
			err = fmt.Errorf("the prompt of the %v API is not known", in.API)
		case in.API == body.Tokenize && in.Has(body.FieldPrompt) && in.Has(body.FieldMessages):
			p = &plan{partial: "a prompt and messages"}
		case chat && in.API == body.Tokenize:
			p, err = in.profile.chat(m, in)
		case chat && in.API.Pools():
			assumed = "embeddings of a chat"
			p, err = m.chatEmbedding(in)
		default:
			p, err = m.plain(in)
		}
	case body.Responses, body.Messages, body.CountTokens:
		if in.API == body.Responses && in.profile != profiles[TRTLLM] && m.encodes(encoders.Validated) {
			if in.profile != profiles[VLLM] {
				return nil, "", encoders.ErrMissing
			}
			p, err = m.harmonyResponse(in)
			break
		}
		assumed = "the " + in.API.String() + " API as chat"
		p, err = m.converted(in)
	default:
		err = fmt.Errorf("the %v API has no prompt", in.API)
	}
	if p != nil {
		p.profile, p.size, p.limited = in.profile, len(in.Body), in.API != body.Tokenize && in.API != body.CountTokens
	}
	return p, assumed, err
}

// chatEmbedding plans a chat without the generation prompt, unless the request asks for one.
func (m *Model) chatEmbedding(in input) (*plan, error) {
	if in.Has(body.FieldAddGenerationPrompt) {
		return in.profile.chat(m, in)
	}
	raw, err := body.Apply(nil, in.Body, body.Set([]byte("false"), body.FieldAddGenerationPrompt.String()))
	if err != nil {
		return nil, err
	}
	return m.asChat(in, raw)
}

// asChat plans the chat request that an engine converts another request to.
func (m *Model) asChat(in input, raw []byte) (*plan, error) {
	chat, err := body.Parse(body.Chat, raw)
	if err != nil {
		return nil, err
	}
	in.Request = chat
	return in.profile.chat(m, in)
}

// plain plans a prompt that is tokenized unchanged.
func (m *Model) plain(in input) (*plan, error) {
	if in.API == body.Completions && in.profile == profiles[VLLM] && given(in.Get("suffix")) {
		if m.encoder == nil && !m.encoderMissing {
			return nil, refuse("suffix is only supported for models with FIM completion rendering")
		}
		return nil, errors.New("the place of a suffix in the prompt is not known") // DeepSeek-V4 has one
	}
	p := &plan{}
	if in.profile.truncation != nil && in.API != body.Tokenize {
		if err := in.profile.truncation(m, in, p); err != nil {
			return nil, err
		}
	}
	if in.API == body.VLLMGenerate && in.Has(body.FieldFeatures) {
		p.partial = "the contents of multimodal features are not known"
		return p, nil
	}
	if in.API == body.Generate {
		for _, field := range [...]string{"image_data", "video_data", "audio_data"} {
			if raw := body.Member(in.Body, field); raw != nil && raw[0] != 'n' {
				p.partial = "the place of " + field + " in the prompt is not known"
				return p, nil
			}
		}
	}
	const keptElements = 1 << 16 // the limit of body.Request
	batch := in.Form == body.FormTexts || in.Form == body.FormIDLists
	if batch && len(in.Elements) < min(in.Count, keptElements) { // such as [1,"2"], which pydantic may read as ids
		p.partial = "the prompt is a list of mixed types"
		return p, nil
	}
	raw := in.FirstPrompt()
	switch in.Form {
	case body.FormText, body.FormTexts:
		text, err := body.AppendText(make([]byte, 0, len(raw)), raw)
		if err != nil {
			return nil, m.refuseSurrogates(in, in.API.String())
		}
		p.text = asText(text)
		p.addSpecial = true
		if !in.profile.fixedSpecial || in.API == body.Tokenize {
			p.addSpecial, err = in.flag(body.FieldAddSpecialTokens, true)
		}
		return p, err
	case body.FormIDs, body.FormIDLists:
		ids, err := laxIDs(raw)
		if err != nil {
			return nil, err
		}
		p.ids = ids
		return p, m.checkIDs(ids)
	case body.FormOther:
		if in.API == body.Tokenize {
			return nil, refuse("messages: Input should be a valid list")
		}
		p.partial = "the prompt is given as embeddings or in an unknown shape"
		return p, nil
	default:
		return nil, refuse("the request has no prompt")
	}
}

// encodes reports whether vLLM encodes chats in code, from messages in this form.
func (m *Model) encodes(form encoders.Form) bool {
	return m.encoder != nil && m.encoder.Traits().Messages == form
}

// refuseSurrogates refuses half of a surrogate pair, which mistral-common replaces.
func (m *Model) refuseSurrogates(in input, name string) error {
	if in.profile == profiles[VLLM] && m.encodes(encoders.Original) {
		return encoders.ErrMissing
	}
	return refuse("%s: input should be a valid string without half of a surrogate pair", name)
}

// checkIDs refuses ids beyond the tokenizer's: vLLM answers 400 to those that the model lacks too, and SGLang crashes.
func (m *Model) checkIDs(ids []uint32) error {
	limit := uint32(m.idLimit)
	for _, id := range ids {
		if id >= limit {
			return guess("Token id %d is out of vocabulary", id)
		}
	}
	return nil
}

// buffers is a pool of *[]byte for rendered prompts and decoded images. release returns one.
var buffers = sync.Pool{New: func() any { return new([]byte) }}

// maxPooled is the maximum capacity, in bytes, of a pooled buffer; larger ones are dropped.
const maxPooled = 4 << 20

func release(buf *[]byte) {
	if cap(*buf) <= maxPooled {
		buffers.Put(buf)
	}
}

// encode renders and tokenizes the plan into res.
func (m *Model) encode(ctx context.Context, turn *conv.Turn, res *result, p *plan, withText bool) error {
	if p.partial != "" && !p.isCut() {
		return nil
	}
	text := p.text
	if p.template != nil || p.chat != nil {
		buf, _ := buffers.Get().(*[]byte)
		defer release(buf)
		render := m.render
		if p.chat != nil {
			render = m.encoded
		}
		rendered, err := render(ctx, (*buf)[:0], p)
		if err != nil {
			return err
		}
		*buf, text = rendered, asText(rendered)
	}
	if p.isCut() {
		at := strings.Index(text, mediaMark)
		if at < 0 {
			return nil
		}
		text = text[:at]
	}
	if media := p.images != nil && p.hasMedia(); media && p.images.family.Mark != "" {
		text = strings.ReplaceAll(text, p.images.family.Mark, p.images.family.Text)
	}
	own := m.tokenizer(p.profile)
	tok, space := conv.Tokenizer(own), m.space
	if own == m.sglang {
		space += sglangSpace
	} else if own != m.tok {
		space += ownSpace
	}
	marked := p.chat != nil && p.encoder.Traits().Marked
	if marked {
		tok, space = bpe.Marked{Tokenizer: own}, m.space+markedSpace
	}
	switch {
	case withText && marked:
		res.Text = bpe.Marked{Tokenizer: own}.PlainOfMarked(text)
	case withText:
		res.Text = strings.Clone(text)
	}
	res.dated = p.template != nil && p.template.dated || p.chat != nil && p.encoder.Traits().Dated
	if err := m.tooLong(p, text); err != nil {
		return err
	}
	ids, err := turn.Encode(ctx.Done(), res.scratch, tok, space, text, p.addSpecial)
	if err != nil {
		return textError(err)
	}
	if p.isCut() && len(ids) > 0 {
		ids = ids[:len(ids)-1] // following text could merge with the last token
	}
	res.IDs = ids
	if p.images != nil && p.hasMedia() {
		turn.Cut()
		m.placeImages(&res.Result, p)
	}
	if p.suffix != "" && !p.isCut() {
		return m.continueWith(ctx, turn, &res.Result, p.suffix, withText)
	}
	return nil
}

// tokenizer returns the tokenizer that an engine uses: vLLM prefers the one in Mistral's format.
func (m *Model) tokenizer(engine *profile) *bpe.Tokenizer {
	own := m.tok.Mistral()
	switch {
	case own != nil && engine == profiles[VLLM]:
		return own
	case engine == profiles[SGLang]:
		return m.sglang
	}
	return m.tok
}

// textError converts an error of the tokenizer to a refusal if the engine refuses the text too,
// but not if the text only exceeds our own limits.
func textError(err error) error {
	if errors.Is(err, bpe.ErrText) {
		return refuse("%v", err)
	}
	return err
}

// continueWith appends the text that SGLang tokenizes separately to the prompt, without the BOS that the tokenizer may add.
func (m *Model) continueWith(ctx context.Context, turn *conv.Turn, res *Result, suffix string, withText bool) error {
	more, err := turn.EncodeAlone(ctx.Done(), nil, m.tok, suffix, true)
	if err != nil {
		return textError(err)
	}
	if bos, ok := m.tok.Config().SpecialToken("bos_token"); ok && len(more) > 0 {
		if id, ok := m.tok.TokenID(bos); ok && more[0] == id {
			more = more[1:]
		}
	}
	res.IDs = append(slices.Clip(res.IDs), more...)
	if withText {
		res.Text += suffix
	}
	return nil
}

func (m *Model) render(ctx context.Context, dst []byte, p *plan) ([]byte, error) {
	env := jinja.RequestEnv(p.size)
	env.Now, env.Stop = m.options.Now(), ctx.Done()
	if p.template.fromRequest {
		done, err := reserve(2 * int64(env.MaxMemory)) // MaxMemory bounds live values; as many may wait for the garbage collector
		if err != nil {
			return dst, err
		}
		defer done()
	} else { // the template is the operator's, only the data are the client's
		env.MaxMemory, env.MaxOutput, env.MaxSteps = 2*env.MaxMemory, 2*env.MaxOutput, max(env.MaxSteps, 20_000_000)
	}
	out, err := p.template.compiled.Render(dst, p.vars, env)
	if err != nil && p.flat != nil {
		p.vars.Set("tools", jinja.List(p.flat))
		out, err = p.template.compiled.Render(dst, p.vars, env)
	}
	if err != nil {
		return dst, asRefusal(err, p.profile)
	}
	if p.final != nil {
		n, err := cutContinued(asText(out), *p.final)
		return out[:n], err
	}
	return out, nil
}

// asText returns b as a string that is valid until b is modified.
func asText(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

// IDs returns the largest token id plus one.
func (m *Model) IDs() int { return m.idLimit }

// idLimit returns the largest id of a tokenizer plus one.
func idLimit(tok *bpe.Tokenizer) int {
	limit := tok.VocabSize()
	for _, a := range tok.AddedTokens() {
		limit = max(limit, int(a.ID)+1)
	}
	return limit
}
