package kvindex

import (
	"bytes"
	"errors"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// An engine that uses one hash for two contents is refused where the index detects it, and never
// harms the index: after any such history its parts agree, and nothing is left when the targets
// are dropped.
func TestOneNameForTwoContents(t *testing.T) {
	x := mustIndex(t, Config{BlockSize: 16})
	s := mustAdd(t, x, 0, 16)
	content, names := contents(1, 3)
	other, _ := contents(2, 3)
	if err := x.ApplyContent(s, &Event{Kind: Stored, Hashes: names}, content); err != nil {
		t.Fatal(err)
	}
	if err := x.ApplyContent(s, &Event{Kind: Stored, Hashes: names}, other); !errors.Is(err, ErrHashConflict) {
		t.Fatalf("other content under known names: %v", err)
	}
	if err := x.ApplyContent(s, &Event{Kind: Stored, Hashes: []EngineHash{9, 9}}, other[:2]); !errors.Is(err, ErrHashConflict) {
		t.Fatalf("one name twice in an event: %v", err)
	}
	checkInvariants(t, x)
}

// In an event large enough for deferred names both contents are held, and each removal removes
// one.
func TestOneDeferredNameForTwoContents(t *testing.T) {
	x := mustIndex(t, Config{BlockSize: 16})
	s := mustAdd(t, x, 0, 16)
	content, names := contents(1, deferFrom)
	other, _ := contents(2, deferFrom)
	for _, c := range [][]uint64{content, other} {
		if err := x.ApplyContent(s, &Event{Kind: Stored, Hashes: names}, c); err != nil {
			t.Fatal(err)
		}
	}
	for left := 2 * deferFrom; left > 0; left -= deferFrom {
		if n := x.Stats().HolderBlocks; n != int64(left) {
			t.Fatalf("got %d blocks held, want %d", n, left)
		}
		checkInvariants(t, x)
		for i := range names {
			if err := x.Apply(s, &Event{Kind: Removed, Hashes: names[deferFrom-1-i : deferFrom-i]}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if st := x.Stats(); st.HolderBlocks != 0 || st.UnknownRemoved != 0 {
		t.Fatalf("%+v", st)
	}
}

// A block that is stored twice concerns no other block of its target: their names stay deferred, in what is stored and in
// what was another target's. When it is gone, nothing is left of it.
func TestABlockStoredTwiceConcernsNoOther(t *testing.T) {
	x := mustIndex(t, Config{BlockSize: 16})
	s, other := mustAdd(t, x, 0, 16), mustAdd(t, x, 1, 16)
	twice, twiceNames := contents(1, 1)
	content, names := contents(2, 64)
	shared, sharedNames := contents(3, 64)
	apply := func(s Slot, kind EventKind, names []EngineHash, content []uint64) {
		t.Helper()
		var err error
		if e := (&Event{Kind: kind, Hashes: names}); kind == Stored {
			err = x.ApplyContent(s, e, content)
		} else {
			err = x.Apply(s, e)
		}
		if err != nil {
			t.Fatal(err)
		}
		checkInvariants(t, x)
	}
	apply(s, Stored, twiceNames, twice)
	apply(s, Stored, twiceNames, twice)
	if x.slots[s].aliases == nil {
		t.Fatal("no alias of a block that is stored twice")
	}
	apply(other, Stored, sharedNames, shared)
	apply(s, Stored, sharedNames, shared)
	apply(s, Stored, names, content)
	if x.names.live > 4 {
		t.Errorf("got %d names in the table, want those of three first blocks", x.names.live)
	}
	backward := slices.Clone(names)
	slices.Reverse(backward)
	for _, list := range [][]EngineHash{names, backward} {
		if err := x.ApplyContent(s, &Event{Kind: Stored, Hashes: names[32:33], Parent: names[31], HasParent: true}, content[32:33]); err != nil {
			t.Fatal(err)
		}
		apply(s, Removed, list, nil)
		if n := x.Stats().HolderBlocks; n != 1+64+64+1 {
			t.Fatalf("got %d blocks held, want one of the chain of 64, in which one was stored twice, and 129 others", n)
		}
		apply(s, Removed, names[32:33], nil)
		apply(s, Stored, names, content)
	}
	for _, list := range [][]EngineHash{names, sharedNames} {
		apply(s, Removed, list, nil)
		apply(s, Removed, list, nil) // in vain
	}
	if st := x.Stats(); st.HolderBlocks != 65 || st.UnknownRemoved != 128 {
		t.Errorf("got %d blocks held and %d removals of unknown ones, want the one and the other target's 64, and 128", st.HolderBlocks, st.UnknownRemoved)
	}
	apply(s, Removed, twiceNames, nil)
	if x.slots[s].aliases != nil || x.Stats().HolderBlocks != 65 {
		t.Error("the block has to be held once")
	}
	apply(s, Removed, twiceNames, nil)
	if n := x.Stats().HolderBlocks; n != 64 {
		t.Errorf("got %d blocks held, want 64", n)
	}
}

func TestCollidingNamesLeaveTheIndexWhole(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		x, err := New(Config{BlockSize: 4})
		if err != nil {
			t.Fatal(err)
		}
		x.deferFrom = rapid.SampledFrom([]int{1, 3, deferFrom}).Draw(t, "defer from")
		x.maxEqual = rapid.SampledFrom([]int{0, 1, 2, maxEqual}).Draw(t, "equal names")
		var slots []Slot
		for i := range 3 {
			s, err := x.Add(Target{Worker: "w", Rank: int32(i)}, "m", 4)
			if err != nil {
				t.Fatal(err)
			}
			slots = append(slots, s)
		}
		name := rapid.Map(rapid.Uint64Range(1, 12), func(n uint64) EngineHash { return EngineHash(n) })
		for range rapid.IntRange(1, 60).Draw(t, "events") {
			e := &Event{Kind: Stored, BlockSize: 4, Group: rapid.SampledFrom([]int32{0, 0, 0, 1}).Draw(t, "group")}
			e.Hashes = rapid.SliceOfN(name, 1, 8).Draw(t, "names")
			if rapid.IntRange(0, 2).Draw(t, "remove") == 0 {
				e.Kind = Removed
			} else {
				for range e.Hashes {
					k := rapid.Uint32Range(0, 2).Draw(t, "token")
					e.Tokens = append(e.Tokens, k, k, k, k)
				}
				e.Parent, e.HasParent = name.Draw(t, "parent"), rapid.Bool().Draw(t, "has parent")
			}
			// refusals are expected
			_ = x.Apply(rapid.SampledFrom(slots).Draw(t, "slot"), e)
			checkInvariants(t, x)
		}
		for _, s := range slots {
			x.Drop(s)
		}
		if st := x.Stats(); st.Blocks != 0 || st.HolderBlocks != 0 || x.names.live != 0 || x.repeated != 0 || x.mapBytes != 0 {
			t.Fatalf("after dropping all: got %+v, repeated %d, map bytes %d, want none", st, x.repeated, x.mapBytes)
		}
	})
}

// A target that gives one name to the blocks of many chains makes no search for it longer: each one compared with all of
// them, with the lock held, so that an event of 8,192 removals took a minute.
func TestEqualNamesAreBounded(t *testing.T) {
	x := mustIndex(t, Config{BlockSize: 16})
	liar, honest := mustAdd(t, x, 0, 16), mustAdd(t, x, 1, 16)
	same := slices.Repeat([]EngineHash{7}, deferFrom)
	for i := range 1000 {
		c, _ := contents(uint64(i), deferFrom)
		_ = x.ApplyContent(liar, &Event{Kind: Stored, Hashes: same}, c) // most are refused
	}
	if n := x.entries(7, 1<<20); n > 32 {
		t.Errorf("got %d entries of one name, want at most 32", n)
	}
	checkInvariants(t, x)
	// a further target whose block has that name stores and removes it as ever
	content, _ := contents(5000, 1)
	for _, kind := range []EventKind{Stored, Removed} {
		e := &Event{Kind: kind, Hashes: same[:1]}
		var err error
		if kind == Stored {
			err = x.ApplyContent(honest, e, content)
		} else {
			err = x.Apply(honest, e)
		}
		checkInvariants(t, x)
		if held := x.slots[honest].held[0]; err != nil || held != int64(Removed-kind) {
			t.Errorf("event %d: got %d blocks held, %v", kind, held, err)
		}
	}
	x.Drop(liar)
	x.Drop(honest)
	if st := x.Stats(); st.Blocks != 0 || x.names.live != 0 || x.repeated != 0 || x.mapBytes != 0 {
		t.Errorf("after dropping all: got %+v, repeated %d, map bytes %d, want none", st, x.repeated, x.mapBytes)
	}
}

// A deferred block whose name has all its entries is found, renamed and removed, whether or not names repeat, and the others
// of its chain are as before, also in a copy of the index.
func TestDeferredBlocksAreRenamed(t *testing.T) {
	for round := range 6 {
		most, copies := round/2, round%2 == 1
		x := mustIndex(t, Config{BlockSize: 16})
		x.maxEqual = most
		content, names := contents(1, deferFrom)
		for i := range most { // other blocks of the name
			c, _ := contents(uint64(2+i), 1)
			if err := x.ApplyContent(mustAdd(t, x, 1+i, 16), &Event{Kind: Stored, Hashes: names[4:5]}, c); err != nil {
				t.Fatal(err)
			}
		}
		s := mustAdd(t, x, 0, 16)
		if err := x.ApplyContent(s, &Event{Kind: Stored, Hashes: names}, content); err != nil {
			t.Fatal(err)
		}
		if (most == 2) != (x.repeated > 0) {
			t.Errorf("bound %d: got %d repeated names", most, x.repeated)
		}
		if copies {
			x = copied(t, x)
		}
		for i, want := range []int64{7, 7, 0} {
			e := &Event{Kind: Removed, Hashes: names[4:5]}
			if i == 2 {
				e.Hashes = append(slices.Clone(names[:4]), names[5:]...)
			}
			if err := x.Apply(s, e); err != nil {
				t.Fatal(err)
			}
			checkInvariants(t, x)
			if st := x.slots[s]; st.held[0] != want || x.Stats().UnknownRemoved != int64(min(i, 1)) {
				t.Errorf("bound %d, removal %d: got %d blocks held, %d unknown, want %d", most, i, st.held[0], x.Stats().UnknownRemoved, want)
			}
		}
		if x.slots[s].aliases != nil {
			t.Errorf("bound %d: aliases are left", most)
		}
	}
}

// copied returns an index that was loaded from a copy.
func copied(t *testing.T, x *Index) *Index {
	t.Helper()
	var text bytes.Buffer
	if err := x.Dump(&text, nil); err != nil {
		t.Fatal(err)
	}
	y := mustIndex(t, Config{BlockSize: 16})
	y.maxEqual = x.maxEqual
	if _, err := y.Load(&text); err != nil {
		t.Fatal(err)
	}
	checkInvariants(t, y)
	return y
}

// A block that another target holds by an alias keeps its name in a copy, though a deferred one of that name is read first.
func TestCopiesKeepNamesOfAliases(t *testing.T) {
	x := mustIndex(t, Config{BlockSize: 16})
	x.maxEqual = 1
	early, owner, other := mustAdd(t, x, 0, 16), mustAdd(t, x, 1, 16), mustAdd(t, x, 2, 16)
	content, names := contents(1, deferFrom)
	shared, _ := contents(2, 1)
	for _, e := range []struct {
		slot    Slot
		names   []EngineHash
		content []uint64
	}{{early, names, content}, {owner, names[4:5], shared}, {other, []EngineHash{99}, shared}} {
		if err := x.ApplyContent(e.slot, &Event{Kind: Stored, Hashes: e.names}, e.content); err != nil {
			t.Fatal(err)
		}
	}
	x = copied(t, x)
	for slot, gone := range map[Slot][]EngineHash{early: names, owner: names[4:5], other: {99}} {
		if err := x.Apply(slot, &Event{Kind: Removed, Hashes: gone}); err != nil {
			t.Fatal(err)
		}
		if n := x.slots[slot].held[0]; n != 0 {
			t.Errorf("target %d: got %d blocks after all were removed, want none", slot, n)
		}
		checkInvariants(t, x)
	}
}
