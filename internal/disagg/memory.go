package disagg

import (
	"errors"
	"io"
	"sync/atomic"
)

// Room bounds the memory of the answers of all prefill legs, or of their bodies. It is safe for concurrent use.
type Room struct{ most, held atomic.Int64 }

// SetMost sets the bound in bytes, 0 for none. What is held stays.
func (r *Room) SetMost(bytes int64) { r.most.Store(bytes) }

// Held returns the bytes that are held.
func (r *Room) Held() int64 { return r.held.Load() }

var errNoRoom = errors.New("no room for prefill legs")

// perByte is the memory per byte read: at the end io.ReadAll holds its pieces and the joined copy.
const perByte = 2

// charge is the memory that one request takes from a Room. It must not be copied.
type charge struct {
	room  *Room
	bytes int64
}

// take adds bytes to the charge, where they stay until free, even after an error. Above the bound it fails with
// errNoRoom, unless nothing else is held.
func (c *charge) take(bytes int64) error {
	c.bytes += bytes
	if all, most := c.room.held.Add(bytes), c.room.most.Load(); most > 0 && all > most && all > c.bytes {
		return errNoRoom
	}
	return nil
}

// of returns a reader of src that charges what it reads, and fails as take does.
func (c *charge) of(src io.Reader) io.Reader { return &accounted{src, c} }

func (c *charge) free() {
	if c.bytes > 0 {
		c.room.held.Add(-c.bytes)
		c.bytes = 0
	}
}

type accounted struct {
	src io.Reader
	*charge
}

func (a *accounted) Read(p []byte) (int, error) {
	n, err := a.src.Read(p)
	if full := a.take(perByte * int64(n)); full != nil {
		return n, full
	}
	return n, err
}
