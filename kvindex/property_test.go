package kvindex

import (
	"bytes"
	"errors"
	"reflect"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// world applies the same events to an index and the model.
type world struct {
	x     *Index
	m     *model
	slots []Slot
	info  map[Slot]worldTarget
	// chains that were stored: hashes by target, for parents and removals
	chains    map[Slot][]worldChain
	alphabet  uint32
	longest   int // chain, in engine blocks
	deferFrom int
	maxEqual  int

	manyRuns, shortSegment int
	speculated             bool
	sent                   []Credit
	bounded                bool // a byte budget: matches may be shorter than the model's
	now                    time.Time
}

type worldTarget struct {
	target Target
	model  string
	block  int
	family uint64 // engine hash function; targets of one family share hashes
}

type worldChain struct {
	adapter, salt string
	tokens        []uint32
	extra         []uint64
	hashes        []EngineHash
}

func engineHashes(family uint64, model, adapter, salt string, tokens []uint32, extra []uint64, block int) []EngineHash {
	h := NewHasher(Key{byte(family), 99})
	out := h.AppendHashesExtra(nil, h.Seed(model, adapter, salt), tokens, block, extra, nil)
	r := make([]EngineHash, len(out))
	for i := range out {
		r[i] = EngineHash(out[i])
	}
	return r
}

func (w *world) chain(t *rapid.T, s Slot) worldChain {
	if old := w.chains[s]; len(old) > 0 && rapid.Bool().Draw(t, "again") {
		return old[rapid.IntRange(0, len(old)-1).Draw(t, "which")]
	}
	in := w.info[s]
	c := worldChain{
		adapter: rapid.SampledFrom([]string{"", "", "", "lora"}).Draw(t, "adapter"),
		salt:    rapid.SampledFrom([]string{"", "", "", "tenant"}).Draw(t, "salt"),
	}
	blocks := rapid.IntRange(1, w.longest).Draw(t, "blocks")
	token := rapid.Uint32Range(0, w.alphabet)
	for range blocks {
		// blocks of few kinds, so that chains often share prefixes
		k := token.Draw(t, "token")
		for range max(in.block, w.m.block) {
			c.tokens = append(c.tokens, k)
		}
	}
	if in.block == w.m.block && rapid.IntRange(0, 5).Draw(t, "multimodal") == 0 {
		c.extra = make([]uint64, blocks)
		c.extra[rapid.IntRange(0, blocks-1).Draw(t, "image")] = 77
	}
	c.hashes = engineHashes(in.family, in.model, c.adapter, c.salt, c.tokens, c.extra, in.block)
	w.chains[s] = append(w.chains[s], c)
	return c
}

func (w *world) slot(t *rapid.T) Slot { return rapid.SampledFrom(w.slots).Draw(t, "slot") }

func (w *world) apply(t *rapid.T, s Slot, e *Event) {
	got := w.x.Apply(s, e)
	want := w.m.apply(s, e)
	if w.bounded && got != nil {
		return // a parent may be gone
	}
	if !errors.Is(got, want) {
		t.Fatalf("apply %+v: got %v, want %v", e, got, want)
	}
}

func (w *world) store(t *rapid.T) {
	s := w.slot(t)
	in := w.info[s]
	c := w.chain(t, s)
	from := 0
	if rapid.Bool().Draw(t, "continue") {
		from = rapid.IntRange(0, len(c.hashes)-1).Draw(t, "from")
	}
	to := rapid.IntRange(from+1, len(c.hashes)).Draw(t, "to")
	e := &Event{Kind: Stored, Adapter: c.adapter, Salt: c.salt, BlockSize: in.block,
		Hashes: c.hashes[from:to], Tokens: c.tokens[from*in.block : to*in.block]}
	if c.extra != nil {
		e.Extra = c.extra[from:to]
	}
	if from > 0 {
		e.Parent, e.HasParent = c.hashes[from-1], true
	}
	e.Tier = rapid.SampledFrom([]Tier{Device, Device, Device, Host, Disk}).Draw(t, "tier")
	e.Group = rapid.SampledFrom([]int32{0, 0, 0, 0, 1}).Draw(t, "group")
	if rapid.IntRange(0, 9).Draw(t, "placeholder") == 0 {
		e.Tokens, e.BlockSize, e.Extra = nil, 0, nil
	}
	w.apply(t, s, e)
}

func (w *world) remove(t *rapid.T) {
	s := w.slot(t)
	if len(w.chains[s]) == 0 {
		return
	}
	c := rapid.SampledFrom(w.chains[s]).Draw(t, "chain")
	from := rapid.IntRange(0, len(c.hashes)-1).Draw(t, "from")
	to := rapid.IntRange(from+1, len(c.hashes)).Draw(t, "to")
	hashes := slices.Clone(c.hashes[from:to])
	switch rapid.IntRange(0, 2).Draw(t, "order") {
	case 0:
		slices.Reverse(hashes)
	case 1:
		hashes = append(hashes, 12345) // unknown
	}
	e := &Event{Kind: Removed, Hashes: hashes}
	e.Tier = rapid.SampledFrom([]Tier{Device, Device, Device, Host, Disk}).Draw(t, "tier")
	e.Group = rapid.SampledFrom([]int32{0, 0, 0, 0, 1}).Draw(t, "group")
	w.apply(t, s, e)
}

// decode stores a chain's last blocks one by one, as engines do while they generate.
func (w *world) decode(t *rapid.T) {
	s := w.slot(t)
	c := w.chain(t, s)
	in := w.info[s]
	n := len(c.hashes)
	for i := n - min(n, rapid.IntRange(1, 20).Draw(t, "steps")); i < n; i++ {
		e := &Event{Kind: Stored, Adapter: c.adapter, Salt: c.salt, BlockSize: in.block,
			Hashes: c.hashes[i : i+1], Tokens: c.tokens[i*in.block : (i+1)*in.block]}
		if c.extra != nil {
			e.Extra = c.extra[i : i+1]
		}
		if i > 0 {
			e.Parent, e.HasParent = c.hashes[i-1], true
		}
		w.apply(t, s, e)
	}
}

// evict removes a stretch of a chain block by block, in one direction.
func (w *world) evict(t *rapid.T) {
	s := w.slot(t)
	if len(w.chains[s]) == 0 {
		return
	}
	c := rapid.SampledFrom(w.chains[s]).Draw(t, "chain")
	to := rapid.IntRange(1, len(c.hashes)).Draw(t, "to")
	hashes := slices.Clone(c.hashes[rapid.IntRange(0, to-1).Draw(t, "from"):to])
	if rapid.IntRange(0, 3).Draw(t, "forward") > 0 {
		slices.Reverse(hashes)
	}
	for i := range hashes {
		w.apply(t, s, &Event{Kind: Removed, Hashes: hashes[i : i+1]})
	}
}

func (w *world) clear(t *rapid.T) {
	if rapid.IntRange(0, 9).Draw(t, "really") == 0 {
		w.apply(t, w.slot(t), &Event{Kind: Cleared})
	}
}

func (w *world) churn(t *rapid.T) {
	if rapid.IntRange(0, 9).Draw(t, "really") != 0 {
		return
	}
	i := rapid.IntRange(0, len(w.slots)-1).Draw(t, "slot")
	s := w.slots[i]
	in := w.info[s]
	w.x.Drop(s)
	delete(w.m.targets, s)
	delete(w.chains, s)
	delete(w.info, s)
	in.target.Rank++
	if in.block == w.m.block {
		in.family = rapid.Uint64Range(1, 2).Draw(t, "family")
	}
	n, err := w.x.Add(in.target, in.model, in.block)
	if err != nil {
		t.Fatal(err)
	}
	w.slots[i] = n
	w.info[n] = in
	w.m.add(n, in.model, in.block)
}

func (w *world) snapshot(t *rapid.T) {
	if rapid.IntRange(0, 9).Draw(t, "really") != 0 {
		return
	}
	var b, again bytes.Buffer
	cursor := func(s Slot) []byte { return []byte{byte(s), 7} }
	if err := w.x.Dump(&b, cursor); err != nil {
		t.Fatal(err)
	}
	y, err := New(w.x.cfg)
	if err != nil {
		t.Fatal(err)
	}
	cursors, err := y.Load(bytes.NewReader(b.Bytes()))
	if err != nil {
		t.Fatal(err)
	}
	if len(cursors) != len(w.slots) || !bytes.Equal(cursors[w.slots[0]], []byte{byte(w.slots[0]), 7}) {
		t.Fatalf("cursors %v", cursors)
	}
	if err := y.Dump(&again, cursor); err != nil {
		t.Fatal(err)
	}
	// a loaded index has all names in the table, which may exceed the budget
	if a, b := w.x.Stats(), y.Stats(); a.HolderBlocks != b.HolderBlocks && (!w.bounded || b.HolderBlocks > a.HolderBlocks) {
		t.Fatalf("got holder blocks %d before and %d after loading", a.HolderBlocks, b.HolderBlocks)
	}
	w.x = y
	w.x.deferFrom, w.x.manyRuns, w.x.shortSegment, w.x.maxEqual = w.deferFrom, w.manyRuns, w.shortSegment, w.maxEqual
	w.speculated = false
}

// check compares matches of all known chains, and of chains that branch off them.
func (w *world) check(t *rapid.T) {
	checkInvariants(t, w.x)
	var got Matches
	for _, from := range w.slots {
		for i, c := range w.chains[from] {
			if i > 6 {
				break
			}
			w.checkPrompt(t, &got, from, c.adapter, c.salt, c.tokens, c.extra)
		}
	}
}

func (w *world) checkPrompt(t *rapid.T, got *Matches, from Slot, adapter, salt string, tokens []uint32, extra []uint64) {
	in := w.info[from]
	if len(tokens) == 0 {
		return
	}
	h := w.x.Hasher()
	hashes := h.AppendHashesExtra(nil, h.Seed(in.model, adapter, salt), tokens, w.m.block, extra, nil)
	w.x.Match(hashes, got)
	found := map[Slot]Match{}
	for i, m := range got.Holders {
		found[m.Slot] = m
		if i > 0 && got.Holders[i-1].Slot >= m.Slot {
			t.Fatalf("got holders out of order: %v", got.Holders)
		}
		if m.Speculative != 0 && !w.speculated {
			t.Fatalf("got speculative credit without a prompt: %+v", m)
		}
	}
	for _, s := range w.slots {
		if w.info[s].model != in.model || extra != nil && w.info[s].block != w.m.block {
			continue
		}
		want := w.m.match(s, adapter, salt, tokens, extra)
		if m := found[s]; m.Blocks != want && w.info[s].block >= w.m.block && !w.bounded {
			t.Fatalf("slot %d (%+v) of prompt %v: got %v, want %v", s, w.info[s], tokens, m.Blocks, want)
		} else if m.Blocks != want {
			a, b := uint32(0), uint32(0)
			for k := range want {
				a, b = a+m.Blocks[k], b+want[k]
				if a > b {
					t.Fatalf("slot %d (%+v) of prompt %v: got %v, at most %v", s, w.info[s], tokens, m.Blocks, want)
				}
			}
		}
	}
}

func (w *world) speculate(t *rapid.T) {
	s := w.slot(t)
	c := w.chain(t, w.slot(t))
	h := w.x.Hasher()
	hashes := h.AppendHashesExtra(nil, h.Seed("m", c.adapter, c.salt), c.tokens, w.m.block, c.extra, nil)
	w.now = w.now.Add(time.Second)
	if rapid.Bool().Draw(t, "refused") {
		w.refused(t, s, hashes)
		return
	}
	var credit Credit
	w.decide(t, func() { credit = w.x.Speculate(s, hashes, w.now) })
	w.speculated = true
	if rapid.IntRange(0, 3).Draw(t, "refusedLater") == 0 {
		w.sent = append(w.sent, credit)
	}
	if w.bounded {
		return
	}
	parts := max(1, w.info[s].block/w.m.block)
	var got Matches
	w.x.Match(hashes, &got)
	for _, m := range got.Holders {
		if m.Slot == s && int(m.Total()+m.Speculative) == len(hashes)/parts*parts {
			return
		}
	}
	if len(hashes) >= parts {
		t.Fatalf("prompt of %d blocks sent to %d is not credited: %+v", len(hashes), s, got.Holders)
	}
}

// decide makes changes of decisions, perhaps while another writer works, which then applies them.
func (w *world) decide(t *rapid.T, changes func()) {
	if rapid.Bool().Draw(t, "handed over") {
		w.x.lock()
		defer w.x.unlock()
	}
	changes()
}

// refused sends a prompt that the target does not accept: afterwards the state is as before,
// except that the oldest credit may have made room, and that credit in a rebuilt segment is
// lost.
func (w *world) refused(t *rapid.T, s Slot, hashes []Hash) {
	w.x.Expire(w.now) // as Speculate does
	exact := w.x.claims.blocks+len(hashes) <= w.x.cfg.MaxSpeculative && !w.bounded
	rebuilt := w.x.counters.rebuilt
	var before, after Matches
	w.x.Match(hashes, &before)
	w.decide(t, func() { w.x.Withdraw(w.x.Speculate(s, hashes, w.now)) })
	w.x.Match(hashes, &after)
	if exact && rebuilt == w.x.counters.rebuilt && !reflect.DeepEqual(before.Holders, after.Holders) {
		t.Fatalf("before the refused prompt %+v, after it %+v", before.Holders, after.Holders)
	}
}

// withdraw withdraws credit of an earlier prompt, of which nothing, some or all may have been
// confirmed, removed, expired or sent again.
func (w *world) withdraw(t *rapid.T) {
	w.decide(t, func() {
		for _, c := range w.sent {
			w.x.Withdraw(c)
			w.x.Withdraw(c)
		}
	})
	w.sent = nil
}

func (w *world) expire(t *rapid.T) {
	w.now = w.now.Add(time.Duration(rapid.IntRange(1, 40).Draw(t, "seconds")) * time.Second)
	w.x.Expire(w.now)
	if w.x.claims.length == 0 {
		w.speculated = false
	}
}

type fataler interface {
	Fatalf(format string, args ...any)
}

// checkInvariants compares the index's parts with each other.
func checkInvariants(t fataler, x *Index) {
	x.flushNames() // entries of removed blocks may be queued
	var live, held, used int64
	names, present := 0, map[Slot]int{}
	starts := map[uint64]bool{}
	alive := 0
	for id := range x.segments {
		if !x.alive(uint32(id)) {
			continue
		}
		alive++
		g := x.seg(uint32(id))
		used += int64(roundUp(segmentWords(g.room(), g.runRoom())))
		n := g.blocks()
		if n > g.room() {
			t.Fatalf("segment %d: got %d blocks in room for %d", id, n, g.room())
		}
		cover := make([]bool, n)
		runs := g.runs()
		for i, r := range runs {
			if i > 0 && (runs[i-1] >= r || sameHolder(runs[i-1], r) && runEnd(runs[i-1]) >= runStart(r)) {
				t.Fatalf("runs out of order: %x %x", runs[i-1], r)
			}
			if i == 0 || runSlot(runs[i-1]) != runSlot(r) {
				present[runSlot(r)]++
			}
			if runStart(r) >= runEnd(r) || runEnd(r) > n {
				t.Fatalf("run %d-%d of %d blocks", runStart(r), runEnd(r), n)
			}
			held += int64(runEnd(r) - runStart(r))
			for k := runStart(r); k < runEnd(r); k++ {
				cover[k] = true
			}
		}
		dead, deferred := 0, 0
		for i, c := range cover {
			if !c {
				dead++
				if g.names()[i] != 0 {
					t.Fatalf("got a dead block with a name")
				}
			} else {
				live++
			}
			if g.isEntered(i) && g.names()[i] == 0 {
				t.Fatalf("got a block without name in the table")
			}
			if g.names()[i] != 0 && !g.isEntered(i) {
				deferred++
				for _, r := range runs {
					if runTier(r) < NumTiers && runStart(r) <= i && i < runEnd(r) && !slices.Contains(x.slots[runSlot(r)].deferred, uint32(id)) {
						t.Fatalf("slot %d does not list deferred block %d/%d", runSlot(r), id, i)
					}
				}
			}
			if g.isEntered(i) {
				names++
				if p, ok := x.locate(g.names()[i], g.own()[i]); !ok || p != placeAt(uint32(id), i) {
					t.Fatalf("name of %d/%d leads to %d/%d, %v", id, i, p.segment(), p.offset(), ok)
				}
			}
			if starts[g.own()[i]] {
				t.Fatalf("got block %x twice", g.own()[i])
			}
			starts[g.own()[i]] = true
		}
		if deferred != g.deferred() {
			t.Fatalf("got %d deferred blocks, recorded %d", deferred, g.deferred())
		}
		for i := n; i < g.room(); i++ {
			if g.isEntered(i) {
				t.Fatalf("got entered bits beyond the blocks")
			}
		}
		if dead != g.dead() || !cover[n-1] {
			t.Fatalf("%d dead, noted %d, last held %v", dead, g.dead(), cover[n-1])
		}
		if x.findStart(g.own()[0]) != uint32(id) {
			t.Fatalf("got no segment %d by its start", id)
		}
	}
	if live != x.liveBlocks || names != x.names.live || alive != x.starts.live || used*8 != x.arena.used {
		t.Fatalf("live %d noted %d, names %d in table %d, segments %d starts %d, bytes %d noted %d", live, x.liveBlocks, names, x.names.live, alive, x.starts.live, used*8, x.arena.used)
	}
	for i := range x.slots {
		for _, n := range x.slots[i].held {
			held -= n
		}
		if x.slots[i].present != present[Slot(i)] {
			t.Fatalf("slot %d is in %d segments, noted %d", i, present[Slot(i)], x.slots[i].present)
		}
	}
	if held != 0 {
		t.Fatalf("got held blocks wrong by %d", held)
	}
}

func newWorld(t *rapid.T, blocks []int, maxBytes int64) *world {
	w := &world{m: newModel(4), info: map[Slot]worldTarget{}, chains: map[Slot][]worldChain{}}
	w.bounded, w.now = maxBytes > 0, time.Unix(1000, 0)
	w.longest = rapid.SampledFrom([]int{12, 12, 12, 12, 12, 100}).Draw(t, "longest")
	w.deferFrom = rapid.SampledFrom([]int{1, 3, deferFrom}).Draw(t, "defer from")
	w.maxEqual = rapid.SampledFrom([]int{0, 1, maxEqual}).Draw(t, "equal names")
	w.manyRuns, w.shortSegment = manyRuns, shortSegment
	if rapid.Bool().Draw(t, "segments are cut up") {
		w.manyRuns, w.shortSegment = rapid.SampledFrom([]int{1, 3}).Draw(t, "many runs"), rapid.SampledFrom([]int{1, 4}).Draw(t, "short segment")
	}
	w.alphabet = rapid.SampledFrom([]uint32{0, 1, 3}).Draw(t, "alphabet")
	var err error
	if w.x, err = New(Config{BlockSize: 4, Key: Key{1, 2, 3}, MaxBytes: maxBytes}); err != nil {
		t.Fatal(err)
	}
	w.x.deferFrom, w.x.manyRuns, w.x.shortSegment, w.x.maxEqual = w.deferFrom, w.manyRuns, w.shortSegment, w.maxEqual
	for i := range rapid.IntRange(1, 4).Draw(t, "targets") {
		in := worldTarget{
			target: Target{Worker: string(rune('a' + i))},
			model:  "m",
			block:  rapid.SampledFrom(blocks).Draw(t, "block size"),
		}
		// engines of one block size and seed share their hashes
		in.family = uint64(in.block)*10 + rapid.Uint64Range(1, 2).Draw(t, "family")
		s, err := w.x.Add(in.target, in.model, in.block)
		if err != nil {
			t.Fatal(err)
		}
		w.slots = append(w.slots, s)
		w.info[s] = in
		w.m.add(s, in.model, in.block)
	}
	return w
}

// history plays random events and compares every answer with the model's.
func history(t *rapid.T, blocks []int, maxBytes int64) {
	w := newWorld(t, blocks, maxBytes)
	t.Repeat(map[string]func(*rapid.T){
		"store":     w.store,
		"store2":    w.store,
		"remove":    w.remove,
		"decode":    w.decode,
		"evict":     w.evict,
		"clear":     w.clear,
		"churn":     w.churn,
		"snapshot":  w.snapshot,
		"speculate": w.speculate,
		"withdraw":  w.withdraw,
		"expire":    w.expire,
		"":          w.check,
	})
	if st := w.x.Stats(); maxBytes > 0 && st.Bytes > maxBytes {
		t.Fatalf("got %d bytes, limit %d", st.Bytes, maxBytes)
	}
	for _, s := range w.slots {
		w.x.Drop(s)
	}
	if st := w.x.Stats(); st.Blocks != 0 || st.HolderBlocks != 0 || st.Segments != 0 || w.x.names.live != 0 || w.x.arena.used != 0 || w.x.repeated != 0 || w.x.mapBytes != 0 {
		t.Fatalf("after dropping all: got %+v, repeated %d, map bytes %d, want none", st, w.x.repeated, w.x.mapBytes)
	}
}

func TestHistoriesAgainstModel(t *testing.T) {
	for _, test := range []struct {
		name   string
		blocks []int
	}{
		{"equal blocks", []int{4}},
		{"larger blocks", []int{4, 8, 16}},
		{"smaller blocks", []int{1, 2, 4}},
		{"all sizes", []int{1, 2, 4, 8, 12}},
	} {
		t.Run(test.name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) { history(t, test.blocks, 0) })
		})
	}
}

// Under a byte budget matches may be shorter than what the targets hold, never longer.
func TestBudgetNeverOverCredits(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) { history(t, []int{2, 4, 8}, 12000) })
}

func FuzzHistory(f *testing.F) {
	f.Add([]byte("a seed for random histories: store, remove, clear, drop"))
	f.Add(bytes.Repeat([]byte{1, 0, 0, 0, 0, 0, 0, 0}, 64)) // the smallest choices
	f.Add(bytes.Repeat([]byte{255, 3, 17, 128}, 512))
	f.Fuzz(rapid.MakeFuzz(func(t *rapid.T) { history(t, []int{1, 4, 8}, 0) }))
}
