package kvindex

import (
	"bytes"
	"fmt"
	"maps"
	"math"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// windowWorld plays the events of engines with sliding windows, and keeps by name what they hold.
type windowWorld struct {
	x       *Index
	bounded bool
	slots   map[Slot]*windowEngine
	now     time.Time
}

type windowEngine struct {
	target Target
	family uint64
	full   int32 // the group of full attention
	block  int   // of full attention
	groups []windowGroup
	held   map[int32]map[EngineHash]int // by group
	chains [][]uint32
}

const windowIndexBlock = 4

func (w *windowWorld) add(t *rapid.T, e *windowEngine) {
	e.held = map[int32]map[EngineHash]int{}
	s, err := w.x.Add(e.target, "m", 0)
	if err != nil {
		t.Fatal(err)
	}
	w.slots[s] = e
}

// names are the engine's names of a prompt's blocks of some size: those of the smallest blocks that end there.
func (e *windowEngine) names(tokens []uint32, block int) []EngineHash {
	fine := engineHashes(e.family, "m", "", "", tokens, nil, windowIndexBlock)
	each := block / windowIndexBlock
	var out []EngineHash
	for i := each - 1; i < len(fine); i += each {
		out = append(out, fine[i])
	}
	return out
}

func (e *windowEngine) has(group int32, h EngineHash) bool { return e.held[group][h] > 0 }

func (e *windowEngine) hold(group int32, h EngineHash) {
	if e.held[group] == nil {
		e.held[group] = map[EngineHash]int{}
	}
	e.held[group][h]++
}

// longest is the naive answer: the length in tokens of the longest prefix that is multiples of all blocks, whose blocks full
// attention has, and each window its last ones.
func (e *windowEngine) longest(tokens []uint32) int {
	full := 0
	for _, h := range e.names(tokens, e.block) {
		if !e.has(e.full, h) {
			break
		}
		full += e.block
	}
	for n := min(full, (len(tokens)-1)/windowIndexBlock*windowIndexBlock); n > 0; n-- {
		ok := n%e.block == 0
		for _, g := range e.groups {
			if e.held[g.id] == nil {
				continue // not announced
			}
			ok = ok && n%g.block == 0
			names := e.names(tokens, g.block)
			for i := max(0, n/g.block-max(1, (g.window+g.block-2)/g.block)); ok && i < n/g.block; i++ {
				ok = e.has(g.id, names[i])
			}
		}
		if ok {
			return n
		}
	}
	return 0
}

func (w *windowWorld) pick(t *rapid.T) (Slot, *windowEngine) {
	s := rapid.SampledFrom(slices.Sorted(maps.Keys(w.slots))).Draw(t, "slot")
	return s, w.slots[s]
}

// compute stores what a request computes, as vLLM does: the same tokens for all groups, of which windows skip blocks.
func (w *windowWorld) compute(t *rapid.T) {
	s, e := w.pick(t)
	unit := e.block
	for _, g := range e.groups {
		unit = lcm(unit, g.block)
	}
	var tokens []uint32
	if len(e.chains) > 0 && rapid.Bool().Draw(t, "again") {
		tokens = rapid.SampledFrom(e.chains).Draw(t, "chain")
		tokens = tokens[:rapid.IntRange(0, len(tokens)/unit).Draw(t, "branch")*unit]
	}
	for range rapid.IntRange(1, 6).Draw(t, "units") {
		tokens = append(slices.Clip(tokens), slices.Repeat([]uint32{rapid.Uint32Range(0, 2).Draw(t, "token")}, unit)...)
	}
	e.chains = append(e.chains, tokens)
	// It computes again from where its caches end, or from before that.
	names := e.names(tokens, e.block)
	from := 0
	for from < len(names) && e.has(e.full, names[from]) {
		from++
	}
	from = rapid.IntRange(0, from).Draw(t, "from") * e.block / unit * unit
	if w.bounded {
		from = 0 // the index may have lost the parent
	}
	if from == len(tokens) {
		return
	}
	events := []*Event{{Kind: Stored, Group: e.full, BlockSize: e.block, Hashes: names[from/e.block:], Tokens: tokens[from:]}}
	if from > 0 {
		events[0].Parent, events[0].HasParent = names[from/e.block-1], true
	}
	for _, g := range e.groups {
		ev := &Event{Kind: Stored, Group: g.id, Window: g.window, BlockSize: g.block}
		keep := rapid.SampledFrom([]int{0, 1, 1, 2}).Draw(t, "keep")
		for _, h := range e.names(tokens, g.block)[from/g.block:] {
			if keep == 2 || keep == 1 && rapid.Bool().Draw(t, "kept") {
				ev.Hashes = append(ev.Hashes, h)
			}
		}
		if rapid.IntRange(0, 5).Draw(t, "host") == 0 {
			ev.Tier = Host
		}
		if rapid.Bool().Draw(t, "before") {
			events = append([]*Event{ev}, events...)
		} else {
			events = append(events, ev)
		}
	}
	for _, ev := range events {
		if err := w.x.Apply(s, ev); err != nil {
			t.Fatalf("apply %+v: %v", ev, err)
		}
		if e.held[ev.Group] == nil {
			e.held[ev.Group] = map[EngineHash]int{}
		}
		if ev.Tier == Host {
			continue // taken back, so that removals need not know the tier
		}
		for _, h := range ev.Hashes {
			e.hold(ev.Group, h)
		}
	}
	for _, ev := range events {
		if ev.Tier == Host {
			ev.Kind = Removed
			if err := w.x.Apply(s, ev); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// reuse removes blocks of one group.
func (w *windowWorld) reuse(t *rapid.T) {
	s, e := w.pick(t)
	if len(e.held) == 0 {
		return
	}
	group := rapid.SampledFrom(slices.Sorted(maps.Keys(e.held))).Draw(t, "group")
	for range rapid.IntRange(1, 6).Draw(t, "blocks") {
		held := slices.Sorted(maps.Keys(e.held[group]))
		if len(held) == 0 {
			return
		}
		h := rapid.SampledFrom(held).Draw(t, "hash")
		if e.held[group][h]--; e.held[group][h] == 0 {
			delete(e.held[group], h)
		}
		if err := w.x.Apply(s, &Event{Kind: Removed, Group: group, Hashes: []EngineHash{h, 4711}}); err != nil {
			t.Fatal(err)
		}
	}
}

func (w *windowWorld) clear(t *rapid.T) {
	if rapid.IntRange(0, 5).Draw(t, "really") > 0 {
		return
	}
	s, e := w.pick(t)
	if rapid.Bool().Draw(t, "drop") {
		w.x.Drop(s)
		delete(w.slots, s)
		e.target.Rank++
		w.add(t, e)
		return
	}
	if err := w.x.Apply(s, &Event{Kind: Cleared}); err != nil {
		t.Fatal(err)
	}
	e.held = map[int32]map[EngineHash]int{}
}

func (w *windowWorld) copy(t *rapid.T) {
	if rapid.IntRange(0, 5).Draw(t, "really") > 0 {
		return
	}
	var b, again bytes.Buffer
	if err := w.x.Dump(&b, nil); err != nil {
		t.Fatal(err)
	}
	y, err := New(w.x.cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := y.Load(bytes.NewReader(b.Bytes())); err != nil {
		t.Fatal(err)
	}
	y.deferFrom, w.x = w.x.deferFrom, y
	if err := y.Dump(&again, nil); err != nil || !w.bounded && !bytes.Equal(again.Bytes(), b.Bytes()) && b.Len() != again.Len() {
		t.Fatalf("got another copy of the copy: %d and %d bytes, %v", b.Len(), again.Len(), err)
	}
}

// speculate sends a prompt that the engine then refuses, or whose credit expires.
func (w *windowWorld) speculate(t *rapid.T) {
	s, e := w.pick(t)
	if len(e.chains) == 0 {
		return
	}
	tokens := rapid.SampledFrom(e.chains).Draw(t, "chain")
	h := w.x.Hasher()
	hashes := h.AppendHashes(nil, h.Seed("m", "", ""), tokens, windowIndexBlock)
	c := w.x.SpeculatePrompt(s, hashes, len(tokens), w.now)
	if got, most := w.matched(s, tokens), (len(tokens)-1)/windowIndexBlock*windowIndexBlock; w.x.slots[s].windows != nil && got > most {
		t.Fatalf("a prompt of %d tokens on its way is credited with %d", len(tokens), got)
	}
	if rapid.Bool().Draw(t, "refused") {
		w.x.Withdraw(c)
		w.x.Withdraw(c)
	}
	w.now = w.now.Add(time.Minute)
	w.x.Expire(w.now)
}

// matched is what the index matches of a prompt, in tokens.
func (w *windowWorld) matched(s Slot, tokens []uint32) int {
	h := w.x.Hasher()
	var m Matches
	w.x.MatchPrompt(h.AppendHashes(nil, h.Seed("m", "", ""), tokens, windowIndexBlock), len(tokens), 0, &m)
	for _, got := range m.Holders {
		if got.Slot == s {
			return int(got.Total()+got.Speculative) * windowIndexBlock
		}
	}
	return 0
}

func (w *windowWorld) check(t *rapid.T) {
	checkInvariants(t, w.x)
	w.x.checkWindows(t)
	for s, e := range w.slots {
		for _, c := range e.chains[max(0, len(e.chains)-4):] {
			for _, cut := range []int{0, 1} {
				tokens := c[:len(c)-cut]
				got, want := w.matched(s, tokens), e.longest(tokens)
				if e.held[e.groups[0].id] == nil { // no windows yet: as without
					want = max(want, got)
				}
				if got > want || got < want && !w.bounded {
					t.Fatalf("%s %+v: got %d of %d tokens, want %d", e.target, e.groups, got, len(tokens), want)
				}
			}
		}
	}
}

// checkWindows compares what lookups read with the holdings.
func (x *Index) checkWindows(t fataler) {
	var sum int64
	for i := range x.slots {
		w := x.slots[i].windows
		sum += x.slots[i].mapBytes()
		if w == nil != (i >= len(x.windows) || x.windows[i] == nil) {
			t.Fatalf("slot %d: lookups read other windows", i)
		}
		if w == nil {
			continue
		}
		sum += int64(len(w.tails)) * tailBytes
		held, units, pending := map[Hash]uint64{}, map[uint64]uint32{}, 0
		for u, n := range w.units {
			units[u.name] += n
			if own := w.names[u.name].own; own != 0 {
				held[own] |= 1 << w.index(u.group)
			}
		}
		for name, n := range w.names {
			if n.units != units[name] || n.units == 0 {
				t.Fatalf("name %x: got %d units, want %d", name, n.units, units[name])
			}
			if n.own == 0 {
				pending++
			}
		}
		if !maps.Equal(held, w.held) || pending != w.pending || len(units) != len(w.names) {
			t.Fatalf("slot %d: got %v held and %d pending, want %v and %d", i, w.held, w.pending, held, pending)
		}
	}
	if sum != x.mapBytes {
		t.Fatalf("got %d map bytes, noted %d", sum, x.mapBytes)
	}
}

func windowHistory(t *rapid.T, maxBytes int64) {
	x, err := New(Config{BlockSize: windowIndexBlock, Key: Key{4, 5}, MaxBytes: maxBytes})
	if err != nil {
		t.Fatal(err)
	}
	x.deferFrom = rapid.SampledFrom([]int{1, 3, deferFrom}).Draw(t, "defer from")
	w := &windowWorld{x: x, bounded: maxBytes > 0, slots: map[Slot]*windowEngine{}, now: time.Unix(1000, 0)}
	for i := range 2 {
		e := &windowEngine{target: Target{Worker: fmt.Sprint(i)}, family: rapid.Uint64Range(1, 2).Draw(t, "family")}
		e.full = rapid.Int32Range(0, 2).Draw(t, "full")
		e.block = rapid.SampledFrom([]int{4, 4, 8}).Draw(t, "block")
		for g := range rapid.Int32Range(1, 3).Draw(t, "groups") {
			size := e.block * rapid.SampledFrom([]int{1, 1, 2}).Draw(t, "size")
			e.groups = append(e.groups, windowGroup{id: 10 + g, window: rapid.SampledFrom([]int{1, 2, 5, 16, 17}).Draw(t, "window"), block: size})
		}
		w.add(t, e)
	}
	t.Repeat(map[string]func(*rapid.T){
		"compute": w.compute, "compute2": w.compute, "reuse": w.reuse, "clear": w.clear, "copy": w.copy, "speculate": w.speculate, "": w.check,
	})
	for s := range w.slots {
		w.x.Drop(s)
	}
	if w.x.mapBytes != 0 || len(w.x.windows) != 0 {
		t.Fatalf("after dropping all: %d map bytes, %d slots with windows, want none", w.x.mapBytes, len(w.x.windows))
	}
}

func TestWindowsAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) { windowHistory(t, 0) })
}

// Under a byte budget matches may be shorter than what the engines serve, never longer.
func TestWindowsNeverOverCreditWithinABudget(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) { windowHistory(t, 6000) })
}

