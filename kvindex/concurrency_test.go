package kvindex

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
)

// A lookup during writes must see one of the states between its start and end: one writer steps
// through states known beforehand, readers compare.
func TestLookupsSeeOneState(t *testing.T) {
	const targets, depth, states = 3, 40, 3000
	x, err := New(Config{BlockSize: 4})
	if err != nil {
		t.Fatal(err)
	}
	tokens := make([]uint32, 4*depth)
	for i := range tokens {
		tokens[i] = uint32(i)
	}
	names := engineHashes(1, "m", "", "", tokens, nil, 4)
	for i := range targets {
		if _, err := x.Add(Target{Worker: "w", Rank: int32(i)}, "m", 4); err != nil {
			t.Fatal(err)
		}
	}
	// in each step one target grows or shrinks to another length
	type step struct {
		slot  Slot
		event Event
	}
	rng := rand.New(rand.NewPCG(1, 2))
	lengths := make([][targets]uint32, states+1)
	steps := make([]step, states)
	for i := range steps {
		s := rng.IntN(targets)
		was, n := lengths[i][s], uint32(rng.IntN(depth+1))
		lengths[i+1] = lengths[i]
		lengths[i+1][s] = n
		e := Event{Kind: Removed, BlockSize: 4}
		if n > was {
			e = Event{Kind: Stored, BlockSize: 4, Hashes: names[was:n], Tokens: tokens[was*4 : n*4]}
			if was > 0 {
				e.Parent, e.HasParent = names[was-1], true
			}
		} else {
			for k := int(was) - 1; k >= int(n); k-- {
				e.Hashes = append(e.Hashes, names[k])
			}
		}
		steps[i] = step{Slot(s), e}
	}
	var begun, done atomic.Int64
	var wg sync.WaitGroup
	stop := make(chan struct{})
	errs := make(chan error, 4)
	looks := atomic.Int64{}
	for range 3 {
		wg.Go(func() {
			var m Matches
			hashes := x.Hasher().AppendHashes(nil, x.Hasher().Seed("m", "", ""), tokens, 4)
			for {
				select {
				case <-stop:
					return
				default:
				}
				from := done.Load()
				x.Match(hashes, &m)
				to := begun.Load()
				looks.Add(1)
				var got [targets]uint32
				for _, h := range m.Holders {
					got[h.Slot] = h.Blocks[Device]
				}
				ok := false
				for v := from; v <= to && !ok; v++ {
					ok = lengths[v] == got
				}
				if !ok {
					errs <- fmt.Errorf("got %v, want one of the states %d to %d", got, from, to)
					return
				}
			}
		})
	}
	for looks.Load() == 0 {
		runtime.Gosched()
	}
	for i := range steps {
		begun.Store(int64(i + 1))
		if err := x.Apply(steps[i].slot, &steps[i].event); err != nil {
			t.Fatal(err)
		}
		done.Store(int64(i + 1))
	}
	close(stop)
	wg.Wait()
	select {
	case err := <-errs:
		t.Fatal(err)
	default:
	}
}

// Writers of several slots, lookups, dumps, credit and churn run concurrently, for the race
// detector; at the end all parts must agree.
func TestConcurrentReadersAndWriters(t *testing.T) {
	x, err := New(Config{BlockSize: 4, MaxBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), 7))
			var m Matches
			for round := range 20 {
				target := Target{Worker: "w", Rank: int32(i)}
				s, err := x.Add(target, "m", 4)
				if err != nil {
					t.Error(err)
					return
				}
				for range 30 {
					tokens := make([]uint32, 4*(1+rng.IntN(300)))
					for k := range tokens {
						tokens[k] = uint32(rng.IntN(2) * k / 200)
					}
					names := engineHashes(1, "m", "", "", tokens, nil, 4)
					hashes := x.Hasher().AppendHashes(nil, x.Hasher().Seed("m", "", ""), tokens, 4)
					credit := x.Speculate(s, hashes, testTime(round))
					if err := x.Apply(s, &Event{Kind: Stored, BlockSize: 4, Hashes: names, Tokens: tokens}); err != nil {
						t.Error(err)
						return
					}
					x.Match(hashes, &m)
					if err := x.Apply(s, &Event{Kind: Removed, Hashes: names[len(names)/2:]}); err != nil {
						t.Error(err)
						return
					}
					x.Withdraw(credit)
				}
				x.Stats()
				if round%3 == 0 {
					x.Drop(s)
				}
			}
		})
	}
	wg.Wait()
	checkInvariants(t, x)
}

