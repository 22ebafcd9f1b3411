package freelist

import (
	"testing"
	"unsafe"

	"pgregory.net/rapid"
)

func TestTakeGivesWhatFitsBest(t *testing.T) {
	l := List[byte]{Limit: 1000}
	for _, n := range []int{100, 130, 120, 400} {
		l.Give(make([]byte, n/2, n))
	}
	for _, c := range []struct{ n, want int }{
		{110, 120}, // not 130
		{110, 130},
		{110, 0}, // 400 is too long, 100 too short
		{267, 400},
		{100, 100},
		{100, 0},
	} {
		if s := l.Take(c.n); len(s) != 0 || cap(s) != c.want {
			t.Errorf("for %d elements: length %d, room %d, want %d", c.n, len(s), cap(s), c.want)
		}
	}
}

func TestGiveForgetsTheOldest(t *testing.T) {
	l := List[byte]{Limit: 1000}
	l.Give(nil)
	l.Give(make([]byte, 501)) // more than half of the limit
	for n := 400; n < 404; n++ {
		l.Give(make([]byte, n))
	}
	if len(l.kept) != 2 || cap(l.kept[0]) != 402 || l.sum != 805 {
		t.Errorf("%d slices, %d elements", len(l.kept), l.sum)
	}
	for range 3 * most {
		l.Give(make([]byte, 1))
	}
	if len(l.kept) != most || l.sum != most {
		t.Errorf("%d slices, %d elements", len(l.kept), l.sum)
	}
}

// A slice has only one owner at a time, and the list stays within its limit.
func TestOneUserEach(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := List[uint32]{Limit: rapid.IntRange(0, 400).Draw(t, "limit")}
		var used [][]uint32
		for i := range uint32(rapid.IntRange(0, 60).Draw(t, "steps")) {
			if len(used) > 0 && rapid.Bool().Draw(t, "give") {
				at := rapid.IntRange(0, len(used)-1).Draw(t, "which")
				l.Give(used[at])
				used = append(used[:at], used[at+1:]...)
			} else {
				n := rapid.IntRange(1, 100).Draw(t, "n")
				s := l.Take(n)
				if s == nil {
					s = make([]uint32, 0, n)
				}
				if len(s) != 0 || cap(s) < n || cap(s) > n+n/waste {
					t.Fatalf("for %d: length %d, room %d", n, len(s), cap(s))
				}
				for _, u := range used {
					if unsafe.SliceData(u) == unsafe.SliceData(s) {
						t.Fatalf("step %d: a slice in use was lent again", i)
					}
				}
				used = append(used, s)
			}
			sum := 0
			for _, s := range l.kept {
				sum += cap(s)
			}
			if sum != l.sum || sum > l.Limit {
				t.Fatalf("%d elements kept, %d counted, %d allowed", sum, l.sum, l.Limit)
			}
		}
	})
}
