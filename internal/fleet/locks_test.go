package fleet

import (
	"testing"
	"time"

	"github.com/kvlane/kvlane/kvindex"
)

// A panic in the index leaves no lock held: events and copies continue.
func TestAPanicLeavesNothingLocked(t *testing.T) {
	f := newFleet(t, "", worker("a", 0))
	index := f.index
	f.index = nil
	for name, call := range map[string]func(){
		"speculate": func() { f.Speculate(0, []kvindex.Hash{1}, 17, time.Now()) },
		"expire":    func() { f.Expire(time.Now()) },
		"drop":      func() { f.dropSlot(0) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: got no panic, want one", name)
				}
			}()
			call()
		}()
		if !f.feeds.snapshot.TryLock() {
			t.Fatalf("%s: the snapshot lock is held", name)
		}
		f.feeds.snapshot.Unlock()
	}
	f.index = index
}
