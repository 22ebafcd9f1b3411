// Package kvindex tracks which targets, (worker, data-parallel rank) pairs, hold which blocks of KV cache, based on the
// engines' events, and reports how much of a prompt each target holds. It is a pure core: it has no goroutines, clocks
// or I/O except the reader and writer of a snapshot.
//
//	x, err := kvindex.New(kvindex.Config{BlockSize: 16, Key: key})
//	slot, err := x.Add(kvindex.Target{Worker: "10.0.0.7:8000", Rank: 3}, "qwen3", 16)
//
//	// a feed applies events, in order for each slot
//	err = x.Apply(slot, &event)
//
//	// a request hashes its tokens and looks them up
//	h := x.Hasher()
//	hashes = h.AppendHashes(hashes[:0], h.Seed("qwen3", adapter, salt), tokens, x.BlockSize())
//	x.Match(hashes, &matches)
//
//	// and records where it was sent
//	x.Speculate(slot, hashes, now)
//
// The example of package routing is a whole decision, from the hashes of a prompt to the release of its target. The
// exported names follow the module's version: until version 1 a minor version may change them, which CHANGELOG.md
// records.
//
// docs/index.md describes structure, guarantees, memory and performance.
package kvindex
