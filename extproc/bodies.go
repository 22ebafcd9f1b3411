package extproc

import (
	"cmp"
	"container/list"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/mem"
)

// pieceOverhead is the memory that a piece of a body takes in addition to its bytes: its
// reference, the reference-counted buffer and the buffer's slice.
const pieceOverhead = 128

// heldBytes is an upper bound of the memory of body: buffers are up to a quarter larger than their content, see pool.
func heldBytes(body mem.BufferSlice) (n int64) {
	for _, b := range body {
		size := int64(b.Len())
		n += size + size/4 + pieceOverhead
	}
	return n
}

// largeBody is the memory of a body of 512 KiB, see heldBytes. Decisions on larger ones wait for each other, so that enough
// of them would keep out the small ones.
const largeBody = 640 << 10

// bodies limits the number and the memory of the request bodies held by all streams of a server, those that have not arrived
// included. It is safe for concurrent use.
type bodies struct {
	mu        sync.Mutex
	maxBytes  int64 // 0: no bound
	large     int64 // bodies of more bytes leave the last eighth of maxBytes to others; 0: none do
	maxCount  int   // 0: no bound
	bytes     int64
	count     int
	announced list.List     // of *arrival: bodies of which nothing has arrived, the oldest first. Envoy holds them with BUFFERED.
	arriving  list.List     // of *arrival: unfinished bodies, the oldest first
	patience  time.Duration // how long a body may arrive before it is dropped for others; see grow
	// promised is the bytes of the announced bodies that Envoy holds, and of all headers with them, maxBytes at most after
	// patience.
	promised int64
	trimming bool // trim will be called
}

// arrival is an announced or unfinished body.
type arrival struct {
	x     *exchange
	since time.Time
	size  int64         // of its bytes in Envoy, the most that they may become, and of its headers
	grows bool          // its length is unknown, see cost
	list  *list.List    // that place is in
	place *list.Element // nil: dropped, or whole
}

// grow adds bytes to *held, the memory of one stream's body, 0 meaning no body. It reports whether the total of all
// streams is within the limits; if not, it does not change. Bodies that arrive slowly are dropped first: otherwise one
// client could take all places with a byte each. Where the number is the limit, an eighth of the patience is enough: a
// client that opens requests quickly would take all places again before each end of a longer one. A body is always
// accepted while no other one is held.
func (b *bodies) grow(held *int64, more int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.fit(held, more)
}

// fit is grow. The caller holds the lock.
func (b *bodies) fit(held *int64, more int64) bool {
	most := b.maxBytes
	if b.large > 0 && *held+more > b.large {
		most -= most / 8
	}
	for {
		oldest, patience := b.arriving.Front(), b.patience
		switch {
		case *held == 0 && b.maxCount > 0 && b.count >= b.maxCount:
			if other := b.announced.Front(); oldest == nil || other != nil && other.Value.(*arrival).since.Before(oldest.Value.(*arrival).since) {
				oldest = other
			}
			patience /= 8
		case b.bytes > *held && b.maxBytes > 0 && b.bytes+more > most:
		default:
			b.set(held, *held+more)
			return true
		}
		if oldest == nil {
			return false
		}
		a := oldest.Value.(*arrival)
		if &a.x.held == held || time.Since(a.since) < patience {
			return false
		}
		b.give(a)
	}
}

// announce counts a body that is to come, and reports whether there is a place for it.
func (b *bodies) announce(a *arrival) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.fit(&a.x.held, pieceOverhead) {
		return false
	}
	a.since = time.Now()
	a.list, a.place = &b.announced, b.announced.PushBack(a)
	b.promised += a.size
	b.trimLater()
	return true
}

func (b *bodies) trimLater() {
	if b.maxBytes > 0 && b.promised > b.maxBytes && !b.trimming {
		b.trimming = true
		time.AfterFunc(b.patience, b.trim)
	}
}

// trim drops announced bodies, the longest first, that arrive slowly and together exceed maxBytes. Envoy bounds
// their sum only by its heap limit, where it refuses other requests, and never ends a stalled upload over HTTP/1.1.
func (b *bodies) trim() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.trimming = false
	var slow []*arrival
	sum, now := int64(0), time.Now()
	for e := b.announced.Front(); e != nil; e = e.Next() {
		a := e.Value.(*arrival)
		if now.Sub(a.since) < b.patience {
			break
		}
		slow = append(slow, a)
		sum += a.cost(now)
	}
	slices.SortStableFunc(slow, func(a, c *arrival) int { return cmp.Compare(c.cost(now), a.cost(now)) })
	for _, a := range slow {
		if sum <= b.maxBytes {
			break
		}
		sum -= a.cost(now)
		b.give(a)
	}
	b.trimLater()
}

// cost is what a slow body may take in Envoy. One of unknown length is taken to grow by 1 MiB/s: with size from the start,
// a few that send nothing would drop the others.
func (a *arrival) cost(now time.Time) int64 {
	if a.grows {
		return min(a.size, int64(now.Sub(a.since).Seconds()*(1<<20)))
	}
	return a.size
}

// give drops a body to make room for others, and ends its request.
func (b *bodies) give(a *arrival) {
	b.remove(a)
	b.set(&a.x.held, 0)
	go a.x.makeRoom() // it may wait for its client
}

// shrink takes away bytes that grow added, unless the body was dropped.
func (b *bodies) shrink(held *int64, less int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.set(held, max(0, *held-less))
}

// arrive enters a body of which a part has arrived, unless it was dropped.
func (b *bodies) arrive(a *arrival) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if a.list == nil { // its headers were not sent to us
		a.since = time.Now()
	} else if a.place == nil || a.list == &b.arriving {
		return
	}
	b.remove(a)
	a.list, a.place = &b.arriving, b.arriving.PushBack(a)
}

// whole removes a body that arrived, or whose stream has ended. It reports whether the body was not dropped.
func (b *bodies) whole(a *arrival) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	kept := a.place != nil
	b.remove(a)
	return kept
}

func (b *bodies) remove(a *arrival) {
	if a.place != nil {
		if a.list == &b.announced {
			b.promised -= a.size
		}
		a.list.Remove(a.place)
		a.place = nil
	}
}

// replace sets *held without limits, for memory that is already allocated.
func (b *bodies) replace(held *int64, n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.set(held, n)
}

// set records the change. The caller holds the lock.
func (b *bodies) set(held *int64, n int64) {
	switch {
	case *held == 0 && n > 0:
		b.count++
	case *held > 0 && n == 0:
		b.count--
	}
	b.bytes += n - *held
	*held = n
}

// SetBodies replaces Options.MaxBodies and MaxBodyBytes. Bodies that are held stay.
func (s *Server) SetBodies(count int, bytes int64) {
	s.bodies.mu.Lock()
	defer s.bodies.mu.Unlock()
	s.bodies.maxCount, s.bodies.maxBytes = count, bytes
}

// InFlight returns the number of request bodies held and an upper bound of their memory in bytes.
func (s *Server) InFlight() (count int, bytes int64) {
	s.bodies.mu.Lock()
	defer s.bodies.mu.Unlock()
	return s.bodies.count, s.bodies.bytes
}
