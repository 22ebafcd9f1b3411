package workers

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// A fleet that changes all the time is announced for a tenth of the time, and at least once a second; one that changes
// now and then immediately. The last change is always announced.
func TestChangesAreAnnouncedAtAPace(t *testing.T) {
	for name, c := range map[string]struct {
		took, between time.Duration
		fewest, most  int64
		late          time.Duration
	}{
		"all the time":      {50 * time.Millisecond, time.Millisecond, 18, 22, 500 * time.Millisecond},
		"very large":        {time.Second, time.Millisecond, 4, 6, 2 * time.Second},
		"small":             {10 * time.Microsecond, time.Millisecond, 10_000, 10_000, 0},
		"only now and then": {50 * time.Millisecond, time.Second, 10, 10, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				due, ended := make(chan struct{}, 1), make(chan struct{})
				var made, seen atomic.Pointer[time.Time]
				var calls atomic.Int64
				go func() {
					defer close(ended)
					Paced(ctx, due, func() {
						calls.Add(1)
						change := made.Load()
						if late := time.Since(*change); late > c.late {
							t.Errorf("announced %v after the last change, want at most %v", late, c.late)
						}
						seen.Store(change)
						time.Sleep(c.took)
					})
				}()
				for range 10 * time.Second / c.between {
					now := time.Now()
					made.Store(&now)
					select {
					case due <- struct{}{}:
					default:
					}
					synctest.Wait()
					time.Sleep(c.between)
				}
				if n := calls.Load(); n < c.fewest || n > c.most {
					t.Errorf("got %d announcements in 10 s, want %d to %d", n, c.fewest, c.most)
				}
				time.Sleep(3 * time.Second)
				if seen.Load() != made.Load() {
					t.Errorf("the change of %v was not announced, the last one is of %v", made.Load(), seen.Load())
				}
				cancel()
				<-ended
			})
		})
	}
}
