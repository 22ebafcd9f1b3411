package kvindex

import (
	"math/rand/v2"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// coverSlowly is cover as its comment says it.
func coverSlowly(runs []run, n int) (count int, level [numLevels]uint32) {
	for count < len(runs) && runSlot(runs[count]) == runSlot(runs[0]) {
		count++
	}
	for t := range level {
		held := map[int]bool{}
		for _, r := range runs[:count] {
			for i := runStart(r); i < runEnd(r) && int(runTier(r)) <= t; i++ {
				held[i] = true
			}
		}
		for held[int(level[t])] && int(level[t]) < n {
			level[t]++
		}
	}
	return count, level
}

func TestRunsAgainstSets(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const blocks = 200
		var runs []run
		for s := range Slot(2) {
			for tier := range Tier(numLevels) {
				for at := 0; at < blocks; {
					from := at + rapid.IntRange(1, 90).Draw(t, "gap") - 1
					to := from + rapid.IntRange(1, 90).Draw(t, "length")
					if at = to + 1; to <= blocks {
						runs = append(runs, makeRun(s, tier, from, to))
					}
				}
			}
		}
		n := rapid.IntRange(1, blocks).Draw(t, "n")
		if len(runs) > 0 {
			count, level := cover(runs, n)
			if c, l := coverSlowly(runs, n); c != count || l != level {
				t.Fatalf("got %d runs and %v, want %d and %v", count, level, c, l)
			}
		}
		start := rapid.IntRange(0, n-1).Draw(t, "start")
		held, got := map[int]bool{}, map[int]bool{}
		for _, r := range runs {
			for i := runStart(r); i < runEnd(r); i++ {
				held[i] = true
			}
		}
		last := start
		gaps(runs, start, n, func(from, to int) {
			if from < last || to <= from || to > n || to < n && !held[to] || from > start && !held[from-1] {
				t.Fatalf("got a gap from %d to %d after %d, want maximal ones in order", from, to, last)
			}
			for last = to; from < to; from++ {
				got[from] = true
			}
		})
		for i := start; i < n; i++ {
			if got[i] == held[i] {
				t.Fatalf("block %d: got a gap %v, held %v", i, got[i], held[i])
			}
		}
	})
}

// An engine may move every second block of a long chain to another tier, or remove it, on each of its ranks. What others then pay,
// for a prompt that shares the first block or for the engine's events, grows with the number of blocks and not with its square.
func TestFragmentsCostInProportion(t *testing.T) {
	const ranks, tries = 8, 3
	type costs struct{ events, match, speculate, clear time.Duration }
	play := func(blocks int, move bool) (c costs) {
		x, err := New(Config{BlockSize: 4, Key: Key{1}})
		if err != nil {
			t.Fatal(err)
		}
		random := rand.New(rand.NewPCG(1, 2))
		tokens, names := make([]uint32, 4*blocks), make([]EngineHash, blocks)
		for i := range tokens {
			tokens[i] = random.Uint32()
		}
		for i := range names {
			names[i] = EngineHash(random.Uint64())
		}
		var odd []EngineHash
		for i := 1; i < blocks; i += 2 {
			odd = append(odd, names[i])
		}
		apply := func(s Slot, e *Event) {
			if err := x.Apply(s, e); err != nil {
				t.Fatal(err)
			}
		}
		since := processorTime(t)
		lap := func(into *time.Duration) {
			now := processorTime(t)
			*into, since = now-since, now
		}
		for rank := range ranks {
			s := mustAdd(t, x, rank, 4)
			apply(s, &Event{Kind: Stored, Hashes: names, Tokens: tokens, BlockSize: 4})
			if move {
				apply(s, &Event{Kind: Stored, Tier: Host, Hashes: odd})
			}
			apply(s, &Event{Kind: Removed, Hashes: odd})
		}
		lap(&c.events)
		h := x.Hasher()
		hashes := h.AppendHashes(nil, h.Seed("m", "", ""), tokens, 4)
		var m Matches
		for range 100 {
			x.Match(hashes[:1], &m)
		}
		x.Match(hashes, &m)
		want := uint32(1)
		if move {
			want = uint32(blocks)
		}
		for _, held := range m.Holders {
			if n := held.Blocks[Device] + held.Blocks[Host]; n != want || held.Blocks[Device] != 1 {
				t.Errorf("got %v, want %d blocks, one of them on the device", held, want)
			}
		}
		if len(m.Holders) != ranks {
			t.Errorf("got %d holders, want %d", len(m.Holders), ranks)
		}
		lap(&c.match)
		x.Speculate(0, hashes, time.Unix(1, 0))
		lap(&c.speculate)
		for s := range Slot(ranks) {
			apply(s, &Event{Kind: Cleared})
		}
		lap(&c.clear)
		if s := x.Stats(); s.HolderBlocks != 0 {
			t.Errorf("got %d blocks after all were cleared", s.HolderBlocks)
		}
		return c
	}
	for name, move := range map[string]bool{"moved": true, "removed": false} {
		t.Run(name, func(t *testing.T) {
			least := func(blocks int) (c costs) {
				for try := range tries {
					d := play(blocks, move)
					if try == 0 {
						c = d
						continue
					}
					c = costs{min(c.events, d.events), min(c.match, d.match), min(c.speculate, d.speculate), min(c.clear, d.clear)}
				}
				return c
			}
			few, many := least(1024), least(4096)
			t.Logf("1,024 blocks: %+v, 4,096 blocks: %+v", few, many)
			for what, grown := range map[string]time.Duration{
				"events": many.events - 9*few.events, "match": many.match - 9*few.match, "speculate": many.speculate - 9*few.speculate, "clear": many.clear - 9*few.clear,
			} {
				if grown > 2*time.Millisecond {
					t.Errorf("%s: got %+v for 1,024 and %+v for 4,096 blocks, want at most 9 times as much", what, few, many)
				}
			}
		})
	}
}

