package kvindex

import "testing"

// A worker that claims more and more blocks displaces its own, not those of others.
func TestOneWorkerDisplacesItsOwnBlocks(t *testing.T) {
	for _, long := range []int{1, 200} {
		x := mustIndex(t, Config{BlockSize: 16, MaxBytes: 1 << 20})
		var honest [3]Slot
		const chains, blocks = 10, 50
		for i := range honest {
			s, err := x.Add(Target{Worker: string(rune('a' + i))}, "m", 16)
			if err != nil {
				t.Fatal(err)
			}
			for c := range uint64(chains) {
				content, names := contents(uint64(i)*chains+c, blocks)
				if err := x.ApplyContent(s, &Event{Kind: Stored, Hashes: names}, content); err != nil {
					t.Fatal(err)
				}
			}
			honest[i] = s
		}
		ranks := []Slot{mustAdd(t, x, 0, 16), mustAdd(t, x, 1, 16)} // of the worker w
		for i := range uint64(200_000 / long) {
			content, names := contents(1000+i, long)
			if err := x.ApplyContent(ranks[i%2], &Event{Kind: Stored, Hashes: names}, content); err != nil {
				t.Fatal(err)
			}
			if n := x.bytes(); n > x.cfg.MaxBytes {
				t.Fatalf("chains of %d: got %d bytes, want at most %d", long, n, x.cfg.MaxBytes)
			}
		}
		for i, s := range honest {
			if n := x.slots[s].held[Device]; n != chains*blocks {
				t.Errorf("chains of %d: got %d blocks left of worker %d, want %d", long, n, i, chains*blocks)
			}
		}
		if x.counters.evicted == 0 || x.slots[ranks[0]].held[Device] == 0 {
			t.Errorf("chains of %d: got %d blocks evicted and %d held, want some", long, x.counters.evicted, x.slots[ranks[0]].held[Device])
		}
	}
}