// Whatever groups, windows, blocks and names events have, what lookups read is what was stored, and nothing is left of a slot.
func TestStrangeWindows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		x, err := New(Config{BlockSize: windowIndexBlock, MaxBytes: rapid.SampledFrom([]int64{0, 20000}).Draw(t, "budget")})
		if err != nil {
			t.Fatal(err)
		}
		now := time.Unix(1000, 0)
		var tokens []uint32
		for i := range 32 {
			tokens = append(tokens, uint32(i/windowIndexBlock))
		}
		hashes := x.hasher.AppendHashes(nil, x.hasher.Seed("m", "", ""), tokens, windowIndexBlock)
		t.Repeat(map[string]func(*rapid.T){
			"events": func(t *rapid.T) {
				for range rapid.IntRange(1, 12).Draw(t, "events") {
					s, err := x.Add(Target{Worker: "w", Rank: rapid.Int32Range(0, 1).Draw(t, "rank")}, "m", 0)
					if err != nil {
						t.Fatal(err)
					}
					e := Event{
						Kind: rapid.SampledFrom([]EventKind{Stored, Stored, Stored, Removed, Removed, Removed, Stored, Cleared}).Draw(t, "kind"),
						Tier: rapid.SampledFrom([]Tier{Device, Device, Device, Disk, NumTiers}).Draw(t, "tier"), Group: rapid.Int32Range(-1, 80).Draw(t, "group"),
						Window:    rapid.SampledFrom([]int{math.MinInt, -1, 0, 1, 4, 9, 1 << 30, math.MaxInt}).Draw(t, "window"),
						BlockSize: rapid.SampledFrom([]int{-4, 0, 1, 4, 6, 8, 12, 20, 28, 1 << 20, math.MaxInt}).Draw(t, "block"),
					}
					if rapid.Bool().Draw(t, "few groups") {
						e.Group = max(0, e.Group%3)
					}
					for range rapid.IntRange(0, 8).Draw(t, "blocks") {
						e.Hashes = append(e.Hashes, EngineHash(rapid.IntRange(0, 12).Draw(t, "name")))
					}
					if rapid.Bool().Draw(t, "full") {
						for i := range e.Hashes { // one name for a block, as engines have it
							e.Hashes[i] = EngineHash(i + 1)
						}
						e.Window, e.BlockSize, e.Tokens = 0, 4, tokens[:4*len(e.Hashes)]
					}
					_ = x.Apply(s, &e)
				}
			},
			"send": func(t *rapid.T) {
				n := rapid.IntRange(0, len(hashes)).Draw(t, "blocks")
				c := x.SpeculatePrompt(Slot(rapid.IntRange(0, 3).Draw(t, "slot")), hashes[:n], rapid.IntRange(-1, 40).Draw(t, "tokens"), now)
				if rapid.Bool().Draw(t, "refused") {
					x.Withdraw(c)
				}
				now = now.Add(20 * time.Second)
				x.Expire(now)
			},
			"drop": func(t *rapid.T) { x.Drop(Slot(rapid.IntRange(0, 3).Draw(t, "slot"))) },
			"copy": func(t *rapid.T) {
				var b bytes.Buffer
				y, _ := New(x.cfg)
				if err := x.Dump(&b, nil); err != nil {
					t.Fatal(err)
				}
				if _, err := y.Load(&b); err != nil {
					t.Fatal(err)
				}
				y.checkWindows(t)
			},
			"": func(t *rapid.T) {
				checkInvariants(t, x)
				x.checkWindows(t)
				var m Matches
				x.MatchPrompt(hashes, rapid.IntRange(-1, 40).Draw(t, "of tokens"), 0, &m)
				for _, h := range m.Holders {
					if n := int(h.Total() + h.Speculative); n < 1 || n > len(hashes) {
						t.Fatalf("got %d blocks of %d", n, len(hashes))
					}
				}
			},
		})
		for i := range x.slots {
			x.Drop(Slot(i))
		}
		if x.mapBytes != 0 || len(x.windows) != 0 {
			t.Fatalf("after dropping all: %d map bytes, %d slots with windows, want none", x.mapBytes, len(x.windows))
		}
	})
}

