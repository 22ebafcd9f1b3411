package kvindex_test

import (
	"fmt"

	"github.com/kvlane/kvlane/kvindex"
)

func Example() {
	x, err := kvindex.New(kvindex.Config{BlockSize: 2})
	if err != nil {
		panic(err)
	}
	slot, err := x.Add(kvindex.Target{Worker: "worker-a", Rank: 1}, "model", 2)
	if err != nil {
		panic(err)
	}
	if err := x.Apply(slot, &kvindex.Event{
		Kind: kvindex.Stored, BlockSize: 2,
		Hashes: []kvindex.EngineHash{901, 902}, Tokens: []uint32{1, 2, 3, 4},
	}); err != nil {
		panic(err)
	}

	h := x.Hasher()
	prompt := h.AppendHashes(nil, h.Seed("model", "", ""), []uint32{1, 2, 3, 4, 5, 6, 7}, 2)
	var m kvindex.Matches
	x.Match(prompt, &m)
	fmt.Printf("%d blocks asked, slot %d holds %d\n", len(prompt), m.Holders[0].Slot, m.Holders[0].Blocks[kvindex.Device])
	// Output: 3 blocks asked, slot 0 holds 2
}
