package shape

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/conv"
)

// State is what is known about whether our ids equal an engine's.
type State int32

// The states. Only Differs forbids using ids.
const (
	Unchecked State = iota // the engine has not been asked, or could not answer
	Agrees
	Differs
)

var stateNames = [...]string{"unchecked", "agrees", "differs"}

// String returns the state's name for metrics and logs.
func (s State) String() string {
	if s >= 0 && int(s) < len(stateNames) {
		return stateNames[s]
	}
	return "unknown"
}

// CheckerOptions configures a Checker. Zero values select the defaults.
type CheckerOptions struct {
	// ModelName is the model name in the requests of the start-up check.
	ModelName string
	// Every: one in Every requests in service is compared, and for a while after a difference each one. 0: 1000.
	Every int
	// Retry is the interval at which a model that differs, or an engine that did not answer, is checked again. 0: 1 minute.
	Retry time.Duration
	// MaxBody is the largest body, in bytes, that is copied for comparison. 0: 1 MiB.
	MaxBody int
	// Cache is used for the model's ids, so that cached ids are compared, too; may be nil.
	Cache *conv.Cache
	// Tenant is the conv.Turn.Tenant of comparisons. With one, they leave nothing that clients find, and no cached ids of
	// clients are compared.
	Tenant string
	// Awake reports whether the engine can be queried when a retry is due; nil: always.
	Awake func() bool
	// Gate, if not nil, is a semaphore: it limits concurrent checks among the checkers that share it.
	Gate chan struct{}
	// OnCheck is called after every comparison; a nil difference and a nil error mean equal. It must not block.
	OnCheck func(api body.API, d *Difference, err error)
	// OnState is called on every change of state, with the difference that caused it. It must not block.
	OnState func(s State, d *Difference)
}

// Checker compares a model's ids with an engine's own, at start-up and in service, and reports whether they may be
// used. A client could send a prompt with different ids on purpose, so one difference in service is not decisive. After
// it the built-in requests are compared again, where one difference is decisive, and the next maxRecent prompts in
// service, of which half must differ. Methods may be called concurrently, except Check and Run.
type Checker struct {
	model   *Model
	oracle  *Oracle
	options CheckerOptions

	state   atomic.Int32
	count   atomic.Uint64
	samples chan []byte   // API in the first byte, then the body
	again   chan struct{} // a check is requested

	wanted, taken atomic.Uint32 // bits 1 << API: those whose ids shall be forwarded, and those for which the engine uses them
	burst         atomic.Int32  // while above 0 all requests in service are compared; see wholeBurst
	differed      atomic.Bool   // a prompt in service did: no ids are forwarded until Recheck

	// Only Check and Run use the following fields. unanswered holds the bits of the APIs that got no answer and are
	// queried repeats more times. recent are the last prompts in service that were compared. distrusted: half of them
	// differed, and since then too few were equal.
	unanswered uint32
	repeats    int
	seed       maphash.Seed
	recent     []outcome
	distrusted bool
}

// outcome is the result of comparing a prompt. Its key is a hash of the body if the ids are equal, else of the position and the
// two ids of the difference: so a difference counts once, however many bodies and turns of a conversation repeat it.
type outcome struct {
	key     uint64
	differs bool
}

// defaultMaxBody is the default of CheckerOptions.MaxBody in bytes. maxRecent bounds the length of recent, and
// maxRepeats how often an API that did not answer is queried again after a check. A comparison takes maxRecent from a
// burst's budget, a request that turns out not to be comparable 1. Of the checks that Recheck asks for, the first maxSoon
// are made immediately, then one in each pause: each connection to a port of events.bind asks for one.
const (
	defaultMaxBody = 1 << 20
	maxRecent      = 16
	maxRepeats     = 5
	wholeBurst     = maxRecent * maxRecent
	maxSoon        = 3
	pause          = 10 * time.Second
)

// NewChecker returns a checker. It does nothing until Run is called.
func NewChecker(m *Model, oracle *Oracle, options CheckerOptions) *Checker {
	if options.Every <= 0 {
		options.Every = 1000
	}
	if options.MaxBody <= 0 {
		options.MaxBody = defaultMaxBody
	}
	if options.Retry <= 0 {
		options.Retry = time.Minute
	}
	return &Checker{model: m, oracle: oracle, options: options, samples: make(chan []byte, 4), again: make(chan struct{}, 1), seed: maphash.MakeSeed()}
}

// State returns the current state.
func (c *Checker) State() State { return State(c.state.Load()) }

// Usable reports whether ids may be used for routing.
func (c *Checker) Usable() bool { return c.State() != Differs }