// promptOf are tokens of blocks, and their hashes for the model "m".
func promptOf(x *Index, blocks ...uint32) ([]uint32, []Hash) {
	var tokens []uint32
	for _, b := range blocks {
		tokens = append(tokens, slices.Repeat([]uint32{b}, x.cfg.BlockSize)...)
	}
	return tokens, x.hasher.AppendHashes(nil, x.hasher.Seed("m", "", ""), tokens, x.cfg.BlockSize)
}

// windowedSlot has windows of two blocks, and holds a prompt of eight blocks, whose windows are at its end only.
func windowedSlot(t *testing.T) (x *Index, s Slot, tokens []uint32, hashes []Hash) {
	t.Helper()
	x, err := New(Config{BlockSize: 4})
	if err != nil {
		t.Fatal(err)
	}
	if s, err = x.Add(Target{Worker: "w"}, "m", 4); err != nil {
		t.Fatal(err)
	}
	tokens, hashes = promptOf(x, 1, 2, 3, 4, 5, 6, 7, 8)
	names := engineHashes(1, "m", "", "", tokens, nil, 4)
	for _, e := range []*Event{
		{Kind: Stored, BlockSize: 4, Hashes: names, Tokens: tokens},
		{Kind: Stored, Group: 1, Window: 9, BlockSize: 4, Hashes: names[6:]},
	} {
		if err := x.Apply(s, e); err != nil {
			t.Fatal(err)
		}
	}
	return x, s, tokens, hashes
}

