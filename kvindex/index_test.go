package kvindex

import (
	"bytes"
	"errors"
	"hash/crc64"
	"slices"
	"testing"
	"time"
	"unsafe"
)

// mixName makes numbers look random.
func mixName(n uint64) uint64 { return fold(n^0x2d358dccaa6c78a5, 0x8bb84b93962eacc9) }

func testTime(seconds int) time.Time { return time.Unix(int64(seconds), 0) }

func mustIndex(t testing.TB, cfg Config) *Index {
	x, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func mustAdd(t testing.TB, x *Index, rank, block int) Slot {
	s, err := x.Add(Target{Worker: "w", Rank: int32(rank)}, "m", block)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// contents returns n content hashes and engine hashes that are unique to the chain.
func contents(chain uint64, n int) ([]uint64, []EngineHash) {
	c, e := make([]uint64, n), make([]EngineHash, n)
	for i := range n {
		c[i] = mixName(chain<<20 + uint64(i))
		e[i] = EngineHash(mixName(c[i]))
	}
	return c, e
}

func TestMillionFirstBlocksAndMemoryAfterwards(t *testing.T) {
	n := uint64(1_000_000)
	if testing.Short() {
		n = 300_000
	}
	x := mustIndex(t, Config{BlockSize: 16})
	s := mustAdd(t, x, 0, 16)
	for i := range n {
		c, e := contents(i, 1)
		if err := x.ApplyContent(s, &Event{Kind: Stored, Hashes: e}, c); err != nil {
			t.Fatal(err)
		}
	}
	peak := x.Stats()
	if peak.HolderBlocks != int64(n) {
		t.Fatalf("got %d holder blocks, want %d", peak.HolderBlocks, n)
	}
	var m Matches
	for i := uint64(0); i < n; i += 1000 {
		c, _ := contents(i, 1)
		h := x.Hasher().AppendContents(nil, x.Hasher().Seed("m", "", ""), c)
		if x.Match(h, &m); m.Blocks != 1 {
			t.Fatalf("got no match for chain %d", i)
		}
		if x.Match([]Hash{h[0] + 1}, &m); m.Blocks != 0 || len(m.Holders) != 0 {
			t.Fatalf("got a match for a chain that was not stored")
		}
	}
	for i := range n {
		_, e := contents(i, 1)
		if err := x.Apply(s, &Event{Kind: Removed, Hashes: e}); err != nil {
			t.Fatal(err)
		}
	}
	if st := x.Stats(); st.HolderBlocks != 0 || st.Reserved > peak.Reserved/10 {
		t.Fatalf("after removing everything: got %d of %d bytes reserved: %+v", st.Reserved, peak.Reserved, st)
	}
}

func TestChurnAtCapacityDoesNotGrow(t *testing.T) {
	x := mustIndex(t, Config{BlockSize: 16})
	const targets, kept, depth = 4, 200, 37
	for i := range targets {
		mustAdd(t, x, i, 16)
	}
	var after int64
	for round := range uint64(12_000) {
		s := Slot(round % targets)
		c, e := contents(round/2, depth) // pairs of targets share chains
		if err := x.ApplyContent(s, &Event{Kind: Stored, Hashes: e}, c); err != nil {
			t.Fatal(err)
		}
		if round >= kept {
			_, old := contents((round-kept)/2, depth)
			for i := depth - 1; i >= 0; i-- {
				if err := x.Apply(Slot((round-kept)%targets), &Event{Kind: Removed, Hashes: old[i : i+1]}); err != nil {
					t.Fatal(err)
				}
			}
		}
		if round == 2000 {
			after = x.Stats().Reserved
		}
	}
	st := x.Stats()
	if st.HolderBlocks != kept*depth || st.UnknownRemoved != 0 {
		t.Fatalf("%+v", st)
	}
	if st.Reserved > after*5/4 {
		t.Fatalf("got growth from %d to %d bytes at constant size", after, st.Reserved)
	}
}

// Whichever ends the engine frees its chains from, no block is searched for, and few enter the
// name table.
func TestEitherEndIsFoundWithoutSearch(t *testing.T) {
	const chains, depth = 20, 100
	for name, order := range map[string]func([]EngineHash){
		"last first":  slices.Reverse[[]EngineHash],
		"first first": func([]EngineHash) {},
		"both ends":   func(names []EngineHash) { slices.Reverse(names[depth/4:]) },
	} {
		x := mustIndex(t, Config{BlockSize: 16})
		s := mustAdd(t, x, 0, 16)
		var all [][]EngineHash
		for i := range uint64(chains) {
			c, names := contents(i, depth)
			if err := x.ApplyContent(s, &Event{Kind: Stored, Hashes: names}, c); err != nil {
				t.Fatal(err)
			}
			order(names)
			all = append(all, names[:depth*3/4])
		}
		for i := range all {
			for k := range all[i] {
				if err := x.Apply(s, &Event{Kind: Removed, Hashes: all[(i*7)%chains][k : k+1]}); err != nil {
					t.Fatal(err)
				}
			}
		}
		searches, most := 0, 8*chains
		for id := range x.segments {
			if x.alive(uint32(id)) {
				searches += x.seg(uint32(id)).searches()
			}
		}
		if st := x.Stats(); searches != 0 || x.names.live > most || st.UnknownRemoved != 0 || st.HolderBlocks != chains*depth/4 {
			t.Errorf("%s: got %d searches, %d names in the table, %d unknown removals and %d blocks left; want 0, at most %d, 0 and %d",
				name, searches, x.names.live, st.UnknownRemoved, st.HolderBlocks, most, chains*depth/4)
		}
		checkInvariants(t, x)
	}
}

// The room of a record is at least the number of blocks that it was made for, and the largest number that fits.
func TestRecordsHaveRoom(t *testing.T) {
	for runs := 1; runs <= 64; runs++ {
		for blocks := 1; blocks <= maxSegment; blocks++ {
			words := roundUp(segmentWords(blocks, runs))
			if room := roomIn(words, runs); room < blocks || segmentWords(room, runs) > words || room < maxSegment && segmentWords(room+1, runs) <= words {
				t.Fatalf("%d words with %d runs, made for %d blocks: got room for %d", words, runs, blocks, room)
			}
		}
	}
}

// A chain of any length, stored whole or in pieces, is found whole for each of its holders, and its
// last block is the parent of the next.
func TestChainsOfEveryLength(t *testing.T) {
	const longest, holders = 600, 3
	content, names := contents(1, longest+1)
	for n := 1; n <= longest; n++ {
		for _, piece := range []int{n, 1 + n%64} {
			x := mustIndex(t, Config{BlockSize: 16})
			store := func(s Slot, from, to int) {
				e := Event{Kind: Stored, Hashes: names[from:to], HasParent: from > 0}
				if from > 0 {
					e.Parent = names[from-1]
				}
				if err := x.ApplyContent(s, &e, content[from:to]); err != nil {
					t.Fatalf("chain of %d blocks: store %d to %d for slot %d: got %v, want no error", n, from, to, s, err)
				}
			}
			for rank := range holders {
				s := mustAdd(t, x, rank, 16)
				for from := 0; from < n; from += piece {
					store(s, from, min(from+piece, n))
				}
				piece = n
			}
			var got Matches
			x.Match(x.Hasher().AppendContents(nil, x.Hasher().Seed("m", "", ""), content), &got)
			for s := range Slot(holders) {
				if m := got.Holders[s]; m.Slot != s || m.Total() != uint32(n) {
					t.Fatalf("chain of %d blocks: got %d matched for slot %d, want all for slot %d", n, m.Total(), m.Slot, s)
				}
				store(s, n, n+1)
			}
			checkInvariants(t, x)
			for s := range Slot(holders) {
				for i := n; i >= 0; i-- {
					if err := x.Apply(s, &Event{Kind: Removed, Hashes: names[i : i+1]}); err != nil {
						t.Fatal(err)
					}
				}
			}
			if st := x.Stats(); st.Blocks != 0 || st.UnknownRemoved != 0 {
				t.Fatalf("chain of %d blocks, removed: got %d blocks and %d unknown removals, want none", n, st.Blocks, st.UnknownRemoved)
			}
		}
	}
}

func TestBudgetHolds(t *testing.T) {
	const budget = 1 << 20
	x := mustIndex(t, Config{BlockSize: 16, MaxBytes: budget})
	s := mustAdd(t, x, 0, 16)
	var m Matches
	hot, hotNames := contents(1<<30, 50)
	hotHashes := x.Hasher().AppendContents(nil, x.Hasher().Seed("m", "", ""), hot)
	if err := x.ApplyContent(s, &Event{Kind: Stored, Hashes: hotNames}, hot); err != nil {
		t.Fatal(err)
	}
	for i := range uint64(20_000) {
		c, e := contents(i, 10)
		if err := x.ApplyContent(s, &Event{Kind: Stored, Hashes: e}, c); err != nil {
			t.Fatal(err)
		}
		if st := x.bytes(); st > budget {
			t.Fatalf("%d bytes after %d chains", st, i)
		}
		if x.Match(hotHashes, &m); m.Blocks != 50 {
			t.Fatalf("got the constantly used chain evicted after %d others", i)
		}
	}
	if x.Stats().Evicted == 0 {
		t.Fatal("got no evictions")
	}
}

func TestMatchAllocatesNothing(t *testing.T) {
	x := mustIndex(t, Config{BlockSize: 16})
	c, e := contents(1, 500)
	for i := range 64 {
		s := mustAdd(t, x, i, 16)
		if err := x.ApplyContent(s, &Event{Kind: Stored, Hashes: e[:i+100]}, c[:i+100]); err != nil {
			t.Fatal(err)
		}
	}
	hashes := x.Hasher().AppendContents(nil, x.Hasher().Seed("m", "", ""), c)
	var m Matches
	x.Match(hashes, &m)
	if n := testing.AllocsPerRun(100, func() { x.Match(hashes, &m) }); n != 0 || len(m.Holders) != 64 {
		t.Fatalf("%v allocations, %d holders", n, len(m.Holders))
	}
}

func TestAddRefusesAnotherMeaning(t *testing.T) {
	x := mustIndex(t, Config{BlockSize: 16})
	s := mustAdd(t, x, 0, 32)
	if again := mustAdd(t, x, 0, 0); again != s {
		t.Fatalf("got slot %d, then %d, want the same", s, again)
	}
	if _, err := x.Add(Target{Worker: "w"}, "other", 32); err == nil {
		t.Fatal("got no error for another model")
	}
	if _, err := x.Add(Target{Worker: "w"}, "m", 16); err == nil {
		t.Fatal("got no error for another block size")
	}
	if _, err := x.Add(Target{Worker: "v"}, "m", 24); !errors.Is(err, ErrBlockSize) {
		t.Fatalf("blocks of 24 in an index of 16: %v", err)
	}
	for _, cfg := range []Config{{}, {BlockSize: MaxBlockSize + 1}, {BlockSize: 16, MaxBytes: -1}} {
		if _, err := New(cfg); err == nil {
			t.Fatalf("got no error for %+v", cfg)
		}
	}
}

func TestSpeculationIsBounded(t *testing.T) {
	x := mustIndex(t, Config{BlockSize: 16, MaxSpeculative: 100})
	s := mustAdd(t, x, 0, 16)
	seed := x.Hasher().Seed("m", "", "")
	for i := range 50 {
		c, _ := contents(uint64(i), 30)
		x.Speculate(s, x.Hasher().AppendContents(nil, seed, c), testTime(i))
		if n := x.Stats().Speculative; n > 100 {
			t.Fatalf("%d blocks of credit", n)
		}
	}
	c, _ := contents(99, 101)
	x.Speculate(s, x.Hasher().AppendContents(nil, seed, c), testTime(99))
	if n := x.Stats().Speculative; n != 90 {
		t.Fatalf("got %d blocks of credit after a prompt above the limit, want 90", n)
	}
	x.Expire(testTime(1000))
	if st := x.Stats(); st.Speculative != 0 || st.Blocks != 0 {
		t.Fatalf("%+v", st)
	}
}

func TestSnapshotRefusesWhatItCannotTake(t *testing.T) {
	x := mustIndex(t, Config{BlockSize: 16, Key: Key{1}})
	s := mustAdd(t, x, 0, 16)
	c, e := contents(1, 50)
	if err := x.ApplyContent(s, &Event{Kind: Stored, Hashes: e}, c); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := x.Dump(&b, nil); err != nil {
		t.Fatal(err)
	}
	for i := range b.Len() {
		damaged := bytes.Clone(b.Bytes())
		damaged[i] ^= 0x10
		y := mustIndex(t, Config{BlockSize: 16, Key: Key{1}})
		if _, err := y.Load(bytes.NewReader(damaged)); !errors.Is(err, ErrSnapshot) {
			t.Fatalf("byte %d damaged: %v", i, err)
		}
		if st := y.Stats(); st.Segments != 0 || len(st.Targets) != 0 {
			t.Fatalf("byte %d damaged: %+v is left", i, st)
		}
		if _, err := y.Load(bytes.NewReader(b.Bytes()[:i])); !errors.Is(err, ErrSnapshot) {
			t.Fatalf("cut at %d: %v", i, err)
		}
	}
	for _, cfg := range []Config{{BlockSize: 32, Key: Key{1}}, {BlockSize: 16, Key: Key{2}}} {
		if _, err := mustIndex(t, cfg).Load(bytes.NewReader(b.Bytes())); !errors.Is(err, ErrSnapshot) {
			t.Fatalf("%+v: %v", cfg, err)
		}
	}
	if _, err := x.Load(bytes.NewReader(b.Bytes())); err == nil {
		t.Fatal("got no error for an index in use")
	}
}

func FuzzLoad(f *testing.F) {
	x := mustIndex(f, Config{BlockSize: 4})
	s := mustAdd(f, x, 0, 4)
	p := mustAdd(f, x, 1, 2)
	tokens := []uint32{1, 2, 3, 4, 5, 6, 7, 8}
	for _, e := range []Event{
		{Kind: Stored, BlockSize: 4, Tokens: tokens, Hashes: []EngineHash{1, 2}},
		{Kind: Stored, BlockSize: 4, Tokens: tokens[:4], Hashes: []EngineHash{1}},
		{Kind: Stored, BlockSize: 4, Tokens: tokens[:4], Hashes: []EngineHash{9}, Tier: Host},
	} {
		if err := x.Apply(s, &e); err != nil {
			f.Fatal(err)
		}
	}
	if err := x.Apply(p, &Event{Kind: Stored, BlockSize: 2, Tokens: tokens[:6], Hashes: []EngineHash{3, 4, 5}}); err != nil {
		f.Fatal(err)
	}
	var b bytes.Buffer
	if err := x.Dump(&b, func(Slot) []byte { return []byte("cursor") }); err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes()[:b.Len()-8])
	f.Add(b.Bytes()[:b.Len()/2])
	b.Reset()
	if err := mustIndex(f, Config{BlockSize: 4}).Dump(&b, func(Slot) []byte { return nil }); err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes()[:b.Len()-8])
	f.Fuzz(func(t *testing.T, data []byte) {
		y := mustIndex(t, Config{BlockSize: 4})
		// a wrong checksum would hide parser errors: correct it
		if _, err := y.Load(bytes.NewReader(withChecksum(data))); err != nil {
			return
		}
		var m Matches
		y.Match(y.Hasher().AppendHashes(nil, y.Hasher().Seed("m", "", ""), tokens, 4), &m)
		for _, target := range y.Stats().Targets {
			_ = y.Apply(target.Slot, &Event{Kind: Removed, Hashes: []EngineHash{1, 2, 3, 4, 9}})
			y.Drop(target.Slot)
		}
		if st := y.Stats(); st.HolderBlocks != 0 {
			t.Fatalf("%+v", st)
		}
	})
}