// Offer submits a request in service. One in Every is copied and compared later, and each one after a difference. It never
// blocks: if too many wait, the request is not compared.
func (c *Checker) Offer(req *body.Request) {
	if c.burst.Load() <= 0 && (!c.Usable() || c.count.Add(1)%uint64(c.options.Every) != 0) || len(req.Body) > c.options.MaxBody {
		return
	}
	sample := append(make([]byte, 0, len(req.Body)+1), byte(req.API))
	select {
	case c.samples <- append(sample, req.Body...):
	default:
	}
}

// Recheck makes Run check again soon, within pause, for example because the engine may have been replaced. It never blocks.
func (c *Checker) Recheck() {
	select {
	case c.again <- struct{}{}:
	default:
	}
}

// Run checks immediately, and then samples and retries until ctx ends. The retry interval has a
// jitter of a tenth, so that the engines of a fleet are not checked at the same moment.
func (c *Checker) Run(ctx context.Context) {
	check := func() { c.Check(ctx) }
	c.gated(ctx, check)
	retry := time.NewTicker(c.options.Retry - rand.N(c.options.Retry/10+1))
	defer retry.Stop()
	var due <-chan time.Time // of the check that Recheck asked for
	var paid time.Time       // when no such check counts any more
	for {
		select {
		case <-ctx.Done():
			return
		case <-retry.C:
			switch {
			case c.options.Awake != nil && !c.options.Awake():
			case c.State() != Agrees:
				c.gated(ctx, check)
			case c.unanswered != 0 && c.repeats > 0:
				c.repeats--
				c.gated(ctx, func() { c.unanswered = c.probe(ctx, c.unanswered) })
			}
		case <-c.again:
			due = time.After(time.Until(paid.Add(-(maxSoon - 1) * pause)))
		case now := <-due:
			if due = nil; paid.Before(now) {
				paid = now
			}
			paid = paid.Add(pause)
			c.forget()
			c.gated(ctx, check)
		case s := <-c.samples:
			c.gated(ctx, func() { c.sample(ctx, s) })
		}
	}
}

// gated calls run while it holds a place of options.Gate, unless ctx ends before.
func (c *Checker) gated(ctx context.Context, run func()) {
	if c.options.Gate != nil {
		select {
		case c.options.Gate <- struct{}{}:
			defer func() { <-c.options.Gate }()
		case <-ctx.Done():
			return
		}
	}
	run()
}

// Check compares the built-in requests and sets the state: Agrees if all ids are equal, Differs at
// the first difference, Unchecked if the engine does not answer. After too many differences in
// service the state stays Differs even if all are equal; the next prompts are then compared.
func (c *Checker) Check(ctx context.Context) State {
	asked := false
	for _, q := range builtIn(c.options.ModelName) {
		d, err := c.ask(ctx, q)
		switch {
		case d != nil:
			c.forget()
			c.burst.Store(0)
			c.set(Differs, d)
			return Differs
		case err == nil:
			asked = true
		case !errors.Is(err, errNotComparable):
			if c.State() != Differs {
				c.set(Unchecked, nil)
			}
			return c.State()
		}
	}
	switch {
	case !asked:
		c.set(Unchecked, nil)
	case c.distrusted:
		c.burst.Store(wholeBurst)
	default:
		c.set(Agrees, nil) // first, so that TakesIDs asks for what is not probed now
		c.unanswered, c.repeats = c.probe(ctx, c.wanted.Load()), maxRepeats
	}
	return c.State()
}

func (c *Checker) sample(ctx context.Context, s []byte) {
	d, err := c.ask(ctx, s)
	left := c.burst.Load()
	if errors.Is(err, errNotComparable) {
		c.burst.Store(max(left-1, 0))
		return
	}
	c.burst.Store(max(left-maxRecent, 0))
	if err != nil {
		if ctx.Err() == nil && c.State() == Agrees {
			c.set(Unchecked, nil) // until the next check
		}
		return
	}
	o := outcome{maphash.Bytes(c.seed, s), d != nil}
	if d != nil {
		c.differed.Store(true)
		o.key = maphash.Comparable(c.seed, [...]int64{int64(d.At), d.Ours, d.Theirs})
	}
	c.recent = slices.DeleteFunc(c.recent, func(old outcome) bool { return old.key == o.key })
	c.recent = append(c.recent[max(0, len(c.recent)+1-maxRecent):], o)
	if d != nil && left < maxRecent { // no burst: is it the tokenizer, or this prompt?
		c.burst.Store(wholeBurst)
		c.Check(ctx)
	}
	differing := 0
	for _, o := range c.recent {
		if o.differs {
			differing++
		}
	}
	switch {
	case !c.distrusted && differing >= maxRecent/2:
		c.recent, c.distrusted = nil, true // the equal prompts that end this may come after several checks
		c.burst.Store(0)
		c.set(Differs, d)
	case c.distrusted && len(c.recent)-differing > maxRecent/2, d == nil && c.State() == Unchecked:
		c.distrusted = false
		c.set(Agrees, nil)
		c.unanswered, c.repeats = c.wanted.Load(), maxRepeats // asked at the next retry
	}
}

