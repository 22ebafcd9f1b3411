// Package kvindex knows which targets, (worker, data-parallel rank) pairs, hold
// which blocks of KV cache, from the events of the engines, and says for a prompt
// how much of it each holds. It is a pure core: no goroutines, clocks or I/O but
// the reader and writer of a snapshot.
//
//	x, err := kvindex.New(kvindex.Config{BlockSize: 16, Key: key})
//	slot, err := x.Add(kvindex.Target{Worker: "10.0.0.7:8000", Rank: 3}, "qwen3", 16)
//
//	// a feed hands in events, in order for each slot
//	err = x.Apply(slot, &event)
//
//	// a request hashes its tokens and asks
//	h := x.Hasher()
//	hashes = h.AppendHashes(hashes[:0], h.Seed("qwen3", adapter, salt), tokens, x.BlockSize())
//	x.Match(hashes, &matches)
//
//	// and tells where it was sent
//	x.Speculate(slot, hashes, now)
//
// docs/index.md describes structure, guarantees, memory and figures.
package kvindex