// A decision waits for no other writer: its credit, and the withdrawal of credit, is applied by
// that writer, in the order of the calls.
func TestDecisionsDoNotWaitForWriters(t *testing.T) {
	x := mustIndex(t, Config{BlockSize: 16, MaxSpeculative: 100})
	s := mustAdd(t, x, 0, 16)
	prompt := func(chain uint64, n int) []Hash {
		c, _ := contents(chain, n)
		return x.Hasher().AppendContents(nil, x.Hasher().Seed("m", "", ""), c)
	}
	credited := func(hashes []Hash) int {
		var m Matches
		if x.Match(hashes, &m); len(m.Holders) == 0 {
			return 0
		}
		return int(m.Holders[0].Speculative)
	}
	kept, refused, early := prompt(1, 30), prompt(2, 20), prompt(3, 10)
	before := x.Speculate(s, early, testTime(1))

	x.lock() // by another writer
	hashes := slices.Clone(kept)
	x.Speculate(s, hashes, testTime(2))
	clear(hashes) // the caller's to reuse
	x.Withdraw(x.Speculate(s, refused, testTime(2)))
	x.Withdraw(before)
	x.Expire(testTime(3))
	tooMany := x.Speculate(s, prompt(4, 60), testTime(2)) // 30 + 20 + 60 blocks are more than 100
	if n := credited(kept); n != 0 {
		t.Errorf("while another writer works: got %d blocks of credit, want 0", n)
	}
	x.unlock()

	if a, b, c := credited(kept), credited(refused), credited(early); a != 30 || b != 0 || c != 0 {
		t.Errorf("after the other writer: got %d, %d and %d blocks of credit for the kept, the refused and the earlier prompt, want 30, 0 and 0", a, b, c)
	}
	if n := x.Stats().Speculative; n != 30 || tooMany != (Credit{}) || x.handedBlocks.Load() != 0 {
		t.Errorf("got %d blocks of credit, %+v for the prompt beyond the limit, %d blocks waiting; want 30, none, 0", n, tooMany, x.handedBlocks.Load())
	}
	checkInvariants(t, x)
}

// No credit is left behind in the queue when the writer that it is left to unlocks meanwhile.
func TestEveryCreditIsApplied(t *testing.T) {
	x := mustIndex(t, Config{BlockSize: 16})
	s := mustAdd(t, x, 0, 16)
	const callers, each = 4, 2000
	var wg sync.WaitGroup
	for caller := range uint64(callers) {
		wg.Go(func() {
			for i := range uint64(each) {
				c, _ := contents(caller<<16|i, 1)
				x.Speculate(s, x.Hasher().AppendContents(nil, x.Hasher().Seed("m", "", ""), c), testTime(1))
			}
		})
	}
	wg.Wait()
	if x.handed.Load() != nil {
		t.Error("got changes that nobody applies, want none")
	}
	if n := x.Stats().Speculative; n != callers*each {
		t.Errorf("got %d blocks of credit, want %d", n, callers*each)
	}
}

// A change that was handed over and panics panics in the writer that applies it. That writer leaves
// the index unlocked, and the changes of others are applied.
func TestPanicOfAHandedOverChange(t *testing.T) {
	for name, write := range map[string]func(x *Index, s Slot, handOver func()){
		"a writer that begins": func(x *Index, _ Slot, handOver func()) {
			func() {
				x.gate.writers.Lock()
				defer x.gate.writers.Unlock()
				handOver()
			}()
			x.Stats()
		},
		"a writer that does not wait": func(x *Index, _ Slot, handOver func()) {
			func() {
				x.gate.writers.Lock()
				defer x.gate.writers.Unlock()
				handOver()
			}()
			x.Withdraw(Credit{first: 1, end: 2})
		},
		"a writer that ends": func(x *Index, _ Slot, handOver func()) {
			x.lock()
			defer x.unlock()
			handOver()
		},
		"between the steps of a drop": func(x *Index, s Slot, handOver func()) {
			func() {
				x.gate.writers.Lock()
				defer x.gate.writers.Unlock()
				x.handOver(&change{apply: handOver}) // at the beginning of the drop
			}()
			x.Drop(s)
		},
	} {
		t.Run(name, func(t *testing.T) {
			x := mustIndex(t, Config{BlockSize: 16})
			s, other := mustAdd(t, x, 0, 16), mustAdd(t, x, 1, 16)
			storeSegments(t, x, s, writeStep+1)
			hashes := make([][]Hash, 3)
			for i := range hashes {
				c, _ := contents(uint64(1<<32+i), 1)
				hashes[i] = x.Hasher().AppendContents(nil, x.Hasher().Seed("m", "", ""), c)
			}
			origin := testTime(1)
			panicked := func() (v any) {
				defer func() { v = recover() }()
				write(x, s, func() {
					x.Speculate(other, hashes[0], origin)
					var ring []claim
					x.handOver(&change{apply: func() { ring, x.claims.ring = x.claims.ring, nil }})
					x.Speculate(other, hashes[1], origin) // fails at the claims that are not there
					x.handOver(&change{apply: func() { x.claims.ring = ring }})
					x.Speculate(other, hashes[2], origin)
				})
				return nil
			}()
			if panicked == nil {
				t.Error("got no panic in the writer, want one")
			}
			if !x.gate.writers.TryLock() {
				t.Fatal("got a locked index after the panic, want it unlocked")
			}
			x.gate.writers.Unlock()
			if n := x.Stats().Speculative; n != 2 || x.handedBlocks.Load() != 0 {
				t.Errorf("got %d blocks of credit, %d blocks waiting; want 2 of the other prompts, 0", n, x.handedBlocks.Load())
			}
			checkInvariants(t, x)
		})
	}
}

