package extproc

import (
	"sync"

	"google.golang.org/grpc/mem"
)

// pieceOverhead is what a piece of a body takes beside its bytes: its reference, the
// reference-counted buffer and the buffer's slice.
const pieceOverhead = 128

// heldBytes is an upper bound of the memory of body: buffers are up to a quarter larger
// than what is in them, see pool.
func heldBytes(body mem.BufferSlice) (n int64) {
	for _, b := range body {
		size := int64(b.Len())
		n += size + size/4 + pieceOverhead
	}
	return n
}

// bodies bounds the request bodies that are held by all streams of a server. Safe for
// concurrent use.
type bodies struct {
	maxBytes int64 // 0: no bound
	maxCount int   // 0: no bound

	mu    sync.Mutex
	bytes int64
	count int
}

// grow changes what one stream holds from *held bytes to n, 0 being no body, and
// reports whether all streams together are within their bounds; if not, nothing changes.
// A body that is alone is always taken.
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

// replace is grow without bounds, for memory that was taken already.
func (b *bodies) replace(held *int64, n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.set(held, n)
}

// set is called with the lock held.
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

// InFlight is how many request bodies are held and the bytes of memory they take, an
// upper bound.
func (s *Server) InFlight() (count int, bytes int64) {
	s.bodies.mu.Lock()
	defer s.bodies.mu.Unlock()
	return s.bodies.count, s.bodies.bytes
}

// tooMany answers a request whose body has no room beside the others.
func tooMany() *Reject {
	return &Reject{
		Status:  503,
		Headers: []Header{{Name: "retry-after", Value: "1"}},
		Body:    []byte(`{"error":{"message":"too many requests are being received; try again in 1 s","type":"service_unavailable_error","param":null,"code":"too_many_bodies"}}`),
		Details: "kvlane_too_many_bodies",
	}
}