func lengthOf(x *Index, hashes []Hash, tokens int) (held, sent int) {
	var m Matches
	x.MatchPrompt(hashes, tokens, 0, &m)
	if len(m.Holders) == 0 {
		return 0, 0
	}
	return int(m.Holders[0].Total()), int(m.Holders[0].Speculative)
}

// A prompt on its way is credited at its end, where its engine keeps the windows, and nowhere else.
func TestWindowsOfPromptsOnTheirWay(t *testing.T) {
	x, s, _, hashes := windowedSlot(t)
	if held, _ := lengthOf(x, hashes, 33); held != 8 {
		t.Fatalf("got %d blocks, want 8", held)
	}
	if held, _ := lengthOf(x, hashes[:5], 21); held != 0 {
		t.Errorf("a branch: got %d blocks, want 0: its windows are not kept", held)
	}
	_, next := promptOf(x, 1, 2, 3, 9, 9, 9, 9)
	_, longer := promptOf(x, 1, 2, 3, 9, 9, 9, 9, 7)
	now := time.Unix(100, 0)
	for _, c := range []struct {
		name                      string
		tokens, resend, continued int
	}{
		{"ends within a block", 30, 7, 7},
		{"ends with a block", 28, 6, 6},
	} {
		credit := x.SpeculatePrompt(s, next, c.tokens, now)
		held, sent := lengthOf(x, next, c.tokens)
		if held+sent != c.resend {
			t.Errorf("%s, again: got %d blocks, want %d", c.name, held+sent, c.resend)
		}
		if held, sent = lengthOf(x, longer, 33); held+sent != c.continued {
			t.Errorf("%s, continued: got %d blocks, want %d", c.name, held+sent, c.continued)
		}
		if held, sent = lengthOf(x, next[:5], 21); held+sent != 0 {
			t.Errorf("%s, a branch: got %d blocks, want 0", c.name, held+sent)
		}
		x.Withdraw(credit)
		if held, sent = lengthOf(x, next, 30); held+sent != 0 {
			t.Errorf("%s, withdrawn: got %d blocks, want 0", c.name, held+sent)
		}
	}
	x.SpeculatePrompt(s, next, 30, now)
	x.Expire(now.Add(time.Minute))
	if held, sent := lengthOf(x, next, 30); held+sent != 0 || len(x.slots[s].windows.tails) != 0 {
		t.Errorf("expired: got %d blocks, want 0", held+sent)
	}
}

