package extproc

import (
	"math/bits"
	"sync"

	"google.golang.org/grpc/mem"
)

// Buffers come in four sizes between powers of two, so that at most a fifth of a buffer is
// unused. These are the smallest and the largest.
const (
	minPooledBits = 10
	maxPooledBits = 26
	numClasses    = 4*(maxPooledBits-minPooledBits) + 1
)

// pool provides the buffers in which bodies arrive and are joined. Unlike gRPC's own
// mem.BufferPool it does not clear reused buffers: the caller must write all of a buffer before
// it is read. Unused buffers are released by the garbage collector (sync.Pool).
type pool struct {
	classes [numClasses]sync.Pool // of *[]byte
}

// buffers is shared by all servers of the process.
var buffers = &pool{}

// class returns the smallest class whose buffers hold n bytes, and their size; ok is false above the largest size.
func class(n int) (index, size int, ok bool) {
	n = max(n, 1<<minPooledBits)
	k := bits.Len(uint(n-1)) - 1 // 1<<k < n <= 2<<k
	step := 1 << (k - 2)
	steps := (n - 1<<k + step - 1) / step
	index = 4*(k-minPooledBits) + steps
	return index, 1<<k + steps*step, index < numClasses
}

// Get implements mem.BufferPool. The n bytes hold arbitrary old content.
func (p *pool) Get(n int) *[]byte {
	index, size, ok := class(n)
	if !ok {
		b := make([]byte, n)
		return &b
	}
	b, _ := p.classes[index].Get().(*[]byte)
	if b == nil {
		fresh := make([]byte, size)
		b = &fresh
	}
	*b = (*b)[:n]
	return b
}

// Put implements mem.BufferPool.
func (p *pool) Put(b *[]byte) {
	if index, size, ok := class(cap(*b)); ok && size == cap(*b) {
		p.classes[index].Put(b)
	}
}

// join makes body, which has n bytes, one piece. Several pieces are copied and released immediately, because otherwise
// the body is in memory twice.
func join(body mem.BufferSlice, n int) mem.BufferSlice {
	if len(body) < 2 {
		return body
	}
	b := buffers.Get(n)
	body.CopyTo(*b)
	body.Free()
	clear(body)
	body[0] = mem.NewBuffer(b, buffers)
	return body[:1]
}

// whole returns the bytes of a body that join has made one piece, nil if it is empty.
func whole(body mem.BufferSlice) []byte {
	if len(body) == 0 || body[0].Len() == 0 {
		return nil
	}
	return body[0].ReadOnlyData()
}
