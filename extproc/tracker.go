package extproc

import (
	"hash/maphash"
	"sync"
)

// maxUnfollowed bounds the requests without a flight that are remembered.
const maxUnfollowed = 4096

// tracker finds flights by request id, for streams that know nothing else: the
// observing filter and the access log.
type tracker struct {
	failed func(Failure)
	seed   maphash.Seed

	mu   sync.Mutex
	byID map[string]*flight
	// unfollowed are hashes of the ids of requests that came here and have no flight: we
	// answered them, or nobody wants to know what becomes of them. An observing filter and
	// the access log tell of these too, once each, and in any order: only newer ones push
	// them out. Two ids of one hash cost a count at most. Invariant: it is the set of what
	// is in order, a ring with the oldest at oldest once it is full.
	unfollowed map[uint64]struct{}
	order      []uint64
	oldest     int
	// late is a ring of ended flights that wait for their outcome, oldest at next
	// once it is full; without capacity none waits. Invariant: a flight in byID is open
	// or in late.
	late []*flight
	next int
}

func newTracker(late int, failed func(Failure)) *tracker {
	return &tracker{
		failed: failed, seed: maphash.MakeSeed(), byID: map[string]*flight{}, late: make([]*flight, 0, max(late, 0)),
		unfollowed: map[uint64]struct{}{},
	}
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

// find returns nil for a request without a flight, and counts it if it never came here.
func (t *tracker) find(id string) *flight {
	t.mu.Lock()
	f := t.byID[id]
	known := f != nil
	if !known {
		_, known = t.unfollowed[maphash.String(t.seed, id)]
	}
	t.mu.Unlock()
	if !known {
		t.failed(FailureUnknownRequest)
	}
	return f
}

// pass notes that the request with this id came and has no flight.
func (t *tracker) pass(id string) {
	if id == "" {
		return
	}
	h := maphash.String(t.seed, id)
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, ok := t.unfollowed[h]; ok {
		return
	}
	t.unfollowed[h] = struct{}{}
	if len(t.order) < maxUnfollowed {
		t.order = append(t.order, h)
		return
	}
	delete(t.unfollowed, t.order[t.oldest])
	t.order[t.oldest] = h
	t.oldest = (t.oldest + 1) % maxUnfollowed
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