// What events say about the end of a prompt replaces its credit.
func TestEventsReplaceTheCreditOfWindows(t *testing.T) {
	x, s, _, _ := windowedSlot(t)
	tokens, next := promptOf(x, 1, 2, 3, 9, 9)
	names := engineHashes(1, "m", "", "", tokens, nil, 4)
	x.SpeculatePrompt(s, next, 21, time.Unix(100, 0))
	if held, sent := lengthOf(x, next, 21); held+sent != 5 {
		t.Fatalf("on its way: got %d blocks, want 5", held+sent)
	}
	store := &Event{Kind: Stored, BlockSize: 4, Hashes: names[3:], Tokens: tokens[12:], Parent: names[2], HasParent: true}
	if err := x.Apply(s, store); err != nil {
		t.Fatal(err)
	}
	if held, sent := lengthOf(x, next, 21); held+sent != 0 {
		t.Errorf("stored without windows: got %d blocks, want 0", held+sent)
	}
	if err := x.Apply(s, &Event{Kind: Stored, Group: 1, Window: 9, BlockSize: 4, Hashes: names[3:]}); err != nil {
		t.Fatal(err)
	}
	if held, _ := lengthOf(x, next, 21); held != 5 {
		t.Errorf("stored with windows: got %d blocks, want 5", held)
	}
}

// Blocks of windows that the index cannot place are refused, and the target matches as one without windows.
func TestWindowsOfOtherBlockSizes(t *testing.T) {
	for _, c := range []struct {
		name  string
		event Event
		want  error
	}{
		{"smaller blocks", Event{Window: 9, BlockSize: 2}, ErrBlockSize},
		{"no multiple", Event{Window: 9, BlockSize: 6}, ErrBlockSize},
		{"a huge block", Event{Window: 9, BlockSize: 1 << 22}, ErrBlockSize},
		{"twice the size", Event{Window: 9, BlockSize: 8}, nil},
		{"a long window", Event{Window: 1 << 40, BlockSize: 4}, nil},
		{"the longest window", Event{Window: math.MaxInt, BlockSize: 4}, nil},
	} {
		x, err := New(Config{BlockSize: 4})
		if err != nil {
			t.Fatal(err)
		}
		s, err := x.Add(Target{Worker: "w"}, "m", 4)
		if err != nil {
			t.Fatal(err)
		}
		tokens, hashes := promptOf(x, 1, 2, 3, 4)
		names := engineHashes(1, "m", "", "", tokens, nil, 4)
		if err := x.Apply(s, &Event{Kind: Stored, BlockSize: 4, Hashes: names, Tokens: tokens}); err != nil {
			t.Fatal(err)
		}
		c.event.Kind, c.event.Group = Stored, 1
		want := 4
		if err := x.Apply(s, &c.event); err != c.want { //nolint:errorlint // never wrapped
			t.Errorf("%s: got %v, want %v", c.name, err, c.want)
		} else if err == nil {
			want = 0
		}
		if held, _ := lengthOf(x, hashes, 17); held != want {
			t.Errorf("%s: got %d blocks, want %d", c.name, held, want)
		}
		var b bytes.Buffer
		y, _ := New(x.cfg)
		if err := x.Dump(&b, nil); err != nil {
			t.Fatal(err)
		}
		if _, err := y.Load(&b); err != nil {
			t.Errorf("%s: the copy: %v", c.name, err)
		} else if held, _ := lengthOf(y, hashes, 17); held != want {
			t.Errorf("%s: got %d blocks in the copy, want %d", c.name, held, want)
		}
	}
}

