package kvindex

import (
	"bytes"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// slowPages says which index blocks a target with pages of one token holds, by the rules in smallblocks.go and nothing else. A page
// is the prefix that it ends.
type slowPages struct {
	block  int
	units  map[slowPage]int
	linked map[slowPage]bool
	held   map[slowPage]bool // index blocks, by their last page
}

type slowPage struct {
	prefix string
	tier   Tier
}

func (m *slowPages) known(prefix string) bool {
	return m.units[slowPage{prefix, Device}]+m.units[slowPage{prefix, Host}] > 0
}

// unbroken reports whether the pages of to's index block that are longer than from, up to to, are linked.
func (m *slowPages) unbroken(from, to slowPage) bool {
	for n := len(from.prefix) + 1; n <= len(to.prefix); n++ {
		if !m.linked[slowPage{to.prefix[:n], to.tier}] {
			return false
		}
	}
	return true
}

// below calls do for the linked pages of q's index block that begin with q, on its tier.
func (m *slowPages) below(q slowPage, do func(slowPage)) {
	end := (len(q.prefix) + m.block - 1) / m.block * m.block
	for _, d := range slices.Collect(maps.Keys(m.linked)) {
		if d.tier == q.tier && m.linked[d] && len(d.prefix) >= len(q.prefix) && len(d.prefix) <= end && d.prefix[:len(q.prefix)] == q.prefix {
			do(d)
		}
	}
}

func (m *slowPages) store(q slowPage) {
	m.units[q]++
	if m.linked[q] {
		return
	}
	m.linked[q] = true
	m.below(q, func(d slowPage) {
		start := len(d.prefix) - m.block
		if start < 0 || start%m.block != 0 || !m.unbroken(slowPage{d.prefix[:start], d.tier}, d) {
			return
		}
		before := d.prefix[:start]
		if start == 0 || m.held[slowPage{before, Device}] || m.held[slowPage{before, Host}] {
			m.held[d] = true
		}
	})
}

func (m *slowPages) remove(q slowPage) {
	if m.units[q] == 0 {
		return
	}
	if m.units[q]--; m.units[q] > 0 {
		return
	}
	var gone []slowPage
	m.below(q, func(d slowPage) {
		if m.unbroken(q, d) {
			gone = append(gone, d)
		}
	})
	m.linked[q] = false
	for _, d := range gone {
		delete(m.linked, d)
		delete(m.held, d)
	}
}

func (m *slowPages) match(prompt string) (out [NumTiers]uint32) {
	var device, any uint32
	for n := m.block; n <= len(prompt); n += m.block {
		d := m.held[slowPage{prompt[:n], Device}]
		h := d || m.held[slowPage{prompt[:n], Host}]
		if !h {
			break
		}
		if any++; d && device == any-1 {
			device++
		}
	}
	out[Device], out[Host] = device, any-device
	return out
}

func TestPagesAgainstRules(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const block = 4
		x, err := New(Config{BlockSize: block, Key: Key{5}})
		if err != nil {
			t.Fatal(err)
		}
		s, err := x.Add(Target{Worker: "w"}, "m", 1)
		if err != nil {
			t.Fatal(err)
		}
		m := &slowPages{block: block, units: map[slowPage]int{}, linked: map[slowPage]bool{}, held: map[slowPage]bool{}}
		name := func(prefix string) EngineHash {
			h := EngineHash(1)
			for _, c := range prefix {
				h = h*4 + EngineHash(c-'a')
			}
			return h
		}
		// few chains, so that they often share prefixes and meet again
		chain := rapid.StringOfN(rapid.RuneFrom([]rune("ab")), 1, 10, -1)
		tier := rapid.SampledFrom([]Tier{Device, Device, Host})
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			c, on := chain.Draw(t, "chain"), tier.Draw(t, "tier")
			from := rapid.IntRange(0, len(c)-1).Draw(t, "from")
			switch rapid.IntRange(0, 20).Draw(t, "what") {
			case 0, 1, 2, 3, 4, 5, 6, 7, 8, 9:
				e := &Event{Kind: Stored, Tier: on, BlockSize: 1}
				if from > 0 {
					e.Parent, e.HasParent = name(c[:from]), true
				}
				known := from == 0 || m.known(c[:from])
				for n := from + 1; n <= len(c); n++ {
					e.Hashes, e.Tokens = append(e.Hashes, name(c[:n])), append(e.Tokens, uint32(c[n-1]))
					if known {
						m.store(slowPage{c[:n], on})
					}
				}
				if err := x.Apply(s, e); (err == nil) != known {
					t.Fatalf("store %q from %d: got %v, parent known %v", c, from, err, known)
				}
			case 20:
				var b bytes.Buffer
				if err := x.Dump(&b, func(Slot) []byte { return nil }); err != nil {
					t.Fatal(err)
				}
				if x, err = New(x.cfg); err != nil {
					t.Fatal(err)
				}
				if _, err := x.Load(&b); err != nil {
					t.Fatal(err)
				}
				for q, n := range m.units { // copies do not say which pages are linked
					if n > 0 {
						m.linked[q] = true
					}
				}
			default:
				e := &Event{Kind: Removed, Tier: on}
				to := rapid.IntRange(from+1, len(c)).Draw(t, "to")
				for n := from + 1; n <= to; n++ {
					e.Hashes = append(e.Hashes, name(c[:n]))
				}
				if rapid.Bool().Draw(t, "leaves first") {
					slices.Reverse(e.Hashes)
				}
				if err := x.Apply(s, e); err != nil {
					t.Fatal(err)
				}
				order := func(n int) int { return n }
				if e.Hashes[0] != name(c[:from+1]) {
					order = func(n int) int { return from + 1 + to - n }
				}
				for n := from + 1; n <= to; n++ {
					m.remove(slowPage{c[:order(n)], on})
				}
			}
			h := x.Hasher()
			var got Matches
			for i := range 1 << 8 {
				prompt, tokens := make([]byte, 8), make([]uint32, 8)
				for j := range prompt {
					prompt[j] = "ab"[i>>j&1]
					tokens[j] = uint32(prompt[j])
				}
				x.Match(h.AppendHashes(nil, h.Seed("m", "", ""), tokens, block), &got)
				var blocks [NumTiers]uint32
				if len(got.Holders) > 0 {
					blocks = got.Holders[0].Blocks
				}
				if want := m.match(string(prompt)); blocks != want {
					t.Fatalf("prompt %s: got %v, want %v", prompt, blocks, want)
				}
			}
		}
		checkInvariants(t, x)
	})
}

