package enginesim

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

const (
	// maxAnswers is vLLM's default bound of n (VLLM_MAX_N_SEQUENCES).
	maxAnswers = 16384
	// maxRequestTokens bounds all prompts and answers of one request together: their memory is allocated up front.
	maxRequestTokens = 1 << 20
)

// call is one request for generation on its way.
type call struct {
	*service
	api      body.API
	r        *http.Request
	body     *requestBody
	raw      []byte
	rec      *RequestRecord
	id       string // external request id
	rank     *rank
	pinned   bool
	prompts  [][]uint32
	seqs     []*sequence
	transfer *transfer // nil: an ordinary request
	tool     *toolCall // nil: the answer is text
}

// serve returns the handler of an API for generation.
func (s *service) serve(api body.API) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) { s.generate(w, r, api) }
}

func (s *service) generate(w http.ResponseWriter, r *http.Request, api body.API) {
	came := time.Now()
	raw, body, err := s.readBody(r)
	c := &call{service: s, api: api, r: r, body: body, raw: raw, id: r.Header.Get("X-Request-ID")}
	if c.id == "" {
		c.id = randomHex(16)
	} else {
		w.Header().Set("X-Request-ID", c.id)
	}
	c.rec = s.stats.begin(r, c.id, raw, came)
	if err == nil {
		err = c.prepare()
	}
	if err == nil {
		err = c.answer(w)
	}
	if err != nil {
		e := asAPIError(err)
		s.stats.update(c.rec, func(rec *RequestRecord) { rec.Status, rec.Error, rec.Done = e.status, e.message, true })
		s.writeError(w, err)
	}
}

// wait sleeps until ctx ends or early is closed, if that is sooner.
func wait(ctx context.Context, d time.Duration, early <-chan struct{}) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-early:
	case <-t.C:
	}
}

// prepare turns the request into sequences for a rank.
func (c *call) prepare() error {
	if f, changed := c.faults.at(); f.AnswerDelayMS > 0 {
		wait(c.r.Context(), time.Duration(f.AnswerDelayMS)*time.Millisecond, changed)
	}
	if status := c.faults.takeFailure(); status != 0 {
		return &apiError{status, "InternalServerError", "", "injected failure"}
	}
	lora, err := c.adapter()
	if err != nil {
		return err
	}
	if err := c.readPrompts(); err != nil {
		return err
	}
	if c.tool, err = forcedCall(c.api, c.raw); err != nil {
		return err
	}
	if err := c.pickRank(); err != nil {
		return err
	}
	n := 1
	if c.body.N != nil {
		n = *c.body.N
	}
	if n < 1 {
		return badRequest(fmt.Sprintf("n must be at least 1, got %d.", n))
	}
	if n > maxAnswers {
		return badRequest(fmt.Sprintf("n must be at most %d, got %d. To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable.", maxAnswers, n))
	}
	size := 0
	id := identity{lora: lora, extra: c.body.ExtraKey}
	if c.body.CacheSalt != nil {
		id.salt = *c.body.CacheSalt
	}
	for _, p := range c.prompts {
		limit, err := c.answerTokens(len(p))
		if err != nil {
			return err
		}
		if size += n * (len(p) + limit); size > maxRequestTokens {
			return badRequest(fmt.Sprintf("this simulated engine takes %d tokens in one request: n times the prompt and max_tokens are more", maxRequestTokens))
		}
		for variant := range n {
			c.seqs = append(c.seqs, &sequence{
				prompt: len(p), ids: slices.Clone(p), maxTokens: limit, starter: c.api == body.Chat || c.api == body.Messages || c.api == body.Responses, variant: variant,
				id: id, loraID: slices.Index(c.opts.LoRA, lora) + 1, session: c.session(),
			})
		}
	}
	if c.transfer, err = connectors[c.opts.Connector](c); err != nil {
		return err
	}
	switch {
	case c.opts.Role == Prefill && (c.transfer == nil || c.transfer.leg != legPrefill):
		c.stats.count("violation: request without prefill parameters at a prefill engine")
	case c.opts.Role == Decode && c.transfer != nil && c.transfer.leg == legPrefill:
		c.stats.count("violation: prefill leg at a decode engine")
		return badRequest("this engine only decodes")
	}
	for _, s := range c.seqs {
		s.out = make(chan token, s.maxTokens+1)
	}
	return nil
}