// Without windows a snapshot has the form that older replicas read.
func TestSnapshotVersions(t *testing.T) {
	x, s, _, hashes := windowedSlot(t)
	for _, want := range []byte{2, 1} {
		var b bytes.Buffer
		if err := x.Dump(&b, nil); err != nil {
			t.Fatal(err)
		}
		if got := b.Bytes()[len(snapshotMagic)]; got != want {
			t.Errorf("got version %d, want %d", got, want)
		}
		y, err := New(x.cfg)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := y.Load(&b); err != nil {
			t.Fatal(err)
		}
		for n := range hashes {
			a, _ := lengthOf(x, hashes[:n+1], 4*n+5)
			if b, _ := lengthOf(y, hashes[:n+1], 4*n+5); a != b {
				t.Errorf("%d blocks: got %d in the copy, want %d", n+1, b, a)
			}
		}
		if err := x.Apply(s, &Event{Kind: Cleared}); err != nil {
			t.Fatal(err)
		}
	}
}

// processorTime returns the processor time of this process so far.
func processorTime(t *testing.T) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// longPrompt is a prompt of this many blocks that one slot holds, in an index of blocks of 16.
func longPrompt(t testing.TB, blocks int) (x *Index, s Slot, tokens []uint32, hashes []Hash, names []EngineHash) {
	t.Helper()
	x, err := New(Config{BlockSize: 16})
	if err != nil {
		t.Fatal(err)
	}
	if s, err = x.Add(Target{Worker: "w"}, "m", 16); err != nil {
		t.Fatal(err)
	}
	numbers := make([]uint32, blocks)
	for i := range numbers {
		numbers[i] = uint32(i)
	}
	tokens, hashes = promptOf(x, numbers...)
	names = engineHashes(1, "m", "", "", tokens, nil, 16)
	if err := x.Apply(s, &Event{Kind: Stored, BlockSize: 16, Hashes: names, Tokens: tokens}); err != nil {
		t.Fatal(err)
	}
	return x, s, tokens, hashes, names
}

// A long window that is there and a short one that is not: each block is looked up one time for each. Before, a lookup took the
// square of the blocks, 0.9 s for these.
func TestCostOfWindowsThatDiffer(t *testing.T) {
	x, s, _, hashes, names := longPrompt(t, 16000)
	for _, e := range []*Event{
		{Kind: Stored, Group: 1, Window: 128000, BlockSize: 16, Hashes: names},
		{Kind: Stored, Group: 2, Window: 16, BlockSize: 16, Hashes: names[:1]},
	} {
		if err := x.Apply(s, e); err != nil {
			t.Fatal(err)
		}
	}
	from := processorTime(t)
	for range 20 {
		if held, _ := lengthOf(x, hashes, 16*16000+1); held != 1 {
			t.Fatalf("got %d blocks, want 1", held)
		}
	}
	if took := processorTime(t) - from; took > 4*time.Second {
		t.Errorf("20 lookups took %s", took)
	}
}

// Names that mean nothing between those of a prompt that was just stored: the search for them ends. Before, an event took the
// product of both, 1.5 s for 64,000 blocks.
func TestCostOfUnknownNamesOfWindows(t *testing.T) {
	x, s, tokens, hashes, names := longPrompt(t, 100000)
	strange := make([]EngineHash, len(names))
	for i := range strange {
		strange[i] = EngineHash(i + 1)
	}
	strange[0] = names[len(names)-maxLast] // so that all might be of this prompt
	events := []*Event{
		{Kind: Stored, Group: 1, Window: 16, BlockSize: 16},
		{Kind: Stored, BlockSize: 16, Hashes: names, Tokens: tokens},
		{Kind: Stored, Group: 1, Window: 16, BlockSize: 16, Hashes: names[len(names)-1:]},
	}
	for range 5 {
		events = append(events, &Event{Kind: Stored, Group: 1, Window: 16, BlockSize: 16, Hashes: strange})
	}
	from := processorTime(t)
	for _, e := range events {
		if err := x.Apply(s, e); err != nil {
			t.Fatal(err)
		}
	}
	if took := processorTime(t) - from; took > 4*time.Second {
		t.Errorf("it took %s", took)
	}
	if held, _ := lengthOf(x, hashes, 16*len(hashes)+1); held != len(names) {
		t.Errorf("got %d blocks, want %d", held, len(names))
	}
	x.checkWindows(t)
}

