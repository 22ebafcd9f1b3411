package routing

import (
	"fmt"
	"reflect"
	"testing"

	"github.com/kvlane/kvlane/kvindex"
)

// picks are the targets of requests with ties between eight ranks, each with no other
// request running.
func picks(t *testing.T, by Seed, seed uint64, ids int) []kvindex.Slot {
	t.Helper()
	c := DefaultConfig()
	c.Policy, c.HashSeed = neutral(), seed
	c.Policy.Pick.Seed = by
	r, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	for i := range int32(8) {
		r.SetTarget(kvindex.Slot(i), TargetInfo{Target: kvindex.Target{Worker: "w", Rank: i}, Ready: true})
	}
	var out []kvindex.Slot
	for i := range ids {
		d, err := r.PickRecorded(0, &Query{ID: fmt.Sprint("request-", i), Conversation: fmt.Sprint("conversation-", i), PromptTokens: 100}, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		if again, _, err := d.Rerun(); err != nil || again.Decode != d.Plan.Decode {
			t.Fatalf("got %v, %v when made again, want %v", again.Decode, err, d.Plan.Decode)
		}
		r.Release(0, d.Plan.Reservation)
		out = append(out, d.Plan.Decode)
	}
	return out
}

// The id of a request or conversation tells nobody without the seed where a tie goes; with it, it is the same
// each time, in a recorded decision too.
func TestTiesDependOnTheSeed(t *testing.T) {
	const ids = 64
	for _, by := range []Seed{SeedRequest, SeedConversation} {
		one, same, other := picks(t, by, 1, ids), picks(t, by, 1, ids), picks(t, by, 2, ids)
		if !reflect.DeepEqual(one, same) {
			t.Errorf("%s: got other targets with the same seed", by)
		}
		equal := 0
		for i := range one {
			if one[i] == other[i] {
				equal++
			}
		}
		if equal > ids/2 {
			t.Errorf("%s: got %d of %d ties equal with another seed, want about an eighth", by, equal, ids)
		}
	}
}

// Ids that meet in the table of conversations under one seed are spread under another.
func TestChosenConversationIDsDoNotMeet(t *testing.T) {
	const places, chosen = 1 << 10, 200
	known, secret := &Config{HashSeed: 1}, &Config{HashSeed: 2}
	met := map[uint32]int{}
	most := 0
	for i, found := 0, 0; found < chosen; i++ {
		id := fmt.Sprint("c", i)
		if uint32(known.keyOf(id).Hi)%places != 7 {
			continue
		}
		found++
		at := uint32(secret.keyOf(id).Hi) % places
		met[at]++
		most = max(most, met[at])
	}
	if most > 8 {
		t.Errorf("got %d of %d chosen ids in one place of %d", most, chosen, places)
	}
	if k := known.keyOf("a"); k == secret.keyOf("a") || k != known.keyOf("a") || k == (Key{}) || known.keyOf("") != (Key{}) {
		t.Errorf("got key %v, want one that depends on id and seed", k)
	}
}
