package fleet

import (
	"fmt"
	"runtime/debug"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvlane/kvlane/internal/workers"
)

// flapping returns a change of one of n workers.
func flapping(t testing.TB, n int) func() {
	t.Helper()
	list := make([]workers.Worker, n)
	for i := range list {
		list[i] = worker(fmt.Sprintf("w-%05d:8000", i), 0)
		list[i].Models = nil // so that no engine is asked for them
		list[i].Address = fmt.Sprintf("10.%d.%d.%d:8000", i>>16, i>>8&255, i&255)
	}
	f := newFleet(t, "workers: {health: {every: 0s}}\n", list...)
	next := 0
	return func() {
		w := &list[next%n]
		next++
		w.Ready = !w.Ready
		f.SetWorkers(list)
	}
}

// A change of one worker of four times as many costs less than nine times as much: a quadratic step cost thirteen times.
func TestTheCostOfAChangeIsLinear(t *testing.T) {
	cost := func(change func()) time.Duration {
		var begin, end unix.Timespec
		_ = unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &begin)
		for range 4 {
			change()
		}
		_ = unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &end)
		return time.Duration(end.Nano() - begin.Nano())
	}
	few, many := flapping(t, 2000), flapping(t, 8000) // neither fits into the caches of a processor
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	small, large := cost(few), cost(many)
	for round := 0; round < 3 || large > 9*small && round < 12; round++ { // what is more is noise
		small, large = min(small, cost(few)), min(large, cost(many))
	}
	t.Logf("%v for 2,000 workers, %v for 8,000", small, large)
	if large > 9*small {
		t.Errorf("got %v for 2,000 workers and %v for 8,000, want less than 9 times as much", small, large)
	}
}

// BenchmarkFlapping is one worker of 5,000 that becomes ready or not.
func BenchmarkFlapping(b *testing.B) {
	change := flapping(b, 5000)
	b.ReportAllocs()
	for b.Loop() {
		change()
	}
}