// single returns a chain of that many blocks that each of the slots holds. With branch the first slot holds a further child of each
// block, so that each block is a segment of its own.
func single(tb testing.TB, blocks, slots int, branch bool) (x *Index, hashes []Hash) {
	x = mustIndex(tb, Config{BlockSize: 16})
	content, names := contents(1, blocks)
	for i := range slots {
		s := mustAdd(tb, x, i, 16)
		for at := 0; at < blocks; {
			n := min(256, blocks-at)
			if i == 0 {
				n = 1
			}
			e := &Event{Kind: Stored, Hashes: names[at : at+n]}
			if at > 0 {
				e.HasParent, e.Parent = true, names[at-1]
			}
			if err := x.ApplyContent(s, e, content[at:at+n]); err != nil {
				tb.Fatal(err)
			}
			if other, name := contents(uint64(2+at), 1); i == 0 && branch {
				if err := x.ApplyContent(s, &Event{Kind: Stored, Hashes: name, HasParent: true, Parent: names[at]}, other); err != nil {
					tb.Fatal(err)
				}
			}
			at += n
		}
	}
	return x, x.Hasher().AppendContents(nil, x.Hasher().Seed("m", "", ""), content)
}

// A lookup reads a bounded number of runs; what it found until then counts.
func TestALookupReadsABoundedNumberOfRuns(t *testing.T) {
	for _, c := range []struct {
		blocks, slots int
		branch        bool
		want          int
	}{{200, 1024, true, maxMatchRuns / 1024}, {200, 1024, false, 200}, {maxMatchRuns / 1024, 1024, true, maxMatchRuns / 1024}, {1024, 64, true, 1024}, {1025, 64, true, 1024}, {6250, 10, true, 6250}} {
		x, hashes := single(t, c.blocks, c.slots, c.branch)
		var m Matches
		x.Match(hashes, &m)
		for _, h := range m.Holders {
			if got := int(h.Blocks[Device]); got != c.want || int(h.Total()) != got {
				t.Fatalf("%+v: got %+v", c, h)
			}
		}
		if m.Blocks != c.want || len(m.Holders) != c.slots {
			t.Errorf("%+v: got %d blocks and %d holders", c, m.Blocks, len(m.Holders))
		}
	}
}

// At that bound targets with sliding windows are found with what their windows hold within it, never with more: one that keeps
// the windows of all blocks with as many blocks as the others, one that keeps those at the prompt's end only with none.
func TestWindowsAtTheBoundOfALookup(t *testing.T) {
	const blocks, slots, bound = 200, 1024, maxMatchRuns / 1024
	x, hashes := single(t, blocks, slots, true)
	_, names := contents(1, blocks)
	for s, kept := range map[Slot][]EngineHash{1: names, 2: names[blocks-2:], 3: names[:bound-10]} {
		if err := x.Apply(s, &Event{Kind: Stored, Group: 1, Window: 32, BlockSize: 16, Hashes: kept}); err != nil {
			t.Fatal(err)
		}
	}
	for prompt, want := range map[int]map[Slot]int{
		blocks:     {0: bound, 1: bound, 2: 0, 3: bound - 10},
		bound:      {0: bound, 1: bound, 2: 0, 3: bound - 10},
		bound - 20: {0: bound - 20, 1: bound - 20, 2: 0, 3: bound - 20},
	} {
		var m Matches
		x.Match(hashes[:prompt], &m)
		got := map[Slot]int{}
		for _, h := range m.Holders {
			got[h.Slot] = int(h.Total())
		}
		for s, n := range want {
			if got[s] != n {
				t.Errorf("of %d blocks: slot %d holds %d, want %d", prompt, s, got[s], n)
			}
		}
		if len(m.Holders) != slots-1 || m.Blocks != want[0] {
			t.Errorf("of %d blocks: got %d holders and %d blocks", prompt, len(m.Holders), m.Blocks)
		}
	}
}
