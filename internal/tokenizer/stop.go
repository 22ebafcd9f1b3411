package tokenizer

import "errors"

// ErrStopped is the error of an encoding that nobody wanted to its end.
var ErrStopped = errors.New("tokenizing was stopped")

// lookEvery is the bytes of text between two looks at whether the ids are still
// wanted, and mergesEvery the merges of one long word: each takes about a millisecond.
const (
	lookEvery   = 64 << 10
	mergesEvery = 16 << 10
)

// watch tells a worker whether the ids are still wanted.
//
// Invariant: left is negative once stopped is set.
type watch struct {
	stop    <-chan struct{} // nil: they always are
	left    int             // work until the next look
	stopped bool
}

// over pays for n bytes of text that come next, and says whether nobody wants them.
func (w *watch) over(n int) bool {
	w.left -= n
	return w.left < 0 && w.look()
}

func (w *watch) look() bool {
	if w.stopped {
		return true
	}
	select {
	case <-w.stop:
		w.stopped = true
		return true
	default:
		w.left = lookEvery
		return false
	}
}

// hugeLock is held while a huge word is merged.
type hugeLock chan struct{}

// take waits for the lock; false if the ids are not wanted any more.
func (l hugeLock) take(stop <-chan struct{}) bool {
	select {
	case l <- struct{}{}:
		return true
	case <-stop:
		return false
	}
}

func (l hugeLock) give() { <-l }
