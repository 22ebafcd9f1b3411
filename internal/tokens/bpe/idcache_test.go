package bpe

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// TestStoreFillsUp: when the memory of texts is full, nearly all of the last texts are found, as few buckets had to evict one.
func TestStoreFillsUp(t *testing.T) {
	c := newStore(memoSlots, memoText, memoIDs)
	var keys [][]byte
	for i := range memoText / 256 {
		key := fmt.Appendf(nil, "%-250d", i)
		c.put(hashBytes(key), key, []uint32{uint32(i), 7})
		keys = append(keys, key)
	}
	found := 0
	for i, key := range keys {
		if ids, ok := c.get(hashBytes(key), key); ok {
			found++
			if !slices.Equal(ids, []uint32{uint32(i), 7}) {
				t.Fatalf("text %d: %v", i, ids)
			}
		}
	}
	if found < len(keys)*98/100 {
		t.Errorf("%d of %d texts are found, want 98 %%", found, len(keys))
	}
}

// TestStoreOverItsTurns: a store much smaller than what it gets returns the ids of a text or nothing, also where its positions
// are cleared, and nothing that is too large for a slot.
func TestStoreOverItsTurns(t *testing.T) {
	r := rand.New(rand.NewPCG(14, 1))
	for _, start := range []uint64{0, storeTurn - 5000} {
		c := newStore(64, 1<<10, 1<<9)
		c.textEnd, c.idsEnd = start, start
		hits, cleared := 0, false
		for range 20000 {
			n := r.IntN(300)
			key := []byte(strings.Repeat(fmt.Sprint(n), 1+n%7*10))
			want := slices.Repeat([]uint32{uint32(n)}, n%150)
			h := hashBytes(key) & 0xff // many that collide
			if ids, ok := c.get(h, key); ok {
				hits++
				if !slices.Equal(ids, want) {
					t.Fatalf("%q: %v, want %v", key, ids, want)
				}
				continue
			}
			before := c.textEnd
			c.put(h, key, want)
			cleared = cleared || c.textEnd < before
			ids, ok := c.get(h, key)
			if fits := len(key) <= 1<<8 && len(want) <= 1<<7; ok != fits || ok && !slices.Equal(ids, want) {
				t.Fatalf("%q after put: %v %v, want %v %v", key, ok, ids, fits, want)
			}
		}
		if hits < 100 || cleared != (start > 0) {
			t.Errorf("from %d: %d hits, cleared %v", start, hits, cleared)
		}
	}
	c := newStore(64, 1<<20, 1<<19)
	for n, want := range map[int]bool{65535: true, 65536: false} {
		key := make([]byte, n)
		c.put(1, key, make([]uint32, 3))
		if _, ok := c.get(1, key); ok != want {
			t.Errorf("a text of %d bytes: %v, want %v", n, ok, want)
		}
	}
}

// TestTokensDoNotMeet: with a hash whose words a file knows, tokens that begin or end with one of them share a place whatever the
// seed is: 200,000 of them loaded for minutes, and each search for one took as many steps.
func TestTokensDoNotMeet(t *testing.T) {
	const n = 20_000
	word := func(k uint64) []byte { return binary.LittleEndian.AppendUint64(nil, k) }
	for name, token := range map[string]func(i uint64) []byte{
		"that begin with the first word":          func(i uint64) []byte { return append(word(mulA), word(i)...) },
		"that begin with its complement":          func(i uint64) []byte { return append(word(^uint64(mulA)), word(i)...) },
		"whose last 16 bytes begin with a word":   func(i uint64) []byte { return slices.Concat(word(i), word(mulB), word(i)) },
		"whose first 32 bytes begin with a word":  func(i uint64) []byte { return slices.Concat(word(i), word(0), word(mulA), word(i), word(7), word(8)) },
		"that are numbers":                        func(i uint64) []byte { return fmt.Appendf(nil, "%d", i) },
		"that are numbers behind many equal ones": func(i uint64) []byte { return fmt.Appendf(nil, "%080d", i) },
	} {
		l := tokenList{}
		for i := range n {
			if err := l.add(token(uint64(i)), uint32(i)); err != nil {
				t.Fatal(err)
			}
		}
		v := &vocab{slots: make([]uint32, 2*1<<15), start: make([]uint32, n+1), blob: l.raw}
		for i, e := range l.entries {
			v.start[i+1] = e.to
		}
		farthest := uint64(0)
		for i := range uint32(n) {
			if b := v.bytes(i); v.put(i) {
				h := hashBytes(b)
				farthest = max(farthest, (v.search(h, b)-h)&uint64(len(v.slots)-1))
			} else {
				t.Fatalf("tokens %s: token %d repeats another one", name, i)
			}
			if farthest > 200 {
				break
			}
		}
		if farthest > 200 {
			t.Errorf("tokens %s: one is %d slots from its place, want at most 200", name, farthest)
		}
	}
}
