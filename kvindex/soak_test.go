package kvindex

import (
	"flag"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"
)

var soak = flag.Duration("soak", 0, "let TestSoak run for this long, e.g. 10m")

// soakTarget is an engine whose cache is full: a new chain replaces the least recently used one,
// which is freed from its end.
type soakTarget struct {
	slot   Slot
	chains []soakChain
	held   int
}

// soakChain is a prompt, shared with other targets, and generated blocks.
type soakChain struct {
	number uint64
	names  []EngineHash
}

// Stores and evictions at capacity: conversations on eight targets, prompts that branch off
// common prefixes and are partly shared, generated blocks one by one, one removal per event, now
// and then a cleared target. The index must be as large at the end as after a tenth of the time,
// with everything it holds accounted for. Without -soak the test is short and counts rounds
// instead of time.
func TestSoak(t *testing.T) {
	const targets, capacity, short = 8, 6000, 3000
	const beginnings, common = 5, 32
	rng := rand.New(rand.NewPCG(1, 2))
	x := mustIndex(t, Config{BlockSize: 16})
	engines := make([]*soakTarget, targets)
	for i := range engines {
		engines[i] = &soakTarget{slot: mustAdd(t, x, i, 16)}
	}
	apply := func(s Slot, e *Event, content []uint64) {
		var err error
		if e.Kind == Stored {
			err = x.ApplyContent(s, e, content)
		} else {
			err = x.Apply(s, e)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	begin := func(e *soakTarget) {
		for i := range uint64(beginnings) {
			content, names := contents(1<<29+i, common)
			apply(e.slot, &Event{Kind: Stored, Hashes: names}, content)
		}
		e.chains, e.held = nil, beginnings*common
	}
	for _, e := range engines {
		begin(e)
	}
	evict := func(e *soakTarget) {
		c := e.chains[0]
		e.chains = e.chains[1:]
		e.held -= len(c.names)
		for i := range slices.Backward(c.names) {
			apply(e.slot, &Event{Kind: Removed, Hashes: c.names[i : i+1]}, nil)
		}
	}
	var m Matches
	seed := x.Hasher().Seed("m", "", "")
	fresh := uint64(1 << 30)
	round := func(n uint64) {
		e := engines[rng.IntN(targets)]
		if rng.IntN(5000) == 0 {
			apply(e.slot, &Event{Kind: Cleared}, nil)
			begin(e)
		}
		number := n/3 + uint64(rng.IntN(4)) // targets get some of the same prompts
		if slices.ContainsFunc(e.chains, func(c soakChain) bool { return c.number == number }) {
			return
		}
		depth := 20 + int(number*7%200)
		whole, before := contents(1<<29+number%beginnings, common)
		content, names := contents(number, depth)
		apply(e.slot, &Event{Kind: Stored, Hashes: names, HasParent: true, Parent: before[common-1]}, content)
		for range rng.IntN(30) {
			fresh++
			c, k := contents(fresh, 1)
			apply(e.slot, &Event{Kind: Stored, Hashes: k, HasParent: true, Parent: names[len(names)-1]}, c)
			names, content = append(names, k[0]), append(content, c[0])
		}
		e.chains = append(e.chains, soakChain{number, names})
		e.held += len(names)
		whole = append(whole, content...)
		if x.Match(x.Hasher().AppendContents(nil, seed, whole), &m); m.Blocks != len(whole) {
			t.Fatalf("round %d: got %d of %d blocks", n, m.Blocks, len(whole))
		}
		for e.held > capacity {
			evict(e)
		}
	}
	var heap runtime.MemStats
	sizes := func() (index, live int64) {
		runtime.GC()
		runtime.ReadMemStats(&heap)
		return x.Stats().Reserved, int64(heap.HeapAlloc)
	}
	start, next := time.Now(), *soak/10
	var early, earlyHeap int64
	for n := uint64(0); ; n++ {
		round(n)
		if *soak == 0 && n == short/2 {
			early, earlyHeap = sizes()
		}
		if *soak == 0 && n == short {
			break
		}
		if *soak > 0 && n%1024 == 0 && time.Since(start) > next {
			index, live := sizes()
			t.Logf("after %v: %d rounds, index %d bytes, heap %d bytes, GC share %.4f", next, n, index, live, heap.GCCPUFraction)
			if early == 0 {
				early, earlyHeap = index, live
			}
			if next += *soak / 10; next > *soak {
				break
			}
		}
	}
	checkInvariants(t, x)
	held := 0
	for _, e := range engines {
		held += e.held
	}
	index, live := sizes()
	if st := x.Stats(); st.HolderBlocks != int64(held) || st.UnknownRemoved != 0 {
		t.Fatalf("got %d blocks held, %d unknown removals, want %d and 0", st.HolderBlocks, st.UnknownRemoved, held)
	}
	// shapes vary a little at constant size
	if index > early*5/4 || live > earlyHeap*5/4+1<<20 {
		t.Fatalf("got growth of the index from %d to %d bytes, of the heap from %d to %d", early, index, earlyHeap, live)
	}
	for _, e := range engines {
		x.Drop(e.slot)
	}
	if st := x.Stats(); st.Reserved > early/20 {
		t.Fatalf("got %d of %d bytes after dropping all", st.Reserved, early)
	}
}
