package enginesim

import (
	"testing"

	"pgregory.net/rapid"
)

// The pool against a naive account: references, free blocks and the table agree after any history.
func TestPoolProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		unique := rapid.Bool().Draw(t, "unique")
		held := map[digest]int{}
		p := newPool(8, unique, func(d digest) { held[d]-- })
		var requests [][]*block
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			switch rapid.IntRange(0, 2).Draw(t, "op") {
			case 0:
				var req []*block
				for i := range rapid.IntRange(1, 4).Draw(t, "blocks") {
					k := cacheKey{hash: digest{byte(i), byte(rapid.IntRange(0, 3).Draw(t, "branch"))}}
					if b := p.lookup(k); b != nil && rapid.Bool().Draw(t, "reuse") {
						p.touch(b)
						req = append(req, b)
						continue
					}
					if p.free == 0 {
						break
					}
					b, fresh := p.store(p.allocate(), k)
					if fresh {
						held[k.hash]++
					}
					req = append(req, b)
				}
				requests = append(requests, req)
			case 1:
				if len(requests) > 0 {
					i := rapid.IntRange(0, len(requests)-1).Draw(t, "which")
					p.release(requests[i])
					requests = append(requests[:i], requests[i+1:]...)
				}
			case 2:
				if rapid.IntRange(0, 9).Draw(t, "clear") == 0 {
					p.clear()
					held = map[digest]int{}
				}
			}
			refs := map[*block]int{}
			for _, r := range requests {
				for _, b := range r {
					refs[b]++
				}
			}
			free := 0
			for _, b := range p.blocks {
				if b.refs != refs[b] {
					t.Fatalf("block %d has %d references, %d are held", b.id, b.refs, refs[b])
				}
				if b.refs == 0 {
					free++
				}
			}
			if free != p.free {
				t.Fatalf("free %d, counted %d", p.free, free)
			}
			for d, n := range held {
				if got := len(p.cached[cacheKey{hash: d}]); got != n {
					t.Fatalf("%x: %d copies, events say %d", d[:2], got, n)
				}
				if unique && n > 1 {
					t.Fatal("two copies in a tree")
				}
			}
		}
	})
}
