package extproc

import "sync"

// tracker finds flights by request id, for streams that know nothing else: the
// observing filter and the access log.
type tracker struct {
	failed func(Failure)

	mu   sync.Mutex
	byID map[string]*flight
	// late is a ring of ended flights that wait for their outcome, oldest at next
	// once it is full; without capacity none waits. Invariant: a flight in byID is open
	// or in late.
	late []*flight
	next int
}

func newTracker(late int, failed func(Failure)) *tracker {
	return &tracker{failed: failed, byID: map[string]*flight{}, late: make([]*flight, 0, max(late, 0))}
}

// add makes f known. A second request with the same id takes the first one's place.
func (t *tracker) add(f *flight) {
	if f.id == "" {
		return
	}
	t.mu.Lock()
	t.byID[f.id] = f
	t.mu.Unlock()
}

func (t *tracker) find(id string) *flight {
	t.mu.Lock()
	f := t.byID[id]
	t.mu.Unlock()
	if f == nil {
		t.failed(FailureUnknownRequest)
	}
	return f
}

// remove forgets f.
func (t *tracker) remove(f *flight) {
	t.mu.Lock()
	t.forget(f)
	t.mu.Unlock()
}

func (t *tracker) forget(f *flight) {
	if t.byID[f.id] == f {
		delete(t.byID, f.id)
	}
}

// retire keeps an ended flight until its outcome comes or too many others ended.
func (t *tracker) retire(f *flight) {
	if f.id == "" {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if cap(t.late) == 0 {
		t.forget(f)
		return
	}
	if len(t.late) < cap(t.late) {
		t.late = append(t.late, f)
		return
	}
	if old := t.late[t.next]; t.byID[old.id] == old {
		t.forget(old)
		t.failed(FailureOutcomeOverflow)
	}
	t.late[t.next] = f
	t.next = (t.next + 1) % len(t.late)
}
