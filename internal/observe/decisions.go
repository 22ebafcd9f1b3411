package observe

import (
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/routing"
)

// ExplainTargets is the largest fleet in which every decision is explained. In a larger one the cost table would take
// more time than the decision, so only every ExplainEvery-th decision is explained.
const (
	ExplainTargets = 128
	ExplainEvery   = 64
)

// TraceBlock is the block size of Mooncake's traces in tokens.
const TraceBlock = 512

// Entry is a decision in the decision log. Fields that may change after Add are
// set by its methods, which are safe for concurrent use.
type Entry struct {
	ID           string    `json:"id"`
	At           time.Time `json:"at"`
	Method       string    `json:"method"`
	Path         string    `json:"path"`
	Bytes        int       `json:"bytes"`
	API          string    `json:"api"`
	Model        string    `json:"model,omitempty"`
	Conversation string    `json:"conversation,omitempty"`
	PromptTokens int64     `json:"prompt_tokens"`
	Target       string    `json:"target,omitempty"`
	Endpoint     string    `json:"endpoint,omitempty"`
	Engine       string    `json:"-"` // of the target
	Via          string    `json:"via,omitempty"`
	// FirstTurn reports that the conversation's id was unknown.
	FirstTurn bool  `json:"first_turn,omitempty"`
	Matched   int64 `json:"matched_tokens"`
	Miss      int64 `json:"miss_tokens"`
	// Cache is "unread" or "read_in_part" if the request makes the engine read less than it has cached.
	Cache        string   `json:"cache,omitempty"`
	Prefill      string   `json:"prefill,omitempty"`
	PrefillNotes []string `json:"prefill_notes,omitempty"`
	Degraded     string   `json:"degraded,omitempty"`
	Refusal      string   `json:"refusal,omitempty"`
	// Assumed names the shape of the prompt if no recording of a real engine confirms it.
	Assumed  string `json:"assumed,omitempty"`
	Rejected int    `json:"rejected,omitempty"`
	Reason   string `json:"reason,omitempty"`
	// Priority and Tenant are those of the queue; Tenant as in Status.
	Priority int    `json:"priority,omitempty"`
	Tenant   string `json:"tenant,omitempty"`
	// Waited is the time that the request spent in the queue for capacity.
	Waited      time.Duration        `json:"waited_ns,omitempty"`
	Stages      []StageTime          `json:"stages"`
	Shadows     []Shadow             `json:"shadows,omitempty"`
	Explanation *routing.Explanation `json:"explanation,omitempty"`
	// Recorded is the decision with the router's state before it, for Decision.Rerun; nil if it was not recorded.
	Recorded *routing.Decision `json:"-"`

	// HashIDs are keyed hashes for traces: the i-th is of the prompt's first (i+1)*TraceBlock tokens.
	HashIDs []uint64 `json:"-"`

	room [8]StageTime // backing array of Stages
	span trace.Span   // of the request, nil without a Tracer

	mu sync.Mutex
	// After is the outcome of the request.
	After After `json:"after"`
}

// Shadow is what a policy of routing.shadow would have chosen.
type Shadow struct {
	Policy string `json:"policy"`
	Target string `json:"target"`
	// Miss is the number of uncached prompt tokens on Target, Queue the number of tokens queued there before it.
	Miss  int64 `json:"miss_tokens"`
	Queue int64 `json:"queued_tokens"`
	// Regret is the decision's Miss and Queue minus these: the additional cost of the choice, as far as known then.
	Regret int64 `json:"estimated_regret_tokens"`
}

// After is the outcome of a request.
type After struct {
	Status  int              `json:"status,omitempty"`
	Served  string           `json:"served,omitempty"`
	Cached  *int64           `json:"cached_tokens,omitempty"`
	Output  *int64           `json:"output_tokens,omitempty"`
	Ended   *time.Time       `json:"ended,omitempty"`
	Outcome *extproc.Outcome `json:"outcome,omitempty"`
}

// stageWait names the wait for capacity among an entry's stages.
const stageWait = "wait"

// Wait records the time that the request spent in the queue for capacity.
func (e *Entry) Wait(d time.Duration) {
	e.Waited = d
	e.Stages = append(e.Stages, StageTime{stageWait, d})
}

// StageTime is the duration of a stage.
type StageTime struct {
	Stage string        `json:"stage"`
	Took  time.Duration `json:"ns"`
}

// NewEntry starts the entry of a request that arrived at began. It copies and clips
// the strings of the request, which share memory with the body.
func NewEntry(r *extproc.Request, began time.Time) *Entry {
	path, _, _ := strings.Cut(r.Path, "?") // its query may hold a key
	e := &Entry{ID: Clip(r.ID), At: began, Method: Clip(r.Method), Path: Clip(path), Bytes: len(r.Body)}
	e.Stages = e.room[:0]
	return e
}

