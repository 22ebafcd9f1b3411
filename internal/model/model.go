package model

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"unsafe"

	"github.com/kvlane/kvlane/internal/prompt"
	"github.com/kvlane/kvlane/internal/tokenizer"
	"github.com/kvlane/kvlane/internal/tokenizer/jinja"
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
	// Partial says why IDs are only the front of the prompt, or missing; "" if they are all of it.
	Partial string
	// Assumed names the shape that no recording of a real engine backs, "" if one does.
	Assumed string
	// Prefix lets values that were computed from the ids of this conversation's earlier turns, such as block hashes, be kept
	// beside them. The zero value keeps nothing.
	Prefix tokenizer.Prefix

	dated   bool     // the text shows the time
	scratch []uint32 // where ids may be put, empty
}

// Prompt computes the ids of a request. The error is a *Refusal if the engine would refuse it; any other error means that
// the ids cannot be known here (the request is then routed by load).
//
// What a body's result has in common with earlier ones is not computed again; a request from a prompt.Memo has its whole
// result kept.
func (m *Model) Prompt(req *prompt.Request, engine Engine) (Result, error) {
	return m.PromptInto(context.Background(), nil, req, engine)
}

// PromptInto is Prompt and puts the ids into dst's memory, unless they are kept for later or come from the request: the
// result's IDs are then valid until dst is used again. Rendering and tokenizing end soon
// after ctx does, with its error; whether the engine would refuse the request is found out before. If ctx has ended already,
// only a result that is kept beside the request is returned.
func (m *Model) PromptInto(ctx context.Context, dst []uint32, req *prompt.Request, engine Engine) (Result, error) {
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
		kept.Prefix = tokenizer.Prefix{} // it would hold what the cache wants to forget
		req.Attach(key, &kept, resultCost(&kept))
	}
	return res, err
}

// RenderPrompt is Prompt with the text.
func (m *Model) RenderPrompt(req *prompt.Request, engine Engine) (Result, error) {
	return m.compute(context.Background(), nil, req, engine, true)
}

func (m *Model) compute(ctx context.Context, dst []uint32, req *prompt.Request, engine Engine, withText bool) (Result, error) {
	res := Result{Prompts: 1, scratch: dst}
	if ctx.Err() != nil {
		return res, fmt.Errorf("tokenizing the prompt: %w", ctx.Err())
	}
	if req.Form == prompt.FormTexts || req.Form == prompt.FormIDLists {
		res.Prompts = max(req.Count, 1)
	}
	p, assumed, err := m.plan(req, engine)
	if err != nil {
		return res, err
	}
	p.size = len(req.Body)
	p.limited = limited(req.API)
	res.Assumed = assumed
	res.Partial = p.partial
	if p.haveIDs {
		res.IDs = p.ids
	} else if err := m.encode(ctx, &res, p, engine, withText); err != nil {
		if ctx.Err() != nil {
			return res, fmt.Errorf("tokenizing the prompt: %w", ctx.Err())
		}
		return res, err
	}
	if p.keep > 0 && len(res.IDs) > p.keep && res.Partial == "" {
		if p.keepHead {
			res.IDs = res.IDs[:p.keep]
		} else {
			res.IDs = res.IDs[len(res.IDs)-p.keep:]
			res.Prefix = tokenizer.Prefix{}
		}
	}
	return res, m.checkLength(req, engine, &res)
}

// checkLength refuses what does not fit the engine's context.
func (m *Model) checkLength(req *prompt.Request, engine Engine, res *Result) error {
	if !limited(req.API) {
		return nil
	}
	if res.Partial == "" && len(res.IDs) == 0 {
		return refuse("The decoder prompt cannot be empty")
	}
	if engine == VLLM {
		return m.vllmLength(input{Request: req}, len(res.IDs))
	}
	if m.options.MaxModelLen == 0 {
		return nil
	}
	wanted, _ := req.MaxTokens()
	if req.API == prompt.Embeddings {
		wanted = 0
	} else {
		wanted = max(wanted, 1)
	}
	if int64(len(res.IDs)) > int64(m.options.MaxModelLen)-wanted {
		return refuse("This model's maximum context length is %d tokens. However, your request has %d input tokens and wants %d more.",
			m.options.MaxModelLen, len(res.IDs), wanted)
	}
	return nil
}

