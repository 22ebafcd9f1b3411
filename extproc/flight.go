package extproc

import (
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
)

// flight is the ticket of a request in flight. It serialises the calls of a Ticket, ensures that End is called exactly
// once and last even if several streams report on the request, and recovers panics in the ticket.
type flight struct {
	id     requestHash // zero if it cannot be found by other streams
	ticket Ticket
	failed func(Failure)
	// panicked is called with a panic of the ticket.
	panicked func(value any, stack []byte)

	mu sync.Mutex
	// Invariant: ended is set before End is called, and never reset. It is atomic because it is also read without mu, which is
	// held while the ticket's methods run.
	ended   atomic.Bool
	tokened bool      // FirstToken was called
	here    bool      // the response comes from this server, not from a worker
	late    time.Time // of a first token that was seen after the end
	outcome *Outcome  // arrived before the end
	told    bool      // Outcome was called
}

// guard calls f and recovers a panic in it.
func (f *flight) guard(call func()) {
	defer func() {
		if value := recover(); value != nil {
			f.failed(FailurePanic)
			f.panicked(value, debug.Stack())
		}
	}()
	call()
}

// during calls the ticket unless the request has ended.
func (f *flight) during(call func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.ended.Load() {
		f.guard(call)
	}
}

func (f *flight) responseHeaders(status int, served string) (out []Header) {
	f.during(func() { out = f.ticket.ResponseHeaders(status, served) })
	return out
}

func (f *flight) responseBody(chunk []byte, last bool) {
	f.during(func() { f.ticket.ResponseBody(chunk, last) })
}

func (f *flight) editsBody() (edits bool) {
	if t, ok := f.ticket.(EditTicket); ok {
		f.during(func() { edits = t.EditsBody() })
	}
	return edits
}

func (f *flight) editBody(chunk []byte, last bool) (out []byte, changed, holds bool) {
	if t, ok := f.ticket.(EditTicket); ok {
		f.during(func() { out, changed, holds = t.EditBody(chunk, last) })
	}
	return out, changed, holds
}

func (f *flight) firstToken(at time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.tokened, f.here:
	case f.ended.Load():
		f.failed(FailureLateFirstToken)
		if f.late.IsZero() {
			f.late = at
		}
	default:
		f.tokened = true
		f.guard(func() { f.ticket.FirstToken(at) })
	}
}

// answerHere records that what the client receives from now on does not come from a worker.
func (f *flight) answerHere() {
	f.mu.Lock()
	f.here = true
	f.mu.Unlock()
}

// end ends the ticket and reports whether the ticket still waits for its outcome.
func (f *flight) end(at time.Time) (waits bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ended.Load() {
		return false
	}
	f.ended.Store(true)
	f.guard(func() { f.ticket.End(at) })
	if f.outcome != nil {
		f.tell(*f.outcome)
	}
	_, wants := f.ticket.(OutcomeTicket)
	return wants && !f.told
}

// setOutcome records the outcome and reports whether the flight has ended too, so that nothing more is expected of it.
func (f *flight) setOutcome(o Outcome) (through bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.ended.Load() {
		f.outcome = &o
		return false
	}
	f.tell(o)
	return true
}

// tell passes the outcome to the ticket. The caller holds the lock and has ended the ticket.
func (f *flight) tell(o Outcome) {
	t, ok := f.ticket.(OutcomeTicket)
	if !ok || f.told {
		return
	}
	f.told = true
	o.FirstToken = f.late
	f.guard(func() { t.Outcome(o) })
}
