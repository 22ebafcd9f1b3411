package disagg

import (
	"errors"
	"io"
	"sync/atomic"
)

// Room bounds the memory of the answers of all prefill legs. It is safe for concurrent use.
type Room struct{ most, held atomic.Int64 }

// SetMost sets the bound in bytes, 0 for none. Answers that are held stay.
func (r *Room) SetMost(bytes int64) { r.most.Store(bytes) }

// Held returns the bytes of all answers that are held.
func (r *Room) Held() int64 { return r.held.Load() }

var errNoRoom = errors.New("no room for answers of prefill legs")

// perByte is the memory of a byte that was read: io.ReadAll joins the pieces at the end.
const perByte = 2

// charge is what one request's answers take of a Room. It must not be copied.
type charge struct {
	room  *Room
	bytes int64
}

// of returns a reader of src that takes what it reads into account. It fails with errNoRoom
// above the bound, except while no other answer is held.
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
	more := perByte * int64(n)
	a.bytes += more
	if all, most := a.room.held.Add(more), a.room.most.Load(); most > 0 && all > most && all > a.bytes {
		return n, errNoRoom
	}
	return n, err
}