// limited reports whether engines bound the prompts of an API by their context.
func limited(api prompt.API) bool { return api != prompt.Tokenize && api != prompt.CountTokens }

// tooLong refuses a text that cannot fit the engine's context, whatever its tokens are:
// its tokenization could take seconds, for a request that no engine serves.
func (m *Model) tooLong(p *plan, text string) error {
	most := m.options.MaxModelLen
	if most == 0 || !p.limited || p.keep > 0 || len(text) <= most {
		return nil
	}
	if n := m.tok.MinTokens(text); n > most {
		return refuse("This model's maximum context length is %d tokens. However, your prompt contains at least %d input tokens.", most, n)
	}
	return nil
}

func (m *Model) plan(req *prompt.Request, engine Engine) (p *plan, assumed string, err error) {
	in := input{Request: req, wide: engine == SGLang, halves: engine == VLLM}
	if engine == VLLM && in.LongInteger { // Python's reader of JSON takes no such body
		return nil, "", refuse("There was an error parsing the body")
	}
	switch req.API {
	case prompt.Chat:
		p, err = m.chat(in, engine)
		switch {
		case engine == TRTLLM:
			assumed = "TensorRT-LLM's chat shape"
		case m.tok.Config().ModelType == "gpt_oss":
			assumed = "gpt-oss by its chat template: engines use its own encoder"
		}
	case prompt.Tokenize:
		if req.Form == prompt.FormMessages {
			p, err = m.tokenizeChat(in, engine)
		} else {
			p, err = m.plain(in, engine)
		}
	case prompt.Completions, prompt.Generate, prompt.VLLMGenerate:
		p, err = m.plain(in, engine)
	case prompt.Embeddings:
		if req.Form != prompt.FormMessages {
			p, err = m.plain(in, engine)
			break
		}
		assumed = "embeddings of a chat"
		p, err = m.chatEmbedding(in, engine)
	case prompt.Responses, prompt.Messages, prompt.CountTokens:
		p, err = m.converted(req, engine)
		assumed = "the " + req.API.String() + " API as chat"
	default:
		err = fmt.Errorf("the %v API has no prompt", req.API)
	}
	return p, assumed, err
}

func (m *Model) chat(in input, engine Engine) (*plan, error) {
	switch engine {
	case SGLang:
		return m.sglangChat(in, false)
	case TRTLLM:
		return m.trtllmChat(in)
	default:
		return m.vllmChat(in, false)
	}
}

func (m *Model) tokenizeChat(in input, engine Engine) (*plan, error) {
	if engine == SGLang {
		return m.sglangChat(in, true)
	}
	return m.vllmChat(in, true)
}

// chatEmbedding is a chat without the generation prompt, unless the request asks for one.
func (m *Model) chatEmbedding(in input, engine Engine) (*plan, error) {
	if in.Has(prompt.FieldAddGenerationPrompt) {
		return m.chat(in, engine)
	}
	body, err := prompt.Apply(nil, in.Body, prompt.Set([]byte("false"), prompt.FieldAddGenerationPrompt.String()))
	if err != nil {
		return nil, err
	}
	req, err := prompt.Parse(prompt.Chat, body)
	if err != nil {
		return nil, err
	}
	return m.chat(input{Request: req}, engine)
}

