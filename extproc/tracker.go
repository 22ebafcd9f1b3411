package extproc

import (
	"hash/maphash"
	"sync"
)

// maxUnfollowed limits the requests without a flight that are remembered.
const maxUnfollowed = 4096

// requestHash identifies a request id, which a client may make arbitrarily long. The hash is keyed per process, so that
// clients cannot construct collisions; the zero value stands for a missing id.
type requestHash [2]uint64

// tracker finds flights by request id, for streams that carry no other key: the observing filter and the access log.
type tracker struct {
	failed func(Failure)
	seeds  [2]maphash.Seed

	mu   sync.Mutex
	byID map[requestHash]*flight
	// unfollowed holds requests that came here and have no flight, because we answered them or their outcome does not
	// matter. An observing filter and the access log report on these too, once each and in any order, so entries are
	// evicted only by newer ones. Invariant: it is the set of the elements of order, a ring that, once full, has its
	// oldest element at index oldest.
	unfollowed map[requestHash]struct{}
	order      []requestHash
	oldest     int
	// late is a ring of ended flights that wait for their outcome. Once it is full, its oldest element is at index
	// next. With capacity 0 no flight waits. Invariant: a flight in byID is open or in late.
	late []*flight
	next int
}

func newTracker(late int, failed func(Failure)) *tracker {
	return &tracker{
		failed: failed, seeds: [2]maphash.Seed{maphash.MakeSeed(), maphash.MakeSeed()}, byID: map[requestHash]*flight{}, late: make([]*flight, 0, max(late, 0)),
		unfollowed: map[requestHash]struct{}{},
	}
}

// hash returns the tracker's key for a request id.
func (t *tracker) hash(id string) requestHash {
	if id == "" {
		return requestHash{}
	}
	return requestHash{maphash.String(t.seeds[0], id), maphash.String(t.seeds[1], id)}
}

// add registers f, replacing an ended request with the same id. It reports false if an open request has the id.
func (t *tracker) add(f *flight) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	other := t.byID[f.id]
	free := other == nil || other.ended.Load()
	if free && f.id != (requestHash{}) {
		t.byID[f.id] = f
	}
	return free
}

// find returns the flight of a request, nil if it has none. It counts requests that only a worker received.
func (t *tracker) find(id requestHash, served bool) *flight {
	t.mu.Lock()
	f := t.byID[id]
	known := f != nil
	if !known {
		_, known = t.unfollowed[id]
	}
	t.mu.Unlock()
	if !known && served {
		t.failed(FailureUnknownRequest)
	}
	return f
}

// pass records that the request with this id came here and has no flight.
func (t *tracker) pass(id requestHash) {
	if id == (requestHash{}) {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, ok := t.unfollowed[id]; ok {
		return
	}
	t.unfollowed[id] = struct{}{}
	if len(t.order) < maxUnfollowed {
		t.order = append(t.order, id)
		return
	}
	delete(t.unfollowed, t.order[t.oldest])
	t.order[t.oldest] = id
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

// retire keeps an ended flight until its outcome arrives or newer ended flights evict it.
func (t *tracker) retire(f *flight) {
	if f.id == (requestHash{}) {
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
