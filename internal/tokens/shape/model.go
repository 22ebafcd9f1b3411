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
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// Result is what an engine will compute for a request.
type Result struct {
	// IDs are the prompt's token ids, nil if they cannot be known here. They are shared with later results: do not change
	// them, and append only to a copy.
	IDs []uint32
	// Text is the prompt as text; only RenderPrompt gives it. "" if the request came with ids.
	Text string
	// Prompts is the number of prompts in the request. IDs and Text are the first one's: the request is routed by it.
	Prompts int
	// Partial is why IDs are only the front of the prompt, or missing; "" if they are the whole prompt.
	Partial string
	// Assumed names the shape that no recording of a real engine backs, "" if one does.
	Assumed string
	// Prefix stores values computed from the ids of this conversation's earlier turns, such as block hashes, next to them.
	// The zero value stores nothing.
	Prefix bpe.Prefix

	dated   bool     // the text shows the time
	scratch []uint32 // where ids may be put, empty
}

// Prompt computes the ids of a request. The error is a *Refusal if the engine would refuse it; any other error means that
// the ids cannot be known here (the request is then routed by load).
//
// What a body's result has in common with earlier ones is not computed again; a request from a body.Memo has its whole
// result kept.
func (m *Model) Prompt(req *body.Request, engine Engine) (Result, error) {
	return m.PromptInto(context.Background(), nil, req, engine)
}

// PromptInto is Prompt and puts the ids into dst's memory, unless they are kept for later or come from the request: the
// result's IDs are then valid until dst is used again. Rendering and tokenizing end soon
// after ctx does, with its error; whether the engine would refuse the request is found out before. If ctx has ended already,
// only a result that is kept beside the request is returned.
func (m *Model) PromptInto(ctx context.Context, dst []uint32, req *body.Request, engine Engine) (Result, error) {
	if m.memo == nil || !req.Kept() {
		return m.compute(ctx, dst[:0], req, engine, false)
	}
	key := resultKey{m, engine}
	if v, ok := req.Attached(key); ok {
		if res, ok := v.(*Result); ok {
			return *res, nil
		}
	}
	res, err := m.compute(ctx, nil, req, engine, false)
	if err == nil && !res.dated {
		kept := res
		kept.Prefix = bpe.Prefix{} // it would hold what the cache wants to forget
		req.Attach(key, &kept, resultCost(&kept))
	}
	return res, err
}

// RenderPrompt is Prompt with the text.
func (m *Model) RenderPrompt(req *body.Request, engine Engine) (Result, error) {
	return m.compute(context.Background(), nil, req, engine, true)
}

func (m *Model) compute(ctx context.Context, dst []uint32, req *body.Request, engine Engine, withText bool) (Result, error) {
	res := Result{Prompts: 1, scratch: dst}
	if ctx.Err() != nil {
		return res, fmt.Errorf("tokenizing the prompt: %w", ctx.Err())
	}
	if req.Form == body.FormTexts || req.Form == body.FormIDLists {
		res.Prompts = max(req.Count, 1)
	}
	in := input{Request: req, profile: engine.profile(), origin: req.API}
	p, assumed, err := m.plan(in)
	if err != nil {
		return res, err
	}
	res.Assumed, res.Partial, res.IDs = assumed, p.partial, p.ids
	if p.ids == nil {
		if err := m.encode(ctx, &res, p, withText); err != nil {
			if ctx.Err() != nil {
				return res, fmt.Errorf("tokenizing the prompt: %w", ctx.Err())
			}
			return res, err
		}
	}
	if n := max(p.keep, -p.keep); n > 0 && len(res.IDs) > n && res.Partial == "" {
		if p.keep < 0 {
			res.IDs = res.IDs[:n]
		} else {
			res.IDs = res.IDs[len(res.IDs)-n:]
			res.Prefix = bpe.Prefix{}
		}
	}
	if !p.limited {
		return res, nil
	}
	if res.Partial == "" && len(res.IDs) == 0 {
		return res, refuse("The decoder prompt cannot be empty")
	}
	return res, in.profile.length(m, in, len(res.IDs))
}

// plainLength refuses a prompt of n tokens and as many wanted ones as do not fit the context.
func (m *Model) plainLength(in input, n int) error {
	wanted := int64(0)
	if in.API != body.Embeddings {
		wanted, _ = in.MaxTokens()
		wanted = max(wanted, 1)
	}
	if limit := int64(m.options.MaxModelLen); limit > 0 && int64(n) > limit-wanted {
		return refuse("This model's maximum context length is %d tokens. However, your request has %d input tokens and wants %d more.",
			limit, n, wanted)
	}
	return nil
}

// limited reports whether engines bound the prompts of an API by their context.
func limited(api body.API) bool { return api != body.Tokenize && api != body.CountTokens }

// tooLong refuses a text that cannot fit the engine's context, whatever its tokens are:
// its tokenization could take seconds, for a request that no engine serves.
func (m *Model) tooLong(p *plan, text string) error {
	most := m.options.MaxModelLen
	if most == 0 || !p.limited || p.keep != 0 || len(text) <= most {
		return nil
	}
	if n := m.tok.MinTokens(text); n > most {
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
		if assumed = in.profile.assumed; assumed == "" && m.tok.Config().ModelType == "gpt_oss" {
			assumed = "gpt-oss by its chat template: engines use its own encoder"
		}
	case body.Tokenize, body.Embeddings, body.Completions, body.Generate, body.VLLMGenerate:
		switch {
		case chat && in.API == body.Tokenize:
			p, err = in.profile.chat(m, in)
		case chat && in.API == body.Embeddings:
			assumed = "embeddings of a chat"
			p, err = m.chatEmbedding(in)
		default:
			p, err = m.plain(in)
		}
	case body.Responses, body.Messages, body.CountTokens:
		assumed = "the " + in.API.String() + " API as chat"
		p, err = m.converted(in)
	default:
		err = fmt.Errorf("the %v API has no prompt", in.API)
	}
	if p != nil {
		p.profile, p.size, p.limited = in.profile, len(in.Body), limited(in.API)
	}
	return p, assumed, err
}

