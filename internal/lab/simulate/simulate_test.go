// Package simulate holds no code: its tests run the parts of Kvlane that decide under a seeded scheduler, with failures
// and a clock of their own, and compare them after each step with naive models and with the laws of
// docs/architecture.md. `make simulate` runs many seeds; SEED=n replays one.
package simulate

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// operation is one step of a history. What it does follows from its seed and the state that it meets, so that a history
// is still valid when operations before it are dropped.
type operation struct {
	kind string
	seed uint64
}

// history is what one seed stands for: the scenario, and the operations in it.
type history struct {
	seed       uint64
	operations []operation
}

// kind is a kind of operation, with how often it is drawn.
type kind[W any] struct {
	name   string
	weight int
	run    func(w W)
}

// failure is a law that did not hold.
type failure struct {
	law, text string
	step      int
}

// failf ends a run: a law does not hold.
func failf(law, format string, args ...any) {
	panic(failure{law: law, text: fmt.Sprintf(format, args...)})
}

// rngOf returns the random numbers of one purpose.
func rngOf(seed, purpose uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, purpose)) }

func draw[W any](seed uint64, length int, kinds []kind[W]) history {
	rng, total := rngOf(seed, 1), 0
	for _, k := range kinds {
		total += k.weight
	}
	h := history{seed: seed}
	for range length/2 + rng.IntN(length) {
		at := rng.IntN(total)
		i := 0
		for ; at >= kinds[i].weight; i++ {
			at -= kinds[i].weight
		}
		h.operations = append(h.operations, operation{kinds[i].name, rng.Uint64()})
	}
	return h
}

// play is one run of a history: it returns the failure, nil if all laws held, and what happened.
type play func(h history, trace *strings.Builder, reached map[string]int) *failure

// guard runs f and returns the failure that it ended with; a panic of the product is one too.
func guard(f func()) (bad *failure) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case failure:
			bad = &r
		default:
			bad = &failure{law: "no panic", text: fmt.Sprintf("%v\n%s", r, debug.Stack())}
		}
	}()
	f()
	return nil
}

// shrink drops operations as long as the same law fails, at most budget times.
func shrink(h history, law string, run play, budget int) history {
	for size := len(h.operations) / 2; size > 0 && budget > 0; {
		dropped := false
		for from := 0; from < len(h.operations) && budget > 0; {
			less := history{h.seed, slices.Delete(slices.Clone(h.operations), from, min(from+size, len(h.operations)))}
			budget--
			if bad := run(less, nil, map[string]int{}); bad != nil && bad.law == law {
				h, dropped = less, true
			} else {
				from += size
			}
		}
		if !dropped || size > len(h.operations) {
			size /= 2
		}
	}
	return h
}

// number reads a number from the environment.
func number(name string, otherwise uint64) uint64 {
	if n, err := strconv.ParseUint(os.Getenv(name), 10, 64); err == nil {
		return n
	}
	return otherwise
}

// simulate runs seeds, or the one that SEED names. A seed that fails is shrunk and printed. What want lists must
// have happened at least once in many seeds, or the simulation tests less than it says.
func simulate(t *testing.T, seeds uint64, make func(seed uint64) history, run play, want []string) {
	reached, first := map[string]int{}, uint64(1)
	if one := number("SEED", 0); one != 0 {
		first, seeds, want = one, 1, nil
	} else if seeds < 500 {
		want = nil
	}
	for seed := first; seed < first+seeds; seed++ {
		if seed%5000 == 0 {
			t.Logf("%d seeds", seed)
		}
		h := make(seed)
		bad := run(h, nil, reached)
		if bad == nil {
			continue
		}
		h = shrink(h, bad.law, run, int(number("SHRINK", 3000)))
		var trace strings.Builder
		if last := run(h, &trace, reached); last != nil {
			bad = last
		}
		t.Fatalf("seed %d breaks the law %q: %s\nThe shortest history found (%d operations):\n%sReplay it: go test ./internal/lab/simulate -run '^%s$' with SEED=%d in the environment",
			seed, bad.law, bad.text, len(h.operations), trace.String(), t.Name(), seed)
	}
	for _, name := range slices.Sorted(maps.Keys(reached)) {
		t.Logf("%9d %s", reached[name], name)
	}
	for _, name := range want {
		if reached[name] == 0 {
			t.Errorf("got no %q in %d seeds, want some: the simulation does not reach it", name, seeds)
		}
	}
}