// An engine may have any number of pages without a parent, and of pages after one page, and remove them in any order.
func TestPagesCostInProportion(t *testing.T) {
	const n = 100_000
	x := mustIndex(t, Config{BlockSize: 16})
	roots, below := mustAdd(t, x, 0, 1), mustAdd(t, x, 1, 4)
	apply := func(s Slot, e *Event) {
		t.Helper()
		if err := x.Apply(s, e); err != nil {
			t.Fatal(err)
		}
	}
	from := processorTime(t)
	for i := range EngineHash(n) {
		apply(roots, &Event{Kind: Stored, Hashes: []EngineHash{i}, Tokens: []uint32{uint32(i)}, BlockSize: 1})
	}
	for i := range EngineHash(n) {
		apply(roots, &Event{Kind: Removed, Hashes: []EngineHash{i}})
	}

	chain := &Event{Kind: Stored, Hashes: []EngineHash{1, 2, 3}, Tokens: make([]uint32, 12), BlockSize: 4}
	apply(below, chain)
	last := func(i int) *Event {
		return &Event{Kind: Stored, Parent: 3, HasParent: true, Hashes: []EngineHash{EngineHash(i)}, Tokens: []uint32{uint32(i), 0, 0, 0}, BlockSize: 4}
	}
	for i := range n {
		apply(below, last(10+i))
	}
	if got := x.Stats().Blocks; got != n {
		t.Fatalf("got %d blocks, want %d", got, n)
	}
	first := &Event{Kind: Stored, Hashes: chain.Hashes[:1], Tokens: chain.Tokens[:4], BlockSize: 4}
	rest := &Event{Kind: Stored, Parent: 1, HasParent: true, Hashes: chain.Hashes[1:], Tokens: chain.Tokens[4:], BlockSize: 4}
	for i := range 1000 {
		apply(below, &Event{Kind: Removed, Hashes: first.Hashes})
		if got := x.Stats().Blocks; got != 0 {
			t.Fatalf("got %d blocks without the page before them, want none", got)
		}
		apply(below, first)
		apply(below, rest)
		apply(below, last(10+i)) // so that each time there is a block to remove
		if got := x.Stats().Blocks; got != 1 {
			t.Fatalf("got %d blocks after the page before them was stored again, want the one stored since", got)
		}
	}
	took := processorTime(t) - from
	t.Log(took)
	if took > 10*time.Second {
		t.Errorf("got %v of processor time, want at most 10 s", took)
	}
	for s := range Slot(2) {
		x.Drop(s)
	}
	if x.mapBytes != 0 {
		t.Errorf("got %d map bytes after all were dropped, want none", x.mapBytes)
	}
}