func crcOf(data []byte) uint64 { return crc64.Checksum(data, crcTable) }

func withChecksum(data []byte) []byte {
	sum := crcOf(data)
	out := bytes.Clone(data)
	for i := range 8 {
		out = append(out, byte(sum>>(8*i)))
	}
	return out
}

func TestHashes(t *testing.T) {
	h := NewHasher(Key{42})
	tokens := make([]uint32, 1000)
	for i := range tokens {
		tokens[i] = uint32(i * i)
	}
	seed := h.Seed("m", "", "")
	for _, size := range []int{1, 2, 3, 4, 5, 16, 17, 64, 333} {
		whole := h.AppendHashes(nil, seed, tokens, size)
		if len(whole) != len(tokens)/size {
			t.Fatalf("%d hashes of blocks of %d", len(whole), size)
		}
		k := len(whole) / 2
		parts := h.AppendHashes(nil, seed, tokens[:k*size], size)
		last := seed
		if k > 0 {
			last = parts[k-1]
		}
		parts = h.AppendHashes(parts, last, tokens[k*size:], size)
		for i := range whole {
			if whole[i] != parts[i] {
				t.Fatalf("got another hash for block %d of %d tokens when continued", i, size)
			}
		}
		// the most common size has a separate loop, which must agree with the general one
		if general := h.AppendHashesExtra(nil, seed, tokens, size, make([]uint64, 1), nil); !slices.Equal(general, whole) {
			t.Fatalf("got two hashes for the same blocks of %d tokens", size)
		}
		// every token matters
		for i := range k * size {
			changed := append([]uint32(nil), tokens[:k*size]...)
			changed[i] ^= 1
			if h.AppendHashes(nil, seed, changed, size)[k-1] == parts[k-1] {
				t.Fatalf("got the same hash after a change of token %d", i)
			}
		}
	}
	seen := map[Hash]string{}
	for _, s := range [][3]string{{"m", "", ""}, {"", "m", ""}, {"", "", "m"}, {"ma", "b", ""}, {"m", "ab", ""}, {"m", "a", "b"}, {"m", "", "ab"}, {"m\x00", "", ""}, {"12345678", "", ""}, {"1234567", "8", ""}} {
		v := h.Seed(s[0], s[1], s[2])
		if seen[v] != "" {
			t.Fatalf("got the same seed for %q and %q", seen[v], s)
		}
		seen[v] = s[0] + "|" + s[1] + "|" + s[2]
	}
	if NewHasher(Key{43}).Seed("m", "", "") == seed {
		t.Fatal("got the same hashes with another key")
	}
	if got := h.AppendHashes(nil, seed, tokens, 0); got != nil {
		t.Fatal("got hashes for blocks of 0 tokens")
	}
}

