// Package freelist recycles slices that a cache evicted. A full cache evicts as much as it adds; without recycling,
// each new entry would allocate and clear fresh memory that soon becomes garbage.
package freelist

const (
	// most is the maximum number of slices that a list keeps.
	most = 32
	// waste is the divisor of the excess: Take(n) returns a slice with a capacity of at most n + n/waste.
	waste = 2
)

// List is a free list of slices that no reader references. The zero value keeps none. It is not safe for concurrent use.
type List[T any] struct {
	// Limit is the maximum total capacity, in elements, of the slices that are kept.
	Limit int

	kept [][]T // oldest first
	sum  int   // total capacity
}

// Take returns an empty slice with a capacity of at least n and at most n + n/2 elements, or nil
// if the list has none. The caller owns it.
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

// Give transfers ownership of s to the list: no one may read or write it any more. To stay within
// its limit the list drops the slices that it has held longest.
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
