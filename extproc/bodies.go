package extproc

import (
	"sync"

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

// bodies limits the number and the memory of the request bodies held by all streams of a server.
// It is safe for concurrent use.
type bodies struct {
	mu       sync.Mutex
	maxBytes int64 // 0: no bound
	maxCount int   // 0: no bound
	bytes    int64
	count    int
}

// grow changes the memory of one stream's body from *held to n bytes, 0 meaning no body. It reports whether the total
// of all streams is within the limits; if not, nothing changes. A body is always accepted while no other one is held.
func (b *bodies) grow(held *int64, n int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	more, first := n-*held, *held == 0 && n > 0
	if more > 0 && b.bytes > *held && b.maxBytes > 0 && b.bytes+more > b.maxBytes {
		return false
	}
	if first && b.maxCount > 0 && b.count >= b.maxCount {
		return false
	}
	b.set(held, n)
	return true
}

// replace is grow without limits, for memory that is already allocated.
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
