package decide

import (
	"sync"
	"time"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/routing"
)

// explainTargets is the largest fleet for which every decision is explained. In a
// larger one the table would cost more than the decision: every explainEvery-th is.
const (
	explainTargets = 128
	explainEvery   = 64
)

// Entry is a decision as the journal keeps it. Fields that change after the
// decision are set under its lock.
type Entry struct {
	ID           string    `json:"id"`
	At           time.Time `json:"at"`
	Method       string    `json:"method"`
	Path         string    `json:"path"`
	Bytes        int       `json:"bytes"`
	API          string    `json:"api"`
	Model        string    `json:"model,omitempty"`
	Conversation string    `json:"conversation,omitempty"`
	PromptTokens int64     `json:"promptTokens"`
	Target       string    `json:"target,omitempty"`
	Endpoint     string    `json:"endpoint,omitempty"`
	Via          string    `json:"via,omitempty"`
	Matched      int64     `json:"matchedTokens"`
	Miss         int64     `json:"missTokens"`
	Prefill      string    `json:"prefill,omitempty"`
	PrefillNotes []string  `json:"prefillNotes,omitempty"`
	Degraded     string    `json:"degraded,omitempty"`
	Refusal      string    `json:"refusal,omitempty"`
	// Assumed names the shape of the prompt that no recording of a real engine backs.
	Assumed  string `json:"assumed,omitempty"`
	Rejected int    `json:"rejected,omitempty"`
	Reason   string `json:"reason,omitempty"`
	// Waited is how long the request stood in the queue for room.
	Waited      time.Duration        `json:"waitedNs,omitempty"`
	Stages      []StageTime          `json:"stages"`
	Explanation *routing.Explanation `json:"explanation,omitempty"`
	// Recorded is the decision with the router's state, to be made again offline.
	Recorded *routing.Decision `json:"-"`

	room [8]StageTime // of Stages

	mu sync.Mutex
	// After is what became of the request.
	After After `json:"after"`
}

// After is what became of a request.
type After struct {
	Status  int              `json:"status,omitempty"`
	Served  string           `json:"served,omitempty"`
	Cached  *int64           `json:"cachedTokens,omitempty"`
	Ended   *time.Time       `json:"ended,omitempty"`
	Outcome *extproc.Outcome `json:"outcome,omitempty"`
}

// StageTime is how long a stage took.
type StageTime struct {
	Stage string        `json:"stage"`
	Took  time.Duration `json:"ns"`
}

// newEntry begins the entry of a request. Strings of the request share memory with
// it: what outlives it is copied and cut, unless it is one of the usual.
func newEntry(r *extproc.Request, began time.Time) *Entry {
	e := &Entry{ID: clip(r.ID), At: began, Method: usual(r.Method), Path: usual(r.Path), Bytes: len(r.Body)}
	e.Stages = e.room[:0]
	return e
}

// usual is a text that is not kept anew for every request, else a copy, cut.
func usual(s string) string {
	switch s {
	case "POST":
		return "POST"
	case "/v1/chat/completions":
		return "/v1/chat/completions"
	case "/v1/completions":
		return "/v1/completions"
	}
	return clip(s)
}

func (e *Entry) change(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	f()
}

// notePrefill adds what happened to a prefill leg.
func (e *Entry) notePrefill(text string) {
	e.change(func() { e.PrefillNotes = append(e.PrefillNotes, clipTo(text, maxKeptText)) })
}

func (e *Entry) setStatus(status int)    { e.change(func() { e.After.Status = status }) }
func (e *Entry) setServed(served string) { e.change(func() { e.After.Served = served }) }
func (e *Entry) setTarget(target string) { e.change(func() { e.Target = target }) }
func (e *Entry) setCached(tokens int64)  { e.change(func() { e.After.Cached = &tokens }) }
func (e *Entry) setEnded(at time.Time)   { e.change(func() { e.After.Ended = &at }) }
func (e *Entry) setOutcome(o extproc.Outcome) {
	e.change(func() { e.After.Outcome = &o })
}

// succeeded says whether the answer began well.
func (e *Entry) succeeded() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.After.Status/100 == 2
}

// journal is a ring of the last decisions.
type journal struct {
	mu   sync.Mutex
	ring []*Entry
	next int
	seen uint64

	blanks sync.Pool // of *routing.Explanation
}

func newJournal(keep int) *journal { return &journal{ring: make([]*Entry, keep)} }

// explains says whether the next decision is to be explained.
func (l *journal) explains(targets int) bool {
	if len(l.ring) == 0 {
		return false
	}
	if targets <= explainTargets {
		return true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seen++
	return l.seen%explainEvery == 1
}

func (l *journal) add(e *Entry) {
	if len(l.ring) == 0 {
		return
	}
	l.mu.Lock()
	old := l.ring[l.next]
	l.ring[l.next] = e
	l.next = (l.next + 1) % len(l.ring)
	l.mu.Unlock()
	if old == nil {
		return
	}
	old.mu.Lock() // who still reads the entry finds no explanation, or has written it down
	ex := old.Explanation
	old.Explanation = nil
	old.mu.Unlock()
	if ex != nil {
		l.blanks.Put(ex)
	}
}

// blank is memory for an explanation, perhaps that of a decision which is not in
// the ring any more.
func (l *journal) blank() *routing.Explanation {
	if ex, ok := l.blanks.Get().(*routing.Explanation); ok {
		return ex
	}
	return new(routing.Explanation)
}

// last returns up to n entries, newest first.
func (l *journal) last(n int) []*Entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []*Entry
	for i := 1; i <= len(l.ring) && len(out) < n; i++ {
		if e := l.ring[(l.next-i+len(l.ring))%len(l.ring)]; e != nil {
			out = append(out, e)
		}
	}
	return out
}

// find returns the newest entry with a request id.
func (l *journal) find(id string) *Entry {
	id = clip(id)
	for _, e := range l.last(len(l.ring)) {
		if e.ID == id {
			return e
		}
	}
	return nil
}
