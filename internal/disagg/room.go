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

// answer is the memory of one request's answers. It must not be copied.
type answer struct {
	room  *Room
	bytes int64
}

// of returns a reader of src that takes what it reads into account. It fails with errNoRoom
// above the bound, except while no other answer is held.
func (a *answer) of(src io.Reader) io.Reader { return &accounted{src, a} }

func (a *answer) free() {
	if a.bytes > 0 {
		a.room.held.Add(-a.bytes)
		a.bytes = 0
	}
}

type accounted struct {
	src io.Reader
	*answer
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
