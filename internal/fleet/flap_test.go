package fleet

import (
	"fmt"
	"runtime/debug"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
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

// cost is the processor time of the process for n calls.
func cost(n int, call func()) time.Duration {
	var begin, end unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &begin)
	for range n {
		call()
	}
	_ = unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &end)
	return time.Duration(end.Nano() - begin.Nano())
}

// A change of one worker of four times as many costs less than nine times as much: a quadratic step cost thirteen times.
func TestTheCostOfAChangeIsLinear(t *testing.T) {
	few, many := flapping(t, 2000), flapping(t, 8000) // neither fits into the caches of a processor
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	small, large := cost(4, few), cost(4, many)
	for round := 0; round < 3 || large > 9*small && round < 12; round++ { // what is more is noise
		small, large = min(small, cost(4, few)), min(large, cost(4, many))
	}
	t.Logf("%v for 2,000 workers, %v for 8,000", small, large)
	if large > 9*small {
		t.Errorf("got %v for 2,000 workers and %v for 8,000, want less than 9 times as much", small, large)
	}
}

// Workers that leave together cost less than nine times as much as a quarter of them: it was sixteen times and more, since
// the series of each were looked for among all. For 5,000 of them the fleet stood still for 24 s on a busy machine.
func TestTheCostOfLeavingIsLinear(t *testing.T) {
	leaving := func(n int) time.Duration {
		list := []workers.Worker{worker("stays", 0)}
		for i := range n {
			w := worker(fmt.Sprintf("w-%05d:8000", i), 0)
			w.Models = nil // so that no engine is asked for them
			list = append(list, w)
		}
		f := newFleet(t, "workers: {health: {every: 0s}}\n", list...)
		took := cost(1, func() { f.SetWorkers(list[:1]) })
		if left := observe.Sums(f.Metrics.Picks, "worker"); len(left) != 1 {
			t.Errorf("got series of %d workers, want those of the one that stays", len(left))
		}
		return took
	}
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	small, large := leaving(1000), leaving(4000)
	for round := 0; round < 2 || large > 9*small && round < 8; round++ { // what is more is noise
		small, large = min(small, leaving(1000)), min(large, leaving(4000))
	}
	t.Logf("%v for 1,000 workers, %v for 4,000", small, large)
	if large > 9*small {
		t.Errorf("got %v for 1,000 workers and %v for 4,000, want less than 9 times as much", small, large)
	}
}

// Thousands of new workers do not hold the router's lock, for which decisions wait, until all are added.
func TestTheRouterIsToldOfAFewWorkersAtATime(t *testing.T) {
	f := newFleet(t, "workers: {health: {every: 0s}}\n")
	update, most, all := f.Update, 0, 0
	f.Update = func(at time.Time, change func(*routing.Router, time.Duration)) {
		update(at, func(r *routing.Router, now time.Duration) {
			change(r, now)
			before := all
			all = 0
			r.Targets(func(kvindex.Slot, *routing.TargetInfo, routing.Load) bool { all++; return true })
			most = max(most, all-before)
		})
	}
	list := make([]workers.Worker, 1000)
	for i := range list {
		list[i] = worker(fmt.Sprintf("w-%05d:8000", i), 0)
		list[i].Models = nil
	}
	f.SetWorkers(list)
	if all != len(list) || most > 64 {
		t.Errorf("got %d targets, up to %d at a time, want %d, and 64 at most", all, most, len(list))
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