// The memory of windows is what is accounted, and comes back when most blocks are removed, one by one.
func TestMemoryOfWindows(t *testing.T) {
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	for _, groups := range []int32{1, 6, 60} {
		x, s, _, _, _ := longPrompt(t, 1)
		names := make([]EngineHash, 30000)
		for i := range names {
			names[i] = EngineHash(mixName(uint64(i + 1)))
		}
		empty, noted := heap(), x.bytes()
		for g := range groups {
			if err := x.Apply(s, &Event{Kind: Stored, Group: 1 + g, Window: 64, BlockSize: 16, Hashes: names}); err != nil {
				t.Fatal(err)
			}
		}
		full := heap() - empty
		noted = x.bytes() - noted
		if full > noted*3/2 || full < noted/3 {
			t.Errorf("%d groups: got %d bytes, noted %d", groups, full, noted)
		}
		for g := range groups {
			for i := range names[10:] {
				if err := x.Apply(s, &Event{Kind: Removed, Group: 1 + g, Hashes: names[10+i : 11+i]}); err != nil {
					t.Fatal(err)
				}
			}
		}
		if left := heap() - empty; left > full/8 {
			t.Errorf("%d groups, removed: got %d bytes of %d, want an eighth", groups, left, full)
		}
		x.checkWindows(t)
	}
}

// BenchmarkMatchWindows looks up a prompt of 4,000 blocks that 32 targets hold, whose windows of 8 or 64 blocks are at its end,
// or nowhere.
func BenchmarkMatchWindows(b *testing.B) {
	for _, c := range []struct {
		name   string
		window int
		kept   bool
	}{{"none", 0, false}, {"kept 8", 128, true}, {"kept 64", 1024, true}, {"lost 8", 128, false}, {"lost 64", 1024, false}} {
		b.Run(c.name, func(b *testing.B) {
			x, err := New(Config{BlockSize: 16})
			if err != nil {
				b.Fatal(err)
			}
			blocks := make([]uint32, 4000)
			for i := range blocks {
				blocks[i] = uint32(i)
			}
			tokens, hashes := promptOf(x, blocks...)
			names := engineHashes(1, "m", "", "", tokens, nil, 16)
			for i := range int32(32) {
				s, err := x.Add(Target{Worker: "w", Rank: i}, "m", 16)
				if err != nil {
					b.Fatal(err)
				}
				if err := x.Apply(s, &Event{Kind: Stored, BlockSize: 16, Hashes: names, Tokens: tokens}); err != nil {
					b.Fatal(err)
				}
				kept := names[len(names)-64:]
				if !c.kept {
					kept = nil
				}
				if c.window > 0 {
					if err := x.Apply(s, &Event{Kind: Stored, Group: 1, Window: c.window, BlockSize: 16, Hashes: kept}); err != nil {
						b.Fatal(err)
					}
				}
			}
			var m Matches
			for b.Loop() {
				x.Match(hashes, &m)
			}
		})
	}
}

// Lookups run while the windows of targets come, change and go.
func TestLookupsDuringChangesOfWindows(t *testing.T) {
	x, s, tokens, hashes := windowedSlot(t)
	names := engineHashes(1, "m", "", "", tokens, nil, 4)
	var wg sync.WaitGroup
	done := make(chan struct{})
	for range 2 {
		wg.Go(func() {
			var m Matches
			for {
				select {
				case <-done:
					return
				default:
				}
				x.MatchPrompt(hashes, 33, 0, &m)
				for _, h := range m.Holders {
					if n := h.Total() + h.Speculative; h.Slot == s && (n == 0 || n > 8) {
						t.Errorf("got %d blocks of 8", n)
						return
					}
				}
			}
		})
	}
	for i := range 2000 {
		other, err := x.Add(Target{Worker: "other", Rank: int32(i % 3)}, "m", 4)
		if err != nil {
			t.Fatal(err)
		}
		for _, at := range []Slot{s, other} {
			for _, e := range []*Event{
				{Kind: Stored, Group: 1 + int32(i%3), Window: 5 + i%7, BlockSize: 4, Hashes: names[i%8:]},
				{Kind: Stored, BlockSize: 4, Hashes: names, Tokens: tokens},
				{Kind: Removed, Group: 1 + int32(i%3), Hashes: names[i%8:]},
			} {
				if err := x.Apply(at, e); err != nil {
					t.Fatal(err)
				}
			}
			x.Withdraw(x.SpeculatePrompt(at, hashes, 30, time.Unix(int64(i), 0)))
		}
		if i%5 == 0 {
			if err := x.Apply(s, &Event{Kind: Cleared}); err != nil {
				t.Fatal(err)
			}
		}
		x.Drop(other)
	}
	close(done)
	wg.Wait()
	checkInvariants(t, x)
	x.checkWindows(t)
}