// plain is a prompt that goes to the tokenizer as it is.
func (m *Model) plain(in input, engine Engine) (*plan, error) {
	p := &plan{}
	if engine == VLLM && in.API != prompt.Tokenize {
		if err := m.vllmTruncation(in, p); err != nil {
			return nil, err
		}
	}
	if in.API == prompt.VLLMGenerate && in.Has(prompt.FieldFeatures) {
		p.partial = "the ids of multimodal features hide what they stand for"
		return p, nil
	}
	if in.API == prompt.Generate {
		for _, field := range [...]string{"image_data", "video_data", "audio_data"} {
			if raw := prompt.Member(in.Body, field); raw != nil && raw[0] != 'n' {
				p.partial = "the place of " + field + " in the prompt is not known"
				return p, nil
			}
		}
	}
	const keptElements = 1 << 16 // prompt.Request keeps no more
	batch := in.Form == prompt.FormTexts || in.Form == prompt.FormIDLists
	if batch && len(in.Elements) < min(in.Count, keptElements) { // such as [1,"2"], which pydantic may read as ids
		p.partial = "the prompt is a list of different kinds"
		return p, nil
	}
	raw := in.FirstPrompt()
	switch in.Form {
	case prompt.FormText, prompt.FormTexts:
		text, err := prompt.AppendText(make([]byte, 0, len(raw)), raw)
		if err != nil {
			return nil, refuse("%s: %v", in.API, err)
		}
		p.text = asText(text)
		p.addSpecial = true
		if engine != SGLang || in.API == prompt.Tokenize {
			p.addSpecial, err = in.flag(prompt.FieldAddSpecialTokens, true)
		}
		return p, err
	case prompt.FormIDs, prompt.FormIDLists:
		ids, err := laxIDs(raw)
		if err != nil {
			return nil, err
		}
		p.ids, p.haveIDs = ids, true
		return p, m.checkIDs(ids)
	case prompt.FormOther:
		if in.API == prompt.Tokenize {
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

// texts are buffers for rendered prompts, which nobody keeps.
var texts = sync.Pool{New: func() any { return new([]byte) }}

// pooledText bounds the buffers that are kept.
const pooledText = 4 << 20

// encode renders and tokenizes.
func (m *Model) encode(ctx context.Context, res *Result, p *plan, engine Engine, withText bool) error {
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
		rendered, err := m.render(ctx, (*buf)[:0], p, engine)
		if err != nil {
			return err
		}
		*buf, text = rendered, asText(rendered)
	}
	if p.media {
		at := strings.Index(text, mediaMark)
		if at < 0 {
			return nil
		}
		text = text[:at]
	}
	if withText {
		res.Text = strings.Clone(text)
	}
	res.dated = p.dated
	if err := m.tooLong(p, text); err != nil {
		return err
	}
	ids, err := m.ids(ctx, res, text, p.addSpecial)
	if err != nil {
		return textError(err)
	}
	if p.media && len(ids) > 0 {
		ids = ids[:len(ids)-1] // what follows may join the last token
	}
	res.IDs = ids
	if p.suffix != "" && !p.media {
		return m.continueWith(ctx, res, p.suffix, withText)
	}
	return nil
}

// textError is a refusal for a text that the engine refuses too, and not for one that is
// too much work here.
func textError(err error) error {
	if errors.Is(err, tokenizer.ErrText) {
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

func (m *Model) render(ctx context.Context, dst []byte, p *plan, engine Engine) ([]byte, error) {
	env := jinja.RequestEnv(p.size)
	env.Now, env.Stop = m.options.Now(), ctx.Done()
	if p.brought {
		release, err := reserve(2 * int64(env.MaxMemory)) // live values and dead ones
		if err != nil {
			return dst, err
		}
		defer release()
	} else { // the operator's own code, and a client's data
		env.MaxMemory, env.MaxOutput, env.MaxSteps = 2*env.MaxMemory, 2*env.MaxOutput, max(env.MaxSteps, 20_000_000)
	}
	out, err := p.template.Render(dst, p.vars, env)
	if err != nil && p.flat != nil {
		p.vars.Set("tools", jinja.List(p.flat))
		out, err = p.template.Render(dst, p.vars, env)
	}
	if err != nil {
		return dst, asRefusal(err, engine)
	}
	if p.continued {
		n, err := cutContinued(asText(out), p.final)
		return out[:n], err
	}
	return out, nil
}

// asText is b as text, for as long as b is not changed.
func asText(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

// idLimit is one more than the largest id of a tokenizer.
func idLimit(tok *tokenizer.Tokenizer) int {
	limit := tok.VocabSize()
	for _, a := range tok.AddedTokens() {
		limit = max(limit, int(a.ID)+1)
	}
	return limit
}
