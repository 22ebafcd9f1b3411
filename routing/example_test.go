package routing_test

import (
	"fmt"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

func Example() {
	r, err := routing.New(routing.DefaultConfig())
	if err != nil {
		panic(err)
	}
	for rank := range int32(2) {
		r.SetTarget(kvindex.Slot(rank), routing.TargetInfo{Target: kvindex.Target{Worker: "w", Rank: rank}, Ready: true})
	}

	// The index says that rank 1 holds 3,000 of the prompt's 4,000 tokens.
	overlaps := []routing.Overlap{{Slot: 1, Tokens: [kvindex.NumTiers]int32{kvindex.Device: 3000}}}
	plan, err := r.Pick(0, &routing.Query{ID: "r1", PromptTokens: 4000, Conversation: "chat-7"}, overlaps, nil)
	if err != nil {
		panic(err)
	}
	fmt.Println(plan.Decode, plan.Matched, plan.Miss, r.Load(1).Queue)

	r.FirstToken(0, plan.Reservation)
	r.Release(0, plan.Reservation)
	fmt.Println(r.Load(1) == routing.Load{})
	// Output:
	// 1 3000 1000 1000
	// true
}