// forget drops the results of prompts in service, which may come from an engine that was replaced.
func (c *Checker) forget() {
	c.recent, c.distrusted = nil, false
	c.differed.Store(false)
}

func (c *Checker) set(s State, d *Difference) {
	if s == Unchecked {
		c.taken.Store(0) // what answers next may be another engine
	}
	if old := State(c.state.Swap(int32(s))); (old != s || d != nil) && c.options.OnState != nil {
		c.options.OnState(s, d)
	}
}

// errNotComparable is returned for a request whose ids are unknown to one of the two sides.
var errNotComparable = errors.New("not comparable")

// ask compares one request. It returns the difference, nil if the ids (or the refusals) are equal, or an error.
func (c *Checker) ask(ctx context.Context, s []byte) (*Difference, error) {
	d, err := c.compare(ctx, s)
	if c.options.OnCheck != nil && !errors.Is(err, errNotComparable) {
		c.options.OnCheck(body.API(s[0]), d, err)
	}
	return d, err
}

// ours returns our ids for a request.
func (c *Checker) ours(ctx context.Context, req *body.Request) (Result, error) {
	return c.model.PromptInto(ctx, nil, c.options.Cache.TurnOf(c.options.Tenant, req), c.oracle.Engine)
}

func (c *Checker) compare(ctx context.Context, s []byte) (*Difference, error) {
	req, err := body.Parse(body.API(s[0]), s[1:])
	if err != nil {
		return nil, errNotComparable
	}
	if rendered(req.API) {
		// The engine would fetch media to render them, so requests that cannot be compared are not sent.
		if ours, err := c.ours(ctx, req); err != nil || ours.Partial != "" {
			return nil, errNotComparable
		}
	}
	theirs, asked, err := c.oracle.IDs(ctx, req)
	if errors.Is(err, ErrNoOracle) {
		return nil, errNotComparable
	}
	_, theyRefuse := errors.AsType[*Refusal](err)
	if err != nil && !theyRefuse {
		return nil, err
	}
	ours, err := c.ours(ctx, asked)
	_, weRefuse := errors.AsType[*Refusal](err)
	switch {
	case theyRefuse && weRefuse:
		return nil, nil
	case theyRefuse || weRefuse:
		// The engine's flags affect refusals too, and a refusal has no tokens that could be wrong.
		return nil, errNotComparable
	case err != nil || ours.Partial != "":
		return nil, errNotComparable
	}
	return Compare(c.model.tok, ours.IDs, theirs), nil
}

// builtIn returns the requests of the start-up check. They cover known disagreements between engines and tokenizers.
func builtIn(modelName string) [][]byte {
	name := strconv.Quote(modelName)
	out := make([][]byte, 0, len(plainQuestions)+len(chatQuestions))
	for _, q := range plainQuestions {
		out = append(out, append([]byte{byte(body.Completions)}, fmt.Sprintf(`{"model":%s,"prompt":%s}`, name, q)...))
	}
	for _, q := range chatQuestions {
		out = append(out, append([]byte{byte(body.Chat)}, fmt.Sprintf(`{"model":%s,"messages":%s}`, name, q)...))
	}
	return out
}

var plainQuestions = []string{
	`"Be brief, please: 1234567 numbers,  two spaces and\n\n a new line.\t"`,
	`"def f(x):\n\treturn {'a': x ** 2}  # caf\u00e9\r\n"`,
	`"K\u00f6ln \ud83d\ude42 \u6771\u4eac, e\u0301 \u05e9\u05dc\u05d5\u05dd \ufb01 \u212b"`,
	`"<|im_end|> <s> </s> [INST] <think>"`,
}

var chatQuestions = []string{
	`[{"role":"user","content":"Be brief."}]`,
	`[{"role":"user","content":"Hi"},{"role":"assistant","content":" Hello! "},{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b\n"}]}]`,
	`[{"role":"system","content":"You are a pirate."},{"role":"user","content":"\u6771\u4eac?"}]`,
}