// TestLoneWindow: an engine whose only group has a window keeps the window before a prompt's last token, and that is what a
// prompt on its way is credited with, if its beginning is part of it.
func TestLoneWindow(t *testing.T) {
	x, err := New(Config{BlockSize: 16, SpeculativeTTL: time.Minute, MaxSpeculative: 100})
	if err != nil {
		t.Fatal(err)
	}
	s, err := x.Add(Target{Worker: "w", Rank: NoRank}, "m", 16)
	if err != nil {
		t.Fatal(err)
	}
	h := x.Hasher()
	hashes := func(first uint32, tokens int) []Hash {
		ids := make([]uint32, tokens)
		for i := range ids {
			ids[i] = first + uint32(i)
		}
		return h.AppendHashes(nil, h.Seed("m", "", ""), ids, 16)
	}
	for _, c := range []struct{ lone, tokens, want int }{{0, 48, 3}, {64, 48, 2}, {64, 49, 3}, {64, 64, 3}, {64, 65, 0}, {64, 200, 0}, {0, 200, 12}} {
		event := Event{Kind: Stored, Hashes: []EngineHash{EngineHash(c.tokens)}, Tokens: make([]uint32, 16), BlockSize: 16, Lone: c.lone}
		if err := x.Apply(s, &event); err != nil {
			t.Fatal(err)
		}
		prompt := hashes(uint32(1000*(c.tokens+c.lone)), c.tokens)
		var m Matches
		x.SpeculatePrompt(s, prompt, c.tokens, time.Unix(0, 0))
		got := 0
		if x.Match(prompt, &m); len(m.Holders) > 0 {
			got = int(m.Holders[0].Speculative)
		}
		if got != c.want {
			t.Errorf("%d tokens, a window of %d: got a credit of %d blocks, want %d", c.tokens, c.lone, got, c.want)
		}
	}
}

// TestLoneWindowOfAnOldSnapshot: earlier versions kept a group with a window that is the only one as a window. And what a Cleared
// event with Lone clears.
func TestLoneWindowOfAnOldSnapshot(t *testing.T) {
	x, err := New(Config{BlockSize: 16})
	if err != nil {
		t.Fatal(err)
	}
	s, err := x.Add(Target{Worker: "w", Rank: NoRank}, "m", 16)
	if err != nil {
		t.Fatal(err)
	}
	ids := make([]uint32, 16)
	prompt := x.Hasher().AppendHashes(nil, x.Hasher().Seed("m", "", ""), ids, 16)
	stored := func(lone int) Event {
		return Event{Kind: Stored, Hashes: []EngineHash{7}, Tokens: ids, BlockSize: 16, Lone: lone}
	}
	for i, c := range []struct {
		event Event
		want  uint32
	}{
		{Event{Kind: Stored, Hashes: []EngineHash{7}, BlockSize: 16, Window: 64}, 0}, {stored(64), 1}, {Event{Kind: Cleared, Lone: 1}, 0},
		{stored(0), 1}, {Event{Kind: Cleared, Lone: 1}, 1}, {Event{Kind: Cleared}, 0},
	} {
		if err := x.Apply(s, &c.event); err != nil {
			t.Fatal(err)
		}
		var m Matches
		got := uint32(0)
		if x.Match(prompt, &m); len(m.Holders) > 0 {
			got = m.Holders[0].Blocks[Device]
		}
		if got != c.want {
			t.Errorf("after event %d: got %d blocks, want %d", i, got, c.want)
		}
	}
}

// TestUnused: an engine may compute again the last of its blocks that it could use, of a prompt and before its windows count.
func TestUnused(t *testing.T) {
	x, err := New(Config{BlockSize: 16})
	if err != nil {
		t.Fatal(err)
	}
	ids := make([]uint32, 128)
	for slot, c := range []struct {
		size, window int
		want         [3]int // blocks of a prompt of 128, 127 and 16 tokens
	}{{16, 0, [3]int{6, 6, 0}}, {32, 0, [3]int{4, 4, 0}}, {16, 17, [3]int{6, 6, 0}}} {
		s, err := x.Add(Target{Worker: strconv.Itoa(slot), Rank: NoRank}, "m", c.size)
		if err != nil {
			t.Fatal(err)
		}
		full := Event{Kind: Stored, Hashes: make([]EngineHash, 128/c.size), Tokens: ids, BlockSize: c.size}
		for i := range full.Hashes {
			full.Hashes[i] = EngineHash(i + 1)
		}
		if err := x.Apply(s, &full); err != nil {
			t.Fatal(err)
		}
		if c.window > 0 {
			if err := x.Apply(s, &Event{Kind: Stored, Group: 1, Window: c.window, Hashes: full.Hashes[5:6], BlockSize: c.size}); err != nil {
				t.Fatal(err)
			}
		}
		h := x.Hasher()
		for i, tokens := range []int{128, 127, 16} {
			var m Matches
			x.MatchPrompt(h.AppendHashes(nil, h.Seed("m", "", ""), ids[:tokens], 16), tokens, 1, &m)
			got := 0
			for _, held := range m.Holders {
				if held.Slot == s {
					got = int(held.Total())
				}
			}
			if got != c.want[i] {
				t.Errorf("blocks of %d, a window of %d, %d tokens: got %d blocks, want %d", c.size, c.window, tokens, got, c.want[i])
			}
		}
	}
}