func (e *Entry) change(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	f()
}

// NotePrefill adds a line about a prefill leg.
func (e *Entry) NotePrefill(text string) {
	e.change(func() { e.PrefillNotes = append(e.PrefillNotes, ClipTo(text, MaxText)) })
}

// SetStatus, SetServed, SetTarget, SetCached, SetOutput and SetOutcome record the outcome of the request.
func (e *Entry) SetStatus(status int)         { e.change(func() { e.After.Status = status }) }
func (e *Entry) SetServed(served string)      { e.change(func() { e.After.Served = Clip(served) }) }
func (e *Entry) SetTarget(target string)      { e.change(func() { e.Target = target }) }
func (e *Entry) SetCached(tokens int64)       { e.change(func() { e.After.Cached = &tokens }) }
func (e *Entry) SetOutput(tokens int64)       { e.change(func() { e.After.Output = &tokens }) }
func (e *Entry) SetOutcome(o extproc.Outcome) { e.change(func() { e.After.Outcome = &o }) }

// Explain attaches the explanation and clips its texts, some of which are the client's.
func (e *Entry) Explain(ex *routing.Explanation) {
	e.Explanation = ex
	for ; ex != nil; ex = ex.Prefill {
		ex.Request, ex.Model, ex.Conversation = e.ID, e.Model, e.Conversation
		ex.Error = ClipTo(ex.Error, MaxText)
		for i := range ex.Verdicts {
			ex.Verdicts[i].Text = ClipTo(ex.Verdicts[i].Text, MaxText)
		}
	}
}

// Succeeded reports whether the response status is 2xx.
func (e *Entry) Succeeded() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.After.Status/100 == 2
}

// Decisions is the decision log: a ring of the last decisions. It is safe for concurrent use.
type Decisions struct {
	mu   sync.Mutex
	ring []*Entry
	next int
	seen uint64
	// added counts the decisions logged since the start.
	added uint64

	free sync.Pool // of *routing.Explanation
}

// NewDecisions returns a log that keeps that many decisions; 0 keeps none.
func NewDecisions(keep int) *Decisions { return &Decisions{ring: make([]*Entry, keep)} }

// Resize changes how many decisions are kept; the newest stay.
func (l *Decisions) Resize(keep int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	newest := l.last(keep)
	slices.Reverse(newest)
	l.ring = make([]*Entry, keep)
	l.next = copy(l.ring, newest) % max(keep, 1)
}

// Explains reports whether the next decision is explained: each in a fleet of up to ExplainTargets targets, else one in
// ExplainEvery.
func (l *Decisions) Explains(targets int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.ring) == 0 || targets <= ExplainTargets {
		return len(l.ring) > 0
	}
	l.seen++
	return l.seen%ExplainEvery == 1
}

// Add logs a decision and drops the oldest.
func (l *Decisions) Add(e *Entry) {
	l.mu.Lock()
	if len(l.ring) == 0 {
		l.mu.Unlock()
		return
	}
	l.added++
	old := l.ring[l.next]
	l.ring[l.next] = e
	l.next = (l.next + 1) % len(l.ring)
	l.mu.Unlock()
	if old == nil {
		return
	}
	var ex *routing.Explanation // a reader has finished with it, or will find nil
	if old.change(func() { ex, old.Explanation = old.Explanation, nil }); ex != nil {
		l.free.Put(ex)
	}
}

// Blank returns an explanation to be filled in, recycled from entries that left the log if possible.
func (l *Decisions) Blank() *routing.Explanation {
	if ex, ok := l.free.Get().(*routing.Explanation); ok {
		return ex
	}
	return new(routing.Explanation)
}

// Last returns up to n entries, newest first.
func (l *Decisions) Last(n int) []*Entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.last(n)
}

// Since returns the entries added after the first seen ones, at most the newest n, oldest first. It also returns how
// many have been added in total.
func (l *Decisions) Since(seen uint64, n int) ([]*Entry, uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if more := l.added - seen; more < uint64(n) {
		n = int(more)
	}
	out := l.last(n)
	slices.Reverse(out)
	return out, l.added
}

// last is Last. The caller holds the lock.
func (l *Decisions) last(n int) []*Entry {
	var out []*Entry
	for i := 1; i <= len(l.ring) && len(out) < n; i++ {
		if e := l.ring[(l.next-i+len(l.ring))%len(l.ring)]; e != nil {
			out = append(out, e)
		}
	}
	return out
}

// Find returns the newest entry with a request id.
func (l *Decisions) Find(id string) *Entry {
	id = Clip(id)
	for _, e := range l.Last(math.MaxInt) {
		if e.ID == id {
			return e
		}
	}
	return nil
}