// stepped is the time after a step of the wall clock, at which the monotonic clock goes on.
func stepped(t *testing.T, now time.Time, seconds int) time.Time {
	t.Helper()
	const hasMonotonic, secondsShift = 1 << 63, 30 // of the first word of a time.Time that time.Now returned
	after := now
	word := (*uint64)(unsafe.Pointer(&after))
	if *word&hasMonotonic == 0 {
		t.Fatal("got a time without a monotonic reading, want one")
	}
	*word += uint64(int64(seconds) << secondsShift)
	if after.Sub(now) != 0 || after.Round(0).Sub(now.Round(0)) != time.Duration(seconds)*time.Second {
		t.Fatal("got another layout of time.Time, want the one that this test changes")
	}
	return after
}

// A step of the wall clock neither ends speculative credit nor prolongs it.
func TestClockJumps(t *testing.T) {
	const hour = 3600
	for _, step := range []int{hour, -hour} {
		x := mustIndex(t, Config{BlockSize: 16, SpeculativeTTL: time.Minute})
		slot := mustAdd(t, x, 0, 16)
		now := time.Now()
		x.Speculate(slot, []Hash{1, 2, 3}, now)
		x.Expire(stepped(t, now.Add(59*time.Second), step))
		if n := x.Stats().Speculative; n != 3 {
			t.Errorf("step of %d s, before the TTL's end: got %d blocks of credit, want 3", step, n)
		}
		x.Expire(stepped(t, now.Add(61*time.Second), step))
		if n := x.Stats().Speculative; n != 0 {
			t.Errorf("step of %d s, after the TTL's end: got %d blocks of credit, want 0", step, n)
		}
	}
}