// storeSegments stores n blocks in a slot, each in a segment of its own.
func storeSegments(t *testing.T, x *Index, s Slot, n int) {
	t.Helper()
	for i := range n {
		tokens := make([]uint32, 16)
		tokens[0] = uint32(i)
		if err := x.Apply(s, &Event{Kind: Stored, BlockSize: 16, Hashes: engineHashes(1, "m", "", "", tokens, nil, 16), Tokens: tokens}); err != nil {
			t.Fatal(err)
		}
	}
}

// While a drop lets other writers run, a second one frees the slot no second time, and adding the
// target again returns a slot that the first drop does not clear.
func TestWritersDuringADrop(t *testing.T) {
	for name, meanwhile := range map[string]func(x *Index, s Slot) []Slot{
		"a drop": func(x *Index, s Slot) []Slot { x.Drop(s); return nil },
		"an add": func(x *Index, _ Slot) []Slot { return []Slot{mustAdd(t, x, 0, 16)} },
		"both":   func(x *Index, s Slot) []Slot { x.Drop(s); return []Slot{mustAdd(t, x, 0, 16), mustAdd(t, x, 1, 16)} },
	} {
		t.Run(name, func(t *testing.T) {
			x := mustIndex(t, Config{BlockSize: 16})
			s := mustAdd(t, x, 0, 16)
			storeSegments(t, x, s, 2*writeStep+1)
			var added []Slot
			ran := false
			between := &change{apply: func() {
				x.gate.writers.Unlock()
				defer x.gate.writers.Lock()
				ran = true
				if added = meanwhile(x, s); len(added) > 0 {
					storeSegments(t, x, added[0], 2*writeStep+1)
				}
			}}
			x.gate.writers.Lock()
			x.handOver(&change{apply: func() { x.handOver(between) }}) // runs after the first step
			x.gate.writers.Unlock()
			x.Drop(s)
			stats := x.Stats()
			if !ran || len(stats.Targets) != len(added) {
				t.Fatalf("ran %v: got targets %+v, want those of %d adds", ran, stats.Targets, len(added))
			}
			if len(added) > 0 && stats.HolderBlocks != 2*writeStep+1 {
				t.Errorf("got %d blocks of the new target, want %d", stats.HolderBlocks, 2*writeStep+1)
			}
			slots := append(slices.Clone(added), x.freeSlots...)
			slices.Sort(slots)
			if len(slots) != len(x.slots) || len(slices.Compact(slots)) != len(x.slots) {
				t.Errorf("got slots %v in use and %v free, want each of %d once", added, x.freeSlots, len(x.slots))
			}
			checkInvariants(t, x)
		})
	}
}

// Several callers drop and add the same targets.
func TestConcurrentDropsAndAdds(t *testing.T) {
	x := mustIndex(t, Config{BlockSize: 16})
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			for range 4 {
				s, err := x.Add(Target{Worker: "w", Rank: 0}, "m", 16)
				if err != nil {
					t.Error(err)
					return
				}
				for i := range writeStep + 10 {
					tokens := make([]uint32, 16)
					tokens[0] = uint32(i)
					// another caller may have dropped the slot
					_ = x.Apply(s, &Event{Kind: Stored, BlockSize: 16, Hashes: engineHashes(1, "m", "", "", tokens, nil, 16), Tokens: tokens})
				}
				x.Drop(s)
			}
		})
	}
	wg.Wait()
	if n := x.Stats().HolderBlocks; n != 0 || len(x.byTarget) != 0 || len(x.freeSlots) != len(x.slots) {
		t.Errorf("got %d blocks, %d targets, free slots %v of %d; want none, none, all", n, len(x.byTarget), x.freeSlots, len(x.slots))
	}
	checkInvariants(t, x)
}
