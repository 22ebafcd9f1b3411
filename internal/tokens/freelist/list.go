// Package freelist keeps slices that a cache dropped for what it takes in next. Caches that
// are full drop as much as they take in: without it each entry would be fresh memory, to
// be cleared, and garbage soon after.
package freelist

const (
	// most is the number of slices that a list keeps.
	most = 32
	// waste is how much longer than asked for a slice may be, as a part of what is asked for.
	waste = 2
)

// List is a free list of slices that no reader references. The zero value keeps none. It is not
// safe for concurrent use.
type List[T any] struct {
	// Limit is the number of elements, used or not, in all slices that are kept.
	Limit int

	kept [][]T // the oldest first
	sum  int   // of their capacities
}

// Take returns an empty slice with room for n elements and at most n/2 more, nil if none
// was given.
func (l *List[T]) Take(n int) []T {
	best := -1
	for i, s := range l.kept {
		if cap(s) >= n && cap(s) <= n+n/waste && (best < 0 || cap(s) < cap(l.kept[best])) {
			best = i
		}
	}
	if best < 0 {
		return nil
	}
	s := l.kept[best]
	l.remove(best)
	return s[:0]
}

// Give leaves s to the list, which forgets the slices that it has had for longest to stay
// within its limit.
func (l *List[T]) Give(s []T) {
	if cap(s) == 0 || cap(s) > l.Limit/2 {
		return
	}
	l.kept = append(l.kept, s)
	l.sum += cap(s)
	for l.sum > l.Limit || len(l.kept) > most {
		l.remove(0)
	}
}

func (l *List[T]) remove(i int) {
	l.sum -= cap(l.kept[i])
	copy(l.kept[i:], l.kept[i+1:])
	l.kept[len(l.kept)-1] = nil
	l.kept = l.kept[:len(l.kept)-1]
}