// A relabelled target keeps its slot, and neither its old blocks nor requests for the old model find anything there.
func TestRelabel(t *testing.T) {
	x := mustIndex(t, Config{BlockSize: 16})
	other, s := mustAdd(t, x, 1, 16), mustAdd(t, x, 0, 16)
	prompt := make([]uint32, 64)
	for _, model := range []string{"m", "n", "m"} {
		x.Relabel(s, model)
		x.Relabel(9, model)
		for _, salt := range []string{"salt", ""} {
			if err := x.Apply(s, &Event{Kind: Stored, BlockSize: 16, Hashes: engineHashes(1, model, "", salt, prompt, nil, 16), Tokens: prompt, Salt: salt}); err != nil {
				t.Fatal(err)
			}
		}
		for _, asked := range []string{"m", "n"} {
			for _, salt := range []string{"", "salt"} {
				var found Matches
				x.Match(x.Hasher().AppendHashes(nil, x.Hasher().Seed(asked, "", salt), prompt, 16), &found)
				if got := len(found.Holders) > 0; got != (asked == model) {
					t.Errorf("relabelled to %q: got blocks of %q with salt %q: %v", model, asked, salt, got)
				}
			}
		}
		checkInvariants(t, x)
	}
	x.Drop(s)
	x.Relabel(s, "gone")
	if again := mustAdd(t, x, 0, 16); again != s || other == s {
		t.Errorf("got slot %d, want %d", again, s)
	}
}
