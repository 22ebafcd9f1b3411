package routing_test

import (
	"fmt"
	"time"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

// A request from the tokens of its prompt to its end: hash, match, pick, book, release.
func Example() {
	const block = 16
	index, err := kvindex.New(kvindex.Config{BlockSize: block})
	if err != nil {
		panic(err)
	}
	router, err := routing.New(routing.DefaultConfig())
	if err != nil {
		panic(err)
	}
	// Index and router share slots.
	for rank := range int32(2) {
		target := kvindex.Target{Worker: "w", Rank: rank}
		slot, err := index.Add(target, "model", block)
		if err != nil {
			panic(err)
		}
		router.SetTarget(slot, routing.TargetInfo{Target: target, Ready: true})
	}
	start := time.Now()

	// An earlier request left the first 64 of these 100 tokens on rank 1.
	tokens := make([]uint32, 100)
	hasher := index.Hasher()
	hashes := hasher.AppendHashes(nil, hasher.Seed("model", "", ""), tokens, block)
	index.Speculate(1, hashes[:4], start)

	var matches kvindex.Matches
	index.Match(hashes, &matches)
	var overlaps []routing.Overlap
	for _, h := range matches.Holders {
		o := routing.Overlap{Slot: h.Slot, Speculative: int32(h.Speculative) * block}
		for tier, blocks := range h.Blocks {
			o.Tokens[tier] = int32(blocks) * block
		}
		overlaps = append(overlaps, o)
	}

	plan, err := router.Pick(time.Since(start), &routing.Query{ID: "r1", PromptTokens: int64(len(tokens))}, overlaps, nil)
	if err != nil {
		panic(err)
	}
	index.Speculate(plan.Decode, hashes, time.Now()) // the next turn can count on them
	fmt.Printf("slot %d: %d tokens cached, %d to compute, %d queued\n", plan.Decode, plan.Matched, plan.Miss, router.Load(plan.Decode).Queue)

	router.FirstToken(time.Since(start), plan.Reservation)
	router.Release(time.Since(start), plan.Reservation)
	fmt.Println("load left:", router.Load(plan.Decode))
	// Output:
	// slot 1: 64 tokens cached, 36 to compute, 36 queued
	// load left: {0 0 0 0 0 0 0}
}