// adapter is the LoRA adapter that the request names. vLLM treats adapters as models and
// refuses unknown models; the others accept any name.
func (c *call) adapter() (string, error) {
	if c.opts.Engine == SGLang && slices.Contains(c.opts.LoRA, c.body.LoraPath) {
		return c.body.LoraPath, nil
	}
	switch {
	case slices.Contains(c.opts.LoRA, c.body.Model):
		return c.body.Model, nil
	case c.body.Model == "" || c.body.Model == c.opts.Model || c.opts.Engine != VLLM:
		return "", nil
	}
	return "", &apiError{http.StatusNotFound, "NotFoundError", "model", fmt.Sprintf("The model `%s` does not exist.", c.body.Model)}
}

func (c *call) session() string {
	if c.opts.Engine == VLLM && c.body.SessionID == "" {
		if s, ok := c.body.VLLMXArgs["session_id"].(string); ok {
			return s
		}
		return c.r.Header.Get("X-Session-Id")
	}
	return c.body.SessionID
}

func (c *call) readPrompts() (err error) {
	tok := c.opts.Tokenizer
	list := c.body.Prompt
	if c.api == body.Generate {
		list = c.body.Text
		if c.body.InputIDs != nil {
			list = c.body.InputIDs
		}
	}
	given := c.body.PromptTokenIDs
	if v, ok := c.body.KVTransferParams["prompt_token_ids"]; ok {
		if given, err = json.Marshal(v); err != nil {
			return err
		}
	}
	if given == nil && c.opts.Engine == SGLang {
		given = c.body.InputIDs
	}
	if c.api == body.Chat && given != nil {
		c.prompts, err = tok.givenIDs(given)
	} else {
		raw, history, err := c.history()
		if err != nil {
			return err
		}
		if c.api == body.Chat || c.api == body.Messages {
			raw = placeholders(raw)
		}
		if c.prompts, err = tok.prompts(c.opts.Engine, c.api, raw, list, c.body.AddSpecialTokens == nil || *c.body.AddSpecialTokens); err != nil {
			return err
		}
		if history != nil {
			c.prompts[0] = append(history, c.prompts[0]...)
		}
	}
	if err != nil {
		return err
	}
	for _, p := range c.prompts {
		if len(p) == 0 {
			return badRequest("The decoder prompt cannot be empty")
		}
	}
	return nil
}

// answerTokens is the length of the answer to a prompt.
func (c *call) answerTokens(prompt int) (int, error) {
	limit := c.opts.OutputTokens
	room := c.opts.MaxModelLen - prompt
	if room < 1 {
		return 0, badRequest(fmt.Sprintf("This model's maximum context length is %d tokens. However, your request has %d input tokens.", c.opts.MaxModelLen, prompt))
	}
	for _, v := range []*int{c.body.MaxTokens, c.body.MaxCompletionTokens, c.body.MaxOutputTokens, c.body.SamplingParams.MaxNewTokens, c.body.SamplingParams.MaxTokens} {
		if v != nil {
			limit = *v
		}
	}
	if limit < 1 {
		return 0, badRequest(fmt.Sprintf("max_tokens must be at least 1, got %d.", limit))
	}
	if c.body.MinTokens != nil && *c.body.MinTokens > limit {
		return 0, badRequest(fmt.Sprintf("min_tokens must be less than or equal to max_tokens=%d, got %d.", limit, *c.body.MinTokens))
	}
	return min(limit, room), nil
}

// pickRank reads the rank that the request names, in the engine's way, or balances.
func (c *call) pickRank() error {
	n, pinned, err := c.namedRank()
	switch {
	case err != nil:
		return err
	case c.only >= 0:
		c.rank = c.ranks[c.only]
	case pinned:
		if n < 0 || n >= len(c.ranks) {
			return badRequest(fmt.Sprintf("data_parallel_rank %d is out of range [0, %d).", n, len(c.ranks)))
		}
		c.rank, c.pinned = c.ranks[n], true
	default:
		c.rank = c.balance()
	}
	c.stats.update(c.rec, func(rec *RequestRecord) { rec.Rank, rec.Pinned = c.rank.local, c.pinned })
	return nil
}