// chatEmbedding is a chat without the generation prompt, unless the request asks for one.
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

// asChat plans the chat that an engine makes of another request.
func (m *Model) asChat(in input, raw []byte) (*plan, error) {
	chat, err := body.Parse(body.Chat, raw)
	if err != nil {
		return nil, err
	}
	in.Request = chat
	return in.profile.chat(m, in)
}

// plain is a prompt that goes to the tokenizer as it is.
func (m *Model) plain(in input) (*plan, error) {
	p := &plan{}
	if in.profile.truncation != nil && in.API != body.Tokenize {
		if err := in.profile.truncation(m, in, p); err != nil {
			return nil, err
		}
	}
	if in.API == body.VLLMGenerate && in.Has(body.FieldFeatures) {
		p.partial = "the ids of multimodal features hide what they stand for"
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
	const keptElements = 1 << 16 // body.Request keeps no more
	batch := in.Form == body.FormTexts || in.Form == body.FormIDLists
	if batch && len(in.Elements) < min(in.Count, keptElements) { // such as [1,"2"], which pydantic may read as ids
		p.partial = "the prompt is a list of different kinds"
		return p, nil
	}
	raw := in.FirstPrompt()
	switch in.Form {
	case body.FormText, body.FormTexts:
		text, err := body.AppendText(make([]byte, 0, len(raw)), raw)
		if err != nil {
			return nil, refuse("%s: %v", in.API, err)
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

// checkIDs refuses ids beyond the vocabulary: vLLM answers 400, and SGLang's process ends.
func (m *Model) checkIDs(ids []uint32) error {
	limit := uint32(m.idLimit)
	for _, id := range ids {
		if id >= limit {
			return refuse("Token id %d is out of vocabulary", id)
		}
	}
	return nil
}

// texts are buffers for rendered prompts, which are not retained.
var texts = sync.Pool{New: func() any { return new([]byte) }}

// pooledText bounds the buffers that are kept.
const pooledText = 4 << 20

// encode renders and tokenizes.
func (m *Model) encode(ctx context.Context, res *Result, p *plan, withText bool) error {
	if p.template == nil && p.partial != "" {
		return nil
	}
	text := p.text
	if p.template != nil {
		buf, _ := texts.Get().(*[]byte)
		defer func() {
			if cap(*buf) <= pooledText {
				texts.Put(buf)
			}
		}()
		rendered, err := m.render(ctx, (*buf)[:0], p)
		if err != nil {
			return err
		}
		*buf, text = rendered, asText(rendered)
	}
	if p.hasMedia() {
		at := strings.Index(text, mediaMark)
		if at < 0 {
			return nil
		}
		text = text[:at]
	}
	if withText {
		res.Text = strings.Clone(text)
	}
	res.dated = p.template != nil && p.template.dated
	if err := m.tooLong(p, text); err != nil {
		return err
	}
	ids, err := m.ids(ctx, res, text, p.addSpecial)
	if err != nil {
		return textError(err)
	}
	if p.hasMedia() && len(ids) > 0 {
		ids = ids[:len(ids)-1] // what follows may join the last token
	}
	res.IDs = ids
	if p.suffix != "" && !p.hasMedia() {
		return m.continueWith(ctx, res, p.suffix, withText)
	}
	return nil
}

// textError is a refusal for a text that the engine refuses too, and not for one that is
// too much work here.
func textError(err error) error {
	if errors.Is(err, bpe.ErrText) {
		return refuse("%v", err)
	}
	return err
}

// continueWith puts the text that SGLang tokenizes apart behind the prompt, without the BOS that the tokenizer may add.
func (m *Model) continueWith(ctx context.Context, res *Result, suffix string, withText bool) error {
	more, err := m.tok.EncodeUntil(ctx.Done(), nil, suffix, true)
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

// ids tokenizes, with what is remembered of earlier turns.
func (m *Model) ids(ctx context.Context, res *Result, text string, addSpecial bool) (ids []uint32, err error) {
	if m.memo == nil {
		return m.tok.EncodeUntil(ctx.Done(), res.scratch, text, addSpecial)
	}
	ids, res.Prefix, err = m.memo.prompts.EncodeUntil(ctx.Done(), res.scratch, text, addSpecial)
	return ids, err
}

func (m *Model) render(ctx context.Context, dst []byte, p *plan) ([]byte, error) {
	env := jinja.RequestEnv(p.size)
	env.Now, env.Stop = m.options.Now(), ctx.Done()
	if p.template.fromRequest {
		release, err := reserve(2 * int64(env.MaxMemory)) // live values and dead ones
		if err != nil {
			return dst, err
		}
		defer release()
	} else { // the operator's own code, and a client's data
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

// asText is b as text, for as long as b is not changed.
func asText(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

// idLimit is one more than the largest id of a tokenizer.
func idLimit(tok *bpe.Tokenizer) int {
	limit := tok.VocabSize()
	for _, a := range tok.AddedTokens() {
		limit = max(limit, int(a.ID)+1)
	}
	return limit
}