func (c *call) namedRank() (n int, ok bool, err error) {
	header, given := c.r.Header["X-Data-Parallel-Rank"]
	switch c.opts.Engine {
	case VLLM:
		if !given || c.api == body.Responses {
			return 0, false, nil
		}
		n, err := pythonInt(header[0])
		return n, err == nil, nil
	case SGLang:
		if given && c.api != body.Generate {
			n, err := pythonInt(header[0])
			if err != nil {
				return 0, false, badRequest("X-Data-Parallel-Rank must be an integer")
			}
			return n, true, nil
		}
		for _, v := range []*int{c.body.RoutedDPRank, c.body.DataParallelRank} {
			if v != nil {
				return *v, true, nil
			}
		}
	case TRTLLM:
		hint, _ := c.body.DisaggregatedParam["route_hint"].(object)
		if v, ok := hint["dp_rank"].(json.Number); ok {
			n, err := v.Int64()
			return int(n), err == nil, nil
		}
	}
	return 0, false, nil
}

// pythonInt parses decimal numbers like Python's int().
func pythonInt(s string) (int, error) {
	return strconv.Atoi(strings.TrimPrefix(strings.TrimSpace(s), "+"))
}

// balance is the engine's own choice: SGLang uses round robin, the others the least loaded by waiting * 4 + running.
func (c *call) balance() *rank {
	if room, ok := c.firstRoom(); ok && c.opts.Role == Prefill {
		return c.ranks[int(room%int64(len(c.ranks)))]
	}
	if c.opts.Engine == SGLang {
		return c.ranks[int(c.turn.Add(1)-1)%len(c.ranks)]
	}
	best, least := c.ranks[0], 0
	for i, r := range c.ranks {
		waiting, running := r.depth()
		if score := waiting*4 + running; i == 0 || score < least {
			best, least = r, score
		}
	}
	return best
}

// merged is a token with the sequence that it belongs to.
type merged struct {
	seq int
	token
}

// answer runs the sequences and writes the answer.
func (c *call) answer(w http.ResponseWriter) error {
	if c.transfer != nil && c.transfer.before != nil {
		if err := c.transfer.before(); err != nil {
			return err
		}
	}
	ctx := c.r.Context()
	if c.opts.Engine == SGLang && len(c.seqs) > len(c.prompts) {
		c.warm()
	}
	c.rank.submit(c.seqs...)
	total := 0
	for _, s := range c.seqs {
		total += s.maxTokens + 1
	}
	tokens := make(chan merged, total)
	left := make(chan struct{}, len(c.seqs))
	for i, s := range c.seqs {
		c.handlers.Go(func() {
			for t := range s.out {
				tokens <- merged{i, t}
			}
			left <- struct{}{}
		})
	}
	out := newOutput(c, w)
	open := len(c.seqs)
	for open > 0 || len(tokens) > 0 {
		select {
		case <-ctx.Done():
			c.abandon(499, "")
		case <-left:
			open--
		case t := <-tokens:
			if t.finish == "abort" {
				c.abandon(500, "engine died")
			}
			out.token(t)
			f, changed := c.faults.at()
			if f.DieAfterTokens > 0 && out.generated >= f.DieAfterTokens {
				c.abandon(500, "injected death")
			}
			if f.HoldAfterTokens > 0 && out.generated == f.HoldAfterTokens {
				select {
				case <-ctx.Done():
				case <-changed:
				}
			}
		}
	}
	if c.transfer != nil && c.transfer.after != nil {
		if err := c.transfer.after(out); err != nil {
			return err
		}
	}
	c.stats.update(c.rec, func(rec *RequestRecord) {
		rec.Status, rec.Done, rec.Answered = http.StatusOK, true, time.Now()
		rec.PromptTokens, rec.CachedTokens, rec.Generated = out.prompt, out.cached, out.generated
	})
	out.end()
	return nil
}

// warm computes each prompt once before its variants start, as SGLang does for n > 1.
func (c *call) warm() {
	for i := 0; i < len(c.seqs); i += len(c.seqs) / len(c.prompts) {
		s := c.seqs[i]
		w := &sequence{prompt: s.prompt, ids: slices.Clone(s.ids), maxTokens: 1, id: s.id, session: s.session, out: make(chan token, 2)}
		stop := context.AfterFunc(c.r.Context(), func() { c.rank.abort(w) })
		c.rank.submit(w)
		for range w.out {
			// The token is discarded.
		}
		stop()
	}
}

// abandon ends the rest of the call, releases the blocks that were to be handed over, and cuts the connection.
func (c *call) abandon(status int, why string) {
	for _, s := range c.seqs {
		c.rank.abort(s)
		c.rank.release(s)
	}
	c.stats.update(c.rec, func(rec *RequestRecord) { rec.Status, rec.Done, rec.Error = status, true, why })
	panic(http.ErrAbortHandler)
}
